"""HydraModernBert configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ModernBertConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec


@strict
class HydraModernBertConfig(HydraConfigMixin, ModernBertConfig):
    r"""A [`ModernBertConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_modernbert"
    auto_classes = {
        "AutoConfig": "configuration_hydra_modernbert.HydraModernBertConfig",
        "AutoModel": "modeling_hydra_modernbert.HydraModernBertModel",
        "AutoModelForSequenceClassification": "modeling_hydra_modernbert.HydraModernBertForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_modernbert.HydraModernBertForTokenClassification",
    }

    @property
    def attention_window(self) -> int:
        return self.sliding_window + 1

    @property
    def layer_spec(self) -> LayerSpec:
        return LayerSpec(
            inner_size=self.intermediate_size,
            activation=self.hidden_activation,
            norm_eps=self.norm_eps,
            gated_mlp=True,
            mlp_bias=self.mlp_bias,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            attention_dropout=self.attention_dropout,
            output_dropout=self.attention_dropout or None,
            inner_dropout=self.mlp_dropout,
        )
