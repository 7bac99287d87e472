"""The table of families, and their registration with Transformers without importing them.

A family is imported when one of its names is asked for, or when `AutoConfig` meets its `model_type`. Until then, the Auto
classes and `pipeline` hold placeholders. This module imports neither Transformers nor torch.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from .configuration_hydra import PIPELINES, task_of


class Family(NamedTuple):
    """A `model_type` of Hydras.

    module: its files are `configuration_hydra_{module}.py` and `modeling_hydra_{module}.py`
    names: its public classes, the config first
    backbone_types: the `model_type`s of the Transformers models that it is built from
    """

    module: str
    names: tuple[str, ...]
    backbone_types: tuple[str, ...]


def _family(module: str, names: str, *backbone_types: str) -> Family:
    return Family(module, tuple(f"Hydra{name}" for name in names.split()), backbone_types)


def _texts(prefix: str) -> str:
    return f"{prefix}Config {prefix}Model {prefix}ForSequenceClassification {prefix}ForTokenClassification"


def _images(prefix: str) -> str:
    return f"{prefix}Config {prefix}Model {prefix}ForImageClassification"


FAMILIES: dict[str, Family] = {
    "hydra_vit": _family("vit", _images("ViT"), "vit"),
    "hydra_deit": _family("deit", _images("DeiT"), "deit"),
    "hydra_beit": _family("beit", _images("Beit"), "beit"),
    "hydra_dinov2": _family("dinov2", _images("Dinov2"), "dinov2"),
    "hydra_dinov2_with_registers": _family("dinov2", _images("Dinov2WithRegisters"), "dinov2_with_registers"),
    "hydra_dinov3_vit": _family("dinov3_vit", "DINOv3ViTConfig DINOv3ViTModel", "dinov3_vit"),
    "hydra_clip": _family("towers", "CLIPConfig CLIPModel", "clip"),
    "hydra_clip_text_model": _family("towers", "CLIPTextConfig CLIPTextModel", "clip_text_model"),
    "hydra_clip_vision_model": _family(
        "towers", "CLIPVisionConfig CLIPVisionModel CLIPForImageClassification", "clip_vision_model", "clip"
    ),
    "hydra_siglip": _family("towers", "SiglipConfig SiglipModel", "siglip"),
    "hydra_siglip_text_model": _family("towers", "SiglipTextConfig SiglipTextModel", "siglip_text_model"),
    "hydra_siglip_vision_model": _family(
        "towers", "SiglipVisionConfig SiglipVisionModel SiglipForImageClassification", "siglip_vision_model", "siglip"
    ),
    "hydra_albert": _family("bert", _texts("Albert"), "albert"),
    "hydra_bert": _family("bert", _texts("Bert"), "bert"),
    "hydra_deberta_v2": _family("deberta_v2", _texts("DebertaV2"), "deberta-v2"),
    "hydra_distilbert": _family("bert", _texts("DistilBert"), "distilbert"),
    "hydra_electra": _family("bert", _texts("Electra"), "electra"),
    "hydra_modernbert": _family("modernbert", _texts("ModernBert"), "modernbert"),
    "hydra_mpnet": _family("mpnet", _texts("MPNet"), "mpnet"),
    "hydra_roberta": _family("bert", _texts("Roberta"), "roberta", "xlm-roberta", "camembert"),
    "hydra_llama": _family("decoders", _texts("Llama"), "llama"),
    "hydra_qwen2": _family("decoders", _texts("Qwen2"), "qwen2"),
    "hydra_qwen3": _family("decoders", _texts("Qwen3"), "qwen3"),
    "hydra_gemma": _family("decoders", _texts("Gemma"), "gemma"),
    "hydra_gemma3_text": _family(
        "decoders", "Gemma3TextConfig Gemma3TextModel Gemma3TextForSequenceClassification", "gemma3_text"
    ),
    "hydra_ast": _family("ast", "ASTConfig ASTModel ASTForAudioClassification", "audio-spectrogram-transformer"),
    "hydra_wav2vec2": _family(
        "waveforms", "Wav2Vec2Config Wav2Vec2Model Wav2Vec2ForSequenceClassification", "wav2vec2"
    ),
    "hydra_hubert": _family("waveforms", "HubertConfig HubertModel HubertForSequenceClassification", "hubert"),
    "hydra_wavlm": _family("waveforms", "WavLMConfig WavLMModel WavLMForSequenceClassification", "wavlm"),
    "hydra_whisper": _family("waveforms", "WhisperConfig WhisperModel WhisperForAudioClassification", "whisper"),
}
MODEL_TYPES: dict[str, str] = {name: kind for kind, family in FAMILIES.items() for name in family.names}

_loaded: dict[str, type] = {}


def config_class(model_type: str) -> type:
    """The config class of a family, which is imported and registered with the Auto classes of Transformers."""
    if model_type not in _loaded:
        family = FAMILIES[model_type]
        module = importlib.import_module(f".configuration_hydra_{family.module}", __package__)
        config = getattr(module, family.names[0])
        import transformers

        transformers.AutoConfig.register(model_type, config, exist_ok=True)
        for auto_class in config.auto_classes:
            if auto_class != "AutoConfig":
                getattr(transformers, auto_class).register(config, model_class(config, auto_class), exist_ok=True)
        _loaded[model_type] = config
    return _loaded[model_type]


def model_class(config: type, auto_class: str) -> type:
    """The class that an Auto class of Transformers builds from configs of the class `config`."""
    module, _, name = config.auto_classes[auto_class].rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)


def public_class(name: str) -> type:
    """A family's class by its name."""
    config = config_class(MODEL_TYPES[name])
    module = "configuration" if name == config.__name__ else "modeling"
    return getattr(importlib.import_module(f".{module}_hydra_{FAMILIES[MODEL_TYPES[name]].module}", __package__), name)


