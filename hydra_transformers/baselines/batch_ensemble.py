"""BatchEnsemble (Wen et al., 2020): members share their matrices and scale the inputs and outputs of each."""

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cost import inputs_for
from ..data.prediction import device_of, evaluation_mode
from ..fusion import has_decoder, without_weights
from .baseline import Baseline, check_is_classifier, check_is_count, is_number
from .layer_replacement import linear_of, replace
from .mc_dropout import repeated


INITS = ("normal", "ones", "signs")
STD = 0.1  # 0.5, as for new weights, destroys most of what a checkpoint has learned


class BatchEnsemble(Baseline):
    """A classifier with M members whose linear layers share their matrix W: member i has W ∘ (s_i r_iᵀ) and its own bias.

    model: any classifier of Transformers; it is copied
    num_members: M
    init: how r and s start: "normal" (around one), "ones" (every member is the model, bit for bit) or "signs" (plus or
        minus one at random, for training from new weights)
    std: for "normal": 0.1 by default, which suits pre-trained weights; 0.5 is usual for new ones
    layers: None for every linear layer; a number for the last so many encoder layers, or a list of layers. Everything
        behind the encoder is included; what comes before the first layer runs once for all members. A linear layer that
        reads something else than the batch, such as a table of positions, stays shared
    seed: for r and s

    All members run in one forward, stacked along the batch. Everything trains. The parameters are r - 1 and s - 1, so that
    weight decay pulls members towards the model, not towards zero.
    """

    summary = (
        "A BatchEnsemble (Wen et al., 2020) of {members} members: they share every matrix, and each scales what goes into it "
        "and what comes out."
    )

    def __init__(
        self,
        model: PreTrainedModel,
        num_members: int = 4,
        init: str = "normal",
        std: float | None = None,
        layers: int | Sequence[int] | None = None,
        seed: int = 0,
    ):
        check_is_classifier(model)
        check_is_count(num_members)
        if init not in INITS:
            raise ValueError(f"init is {init!r}: pass one of {', '.join(INITS)}")
        if std is not None and (init != "normal" or not (is_number(std) and std > 0)):
            raise ValueError(f"std is {std!r} and init is {init!r}: pass a positive number, with init='normal' alone")
        layers = layers if layers is None else _layer_numbers(model, layers)
        super().__init__(copy.deepcopy(model), num_members=num_members, init=init, std=std, layers=layers, seed=seed)
        names = _linear_names(self.model, layers)
        not_of_batch = _reading_other_rows(self.model, names)
        linears = [self.model.get_submodule(name) for name in names if name not in not_of_batch]
        if not linears:
            raise ValueError(f"{type(model).__name__} has no linear layers (nn.Linear) that members could scale")
        generator, std = torch.Generator("cpu").manual_seed(seed), STD if std is None else std
        replace(self.model, lambda linear: MemberLinear(linear, num_members).start(init, std, generator), linears)
        if layers is not None:
            self.model.base_model.register_forward_pre_hook(FirstRows(num_members), with_kwargs=True)
            for number, layer in enumerate(self.model.get_submodule(_layer_list_name(self.model))):
                if number >= layers[0]:
                    layer.register_forward_pre_hook(RepeatRows(num_members, number == layers[0]), with_kwargs=True)

    def member_logits(self, **inputs: Tensor) -> Tensor:
        rows = _most_rows(inputs.values())
        logits = self.model(**{name: repeated(value, rows, self.num_members) for name, value in inputs.items()}).logits
        if len(logits) != self.num_members * rows:
            raise ValueError(
                f"{type(self.model).__name__} answers {rows} rows of {self.num_members} members with {len(logits)} rows, so it does "
                "more than pass rows through its layers: leave layers out"
            )
        return logits.unflatten(0, (self.num_members, -1)).transpose(0, 1)

    def member(self, index: int) -> PreTrainedModel:
        """One member as a plain Transformers model."""
        if not 0 <= index < self.num_members:
            raise IndexError(f"member {index} does not exist: there are members 0 to {self.num_members - 1}")
        return self._with_plain_linears(lambda linear: linear.of_member(index))

    def plain_model(self) -> PreTrainedModel:
        """The model with the shared matrices and the biases that it had."""
        return self._with_plain_linears(lambda linear: linear_of(linear.weight.detach(), linear.bias))

    def parameter_groups(
        self, learning_rate: float, fast_factor: float = 1.0, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """For an optimizer: shared parameters, and the members' own, which get `fast_factor` times the learning rate and no
        weight decay."""
        own = {id(each) for linear in member_linears(self.model) for each in linear.own_parameters()}
        shared = [parameter for parameter in self.parameters() if id(parameter) not in own]
        fast = [parameter for parameter in self.parameters() if id(parameter) in own]
        return [
            {"params": shared, "lr": learning_rate, "weight_decay": weight_decay},
            {"params": fast, "lr": fast_factor * learning_rate, "weight_decay": 0.0},
        ]

    def _with_plain_linears(self, plain: Callable[["MemberLinear"], nn.Linear]) -> PreTrainedModel:
        model = copy.deepcopy(self.model)
        replace(model, plain, member_linears(model))
        for module in model.modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, (FirstRows, RepeatRows)):
                    del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        return model


