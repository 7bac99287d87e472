"""`push`: publishes a model, its code, processor and card, and a page to try it on."""

import sys
from pathlib import Path

<<<<<<< HEAD
from huggingface_hub import ModelCard
from transformers import PreTrainedConfig

from ..data.processors import load_processor
from ..hub.member_heads import load_circuits
from ..reports import Report
from ..uncertainty import CalibratedClassifier
from .folders import are_fine_tunings, check_is_hydra, load_config, load_model, made_by
from .options import argument, option, switch


SPACE, SPACE_FOLDER = "A page to try it on", "space"
CARD = "The card"


@dataclass(kw_only=True)
class CardOptions:
    """Contents of the card."""

    report: option(Path | None, "report.json of `evaluate` (default: DIR/evaluation/report.json)", "FILE", CARD) = None
    report_model: option(str | None, "the name of this model, if --report has several", "NAME", CARD) = None
    dataset: option(str | None, "the report's in-distribution data on the Hub", "NAME", CARD) = None
    base_model: option(str | None, "the backbone on the Hub", "NAME", CARD) = None
    license: option(str | None, 'for example "apache-2.0"', "ID", CARD) = None
    fine_tuning: option(str | None, "how the members were fine-tuned", "SENTENCE", CARD) = None

    def arguments(
        self, folder: Path, repo: str | None, config: PreTrainedConfig
    ) -> tuple[Report | None, dict[str, Any]]:
        """The report, if there is one, and the other arguments of `create_model_card`."""
        from ..hub.card import check_names

        check_names(repo_id=repo, base_model=self.base_model, dataset=self.dataset)
        path = self.report or folder / "evaluation" / "report.json"
        if self.report is not None and not path.exists():
            raise ValueError(f"there is no report {path}: pass the report.json of `hydra-transformers evaluate`")
        report = Report.from_json(path) if path.exists() else None
        arguments = {
            "dataset": self.dataset,
            "base_model": self.base_model,
            "license": self.license,
            "fine_tuning": self.fine_tuning or _how_made(folder),
            "circuits": load_circuits(folder, [config]),
            "fine_tunings": are_fine_tunings(folder) or None,
        }
        if report is None:
            if self.report_model is not None:
                raise ValueError("--report-model is a name in a report, and there is none: pass --report")
            return None, arguments
        if self.dataset is None:
            raise ValueError(f"name the data set that {path} was made with: pass --dataset")
        names = list(report.models)
        if self.report_model is None and len(names) > 1 and self.report is not None:
            raise ValueError(f"{path} has the models {', '.join(names)}: name this one with --report-model")
        if self.report_model not in (None, *names):
            raise ValueError(f"{path} has no model {self.report_model}: it has {', '.join(names)}")
        # A model comes first in the report of its own evaluation.
        return report, {**arguments, "report_model": self.report_model or names[0]}


def _how_made(folder: Path) -> str | None:
    """What `fuse --average-into` and `finetune --teacher` did."""
    found = made_by(folder)
    averaged, taught = found.get("averaged"), found.get("taught")
    sentences = [f"Each member is the mean of {averaged} fine-tunings."] if averaged else []
    sentences += ["Fused, they were tuned together, each with the labels and a teacher."] if taught else []
    return " ".join(sentences) or None


def push(
    folder: argument(Path, "DIR", "the output of `fuse`"),
=======
from .folders import check_is_hydra
from .options import argument, option, switch


def push(
    folder: argument(Path, "DIR", "a saved Hydra; a README.md in it is published as its card"),
>>>>>>> 8b3b779 (wip)
    repo: argument(str, "REPO", "me/my-hydra; created if it does not exist"),
    report: option(Path | None, "report.json of `evaluate` (default: DIR/evaluation/report.json)", "FILE") = None,
    dataset: option(str | None, "the report's in-distribution data on the Hub", "NAME") = None,
    base_model: option(str | None, "the pre-trained model on the Hub", "NAME") = None,
    license: option(str | None, 'for example "apache-2.0"', "ID") = None,
    private: switch("--private", "make a new repository private") = False,
    overwrite_card: switch("--overwrite-card", "replace the whole card on the Hub") = False,
<<<<<<< HEAD
    space: option(
        str | None,
        "me/my-page: publish the page of `hydra-transformers app` as a Space, too; its files are written to DIR/space first, "
        "or published as they are if they exist",
        "NAME",
        SPACE,
    ) = None,
=======
    space: option(str | None, "me/my-page: publish the page of `app` as a Space, too", "NAME") = None,
>>>>>>> 8b3b779 (wip)
) -> None:
    """Publish model, code, processor and card."""
    import tempfile

    from huggingface_hub import ModelCard

    from ..data.processors import load_processor
    from ..hub import push_hydra_to_hub, push_space_to_hub, write_space
    from ..hub.card import check_names
    from ..hub.member_heads import load_circuits
    from ..reports import Report
    from ..serving.saved_models import load_config, load_model
    from ..uncertainty import CalibratedClassifier

    config = load_config(str(folder))
    check_is_hydra(config, str(folder))
<<<<<<< HEAD
    report, arguments = fields.arguments(folder, repo, config)
    page = None if space is None else _space(folder, repo, space)
=======
    check_names(repo_id=repo, base_model=base_model, dataset=dataset)
    if space is not None:
        check_names(repo_id=space)
    path = report or folder / "evaluation" / "report.json"
    results = Report.from_json(path) if report is not None or path.exists() else None
    if results is not None and dataset is None:
        raise ValueError(f"name the data set that {path} was made with: pass --dataset")
>>>>>>> 8b3b779 (wip)
    if CalibratedClassifier.is_saved_in(folder):
        print(
            f"note: {folder} is published without its decision, which is for one data set's classes", file=sys.stderr
        )
    arguments = {"dataset": dataset, "base_model": base_model, "license": license}
    arguments["circuits"] = load_circuits(folder, [config])
    if results is not None:
        arguments["report_model"] = next(iter(results.models))  # a model comes first in its own report
    card = folder / "README.md"
    if card.exists():  # its owner has read this card, and may have edited it
        arguments = {"card": ModelCard.load(card)}
    commit = push_hydra_to_hub(
        load_model(str(folder)),
        repo,
        load_processor(str(folder), config),
        results,
        private=private or None,
        overwrite_card=overwrite_card,
        **arguments,
    )
    print(f"published: {getattr(commit, 'commit_url', commit)}")
    if space is not None:
        with tempfile.TemporaryDirectory() as files:
            commit = push_space_to_hub(write_space(Path(files) / "space", repo), space, private=private or None)
        print(f"published the page: {getattr(commit, 'commit_url', commit)}")
<<<<<<< HEAD


def _space(folder: Path, repo: str, space: str) -> Path:
    """The folder of the page, written if there is none yet."""
    from ..hub import write_space
    from ..hub.card import check_names

    check_names(repo_id=space)
    place = folder / SPACE_FOLDER
    if place.exists():
        print(f"note: {place} is published as it is; remove it to write it anew", file=sys.stderr)
        return place
    write_space(place, repo)
    print(f"The page's files are in {place}.", flush=True)
    return place
=======
>>>>>>> 8b3b779 (wip)
