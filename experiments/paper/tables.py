"""Which table of the paper has which rows and columns, and what it looks like with our numbers beside the paper's."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

from ..results import RESULTS
from ..table import NOT_JUDGED, markdown
from .methods import SOURCES, varied_name
from .studies import SETTINGS, AnySetting, rows_of
from .study import DISTANCES, SHIFT


PAPER_RESULTS = RESULTS / "paper"
NUMBERS = json.loads((Path(__file__).parent / "numbers.json").read_text())  # {setting: {method: {column: value}}}
IMAGE_METHODS = (
    *("single", "deep-ensembles", "packed", "mimo", "batch-ensemble", "mc-dropout", "lora", "oba"),
    *("taylor", "circ-avg", "hydra-taylor", "hydra-circ"),
)
TEXT_METHODS = (
    *("single", "deep-ensembles-d", "mc-dropout", "lora", "taylor", "circ-avg", "hydra-taylor", "hydra-circ"),
)

CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece")
DETECTION = ("auroc", "fpr95", "aupr")
NEAR, FAR, OOD = (tuple(f"{group}.{metric}" for metric in DETECTION) for group in ("near", "far", "ood"))
DIVERSITY = ("mutual_information", "disagreement", "ood.mutual_information", "ood.disagreement")
SEVERITIES = (*(f"severity{number}" for number in (1, 2, 3, 4, 5)), "severity_average")
TITLES = {
    "accuracy": "Acc ↑",
    "brier": "Brier ↓",
    "nll": "NLL ↓",
    "ece": "ECE ↓",
    "aece": "aECE ↓",
    "auroc": "AUROC ↑",
    "fpr95": "FPR95 ↓",
    "aupr": "AUPR ↑",
    "mutual_information": "MI ↑",
    "disagreement": "DI ↑",
    "euclidean": "Euclidean ↑",
    "mahalanobis": "Mahalanobis ↑",
}
COLUMN_WORDS = {"accuracy": "accuracy", "nll": "NLL", "ood.auroc": "OOD AUROC"}
PERCENT = ("accuracy", *DETECTION)
LOWER_IS_BETTER = ("brier", "nll", "ece", "aece", "fpr95")


@dataclass(frozen=True)
class Table:
    """
    number: the paper's
    title: what it shows, whatever the data
    settings: the paper's
    methods: the rows
    columns: "accuracy", "near.auroc" (the mean over a group), "yelp.auroc"; "near" stands for each set of the group. Of
        several label sets "imagenet1k:accuracy" and "mean:accuracy"; "each:accuracy" stands for all of them
    is_split: whether each of the columns, with what it stands for, is a table of its own
    """

    number: int
    title: str
    settings: tuple[str, ...]
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    is_split: bool = False

    def rows(self, setting: AnySetting) -> tuple[str, ...]:
        """Return the methods, without those that the setting leaves out."""
        return tuple(name for name in self.methods if name not in setting.left_out)


def detection_of(label_set: str) -> tuple[str, ...]:
    """Return the columns of tables 25 and 26: each set, and the means."""
    return tuple(f"{label_set}:{column}" for column in ("near", *NEAR, "far", *FAR, *OOD))


CLIP_METHODS = ("single", "temperature", "bayesvlm", "vilu", "taylor", "circ-avg", "hydra-circ")
CLIP_DETECTORS = tuple(name for name in CLIP_METHODS if name != "temperature")
CLIP_HYDRAS = ("hydra-circ", "hydra-circ-6-more", "hydra-circ-vision", "hydra-circ-vision-tuned")
VARIED = tuple(varied_name(sources) for sources in SOURCES)
UNTUNED = ("single", "taylor-untuned", "circ-avg-untuned")
WITH_SINGLES = (IMAGE_METHODS[0], "lora-single", *IMAGE_METHODS[1:])
TEXTS_WITH_SINGLES = (TEXT_METHODS[0], "lora-single", *TEXT_METHODS[1:])
TABLES = {
    table.number: table
    for table in (
        Table(1, "Images", ("imagenet1k", "cifar100"), IMAGE_METHODS, (*CLASSIFICATION, *OOD)),
        Table(2, "Texts", ("sst2",), TEXT_METHODS, (*CLASSIFICATION, *OOD)),
        Table(
            3,
            "Zero-shot classification",
            ("clip-vit-b32",),
            CLIP_METHODS,
            (*(f"mean:{metric}" for metric in CLASSIFICATION), *(f"imagenet1k:{column}" for column in OOD)),
        ),
        Table(
            4,
            "Pruned and not fine-tuned",
            ("imagenet1k", "cifar100", "sst2"),
            UNTUNED,
            ("accuracy", "ece", *NEAR, *FAR),
        ),
        Table(5, "Distances of known and OOD rows in the last layer's heads", ("cifar100",), (DISTANCES,), ()),
        Table(
            6,
            "Circuits for one objective, not fine-tuned",
            ("imagenet1k",),
            ("circ-ood-untuned", "circ-acc-untuned"),
            ("accuracy", *NEAR, *FAR, *OOD),
        ),
        Table(8, "Sources of diversity", ("imagenet1k",), ("single", "circ-avg", *VARIED), (*CLASSIFICATION, *OOD)),
        Table(9, "Diversity by its source", ("imagenet1k",), ("deep-ensembles", *VARIED), DIVERSITY),
        Table(
            10,
            "Number of members",
            ("imagenet1k",),
            ("single", "deep-ensembles", "hydra-circ", "hydra-circ-5"),
            (*CLASSIFICATION, *OOD),
        ),
        Table(
            11,
            "MLPs merged and not",
            ("imagenet1k",),
            ("single", "hydra-circ", "hydra-circ-not-fused"),
            (*CLASSIFICATION, *OOD),
        ),
        Table(
            12,
            "Seeds (--seeds 8)",
            ("imagenet1k", "cifar100"),
            ("single", "deep-ensembles", "hydra-circ"),
            (*CLASSIFICATION, *OOD),
        ),
        Table(
            13,
            "Accuracy under shift",
            ("imagenet1k",),
            IMAGE_METHODS,
            tuple(f"{severity}.accuracy" for severity in SEVERITIES),
        ),
        Table(
            14,
            "Brier score under shift",
            ("imagenet1k",),
            IMAGE_METHODS,
            tuple(f"{severity}.brier" for severity in SEVERITIES),
        ),
        Table(15, "Near and far sets", ("imagenet1k",), WITH_SINGLES, (*NEAR, *FAR, *OOD)),
        Table(16, "Near and far sets", ("cifar100",), WITH_SINGLES, (*NEAR, *FAR, *OOD)),
        Table(17, "Near and far sets", ("sst2",), TEXTS_WITH_SINGLES, (*NEAR, *FAR, *OOD)),
        Table(18, "Near sets, one by one", ("sst2",), TEXTS_WITH_SINGLES, ("near", *NEAR)),
        Table(19, "Far sets, one by one", ("sst2",), TEXTS_WITH_SINGLES, ("far",)),
        Table(20, "Far sets, one by one (with table 19)", ("sst2",), TEXTS_WITH_SINGLES, ("far",)),
        Table(21, "Near sets, one by one", ("imagenet1k",), WITH_SINGLES, ("near", *NEAR)),
        Table(22, "Far sets, one by one", ("imagenet1k",), WITH_SINGLES, ("far", *FAR)),
        Table(23, "Far sets, one by one", ("cifar100",), WITH_SINGLES, ("far", *FAR)),
        Table(
            24,
            "Zero-shot classification by data set",
            ("clip-vit-b32",),
            CLIP_METHODS,
            tuple(f"each:{metric}" for metric in CLASSIFICATION),
            is_split=True,
        ),
        Table(25, "Zero-shot detection, ImageNet-1K", ("clip-vit-b32",), CLIP_DETECTORS, detection_of("imagenet1k")),
        Table(26, "Zero-shot detection, CIFAR-100", ("clip-vit-b32",), CLIP_DETECTORS, detection_of("cifar100")),
        Table(
            27,
            "Towers and fine-tuning, classification",
            ("clip-vit-b32",),
            CLIP_HYDRAS,
            ("each:accuracy", "each:nll", "each:ece"),
            is_split=True,
        ),
        Table(
            28,
            "Towers and fine-tuning, detection",
            ("clip-vit-b32",),
            CLIP_HYDRAS,
            tuple(f"{name}:{column}" for name in ("imagenet1k", "cifar100") for column in (*NEAR, *FAR, *OOD)),
        ),
    )
}
SHIFTED_TABLES = (13, 14)

# The differences that the paper speaks of: (method, what it is compared with), and their columns.
COMPARED = {
    task: (
        ("hydra-circ", ensemble),
        ("hydra-circ", "single"),
        ("hydra-circ", "hydra-taylor"),
        ("hydra-taylor", ensemble),
        ("circ-avg", "taylor"),
        ("hydra-circ", "circ-avg"),
    )
    for task, ensemble in (("images", "deep-ensembles"), ("texts", "deep-ensembles-d"))
}
COMPARED["clip"] = tuple(("hydra-circ", other) for other in CLIP_METHODS[:-1])
COMPARED_COLUMNS = dict.fromkeys(("images", "texts"), ("accuracy", "nll", "ece", *OOD))
COMPARED_COLUMNS["clip"] = ("mean:accuracy", "mean:nll", "mean:ece", *(f"imagenet1k:{column}" for column in OOD))
HOLDS = "holds"
OPPOSITE = "the opposite"
UNCLEAR = "not shown"


# Values


def value(run: Mapping[str, Any], column: str) -> float:
    """Return one number of a result; shares in percent, as in the paper."""
    label_set, _, column = column.rpartition(":")
    if label_set == "mean":
        return mean(value({"data": metrics}, column) for metrics in run["data"].values())
    if label_set:
        run = {"data": run["data"].get(label_set, {}), "ood": run["ood"].get(label_set, {})}
    place, _, metric = column.rpartition(".")
    if not place:
        found = run["data"][metric]
    elif place.startswith("severity"):
        found = run["severities"][place.removeprefix("severity").removeprefix("_")][metric]
    else:
        found = mean(of_set[metric] for of_set in sets_of(run, place).values())
    return 100 * found if metric in PERCENT else found


def values(runs: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """Return a number for each run; none where it is not measured, such as the accuracy of ViLU."""
    try:
        return [value(run, column) for run in runs]
    except KeyError:
        return []


def sets_of(run: Mapping[str, Any], place: str) -> dict[str, Mapping[str, float]]:
    """Return the OOD sets of a group, or all ("ood"), or one by its name."""
    ood = run["ood"]
    if place in ood:
        return ood[place]
    all_sets = {name: of_set for of_group in ood.values() for name, of_set in of_group.items()}
    return all_sets if place == "ood" else {place: all_sets[place]}


def columns_of(column: str, run: Mapping[str, Any]) -> list[str]:
    """Return what a column of a `Table` stands for: "near" for each set of the group, "each" for each label set."""
    label_set, colon, rest = column.rpartition(":")
    if label_set == "each":
        return [f"{name}:{rest}" for name in (*run["data"], "mean")]
    if rest in ("near", "far"):
        ood = run["ood"][label_set] if label_set else run["ood"]
        return [f"{label_set}{colon}{name}.{metric}" for name in ood[rest] for metric in DETECTION]
    return [column]


def title_of(column: str) -> str:
    label_set, _, rest = column.rpartition(":")
    place, _, metric = rest.rpartition(".")
    place = "OOD" if place == "ood" else place.replace("_", " ")
    words = (label_set, place, TITLES[metric])
    return " ".join(word for word in words if word)


def digits(column: str) -> int:
    metric = column.rpartition(":")[2].rpartition(".")[2]
    return 2 if metric in PERCENT else 3


# Tables


Seeds = Mapping[str, Mapping[str, Any]]  # {seed: {method: result}}


def read_paper_results(folder: Path = PAPER_RESULTS) -> dict[str, Any]:
    """Return {setting: its results file}, of those that were run."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem in SETTINGS}


