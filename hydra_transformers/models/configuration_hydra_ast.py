"""HydraAST configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ASTConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_vit import vit_layer_spec


@strict
class HydraASTConfig(HydraConfigMixin, ASTConfig):
    r"""
    An [`ASTConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`, `ensemble_loss`,
    `fast_inference`).
    """

    model_type = "hydra_ast"

    auto_classes = {
        "AutoConfig": "configuration_hydra_ast.HydraASTConfig",
        "AutoModel": "modeling_hydra_ast.HydraASTModel",
        "AutoModelForAudioClassification": "modeling_hydra_ast.HydraASTForAudioClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return vit_layer_spec(self)


__all__ = ["HydraASTConfig"]
