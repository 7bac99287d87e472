"""The table of families, and their registration with Transformers.

A family is imported when one of its names is asked for, or when `AutoConfig` meets its
`model_type`.
"""

import importlib
import sys
from functools import cache
from typing import Any, NamedTuple

from .configuration_hydra import PIPELINES, pipeline_task


class Family(NamedTuple):
    """A `model_type` of Hydras.

    module: its files are `configuration_hydra_{module}.py` and `modeling_hydra_{module}.py`
    config: its config class
    models: its model classes
    backbone_types: the `model_type`s of the Transformers models that it is built from
    """

    module: str
    config: str
    models: tuple[str, ...]
    backbone_types: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its public classes, the config first."""
        return (self.config, *self.models)


FAMILIES: dict[str, Family] = {
    "hydra_vit": Family(
        module="vit",
        config="HydraViTConfig",
        models=("HydraViTModel", "HydraViTForImageClassification"),
        backbone_types=("vit",),
    ),
    "hydra_deit": Family(
        module="deit",
        config="HydraDeiTConfig",
        models=("HydraDeiTModel", "HydraDeiTForImageClassification"),
        backbone_types=("deit",),
    ),
    "hydra_beit": Family(
        module="beit",
        config="HydraBeitConfig",
        models=("HydraBeitModel", "HydraBeitForImageClassification"),
        backbone_types=("beit",),
    ),
    "hydra_dinov2": Family(
        module="dinov2",
        config="HydraDinov2Config",
        models=("HydraDinov2Model", "HydraDinov2ForImageClassification"),
        backbone_types=("dinov2",),
    ),
    "hydra_dinov2_with_registers": Family(
        module="dinov2",
        config="HydraDinov2WithRegistersConfig",
        models=("HydraDinov2WithRegistersModel", "HydraDinov2WithRegistersForImageClassification"),
        backbone_types=("dinov2_with_registers",),
    ),
    "hydra_dinov3_vit": Family(
        module="dinov3_vit",
        config="HydraDINOv3ViTConfig",
        models=("HydraDINOv3ViTModel",),
        backbone_types=("dinov3_vit",),
    ),
    "hydra_clip": Family(
        module="towers",
        config="HydraCLIPConfig",
        models=("HydraCLIPModel",),
        backbone_types=("clip",),
    ),
    "hydra_clip_text_model": Family(
        module="towers",
        config="HydraCLIPTextConfig",
        models=("HydraCLIPTextModel",),
        backbone_types=("clip_text_model",),
    ),
    "hydra_clip_vision_model": Family(
        module="towers",
        config="HydraCLIPVisionConfig",
        models=("HydraCLIPVisionModel", "HydraCLIPForImageClassification"),
        backbone_types=("clip_vision_model", "clip"),
    ),
    "hydra_siglip": Family(
        module="towers",
        config="HydraSiglipConfig",
        models=("HydraSiglipModel",),
        backbone_types=("siglip",),
    ),
    "hydra_siglip_text_model": Family(
        module="towers",
        config="HydraSiglipTextConfig",
        models=("HydraSiglipTextModel",),
        backbone_types=("siglip_text_model",),
    ),
    "hydra_siglip_vision_model": Family(
        module="towers",
        config="HydraSiglipVisionConfig",
        models=("HydraSiglipVisionModel", "HydraSiglipForImageClassification"),
        backbone_types=("siglip_vision_model", "siglip"),
    ),
    "hydra_albert": Family(
        module="bert",
        config="HydraAlbertConfig",
        models=("HydraAlbertModel", "HydraAlbertForSequenceClassification", "HydraAlbertForTokenClassification"),
        backbone_types=("albert",),
    ),
    "hydra_bert": Family(
        module="bert",
        config="HydraBertConfig",
        models=("HydraBertModel", "HydraBertForSequenceClassification", "HydraBertForTokenClassification"),
        backbone_types=("bert",),
    ),
    "hydra_deberta_v2": Family(
        module="deberta_v2",
        config="HydraDebertaV2Config",
        models=(
            "HydraDebertaV2Model",
            "HydraDebertaV2ForSequenceClassification",
            "HydraDebertaV2ForTokenClassification",
        ),
        backbone_types=("deberta-v2",),
    ),
    "hydra_distilbert": Family(
        module="bert",
        config="HydraDistilBertConfig",
        models=(
            "HydraDistilBertModel",
            "HydraDistilBertForSequenceClassification",
            "HydraDistilBertForTokenClassification",
        ),
        backbone_types=("distilbert",),
    ),
    "hydra_electra": Family(
        module="bert",
        config="HydraElectraConfig",
        models=("HydraElectraModel", "HydraElectraForSequenceClassification", "HydraElectraForTokenClassification"),
        backbone_types=("electra",),
    ),
    "hydra_modernbert": Family(
        module="modernbert",
        config="HydraModernBertConfig",
        models=(
            "HydraModernBertModel",
            "HydraModernBertForSequenceClassification",
            "HydraModernBertForTokenClassification",
        ),
        backbone_types=("modernbert",),
    ),
    "hydra_mpnet": Family(
        module="mpnet",
        config="HydraMPNetConfig",
        models=("HydraMPNetModel", "HydraMPNetForSequenceClassification", "HydraMPNetForTokenClassification"),
        backbone_types=("mpnet",),
    ),
    "hydra_roberta": Family(
        module="bert",
        config="HydraRobertaConfig",
        models=("HydraRobertaModel", "HydraRobertaForSequenceClassification", "HydraRobertaForTokenClassification"),
        backbone_types=("roberta", "xlm-roberta", "camembert"),
    ),
    "hydra_llama": Family(
        module="decoders",
        config="HydraLlamaConfig",
        models=("HydraLlamaModel", "HydraLlamaForSequenceClassification", "HydraLlamaForTokenClassification"),
        backbone_types=("llama",),
    ),
    "hydra_qwen2": Family(
        module="decoders",
        config="HydraQwen2Config",
        models=("HydraQwen2Model", "HydraQwen2ForSequenceClassification", "HydraQwen2ForTokenClassification"),
        backbone_types=("qwen2",),
    ),
    "hydra_qwen3": Family(
        module="decoders",
        config="HydraQwen3Config",
        models=("HydraQwen3Model", "HydraQwen3ForSequenceClassification", "HydraQwen3ForTokenClassification"),
        backbone_types=("qwen3",),
    ),
    "hydra_gemma": Family(
        module="decoders",
        config="HydraGemmaConfig",
        models=("HydraGemmaModel", "HydraGemmaForSequenceClassification", "HydraGemmaForTokenClassification"),
        backbone_types=("gemma",),
    ),
    "hydra_gemma3_text": Family(
        module="decoders",
        config="HydraGemma3TextConfig",
        models=("HydraGemma3TextModel", "HydraGemma3TextForSequenceClassification"),
        backbone_types=("gemma3_text",),
    ),
    "hydra_ast": Family(
        module="ast",
        config="HydraASTConfig",
        models=("HydraASTModel", "HydraASTForAudioClassification"),
        backbone_types=("audio-spectrogram-transformer",),
    ),
    "hydra_wav2vec2": Family(
        module="waveforms",
        config="HydraWav2Vec2Config",
        models=("HydraWav2Vec2Model", "HydraWav2Vec2ForSequenceClassification"),
        backbone_types=("wav2vec2",),
    ),
    "hydra_hubert": Family(
        module="waveforms",
        config="HydraHubertConfig",
        models=("HydraHubertModel", "HydraHubertForSequenceClassification"),
        backbone_types=("hubert",),
    ),
    "hydra_wavlm": Family(
        module="waveforms",
        config="HydraWavLMConfig",
        models=("HydraWavLMModel", "HydraWavLMForSequenceClassification"),
        backbone_types=("wavlm",),
    ),
    "hydra_whisper": Family(
        module="waveforms",
        config="HydraWhisperConfig",
        models=("HydraWhisperModel", "HydraWhisperForAudioClassification"),
        backbone_types=("whisper",),
    ),
}
MODEL_TYPES: dict[str, str] = {name: kind for kind, family in FAMILIES.items() for name in family.names}


def register() -> None:
    """Let the Auto classes and `pipeline` of Transformers find Hydras, without importing any
    family.

    Transformers keeps the names of its own configs in a table, and imports the module of a config
    when its `model_type` is asked for. Hydras' configs stand in the same table, with the package
    `models` as their module: it imports the config and registers the family's models.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type, family in FAMILIES.items():
        CONFIG_MAPPING._mapping[model_type] = family.config
        CONFIG_MAPPING._modules[model_type] = sys.modules[__package__]
    for auto_class in PIPELINES:
        pipeline_class(auto_class)


