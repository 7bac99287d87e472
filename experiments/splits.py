"""The parts that a setting's data come in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .rows import TensorRows


CIRCUIT_ROWS = 1_000  # in distribution, and as many out of it


@dataclass(frozen=True)
class Splits:
    """The data of a setting; everything is a Dataset of rows.

    train, validation: for training; the validation set also chooses checkpoints and fits temperatures
    circuit_id, circuit_ood: for circuits and Taylor scores; never judged on
    validation_ood: out of distribution, for choices between methods; none of it is judged on
    test, ood: what methods are judged on, `ood` as {"near": {name: rows}, "far": {name: rows}}
    """

    train: Any
    validation: Any
    circuit_id: Any
    circuit_ood: Any
    test: Any
    ood: Mapping[str, Mapping[str, Any]]
    validation_ood: Any = None

    def to(self, device: torch.device | str) -> "Splits":
        """The same with all rows of tensors on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: moved(each) for key, each in value.items()}
            return value.to(device) if isinstance(value, TensorRows) else value

        return Splits(**{name: moved(value) for name, value in vars(self).items()})
