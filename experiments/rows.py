"""Data sets that lie in memory (a GPU's, where there is one) and hand out whole batches."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset


Batch = dict[str, Tensor]


class TensorRows(Dataset):
    """Rows of tensors, (rows, ...) each, all on one device; a `DataLoader` fetches a whole batch at once.

    tensors: for images `pixel_values` as uint8 (rows, 3, height, width), for texts `input_ids` and `attention_mask`;
        `labels` where the set has them
    prepare: makes of a batch what a model reads
    """

    def __init__(self, tensors: Mapping[str, Tensor], prepare: Callable[[Batch], Batch]):
        self.tensors = dict(tensors)
        self.prepare = prepare

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> Batch:
        device = next(iter(self.tensors.values())).device
        return self.prepare(self.part(torch.tensor(indices, device=device)).tensors)

    def to(self, device: torch.device | str) -> "TensorRows":
        return TensorRows({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.prepare)

    def part(self, rows: slice | Tensor) -> "TensorRows":
        return TensorRows({name: tensor[rows] for name, tensor in self.tensors.items()}, self.prepare)

    def prepared_by(self, prepare: Callable[[Batch], Batch]) -> "TensorRows":
        return TensorRows(self.tensors, prepare)

    def sorted_by_length(self) -> "TensorRows":
        """Texts, short ones first, so that batches hold little padding."""
        return self.part(self.tensors["attention_mask"].sum(dim=1).argsort(stable=True))

    def batches(self, batch_size: int) -> list[Batch]:
        """All rows, prepared, in order."""
        starts = range(0, len(self), batch_size)
        return [self.prepare(self.part(slice(start, start + batch_size)).tensors) for start in starts]


def as_it_is(batch: Batch) -> Batch:
    """For what takes a function of a batch, and needs none."""
    return batch


class PrepareImages:
    """uint8 images as normalised floats, changed by `augment` on the way, and with `size` of that many pixels a side."""

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: Callable[[Tensor], Tensor] | None = None,
        size: int | None = None,
    ):
        self.constants = torch.tensor([mean, std]).view(2, 1, -1, 1, 1)
        self.augment = augment
        self.size = size

    def __call__(self, batch: Batch) -> Batch:
        images = batch["pixel_values"].float().div(255)
        images = images if self.augment is None else self.augment(images)
        if self.size is not None and images.shape[-1] != self.size:
            images = interpolate(images, size=(self.size, self.size), mode="bilinear", antialias=True)
        if self.constants.device != images.device:
            self.constants = self.constants.to(images.device)
        mean, std = self.constants
        return {**batch, "pixel_values": (images - mean) / std}


STEP_OF_LENGTHS = 16  # tokens: few shapes are few recordings, see `gradients.py`


def without_common_padding(batch: Batch) -> Batch:
    """Texts, shortened to about the longest of the batch: what is padding in every row changes nothing."""
    longest = rounded_up(int(batch["attention_mask"].sum(dim=1).max()))
    return {name: tensor[:, :longest] if tensor.dim() == 2 else tensor for name, tensor in batch.items()}


def rounded_up(length: int) -> int:
    return -(-length // STEP_OF_LENGTHS) * STEP_OF_LENGTHS