class MemberLinear(nn.Module):
    """A linear layer of M members on rows (members * batch, ..., in), member 0's first.

    y = ((x ∘ r_i) Wᵀ + b) ∘ s_i + c_i, so member i's bias is b ∘ s_i + c_i. b stays as it was: with r = s = 1 and c = 0, the
    outputs are the layer's to the last bit.

    input_factors: r - 1, (members, in);  output_factors: s - 1, (members, out);  biases: c, (members, out)
    """

    def __init__(self, linear: nn.Linear, num_members: int):
        super().__init__()
        self.num_members = num_members
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        self.input_factors = nn.Parameter(linear.weight.new_zeros(num_members, linear.in_features))
        self.output_factors = nn.Parameter(linear.weight.new_zeros(num_members, linear.out_features))
        own = None if linear.bias is None else nn.Parameter(linear.weight.new_zeros(num_members, linear.out_features))
        self.register_parameter("biases", own)

    @torch.no_grad()
    def start(self, init: str, std: float, generator: torch.Generator) -> "MemberLinear":
        """Draws the factors; every member keeps the layer's bias."""
        for factors in (self.input_factors, self.output_factors):
            drawn = torch.randn(factors.shape, generator=generator, device="cpu", dtype=torch.float64)
            if init == "normal":
                factors.copy_((std * drawn).to(factors.dtype))
            elif init == "signs":
                factors.copy_((drawn.sign() - 1).to(factors.dtype))
        if self.biases is not None:
            self.biases.copy_(-self.output_factors * self.bias)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """(members * batch, ..., in) -> (members * batch, ..., out)"""

        def per_row(per_member: Tensor) -> Tensor:
            """(members, features) -> (members, 1, ..., features)"""
            return per_member.view(self.num_members, *[1] * (inputs.dim() - 1), -1)

        scaled = inputs.unflatten(0, (self.num_members, -1)) * per_row(1 + self.input_factors)
        outputs = nn.functional.linear(scaled, self.weight, self.bias) * per_row(1 + self.output_factors)
        if self.biases is not None:
            outputs = outputs + per_row(self.biases)
        return outputs.flatten(0, 1)

    def own_parameters(self) -> list[nn.Parameter]:
        return [each for each in (self.input_factors, self.output_factors, self.biases) if each is not None]

    @torch.no_grad()
    def of_member(self, index: int) -> nn.Linear:
        r, s = 1 + self.input_factors[index], 1 + self.output_factors[index]
        bias = None if self.bias is None else self.bias * s + self.biases[index]
        return linear_of(self.weight * s.unsqueeze(1) * r, bias)


def member_linears(model: nn.Module) -> list[MemberLinear]:
    return [module for module in model.modules() if isinstance(module, MemberLinear)]


class FirstRows:
    """A pre-forward hook of the encoder: passes each row once, not once per member. The head still gets all of them; that
    of a decoder looks for the last token of each row."""

    def __init__(self, num_members: int):
        self.num_members = num_members

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        rows = _most_rows([*args, *kwargs.values()])

        def first(value: Any) -> Any:
            return value[: rows // self.num_members] if _has_rows(value) and len(value) == rows else value

        return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}


