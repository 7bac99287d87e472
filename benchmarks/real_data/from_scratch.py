"""Training small image classifiers from new weights, fast: several models at once, every step on a GPU one replay of a
captured CUDA graph.

Such models are bound by the launching of kernels, not by arithmetic. Side by side they need as many kernels as one.
"""

import copy
import io
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydra_transformers.files import write_atomically, written_whole
from hydra_transformers.models.patches import as_patch_projection

from .rows import TensorRows


SCHEDULE = "schedule.json"


@dataclass(frozen=True)
class Schedule:
    """AdamW with a linear warm-up and a cosine decay to zero; weight decay on matrices only."""

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.05
    max_grad_norm: float = 1.0

    def rate(self, progress: float) -> float:
        """The learning rate when a share of the training, from 0 to 1, is done."""
        if progress < self.warmup_share:
            return self.learning_rate * progress / self.warmup_share
        done = (progress - self.warmup_share) / (1 - self.warmup_share)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def train_from_scratch(
    models: Sequence[PreTrainedModel],
    train: TensorRows,
    validation: TensorRows,
    schedule: Schedule,
    folders: Sequence[Path],
    seed: int,
) -> list[PreTrainedModel]:
    """ViTs of one shape, trained side by side and saved to their folders.

    Each sees the images in an order and with changes of its own. What was cut off goes on from the last checkpoint, one in
    ten epochs.
    """
    device = models[0].device
    if all(folder.exists() for folder in folders):
        for folder in folders:
            if json.loads((folder / SCHEDULE).read_text()) != asdict(schedule):
                raise ValueError(f"{folder} comes from another schedule: remove it to start again")
        return [type(models[0]).from_pretrained(folder).to(device) for folder in folders]
    stack = Stack(models)
    rate = torch.zeros((), device=device)
    on_gpu = device.type == "cuda"
    groups = [
        {"params": [stack.matrices.numbers], "weight_decay": schedule.weight_decay},
        {"params": [stack.vectors.numbers], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, capturable=on_gpu, fused=on_gpu)
    checkpoint = folders[0].with_name(f"{folders[0].name}.training.pt")
    what = {"schedule": asdict(schedule), "number of models": len(models), "seed": seed}
    first = _resume(stack, optimizer, checkpoint, what)
    step = TrainingStep(stack, optimizer, train, schedule)
    steps = len(train) // schedule.batch_size
    start = time.time()
    for epoch in range(first, schedule.epochs):
        torch.manual_seed(1_000 * seed + epoch)
        orders = [torch.randperm(len(train), device=device)[: steps * schedule.batch_size] for _ in models]
        for index, rows in enumerate(torch.stack(orders).view(len(models), steps, -1).unbind(1)):
            rate.fill_(schedule.rate((epoch + index / steps) / schedule.epochs))
            step(rows)
        if (epoch + 1) % 10 == 0 or epoch + 1 == schedule.epochs:
            stack.copy_to(models)
            accuracies = ", ".join(f"{accuracy_of(model, validation):.4f}" for model in models)
            print(f"epoch {epoch + 1}: validation {accuracies}, {time.time() - start:.0f} s", flush=True)
            _checkpoint(stack, optimizer, checkpoint, what, epoch + 1)
    stack.copy_to(models)
    for model, folder in zip(models, folders, strict=True):
        with written_whole(folder) as whole:
            model.eval().save_pretrained(whole)
            (whole / SCHEDULE).write_text(json.dumps(asdict(schedule)))
    checkpoint.unlink(missing_ok=True)
    return list(models)


class Part:
    """Some parameters of several models as one tensor of numbers, (models, numbers of a model)."""

    def __init__(self, models: Sequence[nn.Module], names: Sequence[str]):
        self.names = list(names)
        self.shapes = [models[0].get_parameter(name).shape for name in names]
        self.sizes = [shape.numel() for shape in self.shapes]
        rows = [torch.cat([model.get_parameter(name).detach().flatten() for name in names]) for model in models]
        self.numbers = torch.stack(rows).requires_grad_()

    def parameters(self, numbers: Tensor) -> dict[str, Tensor]:
        """One model's, by name, from its row of numbers."""
        parts = numbers.split(self.sizes)
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}


