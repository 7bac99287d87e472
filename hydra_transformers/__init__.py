"""Hydra Ensembles for Hugging Face Transformers.

Take one trained transformer, cut different attention heads out of several copies, and run the copies fused as a single
model that knows when it does not know. The subpackages: `pruning`, `training`, `uncertainty`, `baselines`, `hub`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForZeroShotImageClassification,
)

from .models import (
    HydraBertConfig,
    HydraBertForSequenceClassification,
    HydraBertModel,
    HydraCLIPConfig,
    HydraCLIPModel,
    HydraCLIPTextConfig,
    HydraCLIPTextModel,
    HydraCLIPVisionConfig,
    HydraCLIPVisionModel,
    HydraViTConfig,
    HydraViTForImageClassification,
    HydraViTModel,
)


__version__ = "0.1.0"


def _register() -> None:
    """Lets the Auto classes find the installed models, and saved models take their code along.

    Both are needed: registered only with the Auto classes, a model that came from the Hub would be saved without code.
    """
    classes = {
        HydraViTConfig: {AutoModel: HydraViTModel, AutoModelForImageClassification: HydraViTForImageClassification},
        HydraBertConfig: {
            AutoModel: HydraBertModel,
            AutoModelForSequenceClassification: HydraBertForSequenceClassification,
        },
        HydraCLIPConfig: {AutoModel: HydraCLIPModel, AutoModelForZeroShotImageClassification: HydraCLIPModel},
        HydraCLIPTextConfig: {AutoModel: HydraCLIPTextModel},
        HydraCLIPVisionConfig: {AutoModel: HydraCLIPVisionModel},
    }
    for config_class, models in classes.items():
        AutoConfig.register(config_class.model_type, config_class)
        config_class.register_for_auto_class()
        for auto_class, model_class in models.items():
            auto_class.register(config_class, model_class)
            model_class.register_for_auto_class(auto_class.__name__)


_register()

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
