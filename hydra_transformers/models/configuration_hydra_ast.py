"""HydraAST configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ASTConfig

from .configuration_hydra import HydraConfigMixin
from .configuration_hydra_vit import vit_layer_spec


@strict
class HydraASTConfig(HydraConfigMixin, ASTConfig):
    r"""A [`ASTConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_ast"
    auto_classes = {
        "AutoConfig": "configuration_hydra_ast.HydraASTConfig",
        "AutoModel": "modeling_hydra_ast.HydraASTModel",
        "AutoModelForAudioClassification": "modeling_hydra_ast.HydraASTForAudioClassification",
    }
    layer_spec = property(vit_layer_spec)
