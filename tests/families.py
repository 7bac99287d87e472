"""Tiny backbones of the three families, their inputs, and the plain Transformers reference that tests compare with."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from hydra_transformers import (
    HydraBertForSequenceClassification,
    HydraCLIPModel,
    HydraViTForImageClassification,
)


HEAD_DIM = 8


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Weights large enough that every part of the model matters for the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def vit_backbone(seed: int = 0, **fields) -> ViTForImageClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
    fields = {"image_size": 8, "patch_size": 4, "num_labels": 5, **sizes, **fields}
    return randomise(ViTForImageClassification(ViTConfig(**fields)).double(), seed)


def bert_backbone(seed: int = 0, **fields) -> BertForSequenceClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
    fields = {"vocab_size": 40, "max_position_embeddings": 16, "num_labels": 3, **sizes, **fields}
    return randomise(BertForSequenceClassification(BertConfig(**fields)).double(), seed)


def clip_backbone(seed: int = 0, **fields) -> CLIPModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
    text = {**sizes, "vocab_size": 40, "max_position_embeddings": 16, "bos_token_id": 38, "eos_token_id": 39}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=12, **fields)
    return randomise(CLIPModel(config).double(), seed)


def images(batch: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded_texts(batch: int = 4, tokens: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts of different lengths, each ended by token 39 (CLIP's end of text) and padded."""
    input_ids = torch.randint(3, 38, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    attention_mask = torch.ones_like(input_ids)
    for row in range(batch):
        length = tokens - row % (tokens - 2)
        input_ids[row, length - 1] = 39
        input_ids[row, length:] = 0
        attention_mask[row, length:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def zero_vit_head(model: PreTrainedModel, layer: int, head: int) -> None:
    _zero_columns(model.vit.layers[layer].attention.o_proj, head)


def zero_bert_head(model: PreTrainedModel, layer: int, head: int) -> None:
    _zero_columns(model.bert.encoder.layer[layer].attention.output.dense, head)


def zero_clip_head(model: PreTrainedModel, tower: str, layer: int, head: int) -> None:
    _zero_columns(getattr(model, f"{tower}_model").encoder.layers[layer].self_attn.out_proj, head)


def _zero_columns(projection: torch.nn.Linear, head: int) -> None:
    with torch.no_grad():
        projection.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0


@dataclass(frozen=True)
class Family:
    """What a test needs to know about a model family."""

    name: str
    hydra: type
    backbone: Callable[..., PreTrainedModel]
    inputs: Callable[[], dict[str, torch.Tensor]]
    # Head sets of three members: ragged, one member without any head in a layer, one layer without heads of any member.
    heads_to_prune: tuple[dict, ...]

    def logits(self, model: PreTrainedModel, **inputs) -> torch.Tensor:
        """Logits (batch, classes) of a plain Transformers model; for CLIP of the images over the texts."""
        outputs = model(**inputs)
        return outputs.logits_per_image if self.name == "clip" else outputs.logits

    def ensemble_logits(self, outputs) -> torch.Tensor:
        return outputs.logits_per_image if self.name == "clip" else outputs.logits

    def ablate(self, model: PreTrainedModel, heads_to_prune: dict) -> PreTrainedModel:
        """A copy of the backbone with the output-projection slices of these heads zeroed."""
        model = copy.deepcopy(model)
        towers = heads_to_prune if self.name == "clip" else {"": heads_to_prune}
        for tower, layers in towers.items():
            for layer, heads in layers.items():
                for head in heads:
                    if self.name == "clip":
                        zero_clip_head(model, tower, layer, head)
                    else:
                        {"vit": zero_vit_head, "bert": zero_bert_head}[self.name](model, layer, head)
        return model

    def members(self, seeds: tuple[int, ...] = (0, 1, 2)) -> list[PreTrainedModel]:
        """One-member Hydras from different backbones with different heads pruned."""
        return [
            self.hydra.from_backbone(self.backbone(seed), heads)
            for seed, heads in zip(seeds, self.heads_to_prune, strict=False)
        ]


RAGGED = ({0: [1], 1: [0, 1, 2, 3], 2: [0, 3]}, {1: [0, 1, 2, 3]}, {0: [0, 2, 3], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]})
RAGGED_IN_TWO_TOWERS = (
    {"vision": RAGGED[0], "text": {0: [1]}},
    {"vision": RAGGED[1], "text": {2: [0, 1, 2, 3], 0: [2, 3]}},
    {"vision": RAGGED[2]},
)

VIT = Family("vit", HydraViTForImageClassification, vit_backbone, lambda: {"pixel_values": images()}, RAGGED)
BERT = Family("bert", HydraBertForSequenceClassification, bert_backbone, padded_texts, RAGGED)
CLIP = Family(
    "clip",
    HydraCLIPModel,
    clip_backbone,
    lambda: {"pixel_values": images(), **padded_texts(batch=3)},
    RAGGED_IN_TWO_TOWERS,
)
FAMILIES = [VIT, BERT, CLIP]
