"""HydraBert configuration."""

from huggingface_hub.dataclasses import strict
from transformers import BertConfig, ElectraConfig, MPNetConfig, RobertaConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec


def bert_layer_spec(config: BertConfig | ElectraConfig | MPNetConfig | RobertaConfig) -> LayerSpec:
    return LayerSpec(
        inner_size=config.intermediate_size,
        activation=config.hidden_act,
        norm_eps=config.layer_norm_eps,
        norm_first=False,
        float32_softmax=False,
        attention_dropout=config.attention_probs_dropout_prob,
        output_dropout=config.hidden_dropout_prob,
        mlp_dropout=config.hidden_dropout_prob,
    )


@strict
class HydraBertConfig(HydraConfigMixin, BertConfig):
    r"""
    A [`BertConfig`] with the fields of [`HydraConfigMixin`].

    Args:
        add_pooling_layer (`bool`, *optional*, defaults to `True`):
            Whether [`HydraBertModel`] has a pooler. The text classifier always has one, as in BERT.
    """

    model_type = "hydra_bert"

    add_pooling_layer: bool = True

    auto_classes = {
        "AutoConfig": "configuration_hydra_bert.HydraBertConfig",
        "AutoModel": "modeling_hydra_bert.HydraBertModel",
        "AutoModelForSequenceClassification": "modeling_hydra_bert.HydraBertForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_bert.HydraBertForTokenClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return bert_layer_spec(self)


__all__ = ["HydraBertConfig"]
