"""The results of fine-tunings of pre-trained models as markdown tables."""

import re
from collections.abc import Mapping
from statistics import mean
from typing import Any

from .deep_trunk_tables import deep_trunk_table
from .setting import Setting
from .shift_tables import shift_table
from .table import ACCURACY, BOTH, BY_ENERGY, ECE, TEMPERED_ECE, Column, Run, Seeds, auroc, table


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


NEAR: Column = ("near AUROC ↑", auroc(group="near"), ".1f")
FAR: Column = ("far AUROC ↑", auroc(group="far"), ".1f")
DISAGREEMENT: Column = (
    "disagreement",
    lambda run: mean(each["disagreement"] for each in run["ood"]["msp"]["near"].values()),
    ".3f",
)
COST: Column = ("work", lambda run: run["multiply_adds"] / run["single"]["multiply_adds"], ".2f")
QUALITY = (COST, ACCURACY, ECE, TEMPERED_ECE, NEAR, FAR, BY_ENERGY, DISAGREEMENT)


def quality_rows(seeds: Seeds, setting: Setting) -> dict[str, str]:
    """Every method that is shown."""
    heads = f"{setting.heads_to_prune} heads pruned, fine-tuned"
    return {
        **BASELINES,
        "hydra-taylor": f"Hydra of one fine-tuning by Taylor scores, {heads}",
        "hydra-circ": f"Hydra of one fine-tuning by circuits, {heads}",
        "tunings-whole": "**Hydra of the three fine-tunings**",
        **{f"tunings-whole-trunk-{n}": f"**…** {n} layers merged" for n in trunk_depths(seeds)},
        "tunings": f"**…** {heads}",
        "tunings-not-fused": f"**…** {heads}, nothing shared",
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


def render(name: str, content: dict[str, Any], setting: Setting) -> dict[str, str]:
    """The tables of one setting by name, `setting/table`."""
    seeds = with_beside(content["seeds"])
    tables = {
        "quality": table(seeds, quality_rows(seeds, setting), QUALITY),
        "members": table(seeds, member_rows(), (COST, ACCURACY, TEMPERED_ECE, BOTH)),
        "deep-trunks": deep_trunk_table(seeds, setting),
        "shift": shift_table(seeds, quality_rows(seeds, setting)),
    }
    return {f"{name}/{label}": text for label, text in tables.items()}
