"""The results of fine-tunings of pre-trained models as markdown tables, and the choice made on validation rows."""

import re
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from . import shift_tables
from .deep_trunk_tables import deep_trunk_table
from .setting import Setting
from .table import Column, Run, Seeds, cell, set_columns, table


SCORES = {"msp": "MSP", "energy": "energy", "mutual_information": "MI"}

BASELINES = {
    "single": "Single",
    "temperature": "Single, temperature",
    "soup": "Soup of the three (one model)",
    "mc-dropout": "MC Dropout (10 passes)",
    "lora-single": "LoRA, one adapter",
    "lora-ensembles": "LoRA Ensemble (3)",
    "batch-ensemble": "BatchEnsemble (3)",
    "mimo": "MIMO (3)",
    "heads": "Classifiers on one backbone (3)",
    "last-layer-laplace": "Laplace on the last layer",
    "oba-tuned": "OBA, fine-tuned",
    "deep-ensembles": "Deep Ensemble (3 fine-tunings)",
    "deep-ensembles-temperature": "Deep Ensemble, temperature",
}


def auroc(score: str = "msp", group: str | None = None) -> Callable[[Run], float]:
    """The AUROC of a group of sets in percent, by default the mean of near and far."""

    def value(run: Run) -> float:
        groups = [group] if group else ["near", "far"]
        return 100 * mean(mean(each["auroc"] for each in run["ood"][score][name].values()) for name in groups)

    return value


def held_out_auroc(score: str) -> Callable[[Run], float]:
    """The AUROC, in percent, against the held-out set that nothing is judged on."""
    return lambda run: 100 * run["validation"]["ood"][score][""][""]["auroc"]


ACCURACY: Column = ("Acc ↑", lambda run: 100 * run["id"]["accuracy"], ".2f")
NLL: Column = ("NLL ↓", lambda run: run["id"]["nll"], ".3f")
ECE: Column = ("ECE ↓", lambda run: run["id"]["ece"], ".3f")
NEAR: Column = ("near AUROC ↑", auroc(group="near"), ".1f")
FAR: Column = ("far AUROC ↑", auroc(group="far"), ".1f")
BOTH: Column = ("AUROC ↑", auroc(), ".1f")
DISAGREEMENT: Column = (
    "disagreement",
    lambda run: mean(each["disagreement"] for each in run["ood"]["msp"]["near"].values()),
    ".3f",
)
PARAMETERS: Column = ("Parameters", lambda run: run["parameters"] / 1e6, ".1f M")
MULTIPLY_ADDS: Column = ("Multiply-adds", lambda run: run["multiply_adds"] / 1e9, ".2f G")
QUALITY = (ACCURACY, ECE, NLL, NEAR, FAR, BOTH, DISAGREEMENT)


# What is chosen on validation rows


def candidates(setting: Setting) -> dict[str, str]:
    """The Hydras of three fine-tunings between which the rule chooses."""
    few, many = setting.heads_to_prune, setting.budgets[0]
    return {
        "tunings-zero-shot": f"{few} heads pruned",
        "tunings": f"{few} heads pruned, fine-tuned",
        f"tunings-zero-shot-{many}-heads": f"{many} heads pruned",
        f"tunings-{many}-heads": f"{many} heads pruned, fine-tuned",
    }


def on_validation(run: Run) -> float:
    """What circuits look for, on rows that neither they nor the tests know: the mean of accuracy and AUROC, in percent."""
    return mean([100 * run["validation"]["id"]["accuracy"], held_out_auroc("msp")(run)])


def chosen_hydra(seeds: Seeds, setting: Setting) -> str:
    """The candidate that is best on validation rows, on average over the seeds."""
    judged = [name for name in candidates(setting) if all(name in methods for methods in seeds.values())]
    return max(judged, key=lambda name: mean(on_validation(methods[name]) for methods in seeds.values()))


def chosen_score(seeds: Seeds, method: str) -> str:
    """The score by which a method detects best on validation rows, on average over the seeds."""
    return max(SCORES, key=lambda score: mean(held_out_auroc(score)(methods[method]) for methods in seeds.values()))


