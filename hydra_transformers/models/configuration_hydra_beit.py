"""HydraBeit configuration."""

from huggingface_hub.dataclasses import strict
from transformers import BeitConfig

from .configuration_hydra import HydraConfigMixin, LayerScaleConfigMixin, LayerSpec


@strict
class HydraBeitConfig(LayerScaleConfigMixin, HydraConfigMixin, BeitConfig):
    r"""A [`BeitConfig`] with the fields of [`HydraConfigMixin`] and [`LayerScaleConfigMixin`], and
    `add_pooling_layer`."""

    model_type = "hydra_beit"
    add_pooling_layer: bool = True
    auto_classes = {
        "AutoConfig": "configuration_hydra_beit.HydraBeitConfig",
        "AutoModel": "modeling_hydra_beit.HydraBeitModel",
        "AutoModelForImageClassification": "modeling_hydra_beit.HydraBeitForImageClassification",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.layer_scale = self.layer_scale and self.layer_scale_init_value > 0  # as BEiT itself decides
        if isinstance(self.image_size, (list, tuple)) and len(set(self.image_size)) > 1:
            raise ValueError(f"image_size is {self.image_size}: a HydraBeit reads square images, pass one number")

    @property
    def patches_per_side(self) -> int:
        return side_of(self.image_size) // side_of(self.patch_size)

    @property
    def num_distances(self) -> int:
        """Return how many distances there are: of two patches along both axes, and three more, from
        the first token, to it, and of it to itself."""
        return (2 * self.patches_per_side - 1) ** 2 + 3

    @property
    def layer_spec(self) -> LayerSpec:
        most = max(self.num_hidden_layers - 1, 1)
        layer_scale = None
        if self.layer_scale:
            layer_scale = self.layer_scale_init_value
        return self.make_layer_spec(
            head_dim=getattr(self, "head_dim", None),
            attention_dropout=self.attention_probs_dropout_prob,
            output_dropout=self.hidden_dropout_prob,
            mlp_dropout=self.hidden_dropout_prob,
            layer_scale=layer_scale,
            drop_path=tuple(self.drop_path_rate * layer / most for layer in range(self.num_hidden_layers)),
        )


def side_of(size: int | list[int] | tuple[int, ...]) -> int:
    """Return the side of a square: a number, or height and width."""
    if isinstance(size, (list, tuple)):
        return size[0]
    return size
