"""BatchEnsemble (Wen et al., 2020): members that share their matrices and scale what goes in and comes out of them."""

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.prediction import device_of, evaluation_mode
from ..fusion import without_weights
from .baseline import Baseline, check_is_classifier, check_is_count, is_number
from .linear_layers import linear_of, replace
from .mc_dropout import repeated


INITS = ("normal", "ones", "signs")
STD = 0.1  # from a checkpoint; with 0.5, as for new weights, little is left of what it has learned


class BatchEnsemble(Baseline):
    """A classifier with M members, whose linear layers share their matrix W: member i's is W ∘ (s_i r_iᵀ), its bias its own.

    model: any classifier of Transformers; it stays as it is
    num_members: M
    init: how r and s start: "normal" (around one), "ones" (every member is the model, bit for bit), or "signs" (plus or
        minus one at random, for training from new weights)
    std: of "normal": 0.1 by default, which keeps what a pre-trained model has learned; 0.5 is usual for new weights
    layers: None for every linear layer; a number for those of the last so many encoder layers, or the numbers of these
        layers. What lies behind the encoder is always among them; what lies before the first runs once for all members.
        A linear layer that reads something else than the batch, such as a table of positions, stays one for all
    seed: of r and s

    All members run in one forward, one after the other along the batch. All of the model trains, and r, s and the biases
    with it. Kept are r - 1 and s - 1, so that weight decay draws members towards the model, not towards nothing.
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
        _check_arguments(model, num_members, init, std)
        layers = layers if layers is None else _layer_numbers(model, layers)
        super().__init__(copy.deepcopy(model), num_members=num_members, init=init, std=std, layers=layers, seed=seed)
        linears = _linear_names(self.model, layers)
        elsewhere = _read_something_else(self.model, linears)
        linears = [name for name in linears if name not in elsewhere]
        if not linears:
            raise ValueError(f"{type(model).__name__} has no linear layers (nn.Linear) that members could scale")
        generator = torch.Generator("cpu").manual_seed(seed)
        replace(
            self.model,
            lambda linear: MemberLinear(linear, num_members).start(init, STD if std is None else std, generator),
            [self.model.get_submodule(name) for name in linears],
        )
        if layers is not None:
            _tile_from(self.model, layers, num_members)

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
        """One member as a plain model of Transformers, which answers as the member does."""
        if not 0 <= index < self.num_members:
            raise IndexError(f"member {index} does not exist: there are members 0 to {self.num_members - 1}")
        return self._with_plain_linears(lambda linear: linear.of_member(index))

    def plain_model(self) -> PreTrainedModel:
        """The model with what members share: its matrices, and the biases that it had."""
        return self._with_plain_linears(lambda linear: linear.shared())

    def parameter_groups(
        self, learning_rate: float, fast_factor: float = 1.0, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """For an optimizer of your own: what members share with `learning_rate`; what each has for itself with `fast_factor`
        times that, and without weight decay."""
        own = {id(each) for linear in self._member_linears() for each in linear.own_parameters()}
        shared = [parameter for parameter in self.parameters() if id(parameter) not in own]
        fast = [parameter for parameter in self.parameters() if id(parameter) in own]
        return [
            {"params": shared, "lr": learning_rate, "weight_decay": weight_decay},
            {"params": fast, "lr": fast_factor * learning_rate, "weight_decay": 0.0},
        ]

    def _member_linears(self) -> list["MemberLinear"]:
        return [module for module in self.model.modules() if isinstance(module, MemberLinear)]

    def _with_plain_linears(self, plain: Callable[["MemberLinear"], nn.Linear]) -> PreTrainedModel:
        model = copy.deepcopy(self.model)
        replace(model, plain, [module for module in model.modules() if isinstance(module, MemberLinear)])
        for module in model.modules():
            for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, (Cutting, Tiling))]:
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        return model


class MemberLinear(nn.Module):
    """A linear layer of M members on rows (members * batch, ..., in), those of member 0 first.

    y = ((x ∘ r_i) Wᵀ + b) ∘ s_i + c_i: member i's matrix is W ∘ (s_i r_iᵀ), its bias b ∘ s_i + c_i. W trains, b is the
    layer's as it was, so that with ones for r and s and zeros for c it is computed as before, to the last bit.

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
        """New factors; every member has the layer's bias."""
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
        scaled = self._by_member(inputs) * self._of_rows(1 + self.input_factors, inputs)
        outputs = nn.functional.linear(scaled, self.weight, self.bias)
        outputs = outputs * self._of_rows(1 + self.output_factors, inputs)
        if self.biases is not None:
            outputs = outputs + self._of_rows(self.biases, inputs)
        return outputs.flatten(0, 1)

    def _by_member(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self.num_members, -1))

    def _of_rows(self, of_members: Tensor, rows: Tensor) -> Tensor:
        """(members, features) as wide as all rows of a member: (members, 1, ..., features)"""
        return of_members.view(self.num_members, *[1] * (rows.dim() - 1), -1)

    def own_parameters(self) -> list[nn.Parameter]:
        return [each for each in (self.input_factors, self.output_factors, self.biases) if each is not None]

    @torch.no_grad()
    def of_member(self, index: int) -> nn.Linear:
        r, s = 1 + self.input_factors[index], 1 + self.output_factors[index]
        bias = None if self.bias is None else self.bias * s + self.biases[index]
        return linear_of(self.weight * s.unsqueeze(1) * r, bias)

    def shared(self) -> nn.Linear:
        return linear_of(self.weight.detach(), self.bias)


