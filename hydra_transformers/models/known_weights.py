"""By which a model's weights are known again: a few of their values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn

from .compat import is_recording_kernels


VALUES_PER_WEIGHT = 4

Places = tuple[list[dict[str, nn.Parameter | None]], list[str]]  # modules' own parameters, and the name of one in each


@dataclass(frozen=True)
class SeenWeights:
    """Weights as they were when they were looked at, so that looking again is quick.

    weights, places, version: the parameters, where they lie in their model, and a number that most writing into them raises
    tensors, addresses: those that hold numbers, and where these lie in memory
    views, values: some of the numbers, by dtype and device: where they lie, and what they were
    are_calibrated: whether they are those that were calibrated
    """

    weights: list[nn.Parameter]
    places: Places
    version: int
    tensors: list[Tensor]
    addresses: list[int]
    views: list[list[Tensor]]
    values: list[Tensor]
    are_calibrated: bool

    @classmethod
    def of(cls, model: nn.Module, weights: list[nn.Parameter], are_calibrated: bool) -> "SeenWeights | None":
        """None where a weight does not lie in one piece, so that what is cut from it may be a copy."""
        tensors = list(_plain(weights))
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
        groups: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            middle = tensor.numel() // 2
            # Neighbours: what is spread takes longer to read.
            view = tensor.detach().view(-1)[middle : middle + VALUES_PER_WEIGHT]
            # Types of 8 bits and less have no comparison of their own.
            view = view.view(torch.uint8) if view.element_size() == 1 else view
            groups.setdefault((view.dtype, view.device), []).append(view)
        views = list(groups.values())
        values = [torch.cat(group) for group in views]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return cls(weights, _places_of(model), _version(weights), tensors, addresses, views, values, are_calibrated)

    def is_unchanged(self) -> bool:
        """Whether they are where they were, and what they were."""
        if not all(map(is_, map(dict.get, *self.places), self.weights)):
            return False
        if _version(self.weights) != self.version:
            return False
        if [tensor.data_ptr() for tensor in self.tensors] != self.addresses:
            return False
        # A CUDA graph may not wait for numbers.
        return is_recording_kernels() or all(map(torch.equal, map(torch.cat, self.views), self.values))


def sample_of(weights: list[nn.Parameter]) -> Tensor:
    """A few numbers of every weight, in float32 on the CPU; of a quantised one its codes and scales."""
    parts = []
    for weight in _plain(weights):
        values = weight.detach().reshape(-1)
        step = max(1, values.numel() // VALUES_PER_WEIGHT)
        parts.append(values[::step][:VALUES_PER_WEIGHT].float().cpu())
    return torch.cat(parts)


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that hold numbers: those inside of tensors of other classes (torchao's, distributed ones), which cannot be
    cut nor viewed."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def are_same(remembered: Tensor, weights: list[nn.Parameter]) -> bool:
    """Whether weights are those remembered, as far as their dtype tells."""
    found = sample_of(weights)
    if found.shape != remembered.shape:
        return False
    dtypes = [weight.dtype for weight in _plain(weights) for _ in range(min(VALUES_PER_WEIGHT, weight.numel()))]
    expected = remembered.detach().float().cpu()
    for dtype in set(dtypes):
        of_dtype = torch.tensor([each == dtype for each in dtypes])
        own = expected[of_dtype]
        # Rounded to codes, small weights would all be 0.
        if not torch.equal(own.to(dtype).float() if dtype.is_floating_point else own, found[of_dtype]):
            return False
    return True


def dtype_of(weights: list[nn.Parameter]) -> str | None:
    """That of most weights that are floating-point numbers: "float32"."""
    names = [str(weight.dtype).removeprefix("torch.") for weight in weights if weight.is_floating_point()]
    return max(set(names), key=names.count, default=None)


def weights_of_replica(model: nn.Module) -> list[Tensor]:
    """In the order of `model.parameters()`."""
    found = (each for module in model.modules() for each in vars(module).get("_former_parameters", {}).values())
    return list({id(weight): weight for weight in found if weight is not None}.values())


def _places_of(model: nn.Module) -> Places:
    """Where `model.parameters()` lie, in their order."""
    places = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                places.setdefault(weight, (module._parameters, name))
    owners, names = zip(*places.values(), strict=True)
    return list(owners), list(names)


def _version(weights: list[nn.Parameter]) -> int:
    """Grows whenever something is written into one of the weights, but for what is written into its `data`."""
    try:
        return sum(weight._version for weight in weights)
    except RuntimeError:  # made in inference mode, where nobody writes
        return 0
