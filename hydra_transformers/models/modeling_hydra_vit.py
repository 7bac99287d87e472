"""HydraViT: M head-pruned vision transformers as one network."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTPreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import (
    HydraAttention,
    HydraMLP,
    encoder_mask,
    has_rows,
    mask_of_first_token,
)
from .bare_layers import run_layers
from .configuration_hydra_vit import HydraViTConfig
from .ensembling import (
    HydraClassifierOutput,
    RecordedStates,
    batch_first,
    classifier_output,
    wants_every_token,
)
from .fusion import HydraModelMixin
from .grouped import Grouped, GroupedLinear, GroupedPooler, PerMember, embed, init_grouped, shared_or_per_member
from .kernels import add_and_layer_norm, layer_norm
from .patches import as_patch_projection


class HydraViTEmbeddings(ViTEmbeddings):
    """ViT's embeddings with the patches embedded by a product."""

    def __init__(self, config: HydraViTConfig):
        super().__init__(config)
        self.patch_embeddings.projection = as_patch_projection(self.patch_embeddings.projection)


class HydraViTLayer(GradientCheckpointingLayer):
    """The fused Transformer layer. Its states are (members, batch, tokens, hidden) throughout: the paper's reshapes
    between MT x d and T x Md are views of that, and the attention sees all members' heads at once."""

    norms = ("layernorm_before", "layernorm_after")
    is_pre_norm = True

    def __init__(self, config: HydraViTConfig, layer: int):
        super().__init__()
        members, shared = config.num_members, config.shared

        def layernorm():
            return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

        self.layernorm_before = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.attention = HydraAttention(
            config,
            config.kept_heads[layer],
            dropout=config.attention_probs_dropout_prob,
            bias=config.qkv_bias,
            float32_softmax=True,
        )
        self.layernorm_after = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.mlp = shared_or_per_member(lambda: HydraMLP(config), members, "mlp" in shared)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        first_token_only: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden)"""
        # Equation 4
        normed = layer_norm(self.layernorm_before, hidden_states)
        queries = None
        if first_token_only:
            hidden_states, queries = hidden_states[:, :, :1], normed[:, :, :1]
            attention_mask = mask_of_first_token(attention_mask)
        # Equations 5 and 6
        attention, _ = self.attention(normed, attention_mask, queries, **kwargs)
        hidden_states, normed = add_and_layer_norm(self.layernorm_after, hidden_states, self.dropout(attention))
        # Equation 7
        return hidden_states + self.dropout(self.mlp(normed))


class HydraViTPreTrainedModel(HydraModelMixin, ViTPreTrainedModel):
    config_class = HydraViTConfig
    config: HydraViTConfig
    base_model_prefix = "vit"
    _no_split_modules = ["HydraViTEmbeddings", "HydraViTLayer"]
    _can_record_outputs = {"hidden_states": RecordedStates, "attentions": HydraAttention}
    backbone_types = ("vit",)
    backbone_names = ()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, Grouped):
            init_grouped(module, std=self.config.initializer_range)


class HydraViTModel(HydraViTPreTrainedModel):
    """The fused encoder without a head. `last_hidden_state` is (batch, members, tokens, hidden), `pooler_output`
    (batch, members, pooled)."""

    is_base_model = True

    def __init__(self, config: HydraViTConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        members, shared = config.num_members, config.shared
        self.embeddings = shared_or_per_member(lambda: HydraViTEmbeddings(config), members, "embeddings" in shared)
        self.layers = nn.ModuleList(HydraViTLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.recorded_states = RecordedStates()
        self.layernorm = shared_or_per_member(
            lambda: nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps), members, "layernorm" in shared
        )
        add_pooling_layer = config.add_pooling_layer if add_pooling_layer is None else add_pooling_layer
        self.pooler = None
        if add_pooling_layer:
            activation = ACT2FN[config.pooler_act]
            self.pooler = GroupedPooler(config.hidden_size, config.pooler_output_size, members, activation)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The patch embeddings; those of the first member where members do not share them."""
        first = self.embeddings[0] if isinstance(self.embeddings, PerMember) else self.embeddings
        return first.patch_embeddings

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        first_token_only: bool = False,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """
        pixel_values: (batch, channels, height, width)
        first_token_only: let the last layer compute the [CLS] token alone, which is all that a classifier reads;
            `last_hidden_state` then has one token
        """
        if pixel_values is None:
            raise ValueError("pixel_values is missing: pass the image processor's output")
        if kwargs.pop("bool_masked_pos", None) is not None:
            raise ValueError("bool_masked_pos is for masked image modelling, which HydraViT does not do: leave it out")
        dtype = self.get_input_embeddings().projection.weight.dtype
        embeddings = embed(self.embeddings, pixel_values.to(dtype), interpolate_pos_encoding=interpolate_pos_encoding)
        attention_mask = encoder_mask(self.config, embeddings, attention_mask, self.num_members)
        first_token_only = first_token_only and has_rows(attention_mask)

        hidden_states = run_layers(self, embeddings, attention_mask, first_token_only, **kwargs)

        hidden_states = layer_norm(self.layernorm, hidden_states)
        pooled = None if self.pooler is None else self.pooler(hidden_states)
        return BaseModelOutputWithPooling(
            last_hidden_state=batch_first(hidden_states, self.num_members),
            pooler_output=None if pooled is None else batch_first(pooled, self.num_members),
        )


class HydraViTForImageClassification(HydraViTPreTrainedModel):
    """The fused image classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    def __init__(self, config: HydraViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = HydraViTModel(config, add_pooling_layer=False)
        self.classifier = GroupedLinear(config.hidden_size, [config.num_labels] * config.num_members)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """
        pixel_values: (batch, channels, height, width)
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        """
        outputs = self.vit(
            pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            first_token_only=not wants_every_token(self.config, kwargs),
            return_dict=True,
            **kwargs,
        )
        first_token = outputs.last_hidden_state[:, :, 0].transpose(0, 1)
        member_logits = batch_first(self.classifier(first_token), self.num_members)
        return classifier_output(self, member_logits, labels, outputs, **kwargs)


__all__ = ["HydraViTForImageClassification", "HydraViTModel", "HydraViTPreTrainedModel"]
