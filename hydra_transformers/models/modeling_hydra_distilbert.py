"""HydraDistilBert: M head-pruned DistilBERT encoders as one network."""

import torch
from transformers.models.distilbert.modeling_distilbert import DistilBertPreTrainedModel, Embeddings
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hydra_distilbert import HydraDistilBertConfig
from .modeling_hydra import GroupedLinear, HydraClassifierOutput, HydraModelOutput
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
    embeddings_class = Embeddings

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
        """With its arguments in DistilBERT's order."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return self.encode(inputs | {"inputs_embeds": inputs_embeds}, **kwargs)


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
    encoder_class = HydraDistilBertModel
    head_dropout = ("seq_classif_dropout",)

    def add_head(self, config: HydraDistilBertConfig) -> None:
        self.pre_classifier = GroupedLinear(config.dim, [config.dim] * config.num_members)
        super().add_head(config)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return self.dropout(torch.relu(self.pre_classifier(hidden_states[:, :, 0])))


class HydraDistilBertForTokenClassification(
    HydraTokenClassifierMixin, DistilBertClassifierMixin, HydraDistilBertPreTrainedModel
):
    encoder_class = HydraDistilBertModel
