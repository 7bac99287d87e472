"""HydraBert: M head-pruned BERT encoders as one network."""

import torch
from torch import nn
from transformers import BertForSequenceClassification, BertForTokenClassification, BertModel
from transformers.models.bert.modeling_bert import BertEmbeddings, BertPreTrainedModel

from .configuration_hydra_bert import HydraBertConfig
from .modeling_hydra import GroupedLinear, GroupedPooler, hydra_layers, shared_or_per_member
from .pretrained import HydraModelMixin, Rule, attention_rules
from .texts import HydraTypedTextClassifierMixin, HydraTypedTextEncoderMixin
from .tokens import HydraTokenClassifierMixin


class HydraBertPreTrainedModel(HydraModelMixin, BertPreTrainedModel):
    config_class = HydraBertConfig
    config: HydraBertConfig
    base_model_prefix = "bert"
    architecture = "BERT"
    _no_split_modules = ["BertEmbeddings", "HydraLayer"]
    backbone_types = ("bert",)
    backbone_rules = (
        *attention_rules("encoder.layer.*.attention.{}", ("self.query", "self.key", "self.value", "output.dense")),
        Rule("layers.*.attention_norm.*", "encoder.layer.*.attention.output.LayerNorm.*"),
        Rule("layers.*.mlp.fc1.*", "encoder.layer.*.intermediate.dense.*"),
        Rule("layers.*.mlp.fc2.*", "encoder.layer.*.output.dense.*"),
        Rule("layers.*.mlp_norm.*", "encoder.layer.*.output.LayerNorm.*"),
    )


class BertEncoderMixin(HydraTypedTextEncoderMixin):
    """Embeddings, layers and perhaps a pooler: BERT's, and of those that are made like it."""

    embeddings_class: type

    def __init__(self, config: HydraBertConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: self.embeddings_class(config))
        self.layers = hydra_layers(config)
        self.pooler = None
        if config.add_pooling_layer if add_pooling_layer is None else add_pooling_layer:
            self.pooler = GroupedPooler(config.hidden_size, config.hidden_size, config.num_members, nn.Tanh())
        self.post_init()


class HydraBertModel(BertEncoderMixin, HydraBertPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (BertModel,)
    embeddings_class = BertEmbeddings


class HydraBertForSequenceClassification(HydraTypedTextClassifierMixin, HydraBertPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (BertForSequenceClassification,)

    def __init__(self, config: HydraBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = HydraBertModel(config, add_pooling_layer=True)
        has_own_dropout = config.classifier_dropout is not None
        self.dropout = nn.Dropout(config.classifier_dropout if has_own_dropout else config.hidden_dropout_prob)
        self.classifier = GroupedLinear(config.hidden_size, [config.head_width] * config.num_members)
        self.post_init()

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(features))


class HydraBertForTokenClassification(
    HydraTokenClassifierMixin, HydraTypedTextClassifierMixin, HydraBertPreTrainedModel
):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (BertForTokenClassification,)
    encoder_class = HydraBertModel


__all__ = [
    "HydraBertForSequenceClassification",
    "HydraBertForTokenClassification",
    "HydraBertModel",
    "HydraBertPreTrainedModel",
]
