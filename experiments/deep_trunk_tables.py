"""Hydras with deep trunks, better members and fewer trainings, as a markdown table."""

from collections.abc import Callable, Mapping
from statistics import mean

from .setting import Setting
from .table import TEMPERED_ECE, Column, Run, Seeds, table


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
        seed: {name: run | {"work": work_of(methods, run)} for name, run in methods.items() if "trainings" in run}
        for seed, methods in seeds.items()
        if "three-single" in methods
    }
    if not judged:
        return "Not judged yet."

    def auroc(score: str, group: str) -> Callable[[Run], float]:
        return lambda run: 100 * mean(each["auroc"] for each in run["ood"][score][group].values())

    groups = [group for group in ("near", "far") if group in next(iter(judged.values()))["three-single"]["ood"]["msp"]]
    columns: list[Column] = [
        ("trainings", lambda run: run["trainings"], ".2f"),
        ("work", lambda run: run["work"], ".2f"),
        ("Acc ↑", lambda run: 100 * run["id"]["accuracy"], ".2f"),
        TEMPERED_ECE,
        ("AUROC ↑", lambda run: mean(auroc("msp", group)(run) for group in groups), ".1f"),
        ("AUROC by energy ↑", lambda run: mean(auroc("energy", group)(run) for group in groups), ".1f"),
        ("validation", on_validation, ".2f"),
    ]
    return table(judged, rows(setting), columns)


def on_validation(run: Run) -> float | None:
    if "validation" not in run:
        return None
    auroc = run["validation"]["ood"]["msp"][""][""]["auroc"]
    return mean([100 * run["validation"]["id"]["accuracy"], 100 * auroc])


def work_of(methods: Mapping[str, Run], run: Run) -> float:
    return run["multiply_adds"] / methods["three-single"]["multiply_adds"]
