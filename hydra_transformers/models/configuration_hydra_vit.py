"""HydraViT configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ViTConfig

from .kept_heads import (
    SHARED_PARTS,
    check_ensemble_loss,
    check_model_type,
    check_num_members,
    count_members,
    settle_fused_part,
    settle_problem_type,
)


@strict
class HydraViTConfig(ViTConfig):
    r"""
    A [`ViTConfig`] with the fused-attention part.

    Args:
        kept_heads (`list[list[list[int]]]`, *optional*):
            `kept_heads[layer][member]`: the backbone heads that a member keeps in a layer, in ascending order. By
            default one member that keeps all heads.
        shared (`list[str]`, *optional*, defaults to `["embeddings", "layernorm", "mlp"]`):
            The parts that exist once for all members. An empty list makes members independent of each other.
        ensemble_loss (`str`, *optional*, defaults to `"members"`):
            `"members"` for the mean of the members' losses, `"ensemble"` for the loss of the ensemble's answer.
        problem_type (`str`, *optional*):
            `"single_label_classification"`, `"multi_label_classification"` or `"regression"`: what `logits` mean and
            which loss they get. By default one label of several, or regression where there is a single output; it
            is settled here and saved, and labels of another kind are refused. A single output that is a probability
            is `"multi_label_classification"`.
        add_pooling_layer (`bool`, *optional*, defaults to `True`):
            Whether [`HydraViTModel`] has a pooler. The image classifier has none, as in ViT.

    Example:

    ```python
    >>> from hydra_transformers import HydraViTConfig

    >>> config = HydraViTConfig(num_hidden_layers=2, num_attention_heads=4, kept_heads=[[[0, 1], [3]], [[], [1, 2]]])
    >>> config.num_members
    2

    ```"""

    model_type = "hydra_vit"
    keys_to_ignore_at_inference = ["member_logits"]

    kept_heads: list | None = None  # of lists of lists of int, which settle_fused_part checks
    shared: list[str] | tuple[str, ...] = SHARED_PARTS
    ensemble_loss: str = "members"
    add_pooling_layer: bool = True

    auto_classes = {
        "AutoConfig": "configuration_hydra_vit.HydraViTConfig",
        "AutoModel": "modeling_hydra_vit.HydraViTModel",
        "AutoModelForImageClassification": "modeling_hydra_vit.HydraViTForImageClassification",
    }

    def __post_init__(self, num_members: int | None = None, **kwargs):
        super().__post_init__(**kwargs)
        settle_fused_part(self)
        check_num_members(num_members, self)
        settle_problem_type(self)
        check_ensemble_loss(self.ensemble_loss)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        check_model_type(config_dict, cls)
        return super().from_dict(config_dict, **kwargs)

    @property
    def num_members(self) -> int:
        return count_members(self.kept_heads)


__all__ = ["HydraViTConfig"]
