"""Packed-Ensembles (Laurent et al., 2023): M narrow networks that run as one, and never exchange anything."""

import copy
from fractions import Fraction

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..fusion.building import default_dtype
from ..models.auto import AutoHydra, hydra_class
from .baseline import check_is_classifier, check_is_count, is_number
from .seeding import seeded


# What a member's width is made of, as configs call it; one that has a ratio in place of a width needs nothing.
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "hidden_dim", "embedding_size")


class PackedEnsemble:
    """Makes Packed-Ensembles of the families that Hydras are made of.

    A Packed-Ensemble of width factor alpha has M members, each alpha / M times as wide as the model: hidden size, MLP and
    number of heads; the size of a head stays. Its encoder has alpha² / M times the weights and multiply-adds of one model's.
    With alpha = M it is a Deep Ensemble.

    What comes out is a Hydra that shares nothing: trained, judged, saved and published like any other.
    """

    @staticmethod
    def from_backbone(
        model: PreTrainedModel, num_members: int = 3, alpha: float = 2.0, seed: int = 0
    ) -> PreTrainedModel:
        """A Hydra of `num_members` narrow models of the model's class, with NEW WEIGHTS: nothing of what the model has learned
        is in them, as there is no pre-trained network of that width. Train it from the start.

        (Of full-size models that are trained, `AutoHydra.from_pruned_members(models, shared=())` keeps the weights.)

        model: any supported classifier, for its class, config, dtype and device
        alpha: the width of all members together, in widths of the model
        seed: of the new weights; member i has those of `seed + i`
        """
        check_is_classifier(model)
        key = hydra_class(model).backbone_config_key  # refuses what no Hydra can be made of
        config = copy.deepcopy(model.config)
        if key is None:
            config = PackedEnsemble.narrow_config(config, num_members, alpha)
        else:  # a classifier of one of two towers
            setattr(config, key, PackedEnsemble.narrow_config(getattr(config, key), num_members, alpha))
        members = [_new(model, config, seed + index) for index in range(num_members)]
        with seeded(seed, model):  # fusing draws numbers, too, that nothing depends on
            return AutoHydra.from_pruned_members(members, (), 0, allow_equal=True, check=False)

    @staticmethod
    def narrow_config(config: PreTrainedConfig, num_members: int = 3, alpha: float = 2.0) -> PreTrainedConfig:
        """The config of one member; refuses widths that are no whole numbers."""
        check_is_count(num_members)
        if not (is_number(alpha) and 0 < alpha <= num_members):
            raise ValueError(f"alpha is {alpha!r}: pass a width of up to num_members ({num_members}) models")
        if not hasattr(config, "hidden_size"):
            raise ValueError(f"config is a {type(config).__name__} without a hidden_size: pass that of one encoder")
        factor = Fraction(alpha).limit_denominator(1000) / num_members
        narrow = copy.deepcopy(config)
        for name in WIDTHS:
            width = getattr(config, name, None)
            if width is None:
                continue
            if (width * factor).denominator != 1:
                heads = config.num_attention_heads
                raise ValueError(
                    f"{name} is {width}, and {alpha} / {num_members} of that is no whole number: pass an alpha so that "
                    f"alpha * {heads} / {num_members} is the number of heads, such as {_fitting(heads, num_members, alpha)}"
                )
            setattr(narrow, name, int(width * factor))
        if getattr(config, "num_key_value_heads", None):
            # As many heads read each key and value as in the model, or where that leaves heads over, about as many.
            heads, together = narrow.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
            fitting = (count for count in range(1, heads + 1) if heads % count == 0)
            narrow.num_key_value_heads = heads // min(fitting, key=lambda count: abs(count - together))
        return narrow


def _new(model: PreTrainedModel, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model of the same class, dtype and device, with new weights."""
    with seeded(seed, model), torch.device(model.device), default_dtype(model.dtype):
        return type(model)(copy.deepcopy(config))


def _fitting(heads: int, num_members: int, alpha: float) -> str:
    """The nearest alpha with which a member has whole heads."""
    own = max(1, round(alpha * heads / num_members))
    return f"{num_members * own / heads:.4g}"