def runs_of(seeds: Seeds, method: str) -> list[Mapping[str, Any]]:
    """Return what a method reached with each seed."""
    return [of_seed[method] for of_seed in seeds.values() if method in of_seed]


def render(table: Table, setting: AnySetting, seeds: Seeds) -> str:
    """Return the table as markdown: mean ± deviation over seeds, the paper's number in brackets."""
    if table.number == 5:
        return distances_table(setting, seeds)
    titles = {name: method.title for name, method in rows_of(setting).items()}
    paper = NUMBERS[setting.paper]
    suffix = f"-{SHIFT}" if table.number in SHIFTED_TABLES else ""
    example = next((runs[0] for name in table.rows(setting) if (runs := runs_of(seeds, name + suffix))), None)
    if example is None:
        return "No results."
    sections = [columns_of(column, example) for column in table.columns]
    if not table.is_split:
        # A group of one set is its own mean.
        sections = [list(dict.fromkeys(column for section in sections for column in section))]
    texts = []
    for columns in sections:
        rows = {}
        for name in table.rows(setting):
            runs = runs_of(seeds, name + suffix)
            if runs:
                rows[titles[name]] = [cell(values(runs, column), column, paper.get(name, {})) for column in columns]
        texts.append(markdown([title_of(column) for column in columns], rows))
    return "\n\n".join(texts)


