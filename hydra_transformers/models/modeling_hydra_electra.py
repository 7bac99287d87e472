"""HydraElectra: M head-pruned ELECTRA discriminators as one network."""

import torch
from torch import nn
from transformers import ElectraForSequenceClassification, ElectraForTokenClassification, ElectraModel
from transformers.models.electra.modeling_electra import ElectraEmbeddings, ElectraPreTrainedModel

from .configuration_hydra_electra import HydraElectraConfig
from .modeling_hydra import hydra_layers, shared_or_per_member
from .modeling_hydra_bert import HydraBertPreTrainedModel
from .pretrained import HydraModelMixin, Rule
from .texts import (
    GroupedClassificationHead,
    HydraTwoMapTextClassifierMixin,
    HydraTypedTextClassifierMixin,
    HydraTypedTextEncoderMixin,
)
from .tokens import HydraTokenClassifierMixin


class HydraElectraPreTrainedModel(HydraModelMixin, ElectraPreTrainedModel):
    config_class = HydraElectraConfig
    config: HydraElectraConfig
    base_model_prefix = "electra"
    architecture = "ELECTRA"
    _no_split_modules = ["HydraElectraEmbeddings", "HydraLayer"]
    backbone_types = ("electra",)
    backbone_rules = (
        *HydraBertPreTrainedModel.backbone_rules,
        Rule("embeddings.projection.*", "embeddings_project.*"),
    )


class HydraElectraEmbeddings(ElectraEmbeddings):
    """ELECTRA's embeddings, and the map to the width of the layers where that is another."""

    def __init__(self, config: HydraElectraConfig):
        super().__init__(config)
        has_projection = config.embedding_size != config.hidden_size
        self.projection = nn.Linear(config.embedding_size, config.hidden_size) if has_projection else nn.Identity()

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.projection(super().forward(*args, **kwargs))


class HydraElectraModel(HydraTypedTextEncoderMixin, HydraElectraPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (ElectraModel,)

    def __init__(self, config: HydraElectraConfig):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: HydraElectraEmbeddings(config))
        self.layers = hydra_layers(config)
        self.post_init()


class HydraElectraForSequenceClassification(HydraTwoMapTextClassifierMixin, HydraElectraPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (ElectraForSequenceClassification,)

    def __init__(self, config: HydraElectraConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.electra = HydraElectraModel(config)
        self.classifier = GroupedClassificationHead(config, nn.GELU(), config.classifier_dropout)
        self.post_init()


class HydraElectraForTokenClassification(
    HydraTokenClassifierMixin, HydraTypedTextClassifierMixin, HydraElectraPreTrainedModel
):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (ElectraForTokenClassification,)
    encoder_class = HydraElectraModel


__all__ = [
    "HydraElectraForSequenceClassification",
    "HydraElectraForTokenClassification",
    "HydraElectraModel",
    "HydraElectraPreTrainedModel",
]
