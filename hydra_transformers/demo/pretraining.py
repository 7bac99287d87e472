"""The demo's pre-trained model: a small ViT that recognises which way an image is turned, without any label of a digit.

Digits are turned left or right but never upside down: a six would become one of the nines that test. A model that is
pre-trained already lies beside this file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from .._io.progress import progress_bar
from .digits import Images


SHIPPED = Path(__file__).with_name("trained")
SETTINGS_FILE = "settings.json"
TURNS = {"upright": 0, "turned left": 1, "turned right": 3}  # name -> quarter turns to the left


@dataclass(frozen=True)
class PretrainingSettings:
    """Everything the pre-trained model is made from, beside the data."""

    hidden_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    intermediate_size: int = 128
    patch_size: int = 2
    initializer_range: float = 0.1  # with Transformers' 0.02 so small a ViT learns several times more slowly
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.2
    epochs: int = 100
    batch_size: int = 64
    seed: int = 0


SETTINGS = PretrainingSettings()


def pretrain(
    images: Images, settings: PretrainingSettings = SETTINGS, progress: bool = True
) -> ViTForImageClassification:
    """The same settings give the same weights on the same machine."""
    torch.manual_seed(settings.seed)
    random = torch.Generator().manual_seed(settings.seed)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size")
    fields = {name: getattr(settings, name) for name in (*sizes, "initializer_range")}
    names = dict(enumerate(TURNS))
    config = ViTConfig(image_size=8, id2label=names, label2id={name: turn for turn, name in names.items()}, **fields)
    model = ViTForImageClassification(config).train()
    pixel_values = images.pixel_values
    steps = settings.epochs * -(-len(images) // settings.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=steps, pct_start=settings.warmup
    )
    with progress_bar(steps, "pre-training", "step", progress) as bar:
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(images), generator=random).split(settings.batch_size):
                inputs, turns = turned(moved(pixel_values[rows], random), random)
                loss = model(inputs, labels=turns).loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.update()
    return model.eval()


def turned(images: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each image (rows, channels, height, width) turned at random, and how (rows,), as its place in `TURNS`."""
    turns = torch.randint(len(TURNS), (len(images),), generator=random)
    quarters = list(TURNS.values())
    pairs = zip(images, turns.tolist(), strict=True)
    return torch.stack([image.rot90(quarters[turn], (1, 2)) for image, turn in pairs]), turns


def moved(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image moved by up to one pixel; the border is black."""
    height, width = images.shape[-2:]
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=-1.0)
    corners = torch.randint(3, (len(images), 2), generator=random).tolist()
    pairs = zip(padded, corners, strict=True)
    return torch.stack([image[:, row : row + height, column : column + width] for image, (row, column) in pairs])


def save_pretrained_model(model: ViTForImageClassification, settings: PretrainingSettings, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / SETTINGS_FILE).write_text(json.dumps(asdict(settings), indent=1) + "\n")


def load_shipped_model() -> ViTForImageClassification:
    """The pre-trained model that comes with the package, made by scripts/pretrain_demo_model.py."""
    return ViTForImageClassification.from_pretrained(SHIPPED).eval()


def accuracy(model: nn.Module, pixel_values: Tensor, labels: Tensor) -> float:
    with torch.inference_mode():
        answers = model(pixel_values=pixel_values).logits.argmax(dim=-1)
    return (answers == labels).float().mean().item()


def accuracy_on_turns(model: nn.Module, images: Images) -> float:
    """How often a pre-trained model recognises the turn of images that are turned at random."""
    return accuracy(model, *turned(images.pixel_values, torch.Generator().manual_seed(0)))
