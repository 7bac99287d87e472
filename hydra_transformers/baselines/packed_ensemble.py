"""Packed-Ensembles (Laurent et al., 2023): M narrow networks that run as one."""

import copy
from fractions import Fraction

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..fusion.building import default_dtype
from ..models.auto import AutoHydra, hydra_class
from .baseline import check_is_classifier, check_is_count
from .seeding import seeded


# Fields of configs that are widths.
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "hidden_dim",
    "encoder_ffn_dim",
    "embedding_size",
    "pooler_hidden_size",
)


class PackedEnsemble:
    """Makes Packed-Ensembles of every family that Hydras support.

    Each of the M members is alpha / M times as wide as the model: hidden size, MLP and number of
    heads; the size of a head stays. The encoder has alpha² / M times the weights and multiply-adds
    of one model's. With alpha = M it is a Deep Ensemble.

    The result is a Hydra that shares nothing.
    """

    @staticmethod
    def from_backbone(
        model: PreTrainedModel, num_members: int = 3, alpha: float = 2.0, seed: int = 0
    ) -> PreTrainedModel:
        """Return a Hydra of `num_members` narrow models of the model's class, with NEW WEIGHTS.

        No pre-trained network has that width, so train it from scratch.
        (`AutoHydra.from_pruned_members(models, shared=())` keeps the weights of full-size models.)

        Args:
            model (`PreTrainedModel`): any supported classifier, for its class, config, dtype and
                device.
            num_members (`int`, defaults to 3): M.
            alpha (`float`, defaults to 2.0): the width of all members together, in widths of the
                model.
            seed (`int`, defaults to 0): for the new weights; member i has those of `seed + i`.
        """
        # The config of a member.
        check_is_classifier(model)
        key = hydra_class(model).backbone_config_key  # raises for families without Hydras
        config = copy.deepcopy(model.config)
        if key is None:
            config = PackedEnsemble.narrow_config(config, num_members, alpha)
        else:  # a classifier on one of two towers
            setattr(config, key, PackedEnsemble.narrow_config(getattr(config, key), num_members, alpha))

        members = []
        for index in range(num_members):
            with seeded(seed + index, model), torch.device(model.device), default_dtype(model.dtype):
                members.append(type(model)(copy.deepcopy(config)))
        with seeded(seed, model):  # fusing draws random numbers that it does not use
            return AutoHydra.from_pruned_members(members, (), 0, allow_equal=True, check=False)

    @staticmethod
    def narrow_config(config: PreTrainedConfig, num_members: int = 3, alpha: float = 2.0) -> PreTrainedConfig:
        """Return the config of one member; raise where a width is not a whole number.

        Args:
            config (`PreTrainedConfig`): of the full-size model.
            num_members (`int`, defaults to 3), alpha (`float`, defaults to 2.0): as for
                `from_backbone`.
        """
        check_is_count(num_members)
        if not 0 < alpha <= num_members:
            raise ValueError(f"alpha is {alpha!r}: pass a width of up to num_members ({num_members}) models")
        if not hasattr(config, "hidden_size"):
            raise ValueError(f"config is a {type(config).__name__} without a hidden_size: pass that of one encoder")

        # Every width, with exact fractions.
        factor = Fraction(alpha).limit_denominator(1000) / num_members
        narrow = copy.deepcopy(config)
        for name in WIDTHS:
            width = getattr(config, name, None)
            if width is None:
                continue
            if (width * factor).denominator != 1:
                heads = config.num_attention_heads
                nearest = num_members * max(1, round(alpha * heads / num_members)) / heads
                raise ValueError(
                    f"{name} is {width}, and {alpha} / {num_members} of that is not a whole number: pass an alpha so "
                    f"that alpha * {heads} / {num_members} is the number of heads, such as {nearest:.4g}"
                )
            setattr(narrow, name, int(width * factor))

        # As many queries per key as in the model, or the nearest number that divides the heads.
        if getattr(config, "num_key_value_heads", None):
            heads = narrow.num_attention_heads
            queries_per_key = config.num_attention_heads // config.num_key_value_heads
            divisors = [count for count in range(1, heads + 1) if heads % count == 0]
            nearest = min(divisors, key=lambda count: abs(count - queries_per_key))
            narrow.num_key_value_heads = heads // nearest
        return narrow
