"""HydraBert, HydraRoberta (XLM-RoBERTa and CamemBERT, too), HydraElectra, HydraAlbert and
HydraDistilBert: M head-pruned encoders of texts as one network.

A layer of ALBERT runs several times. It has its weights once, for each member its own heads, and a
head that is cut out is missing each time.
"""

import torch
import transformers
from torch import nn
from transformers.models.albert.modeling_albert import AlbertEmbeddings, AlbertPreTrainedModel
from transformers.models.bert.modeling_bert import BertEmbeddings, BertPreTrainedModel
from transformers.models.distilbert.modeling_distilbert import DistilBertPreTrainedModel, Embeddings
from transformers.models.electra.modeling_electra import ElectraEmbeddings, ElectraPreTrainedModel
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings, RobertaPreTrainedModel

from .configuration_hydra_bert import (
    HydraAlbertConfig,
    HydraBertConfig,
    HydraDistilBertConfig,
    HydraElectraConfig,
    HydraRobertaConfig,
)
from .modeling_hydra import GroupedLinear
from .pretrained import HydraModelMixin
from .texts import (
    HydraTextClassifierMixin,
    HydraTextEncoderMixin,
    HydraTwoMapTextClassifierMixin,
    HydraTypedTextClassifierMixin,
    HydraTypedTextEncoderMixin,
)
from .tokens import HydraTokenClassifierMixin, HydraTypedTokenClassifierMixin


class HydraBertPreTrainedModel(HydraModelMixin, BertPreTrainedModel):
    config_class = HydraBertConfig
    base_model_prefix = "bert"
    architecture = "BERT"
    _no_split_modules = ["BertEmbeddings", "HydraLayer"]


class HydraBertModel(HydraTypedTextEncoderMixin, HydraBertPreTrainedModel):
    embeddings_class = BertEmbeddings


class HydraBertForSequenceClassification(HydraTypedTextClassifierMixin, HydraBertPreTrainedModel):
    encoder_class = HydraBertModel
    encoder_options = {"add_pooling_layer": True}
    head_dropout = ("classifier_dropout", "hidden_dropout_prob")


class HydraBertForTokenClassification(HydraTypedTokenClassifierMixin, HydraBertPreTrainedModel):
    encoder_class = HydraBertModel


class HydraRobertaPreTrainedModel(HydraModelMixin, RobertaPreTrainedModel):
    config_class = HydraRobertaConfig
    base_model_prefix = "roberta"
    architecture = "RoBERTa"
    _no_split_modules = ["RobertaEmbeddings", "HydraLayer"]


class HydraRobertaModel(HydraTypedTextEncoderMixin, HydraRobertaPreTrainedModel):
    backbone_classes = (transformers.RobertaModel, transformers.XLMRobertaModel, transformers.CamembertModel)
    embeddings_class = RobertaEmbeddings


class HydraRobertaForSequenceClassification(HydraTwoMapTextClassifierMixin, HydraRobertaPreTrainedModel):
    backbone_classes = (
        transformers.RobertaForSequenceClassification,
        transformers.XLMRobertaForSequenceClassification,
        transformers.CamembertForSequenceClassification,
    )
    encoder_class = HydraRobertaModel
    encoder_options = {"add_pooling_layer": False}


class HydraRobertaForTokenClassification(HydraTypedTokenClassifierMixin, HydraRobertaPreTrainedModel):
    backbone_classes = (
        transformers.RobertaForTokenClassification,
        transformers.XLMRobertaForTokenClassification,
        transformers.CamembertForTokenClassification,
    )
    encoder_class = HydraRobertaModel


class HydraElectraPreTrainedModel(HydraModelMixin, ElectraPreTrainedModel):
    config_class = HydraElectraConfig
    base_model_prefix = "electra"
    architecture = "ELECTRA"
    _no_split_modules = ["HydraElectraEmbeddings", "HydraLayer"]


class ProjectedEmbeddingsMixin:
    """A backbone's embeddings, and the map to the width of the layers; ELECTRA has one only where
    that is another."""

    def __init__(self, config: HydraElectraConfig | HydraAlbertConfig):
        super().__init__(config)
        has_projection = config.embedding_size != config.hidden_size or isinstance(config, HydraAlbertConfig)
        self.projection = nn.Identity()
        if has_projection:
            self.projection = nn.Linear(config.embedding_size, config.hidden_size)

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.projection(super().forward(*args, **kwargs))


class HydraElectraEmbeddings(ProjectedEmbeddingsMixin, ElectraEmbeddings):
    pass


class HydraElectraModel(HydraTypedTextEncoderMixin, HydraElectraPreTrainedModel):
    embeddings_class = HydraElectraEmbeddings


class HydraElectraForSequenceClassification(HydraTwoMapTextClassifierMixin, HydraElectraPreTrainedModel):
    encoder_class = HydraElectraModel
    head_activation = nn.GELU


class HydraElectraForTokenClassification(HydraTypedTokenClassifierMixin, HydraElectraPreTrainedModel):
    encoder_class = HydraElectraModel


class HydraAlbertPreTrainedModel(HydraModelMixin, AlbertPreTrainedModel):
    config_class = HydraAlbertConfig
    base_model_prefix = "albert"
    architecture = "ALBERT"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HydraAlbertEmbeddings", "HydraLayer"]


class HydraAlbertEmbeddings(ProjectedEmbeddingsMixin, AlbertEmbeddings):
    pass


class HydraAlbertModel(HydraTypedTextEncoderMixin, HydraAlbertPreTrainedModel):
    embeddings_class = HydraAlbertEmbeddings

    @property
    def layer_order(self) -> list[int]:
        runs = [*self.config.layer_runs, *[1] * len(self.layers)]  # layers may have been taken away or added
        return [number for number in range(len(self.layers)) for _ in range(runs[number])]


class HydraAlbertForSequenceClassification(HydraTypedTextClassifierMixin, HydraAlbertPreTrainedModel):
    encoder_class = HydraAlbertModel
    encoder_options = {"add_pooling_layer": True}
    head_dropout = ("classifier_dropout_prob",)


class HydraAlbertForTokenClassification(HydraTypedTokenClassifierMixin, HydraAlbertPreTrainedModel):
    encoder_class = HydraAlbertModel


class HydraDistilBertPreTrainedModel(HydraModelMixin, DistilBertPreTrainedModel):
    config_class = HydraDistilBertConfig
    base_model_prefix = "distilbert"
    architecture = "DistilBERT"
    _no_split_modules = ["Embeddings", "HydraLayer"]


class HydraDistilBertModel(HydraTextEncoderMixin, HydraDistilBertPreTrainedModel):
    embeddings_class = Embeddings


class HydraDistilBertForSequenceClassification(HydraTextClassifierMixin, HydraDistilBertPreTrainedModel):
    encoder_class = HydraDistilBertModel
    head_dropout = ("seq_classif_dropout",)

    def add_head(self, config: HydraDistilBertConfig) -> None:
        self.pre_classifier = GroupedLinear(config.dim, [config.dim] * config.num_members)
        super().add_head(config)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return self.dropout(torch.relu(self.pre_classifier(hidden_states[:, :, 0])))


class HydraDistilBertForTokenClassification(HydraTokenClassifierMixin, HydraDistilBertPreTrainedModel):
    encoder_class = HydraDistilBertModel
