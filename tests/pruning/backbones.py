"""Tiny backbones of every family with data on which their heads matter."""

import copy
from functools import cache

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
)

from tests.families import FAMILIES, Family


CLASSES = 5
OTHERS = {family.name: family for family in FAMILIES if family.name not in ("vit", "bert", "clip")}  # not built here


DEPTH = {"num_hidden_layers": 3, "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 32}
TOWER = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
PATCHES = {"image_size": 8, "patch_size": 4}


def vit(
    layers: int = 3, heads: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> ViTForImageClassification:
    torch.manual_seed(seed)
    sizes = DEPTH | {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 8 * heads}
    return _lively(ViTForImageClassification(ViTConfig(**sizes, **PATCHES, num_labels=CLASSES))).to(dtype).eval()


def bert(dtype: torch.dtype = torch.float64) -> BertForSequenceClassification:
    torch.manual_seed(1)
    config = BertConfig(**DEPTH, vocab_size=40, max_position_embeddings=12, num_labels=CLASSES)
    return _lively(BertForSequenceClassification(config)).to(dtype).eval()


def clip(dtype: torch.dtype = torch.float64) -> CLIPModel:
    torch.manual_seed(2)
    texts = {"vocab_size": 40, "max_position_embeddings": 10, "bos_token_id": 0, "eos_token_id": 39, "pad_token_id": 1}
    config = CLIPConfig(vision_config=TOWER | PATCHES, text_config=TOWER | texts, projection_dim=12)
    return _lively(CLIPModel(config)).to(dtype).eval()


def _lively(model):
    """Weights large enough that each head changes some predictions; the biases are not zero either."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_output = any(part in name for part in ("o_proj", "out_proj", "attention.output.dense", "out_lin"))
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            elif parameter.dim() > 1:
                parameter.copy_((0.9 if is_output else 0.3) * torch.randn(parameter.shape))
    return model


def class_prompts() -> dict[str, torch.Tensor]:
    """One prompt per class, of different lengths, padded."""
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.ones(CLASSES, 8, dtype=torch.long)
    attention_mask = torch.zeros(CLASSES, 8, dtype=torch.long)
    for row in range(CLASSES):
        length = 4 + row % 3
        input_ids[row, : length - 1] = torch.randint(2, 39, (length - 1,), generator=generator)
        input_ids[row, length - 1] = 39
        attention_mask[row, :length] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def images(samples: int, seed: int, spread: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)).to(dtype)


def texts(samples: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(2, 40, (samples, 9), generator=generator)
    lengths = torch.randint(4, 10, (samples, 1), generator=generator)
    attention_mask = (torch.arange(9) < lengths).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


def rows_in_batches(rows: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    total = len(next(iter(rows.values())))
    return [{name: value[start : start + size] for name, value in rows.items()} for start in range(0, total, size)]


@torch.no_grad()
def labelled(model, rows: dict[str, torch.Tensor], seed: int = 5, **prompts) -> dict[str, torch.Tensor]:
    """The model's own predictions as labels, a quarter of them replaced, so that heads help and none is indispensable."""
    generator = torch.Generator().manual_seed(seed)
    output = model(**rows, **prompts)
    labels = (output.logits_per_image if prompts else output.logits).argmax(dim=-1)
    noise = torch.rand(len(labels), generator=generator) < 0.25
    return {**rows, "labels": torch.where(noise, torch.randint(0, CLASSES, labels.shape, generator=generator), labels)}


def other(family: Family, dtype: torch.dtype, samples: int):
    """(backbone, ID rows, OOD rows) of a family of the table."""
    torch.manual_seed(6)
    model = _lively(family.backbone(num_labels=CLASSES)).to(dtype).eval()
    if family.reads_images:
        ood = {"pixel_values": images(samples - 4, 17, 0.5, dtype)}
        return model, {"pixel_values": images(samples, 16, dtype=dtype)}, ood
    if family.reads_audio:
        rows = family.sounds(samples, 16)
        ood = family.sounds(samples - 4, 17)
        name = family.audio_name
        return model, rows | {name: rows[name].to(dtype)}, ood | {name: 0.5 * ood[name].to(dtype)}
    return model, texts(samples, 18), texts(samples - 4, 19)


def family(name: str, dtype: torch.dtype = torch.float64, samples: int = 25, batch: int = 13):
    """(backbone, ID batches, OOD batches, class prompts or None); the last batches are short."""
    return copy.deepcopy(_family(name, dtype, samples, batch))


@cache
def _family(name: str, dtype: torch.dtype, samples: int, batch: int):
    prompts = class_prompts() if name == "clip" or (name in OTHERS and OTHERS[name].has_towers) else None
    if name in OTHERS:
        model, id_rows, ood_rows = other(OTHERS[name], dtype, samples)
    elif name == "bert":
        model = bert(dtype)
        id_rows = texts(samples, 12)
        ood_rows = texts(samples - 4, 13)
    else:
        model, seed = (vit(dtype=dtype), 10) if name == "vit" else (clip(dtype), 14)
        id_rows = {"pixel_values": images(samples, seed, dtype=dtype)}
        ood_rows = {"pixel_values": images(samples - 4, seed + 1, 0.5, dtype)}
    id_rows = labelled(model, id_rows, **(prompts or {}))
    return model, rows_in_batches(id_rows, batch), rows_in_batches(ood_rows, batch), prompts
