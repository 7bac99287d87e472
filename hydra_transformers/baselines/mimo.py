"""MIMO (Havasi et al., 2021): one network that reads and classifies several inputs at once."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import collate
from ..data.prediction import device_of
from ..models.configuration_hydra import set_problem_type
from ..models.inputs import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput
from ..models.task import task_of_config
from ..uncertainty.inputs import widened
from .baseline import Baseline, check_is_classifier, check_is_count
from .layer_replacement import changed, head_name


# Inputs with places, and their dimensions without these.
IMAGE_INPUTS = {"pixel_values": 4}
TEXT_INPUTS = {"input_ids": 2, "attention_mask": 2, "token_type_ids": 2}


class MIMO(Baseline):
    """A classifier that reads `num_members` inputs, each in a place of its own, and has a head for
    each.

    In training the places hold different examples, which `MIMOCollator` draws. In use all places
    hold the same one: the heads are an ensemble for about the price of one forward. It must be
    trained: a network trained on single inputs cannot tell several apart. Starting from pre-trained
    weights is ours; the paper trains from scratch. The loss is the sum over members, as in the
    paper.

    Args:
        model (`PreTrainedModel`): a classifier that reads images through one convolution (like
            ViT), or texts through token embeddings (like BERT); it is copied. Its head is copied
            for each member.
        num_members (`int`, defaults to 3): M.
        spread (`float`, defaults to 1.0): how much the places differ at the start. The projection
            of each (of patches; for texts a matrix behind the embeddings) is W / M plus noise that
            sums to zero over the places, so that with one example in all places it starts as the
            model. 1.0 is noise as large as W / M; with 0.0 all places are alike.
        seed (`int`, defaults to 0): for that noise.
    """

    def __init__(self, model: PreTrainedModel, num_members: int = 3, spread: float = 1.0, seed: int = 0):
        check_is_classifier(model)
        if model.main_input_name not in ("pixel_values", "input_ids"):
            raise ValueError(f"model is a {type(model).__name__}: pass a classifier of images or texts")
        check_is_count(num_members)
        super().__init__(copy.deepcopy(model), num_members=num_members, spread=spread, seed=seed)
        self.reads |= {"places"}

        # A projection for each place.
        generator = torch.Generator("cpu").manual_seed(seed)
        self.reads_images = model.main_input_name == "pixel_values"
        self.projection = None
        self.padding_position = None
        if self.reads_images:
            self.projection = _patch_projection_name(self.model)
            self._split_projection(spread, generator)
        else:
            _check_reads_embeddings(self.model)
            self.padding_position = _padding_position(self.model)
            embeddings = self.model.get_input_embeddings().weight
            mixing = _mixing_matrices(embeddings, num_members, spread, generator)
            self.embeddings = nn.ParameterDict({"mixing": mixing})  # recipes find it by its name

        # A head for each place, all in one layer.
        self.head = head_name(self.model)
        head = self.model.get_submodule(self.head)
        copies = changed(head, lambda tensor: tensor.repeat(num_members, *[1] * (tensor.dim() - 1)))
        self.model.set_submodule(self.head, copies)

    def outputs(
        self, inputs: dict[str, Tensor], labels: Tensor | None, num_items_in_batch: Tensor | int | None
    ) -> HydraClassifierOutput:
        """Return what `forward` returns.

        In training with `places`, (rows, members) indices into the batch, each place of a row reads
        its example. Otherwise all places hold the same.
        """
        places = inputs.pop("places", None)
        if places is None or not self.training:
            return super().outputs(inputs, labels, num_items_in_batch)
        if labels is None and num_items_in_batch is not None:
            raise ValueError(
                "a MIMO needs the labels to put them into the places with their examples, and Trainer keeps them "
                "back: leave compute_loss_func and label smoothing out (label_smoothing_factor=0.0)"
            )
        if getattr(self, "_is_replica", False):  # its part of the batch lacks examples that its places name
            raise RuntimeError(
                "a MIMO trains on all of a batch together, which nn.DataParallel splits: train on one GPU, or with "
                "torchrun"
            )
        inputs = {name: value[places] for name, value in inputs.items()}
        if labels is not None:
            if num_items_in_batch is not None:  # it counts each example once
                num_items_in_batch = num_items_in_batch * len(places) / len(labels)
            labels = labels[places]
        return super().outputs(inputs, labels, num_items_in_batch)

    def member_logits(self, **inputs: Tensor) -> Tensor:
        """Return (rows, members, classes).

        inputs: (rows, ...), read in all places, or (rows, members, ...)
        """
        dims = TEXT_INPUTS
        if self.reads_images:
            dims = IMAGE_INPUTS
        if self.model.main_input_name not in inputs or not inputs.keys() <= dims.keys():
            raise ValueError(
                f"a MIMO of {type(self.model).__name__} reads {', '.join(dims)}, and got {', '.join(inputs)}: leave "
                "the others out"
            )

        # All inputs with places: (rows, members, ...)
        for name, value in inputs.items():
            if value.dim() == dims[name]:
                inputs[name] = value.unsqueeze(1).expand(-1, self.num_members, *value.shape[1:])
        if self.reads_images:
            # (rows, members * channels, height, width)
            inputs["pixel_values"] = inputs["pixel_values"].flatten(1, 2)
        else:
            tokens = inputs.pop("input_ids")
            inputs = {name: value.amax(dim=1) for name, value in inputs.items()}
            if self.padding_position is not None:
                inputs["position_ids"] = _positions(tokens, self.padding_position)
            embedded = self.model.get_input_embeddings()(tokens)  # (rows, members, tokens, width)
            inputs["inputs_embeds"] = torch.einsum("rmti,moi->rto", embedded, self.embeddings["mixing"])
        logits = self.model(**inputs).logits  # (rows, members * classes)
        return logits.unflatten(-1, (self.num_members, -1))

    def loss(self, member_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """Return the sum of the members' losses.

        labels: one for all, (rows, ...), or each member's own, (rows, members, ...)
        """
        set_problem_type(self.config)
        chooses_one_class = task_of_config(self.config).chooses_one_class
        has_several = not chooses_one_class and member_logits.shape[-1] > 1  # labels of a row
        dims_of_common_labels = 2 if has_several else 1
        if labels.dim() == dims_of_common_labels:
            return self.num_members * super().loss(member_logits, labels, **kwargs)

        total = 0
        for logits, targets in zip(member_logits.unbind(dim=1), labels.unbind(dim=1), strict=True):
            total = total + super().loss(logits.unsqueeze(1), targets, **kwargs)
        return total

    @torch.no_grad()
    def _split_projection(self, spread: float, generator: torch.Generator) -> None:
        """Give the convolution the channels of all places."""
        # Weights for each place, (members, out, in, height, width), which sum to the weight.
        conv = self.model.get_submodule(self.projection)
        wide = widened(conv.weight)
        noise = _noise(wide.shape, self.num_members, generator).to(wide.device)
        parts = (wide + spread * wide.std() * noise) / self.num_members

        weight = parts.transpose(0, 1).flatten(1, 2).to(conv.weight)  # (out, members * in, ...)
        channels_before = conv.in_channels
        conv.weight = nn.Parameter(weight)
        conv.in_channels = weight.shape[1]
        for module in self.model.modules():  # some check the number of channels
            if getattr(module, "num_channels", None) == channels_before:
                module.num_channels = conv.in_channels


class MIMOCollator:
    """Collates rows to train a `MIMO`, and draws which examples are read together.

    For `Trainer(data_collator=...)`. The batch stays as it is and gets `places` (rows, members),
    which a MIMO ignores in evaluation.

    Args:
        num_members (`int`): of the MIMO.
        rho (`float`, defaults to 0.5): the share of rows with one example in all places; ViTs need
            0.6 to 0.9.
        repetitions (`int`, defaults to 4): how often each example occurs in a batch; more cost
            more, for less noise.
        collator (*optional*): makes a batch of rows; by default one that pads texts.
    """

    def __init__(
        self,
        num_members: int,
        rho: float = 0.5,
        repetitions: int = 4,
        collator: Callable[[list[Any]], Mapping[str, Any]] = collate,
    ):
        check_is_count(num_members)
        check_is_count(repetitions, "repetitions")
        if not 0 <= rho <= 1:
            raise ValueError(f"rho is {rho!r}: pass a share from 0 to 1")
        self.num_members = num_members
        self.rho = rho
        self.repetitions = repetitions
        self.collator = collator

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Collate rows, and draw their places."""
        batch = dict(self.collator(rows))
        tensor = next(value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0)
        batch["places"] = self.places(len(tensor)).to(tensor.device)
        return batch

    def places(self, examples: int) -> Tensor:
        """Draw indices (examples * repetitions, members).

        Every example is in each place `repetitions` times.

        Args:
            examples (`int`): how many there are in the batch.
        """
        num_rows = examples * self.repetitions
        draws = torch.randperm(num_rows) % examples
        num_mixed = round(num_rows * (1 - self.rho))  # rows with different examples in their places
        mixed = draws[:num_mixed]
        columns = []
        for _ in range(self.num_members):
            shuffled = mixed[torch.randperm(num_mixed)]
            columns.append(torch.cat([shuffled, draws[num_mixed:]]))
        return torch.stack(columns, dim=1)


