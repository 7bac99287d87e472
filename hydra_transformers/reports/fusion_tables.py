"""A fusion report in markdown."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .table import NO_VALUE, Table, escape_markdown
from .tables import COLUMNS, group_title, set_title


if TYPE_CHECKING:
    from ..uncertainty.paired import Change
    from .fusion_report import Fused, FusionReport, Judged

METRICS = ("accuracy", "nll", "ece")
DIVERSITY = {
    "not fused": "everything (not fused)",
    "attention": "attention alone (fused)",
    "mlp": "MLPs alone (attention shared too)",
}


def fusion_tables(report: "FusionReport") -> str:
    """The sentence and all tables."""
    groups = list(report.num_ood_rows)
    titles = [COLUMNS[metric].heading() for metric in METRICS] + [
        COLUMNS["auroc"].heading("" if group == "OOD" else group_title(group)) for group in groups
    ]
    parts = [f"# Fusing {report.num_members} members: {report.verdict}", escape_markdown(report.sentence)]
    parts += [
        "## Each member, alone → inside the fused model",
        _table(["Member", *titles], _member_rows(report, groups)),
    ]
    parts += ["## The ensemble", _table(["", *titles, "NLL change (95 %)"], _ensemble_rows(report, groups))]
    if groups:
        parts += [
            "## Detection, not fused → fused",
            _table(["Data", "Rows", "AUROC ↑", "Change (95 %)"], _set_rows(report)),
        ]
    parts += ["## The way to the mean", _path_lines(report)]
    parts += ["## How much members disagree", _table(["Members differ in", "MI", "DI"], _diversity_rows(report))]
    parts += ["## How alike members are", "Cosines, the least and the greatest over the pairs.", _cosine_table(report)]
    return "\n\n".join(parts) + "\n"


def _cells(judged: "Judged", groups: Sequence[str]) -> list[str]:
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


def _path_lines(report: "FusionReport") -> str:
    titles = ["Members, on average", *(f"{step.t:.0%}" for step in report.path)]
    rows = [
        [COLUMNS[metric].heading(), *(COLUMNS[metric].text(getattr(step, metric)) for step in report.path)]
        for metric in ("accuracy", "nll")
    ]
    rises = f"The NLL rises by {report.rise:.3f} on the way, by {report.barrier:.3f} above the straight line between its ends."
    return f"{_table(titles, rows)}\n\n{rises}"


def _diversity_rows(report: "FusionReport") -> list[list[str]]:
    return [
        [DIVERSITY[kind], *(COLUMNS[metric].text(values[metric]) for metric in ("mutual_information", "disagreement"))]
        for kind, values in report.diversity.items()
    ]


def _cosine_table(report: "FusionReport") -> str:
    columns = {"Weights": report.weight_cosines}
    if report.difference_cosines is not None:
        columns["Learned since pre-training"] = report.difference_cosines
    rows = [[part, *(_range(cosines.get(part, {})) for cosines in columns.values())] for part in report.weight_cosines]
    return _table(["Part", *columns], rows)


def _range(cosines: dict[str, float | None]) -> str:
    known = [cosine for cosine in cosines.values() if cosine is not None]
    return f"{min(known):.3f} to {max(known):.3f}" if known else NO_VALUE


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table(header, rows).markdown()