def cell(found: Sequence[float], column: str, paper: Mapping[str, float]) -> str:
    if not found:
        return NOT_JUDGED
    places = digits(column)
    text = f"{mean(found):.{places}f}"
    if len(found) > 1:
        text += f" ± {stdev(found):.{places}f}"
    return f"{text} ({paper[column]:g})" if column in paper else text


def distances_table(setting: AnySetting, seeds: Seeds) -> str:
    """Return table 5: the mean over the last layer's heads, of the dense model and of CircOOD."""
    runs = [run["distances"] for run in runs_of(seeds, DISTANCES)]
    if not runs:
        return "No results."
    paper = NUMBERS[setting.paper]
    rows = {}
    for name in runs[0]["dense"]:
        cells = []
        for network, theirs in (("circ-ood", "circ-ood-untuned"), ("dense", "single")):
            for metric in ("euclidean", "mahalanobis"):
                found = [run[network][name][metric] for run in runs if run[network][name] is not None]
                cells.append(cell(found, f"{name}.{metric}", paper.get(theirs, {})))
        rows[name] = cells
    headings = [
        f"{network} {TITLES[metric]}" for network in ("CircOOD", "Dense") for metric in ("euclidean", "mahalanobis")
    ]
    return markdown(headings, rows)


# Differences


