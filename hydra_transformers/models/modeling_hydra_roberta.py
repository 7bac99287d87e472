"""HydraRoberta: M head-pruned RoBERTa, XLM-RoBERTa or CamemBERT encoders as one network."""

from torch import nn
from transformers import (
    CamembertForSequenceClassification,
    CamembertForTokenClassification,
    CamembertModel,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    XLMRobertaForSequenceClassification,
    XLMRobertaForTokenClassification,
    XLMRobertaModel,
)
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings, RobertaPreTrainedModel

from .configuration_hydra_roberta import HydraRobertaConfig
from .modeling_hydra_bert import BertEncoderMixin, HydraBertPreTrainedModel
from .pretrained import HydraModelMixin
from .texts import GroupedClassificationHead, HydraTwoMapTextClassifierMixin, HydraTypedTextClassifierMixin
from .tokens import HydraTokenClassifierMixin


class HydraRobertaPreTrainedModel(HydraModelMixin, RobertaPreTrainedModel):
    config_class = HydraRobertaConfig
    config: HydraRobertaConfig
    base_model_prefix = "roberta"
    architecture = "RoBERTa"
    _no_split_modules = ["RobertaEmbeddings", "HydraLayer"]
    backbone_types = ("roberta", "xlm-roberta", "camembert")
    backbone_rules = HydraBertPreTrainedModel.backbone_rules


class HydraRobertaModel(BertEncoderMixin, HydraRobertaPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (RobertaModel, XLMRobertaModel, CamembertModel)
    embeddings_class = RobertaEmbeddings


class HydraRobertaForSequenceClassification(HydraTwoMapTextClassifierMixin, HydraRobertaPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (
        RobertaForSequenceClassification,
        XLMRobertaForSequenceClassification,
        CamembertForSequenceClassification,
    )

    def __init__(self, config: HydraRobertaConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.roberta = HydraRobertaModel(config, add_pooling_layer=False)
        self.classifier = GroupedClassificationHead(config, nn.Tanh(), config.classifier_dropout)
        self.post_init()


class HydraRobertaForTokenClassification(
    HydraTokenClassifierMixin, HydraTypedTextClassifierMixin, HydraRobertaPreTrainedModel
):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (
        RobertaForTokenClassification,
        XLMRobertaForTokenClassification,
        CamembertForTokenClassification,
    )
    encoder_class = HydraRobertaModel


__all__ = [
    "HydraRobertaForSequenceClassification",
    "HydraRobertaForTokenClassification",
    "HydraRobertaModel",
    "HydraRobertaPreTrainedModel",
]
