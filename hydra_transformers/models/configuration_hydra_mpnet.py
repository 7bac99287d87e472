"""HydraMPNet configuration."""

from huggingface_hub.dataclasses import strict
from transformers import MPNetConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_bert import bert_layer_spec


@strict
class HydraMPNetConfig(HydraConfigMixin, MPNetConfig):
    r"""
    An [`MPNetConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`, `ensemble_loss`,
    `fast_inference`).

    Args:
        add_pooling_layer (`bool`, *optional*, defaults to `True`):
            Whether [`HydraMPNetModel`] has a pooler. The text classifier has none, as in MPNet.
    """

    model_type = "hydra_mpnet"

    add_pooling_layer: bool = True

    auto_classes = {
        "AutoConfig": "configuration_hydra_mpnet.HydraMPNetConfig",
        "AutoModel": "modeling_hydra_mpnet.HydraMPNetModel",
        "AutoModelForSequenceClassification": "modeling_hydra_mpnet.HydraMPNetForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_mpnet.HydraMPNetForTokenClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return bert_layer_spec(self)


__all__ = ["HydraMPNetConfig"]
