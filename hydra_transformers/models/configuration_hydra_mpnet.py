"""HydraMPNet configuration."""

from huggingface_hub.dataclasses import strict
from transformers import MPNetConfig

from .configuration_hydra import HydraConfigMixin
from .configuration_hydra_bert import bert_layer_spec


@strict
class HydraMPNetConfig(HydraConfigMixin, MPNetConfig):
    r"""An [`MPNetConfig`] with the fields of [`HydraConfigMixin`], and `add_pooling_layer`."""

    model_type = "hydra_mpnet"
    add_pooling_layer: bool = True
    auto_classes = {
        "AutoConfig": "configuration_hydra_mpnet.HydraMPNetConfig",
        "AutoModel": "modeling_hydra_mpnet.HydraMPNetModel",
        "AutoModelForSequenceClassification": "modeling_hydra_mpnet.HydraMPNetForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_mpnet.HydraMPNetForTokenClassification",
    }
    layer_spec = property(bert_layer_spec)