def differences(setting: AnySetting, seeds: Seeds, of_paper: str) -> str:
    """Return our differences between methods, the paper's in its setting `of_paper`, and whether their sign holds here."""
    titles = {name: method.title for name, method in rows_of(setting).items()}
    paper = NUMBERS[of_paper]
    columns = COMPARED_COLUMNS[setting.task]
    rows = {}
    for first, second in COMPARED[setting.task]:
        pairs = [(of_seed[first], of_seed[second]) for of_seed in seeds.values() if {first, second} <= set(of_seed)]
        if not pairs or first not in paper or second not in paper:
            continue
        cells = []
        for column in columns:
            ours = [a - b for a, b in zip(*(values(runs, column) for runs in zip(*pairs, strict=True)), strict=False)]
            theirs = [paper[method].get(column) for method in (first, second)]
            cells.append(
                difference_cell(theirs[0] - theirs[1], ours, column) if ours and None not in theirs else NOT_JUDGED
            )
        rows[f"{titles[first]} - {titles[second]}"] = cells
    return markdown([title_of(column) for column in columns], rows) if rows else "No results."


def difference_cell(theirs: float, ours: Sequence[float], column: str) -> str:
    places = digits(column)
    spread = f" ± {stdev(ours):.{places}f}" if len(ours) > 1 else ""
    # The paper rounds Brier, NLL and ECE to two decimals: equal numbers say nothing.
    verdict = f", {verdict_of(theirs, ours)}" if theirs else ""
    return f"{mean(ours):+.{places}f}{spread} ({theirs:+.{places}f}{verdict})"


def verdict_of(theirs: float, ours: Sequence[float]) -> str:
    """Return whether the sign is the paper's, if the 95 % interval over seeds (Student's t) does not hold zero."""
    if len(ours) < 2:
        return UNCLEAR
    half = t.ppf(0.975, len(ours) - 1) * stdev(ours) / math.sqrt(len(ours))
    if abs(mean(ours)) <= half:
        return UNCLEAR
    return HOLDS if mean(ours) * theirs > 0 else OPPOSITE


# The page


HEAD = """# The paper's tables, run here

Ours before, the paper's (arXiv 2510.18358) in brackets: mean ± standard deviation over seeds. The paper's numbers are
of another model and more data, named below each heading: only differences between methods compare.

- Every table: `python -m experiments.paper --table N`; what each needs: `--list`.
- Accuracy, AUROC, FPR95 and AUPR are in percent, ECE is a fraction. OOD is the mean over all sets, near and far.
- **holds**: our difference has the paper's sign, and its 95 % interval over seeds (Student's t) leaves out zero;
  **the opposite**: so with the other sign; **not shown**: the interval holds zero.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of all settings that were run."""
    parts = [HEAD]
    for name, content in results.items():
        setting = SETTINGS[name]
        seeds = content["seeds"]
        parts.append(f"## {setting.title}")
        where = ", ".join(content[part] for part in ("machine", "versions", "date"))
        parts.append(
            f"{where}, commit {content['commit']}; {len(seeds)} seeds. In brackets: the paper's `{setting.paper}`.\n"
            f"{setting.about}"
        )
        shown: set[str] = set()  # tables 19 and 20 are one
        for table in TABLES.values():
            if setting.paper not in table.settings:
                continue
            text = render(table, setting, seeds)
            if text != "No results." and text not in shown:
                shown.add(text)
                parts.append(f"### Table {table.number}: {table.title}\n\n{text}")
        for of_paper in (setting.paper, *setting.also_compared):
            title = f"### Differences, beside the paper's on {SETTINGS[of_paper].title}"
            parts.append(f"{title}\n\n{differences(setting, seeds, of_paper)}")
        if content.get("learning_rates"):
            parts.append(
                f"Learning rates tried, by accuracy on validation data: {rates_text(content['learning_rates'])}."
            )
    return "\n\n".join(parts) + "\n"


def rates_text(tried: Mapping[str, Mapping[str, float]]) -> str:
    found = []
    for of, by_rate in tried.items():
        listed = ", ".join(f"{rate} ({100 * accuracy:.2f} %)" for rate, accuracy in by_rate.items())
        found.append(f"{of}: {listed}")
    return "; ".join(found)
