"""Training a small image classifier from new weights, fast: on a GPU every step is one replay of a captured CUDA graph.

Such models are bound by the launching of kernels: with graphs a step takes as long as its arithmetic.
"""

import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydra_transformers.files import write_atomically, written_whole

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
    model: PreTrainedModel, train: TensorRows, validation: TensorRows, schedule: Schedule, folder: Path, seed: int
) -> PreTrainedModel:
    """The model, trained and saved to `folder`; goes on from the last checkpoint beside it, one in ten epochs."""
    device = model.device
    if folder.exists():
        _check_schedule(json.loads((folder / SCHEDULE).read_text()), schedule, folder)
        return type(model).from_pretrained(folder).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": schedule.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(groups, lr=rate, capturable=device.type == "cuda")
    checkpoint = folder.with_name(f"{folder.name}.training.pt")
    first = _resume(model, optimizer, checkpoint, schedule)
    step = TrainingStep(model, optimizer, train, schedule)
    steps = len(train) // schedule.batch_size
    start = time.time()
    for epoch in range(first, schedule.epochs):
        torch.manual_seed(1_000 * seed + epoch)
        order = torch.randperm(len(train), device=device)[: steps * schedule.batch_size].view(steps, -1)
        model.train()
        for index, rows in enumerate(order):
            rate.fill_(schedule.rate((epoch + index / steps) / schedule.epochs))
            step(rows)
        if (epoch + 1) % 10 == 0 or epoch + 1 == schedule.epochs:
            accuracy = accuracy_of(model, validation)
            print(f"epoch {epoch + 1}: validation {accuracy:.4f}, {time.time() - start:.0f} s", flush=True)
            _checkpoint(model, optimizer, checkpoint, schedule, epoch + 1)
    model.eval()
    with written_whole(folder) as whole:
        model.save_pretrained(whole)
        (whole / SCHEDULE).write_text(json.dumps(asdict(schedule)))
    checkpoint.unlink(missing_ok=True)
    return model


class TrainingStep:
    """One step on the rows with given indices, (batch,)."""

    warm_up = 3

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, train: TensorRows, schedule: Schedule):
        self.model, self.optimizer, self.train, self.schedule = model, optimizer, train, schedule
        device = train.tensors["labels"].device
        self.rows = torch.zeros(schedule.batch_size, dtype=torch.long, device=device)
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
        batch = self.train.prepare(self.train.part(rows).tensors)
        logits = self.model(pixel_values=batch["pixel_values"]).logits
        return nn.functional.cross_entropy(logits.float(), batch["labels"])

    def _run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # A cache of cast weights would outlive the capture that made it.
        with torch.autocast(
            self.rows.device.type, torch.bfloat16, enabled=self.stream is not None, cache_enabled=False
        ):
            loss = self.loss(self.rows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.max_grad_norm)
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


def _checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, schedule: Schedule, epoch: int
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    buffer = io.BytesIO()
    torch.save(state | {"schedule": asdict(schedule)}, buffer)
    write_atomically(path, buffer.getvalue())


def _resume(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, schedule: Schedule) -> int:
    """How many epochs are done already, with the weights and the optimizer as they were then."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=model.device, weights_only=True)
    _check_schedule(state["schedule"], schedule, path)
    model.load_state_dict(state["model"])
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the tensor that the schedule writes to
    return state["epoch"]


def _check_schedule(found: dict, schedule: Schedule, path: Path) -> None:
    if found != asdict(schedule):
        raise ValueError(f"{path} comes from another schedule: remove it to start again")
