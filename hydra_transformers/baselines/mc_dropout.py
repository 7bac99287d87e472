"""MC Dropout (Gal & Ghahramani, 2016): one model, sampled several times with its dropout on."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._io.threads import ONE_PASS, copy_sharing_weights
from ..cost import count_multiply_adds
from ..data.prediction import accepted_inputs, answer_of, member_logits_of
from ..models.modeling_hydra import HydraClassifierOutput
from .baseline import check_is_count
from .seeding import seeded


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class MCDropout(nn.Module):
    """A classifier sampled `num_samples` times with dropout on; each sample is a member.

    Only the dropouts are in train mode, those on attention weights included. Sampling runs on a
    copy that shares the weights, so other threads may use the model meanwhile; threads that sample
    wait for each other.

    Args:
        model (`nn.Module`): a Hugging Face classifier, or a Hydra, whose members are all sampled.
        num_samples (`int`, defaults to 10): how many samples.
        p (`float`, *optional*): the probability of every dropout; by default the model's own, which
            is 0 in many ViTs.
        seed (`int`, *optional*): makes the samples of an input reproducible in every thread, and
            leaves the global random state alone.
    """

    rows_per_pass = 256  # the samples of a batch run in one forward, up to this many rows

    def __init__(self, model: nn.Module, num_samples: int = 10, p: float | None = None, seed: int | None = None):
        super().__init__()
        check_is_count(num_samples, "num_samples")
        if p is not None and not 0 < p < 1:
            raise ValueError(f"p is {p}: pass a probability between 0 and 1, or None for the model's own")
        if hasattr(model, "get_image_features"):
            raise TypeError(f"model is a {type(model).__name__}, not a classifier: wrap it in ZeroShotClassifier")
        probabilities = [getattr(module, name) for module, name in dropouts_of(model)]
        if not probabilities:
            raise ValueError(f"{type(model).__name__} has no dropout to sample from")
        if p is None and not any(probabilities):
            raise ValueError(f"every dropout of {type(model).__name__} is 0, all samples would be equal: pass p=0.1")
        self.model = model
        self.num_samples = num_samples
        self.p = p
        self.seed = seed

    @property
    def input_model(self) -> nn.Module:
        return self.model

    def count_multiply_adds(self) -> int:
        """Count multiply-adds of all samples of one input."""
        return self.num_samples * count_multiply_adds(self.model)

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        """Return `member_logits` (batch, num_samples * the model's members, classes).

        They are in the order of the samples.
        """
        inputs = accepted_inputs(self.model, inputs)
        rows = num_rows(inputs)
        samples_per_pass = max(1, self.rows_per_pass // max(1, rows))
        randomness = nullcontext()
        if self.seed is not None:
            randomness = seeded(self.seed, self.model)

        sampled = []  # of each pass (samples, batch, members, classes)
        with ONE_PASS, randomness:
            model = with_dropout_on(self.model, self.p)
            for start in range(0, self.num_samples, samples_per_pass):
                samples = min(samples_per_pass, self.num_samples - start)
                # Dropout is drawn per element, so repeated rows are different samples.
                output = model(**{name: repeated(value, rows, samples) for name, value in inputs.items()})
                member_logits = member_logits_of(output, type(self.model).__name__)
                sampled.append(member_logits.unflatten(0, (samples, rows)))
        return answer_of(self.model, torch.cat(sampled).transpose(0, 1).flatten(1, 2))


def num_rows(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch, the length of its longest tensor."""
    return max(len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 0)


def repeated(value: Any, rows: int, times: int) -> Any:
    """Return a tensor of `rows` rows tiled `times` along the batch; anything else as it is."""
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
        return value
    return value.repeat(times, *[1] * (value.dim() - 1))


def dropouts_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, attribute) of each dropout probability.

    These are those of dropout modules, and numbers such as `attention_dropout`, which modules pass
    to a function.
    """
    dropouts = []
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            dropouts.append((module, "p"))
            continue
        for name, value in vars(module).items():
            is_number = type(value) in (int, float)
            if is_number and "dropout" in name and 0 <= value < 1:
                dropouts.append((module, name))
    return dropouts


def with_dropout_on(model: nn.Module, p: float | None = None) -> nn.Module:
    """Copy a model, sharing its weights: in eval mode with its dropouts on.

    p: their probability; None for the model's own
    """
    copied = copy_sharing_weights(model)
    for module in copied.modules():
        # BERT's attention passes its dropout's probability to a function, if the attention itself
        # is in train mode.
        has_dropout = any(isinstance(child, DROPOUTS) for child in module.children())
        module.training = "Attention" in type(module).__name__ and has_dropout
        if "layerdrop" in vars(module):  # drops whole layers, by the same flag
            module.layerdrop = 0.0
    for module, name in dropouts_of(copied):
        module.training = True
        if p is not None:
            setattr(module, name, p)
    return copied
