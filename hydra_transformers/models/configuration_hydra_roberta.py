"""HydraRoberta configuration."""

from huggingface_hub.dataclasses import strict
from transformers import RobertaConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_bert import bert_layer_spec


@strict
class HydraRobertaConfig(HydraConfigMixin, RobertaConfig):
    r"""
    A [`RobertaConfig`] with the fields of [`HydraConfigMixin`].

    Args:
        add_pooling_layer (`bool`, *optional*, defaults to `True`):
            Whether [`HydraRobertaModel`] has a pooler. The text classifier has none, as in RoBERTa.
    """

    model_type = "hydra_roberta"

    add_pooling_layer: bool = True

    auto_classes = {
        "AutoConfig": "configuration_hydra_roberta.HydraRobertaConfig",
        "AutoModel": "modeling_hydra_roberta.HydraRobertaModel",
        "AutoModelForSequenceClassification": "modeling_hydra_roberta.HydraRobertaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_roberta.HydraRobertaForTokenClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return bert_layer_spec(self)


__all__ = ["HydraRobertaConfig"]