class RepeatRows:
    """A pre-forward hook of layers with members: repeats the rows for each member; in later layers than the first, only
    what comes beside the rows, such as masks."""

    def __init__(self, num_members: int, is_first: bool):
        self.num_members, self.is_first = num_members, is_first

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        states = args[0] if args else kwargs["hidden_states"]
        rows = len(states) if self.is_first else len(states) // self.num_members

        def tiled(value: Any) -> Any:
            if isinstance(value, tuple):  # cosines and sines of positions
                return tuple(map(tiled, value))
            return value if value is states and not self.is_first else repeated(value, rows, self.num_members)

        return tuple(map(tiled, args)), {name: tiled(value) for name, value in kwargs.items()}


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _most_rows(values: Iterable[Any]) -> int:
    return max(len(value) for value in values if _has_rows(value))


def _linear_names(model: nn.Module, layers: Sequence[int] | None) -> list[str]:
    """All linear layers, or those of these encoder layers and of everything behind the encoder."""
    order = [name for name, _ in model.named_modules()]
    # Subclasses of nn.Linear may hold other numbers, or be read by other modules.
    names = [name for name in order if type(model.get_submodule(name)) is nn.Linear]
    if layers is None:
        return names
    encoder = _layer_list_name(model)
    last = max(place for place, name in enumerate(order) if name.startswith(f"{encoder}."))
    chosen = tuple(f"{encoder}.{layer}." for layer in layers)
    return [name for name in names if name.startswith(chosen) or name in order[last + 1 :]]


def _reading_other_rows(model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """The linear layers that read something else than the batch, such as a table of positions, whose rows are not members'.

    Found by a forward on made-up inputs; a model that cannot run on them is refused.
    """
    rows, read, error = 11, {}, None  # a prime: hardly the size of anything else
    outline = without_weights(type(model), model.config)
    for tried in (outline,) if device_of(model).type == "meta" else (outline, model):

        def watch(name: str) -> Callable:
            return lambda module, args: read.setdefault(name, []).append(len(args[0]))

        handles = [tried.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
        try:
            inputs = inputs_for(model, rows, device_of(tried))
            end = getattr(model.config, "eos_token_id", None)
            if "input_ids" in inputs and isinstance(end, int):  # some models look for it
                inputs["input_ids"][:, -1] = end
            for name, each in inputs.items():
                inputs[name] = each.to(tried.dtype) if each.is_floating_point() else each
            with torch.no_grad(), evaluation_mode(tried):
                tried(**inputs)
            return {name for name, counts in read.items() if any(count % rows for count in counts)}
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as caught:
            read.clear()
            error = caught
        finally:
            for handle in handles:
                handle.remove()
    raise ValueError(
        f"{type(model).__name__} cannot be tried on made-up images, texts or sounds ({error}), so which of its linear layers "
        "read the batch is not known: pass a classifier of one of these"
    ) from error


def _layer_list_name(model: PreTrainedModel) -> str:
    # A classifier on one of two towers has the config of both; an encoder-decoder has two lists of layers.
    configs = (model.config, *(getattr(model.config, f"{tower}_config", None) for tower in ("vision", "text")))
    counts = {getattr(config, "num_hidden_layers", None) for config in configs}
    lists = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) in counts]
    if len(lists) != 1 or has_decoder(model):
        raise ValueError(f"{type(model).__name__} does not have exactly one list of layers: leave layers out")
    return lists[0]


def _layer_numbers(model: PreTrainedModel, layers: int | Sequence[int]) -> list[int]:
    count = len(model.get_submodule(_layer_list_name(model)))
    try:
        found = sorted({*(range(count - layers, count) if isinstance(layers, int) else map(operator.index, layers))})
    except TypeError:
        found = []
    if isinstance(layers, bool) or not found or found[0] < 0 or found[-1] >= count:
        raise ValueError(
            f"layers is {layers!r}: pass how many of the last layers, or their numbers, of 0 to {count - 1}"
        )
    return found
