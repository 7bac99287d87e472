"""HydraDistilBert: M head-pruned DistilBERT encoders as one network."""

import torch
from transformers import DistilBertForSequenceClassification, DistilBertForTokenClassification, DistilBertModel
from transformers.models.distilbert.modeling_distilbert import DistilBertPreTrainedModel, Embeddings
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hydra_distilbert import HydraDistilBertConfig
from .modeling_hydra import GroupedLinear, HydraClassifierOutput, HydraModelOutput, hydra_layers, shared_or_per_member
from .pretrained import HydraModelMixin, Rule, attention_rules
from .texts import HydraTextClassifierMixin, HydraTextEncoderMixin
from .tokens import HydraTokenClassifierMixin


class HydraDistilBertPreTrainedModel(HydraModelMixin, DistilBertPreTrainedModel):
    config_class = HydraDistilBertConfig
    base_model_prefix = "distilbert"
    architecture = "DistilBERT"
    _no_split_modules = ["Embeddings", "HydraLayer"]
    backbone_types = ("distilbert",)
    backbone_rules = (
        *attention_rules("transformer.layer.*.attention.{}_lin", ("q", "k", "v", "out")),
        Rule("layers.*.attention_norm.*", "transformer.layer.*.sa_layer_norm.*"),
        Rule("layers.*.mlp.fc1.*", "transformer.layer.*.ffn.lin1.*"),
        Rule("layers.*.mlp.fc2.*", "transformer.layer.*.ffn.lin2.*"),
        Rule("layers.*.mlp_norm.*", "transformer.layer.*.output_layer_norm.*"),
    )


class HydraDistilBertModel(HydraTextEncoderMixin, HydraDistilBertPreTrainedModel):
    backbone_classes = (DistilBertModel,)

    def __init__(self, config: HydraDistilBertConfig):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: Embeddings(config))
        self.layers = hydra_layers(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_ids, attention_mask, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        kwargs: of `encode`, too
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
            "position_ids": position_ids,
        }
        return self.encode(inputs, **kwargs)


class DistilBertClassifierMixin(HydraTextClassifierMixin):
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """With its arguments in DistilBERT's order."""
        return super().forward(input_ids, attention_mask, position_ids, inputs_embeds, labels, **kwargs)


class HydraDistilBertForSequenceClassification(DistilBertClassifierMixin, HydraDistilBertPreTrainedModel):
    backbone_classes = (DistilBertForSequenceClassification,)
    encoder_class = HydraDistilBertModel

    def add_head(self, config: HydraDistilBertConfig) -> None:
        self.pre_classifier = GroupedLinear(config.dim, [config.dim] * config.num_members)
        super().add_head(config)

    def head_dropout(self, config: HydraDistilBertConfig) -> float:
        return config.seq_classif_dropout

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.relu(self.pre_classifier(features)))

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.prepare(features))


class HydraDistilBertForTokenClassification(
    HydraTokenClassifierMixin, DistilBertClassifierMixin, HydraDistilBertPreTrainedModel
):
    backbone_classes = (DistilBertForTokenClassification,)
    encoder_class = HydraDistilBertModel
