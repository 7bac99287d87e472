"""Writes model_cards/: the template, and the cards of the models that are to be published, from what is known of them.

    python scripts/build_model_cards.py            # write
    python scripts/build_model_cards.py --check    # fail where a file is not what would be written

Sizes are counted on models without weights. What only training can tell is marked "To be filled in after training";
`create_model_card` writes the finished card.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from hydra_transformers import (
    HydraBertConfig,
    HydraBertForSequenceClassification,
    HydraCLIPConfig,
    HydraCLIPModel,
    HydraViTConfig,
    HydraViTForImageClassification,
)
from hydra_transformers.fusion import without_weights
from hydra_transformers.hub.card import TEMPLATE, card_data, card_fields, render


FOLDER = Path(__file__).parents[1] / "model_cards"
LAYERS, MEMBERS = 12, 3


@dataclass(frozen=True)
class Planned:
    """A model that is to be trained.

    config: makes its config, with as many heads as it will have; which ones is not known yet
    heads: what is known of its heads
    build_snippet: how to build it from the backbone
    """

    model_class: type
    config: Callable[[], PreTrainedConfig]
    base_model: str
    dataset: str | None
    heads: str
    build_snippet: str
    cost_note: str | None = None


def heads(count: int) -> list[list[list[int]]]:
    """kept_heads with that many heads in every layer of every member."""
    return [[list(range(count))] * MEMBERS] * LAYERS


PRUNE_AND_FUSE = """
from hydra_transformers import {hydra}
from hydra_transformers.pruning import draw_members, extract_circuit
{finetune_import}
backbone = {auto}.from_pretrained("{base_model}")
# id_data, ood_data: batches for extraction, not those the model is judged on
circuits = [extract_circuit(backbone, id_data, ood_data, each, budget={budget}{prompts}) for each in ("acc", "ood", "avg")]
members = draw_members(backbone, circuits=circuits, budget={budget})
{finetune}hydra = {hydra}.from_pruned_members(members)
"""


def snippet(model_class: type, auto: str, base_model: str, budget: int, recipe: str | None, prompts: str = "") -> str:
    finetune = (
        f'members = finetune_members(members, "{recipe}", train_data, validation_data, "runs")\n' if recipe else ""
    )
    text = PRUNE_AND_FUSE.format(
        hydra=model_class.__name__,
        auto=auto,
        base_model=base_model,
        budget=budget,
        prompts=prompts,
        finetune=finetune,
        finetune_import="from hydra_transformers.training import finetune_members\n" if recipe else "",
    )
    return f"from transformers import {auto}\n{text}".strip()


VIT, BERT, CLIP = (
    "google/vit-base-patch16-224",
    "textattack/bert-base-uncased-SST-2",
    "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
)
CIRCUITS = "which ones three circuits decide (accuracy, OOD separability, their mean)"
SPREAD = "The number of heads decides; how circuits spread them over the layers changes the multiply-adds by little."

STATUS = (
    "**Not trained yet.** This card says what is known from the architecture. What training will tell is marked; the license, "
    "which depends on the backbone's, is to be added to the metadata."
)

PLANNED = {
    "hydra-vit-b16": Planned(
        HydraViTForImageClassification,
        lambda: HydraViTConfig(num_labels=1000, kept_heads=heads(8)),
        VIT,
        "imagenet-1k",
        f"each member keeps 96 of the backbone's 144, 8 per layer on average; {CIRCUITS}",
        snippet(HydraViTForImageClassification, "AutoModelForImageClassification", VIT, 48, "imagenet1k"),
        SPREAD,
    ),
    "hydra-bert-base": Planned(
        HydraBertForSequenceClassification,
        lambda: HydraBertConfig(num_labels=2, kept_heads=heads(8)),
        BERT,
        "stanfordnlp/sst2",
        f"each member keeps 96 of the backbone's 144, 8 per layer on average; {CIRCUITS}",
        snippet(HydraBertForSequenceClassification, "AutoModelForSequenceClassification", BERT, 48, "sst2"),
        SPREAD,
    ),
    "hydra-clip-vit-b32": Planned(
        HydraCLIPModel,
        lambda: HydraCLIPConfig(
            text_config={"num_attention_heads": 8, "kept_heads": heads(7)},
            vision_config={"num_attention_heads": 12, "patch_size": 32, "kept_heads": heads(11)},
            projection_dim=512,
        ),
        CLIP,
        None,
        f"each member loses 24 of the backbone's 240 (144 in the vision tower, 96 in the text tower); {CIRCUITS}",
        snippet(HydraCLIPModel, "AutoModel", CLIP, 24, None, ", class_prompts=prompts"),
        "For 12 heads removed in each tower. The circuits may divide the 24 otherwise; a head of the vision tower is larger "
        "than one of the text tower.",
    ),
}


def planned_card(name: str) -> str:
    planned = PLANNED[name]
    model = without_weights(planned.model_class, planned.config())
    fields = card_fields(model, f"me/{name}", planned.base_model)
    fields |= {"kept_heads_map": None, "heads_sentence": planned.heads, "build_snippet": planned.build_snippet}
    fields |= {"cost_note": planned.cost_note, "status": STATUS}
    return str(render(card_data(model, planned.base_model, planned.dataset, None), fields))


def files() -> dict[Path, str]:
    """Path -> content of everything in model_cards/."""
    cards = {FOLDER / f"{name}.md": planned_card(name) for name in PLANNED}
    return {FOLDER / "template.md": TEMPLATE.read_text(encoding="utf-8"), **cards}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a file is out of date")
    check = parser.parse_args().check
    stale = [path for path, content in files().items() if not path.exists() or path.read_text("utf-8") != content]
    for path in stale:
        print(
            f"{path.name} is out of date: run python scripts/build_model_cards.py" if check else f"writing {path.name}"
        )
    if not check:
        FOLDER.mkdir(exist_ok=True)
        for path in stale:
            path.write_text(files()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
