"""`card`: the model card of a Hydra or a baseline."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .._io.files import write_atomically
from ..hub.member_heads import load_circuits
from ..reports.report import UncertaintyReport
from ..reports.task_report import TaskReport, read_report
from ..uncertainty import CalibratedClassifier
from .folders import are_fine_tunings, check_is_hydra, is_baseline, load_config, load_model, made_by
from .options import argument, option, switch


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
    ) -> tuple[UncertaintyReport | TaskReport | None, dict[str, Any]]:
        """The report, if there is one, and the other arguments of `create_model_card`."""
        from ..hub.card import check_names

        check_names(repo_id=repo, base_model=self.base_model, dataset=self.dataset)
        path = self.report or folder / "evaluation" / "report.json"
        if self.report is not None and not path.exists():
            raise ValueError(f"there is no report {path}: pass the report.json of `hydra-transformers evaluate`")
        report = read_report(path) if path.exists() else None
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


def card(
    folder: argument(Path, "DIR", "the output of `fuse`, or a saved baseline; gets README.md"),
    fields: CardOptions,
    repo: option(str | None, "the model's future name on the Hub, me/my-hydra", "REPO") = None,
    overwrite: switch("--overwrite", "replace an existing README.md") = False,
) -> None:
    """Write the model card."""
    from ..hub import create_model_card

    config = load_config(str(folder))
    check_is_hydra(config, str(folder), or_baseline=True)
    path = folder / "README.md"
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: pass --overwrite to replace it")
    report, arguments = fields.arguments(folder, repo, config)
    repo_id = repo or "me/" + re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.")
    write_atomically(path, str(create_model_card(load_to_publish(folder), report, repo_id=repo_id, **arguments)))
    print(f"the card is in {path}. Next: hydra-transformers push {folder} {repo or 'me/my-hydra'}")


def load_to_publish(folder: Path) -> nn.Module:
    """The model in a folder; a baseline with its decision, which lies beside it."""
    model = load_model(str(folder))
    has_decision = is_baseline(str(folder)) and CalibratedClassifier.is_saved_in(folder)
    return CalibratedClassifier.load(model, folder) if has_decision else model
