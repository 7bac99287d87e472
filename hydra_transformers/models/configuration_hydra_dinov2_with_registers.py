"""HydraDinov2WithRegisters configuration."""

from huggingface_hub.dataclasses import strict
from transformers import Dinov2WithRegistersConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_dinov2 import dinov2_layer_spec


@strict
class HydraDinov2WithRegistersConfig(HydraConfigMixin, Dinov2WithRegistersConfig):
    r"""A [`Dinov2WithRegistersConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_dinov2_with_registers"

    auto_classes = {
        "AutoConfig": "configuration_hydra_dinov2_with_registers.HydraDinov2WithRegistersConfig",
        "AutoModel": "modeling_hydra_dinov2_with_registers.HydraDinov2WithRegistersModel",
        "AutoModelForImageClassification": "modeling_hydra_dinov2_with_registers.HydraDinov2WithRegistersForImageClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return dinov2_layer_spec(self)


__all__ = ["HydraDinov2WithRegistersConfig"]