def pipeline_class(auto_class: str) -> type:
    """The pipeline that says how sure it is, of models that this Auto class loads."""
    from transformers.pipelines import PIPELINE_REGISTRY

    module, _, name = PIPELINES[auto_class].partition(".")
    pipeline = getattr(importlib.import_module(f".{module}", __package__), name)
    task = task_of(PIPELINES[auto_class])
    PIPELINE_REGISTRY.supported_tasks[task]["impl"] = pipeline
    pipeline._registered_impl = {task: PIPELINE_REGISTRY.supported_tasks[task]}
    return pipeline


class Placeholder(type):
    """A class that is imported when it is called, or when an attribute is read."""

    load: Callable[[], type]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.load()(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.load(), name)


def placeholder(path: str, load: Callable[[], type]) -> Placeholder:
    """path: module and name of the class that `load` returns"""
    module, _, name = path.rpartition(".")
    return Placeholder(name, (), {"__module__": f"{__package__}.{module}", "load": staticmethod(load)})


def _register_configs(configuration_auto: ModuleType) -> None:
    for model_type, family in FAMILIES.items():
        path = f"configuration_hydra_{family.module}.{family.names[0]}"
        config = placeholder(path, lambda model_type=model_type: config_class(model_type))
        configuration_auto.CONFIG_MAPPING.register(model_type, config)


def _register_pipelines(pipelines: ModuleType) -> None:
    import transformers

    for auto_class, path in PIPELINES.items():
        pipeline = placeholder(path, lambda auto_class=auto_class: pipeline_class(auto_class))
        pipelines.PIPELINE_REGISTRY.register_pipeline(task_of(path), pipeline, getattr(transformers, auto_class))


class _AfterImport(MetaPathFinder):
    """Finds one module, and calls `run` with it when it has been imported."""

    def __init__(self, name: str, run: Callable[[ModuleType], None]):
        self.name, self.run = name, run

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_run(module: ModuleType) -> None:
            execute(module)
            self.run(module)

        spec.loader.exec_module = execute_and_run
        return spec


def after_import(name: str, run: Callable[[ModuleType], None]) -> None:
    """Calls `run` with a module once it has been imported: at once, where it has been already."""
    if name in sys.modules:
        run(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, run))


def register() -> None:
    """Lets the Auto classes and `pipeline` of Transformers find Hydras, without importing either."""
    after_import("transformers.models.auto.configuration_auto", _register_configs)
    after_import("transformers.pipelines", _register_pipelines)
