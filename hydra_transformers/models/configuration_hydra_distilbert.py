"""HydraDistilBert configuration."""

from huggingface_hub.dataclasses import strict
from transformers import DistilBertConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec, class_paths


@strict
class HydraDistilBertConfig(HydraConfigMixin, DistilBertConfig):
    r"""A [`DistilBertConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_distilbert"
    auto_classes = class_paths("distilbert", "HydraDistilBert", "ForSequenceClassification", "ForTokenClassification")

    @property
    def layer_spec(self) -> LayerSpec:
        return LayerSpec(
            inner_size=self.hidden_dim,
            activation=self.activation,
            norm_eps=1e-12,
            norm_first=False,
            float32_softmax=False,
            attention_dropout=self.attention_dropout,
            mlp_dropout=self.dropout,
        )
