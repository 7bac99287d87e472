"""Trainer callbacks: freezing after pruning, keeping zeros, bounds of CLIP's logit scale."""

import math
import re
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..fusion.structure import encoder_config, has_two_towers, isinstance_by_name, number_of_layers, tower_configs
from ..fusion.trunk import check_trunk_layers, trunk_depth
from ..model_info import is_baseline
from ..models.modeling_hydra import GroupedLinear, GroupedOutput
from .parameter_groups import (
    PARTS,
    Place,
    hydra_parameter_names,
    kept_by_class,
    layer_dropouts,
    places,
    unused_parameters,
)


TOWERS = ("vision", "text")


class PostPruningCallback(TrainerCallback):
    """Freezes all of a model but the parts that win back its accuracy after pruning (paper, D.2).

    Works with a pruned member, a fused Hydra and a supported model of Transformers:
    `Trainer(model=..., callbacks=[PostPruningCallback()])`. It acts when the `Trainer` is built, so
    before the optimizer is made and before a checkpoint is loaded. Before the first step it
    verifies that the optimizer holds what trains, no more.

    Args:
        trainable (`Sequence[str]`, defaults to all but "embeddings"): of "embeddings", "attention",
            "mlp", "layernorm" and "classifier", which is all that follows the encoder (the
            classifier, BERT's pooler, CLIP's projections and scale).
        last_n_layers (`int`, *optional*): of attention, MLPs and LayerNorms, train those of the
            last n layers only (of each tower); LayerNorms behind the last layer count as part of
            it.
        trunk_layers (`int` or `float`, defaults to 0): do not train the first n layers (of each
            tower), or this share of them, nor anything before them. Members of one model then share
            them, and run them once when they are fused.
        towers (`Sequence[str]`, *optional*): of CLIP and SigLIP, train the parameters of these
            towers only, "vision" or "text", with their projections; the logit scale and bias count
            as part of both. `("text",)` locks the images' tower.
        reset_classifier (`bool`, defaults to `False`): set the weight and bias of the classifier's
            last layer to zero before training; layers before it, and the pooler, stay.
        dropout (`float`, *optional*): the probability of the dropouts inside each layer, on the
            outputs of attention and MLP, in this training; the config, and with it a saved model,
            keeps its own.

    On a model with adapters PEFT chooses what trains: `trainable` and `last_n_layers` do not count,
    `trunk_layers` and `towers` raise, and `reset_classifier` resets the classifier that is saved
    with the adapter (`modules_to_save`).
    """

    def __init__(
        self,
        trainable: Sequence[str] = ("attention", "mlp", "layernorm", "classifier"),
        last_n_layers: int | None = None,
        reset_classifier: bool = False,
        dropout: float | None = None,
        trunk_layers: int | float = 0,
        towers: Sequence[str] | None = None,
    ):
        trainable = _as_tuple(trainable)
        unknown = [part for part in trainable if part not in PARTS]
        if unknown or not trainable:
            raise ValueError(f"trainable has {unknown or 'no part'}: choose from {', '.join(PARTS)}")
        if last_n_layers is not None and last_n_layers < 1:
            raise ValueError(f"last_n_layers is {last_n_layers}: pass at least 1, or None for all layers")
        check_trunk_layers(trunk_layers)
        if trunk_layers < 0:
            raise ValueError(f"trunk_layers is {trunk_layers}: pass 0 or more")
        if dropout is not None and not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}: pass a probability below 1, or None to leave it as it is")
        if towers is not None:
            towers = _as_tuple(towers)
            if not towers or not set(towers) <= set(TOWERS):
                raise ValueError(f'towers is {towers}: pass some of "vision" and "text", or None for both')
        self.trainable = trainable
        self.last_n_layers = last_n_layers
        self.trunk_layers = trunk_layers
        self.reset_classifier = reset_classifier
        self.dropout = dropout
        self.towers = towers
        self._prepared: weakref.ref[nn.Module] | None = None

    def trains(self, model: nn.Module) -> dict[str, bool]:
        """Return for every parameter, by name, whether it trains."""
        if hasattr(model, "peft_config"):
            return {name: parameter.requires_grad for name, parameter in model.named_parameters()}

        # Whatever is chosen, these never train.
        idle = unused_parameters(model)
        if is_baseline(model):  # what it freezes stays frozen
            idle |= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        else:
            idle |= kept_by_class(model)
        if self.towers is not None:
            locked = [tower for tower in TOWERS if tower not in self.towers]
            idle |= {name for name, ours in hydra_parameter_names(model).items() if _tower_of(ours) in locked}

        trunk = 0
        if self.trunk_layers:
            trunk = trunk_depth(self.trunk_layers, _fewest_layers(model))
        return {name: name not in idle and self._trains_at(place, trunk) for name, place in places(model).items()}

    def _trains_at(self, place: Place, trunk: int) -> bool:
        """Whether parameters of this place train, behind a trunk of so many layers."""
        if place.part not in self.trainable:
            return False
        if trunk and place.layers_before < trunk:
            return False
        is_in_layers = place.part in ("attention", "mlp", "layernorm")
        if is_in_layers and self.last_n_layers is not None:
            return place.layers_to_end <= self.last_n_layers
        return True

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        if self.trunk_layers and hasattr(model, "peft_config"):
            raise ValueError(
                f"trunk_layers is {self.trunk_layers}, but which layers of a model with adapters train is PEFT's "
                "choice: pass 0, or members without adapters"
            )
        if self.towers is not None:
            _check_has_towers(model, self.towers)
        if self.trunk_layers and self.trunk_layers > _fewest_layers(model):
            raise ValueError(f"trunk_layers is {self.trunk_layers}: the model has {_fewest_layers(model)} layers")
        for name, trains in self.trains(model).items():
            model.get_parameter(name).requires_grad_(trains)
        if self.reset_classifier:
            _set_to_zero(model)
        if self.dropout is not None:
            _set_dropout(model, self.dropout)
        self._prepared = weakref.ref(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = getattr(kwargs["model"], "module", kwargs["model"])  # FSDP hands over its wrapper
        if self._prepared is None:
            raise RuntimeError(
                "PostPruningCallback was added after the Trainer was built, when the model could no longer be "
                "prepared: pass it in Trainer(callbacks=[...])"
            )
        if self._prepared() is not model:
            raise RuntimeError(
                "the model is not the one that PostPruningCallback prepared: pass Trainer(model=...) in place of "
                "model_init, which makes a new model, and a new callback to every Trainer"
            )
        # FSDP shards parameters under names of its own, DeepSpeed's optimizer has flat copies.
        if not (args.fsdp or args.deepspeed):
            self._verify(model, kwargs["optimizer"])

    def _verify(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimised = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, trains in self.trains(model).items():
            parameter = model.get_parameter(name)
            if parameter.requires_grad != trains:
                change = "frozen" if trains else "unfrozen"
                raise RuntimeError(
                    f"{name} was {change} after PostPruningCallback prepared the model: say in its trainable "
                    "what shall train"
                )
            if (id(parameter) in optimised) != trains:
                fault = "shall stay frozen, but the optimizer holds it"
                if trains:
                    fault = "shall train, but the optimizer does not hold it"
                raise RuntimeError(
                    f"{name} {fault}: let Trainer make the optimizer, or give yours the parameters with requires_grad "
                    "after Trainer was built"
                )


def _as_tuple(names: Sequence[str]) -> tuple[str, ...]:
    """Return names as a tuple; a single one may be given by itself."""
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def _fewest_layers(model: nn.Module) -> int:
    towers = tower_configs(encoder_config(model))
    return min(map(number_of_layers, towers.values()))


def _tower_of(name: str) -> str | None:
    """Return the tower that a Hydra's parameter belongs to.

    None for the logit scale and bias, which belong to both.
    """
    if name.startswith("visual_projection."):
        return "vision"
    for tower in TOWERS:
        if name.startswith(f"{tower}_"):
            return tower
    return None


def _check_has_towers(model: nn.Module, towers: Sequence[str]) -> None:
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"towers is {towers}, but which parameters of a model with adapters train is PEFT's choice: "
            "leave towers out"
        )
    if not has_two_towers(model):
        raise ValueError(f"towers is {towers}: a {type(model).__name__} has one encoder, leave towers out")


@torch.no_grad()
def _set_to_zero(model: nn.Module) -> None:
    """Zero the classifier's last layer.

    With zeros in all of several layers, their weights would never get a gradient.
    """
    pattern = r"(model\.)?(classifier|score)"
    if hasattr(model, "peft_config"):
        # PEFT trains a copy of the classifier, and leaves the backbone's as it is.
        pattern = r"(.*\.)?(classifier|score)\.modules_to_save\.[^.]+"
    heads = [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]
    if not heads:
        raise ValueError(f"{type(model).__name__} has no classifier to reset: leave reset_classifier out")
    for head in heads:
        with_weights = [module for module in head.modules() if [*module.parameters(recurse=False)]]
        for parameter in with_weights[-1].parameters(recurse=False):
            parameter.zero_()


def _set_dropout(model: nn.Module, probability: float) -> None:
    of_adapters = {module for name, module in model.named_modules() if ".lora_dropout." in name}
    dropouts = [module for module in layer_dropouts(model) if module not in of_adapters]
    if not dropouts:
        raise ValueError(f"{type(model).__name__} has no dropout inside its layers: leave dropout out")
    for module in dropouts:
        module.p = probability


class KeepZerosCallback(TrainerCallback):
    """Keeps weights at zero that are exactly zero when training begins.

    Use it as `Trainer(callbacks=[KeepZerosCallback()])`.

    For models that `oba_prune` made, and Hydras of them. It looks at the weights of linear and
    convolutional layers, not at biases: those of new models are zero and shall train.
    """

    def __init__(self) -> None:
        self._zeros: list[tuple[nn.Parameter, Tensor]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.fsdp or args.deepspeed:
            raise ValueError("KeepZerosCallback needs whole weights on every process: train without FSDP or DeepSpeed")
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, GroupedLinear, GroupedOutput)
        self._zeros = []
        for name, module in kwargs["model"].named_modules():
            if ".lora_" in name:  # half of an adapter begins with zeros
                continue
            if not any(isinstance_by_name(module, kind) for kind in kinds):
                continue
            weight = module.weight
            if weight.requires_grad:
                self._zeros.append((weight, weight.detach() == 0))

    @torch.no_grad()
    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for weight, zeros in self._zeros:
            weight.masked_fill_(zeros, 0)


class LogitScaleCallback(TrainerCallback):
    """Keeps CLIP's logit scale within bounds: `Trainer(callbacks=[LogitScaleCallback()])`.

    The factor of the cosines, the exponential of `logit_scale`, stays between 1 and `maximum`, as
    in CLIP's own training.

    Args:
        maximum (`float`, defaults to 100.0): the largest factor.
    """

    def __init__(self, maximum: float = 100.0):
        if not 1 < maximum < math.inf:
            raise ValueError(f"maximum is {maximum}: pass a number above 1")
        self.maximum = maximum
        self._scales: list[nn.Parameter] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        named = kwargs["model"].named_parameters()
        self._scales = [parameter for name, parameter in named if name.rpartition(".")[2] == "logit_scale"]
        if not self._scales:
            raise ValueError(f"{type(kwargs['model']).__name__} has no logit_scale: leave LogitScaleCallback out")
        # SigLIP's own training has no bound: its scale would jump with the first step.
        factor = max(scale.detach().exp().max().item() for scale in self._scales)
        if factor > 1.01 * self.maximum:
            raise ValueError(
                f"maximum is {self.maximum}, and the model's logit scale is {factor:.4g}: pass a larger one"
            )

    @torch.no_grad()
    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for scale in self._scales:
            scale.clamp_(0.0, math.log(self.maximum))
