"""The page of the paper's analyses: what the paper says, and what was measured here, where it was."""

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from .paper.study import DISTANCES, TOWER_SCORES
from .paper.tables import SHIFT, read_paper_results, runs_of, values
from .results import RESULTS


FOLDER = RESULTS / "analysis"
SMALL = {"images": "tinyimagenet-dinov2", "texts": "sst2-gte"}  # of experiments.paper
SETTINGS = {"images": "images", "texts": "sst2"}  # of experiments.analysis
NOT_RUN = "not run"
TAYLOR = "Taylor"
BY_LAYER = "Taylor by layer"
CIRC_AVG = "CircAvg"


class Claim(NamedTuple):
    """
    section: of the paper
    says: what the paper reports
    here: (results of `experiments.analysis`, seeds of `experiments.paper`) -> what was measured, or None
    command: measures it
    """

    section: str
    says: str
    here: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]
    command: str


# What was measured


def proposition(analysis: Mapping[str, Any], seeds: Mapping[str, Any]) -> str | None:
    """Say for each head set by how much pruning costs more on noisy rows than on clean ones."""
    if "proposition" not in analysis:
        return None
    found = analysis["proposition"]
    texts = []
    for name in (TAYLOR, CIRC_AVG):
        slope = found["changes"][name]["noisy"]["slope"]["value"]
        curvature = found["differences"][name]["curvature"]["value"]
        gap = found["differences"][name]["change"]["value"]
        texts.append(f"{name}: {slope:+.3f}, {curvature:+.3f}, gap {gap:+.3f}")
    return "; ".join(texts)


def overlap(analysis: Mapping[str, Any], seeds: Mapping[str, Any]) -> str | None:
    if "comparison" not in analysis:
        return None
    texts = []
    for first, second, pair in analysis["comparison"]["pairs"]:
        if CIRC_AVG in (first, second) and {TAYLOR, BY_LAYER} & {first, second}:
            other = first if second == CIRC_AVG else second
            texts.append(
                f"{other}: {100 * pair['overlap']:.0f} % (by chance {100 * pair['overlap_by_chance']:.0f} %), "
                f"JSD {pair['head_divergence']:.2f}"
            )
    return "; ".join(texts)


def removed_heads(analysis: Mapping[str, Any], seeds: Mapping[str, Any]) -> str | None:
    """Say what is left at the largest budget, not fine-tuned."""
    if "sweep" not in analysis:
        return None
    sweep = analysis["sweep"]
    largest = max(point["budget"] for point in sweep["points"])
    texts = [f"all heads: {100 * sweep['dense']['accuracy']:.1f} / {100 * sweep['dense']['auroc']:.1f}"]
    for point in sweep["points"]:
        if point["budget"] == largest and point["order"] in (TAYLOR, CIRC_AVG):
            texts.append(
                f"{point['order']}, {largest} removed: {100 * point['accuracy']:.1f} / {100 * point['auroc']:.1f}"
            )
    return "; ".join(texts)


def distances(analysis: Mapping[str, Any], seeds: Mapping[str, Any]) -> str | None:
    """Say the mean distances over OOD sets, with the heads that CircOOD keeps and with all."""
    runs = [run["distances"] for run in runs_of(seeds, DISTANCES)]
    if not runs:
        return None
    texts = []
    for network, title in (("circ-ood", "CircOOD"), ("dense", "all heads")):
        found = [of_set for run in runs for of_set in run[network].values() if of_set is not None]
        pair = " / ".join(f"{mean(of_set[name] for of_set in found):.2f}" for name in ("euclidean", "mahalanobis"))
        texts.append(f"{title} {pair}")
    return ", ".join(texts)


def rows(
    methods: Mapping[str, str], columns: Sequence[str], suffix: str = ""
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]:
    """Say the means of some rows of a table of `experiments.paper`."""

    def here(analysis: Mapping[str, Any], seeds: Mapping[str, Any]) -> str | None:
        texts = []
        for method, title in methods.items():
            runs = runs_of(seeds, method + suffix)
            found = [values(runs, column) for column in columns]
            if all(found):
                texts.append(f"{title} {' / '.join(f'{mean(each):.2f}' for each in found)}")
        return ", ".join(texts) or None

    return here


def tower_scores(analysis: Mapping[str, Any], seeds: Mapping[str, Any]) -> str | None:
    """Say in how many layers of both towers the vision tower's heads score higher."""
    runs = runs_of(seeds, TOWER_SCORES)
    if not runs:
        return None
    by_layer = {}
    for tower, by_head in runs[0]["towers"].items():
        layers = sorted({layer for layer, *_ in by_head})
        by_layer[tower] = [mean(score for of, _, score in by_head if of == layer) for layer in layers]
    pairs = list(zip(by_layer["vision"], by_layer["text"], strict=False))
    return f"in {sum(vision > text for vision, text in pairs)} of {len(pairs)} layers"


