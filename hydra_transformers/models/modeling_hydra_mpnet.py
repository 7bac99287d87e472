"""HydraMPNet: M head-pruned MPNet encoders as one network.

MPNet adds to each head's scores a number that depends on how far two tokens are apart, from one table for all layers. The
table keeps a column for every head of the backbone, since other layers may keep a head that one has lost; each layer takes
the columns of its own heads. It counts as embeddings: members that share these share the mean of their tables, others keep
their own.
"""

import torch
from torch import nn
from transformers import MPNetForSequenceClassification, MPNetForTokenClassification, MPNetModel
from transformers.models.mpnet.modeling_mpnet import MPNetEmbeddings, MPNetEncoder, MPNetPreTrainedModel

from .configuration_hydra_mpnet import HydraMPNetConfig
from .modeling_hydra import GroupedPooler, embed, hydra_layers, shared_or_per_member
from .pretrained import HydraModelMixin, Rule, attention_rules
from .relative_attention import HydraTableBiasAttention
from .texts import (
    GroupedClassificationHead,
    HydraTwoMapTextClassifierMixin,
    HydraTypedTextClassifierMixin,
    HydraTypedTextEncoderMixin,
)
from .tokens import HydraTokenClassifierMixin


class HydraMPNetPreTrainedModel(HydraModelMixin, MPNetPreTrainedModel):
    config_class = HydraMPNetConfig
    base_model_prefix = "mpnet"
    architecture = "MPNet"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MPNetEmbeddings", "HydraLayer"]
    _supports_sdpa = True
    backbone_types = ("mpnet",)
    backbone_rules = (
        *attention_rules("encoder.layer.*.attention.attn.{}", "qkvo"),
        Rule("layers.*.attention_norm.*", "encoder.layer.*.attention.LayerNorm.*"),
        Rule("layers.*.mlp.fc1.*", "encoder.layer.*.intermediate.dense.*"),
        Rule("layers.*.mlp.fc2.*", "encoder.layer.*.output.dense.*"),
        Rule("layers.*.mlp_norm.*", "encoder.layer.*.output.LayerNorm.*"),
        Rule("relative_attention_bias.weight", "encoder.relative_attention_bias.weight"),
    )


class RelativeAttentionBias(nn.Embedding):
    """What is added to the scores of each of the backbone's heads; weight (buckets of distances, heads)."""

    def __init__(self, config: HydraMPNetConfig):
        super().__init__(config.relative_attention_num_buckets, config.num_attention_heads)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """For states (members or 1, batch, tokens, hidden): (heads, tokens, tokens)"""
        positions = torch.arange(states.shape[2], device=states.device)
        # As many buckets as MPNet uses, which are 32 whatever its config says.
        buckets = MPNetEncoder.relative_position_bucket(positions[None, :] - positions[:, None])
        return super().forward(buckets).permute(2, 0, 1)


class HydraMPNetModel(HydraTypedTextEncoderMixin, HydraMPNetPreTrainedModel):
    backbone_classes = (MPNetModel,)

    def __init__(self, config: HydraMPNetConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: MPNetEmbeddings(config))
        self.relative_attention_bias = shared_or_per_member(
            config, "embeddings", lambda: RelativeAttentionBias(config)
        )
        self.layers = hydra_layers(config, attention_class=HydraTableBiasAttention)
        self.pooler = None
        if config.add_pooling_layer if add_pooling_layer is None else add_pooling_layer:
            self.pooler = GroupedPooler(config.hidden_size, config.hidden_size, config.num_members, nn.Tanh())
        self.post_init()

    def embed_inputs(self, **inputs):
        hidden_states, mask, layer_kwargs = super().embed_inputs(**inputs)
        bias = embed(self.relative_attention_bias, hidden_states)
        return hidden_states, mask, layer_kwargs | {"positions": (bias.unsqueeze(1),)}


class HydraMPNetForSequenceClassification(HydraTwoMapTextClassifierMixin, HydraMPNetPreTrainedModel):
    backbone_classes = (MPNetForSequenceClassification,)
    encoder_class = HydraMPNetModel
    encoder_options = {"add_pooling_layer": False}

    def add_head(self, config: HydraMPNetConfig) -> None:
        self.classifier = GroupedClassificationHead(config, nn.Tanh())  # MPNet does not read classifier_dropout


class HydraMPNetForTokenClassification(
    HydraTokenClassifierMixin, HydraTypedTextClassifierMixin, HydraMPNetPreTrainedModel
):
    backbone_classes = (MPNetForTokenClassification,)
    encoder_class = HydraMPNetModel