class Stack:
    """ViTs of one shape side by side, trained as if each were alone."""

    def __init__(self, models: Sequence[PreTrainedModel]):
        named = dict(models[0].named_parameters())
        self.matrices = Part(models, [name for name in named if named[name].dim() > 1])
        self.vectors = Part(models, [name for name in named if named[name].dim() <= 1])
        self.model = copy.deepcopy(models[0]).train()
        patches = self.model.vit.embeddings.patch_embeddings
        patches.projection = as_patch_projection(patches.projection)  # a grouped convolution is slow
        self.forward = torch.vmap(self._forward_one, randomness="different")

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.matrices, self.vectors

    def __call__(self, pixel_values: Tensor) -> Tensor:
        """(models, batch, channels, height, width) -> logits (models, batch, classes)"""
        return self.forward(*(part.numbers for part in self.parts), pixel_values)

    def _forward_one(self, matrices: Tensor, vectors: Tensor, pixel_values: Tensor) -> Tensor:
        parameters = self.matrices.parameters(matrices) | self.vectors.parameters(vectors)
        return torch.func.functional_call(self.model, parameters, kwargs={"pixel_values": pixel_values}).logits

    @torch.no_grad()
    def clip_grad_norms(self, largest: float) -> None:
        """Each model's by itself."""
        norms = torch.stack([part.numbers.grad.norm(dim=1) for part in self.parts]).norm(dim=0)
        factors = (largest / (norms + 1e-6)).clamp(max=1).unsqueeze(1)
        for part in self.parts:
            part.numbers.grad.mul_(factors)

    @torch.no_grad()
    def copy_to(self, models: Sequence[PreTrainedModel]) -> None:
        for index, model in enumerate(models):
            for part in self.parts:
                for name, parameter in part.parameters(part.numbers[index]).items():
                    model.get_parameter(name).copy_(parameter)


class TrainingStep:
    """One step of every model on the rows with given indices, (models, batch)."""

    warm_up = 3

    def __init__(self, stack: Stack, optimizer: torch.optim.Optimizer, train: TensorRows, schedule: Schedule):
        self.stack, self.optimizer, self.train, self.schedule = stack, optimizer, train, schedule
        device = stack.matrices.numbers.device
        count = len(stack.matrices.numbers)
        self.rows = torch.zeros(count, schedule.batch_size, dtype=torch.long, device=device)
        self.calls, self.graph = 0, None
        # Most of such a step is elementwise work: compiled, it needs a third of the kernels.
        self.loss = torch.compile(self._loss, dynamic=False) if device.type == "cuda" else self._loss
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None

    def __call__(self, rows: Tensor) -> None:
        self.rows.copy_(rows)
        if self.stream is None:
            self._run()
        elif self.calls < self.warm_up:
            self._on_side_stream(self._run)
        else:
            if self.graph is None:
                self._capture()
            self.graph.replay()
        self.calls += 1

    def _loss(self, rows: Tensor) -> Tensor:
        """The sum of the models' losses: the gradient of each is its own."""
        batch = self.train.prepare(self.train.part(rows.flatten()).tensors)
        logits = self.stack(batch["pixel_values"].unflatten(0, rows.shape)).flatten(0, 1)
        return len(rows) * nn.functional.cross_entropy(logits.float(), batch["labels"])

    def _run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # A cache of cast weights would outlive the capture that made it.
        with torch.autocast(
            self.rows.device.type, torch.bfloat16, enabled=self.stream is not None, cache_enabled=False
        ):
            loss = self.loss(self.rows)
        loss.backward()
        self.stack.clip_grad_norms(self.schedule.max_grad_norm)
        self.optimizer.step()

    def _on_side_stream(self, work: Callable[[], None]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()


@torch.no_grad()
def accuracy_of(model: PreTrainedModel, rows: TensorRows) -> float:
    model.eval()
    batches = rows.batches(500)
    right = sum((model(pixel_values=b["pixel_values"]).logits.argmax(-1) == b["labels"]).sum().item() for b in batches)
    return right / len(rows)


def _checkpoint(stack: Stack, optimizer: torch.optim.Optimizer, path: Path, what: dict, epoch: int) -> None:
    state = {"numbers": [part.numbers.detach() for part in stack.parts], "optimizer": optimizer.state_dict()}
    buffer = io.BytesIO()
    torch.save(state | {"epoch": epoch, "what": what}, buffer)
    write_atomically(path, buffer.getvalue())


def _resume(stack: Stack, optimizer: torch.optim.Optimizer, path: Path, what: dict) -> int:
    """How many epochs are done already, with the weights and the optimizer as they were then."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=stack.matrices.numbers.device, weights_only=True)
    different = [name for name, value in what.items() if state["what"][name] != value]
    if different:
        raise ValueError(f"{path} comes from a training with another {different[0]}: remove it to start again")
    with torch.no_grad():
        for part, numbers in zip(stack.parts, state["numbers"], strict=True):
            part.numbers.copy_(numbers)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the tensor that the schedule writes to
    return state["epoch"]
