"""Hydras with deep trunks, better members and fewer trainings, as a markdown table."""

from statistics import mean

from .setting import Setting
from .table import ACCURACY, BOTH, BY_ENERGY, TEMPERED_ECE, Column, Run, Seeds, cost_of, table


def rows(setting: Setting) -> dict[str, str]:
    """{method: title}, in the order of the table; of the deep trunks the first and the last."""
    first, last = setting.deep_trunks[0], setting.deep_trunks[-1]

    def merged(name: str, title: str) -> dict[str, str]:
        return {f"{name}-trunk-{depth}": f"{title}, {depth or 'no'} layers merged" for depth in (0, first, last)}

    return {
        "three-single": "one fine-tuning",
        "three-soup": "soup of three fine-tunings",
        "three-deep-ensembles": "Deep Ensemble of three fine-tunings",
        **merged("three", "three fine-tunings"),
        f"joint-three-trunk-{last}": f"… tuned jointly with a teacher, {last} layers merged",
        f"joint-labels-trunk-{last}": f"… with labels alone, {last} layers merged",
        **merged("six", "six fine-tunings averaged in pairs"),
        f"joint-six-trunk-{last}": f"… tuned jointly with a teacher, {last} layers merged",
        **merged("restarts", "one run, three restarts"),
        f"joint-restarts-trunk-{last}": f"… tuned jointly with a teacher, {last} layers merged",
    }


def deep_trunk_table(seeds: Seeds, setting: Setting) -> str:
    """Work is multiply-adds, one fine-tuning's being 1. AUROC is the mean of the groups by the maximum probability. The last
    column is what variants are chosen by: the mean of accuracy and AUROC on validation rows.

    seeds: the runs with what `fine_tuning_tables.with_beside` adds
    """
    judged = {
        seed: {name: run for name, run in methods.items() if "trainings" in run}
        for seed, methods in seeds.items()
        if "three-single" in methods
    }
    if not judged:
        return "Not judged yet."
    columns: list[Column] = [
        ("trainings", lambda run: run["trainings"], ".2f"),
        cost_of(next(iter(judged.values()))["three-single"]),
        ACCURACY,
        TEMPERED_ECE,
        BOTH,
        BY_ENERGY,
        ("validation", on_validation, ".2f"),
    ]
    return table(judged, rows(setting), columns)


def on_validation(run: Run) -> float | None:
    if "validation" not in run:
        return None
    auroc = run["validation"]["ood"]["msp"][""][""]["auroc"]
    return mean([100 * run["validation"]["id"]["accuracy"], 100 * auroc])
