"""HydraRoberta: M head-pruned RoBERTa or XLM-RoBERTa encoders as one network."""

import torch
from torch import nn
from transformers import (
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings, RobertaPreTrainedModel

from .configuration_hydra_roberta import HydraRobertaConfig
from .grouped import GroupedLinear
from .modeling_hydra import HydraModelMixin
from .modeling_hydra_bert import BertEncoderMixin, HydraBertPreTrainedModel
from .texts import HydraTextClassifierMixin


class HydraRobertaPreTrainedModel(HydraModelMixin, RobertaPreTrainedModel):
    config_class = HydraRobertaConfig
    config: HydraRobertaConfig
    base_model_prefix = "roberta"
    architecture = "RoBERTa"
    _no_split_modules = ["RobertaEmbeddings", "HydraLayer"]
    backbone_types = ("roberta", "xlm-roberta")
    backbone_rules = HydraBertPreTrainedModel.backbone_rules


class HydraRobertaModel(BertEncoderMixin, HydraRobertaPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (RobertaModel, XLMRobertaModel)
    embeddings_class = RobertaEmbeddings


class HydraRobertaClassificationHead(nn.Module):
    """A head of two maps per member: (members, batch, hidden) -> (members, batch, classes)."""

    def __init__(self, config: HydraRobertaConfig):
        super().__init__()
        members, has_own_dropout = config.num_members, config.classifier_dropout is not None
        self.dense = GroupedLinear(config.hidden_size, [config.hidden_size] * members)
        self.dropout = nn.Dropout(config.classifier_dropout if has_own_dropout else config.hidden_dropout_prob)
        self.out_proj = GroupedLinear(config.hidden_size, [config.num_labels] * members)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.dense(self.dropout(features))))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.prepare(features))


class HydraRobertaForSequenceClassification(HydraTextClassifierMixin, HydraRobertaPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (RobertaForSequenceClassification, XLMRobertaForSequenceClassification)

    def __init__(self, config: HydraRobertaConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.roberta = HydraRobertaModel(config, add_pooling_layer=False)
        self.classifier = HydraRobertaClassificationHead(config)
        self.post_init()

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier.prepare(features)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(features)


__all__ = ["HydraRobertaForSequenceClassification", "HydraRobertaModel", "HydraRobertaPreTrainedModel"]
