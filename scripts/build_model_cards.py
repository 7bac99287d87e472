"""Writes model_cards/: the template, the card of a Hydra that was fine-tuned in one run, and those of three pruned ones.

    python scripts/build_model_cards.py                   # from experiments/results
    python scripts/build_model_cards.py --check           # fail if a file is out of date

Every figure of a card comes from experiments/results; sizes are counted on models without weights. The pruned ones are those that
`python -m experiments.cards` made.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import AutoConfig, PreTrainedModel

import hydra_transformers
from experiments.cards import CARDS
from experiments.cards import HYDRA as PRUNED_HYDRA
from experiments.one_run_table import chosen_rows
from experiments.runs import SETTINGS
from hydra_transformers import HydraViTConfig, HydraViTForImageClassification
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.fusion.structure import without_weights
from hydra_transformers.hub import create_model_card
from hydra_transformers.hub.card import TEMPLATE
from hydra_transformers.pruning import Circuit
from hydra_transformers.pruning.circuits import FOLDER as CIRCUITS
from hydra_transformers.reports import Report


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "model_cards"
RESULTS = ROOT / "experiments" / "results" / "one-run-images.json"
NAME = "hydra-dinov2-small-tinyimagenet"
HYDRA = "This Hydra"
MEMBERS = 3
LAYERS = 12
HEADS = 6
TRUNK = 9
EPOCHS = 9
SEED = SETTINGS["images"].seeds[0]
LICENSE = "apache-2.0"
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
    model = hydra()
    found = measured()
    judged = found[HYDRA]
    run = found[HYDRA]["run"]
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
        repo_id=f"org/{NAME}",
        base_model="facebook/dinov2-small",
        dataset="zh-plus/tiny-imagenet",
        license=LICENSE,
        fine_tuning=sentences,
        report_model=HYDRA,
    )
    for result in made.data.eval_results or ():
        result.dataset_name = "Tiny ImageNet, 100 of its 200 classes"
    return made


@dataclass(frozen=True)
class Pruned:
    """What the folder of a pruned Hydra does not say.

    data: what people call the data
    dataset: its id on the Hub
    pruning: how the heads were chosen, where no circuits did
    """

    data: str
    dataset: str
    fine_tuning: str
    base_model: str | None = None
    pruning: str | None = None


DIGITS_ON_THE_HUB = "sklearn-docs/digits"
DIGITS = (
    "the digits 0 to 6 of scikit-learn (copies of UCI's Optical Recognition of Handwritten Digits, CC BY 4.0); OOD data are the "
    "digits 8 and 9 (near) and patches of a photo (far)"
)
PRUNED = {
    "hydra-vit-digits": Pruned(
        data="scikit-learn digits, 0 to 6",
        dataset=DIGITS_ON_THE_HUB,
        fine_tuning=f"A ViT of six layers was trained from scratch on 500 images of {DIGITS}. Each member lost 12 of its 48 heads "
        "along its circuit, and was then fine-tuned by itself by the paper's recipe for ImageNet-1K (appendix D.2), with 100 "
        "steps of 32 images in place of 120,000: SGD with momentum, frozen embeddings, label smoothing 0.1, dropout 0.1.",
    ),
    "hydra-bert-intents": Pruned(
        data="CLINC150, 20 intents of a bank's assistant",
        dataset="clinc/clinc_oos",
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        fine_tuning="The encoder was fine-tuned for four epochs on 600 messages of 20 intents of CLINC150 (CC BY 3.0). Each member "
        "was then fine-tuned by itself for one epoch by the paper's recipe for SST-2 (appendix D.2), at 5e-5. OOD data are "
        "messages out of scope.",
        pruning="Taylor scores (the paper's Strategy 1) on 400 validation messages: each layer of each member keeps 8 of 12 heads, "
        "scored on a random half of every batch.",
    ),
    "hydra-clip-digits": Pruned(
        data="scikit-learn digits, 0 to 6, zero-shot prompts",
        dataset=DIGITS_ON_THE_HUB,
        fine_tuning=f"A small CLIP was trained from scratch on pairs of images and captions of {DIGITS}. Its members were pruned "
        "and not fine-tuned, as in the paper's zero-shot experiments (5.3).",
    ),
}


def pruned_card(name: str, told: Pruned) -> ModelCard:
    folder = CARDS / name
    config = AutoConfig.from_pretrained(folder)
    model = without_weights(getattr(hydra_transformers, config.architectures[0]), config)
    circuits: Sequence[Circuit] = [Circuit.load(path) for path in sorted((folder / CIRCUITS).glob("*.json"))]
    made = create_model_card(
        model,
        Report.from_json(folder / "report.json"),
        repo_id=f"org/{name}",
        base_model=told.base_model,
        dataset=told.dataset,
        license=LICENSE,
        circuits=circuits,
        fine_tuning=told.fine_tuning,
        pruning=told.pruning,
        report_model=PRUNED_HYDRA,
    )
    for result in made.data.eval_results or ():
        result.dataset_name = told.data
    return made


def files() -> dict[Path, str]:
    """Path -> content of everything in model_cards/."""
    cards = {NAME: card()} | {name: pruned_card(name, told) for name, told in PRUNED.items()}
    texts = {FOLDER / f"{name}.md": str(made) for name, made in cards.items()}
    return {FOLDER / "template.md": TEMPLATE.read_text(encoding="utf-8")} | texts


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
