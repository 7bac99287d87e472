"""`card`: the model card of a Hydra or a baseline."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn
from transformers import PreTrainedConfig

from .._io.files import write_atomically
from ..hub.member_heads import load_circuits
from ..reports.report import UncertaintyReport
from ..uncertainty import CalibratedClassifier
from .folders import are_fine_tunings, check_can_be_published, is_baseline, load_config, load_model
from .options import option, switch


CARD = "The card"


@dataclass(kw_only=True)
class CardOptions:
    """What the card is made of."""

    report: Annotated[
        Path | None, option("report.json of `evaluate` (default: DIR/evaluation/report.json)", "FILE", CARD)
    ] = None
    report_model: Annotated[
        str | None, option("which of the report's models this is, where --report has several", "NAME", CARD)
    ] = None
    dataset: Annotated[str | None, option("the report's in-distribution data on the Hub", "NAME", CARD)] = None
    base_model: Annotated[str | None, option("the backbone on the Hub", "NAME", CARD)] = None
    license: Annotated[str | None, option('for example "apache-2.0"', "ID", CARD)] = None
    fine_tuning: Annotated[str | None, option("how the members were fine-tuned", "SENTENCE", CARD)] = None

    def fields(
        self, folder: Path, repo: str | None, config: PreTrainedConfig
    ) -> tuple[UncertaintyReport | None, dict[str, Any]]:
        """The report, if there is one, and the arguments of `create_model_card`."""
        from ..hub.card import check_names

        check_names(repo_id=repo, base_model=self.base_model, dataset=self.dataset)
        path = self.report or folder / "evaluation" / "report.json"
        if self.report is not None and not path.exists():
            raise ValueError(f"there is no report {path}: pass the report.json of `hydra-transformers evaluate`")
        report = UncertaintyReport.from_json(path) if path.exists() else None
        if report is not None and self.dataset is None:
            raise ValueError(f"name the data set that {path} was made with: pass --dataset")
        fields = {
            "dataset": self.dataset,
            "base_model": self.base_model,
            "license": self.license,
            "fine_tuning": self.fine_tuning,
            "circuits": load_circuits(folder, [config]),
            "fine_tunings": are_fine_tunings(folder) or None,
        }
        if report is not None:
            fields["report_model"] = self._own_name(report, path)
        elif self.report_model is not None:
            raise ValueError("--report-model is a name in a report, and there is none: pass --report")
        return report, fields

    def _own_name(self, report: UncertaintyReport, path: Path) -> str:
        """The name of the model in a report; in that of its own evaluation it comes first."""
        names = list(report.models)
        if self.report_model is None and len(names) > 1 and self.report is not None:
            raise ValueError(
                f"{path} has the models {', '.join(names)}: say with --report-model which of them this is"
            )
        if self.report_model not in (None, *names):
            raise ValueError(f"{path} has no model {self.report_model}: it has {', '.join(names)}")
        return self.report_model or names[0]


def card(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="the output of `fuse`, or a saved baseline; gets README.md")
    ],
    fields: CardOptions,
    repo: Annotated[str | None, option("where the model will lie on the Hub, me/my-hydra", "REPO")] = None,
    overwrite: Annotated[bool, switch("--overwrite", "replace a README.md that is there")] = False,
) -> None:
    """Write the model card."""
    from ..hub import create_model_card

    config = load_config(str(folder))
    check_can_be_published(config, str(folder))
    path = folder / "README.md"
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: pass --overwrite to replace it")
    report, arguments = fields.fields(folder, repo, config)
    called = repo or "me/" + re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.")
    model = load_with_decision(folder)
    write_atomically(path, str(create_model_card(model, report, repo_id=called, **arguments)))
    print(f"the card is in {path}. Next: hydra-transformers push {folder} {repo or 'me/my-hydra'}")


def load_with_decision(folder: Path) -> nn.Module:
    """The model in a folder; a baseline with its decision, which lies beside it."""
    model = load_model(str(folder))
    is_decided = is_baseline(str(folder)) and CalibratedClassifier.is_saved_in(folder)
    return CalibratedClassifier.load(model, folder) if is_decided else model
