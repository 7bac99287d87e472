"""HydraAlbert: M head-pruned ALBERT encoders as one network.

A layer of ALBERT runs several times. It has its weights once, for each member its own heads, and a head that is cut out is
missing each time.
"""

import torch
from torch import nn
from transformers import AlbertForSequenceClassification, AlbertForTokenClassification, AlbertModel
from transformers.models.albert.modeling_albert import AlbertEmbeddings, AlbertPreTrainedModel

from .configuration_hydra_albert import HydraAlbertConfig
from .modeling_hydra import GroupedLinear
from .modeling_hydra_bert import BertEncoderMixin
from .pretrained import HydraModelMixin, Rule, attention_rules
from .texts import HydraTypedTextClassifierMixin
from .tokens import HydraTokenClassifierMixin


LAYER = "encoder.albert_layer_groups.*.albert_layers.0."


class HydraAlbertPreTrainedModel(HydraModelMixin, AlbertPreTrainedModel):
    config_class = HydraAlbertConfig
    config: HydraAlbertConfig
    base_model_prefix = "albert"
    architecture = "ALBERT"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HydraAlbertEmbeddings", "HydraLayer"]
    backbone_types = ("albert",)
    backbone_rules = (
        *attention_rules(f"{LAYER}attention.{{}}", ("query", "key", "value", "dense")),
        Rule("layers.*.attention_norm.*", f"{LAYER}attention.LayerNorm.*"),
        Rule("layers.*.mlp.fc1.*", f"{LAYER}ffn.*"),
        Rule("layers.*.mlp.fc2.*", f"{LAYER}ffn_output.*"),
        Rule("layers.*.mlp_norm.*", f"{LAYER}full_layer_layer_norm.*"),
        Rule("embeddings.projection.*", "encoder.embedding_hidden_mapping_in.*"),
        Rule("pooler.dense.*", "pooler.*"),
    )


class HydraAlbertEmbeddings(AlbertEmbeddings):
    """ALBERT's embeddings and the map to the width of the layers."""

    def __init__(self, config: HydraAlbertConfig):
        super().__init__(config)
        self.projection = nn.Linear(config.embedding_size, config.hidden_size)

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.projection(super().forward(*args, **kwargs))


class HydraAlbertModel(BertEncoderMixin, HydraAlbertPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (AlbertModel,)
    embeddings_class = HydraAlbertEmbeddings
    runs_layers_again = True


class HydraAlbertForSequenceClassification(HydraTypedTextClassifierMixin, HydraAlbertPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (AlbertForSequenceClassification,)

    def __init__(self, config: HydraAlbertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.albert = HydraAlbertModel(config, add_pooling_layer=True)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = GroupedLinear(config.hidden_size, [config.head_width] * config.num_members)
        self.post_init()

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(features))


class HydraAlbertForTokenClassification(
    HydraTokenClassifierMixin, HydraTypedTextClassifierMixin, HydraAlbertPreTrainedModel
):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (AlbertForTokenClassification,)
    encoder_class = HydraAlbertModel


__all__ = [
    "HydraAlbertForSequenceClassification",
    "HydraAlbertForTokenClassification",
    "HydraAlbertModel",
    "HydraAlbertPreTrainedModel",
]