def choice_table(seeds: Seeds, setting: Setting) -> str:
    columns: list[Column] = [
        ("validation acc", lambda run: 100 * run["validation"]["id"]["accuracy"], ".2f"),
        ("validation AUROC, MSP", held_out_auroc("msp"), ".1f"),
        ("mean of both", on_validation, ".2f"),
        ("AUROC, energy", held_out_auroc("energy"), ".1f"),
        ("AUROC, MI", held_out_auroc("mutual_information"), ".1f"),
    ]
    chosen = chosen_hydra(seeds, setting)
    titles = {name: f"**{title}**" if name == chosen else title for name, title in candidates(setting).items()}
    return table(seeds, titles, columns)


# What was to be reached


def aims_table(seeds: Seeds, setting: Setting, above_single: float) -> str:
    """What the chosen Hydra was to reach, and whether its mean over the seeds did."""
    hydra, ensemble = chosen_hydra(seeds, setting), "deep-ensembles"
    ratio = 0.88

    def scored(method: str) -> Column:
        return ("", auroc(chosen_score(seeds, method)), ".1f")

    aims: list[tuple[str, str, str, Column, Column, Callable[[float, float], bool]]] = [
        ("AUROC 1.0 above Deep Ensembles", hydra, ensemble, BOTH, BOTH, lambda own, other: own >= other + 1),
        (
            f"AUROC {above_single} above Single",
            hydra,
            "single",
            BOTH,
            BOTH,
            lambda own, other: own >= other + above_single,
        ),
        (
            "AUROC 1.0 above Deep Ensembles, each by its own score",
            hydra,
            ensemble,
            scored(hydra),
            scored(ensemble),
            lambda own, other: own >= other + 1,
        ),
        (
            "accuracy within 0.3 of Deep Ensembles",
            hydra,
            ensemble,
            ACCURACY,
            ACCURACY,
            lambda own, other: own >= other - 0.3,
        ),
        (
            "disagreement 0.9 of Deep Ensembles'",
            hydra,
            ensemble,
            DISAGREEMENT,
            DISAGREEMENT,
            lambda own, other: own >= 0.9 * other,
        ),
        ("ECE no worse than Single's", hydra, "single", ECE, ECE, lambda own, other: own <= other),
        (
            "with a temperature, ECE no worse than Deep Ensembles'",
            f"{hydra}-temperature",
            f"{ensemble}-temperature",
            ECE,
            ECE,
            lambda own, other: own <= other,
        ),
        (
            f"multiply-adds at most {ratio} of Deep Ensembles'",
            hydra,
            ensemble,
            MULTIPLY_ADDS,
            MULTIPLY_ADDS,
            lambda own, other: own <= ratio * other,
        ),
    ]
    lines = ["| aim | Hydra of fine-tunings | the other | |", "|---|--:|--:|---|"]
    for aim, own, other, (_, own_value, form), (_, other_value, _), is_reached in aims:
        ours = [own_value(methods[own]) for methods in seeds.values()]
        theirs = [other_value(methods[other]) for methods in seeds.values()]
        verdict = "held" if is_reached(mean(ours), mean(theirs)) else "did not hold"
        lines.append(f"| {aim} | {cell(ours, form)} | {cell(theirs, form)} | {verdict} |")
    return "\n".join(lines)


# Rows


def summary_rows(seeds: Seeds, setting: Setting) -> dict[str, str]:
    """What to look at first."""
    chosen = chosen_hydra(seeds, setting)
    shown = ("single", "mc-dropout", "lora-ensembles", "deep-ensembles")
    heads = f"{setting.heads_to_prune} heads pruned"
    return {
        **{name: BASELINES[name] for name in shown},
        "hydra-circ": f"Hydra as in the paper (3 circuits of one backbone), {heads}, fine-tuned",
        "tunings-whole": "Hydra of the 3 fine-tunings, nothing pruned or trained",
        chosen: f"**Hydra of the 3 fine-tunings, {candidates(setting)[chosen]}**",
    }