@cache
def config_class(model_type: str) -> type:
    """Import a family's config, and register its models with the Auto classes of Transformers."""
    import transformers

    family = FAMILIES[model_type]
    module = importlib.import_module(f".configuration_hydra_{family.module}", __package__)
    config = getattr(module, family.config)
    for auto_class in config.auto_classes:
        if auto_class != "AutoConfig":
            model = model_class(config, auto_class)
            getattr(transformers, auto_class).register(config, model, exist_ok=True)
    return config


def model_class(config: type, auto_class: str) -> type:
    """Return the class that an Auto class of Transformers builds from configs of the class
    `config`."""
    return _import_class(config.auto_classes[auto_class])


def public_class(name: str) -> type:
    """Return a family's class by its name."""
    model_type = MODEL_TYPES[name]
    config = config_class(model_type)
    if name == config.__name__:
        return config
    return _import_class(f"modeling_hydra_{FAMILIES[model_type].module}.{name}")


@cache
def pipeline_class(auto_class: str) -> type:
    """Import and register the pipeline that says how sure it is, of models that an Auto class
    loads."""
    import transformers
    from transformers.pipelines import PIPELINE_REGISTRY

    path = PIPELINES[auto_class]
    pipeline = _import_class(path)
    PIPELINE_REGISTRY.register_pipeline(pipeline_task(path), pipeline, getattr(transformers, auto_class))
    return pipeline


def _import_class(path: str) -> Any:
    """Import a class of this package: "modeling_hydra_vit.HydraViTModel", for example."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)
