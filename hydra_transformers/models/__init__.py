"""The Hydra models. What lies in this folder is exactly what a saved model takes along to the Hub."""

from .configuration_hydra_bert import HydraBertConfig
from .configuration_hydra_clip import HydraCLIPConfig, HydraCLIPTextConfig, HydraCLIPVisionConfig
from .configuration_hydra_vit import HydraViTConfig
from .modeling_hydra_bert import HydraBertForSequenceClassification, HydraBertModel
from .modeling_hydra_clip import HydraCLIPModel, HydraCLIPTextModel, HydraCLIPVisionModel
from .modeling_hydra_vit import HydraViTForImageClassification, HydraViTModel


__all__ = [
    "HydraBertConfig",
    "HydraBertForSequenceClassification",
    "HydraBertModel",
    "HydraCLIPConfig",
    "HydraCLIPModel",
    "HydraCLIPTextConfig",
    "HydraCLIPTextModel",
    "HydraCLIPVisionConfig",
    "HydraCLIPVisionModel",
    "HydraViTConfig",
    "HydraViTForImageClassification",
    "HydraViTModel",
]