def quality_rows(setting: Setting) -> dict[str, str]:
    few, many = setting.heads_to_prune, setting.budgets[0]
    return {
        **BASELINES,
        "single-tuned": "Single, trained as long as members are",
        "hydra-taylor-zero-shot": f"One backbone, Taylor, {few} heads",
        "hydra-taylor": f"One backbone, Taylor, {few} heads, fine-tuned",
        "hydra-taylor-not-fused": f"One backbone, Taylor, {few} heads, fine-tuned, not fused",
        "hydra-circ-zero-shot": f"One backbone, circuits, {few} heads",
        "hydra-circ": f"One backbone, circuits, {few} heads, fine-tuned",
        "hydra-circ-not-fused": f"One backbone, circuits, {few} heads, fine-tuned, not fused",
        f"hydra-circ-zero-shot-{many}": f"One backbone, circuits, {many} heads",
        f"hydra-circ-{many}-heads": f"One backbone, circuits, {many} heads, fine-tuned",
        "tunings-whole": "Fine-tunings, nothing pruned",
        "tunings-taylor-zero-shot": f"Fine-tunings, Taylor, {few} heads",
        "tunings-zero-shot": f"Fine-tunings, own circuits, {few} heads",
        "tunings-zero-shot-not-fused": f"Fine-tunings, own circuits, {few} heads, not fused",
        "tunings": f"Fine-tunings, own circuits, {few} heads, fine-tuned",
        "tunings-not-fused": f"Fine-tunings, own circuits, {few} heads, fine-tuned, not fused",
        f"tunings-zero-shot-{many}-heads": f"Fine-tunings, own circuits, {many} heads",
        f"tunings-{many}-heads": f"Fine-tunings, own circuits, {many} heads, fine-tuned",
    }


def shift_rows(seeds: Seeds, setting: Setting) -> dict[str, str]:
    """All methods, and those with layers merged whole."""
    depths = trunk_depths(seeds, "whole")
    merged = {f"tunings-whole-trunk-{n}": f"Fine-tunings, nothing pruned, {n} layers merged" for n in depths}
    return quality_rows(setting) | merged


def with_temperatures(rows: Mapping[str, str]) -> dict[str, str]:
    plain = {name: title for name, title in rows.items() if "temperature" not in name}
    return {"temperature" if name == "single" else f"{name}-temperature": title for name, title in plain.items()}


def member_rows(setting: Setting) -> dict[str, str]:
    few = setting.heads_to_prune
    rows = {}
    for count, ending in ((2, "-of-2"), (3, ""), (5, "-of-5")):
        rows[f"deep-ensembles{ending}"] = f"Deep Ensemble of {count}"
        rows[f"tunings-whole{ending}"] = f"{count} fine-tunings, nothing pruned"
        rows[f"tunings-zero-shot{ending}"] = f"{count} fine-tunings, {few} heads pruned"
        rows[f"tunings{ending}"] = f"{count} fine-tunings, {few} heads pruned, fine-tuned"
    return rows


def sharing_rows() -> dict[str, str]:
    rows = {}
    for prefix, none, title in (
        ("tunings-whole", "deep-ensembles", "nothing pruned"),
        ("tunings", "tunings-not-fused", "pruned, fine-tuned"),
    ):
        rows[none] = f"{title}: nothing shared"
        for parts in ("embeddings", "layernorm", "mlp", "embeddings-layernorm", "embeddings-mlp", "layernorm-mlp"):
            rows[f"{prefix}-share-{parts}"] = f"{title}: {parts.replace('-', ', ')}"
        rows[prefix] = f"{title}: all three"
    return rows


def trunk_depths(seeds: Seeds, kind: str) -> list[int]:
    """How many layers were merged whole at the front, of members that are "whole" or pruned "zero-shot"."""
    pattern = re.compile(rf"tunings-{kind}-trunk-(\d+)")
    return sorted(int(found[1]) for name in next(iter(seeds.values())) if (found := pattern.fullmatch(name)))


def trunk_rows(seeds: Seeds, setting: Setting) -> dict[str, str]:
    """Layers merged whole at the front, by their number."""
    rows = {}
    for kind, title in (("whole", "nothing pruned"), ("zero-shot", f"of {setting.heads_to_prune} heads those behind")):
        rows[f"tunings-{kind}"] = f"{title}: no layer"
        rows |= {f"tunings-{kind}-trunk-{n}": f"{title}: {n} layers" for n in trunk_depths(seeds, kind)}
    return rows | {"soup": "all layers, classifiers too (soup)"}


