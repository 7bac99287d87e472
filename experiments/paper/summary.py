"""The paper's numbers beside those that were measured here, for README and docs/paper.md."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .studies import SETTINGS, rows_of
from .tables import COLUMN_WORDS, NUMBERS, cell, markdown, read_paper_results, runs_of, values


COLUMNS = ("accuracy", "nll", "ood.auroc")


class Summary(NamedTuple):
    """
    papers: settings of the paper
    here: the setting that stands in for them, and the table that has all of its rows
    methods: the rows
    """

    papers: tuple[str, ...]
    here: str
    table: int
    methods: tuple[str, ...]


SUMMARIES = {
    "paper-readme": Summary(
        ("imagenet1k",), "tinyimagenet-dinov2", 1, ("single", "hydra-taylor", "hydra-circ", "deep-ensembles")
    ),
    "paper-images": Summary(
        ("imagenet1k", "cifar100"),
        "tinyimagenet-dinov2",
        1,
        ("single", "taylor", "circ-avg", "hydra-taylor", "hydra-circ", "deep-ensembles"),
    ),
    "paper-texts": Summary(
        ("sst2",),
        "sst2-gte",
        2,
        ("single", "taylor", "circ-avg", "hydra-taylor", "hydra-circ", "deep-ensembles-d"),
    ),
}


def render(summary: Summary, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the paper's numbers, and columns "here" where the results file has them; below, what was run."""
    content = results.get(summary.here)
    headings = [f"{name_of(paper)}: {words}" for paper in summary.papers for words in words_of_columns()]
    if content is not None:
        headings += [f"here: {words}" for words in words_of_columns()]
    rows = {}
    for method in summary.methods:
        theirs = [f"{NUMBERS[paper][method][column]:.2f}" for paper in summary.papers for column in COLUMNS]
        rows[title_of_row(summary, method)] = [*theirs, *cells_here(content, method)]
    return f"{markdown(headings, rows)}\n\n{what_was_run(summary, content)}"


def name_of(paper: str) -> str:
    return SETTINGS[paper].title.partition(",")[0]


def words_of_columns() -> list[str]:
    return [COLUMN_WORDS[column] for column in COLUMNS]


def title_of_row(summary: Summary, method: str) -> str:
    return rows_of(SETTINGS[summary.here])[method].title


def cells_here(content: Mapping[str, Any] | None, method: str) -> list[str]:
    if content is None:
        return []
    runs = runs_of(content["seeds"], method)
    return [cell(values(runs, column), column, {}) for column in COLUMNS]


def what_was_run(summary: Summary, content: Mapping[str, Any] | None) -> str:
    """Say what stands in the columns "here", or that there are none yet."""
    setting = SETTINGS[summary.here]
    if content is None:
        return (
            f"None of this was run here yet. On {setting.title}, the command is\n"
            f"`python -m experiments.paper --table {summary.table} --setting {summary.here}`;\n"
            "`python -m experiments --tables` then adds columns."
        )
    where = ", ".join(content[part] for part in ("machine", "date"))
    return (
        f"*Here* is {setting.title}: means ± deviations over {len(content['seeds'])} seeds ({where}).\n"
        "The paper has another model and more data: only differences between rows compare."
    )


def summaries(results: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, str]:
    """Return all of them by name."""
    if results is None:
        results = read_paper_results()
    return {name: render(summary, results) for name, summary in SUMMARIES.items()}
