"""The parts of a fusion report: titles, sentences and tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .table import NO_VALUE, Table
from .tables import COLUMNS, Part, Title, group_title, set_title


if TYPE_CHECKING:
    from ..uncertainty.paired import Change
    from .fusion_report import ClassifierMetrics, Fused, FusionReport

METRICS = ("accuracy", "nll", "ece")
DIVERSITY = {
    "not fused": "everything (not fused)",
    "attention": "attention alone (fused)",
    "mlp": "MLPs alone (attention shared too)",
}


def fusion_parts(report: "FusionReport") -> list[Part]:
    """The sentence and all tables."""
    groups = list(report.num_ood_rows)
    titles = [COLUMNS[metric].heading() for metric in METRICS]
    titles += [COLUMNS["auroc"].heading("" if group == "OOD" else group_title(group)) for group in groups]
    parts: list[Part] = [Title(f"Fusing {report.num_members} members: {report.verdict}", level=1), report.sentence]
    parts += [Title("Each member, alone → inside the fused model")]
    parts += [Table(["Member", *titles], _member_rows(report, groups)), Title("The ensemble")]
    parts += [Table(["", *titles, "NLL change (95 %)"], _ensemble_rows(report, groups))]
    if groups:
        parts += [Title("Detection, not fused → fused")]
        parts += [Table(["Data", "Rows", "AUROC ↑", "Change (95 %)"], _set_rows(report))]
    parts += [Title("The way to the mean"), _path_table(report)]
    parts += [
        f"The NLL rises by {report.rise:.3f} on the way, by {report.barrier:.3f} above the straight line between its ends."
    ]
    parts += [Title("How much members disagree"), Table(["Members differ in", "MI", "DI"], _diversity_rows(report))]
    parts += [Title("How alike members are"), "Cosines, the least and the greatest over the pairs."]
    return [*parts, _cosine_table(report)]


def _cells(judged: "ClassifierMetrics", groups: Sequence[str]) -> list[str]:
    cells = [COLUMNS[metric].text(getattr(judged, metric)) for metric in METRICS]
    return cells + [COLUMNS["auroc"].text(judged.mean_auroc(group)) for group in groups]


def _member_rows(report: "FusionReport", groups: Sequence[str]) -> list[list[str]]:
    rows = []
    for index, (alone, inside) in enumerate(zip(report.alone, report.fused.members, strict=True)):
        cells = zip(_cells(alone, groups), _cells(inside, groups), strict=True)
        rows.append([str(index), *(f"{before} → {after}" for before, after in cells)])
    return rows


def _ensemble_rows(report: "FusionReport", groups: Sequence[str]) -> list[list[str]]:
    rows = [["not fused", *_cells(report.not_fused, groups), NO_VALUE]]
    rows.append(_fused_row("fused", report.fused, groups))
    if report.soup is not None:
        rows.append(["soup (one model, all weights averaged)", *_cells(report.soup, groups), NO_VALUE])
    return rows + [_fused_row(f"shared: {', '.join(fused.shared)}", fused, groups) for fused in report.parts]


def _fused_row(name: str, fused: "Fused", groups: Sequence[str]) -> list[str]:
    return [name, *_cells(fused.ensemble, groups), _change(fused.nll, 1, 3)]


def _change(change: "Change", factor: float, decimals: int) -> str:
    difference, low, high = (
        f"{factor * value:+.{decimals}f}" for value in (change.difference, change.low, change.high)
    )
    return f"{difference} ({low} to {high})"


def _set_rows(report: "FusionReport") -> list[list[str]]:
    rows = []
    for group, sets in report.num_ood_rows.items():
        for name, count in sets.items():
            before, after = (each.auroc[group][name] for each in (report.not_fused, report.fused.ensemble))
            both = " → ".join(COLUMNS["auroc"].text(value) for value in (before, after))
            rows.append(
                [set_title(group, name), f"{count:,}", both, _change(report.fused.auroc_by_set[group][name], 100, 2)]
            )
    return rows


def _path_table(report: "FusionReport") -> Table:
    titles = ["Members, on average", *(f"{step.t:.0%}" for step in report.path)]
    rows = [
        [COLUMNS[metric].heading(), *(COLUMNS[metric].text(getattr(step, metric)) for step in report.path)]
        for metric in ("accuracy", "nll")
    ]
    return Table(titles, rows)


def _diversity_rows(report: "FusionReport") -> list[list[str]]:
    return [
        [DIVERSITY[kind], *(COLUMNS[metric].text(values[metric]) for metric in ("mutual_information", "disagreement"))]
        for kind, values in report.diversity.items()
    ]


def _cosine_table(report: "FusionReport") -> Table:
    columns = {"Weights": report.weight_cosines}
    if report.difference_cosines is not None:
        columns["Learned since pre-training"] = report.difference_cosines
    rows = [[part, *(_range(cosines.get(part, {})) for cosines in columns.values())] for part in report.weight_cosines]
    return Table(["Part", *columns], rows)


def _range(cosines: dict[str, float | None]) -> str:
    known = [cosine for cosine in cosines.values() if cosine is not None]
    return f"{min(known):.3f} to {max(known):.3f}" if known else NO_VALUE
