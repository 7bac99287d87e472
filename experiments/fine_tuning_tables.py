"""The results of fine-tunings of pre-trained models as markdown tables, and the choice made on validation rows."""

import re
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from .deep_trunk_tables import deep_trunk_table
from .setting import Setting
from .shift_tables import shift_table
from .table import Column, Run, Seeds, cell, table


SCORES = {"msp": "MSP", "energy": "energy", "mutual_information": "MI"}

BASELINES = {
    "single": "Single",
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
ECE: Column = ("ECE ↓", lambda run: run["id"]["ece"], ".3f")
NEAR: Column = ("near AUROC ↑", auroc(group="near"), ".1f")
FAR: Column = ("far AUROC ↑", auroc(group="far"), ".1f")
BOTH: Column = ("AUROC ↑", auroc(), ".1f")
DISAGREEMENT: Column = (
    "disagreement",
    lambda run: mean(each["disagreement"] for each in run["ood"]["msp"]["near"].values()),
    ".3f",
)
MULTIPLY_ADDS: Column = ("Multiply-adds", lambda run: run["multiply_adds"] / 1e9, ".2f G")
COST: Column = ("work", lambda run: run["multiply_adds"] / run["single"]["multiply_adds"], ".2f")
# Of a run with a temperature: one for the members' mean, as `calibrate` fits it, or where that was not judged one for each
# member's logits.
POOLED_ECE: Column = ("ECE ↓", lambda run: run.get("pooled", run["id"])["ece"], ".3f")
TEMPERED_ECE: Column = ("… with a temperature", lambda run: run["tempered"] and POOLED_ECE[1](run["tempered"]), ".3f")
BY_ENERGY: Column = ("AUROC by energy ↑", auroc("energy"), ".1f")
QUALITY = (COST, ACCURACY, ECE, TEMPERED_ECE, NEAR, FAR, BY_ENERGY, DISAGREEMENT)


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
            POOLED_ECE,
            POOLED_ECE,
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


def quality_rows(seeds: Seeds, setting: Setting) -> dict[str, str]:
    """Every method that is shown; of members that were pruned and not tuned, and of other numbers of heads, the results have more."""
    heads = f"{setting.heads_to_prune} heads pruned, fine-tuned"
    chosen = chosen_hydra(seeds, setting)
    return {
        **BASELINES,
        "hydra-taylor": f"Hydra of one fine-tuning by Taylor scores, {heads}",
        "hydra-circ": f"Hydra of one fine-tuning by circuits, {heads}",
        "tunings-whole": "**Hydra of the three fine-tunings**",
        **{f"tunings-whole-trunk-{n}": f"**…** {n} layers merged" for n in trunk_depths(seeds)},
        chosen: f"**…** {candidates(setting)[chosen]}",
    }


def member_rows() -> dict[str, str]:
    rows = {}
    for count, ending in ((2, "-of-2"), (3, ""), (5, "-of-5")):
        rows[f"deep-ensembles{ending}"] = f"Deep Ensemble of {count}"
        rows[f"tunings-whole{ending}"] = f"Hydra of {count}, nothing merged"
    return rows


def trunk_depths(seeds: Seeds) -> list[int]:
    """How many layers were merged whole at the front."""
    pattern = re.compile(r"tunings-whole-trunk-(\d+)")
    return sorted(int(found[1]) for name in next(iter(seeds.values())) if (found := pattern.fullmatch(name)))


def with_beside(seeds: Seeds) -> dict[str, dict[str, Run]]:
    """The runs with what columns need beside them: one model's work, and the same method with a temperature."""

    def beside(methods: Mapping[str, Run], name: str) -> Run:
        tempered = methods.get("temperature" if name == "single" else f"{name}-temperature")
        return {"single": methods.get("single"), "tempered": tempered}

    return {
        seed: {name: run | beside(methods, name) for name, run in methods.items()} for seed, methods in seeds.items()
    }


def render(name: str, content: dict[str, Any], setting: Setting, above_single: float) -> dict[str, str]:
    """The tables of one setting by name, `setting/table`."""
    seeds = with_beside(content["seeds"])
    tables = {
        "aims": aims_table(seeds, setting, above_single),
        "quality": table(seeds, quality_rows(seeds, setting), QUALITY),
        "members": table(seeds, member_rows(), (COST, ACCURACY, TEMPERED_ECE, BOTH)),
        "deep-trunks": deep_trunk_table(seeds, setting),
        "shift": shift_table(seeds, quality_rows(seeds, setting)),
    }
    return {f"{name}/{label}": text for label, text in tables.items()}
