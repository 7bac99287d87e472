"""Writes model_cards/, the cards of trained models, or the folder of such a model from a run.

    python scripts/build_model_cards.py                   # the cards, from experiments/results
    python scripts/build_model_cards.py --check           # fail if a file is out of date
    python -m scripts.build_model_cards --run runs/sst2-gte --output hydra-gte-small-sst2    # model, processor, report, card

A run is a folder that `python -m experiments` wrote. Every figure of a card comes from its results; sizes are counted on the model
without weights, and must equal those of the results. The folder is ready for `hydra-transformers push`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, ViTImageProcessorPil

from experiments.recipes import RECIPES
from hydra_transformers import (
    AutoHydra,
    HydraBertConfig,
    HydraBertForSequenceClassification,
    HydraViTConfig,
    HydraViTForImageClassification,
)
from hydra_transformers._io.files import written_whole
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.fusion import without_weights
from hydra_transformers.hub import create_model_card
from hydra_transformers.hub.card import TEMPLATE
from hydra_transformers.models.auto import load_trained
from hydra_transformers.reports import Report


ROOT = Path(__file__).parents[1]
FOLDER, RESULTS = ROOT / "model_cards", ROOT / "experiments" / "results"
SEED, MEMBERS, LAYERS, TRUNK = "0", 3, 12, 6
METHOD, HYDRA = f"tunings-whole-trunk-{TRUNK}", "This Hydra"


@dataclass(frozen=True)
class Shipped:
    """A model of the comparison: three fine-tunings of seed 0, the first half of their layers merged.

    setting: its name in experiments/
    config: makes its config, as it was in the run
    processor: makes the run's processor from the folder or name that the run started from
    class_names: of the data, if known
    started_from: what was fine-tuned, in words
    start: the same on the Hub, if it is there unchanged
    license: of what was fine-tuned, which holds for the weights made of it; None if that is not on the Hub unchanged
    """

    setting: str
    model_class: type[PreTrainedModel]
    config: Callable[[], PreTrainedConfig]
    processor: Callable[[str], Any]
    recipe: str
    dataset: str
    data: str
    foreign: str
    started_from: str
    start: str | None = None
    license: str | None = None
    class_names: tuple[str, ...] = ()


def all_heads(count: int) -> list[list[list[int]]]:
    """kept_heads of members that keep all heads."""
    return [[list(range(count))] * MEMBERS] * LAYERS


def dinov2_config() -> PreTrainedConfig:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": LAYERS, "num_attention_heads": 6}
    return HydraViTConfig(
        **sizes, image_size=112, patch_size=14, num_labels=100, kept_heads=all_heads(6), trunk_layers=TRUNK
    )


def gte_config() -> PreTrainedConfig:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": LAYERS, "num_attention_heads": 12}
    return HydraBertConfig(**sizes, num_labels=2, kept_heads=all_heads(12), trunk_layers=TRUNK)


def image_processor(start: str) -> Any:
    return ViTImageProcessorPil(
        size={"height": 112, "width": 112}, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    )


SHIPPED = {
    "hydra-dinov2-small-tinyimagenet": Shipped(
        "tinyimagenet-dinov2",
        HydraViTForImageClassification,
        dinov2_config,
        image_processor,
        "finetune-images",
        "zh-plus/tiny-imagenet",
        "100 classes of Tiny ImageNet, less 30 images of each that were held out",
        "Near: 50 other classes of Tiny ImageNet. Far: MNIST, textures (DTD), and noise and drawings that were made up. "
        "Corrupted: 1,000 of the 5,000 test images",
        "DINOv2-S (a public checkpoint that had been fine-tuned for saliency, its weights rounded to 8 bits; as a ViT for images of "
        "112 pixels that reads its [CLS] token)",
    ),
    "hydra-gte-small-sst2": Shipped(
        "sst2-gte",
        HydraBertForSequenceClassification,
        gte_config,
        lambda start: AutoTokenizer.from_pretrained(start, model_max_length=128),
        "finetune-texts",
        "stanfordnlp/sst2",
        "SST-2, less the first 3,000 rows, which were held out",
        "Near: titles of Amazon reviews, and test rows spliced from two. Far: questions (TREC), premises of RTE, and test rows "
        "with their words mixed",
        "gte-small (a BERT, its weights rounded to 8 bits, with a new pooler)",
        "thenlper/gte-small",
        "mit",
        ("negative", "positive"),
    ),
}


# What was measured


def measured(setting: str) -> dict[str, Any]:
    """The results of a setting: method -> metrics for the shipped seed, and where they were measured."""
    return json.loads((RESULTS / f"{setting}.json").read_text(encoding="utf-8"))


def of_run(run: Path) -> dict[str, Any]:
    """The results of a run."""
    paths = sorted((run / "results" / SEED).glob("*.json"))
    if not paths:
        raise SystemExit(f"{run} has no results of seed {SEED}: pass a folder of python -m experiments, runs/SETTING")
    return {"seeds": {SEED: {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}}}


def report_of(results: Mapping[str, Any]) -> Report:
    """This Hydra beside the models it is made from and compared with, on the same rows."""
    methods = results["seeds"][SEED]
    temperature = methods[f"{METHOD}-temperature"]["temperature"]
    names = {
        "One fine-tuning": "single",
        f"Deep Ensemble of the {MEMBERS} fine-tunings": "deep-ensembles",
        "Their soup": "soup",
        HYDRA: METHOD,
        f"This Hydra with temperature {temperature:.2f}": f"{METHOD}-temperature",
    }
    missing = [method for method in names.values() if method not in methods]
    if missing:
        raise SystemExit(f"the results have no {missing[0]}: run the groups baselines, fine-tunings and trunk as well")
    models, groups = {}, {"data": ("id", "data", "")}
    for name, method in names.items():
        models[name] = {"data": methods[method]["id"]}
        for group, sets in methods[method]["ood"]["msp"].items():
            for data_set, metrics in sets.items():
                groups[f"{data_set} ({group})"] = (group, data_set, "")
                models[name][f"{data_set} ({group})"] = metrics
        shift = methods[method].get("shift", {"severities": [], "corruptions": {}})
        for corruption, values in shift["corruptions"].items():
            for place, severity in enumerate(shift["severities"]):
                title = f"{corruption}, severity {severity}"
                groups[title] = ("corruption", corruption, str(severity))
                models[name][title] = {metric: each[place] for metric, each in values.items()}
    members = {name: methods[method]["num_members"] for name, method in names.items()}
    return Report("single_label_classification", models, "msp", groups, members)


def check_sizes(model: PreTrainedModel, results: Mapping[str, Any]) -> None:
    """Refuses a model of another size than the evaluated one."""
    judged = results["seeds"][SEED][METHOD]
    for name, count in (("parameters", count_parameters), ("multiply_adds", count_multiply_adds)):
        if count(model) != judged[name]:
            raise SystemExit(f"the model has {count(model):,} {name}, the one that was judged {judged[name]:,}")


# Cards and folders


def fine_tuning_sentences(name: str, results: Mapping[str, Any]) -> str:
    shipped = SHIPPED[name]
    epochs = RECIPES[shipped.recipe].arguments["num_train_epochs"]
    where = ", ".join(results[part] for part in ("machine", "versions", "date") if part in results)
    started = f" --start {shipped.setting}=FOLDER" if shipped.start is None else ""
    return f"""\
{MEMBERS} fine-tunings of {shipped.started_from}, each with a new classifier and another order of the rows: recipe
`{shipped.recipe}`, {epochs:g} epochs, on {shipped.data}. The first {TRUNK} of {LAYERS} layers are the mean over them, attention
too; nothing was trained after that.

