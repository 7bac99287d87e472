"""What to look at first: all methods on both pre-trained models, as one table and as one picture of quality against cost."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from .fine_tuning_tables import trunk_depths
from .setting import Setting
from .table import ACCURACY, BOTH, ECE, Column, Run, Seeds, cell, cost_of


PICTURE = "quality-against-cost.png"
# Colours by what a method trains: one model, several, Hydras (Okabe and Ito's).
ONE, SEVERAL, HYDRA = "#7F7F7F", "#0072B2", "#D55E00"


def methods(seeds: Seeds) -> dict[str, str]:
    """{title: method}, with the same titles for every setting."""
    depths = trunk_depths(seeds)
    return {
        "One model": "single",
        "MC Dropout, 10 passes": "mc-dropout",
        "LoRA Ensemble of 3": "lora-ensembles",
        "BatchEnsemble of 3": "batch-ensemble",
        "MIMO of 3": "mimo",
        "Deep Ensemble of 3 fine-tunings": "deep-ensembles",
        "their soup, one model": "soup",
        "Hydra as in the paper: 3 circuits of one fine-tuning, tuned": "hydra-circ",
        "**Hydra of the 3 fine-tunings**, nothing pruned": "tunings-whole",
        "**…** the first half of the layers merged": f"tunings-whole-trunk-{depths[len(depths) // 2]}",
        "**…** the first three quarters merged": f"tunings-whole-trunk-{depths[-1]}",
        "**…** each pruned by its own circuit and tuned": "tunings",
    }


# What the picture has and the table leaves to the pages of the settings. They cost what one model does, and are drawn side by
# side to be told apart.
ONLY_DRAWN = {
    "LoRA, one adapter": "lora-single",
    "Laplace on the last layer": "last-layer-laplace",
    "Classifiers on one backbone, 3": "heads",
    "OBA, fine-tuned": "oba-tuned",
}


def table_of_all(results: Mapping[str, Any], settings: Mapping[str, Setting]) -> str:
    """Both settings side by side; without spreads, which the pages of the settings have."""
    shown = [(settings[name], results[name]["seeds"]) for name in results]
    heads = [
        f"{column}, {short_name(setting)}" for setting, _ in shown for column in ("work", "Acc ↑", "ECE ↓", "AUROC ↑")
    ]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for title in methods(shown[0][1]):
        if not all(_runs(seeds, methods(seeds)[title]) for _, seeds in shown):
            continue  # judged in one of them, or in none
        cells = []
        for _, seeds in shown:
            method = methods(seeds)[title]
            tempered = "temperature" if method == "single" else f"{method}-temperature"

            def over_seeds(column: Column, name: str, seeds: Seeds = seeds) -> str:
                found = [column[1](of_seed[name]) for of_seed in seeds.values() if name in of_seed]
                return cell([mean(found)], column[2])

            single = next(iter(seeds.values()))["single"]
            ece = f"{over_seeds(ECE, method)} ({over_seeds(ECE, tempered)})"
            cells += [over_seeds(cost_of(single), method), over_seeds(ACCURACY, method), ece, over_seeds(BOTH, method)]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# The first table of the README: five methods, and what they are called in the measured times, if they are there.
FIRST = {
    "One model": ("One model", "single"),
    "Three models, averaged into one (a soup)": ("their soup, one model", None),
    "Three models side by side (a Deep Ensemble)": ("Deep Ensemble of 3 fine-tunings", "3 models in sequence"),
    "**Hydra of the three**, three quarters of the layers merged": (
        "**…** the first three quarters merged",
        "Hydra 3, three quarters merged",
    ),
    "**Hydra of the three**, nothing merged": (
        "**Hydra of the 3 fine-tunings**, nothing pruned",
        "Hydra 3, nothing merged",
    ),
}
BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "results"
TIMES = "inference_cost_h200.json"
MODES = ("eager", "compiled")
FAMILIES = {"tinyimagenet-dinov2": "vit", "sst2-gte": "bert"}  # whose times stand for a setting
TIMED = {"vit": "ViT-B/16", "bert": "BERT-base, 128 tokens"}  # the models whose times were measured
BATCHES = (1, 4, 32, 256)


def times(family: str, method: str | None, mode: str, batches: Sequence[int]) -> list[str]:
    """Times of batches on an H200 in bfloat16, those of one Transformers model in the same mode being 1; a dash was not measured."""
    found = {
        row["batch"]: f"{row['ratio']:.2f}"
        for row in json.loads((BENCHMARKS / TIMES).read_text())["rows"]
        if (row["family"], row["method"], row["mode"], row["dtype"]) == (family, method, mode, "bfloat16")
    }
    return [found.get(batch, "-") for batch in batches]


def table_of_times() -> str:
    columns = [f"{mode}, batch {batch}" if batch == BATCHES[0] else f"{batch}" for mode in MODES for batch in BATCHES]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for family, model in TIMED.items():
        for title, (_, method) in FIRST.items():
            if method is not None:
                cells = [each for mode in MODES for each in times(family, method, mode, BATCHES)]
                lines.append(f"| {model}: {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def first_table(seeds: Seeds, family: str) -> str:
    """Work, time, accuracy, calibration and detection of a few methods, as far as they were judged; means over the seeds."""
    found, single = methods(seeds), next(iter(seeds.values()))["single"]

    def over_seeds(column: Column, method: str) -> str:
        return cell([mean(column[1](run) for run in _runs(seeds, method))], column[2])

    lines = [
        f"| | work | time of {TIMED[family]}, batch 1 / 256 | … compiled | accuracy | calibration error "
        "| unfamiliar inputs detected (AUROC) |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for title, (name, timed) in FIRST.items():
        method = found[name]
        if not _runs(seeds, method):
            continue
        tempered = "temperature" if method == "single" else f"{method}-temperature"
        cells = [
            over_seeds(cost_of(single), method),
            *(" / ".join(times(family, timed, mode, (1, 256))) for mode in MODES),
            f"{over_seeds(ACCURACY, method)} %",
            over_seeds(ECE, tempered),
            f"{over_seeds(BOTH, method)} %",
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _runs(seeds: Seeds, method: str) -> list[Run]:
    return [of_seed[method] for of_seed in seeds.values() if method in of_seed]


def short_name(setting: Setting) -> str:
    return setting.title.split(",")[0].removeprefix("100 classes of ")


# How a method is drawn: grey what is one model, blue several, orange Hydras.
LOOKS = {
    "One model": ("one model", "o", ONE),
    "their soup, one model": ("soup of 3 fine-tunings", "s", ONE),
    "LoRA Ensemble of 3": ("LoRA Ensemble of 3", "^", SEVERAL),
    "BatchEnsemble of 3": ("BatchEnsemble of 3", "s", SEVERAL),
    "MIMO of 3": ("MIMO of 3", "X", ONE),
    "MC Dropout, 10 passes": ("MC Dropout, 10 passes", "d", ONE),
    "LoRA, one adapter": ("one LoRA adapter", "^", ONE),
    "Laplace on the last layer": ("Laplace on the last layer", "D", ONE),
    "Classifiers on one backbone, 3": ("3 classifiers on one backbone", "<", ONE),
    "OBA, fine-tuned": ("OBA, fine-tuned", "v", ONE),
    "Deep Ensemble of 3 fine-tunings": ("Deep Ensemble of 3 fine-tunings", "o", SEVERAL),
    "Hydra as in the paper: 3 circuits of one fine-tuning, tuned": ("Hydra of one fine-tuning (paper)", "v", HYDRA),
    "**Hydra of the 3 fine-tunings**, nothing pruned": ("Hydra of 3 fine-tunings", "D", HYDRA),
    "**…** the first half of the layers merged": ("… first half merged", "<", HYDRA),
    "**…** the first three quarters merged": ("… first three quarters merged", "P", HYDRA),
    "**…** each pruned by its own circuit and tuned": ("… each pruned and tuned", "*", HYDRA),
}
# A method that costs more than so many models, or whose AUROC is so many points below one model's, would squeeze the others
# together: its figures are written beside the picture.
FAR_IN_COST, FAR_IN_AUROC = 4, 5
ASIDE = 0.05


def draw(results: Mapping[str, Any], settings: Mapping[str, Setting], folder: Path) -> Path:
    """Detection and accuracy against multiply-adds, a column per setting; bars are standard deviations over the seeds."""
    from hydra_transformers._io.pictures import Figure, write_png

    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(2, len(results), sharex=True, squeeze=False)
    measures = ((BOTH, "AUROC, mean of near and far (%)"), (ACCURACY, "accuracy (%)"))
    for column, name in enumerate(results):
        seeds, setting = results[name]["seeds"], settings[name]
        cost = cost_of(next(iter(seeds.values()))["single"])[1]
        drawn = methods(seeds) | ONLY_DRAWN
        found = {title: _runs(seeds, method) for title, method in drawn.items()}
        away = {title for title, runs in found.items() if runs and far_off(runs, found["One model"], cost)}
        panels[0, column].set_title(setting.title, fontsize=10)
        panels[1, column].set_xlabel("multiply-adds, one model = 1 (hollow: these cost 1, too)")
        for panel, ((_, value, _), label) in zip(panels[:, column], measures, strict=True):
            for title, (short, marker, colour) in LOOKS.items():
                runs = found[title]
                if not runs or title in away:
                    continue
                values = [value(run) for run in runs]
                aside = ASIDE * (1 + list(ONLY_DRAWN).index(title)) if title in ONLY_DRAWN else 0
                panel.errorbar(
                    mean(map(cost, runs)) + aside,
                    mean(values),
                    stdev(values) if len(values) > 1 else None,
                    fmt=marker,
                    color=colour,
                    label=short,
                    capsize=2,
                    markersize=9 if marker in "*P" else 7,
                    fillstyle="none" if aside else "full",
                )
            panel.set_ylabel(label)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        if away:
            notes = [note_on(title, found[title], cost) for title in LOOKS if title in away]
            panels[0, column].set_xlabel("not shown: " + "\n".join(notes), fontsize=8)
    handles = {
        label: handle for panel in panels[0] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    labels = [short for short, _, _ in LOOKS.values() if short in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=3, frameon=False)
    return write_png(figure, folder / PICTURE)


def far_off(runs: list[Run], single: list[Run], cost: Callable[[Run], float]) -> bool:
    auroc = BOTH[1]
    return mean(map(cost, runs)) > FAR_IN_COST or mean(map(auroc, runs)) < mean(map(auroc, single)) - FAR_IN_AUROC


def note_on(title: str, runs: list[Run], cost: Callable[[Run], float]) -> str:
    """What a method that is not drawn costs and reaches."""
    figures = (mean(map(value, runs)) for value in (cost, BOTH[1], ACCURACY[1]))
    return "{}: cost {:.0f}, AUROC {:.1f}, accuracy {:.1f}".format(title.split(",")[0], *figures)
