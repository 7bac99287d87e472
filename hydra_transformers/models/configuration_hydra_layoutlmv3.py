"""HydraLayoutLMv3 configuration."""

from huggingface_hub.dataclasses import strict
from transformers import LayoutLMv3Config

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_bert import bert_layer_spec


@strict
class HydraLayoutLMv3Config(HydraConfigMixin, LayoutLMv3Config):
    r"""A [`LayoutLMv3Config`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_layoutlmv3"

    auto_classes = {
        "AutoConfig": "configuration_hydra_layoutlmv3.HydraLayoutLMv3Config",
        "AutoModel": "modeling_hydra_layoutlmv3.HydraLayoutLMv3Model",
        "AutoModelForSequenceClassification": "modeling_hydra_layoutlmv3.HydraLayoutLMv3ForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_layoutlmv3.HydraLayoutLMv3ForTokenClassification",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not self.text_embed:
            raise ValueError("text_embed is False: a HydraLayoutLMv3 reads the words of a document, set it to True")

    @property
    def layer_spec(self) -> LayerSpec:
        return bert_layer_spec(self)


__all__ = ["HydraLayoutLMv3Config"]
