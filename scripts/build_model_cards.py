"""Writes model_cards/: the template, and the card of a Hydra that was fine-tuned in one run.

    python scripts/build_model_cards.py                   # from experiments/results
    python scripts/build_model_cards.py --check           # fail if a file is out of date

Every figure of the card comes from the results file; sizes are counted on the model without weights, and must equal those of the
results.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from experiments.one_run_table import chosen_rows
from experiments.runs import SETTINGS
from hydra_transformers import HydraViTConfig, HydraViTForImageClassification
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.fusion.structure import without_weights
from hydra_transformers.hub import create_model_card
from hydra_transformers.hub.card import TEMPLATE
from hydra_transformers.reports import Report


ROOT = Path(__file__).parents[1]
FOLDER, RESULTS = ROOT / "model_cards", ROOT / "experiments" / "results" / "one-run-images.json"
NAME, HYDRA = "hydra-dinov2-small-tinyimagenet", "This Hydra"
MEMBERS, LAYERS, HEADS, TRUNK, EPOCHS = 3, 12, 6, 9, 9
SEED = SETTINGS["images"].seeds[0]
COMPARED = ("One model", f"Deep Ensemble of {MEMBERS}")  # what the report has beside the Hydra


def hydra() -> PreTrainedModel:
    """The model that was judged, without weights."""
    config = HydraViTConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=112,
        patch_size=14,
        num_labels=100,
        kept_heads=[[list(range(HEADS))] * MEMBERS] * LAYERS,
        trunk_layers=TRUNK,
        shared=["embeddings"],
    )
    return without_weights(HydraViTForImageClassification, config)


def measured() -> dict[str, dict[str, Any]]:
    """Title -> what was measured, of the first seed, at the learning rates that validation rows chose."""
    published = chosen_rows(json.loads(RESULTS.read_text(encoding="utf-8")))
    titles = {title: title for title in COMPARED} | {HYDRA: f"One run, {TRUNK} layers shared, {EPOCHS} epochs"}
    return {
        title: next(row for row in published[name] if row["run"]["seed"] == SEED) for title, name in titles.items()
    }


def card() -> ModelCard:
    model, found = hydra(), measured()
    judged, run = found[HYDRA], found[HYDRA]["run"]
    for name, count in (("parameters", count_parameters), ("work", count_multiply_adds)):
        if count(model) != judged[name]:
            raise SystemExit(f"the model has {count(model):,} as {name}, the one that was judged {judged[name]:,}")
    tests = {title: row["test"] for title, row in found.items()}
    known = ("accuracy", "brier", "nll", "ece", "aece", "aurc", "mutual_information", "disagreement")
    report = Report(
        "single_label_classification",
        {title: {"data": {name: test[name] for name in known}} for title, test in tests.items()},
        "msp",
        {"data": ("id", "data", "")},
        {title: 1 if title == "One model" else MEMBERS for title in tests},
    )
    near, far = ([f"{100 * test[f'{group}_msp']:.1f}" for test in tests.values()] for group in ("near", "far"))
    sentences = f"""\
One run of `python -m experiments.one_run`: DINOv2-S (as a ViT for images of 112 pixels that reads its [CLS] token), of which {MEMBERS}
members share the first {TRUNK} of {LAYERS} layers, fine-tuned for {run["epochs"]} epochs on 100 classes of Tiny ImageNet with a learning
rate of {run["learning_rate"]:g}, {run["branch_rate"]:g} times that behind the shared layers.

The figures are of one seed on 5,000 test images; `docs/results.md` of hydra_transformers has three seeds and more methods. AUROC by the
maximum probability of {", ".join(tests)}: {" / ".join(near)} against 50 other classes, {" / ".join(far)} against MNIST, textures,
noise and drawings."""
    made = create_model_card(
        model,
        report,
        repo_id=f"me/{NAME}",
        dataset="zh-plus/tiny-imagenet",
        fine_tuning=sentences,
        report_model=HYDRA,
    )
    for result in made.data.eval_results or ():
        result.dataset_name = "Tiny ImageNet, 100 of its 200 classes"
    return made


def files() -> dict[Path, str]:
    """Path -> content of everything in model_cards/."""
    return {FOLDER / "template.md": TEMPLATE.read_text(encoding="utf-8"), FOLDER / f"{NAME}.md": str(card())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is out of date")
    arguments = parser.parse_args()
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{path.name} is out of date" if arguments.check else f"writing {path.name}")
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
