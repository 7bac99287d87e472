"""A small CLIP with real weights: its vision tower from DINOv2-S, its text tower from new weights, trained on Tiny ImageNet
with captions made of the class names.

It knows 100 classes by their names and synonyms. Words that no caption has it does not know, so it classifies by prompts, but
only among things that it has seen.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model, PreTrainedTokenizerFast

from .captions import Captions, captions_for, word_tokenizer
from .pretrained import with_folded_factors
from .rows import TensorRows
from .splits import Splits


MAX_TOKENS = 24
# How far embeddings are scaled down so that CLIP's first LayerNorm divides by √eps alone, see `vision_weights`.
EMBEDDING_SCALE = 1e-6


@dataclass(frozen=True)
class Schedule:
    """AdamW with a warm-up and a cosine; new weights (the text tower, both projections) have a learning rate of their own."""

    epochs: int = 8
    batch_size: int = 256
    learning_rate: float = 1e-4
    new_learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warm_up: float = 0.05
    max_grad_norm: float = 1.0


def new_clip(start: Dinov2Model, tokenizer: PreTrainedTokenizerFast, image_size: int) -> CLIPModel:
    """A CLIP whose vision tower computes what `start` does with its [CLS] token, for images of `image_size` pixels a side."""
    dinov2 = start.config
    vision = {name: getattr(dinov2, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    vision |= {name: getattr(dinov2, name) for name in ("patch_size", "layer_norm_eps", "hidden_act")}
    vision |= {"intermediate_size": dinov2.hidden_size * dinov2.mlp_ratio, "image_size": image_size}
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = text_tower(dinov2) | ends | {"vocab_size": len(tokenizer), "max_position_embeddings": MAX_TOKENS}
    model = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=text["hidden_size"]))
    weights = vision_weights(start, image_size)
    missing, unexpected = model.vision_model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.endswith("position_ids") for name in missing), (missing, unexpected)
    return model


def text_tower(dinov2: Dinov2Config) -> dict[str, int]:
    """256 wide, 4 layers of 4 heads beside DINOv2-S."""
    heads = max(2, 2 * dinov2.num_attention_heads // 3)
    width = heads * dinov2.hidden_size // dinov2.num_attention_heads
    layers = max(1, dinov2.num_hidden_layers // 3)
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


@torch.no_grad()
def vision_weights(dinov2: Dinov2Model, image_size: int) -> dict[str, Tensor]:
    """DINOv2 as the weights of a CLIP vision tower, which it is but for five things:

    - the factors on the branches of its layers become part of the weights in front of them;
    - positions are interpolated once;
    - CLIP's patches have no bias: it is added to the positions of all patches;
    - CLIP has a LayerNorm in front of its layers. Subtracting a token's mean changes nothing, since all that reads a token
      is a LayerNorm. Dividing by its deviation would: so the embeddings are made so small that √(variance + eps) is √eps, and
      the LayerNorm's weight makes them large again;
    - DINOv2 normalises all tokens at its end, CLIP the [CLS] token that it reads.
    """
    hydra = with_folded_factors(dinov2)
    embeddings = dinov2.embeddings
    scale = EMBEDDING_SCALE
    projection = embeddings.patch_embeddings.projection
    patches = (image_size // dinov2.config.patch_size) ** 2
    blank = torch.zeros(1, patches + 1, dinov2.config.hidden_size)
    positions = embeddings.interpolate_pos_encoding(blank, image_size, image_size)[0].clone()
    positions[1:] += projection.bias
    weights = {
        "embeddings.class_embedding": scale * embeddings.cls_token[0, 0],
        "embeddings.patch_embedding.weight": scale * projection.weight,
        "embeddings.position_embedding.weight": scale * positions,
        "pre_layrnorm.weight": torch.full((dinov2.config.hidden_size,), dinov2.config.layer_norm_eps**0.5 / scale),
        "pre_layrnorm.bias": torch.zeros(dinov2.config.hidden_size),
        "post_layernorm.weight": hydra.layernorm.weight,
        "post_layernorm.bias": hydra.layernorm.bias,
    }
    for index, layer in enumerate(hydra.layers):
        place = f"encoder.layers.{index}"
        attention = layer.attention
        mlp = layer.mlp
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", getattr(attention.qkv_proj, kind).chunk(3), strict=True):
                weights[f"{place}.self_attn.{name}_proj.{kind}"] = part
        weights[f"{place}.self_attn.out_proj.weight"] = attention.o_proj.weight.t()
        weights[f"{place}.self_attn.out_proj.bias"] = attention.o_proj.bias[0]
        for name, module in (("layer_norm1", layer.attention_norm), ("layer_norm2", layer.mlp_norm), ("mlp", mlp)):
            weights |= {f"{place}.{name}.{key}": value for key, value in module.state_dict().items()}
    return {name: value.detach().clone() for name, value in weights.items()}


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    """CLIP's loss where several rows may be of one class: all of them count as each other's pairs, in equal parts.

    images, texts: (rows, dim), not normalised; labels: (rows,)
    """
    images, texts = (nn.functional.normalize(each.float(), dim=-1) for each in (images, texts))
    logits = scale.exp() * images @ texts.t()
    targets = (labels[:, None] == labels[None, :]).float()
    targets = targets / targets.sum(dim=1, keepdim=True)  # symmetric, as classes are
    return (nn.functional.cross_entropy(logits, targets) + nn.functional.cross_entropy(logits.t(), targets)) / 2


def train_clip(model: CLIPModel, captions: Captions, rows: TensorRows, schedule: Schedule, seed: int) -> CLIPModel:
    """Trains in place, on the device where the model and the rows lie; on a GPU under bfloat16 autocast."""
    torch.manual_seed(seed)
    device = model.device
    # The embeddings are tiny by construction: Adam's steps would be far too large for them.
    frozen = (model.vision_model.embeddings, model.vision_model.pre_layrnorm)
    for module in frozen:
        module.requires_grad_(False)
    optimizer = torch.optim.AdamW(_groups(model, schedule), fused=device.type == "cuda")
    steps_per_epoch = max(1, len(rows) // schedule.batch_size)
    steps = schedule.epochs * steps_per_epoch
    warm_up = max(1, round(schedule.warm_up * steps))
    factor = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    model.train()
    for step in range(steps):
        if step % steps_per_epoch == 0:
            order = torch.randperm(len(rows), device=device)
        place = step % steps_per_epoch * schedule.batch_size
        batch = rows.prepare(rows.part(order[place : place + schedule.batch_size]).tensors)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            images = model.get_image_features(pixel_values=batch["pixel_values"]).pooler_output
            texts = model.get_text_features(input_ids=captions.draw(batch["labels"])).pooler_output
        loss = contrastive_loss(images, texts, model.logit_scale, batch["labels"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), schedule.max_grad_norm)
        optimizer.step()
        factor.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))  # as CLIP was trained
    return model.requires_grad_(True).eval()


def _groups(model: CLIPModel, schedule: Schedule) -> list[dict]:
    """Pre-trained and new weights apart; matrices decay, vectors do not."""
    groups = []
    for is_new, rate in ((False, schedule.learning_rate), (True, schedule.new_learning_rate)):
        own = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name.startswith("vision_model.") != is_new
        ]
        for decays, decay in ((True, schedule.weight_decay), (False, 0.0)):
            parameters = [parameter for parameter in own if (parameter.dim() > 1) == decays]
            groups.append({"params": parameters, "lr": rate, "weight_decay": decay})
    return groups


def trained_clip(
    splits: Splits,
    names: list[list[str]],
    start: Dinov2Model,
    image_size: int,
    schedule: Schedule,
    seed: int,
    device: str,
    output: Path,
) -> tuple[CLIPModel, PreTrainedTokenizerFast]:
    """The CLIP in `output`, trained and saved there unless it is there already, and its tokenizer; `splits` are on the device."""
    texts = [caption for of_class in names for caption in captions_for(of_class)]
    tokenizer = word_tokenizer(texts, MAX_TOKENS)
    if not (output / "tokenizer.json").exists():
        torch.manual_seed(seed)
        model = new_clip(start, tokenizer, image_size).to(device)
        train_clip(model, Captions(names, tokenizer, device), splits.train, schedule, seed)
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)  # last: it says that the model is whole
    return CLIPModel.from_pretrained(output).to(device).eval(), tokenizer


def smallest_dinov2() -> Dinov2Model:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 8}
    return Dinov2Model(Dinov2Config(**sizes, mlp_ratio=2))


SMALLEST_NAMES = [["dark"], ["grey", "gray"], ["bright thing"]]
SMALLEST_SCHEDULE = Schedule(epochs=4, batch_size=16, learning_rate=1e-3)