def _patch_projection_name(model: PreTrainedModel) -> str:
    """Return the name of the convolution that reads the image; raise for none or many."""
    channels = getattr(model.config, "num_channels", 3)
    names = []
    for name, module in model.named_modules():
        if type(module) is nn.Conv2d and module.groups == 1 and module.in_channels == channels:
            names.append(name)
    if len(names) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(names)} convolutions that read {channels} channels, and a MIMO "
            "replaces the one that reads the image: pass a model like ViT"
        )
    return names[0]


@torch.no_grad()
def _check_reads_embeddings(model: PreTrainedModel) -> None:
    """Raise for models that need the tokens themselves.

    Decoders look for the last one before the padding.
    """
    device = device_of(model)
    if device.type == "meta":
        return

    # A text of two tokens and a padding token.
    padding = model.config.pad_token_id or 0
    token = 1 if padding == 0 else padding - 1
    tokens = torch.tensor([[token, token, padding]], device=device)
    inputs = {}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        inputs["attention_mask"] = torch.tensor([[1, 1, 0]], device=device)

    # Its logits from the tokens, and from their embeddings.
    with evaluation_mode(model):
        try:
            expected = model(input_ids=tokens, **inputs).logits
            embedded = model.get_input_embeddings()(tokens)
            logits = model(inputs_embeds=embedded, **inputs).logits
            is_same = torch.allclose(logits, expected, rtol=1e-3, atol=1e-5)
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            is_same = False
    if not is_same:
        raise ValueError(
            f"{type(model).__name__} gives other logits for embeddings than for their tokens, and a MIMO mixes the "
            "embeddings of its places: pass an encoder like BERT"
        )


