"""HydraAST configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ASTConfig

from .configuration_hydra import OUTPUTS_OF_HYDRAS, Anatomy, HydraConfigMixin
from .configuration_hydra_vit import vit_anatomy


@strict
class HydraASTConfig(HydraConfigMixin, ASTConfig):
    r"""
    An [`ASTConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`, `ensemble_loss`,
    `fast_inference`).
    """

    model_type = "hydra_ast"
    keys_to_ignore_at_inference = list(OUTPUTS_OF_HYDRAS)

    auto_classes = {
        "AutoConfig": "configuration_hydra_ast.HydraASTConfig",
        "AutoModel": "modeling_hydra_ast.HydraASTModel",
        "AutoModelForAudioClassification": "modeling_hydra_ast.HydraASTForAudioClassification",
    }

    @property
    def anatomy(self) -> Anatomy:
        return vit_anatomy(self)


__all__ = ["HydraASTConfig"]