This makes the folder, ready for `hydra-transformers push`, in a checkout of hydra_transformers (`pip install .`):

```bash
python -m experiments --settings {shipped.setting}{started}
python -m scripts.build_model_cards --run runs/{shipped.setting} --output {name}
```

The figures below are of seed {SEED}, judged in bfloat16{f" ({where})" if where else ""}. {shipped.foreign}. A run of your own has
figures of its own, which its card then shows; `docs/results/{shipped.setting}.md` there has all seeds, with their spread."""


def card_of(name: str, model: PreTrainedModel, results: Mapping[str, Any]) -> ModelCard:
    """The card of a shipped model, with or without weights."""
    check_sizes(model, results)
    return create_model_card(
        model,
        report_of(results),
        repo_id=f"me/{name}",
        base_model=SHIPPED[name].start,
        dataset=SHIPPED[name].dataset,
        license=SHIPPED[name].license,
        fine_tunings=True,
        fine_tuning=fine_tuning_sentences(name, results),
        report_model=HYDRA,
    )


def files() -> dict[Path, str]:
    """Path -> content of everything in model_cards/."""
    cards = {}
    for name, shipped in SHIPPED.items():
        model = without_weights(shipped.model_class, shipped.config())
        cards[FOLDER / f"{name}.md"] = str(card_of(name, model, measured(shipped.setting)))
    return {FOLDER / "template.md": TEMPLATE.read_text(encoding="utf-8"), **cards}


def write_folder(run: Path, output: Path, start: str | None = None) -> None:
    """Writes a run's model with its code, processor, report and card.

    start: for texts, the folder or name of the tokenizer
    """
    name = next((name for name, shipped in SHIPPED.items() if shipped.setting == run.resolve().name), None)
    if name is None:
        known = ", ".join(shipped.setting for shipped in SHIPPED.values())
        raise SystemExit(f"--run is {run}: pass the folder of a setting that has a card, {known}")
    if output.exists():
        raise SystemExit(f"--output {output} exists already: pass another, or remove it")
    from experiments.units import ensemble

    shipped, results = SHIPPED[name], of_run(run)
    numbers = json.loads((run / "numbers.json").read_text(encoding="utf-8"))
    report = report_of(results)
    members = [load_trained(run / f"backbone-{index}" / "member-0") for index in ensemble(int(SEED), **numbers)]
    hydra = AutoHydra.from_pruned_members(members, trunk_layers=members[0].config.num_hidden_layers // 2)
    if shipped.class_names:
        hydra.config.id2label = dict(enumerate(shipped.class_names))
        hydra.config.label2id = {label: index for index, label in enumerate(shipped.class_names)}
    card, processor = card_of(name, hydra, results), shipped.processor(start or shipped.start or "")
    with written_whole(output) as folder:
        hydra.save_pretrained(folder)
        processor.save_pretrained(folder)
        (folder / "evaluation").mkdir()
        report.to_json(folder / "evaluation" / "report.json")
        card.save(folder / "README.md")
    print(f"{output} is ready: hydra-transformers push {output} me/{name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is out of date")
    parser.add_argument("--run", type=Path, metavar="DIR", help="make the folder of this run's model: runs/SETTING")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where it goes, with --run")
    parser.add_argument(
        "--start", metavar="NAME_OR_FOLDER", help="for texts, where the tokenizer is (default: the Hub)"
    )
    arguments = parser.parse_args()
    if (arguments.run is None) != (arguments.output is None):
        parser.error("--run and --output go together")
    if arguments.run is not None:
        write_folder(arguments.run, arguments.output, arguments.start)
        return 0
    wanted = files()
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text("utf-8") != content]
    strangers = sorted(set(FOLDER.glob("*.md")) - set(wanted))
    for path in stale:
        advice = f"{path.name} is out of date: run python scripts/build_model_cards.py"
        print(advice if arguments.check else f"writing {path.name}")
    for path in strangers:
        print(f"{path.name} belongs to no trained model: remove it")
    if arguments.check:
        return 1 if stale or strangers else 0
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