def _padding_position(model: PreTrainedModel) -> int | None:
    """Return the padding token of models that do not count padding in their positions (RoBERTa).

    None for other models.
    """
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            return padding
    return None


def _positions(tokens: Tensor, padding: int) -> Tensor:
    """Return positions (rows, tokens), which such a model would only compute from tokens.

    tokens: (rows, members, tokens); a position counts where one member has a token
    """
    is_read = (tokens != padding).any(dim=1).long()
    return is_read.cumsum(dim=-1) * is_read + padding


def _noise(shape: Sequence[int], num_members: int, generator: torch.Generator) -> Tensor:
    """Draw noise (members, *shape) that sums to zero over the members."""
    noise = torch.randn(num_members, *shape, generator=generator, device="cpu", dtype=torch.float64)
    return noise - noise.mean(dim=0)


@torch.no_grad()
def _mixing_matrices(embeddings: Tensor, members: int, spread: float, generator: torch.Generator) -> Tensor:
    """Return matrices (members, width, width) for the embeddings of each place.

    They sum to the identity.
    """
    width = embeddings.shape[1]
    noise = _noise((width, width), members, generator) * width**-0.5
    identity = torch.eye(width, dtype=torch.float64, device="cpu")
    matrices = (identity + spread * noise) / members
    return matrices.to(embeddings)
