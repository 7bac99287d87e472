"""Training steps of a model in memory. On a GPU a step is compiled and recorded once, as a CUDA graph, and replayed: a small
model otherwise waits for Python most of the time. The arithmetic is that of `HydraTrainer` with bf16: the mean of the members'
losses, gradients clipped to a norm of 1, AdamW with a linear warm-up and a cosine to zero.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hydra_transformers.training.losses import EnsembleLoss
from hydra_transformers.training.mixing import MIXUP_ALPHA, MixedLabels, draw_share, mix_inputs
from hydra_transformers.training.parameter_groups import classifier_parameters, layer_factors

from .rows import Batch, TensorRows


LARGEST_NORM = 1.0
WEIGHT_DECAY = 0.05
WARM_UP = 0.1
PASSES_BEFORE_RECORDING = 3  # in which libraries set themselves up


class RecordedSteps:
    """Trains one model again and again from its first weights, and compiles and records its step once.

    Args:
        model: A Hydra, of one member or several.
        device: "cuda" or "cpu".
        is_compiled: Whether to compile the step on a GPU; it pays for shapes that many trainings have.
        r_drop: The weight of R-Drop's loss (arXiv 2106.14448): two passes with different dropout have to agree.
    """

    def __init__(self, model: nn.Module, device: str, is_compiled: bool = True, r_drop: float = 0.0):
        self.model = model.to(device)
        self.device = device
        self.r_drop = r_drop
        self.start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.loss_of = EnsembleLoss()
        self.forward: Callable[[Batch], Tensor] = self.loss
        if is_compiled and device == "cuda":
            self.forward = torch.compile(self.loss, dynamic=False)
        self.recordings: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch]] = {}

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch that holds the labels of both images of each row and the share of the first."""
        mixed = ("labels", "others", "share", "partners")
        inputs = {name: tensor for name, tensor in batch.items() if name not in mixed}
        labels = MixedLabels(batch["labels"], batch["others"], batch["share"])
        if "partners" in batch:
            inputs = self.with_mixed_embeddings(inputs, batch["partners"], batch["share"])
        outputs = self.model(**inputs)
        if not self.r_drop:
            return self.loss_of(outputs, labels)
        again = self.model(**inputs)
        losses = [self.loss_of(each, labels) for each in (outputs, again)]
        return sum(losses) / 2 + self.r_drop * disagreement(outputs.member_logits, again.member_logits)

    def with_mixed_embeddings(self, inputs: Batch, partners: Tensor, share: Tensor) -> Batch:
        """Mix the embeddings of words of each text with those of its partner; both texts' tokens are attended to."""
        embedded = self.model.get_input_embeddings()(inputs["input_ids"])
        mask = inputs["attention_mask"]
        return {
            "inputs_embeds": torch.lerp(embedded[partners], embedded, share),
            "attention_mask": torch.maximum(mask, mask[partners]),
        }

    def train(
        self,
        rows: TensorRows,
        *,
        seed: int,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        layer_decay: float = 1.0,
        classifier_rate: float = 1e-3,
        mixing: float = 0.0,
        start: dict[str, Tensor] | None = None,
    ) -> nn.Module:
        """Train from the first weights, or from `start`, and return the model in eval mode."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self.start | (start or {}))
        batch_size = min(batch_size, len(rows))
        steps = epochs * (len(rows) // batch_size)
        optimizer = torch.optim.AdamW(
            rate_groups(self.model, learning_rate, layer_decay, classifier_rate), fused=self.device == "cuda"
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
        self.model.train()
        for step, batch in enumerate(shuffled_batches(rows, epochs, batch_size)):
            self.compute_gradients(with_mixed_labels(batch, is_mixed=step < mixing * steps))
            optimizer.step()
            schedule.step()
        return self.model.eval()

    def compute_gradients(self, batch: Batch) -> None:
        """Leave the clipped gradients of a batch in the same memory as those of the batch before."""
        if self.device != "cuda":
            return self.compute(batch)
        shapes = tuple((name, *tensor.shape) for name, tensor in batch.items())
        if shapes not in self.recordings:
            self.recordings[shapes] = self.record({name: tensor.clone() for name, tensor in batch.items()})
        recording, inputs = self.recordings[shapes]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor)
        return recording.replay()

    def compute(self, batch: Batch) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.forward(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)

    def record(self, inputs: Batch) -> tuple[torch.cuda.CUDAGraph, Batch]:
        stream = torch.cuda.Stream()
        recording = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(PASSES_BEFORE_RECORDING):
                self.compute(inputs)
        pool = next((recorded.pool() for recorded, _ in self.recordings.values()), None)
        with torch.cuda.graph(recording, pool=pool, stream=stream):
            self.compute(inputs)
        return recording, inputs


def shuffled_batches(rows: TensorRows, epochs: int, batch_size: int) -> Iterator[Batch]:
    """Yield whole batches in a new order each epoch; rows that do not fill one are left out of it."""
    for _ in range(epochs):
        for indices in torch.randperm(len(rows)).split(batch_size):
            if len(indices) == batch_size:
                yield rows.__getitems__(indices.tolist())


def with_mixed_labels(batch: Batch, is_mixed: bool) -> Batch:
    """Return a batch with "others" and "share", whether it is mixed or not, so that one recording serves both.

    Images are mixed here. Texts get their "partners", by which the step mixes embeddings.
    """
    labels = batch["labels"]
    if not is_mixed:
        return {**batch, "others": labels, "share": torch.ones((), device=labels.device)}
    if "input_ids" in batch:
        partners = torch.randperm(len(labels)).to(labels.device)
        share = torch.tensor(draw_share(MIXUP_ALPHA), device=labels.device)
        return {**batch, "others": labels[partners], "share": share, "partners": partners}
    batch = mix_inputs(batch)
    mixed: MixedLabels = batch["labels"]
    share = torch.tensor(mixed.share, device=labels.device)
    return {**batch, "labels": mixed.first, "others": mixed.second, "share": share}


def disagreement(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean over both directions of the Kullback-Leibler divergence between members' predictions, a scalar."""
    first = first.float().log_softmax(-1)
    second = second.float().log_softmax(-1)
    there = (first.exp() * (first - second)).sum(-1)
    back = (second.exp() * (second - first)).sum(-1)
    return (there + back).mean() / 2


def rate_groups(model: nn.Module, learning_rate: float, layer_decay: float, classifier_rate: float) -> list[dict]:
    """Group parameters by their learning rate and by whether weights decay: not those of norms and biases."""
    factors = layer_factors(model, layer_decay)
    classifier = classifier_parameters(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        rate = classifier_rate if id(parameter) in classifier else learning_rate * factors[name]
        decay = 0.0 if "norm" in name or name.endswith("bias") else WEIGHT_DECAY
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": each, "lr": rate, "weight_decay": decay} for (rate, decay), each in groups.items()]


def rate_at(step: int, steps: int) -> float:
    """Return the share of the peak rate: linear warm-up, then a cosine to zero."""
    warm_up = math.ceil(WARM_UP * steps)
    if step < warm_up:
        return step / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.5 * (1 + math.cos(math.pi * progress))