PAPER_TABLE = "`experiments.paper --table {}`"
ANALYSIS = "`experiments.analysis`"
UNTUNED = {"single": "Single", "taylor-untuned": "Taylor", "circ-avg-untuned": "CircAvg"}
CLAIMS = (
    Claim(
        "3.2, B.1",
        "Proposition 1: pruning costs more on noisy data. For Taylor the slope on noisy data is positive (1.19 on CIFAR-100, "
        "0.37 on ImageNet-1K), and so is the mean difference of the Hessians' diagonals (0.45, 0.17)",
        proposition,
        ANALYSIS,
    ),
    Claim(
        "B.1, table 4",
        "Not fine-tuned, circuits lose less. ImageNet-1K, 8 of 12 heads, accuracy / near / far AUROC: Single 80.67 / 77.96 / "
        "90.84, Taylor 66.46 / 68.14 / 85.96, CircAvg 73.61 / 73.81 / 89.90",
        rows(UNTUNED, ("accuracy", "near.auroc", "far.auroc")),
        PAPER_TABLE.format(4),
    ),
    Claim(
        "B.2.1, table 5",
        "The heads that CircOOD keeps see known and OOD rows farther apart. CIFAR-100, Euclidean / Mahalanobis: CircOOD 2.26 / "
        "3.32, all heads 1.75 / 3.03",
        distances,
        PAPER_TABLE.format(5),
    ),
    Claim(
        "B.2.2",
        "CircAvg and Taylor remove other heads: they share 25 % (Taylor by layer) and 29 % (Taylor over all layers, JSD 0.37)",
        overlap,
        ANALYSIS,
    ),
    Claim(
        "B.2.3, table 6",
        "A circuit is best at its objective. ImageNet-1K, accuracy / OOD AUROC: CircOOD 71.11 / 81.89, CircAcc 73.41 / 80.80",
        rows({"circ-ood-untuned": "CircOOD", "circ-acc-untuned": "CircAcc"}, ("accuracy", "ood.auroc")),
        PAPER_TABLE.format(6),
    ),
    Claim(
        "B.3, figures 5, 6",
        "With more heads removed every metric falls, with circuits more slowly; after fine-tuning accuracy is near that of "
        "all heads (accuracy / OOD AUROC here, not fine-tuned)",
        removed_heads,
        f"{ANALYSIS}; `experiments.paper --figure 6`",
    ),
    Claim(
        "B.5, tables 8, 9",
        "Other heads make members differ, the order of the data does not. MI / disagreement on test rows: heads 0.05 / 0.11, "
        "order 0.00 / 0.02, Deep Ensembles 0.06 / 0.13",
        rows(
            {"varied-heads": "heads", "varied-order": "order", "deep-ensembles": "Deep Ensembles"},
            ("mutual_information", "disagreement"),
        ),
        PAPER_TABLE.format(9),
    ),
    Claim(
        "B.6, table 10",
        "Five members gain little over three. Accuracy / OOD AUROC: 80.88 / 86.29, with five 81.20 / 86.33",
        rows({"hydra-circ": "three", "hydra-circ-5": "five"}, ("accuracy", "ood.auroc")),
        PAPER_TABLE.format(10),
    ),
    Claim(
        "B.7, table 11",
        "Merging the MLPs costs little. Accuracy / OOD AUROC: merged 80.88 / 86.29, not merged 81.00 / 86.26",
        rows({"hydra-circ": "merged", "hydra-circ-not-fused": "not merged"}, ("accuracy", "ood.auroc")),
        PAPER_TABLE.format(11),
    ),
    Claim(
        "C.3, figure 7",
        "A CLIP's vision tower has higher Taylor scores than its text tower in all layers but the first three",
        tower_scores,
        "`experiments.paper --figure 7`",
    ),
    Claim(
        "E.1, table 13",
        "Under shift Hydra (Taylor) loses least of the single-pass models. Mean accuracy over severities: 56.50, Hydra (Circ) "
        "54.59, Single 53.47",
        rows(
            {"hydra-taylor": "Hydra (Taylor)", "hydra-circ": "Hydra (Circ)", "single": "Single"},
            ("severity_average.accuracy",),
            f"-{SHIFT}",
        ),
        PAPER_TABLE.format(13),
    ),
)


# The table


def read_analyses() -> dict[str, Any]:
    """Return {setting of `experiments.analysis`: its results}."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/results.json"))}


def render(analyses: Mapping[str, Any] | None = None, papers: Mapping[str, Any] | None = None) -> str:
    """Return the table of claims, a column for each data that something was run on."""
    analyses = read_analyses() if analyses is None else analyses
    papers = read_paper_results() if papers is None else papers
    lines = ["| section | the paper says | here, images | here, texts | command |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        cells = [claim.section, claim.says]
        for data in SMALL:
            of_analysis = analyses.get(SETTINGS[data], {})
            seeds = dict(papers.get(SMALL[data], {}).get("seeds", {}))
            if data == "images" and claim.here is tower_scores:
                seeds = papers.get("clip-vit-b32", {}).get("seeds", {})
            cells.append(claim.here(of_analysis, seeds) or NOT_RUN)
        lines.append(f"| {' | '.join([*cells, claim.command])} |")
    return "\n".join(lines)
