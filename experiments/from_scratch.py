"""Training small image classifiers from new weights, fast: several models at once, every step on a GPU one replay of a
captured CUDA graph.

Alone, such a model is bound by the launching of kernels, not by arithmetic. Side by side (`parallel_training.py`) several need as many
kernels as one.
"""

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

from hydra_transformers._io.files import write_atomically, written_whole

from .muon import Muon
from .parallel_training import Stack
from .rows import Batch, TensorRows


SCHEDULE = "schedule.json"


@dataclass(frozen=True)
class Schedule:
    """Muon for the layers' matrices and AdamW for all else, with a linear warm-up and a cosine decay to zero; no weight
    decay on vectors."""

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    matrix_learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.05
    max_grad_norm: float = 1.0

    def rate(self, progress: float) -> float:
        """The share of the learning rates that counts when a share of the training, from 0 to 1, is done."""
        if progress < self.warmup_share:
            return progress / self.warmup_share
        done = (progress - self.warmup_share) / (1 - self.warmup_share)
        return 0.5 * (1 + math.cos(math.pi * done))


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
    optimizers = Optimizers(stack, schedule)
    checkpoint = folders[0].with_name(f"{folders[0].name}.training.pt")
    what = {"schedule": asdict(schedule), "number of models": len(models), "seed": seed}
    what["order of parameters"] = [part.names for part in stack.parts]
    first = _resume(stack, optimizers, checkpoint, what)
    step = TrainingStep(stack, optimizers, train, schedule)
    steps = len(train) // schedule.batch_size
    start = time.time()
    for epoch in range(first, schedule.epochs):
        torch.manual_seed(1_000 * seed + epoch)
        orders = [torch.randperm(len(train), device=device)[: steps * schedule.batch_size] for _ in models]
        for index, rows in enumerate(torch.stack(orders).view(len(models), steps, -1).unbind(1)):
            optimizers.set_rate((epoch + index / steps) / schedule.epochs)
            step(rows)
        if (epoch + 1) % 10 == 0 or epoch + 1 == schedule.epochs:
            stack.copy_to(models)
            accuracies = ", ".join(f"{accuracy_of(model, validation):.4f}" for model in models)
            print(f"epoch {epoch + 1}: validation {accuracies}, {time.time() - start:.0f} s", flush=True)
            _checkpoint(stack, optimizers, checkpoint, what, epoch + 1)
    stack.copy_to(models)
    for model, folder in zip(models, folders, strict=True):
        with written_whole(folder) as whole:
            model.eval().save_pretrained(whole)
            (whole / SCHEDULE).write_text(json.dumps(asdict(schedule)))
    checkpoint.unlink(missing_ok=True)
    return list(models)


class Optimizers:
    """Muon and AdamW, whose learning rates are numbers on the device: a captured step reads them again every time."""

    def __init__(self, stack: Stack, schedule: Schedule):
        device, decay = stack.matrices.numbers.device, schedule.weight_decay
        self.schedule, self.full = schedule, (schedule.matrix_learning_rate, schedule.learning_rate)
        self.rates = [torch.zeros((), device=device) for _ in self.full]
        groups = [
            {"params": [stack.embeddings.numbers], "weight_decay": decay},
            {"params": [stack.vectors.numbers], "weight_decay": 0.0},
        ]
        on_gpu = device.type == "cuda"
        self.all = (
            Muon(stack.matrices, self.rates[0], decay),
            torch.optim.AdamW(groups, lr=self.rates[1], capturable=on_gpu, fused=on_gpu),
        )

    def set_rate(self, progress: float) -> None:
        """For the time when a share of the training, from 0 to 1, is done."""
        for rate, full in zip(self.rates, self.full, strict=True):
            rate.fill_(full * self.schedule.rate(progress))

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()

    def state_dicts(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.all]

    def load_state_dicts(self, states: Sequence[dict]) -> None:
        for optimizer, rate, state in zip(self.all, self.rates, states, strict=True):
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:
                group["lr"] = rate


class TrainingStep:
    """One step of every model on the rows with given indices, (models, batch)."""

    warm_up = 3

    def __init__(self, stack: Stack, optimizers: Optimizers, train: TensorRows, schedule: Schedule):
        self.stack, self.optimizers, self.train, self.schedule = stack, optimizers, train, schedule
        device = stack.matrices.numbers.device
        count = len(stack.matrices.numbers)
        self.rows = torch.zeros(count, schedule.batch_size, dtype=torch.long, device=device)
        self.calls, self.graph = 0, None
        self.prepared = self._prepared
        self.stream = None
        if device.type == "cuda":  # most of a step is elementwise work, for which compiled code needs fewer kernels
            stack.compile_layers()
            self.prepared = torch.compile(self._prepared, dynamic=False)
            self.stream = torch.cuda.Stream()

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

    def _prepared(self, rows: Tensor) -> Batch:
        return self.train.prepare(self.train.part(rows.flatten()).tensors)

    def _loss(self) -> Tensor:
        """The sum of the models' losses: the gradient of each is its own."""
        batch = self.prepared(self.rows)
        logits = self.stack(batch["pixel_values"])
        return len(self.rows) * nn.functional.cross_entropy(logits.float(), batch["labels"])

    def _run(self) -> None:
        self.optimizers.zero_grad()
        # A cache of cast weights would outlive the capture that made it.
        with torch.autocast(
            self.rows.device.type, torch.bfloat16, enabled=self.stream is not None, cache_enabled=False
        ):
            loss = self._loss()
        loss.backward()
        self.stack.clip_grad_norms(self.schedule.max_grad_norm)
        self.optimizers.step()

    def _on_side_stream(self, work: Callable[[], None]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self) -> None:
        self.optimizers.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()


@torch.no_grad()
def accuracy_of(model: PreTrainedModel, rows: TensorRows) -> float:
    model.eval()
    batches = rows.batches(500)
    right = sum((model(pixel_values=b["pixel_values"]).logits.argmax(-1) == b["labels"]).sum().item() for b in batches)
    return right / len(rows)


def _checkpoint(stack: Stack, optimizers: Optimizers, path: Path, what: dict, epoch: int) -> None:
    state = {"numbers": [part.numbers.detach() for part in stack.parts], "optimizers": optimizers.state_dicts()}
    buffer = io.BytesIO()
    torch.save(state | {"epoch": epoch, "what": what}, buffer)
    write_atomically(path, buffer.getvalue())


def _resume(stack: Stack, optimizers: Optimizers, path: Path, what: dict) -> int:
    """How many epochs are done already, with the weights and the optimizers as they were then."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=stack.matrices.numbers.device, weights_only=True)
    different = [name for name, value in what.items() if state["what"][name] != value]
    if different:
        raise ValueError(f"{path} comes from a training with another {different[0]}: remove it to start again")
    with torch.no_grad():
        for part, numbers in zip(stack.parts, state["numbers"], strict=True):
            part.numbers.copy_(numbers)
    optimizers.load_state_dicts(state["optimizers"])
    return state["epoch"]
