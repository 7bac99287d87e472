"""HydraDINOv3ViT: M head-pruned DINOv3 encoders as one network.

Queries and keys of patches are turned by their places in the image, those of the [CLS] token and of
registers are not. Transformers has no classifier of DINOv3.
"""

import math

import torch
from torch import nn
from transformers.models.dinov3_vit.modeling_dinov3_vit import (
    DINOv3ViTEmbeddings,
    DINOv3ViTPreTrainedModel,
    DINOv3ViTRopePositionEmbedding,
    augment_patches_center_coordinates,
    get_patches_center_coordinates,
)

from .configuration_hydra_dinov3_vit import HydraDINOv3ViTConfig
from .fixed_dtype import FixedDtype
from .images import HydraImageEncoderMixin, PatchProductMixin
from .pretrained import HydraModelMixin
from .rotary_attention import HydraRotaryAttention, RotaryTables


class HydraDINOv3ViTPreTrainedModel(HydraModelMixin, DINOv3ViTPreTrainedModel):
    config_class = HydraDINOv3ViTConfig
    base_model_prefix = "dinov3_vit"
    architecture = "DINOv3"
    _no_split_modules = ["HydraDINOv3ViTEmbeddings", "HydraLayer"]


class HydraDINOv3ViTEmbeddings(PatchProductMixin, DINOv3ViTEmbeddings):
    convolution_name = "patch_embeddings"


class PatchRotations(FixedDtype, DINOv3ViTRopePositionEmbedding):
    """The angles by which places in the image turn queries and keys."""

    def forward(self, pixel_values: torch.Tensor, hidden_states: torch.Tensor) -> RotaryTables:
        """pixel_values: (batch, channels, height, width); hidden_states: (members or 1, batch,
        tokens, hidden)

        Returns (1, tokens, head_dim) each. The first tokens, which are not patches, have angles of
        zero.
        """
        config = self.config
        patch = config.patch_size
        if isinstance(patch, int):
            patch = (patch, patch)
        rows = pixel_values.shape[2] // patch[0]
        columns = pixel_values.shape[3] // patch[1]
        places = get_patches_center_coordinates(rows, columns, dtype=torch.float32, device=pixel_values.device)
        if self.training:
            places = augment_patches_center_coordinates(
                places, config.pos_embed_shift, config.pos_embed_jitter, config.pos_embed_rescale
            )
        frequencies = self.inv_freq.to(torch.promote_types(hidden_states.dtype, torch.float32))
        angles = (2 * math.pi * places[:, :, None] * frequencies).flatten(1).tile(2)  # (patches, head_dim)
        angles = nn.functional.pad(angles, (0, 0, hidden_states.shape[2] - rows * columns, 0)).unsqueeze(0)
        return angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)


class HydraDINOv3ViTModel(HydraImageEncoderMixin, HydraDINOv3ViTPreTrainedModel):
    embeddings_class = HydraDINOv3ViTEmbeddings
    attention_class = HydraRotaryAttention
    last_norm = "norm"

    def add_positions(self, config: HydraDINOv3ViTConfig) -> None:
        self.rope_embeddings = PatchRotations(config)

    def embed_inputs(self, pixel_values: torch.Tensor, **inputs):
        hidden_states, mask, layer_kwargs = super().embed_inputs(pixel_values=pixel_values, **inputs)
        tables = self.rope_embeddings(pixel_values, hidden_states)
        return hidden_states, mask, layer_kwargs | {"positions": (tables,)}

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return hidden_states[:, :, 0]
