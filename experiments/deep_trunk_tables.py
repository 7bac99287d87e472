"""Hydras with deep trunks, better members and fewer trainings, as a markdown table."""

from collections.abc import Callable
from statistics import mean

from .setting import Setting
from .table import Column, Run, Seeds, table


def rows(setting: Setting) -> dict[str, str]:
    """{method: title}, in the order of the table."""
    last = setting.deep_trunks[-1]
    found = {
        "three-single": "one fine-tuning",
        "three-soup": "soup of three fine-tunings",
        "three-deep-ensembles": "Deep Ensemble of three fine-tunings",
    }

    def merged(name: str, title: str) -> dict[str, str]:
        depths = (0, *setting.deep_trunks)
        return {f"{name}-trunk-{depth}": f"{title}, {depth or 'no'} layers merged" for depth in depths}

    def tuned(name: str, title: str) -> dict[str, str]:
        return {f"joint-{name}-trunk-{depth}": f"{title}, {depth} layers merged" for depth in setting.deep_trunks}

    found |= merged("three", "three fine-tunings")
    found |= tuned("three", "three fine-tunings, tuned jointly with a teacher")
    found |= {f"joint-labels-trunk-{last}": f"… with labels alone, {last} layers merged"}
    found |= merged("six", "six fine-tunings averaged in pairs")
    found |= tuned("six", "six averaged in pairs, tuned jointly with a teacher")
    found |= merged("restarts", "one run, three restarts")
    found |= merged("short", "one run, three shorter restarts")
    found |= tuned("restarts", "one run, three restarts, tuned jointly with a teacher")
    found |= tuned("short", "one run, three shorter restarts, tuned jointly with a teacher")
    found |= merged("changed", "three fine-tunings, images changed differently")
    return found | merged("changed-restarts", "one run, restarts with images changed differently")


def deep_trunk_table(seeds: Seeds, setting: Setting) -> str:
    """The cost is that of one fine-tuning's multiply-adds. ECE is that with one temperature for the members' mean. AUROC is
    the mean of the groups by the maximum probability. The last column is what variants are chosen by: the mean of accuracy and AUROC on validation rows."""
    judged = {
        seed: {name: run | _beside(methods, name) for name, run in methods.items() if "trainings" in run}
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
        ("cost", lambda run: run["cost"], ".2f"),
        ("Acc ↑", lambda run: 100 * run["id"]["accuracy"], ".2f"),
        ("ECE, temperature ↓", lambda run: run["pooled"]["ece"], ".3f"),
        *(
            (f"{group}, {title} ↑", auroc(score, group), ".1f")
            for group in groups
            for score, title in (("msp", "MSP"), ("energy", "energy"))
        ),
        ("AUROC ↑", lambda run: mean(auroc("msp", group)(run) for group in groups), ".1f"),
        ("validation", on_validation, ".2f"),
    ]
    return table(judged, rows(setting), columns)


def on_validation(run: Run) -> float | None:
    if "validation" not in run:
        return None
    auroc = run["validation"]["ood"]["msp"][""][""]["auroc"]
    return mean([100 * run["validation"]["id"]["accuracy"], 100 * auroc])


def _beside(methods: dict[str, Run], name: str) -> Run:
    """What the columns need beside a method's own results."""
    cost = methods[name]["multiply_adds"] / methods["three-single"]["multiply_adds"]
    return {"cost": cost, "pooled": methods.get(f"{name}-temperature", {}).get("pooled", {"ece": None})}