def trunk_way_rows(setting: Setting) -> dict[str, str]:
    """Three ways to a common first half of the layers."""
    lost = f"{setting.heads_behind_trunk} heads pruned behind it"
    return {
        "trunk-one-backbone": f"one backbone, {lost}, trained behind it",
        "trunk-frozen": f"fine-tunings whose first half was frozen, {lost}",
        "trunk-merged": f"fine-tunings merged in the first half, {lost}",
        "trunk-frozen-whole": "fine-tunings whose first half was frozen, nothing pruned",
        "trunk-merged-whole": "fine-tunings merged in the first half, nothing pruned",
    }


def scores_columns() -> list[Column]:
    return [
        (f"{title}, {group}", auroc(score, group), ".1f")
        for score, title in SCORES.items()
        for group in ("near", "far")
    ]


def fusion_table(reports: Mapping[str, dict[str, Any]]) -> str:
    """Why it works: the reports on three fine-tunings, one per seed."""
    if not reports:
        return ""
    each = list(reports.values())

    def over(value: Callable[[dict], float]) -> list[float]:
        return [value(report) for report in each]

    def mean_of(judged: list[dict], name: str) -> float:
        return mean(one[name] for one in judged)

    def cosine(kind: str, part: str) -> Callable[[dict], float]:
        return lambda report: mean(report[kind][part].values())

    rows: list[tuple[str, Callable[[dict], float], str]] = [
        ("accuracy of a fine-tuning in its own body", lambda r: 100 * mean_of(r["alone"], "accuracy"), ".2f"),
        ("… in the common one", lambda r: 100 * mean_of(r["fused"]["members"], "accuracy"), ".2f"),
        ("NLL of a fine-tuning in its own body", lambda r: mean_of(r["alone"], "nll"), ".3f"),
        ("… in the common one", lambda r: mean_of(r["fused"]["members"], "nll"), ".3f"),
        ("barrier on the way to the mean (NLL)", lambda r: r["barrier"], ".3f"),
        ("disagreement, nothing shared", lambda r: r["diversity"]["not fused"]["disagreement"], ".3f"),
        ("… only attention of their own", lambda r: r["diversity"]["attention"]["disagreement"], ".3f"),
        ("… only MLPs of their own", lambda r: r["diversity"]["mlp"]["disagreement"], ".3f"),
    ]
    for part in each[0]["weight_cosines"]:
        rows.append((f"cosine of their {part} weights", cosine("weight_cosines", part), ".3f"))
        if each[0].get("difference_cosines"):
            rows.append(("… of what was learned there", cosine("difference_cosines", part), ".3f"))
    lines = ["| | |", "|---|--:|"]
    lines += [f"| {title} | {cell(over(value), form)} |" for title, value, form in rows]
    return "\n".join(lines)


def render(name: str, content: dict[str, Any], setting: Setting, above_single: float) -> dict[str, str]:
    """The tables of one setting by name, `setting/table`."""
    seeds = content["seeds"]
    tables = {
        "summary": table(seeds, summary_rows(seeds, setting), (MULTIPLY_ADDS, ACCURACY, ECE, NEAR, FAR, DISAGREEMENT)),
        "aims": aims_table(seeds, setting, above_single),
        "choice": choice_table(seeds, setting),
        "quality": table(seeds, quality_rows(setting), QUALITY),
        "temperature": table(seeds, with_temperatures(quality_rows(setting)), (ECE, NLL, NEAR, FAR)),
        "members": table(seeds, member_rows(setting), (*QUALITY, MULTIPLY_ADDS)),
        "sharing": table(seeds, sharing_rows(), QUALITY),
        "trunk": table(seeds, trunk_rows(seeds, setting), (*QUALITY, MULTIPLY_ADDS)),
        "deep-trunks": deep_trunk_table(seeds, setting),
        "trunk-ways": table(seeds, trunk_way_rows(setting), (*QUALITY, MULTIPLY_ADDS)),
        "scores": table(seeds, quality_rows(setting), scores_columns()),
        "sets": table(seeds, quality_rows(setting), set_columns(seeds)),
        "cost": table(seeds, quality_rows(setting), (PARAMETERS, MULTIPLY_ADDS)),
        "why": fusion_table(content.get("fusion", {})),
    }
    under_shift = shift_rows(seeds, setting)
    tables |= shift_tables.tables(seeds, under_shift, with_temperatures(under_shift))
    return {f"{name}/{label}": text for label, text in tables.items()}
