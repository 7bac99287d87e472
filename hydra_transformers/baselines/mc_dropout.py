"""MC Dropout (Gal & Ghahramani, 2016): one model, sampled several times with its dropout on."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._io.threads import ONE_PASS, copy_sharing_weights
from ..cost import count_multiply_adds
from ..data.prediction import accepted_inputs, answer_of, device_of, member_logits_of
from ..models.modeling_hydra import HydraClassifierOutput
from .baseline import check_is_count
from .seeding import seeded


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class MCDropout(nn.Module):
    """A classifier that answers `num_samples` times with dropout on, each answer a member.

    model: a Hugging Face classifier, or a Hydra, all members of which are sampled
    num_samples: how many answers
    p: the probability of every dropout while sampling; by default the model's own, which many ViTs have set to 0
    seed: with it, the same input gets the same answers, in every thread, and the global random numbers are not touched

    All of the model is in eval mode but its dropouts, those on attention weights included. That holds for the samples
    only: the model itself is never switched, so that other threads may use it meanwhile. Threads that sample wait for each
    other.
    """

    rows_per_pass = 256  # the samples of a batch run in one forward, as far as this bounds its memory

    def __init__(self, model: nn.Module, num_samples: int = 10, p: float | None = None, seed: int | None = None):
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: pass a classifier that is loaded")
        check_is_count(num_samples, "num_samples")
        if p is not None and not 0 < p < 1:
            raise ValueError(f"p is {p}: pass a probability between 0 and 1, or None for the model's own")
        if hasattr(model, "get_image_features"):
            raise TypeError(f"model is a {type(model).__name__}, no classifier: wrap it in ZeroShotClassifier")
        probabilities = [getattr(module, name) for module, name in dropouts_of(model)]
        if not probabilities:
            raise ValueError(f"{type(model).__name__} has no dropout to sample from")
        if p is None and not any(probabilities):
            raise ValueError(
                f"every dropout of {type(model).__name__} is 0, all samples would be the same: pass p=0.1"
            )
        self.model = model
        self.num_samples = num_samples
        self.p = p
        self.seed = seed

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def input_model(self) -> nn.Module:
        return self.model

    def count_multiply_adds(self) -> int:
        return self.num_samples * count_multiply_adds(self.model)

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        """`member_logits` is (batch, num_samples, classes); of a model with members, each sample holds all of them."""
        inputs = accepted_inputs(self.model, inputs)
        tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 0]
        if not tensors:
            raise TypeError(f"{', '.join(inputs)}: no tensor among them, pass the batch as tensors")
        rows = max(map(len, tensors))
        samples_per_pass = max(1, self.rows_per_pass // max(1, rows))
        answers = []
        with ONE_PASS, nullcontext() if self.seed is None else seeded(self.seed, self.model):
            model = with_dropout_on(self.model, self.p)
            for start in range(0, self.num_samples, samples_per_pass):
                samples = min(samples_per_pass, self.num_samples - start)
                # Dropout is drawn per element, so a row that comes several times is sampled several times.
                output = model(**{name: repeated(value, rows, samples) for name, value in inputs.items()})
                answers.append(member_logits_of(output, type(self.model).__name__).unflatten(0, (samples, rows)))
        member_logits = torch.cat(answers).transpose(0, 1).flatten(1, 2)
        return answer_of(self.model, member_logits)


def repeated(value: Any, rows: int, times: int) -> Any:
    """A batch's entry `times` over, one batch after the other; the very same where it has no rows."""
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
        return value
    return value.repeat(times, *[1] * (value.dim() - 1))


def dropouts_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a model's dropout probabilities are: (module, attribute).

    They are those of the dropout modules, and numbers such as `attention_dropout` that modules hand to a function.
    """
    found = []
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            found.append((module, "p"))
        else:
            names = [name for name, value in vars(module).items() if "dropout" in name and _is_probability(value)]
            found.extend((module, name) for name in names)
    return found


def _is_probability(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def with_dropout_on(model: nn.Module, p: float | None = None) -> nn.Module:
    """A twin of the model in eval mode with dropout on, of probability `p` where it is given; the model stays as it is."""
    twin = copy_sharing_weights(model)
    for module in twin.modules():
        module.training = _reads_a_dropout(module)
        if "layerdrop" in vars(module):  # layer drop is separate from dropout but uses the same flag
            module.layerdrop = 0.0
    for module, name in dropouts_of(twin):
        module.training = True
        if p is not None:
            setattr(module, name, p)
    return twin


def _reads_a_dropout(module: nn.Module) -> bool:
    """Whether a module hands its dropout's probability to the attention function, in training only, as BERT's does."""
    return "Attention" in type(module).__name__ and any(isinstance(child, DROPOUTS) for child in module.children())
