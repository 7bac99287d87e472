"""HydraAST configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ASTConfig

from .configuration_hydra import HydraConfigMixin, class_paths
from .configuration_hydra_vit import vit_layer_spec


@strict
class HydraASTConfig(HydraConfigMixin, ASTConfig):
    r"""A [`ASTConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_ast"
    auto_classes = class_paths("ast", "HydraAST", "ForAudioClassification")
    layer_spec = property(vit_layer_spec)
