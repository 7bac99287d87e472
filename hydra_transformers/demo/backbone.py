"""The demo's backbone: a small ViT for the digits 0 to 6. One that is trained already lies beside this file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import ViTConfig, ViTForImageClassification

from .digits import KNOWN_DIGITS, Images


SHIPPED = Path(__file__).with_name("trained")
SETTINGS_FILE = "settings.json"


@dataclass(frozen=True)
class BackboneSettings:
    """Everything a backbone is made from, beside the data."""

    hidden_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    intermediate_size: int = 128
    patch_size: int = 2
    # Transformers' own 0.02 is meant for hundreds of dimensions; with it, so small a ViT learns several times more slowly.
    initializer_range: float = 0.1
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.2
    epochs: int = 20
    batch_size: int = 64
    seed: int = 0


SETTINGS = BackboneSettings()


def build_backbone(settings: BackboneSettings) -> ViTForImageClassification:
    names = {digit: str(digit) for digit in KNOWN_DIGITS}
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size")
    fields = {name: getattr(settings, name) for name in (*sizes, "initializer_range")}
    config = ViTConfig(image_size=8, id2label=names, label2id={name: digit for digit, name in names.items()}, **fields)
    return ViTForImageClassification(config)


def train_backbone(
    train: Images, settings: BackboneSettings = SETTINGS, name: str = "backbone", progress: bool = True
) -> ViTForImageClassification:
    """A ViT trained on `train`; the same settings give the same weights on the same machine."""
    torch.manual_seed(settings.seed)
    order = torch.Generator().manual_seed(settings.seed)
    model = build_backbone(settings).train()
    images, labels = train.pixel_values, train.labels
    steps = settings.epochs * -(-len(train) // settings.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=steps, pct_start=settings.warmup
    )
    with tqdm(total=steps, desc=f"training {name}", unit="step", disable=not progress) as bar:
        for _ in range(settings.epochs):
            for rows in torch.randperm(len(train), generator=order).split(settings.batch_size):
                loss = model(images[rows], labels=labels[rows]).loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.update()
    return model.eval()


def save_backbone(model: ViTForImageClassification, settings: BackboneSettings, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / SETTINGS_FILE).write_text(json.dumps(asdict(settings), indent=1) + "\n")


def load_shipped_backbone() -> ViTForImageClassification:
    """The backbone that comes with the package; scripts/train_demo_backbone.py makes it again from the data."""
    return ViTForImageClassification.from_pretrained(SHIPPED).eval()


def shipped_settings() -> BackboneSettings:
    return BackboneSettings(**json.loads((SHIPPED / SETTINGS_FILE).read_text()))


def accuracy(model: nn.Module, images: Images) -> float:
    """Share of right answers, of any model with `logits`."""
    with torch.inference_mode():
        answers = model(pixel_values=images.pixel_values).logits.argmax(dim=-1)
    return (answers == images.labels).float().mean().item()