class Cutting:
    """Before the encoder, a pre-forward hook that leaves its inputs' rows once in place of once for each member. What lies behind
    the encoder reads all of them: the head of a decoder, for example, looks in the tokens for the last of each row."""

    def __init__(self, num_members: int):
        self.num_members = num_members

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        rows = _most_rows([*args, *kwargs.values()])

        def cut(value: Any) -> Any:
            return value[: rows // self.num_members] if _has_rows(value) and len(value) == rows else value

        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


class Tiling:
    """Before the first layer of members, a pre-forward hook that repeats its rows for each of them; before later ones, one
    that repeats what comes beside the rows, such as masks."""

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


def _check_arguments(model: PreTrainedModel, num_members: int, init: str, std: float | None) -> None:
    check_is_classifier(model)
    check_is_count(num_members)
    if init not in INITS:
        raise ValueError(f"init is {init!r}: pass one of {', '.join(INITS)}")
    if std is not None and (init != "normal" or not (is_number(std) and std > 0)):
        raise ValueError(f"std is {std!r} and init is {init!r}: pass a positive number, with init='normal' alone")


def _linear_names(model: nn.Module, layers: Sequence[int] | None) -> list[str]:
    """The linear layers that members scale: all, or those of these encoder layers and of what comes behind them."""
    # By its very class: what is derived from it may be read by others, or hold numbers of another kind.
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    if layers is None:
        return names
    encoder = _layers_name(model)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    last = max(place for name, place in order.items() if name.startswith(f"{encoder}."))
    chosen = tuple(f"{encoder}.{layer}." for layer in layers)
    return [name for name in names if name.startswith(chosen) or order[name] > last]


def _read_something_else(model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """Of these linear layers those that do not, or not always, read the batch but for example a table of positions: its rows
    would be taken for members'. A model that cannot be tried on made-up inputs is refused."""
    from ..cost import inputs_for  # which knows this module

    rows, found, error = 11, {}, None  # a prime: hardly the size of anything else
    on_meta = without_weights(type(model), model.config)
    for tried in (on_meta,) if device_of(model).type == "meta" else (on_meta, model):

        def watch(name: str) -> Callable:
            return lambda module, args: found.setdefault(name, []).append(len(args[0]))

        handles = [tried.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
        try:
            inputs = inputs_for(model, rows, device_of(tried))
            end = getattr(model.config, "eos_token_id", None)
            if "input_ids" in inputs and isinstance(end, int):  # which some look for
                inputs["input_ids"][:, -1] = end
            inputs = {
                name: each.to(tried.dtype) if each.is_floating_point() else each for name, each in inputs.items()
            }
            with torch.no_grad(), evaluation_mode(tried):
                tried(**inputs)
            return {name for name, counts in found.items() if any(count % rows for count in counts)}
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as caught:
            found.clear()
            error = caught
        finally:
            for handle in handles:
                handle.remove()
    raise ValueError(
        f"{type(model).__name__} cannot be tried on made-up images or texts ({error}), so which of its linear layers read the "
        "batch is not known: pass a classifier of images or texts"
    ) from error


def _layers_name(model: PreTrainedModel) -> str:
    # A classifier of one of two towers has the config of both; encoders and decoders behind each other have no last layers.
    configs = (model.config, *(getattr(model.config, f"{tower}_config", None) for tower in ("vision", "text")))
    counts = {getattr(config, "num_hidden_layers", None) for config in configs}
    lists = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) in counts]
    if len(lists) != 1 or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has no list of layers of its own that could be told apart: leave layers out"
        )
    return lists[0]


def _layer_numbers(model: PreTrainedModel, layers: int | Sequence[int]) -> list[int]:
    count = len(model.get_submodule(_layers_name(model)))
    try:
        found = sorted({*(range(count - layers, count) if isinstance(layers, int) else map(operator.index, layers))})
    except TypeError:
        found = []
    if isinstance(layers, bool) or not found or found[0] < 0 or found[-1] >= count:
        raise ValueError(
            f"layers is {layers!r}: pass how many of the last layers, or their numbers, of 0 to {count - 1}"
        )
    return found


def _tile_from(model: PreTrainedModel, layers: Sequence[int], num_members: int) -> None:
    model.base_model.register_forward_pre_hook(Cutting(num_members), with_kwargs=True)
    for number, layer in enumerate(model.get_submodule(_layers_name(model))):
        if number >= layers[0]:
            layer.register_forward_pre_hook(Tiling(num_members, number == layers[0]), with_kwargs=True)
