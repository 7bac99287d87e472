"""HydraMPNet: M head-pruned MPNet encoders as one network.

MPNet adds to each head's scores a number that depends on how far two tokens are apart, from one
table for all layers. The table keeps a column for every head of the backbone, since other layers
may keep a head that one has lost; each layer takes
the columns of its own heads. It counts as embeddings: members that share these share the mean of
    their tables.
"""

from functools import partial

import torch
from torch import nn
from transformers.models.mpnet.modeling_mpnet import MPNetEmbeddings, MPNetEncoder, MPNetPreTrainedModel

from .configuration_hydra_mpnet import HydraMPNetConfig
from .modeling_hydra import shared_or_per_member
from .pretrained import HydraModelMixin
from .relative_attention import HydraTableBiasAttention, PositionBias
from .texts import GroupedClassificationHead, HydraTwoMapTextClassifierMixin, HydraTypedTextEncoderMixin
from .tokens import HydraTypedTokenClassifierMixin


class HydraMPNetPreTrainedModel(HydraModelMixin, MPNetPreTrainedModel):
    config_class = HydraMPNetConfig
    base_model_prefix = "mpnet"
    architecture = "MPNet"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MPNetEmbeddings", "HydraLayer"]
    _supports_sdpa = True


class HydraMPNetModel(HydraTypedTextEncoderMixin, HydraMPNetPreTrainedModel):
    embeddings_class = MPNetEmbeddings
    attention_class = HydraTableBiasAttention

    def add_positions(self, config: HydraMPNetConfig) -> None:
        build = partial(PositionBias, config.relative_attention_num_buckets, config.num_attention_heads)
        self.relative_attention_bias = shared_or_per_member(config, "embeddings", build)

    def embed_inputs(self, **inputs):
        hidden_states, mask, layer_kwargs = super().embed_inputs(**inputs)
        positions = torch.arange(hidden_states.shape[2], device=hidden_states.device)
        # As many buckets as MPNet uses, which are 32 whatever its config says.
        buckets = MPNetEncoder.relative_position_bucket(positions[None, :] - positions[:, None])
        return hidden_states, mask, layer_kwargs | {"positions": (self.relative_attention_bias(buckets),)}


class HydraMPNetForSequenceClassification(HydraTwoMapTextClassifierMixin, HydraMPNetPreTrainedModel):
    encoder_class = HydraMPNetModel
    encoder_options = {"add_pooling_layer": False}

    def add_head(self, config: HydraMPNetConfig) -> None:
        # MPNet does not read classifier_dropout.
        self.classifier = GroupedClassificationHead(config, nn.Tanh(), config.hidden_dropout_prob)


class HydraMPNetForTokenClassification(HydraTypedTokenClassifierMixin, HydraMPNetPreTrainedModel):
    encoder_class = HydraMPNetModel
