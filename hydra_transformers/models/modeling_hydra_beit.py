"""HydraBeit: M head-pruned BEiTs as one network.

BEiT adds to each head's scores a number that depends on how two patches lie to each other: from a
table of each layer, whose rows go with their heads, or from one table for all layers, which counts
as embeddings.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers.models.beit.modeling_beit import BeitEmbeddings, BeitPreTrainedModel

from .configuration_hydra_beit import HydraBeitConfig
from .images import HydraImageClassifierMixin, HydraImageEncoderMixin, PatchProductMixin
from .modeling_hydra import Grouped, Norm, shared_or_per_member
from .pretrained import HydraModelMixin
from .relative_attention import HydraTableBiasAttention, PositionBias


class HydraBeitEmbeddings(PatchProductMixin, BeitEmbeddings):
    pass


class HydraBeitPreTrainedModel(HydraModelMixin, BeitPreTrainedModel):
    config_class = HydraBeitConfig
    base_model_prefix = "beit"
    architecture = "BEiT"
    _no_split_modules = ["HydraBeitEmbeddings", "HydraLayer"]


class DistanceBias(Grouped):
    """A number for each head and distance, to be added to the scores; weight (sum of heads,
    distances)."""

    def __init__(self, heads: Sequence[int], distances: int):
        super().__init__(heads, distances, None)

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        """(query tokens, tokens) -> (1, heads of all members, query tokens, tokens)"""
        return self.weight[:, distances].unsqueeze(0)


class HydraBeitAttention(HydraTableBiasAttention):
    """positions: the number of the distance between each query and key, (tokens, tokens), and the
    bias of all layers, if any"""

    def __init__(self, config: HydraBeitConfig, layer: int, norm: Norm):
        super().__init__(config, layer, norm)
        if config.use_relative_position_bias:
            self.distance_bias = DistanceBias([len(heads) for heads in self.kept_heads], config.num_distances)

    @property
    def adds_bias(self) -> bool:
        return self.config.use_relative_position_bias or self.config.use_shared_relative_position_bias

    def rows_per_head(self) -> dict[str, int]:
        return {"distance_bias": 1} if self.config.use_relative_position_bias else {}

    def bias(
        self,
        hidden_states: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        distances: torch.Tensor,
        shared_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shared = None
        if shared_bias is not None:
            shared = super().bias(hidden_states, query, key, shared_bias)
        if not self.config.use_relative_position_bias:
            return shared
        of_layer = self.distance_bias(distances[: query.shape[2]])
        if shared is None:
            return of_layer
        return shared + of_layer


def numbers_of_distances(side: int, device: torch.device) -> torch.Tensor:
    """Return the row of a table of distances for each query and key, (tokens, tokens): the first
    token and side * side patches."""
    places = torch.arange(side, device=device)
    row = places.repeat_interleave(side)
    column = places.repeat(side)
    down = row[:, None] - row[None, :] + side - 1
    right = column[:, None] - column[None, :] + side - 1
    between_patches = down * (2 * side - 1) + right

    # The first token's rows of the table are behind those of the patches.
    from_first = (2 * side - 1) ** 2
    to_first = from_first + 1
    of_first = from_first + 2
    numbers = nn.functional.pad(between_patches, (1, 0), value=to_first)
    first_row = torch.full_like(numbers[:1], from_first)
    return torch.cat([nn.functional.pad(first_row[:, 1:], (1, 0), value=of_first), numbers])


class HydraBeitPooler(nn.Module):
    """The mean of the patches, normed, or the first token's state: (members, batch, tokens, hidden)
    -> (members, batch, hidden)."""

    def __init__(self, layernorm: nn.Module | None):
        super().__init__()
        self.layernorm = layernorm

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.layernorm is None:
            return hidden_states[:, :, 0]
        return self.layernorm(hidden_states[:, :, 1:].mean(dim=2))


class HydraBeitModel(HydraImageEncoderMixin, HydraBeitPreTrainedModel):
    embeddings_class = HydraBeitEmbeddings
    attention_class = HydraBeitAttention

    def add_positions(self, config: HydraBeitConfig) -> None:
        self.last_norm = "layernorm"
        if config.use_mean_pooling:  # the mean is normed instead
            self.last_norm = None
        self.relative_attention_bias = None
        if config.use_shared_relative_position_bias:
            build = partial(PositionBias, config.num_distances, config.num_attention_heads)
            self.relative_attention_bias = shared_or_per_member(config, "embeddings", build)

    def add_pooling(self, config: HydraBeitConfig) -> None:
        layernorm = None
        if config.use_mean_pooling:
            norm = partial(self.make_norm(config), config.hidden_size)
            layernorm = shared_or_per_member(config, "layernorm", norm)
        self.pooler = HydraBeitPooler(layernorm)

    def embed_inputs(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool | None = None, **inputs):
        hidden_states, mask, layer_kwargs = super().embed_inputs(pixel_values=pixel_values, **inputs)
        config = self.config
        if config.use_relative_position_bias or config.use_shared_relative_position_bias:
            side = config.patches_per_side
            patch = config.patch_size
            if isinstance(patch, int):
                patch = (patch, patch)
            sizes = zip(pixel_values.shape[2:], patch, strict=True)
            if any(size // length != side for size, length in sizes):
                raise ValueError(
                    f"pixel_values are {pixel_values.shape[2]} x {pixel_values.shape[3]}: the model knows the "
                    f"distances of {side} x {side} patches, pass images of size {config.image_size}"
                )
            distances = numbers_of_distances(side, hidden_states.device)
            layer_kwargs["positions"] = (distances,)
            if self.relative_attention_bias is not None:
                layer_kwargs["positions"] = (distances, self.relative_attention_bias(distances))
        return hidden_states, mask, layer_kwargs


class HydraBeitForImageClassification(HydraImageClassifierMixin, HydraBeitPreTrainedModel):
    encoder_class = HydraBeitModel
    encoder_options = {"add_pooling_layer": True}

    @property
    def reads_first_token(self) -> bool:
        return not self.config.use_mean_pooling
