"""MIMO (Havasi et al., 2021): one network that reads several inputs at once and answers each of them."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import batches, collate, split_labels
from ..data.prediction import device_of, evaluation_mode
from ..models.configuration_hydra import set_problem_type
from ..models.modeling_hydra import HydraClassifierOutput
from ..uncertainty.inputs import widened
from .baseline import Baseline, check_is_classifier, check_is_count, is_number
from .linear_layers import changed, head_name, mean_of_heads, replace


# What a text has per token. Where the places differ, a token is read if it is in any of them, and the largest type counts.
TOKEN_ENTRIES = ("input_ids", "attention_mask", "token_type_ids")


class MIMO(Baseline):
    """A classifier that reads `num_members` inputs in as many places, and has a head for each.

    In training the places hold different examples, which `MIMOCollator` draws; in use they all hold the same one, and the
    heads' answers are those of an ensemble for the price of about one forward.

    model: a classifier of Transformers that reads images through a convolution into patches (ViT and its like) or texts
        through token embeddings (BERT and its like); it stays as it is
    num_members: M
    spread: how far the places start apart. What they read adds up to what the model reads: place m's projection is W / M plus
        noise whose sum over the places is zero, so that with the same example in all places it starts as the model itself.
        1.0 is noise as large as W / M; with 0.0 all places are alike, and only chance tells them apart in training
    seed: of that noise

    For images, W is the projection of patches; for texts, each place has a matrix of its own behind the token embeddings,
    and a token counts where it is no padding in at least one place. The heads are M copies of the classifier's last linear layer.
    The loss is the sum of the members' losses, as in the paper.

    It has to be trained: a network that was trained on one input at a time cannot tell several apart. This start from
    pre-trained weights is ours; the paper trains from the beginning.
    """

    summary = (
        "A MIMO network (Havasi et al., 2021): it reads an input in {members} places at once, and the answer of each place is "
        "a member."
    )

    def __init__(self, model: PreTrainedModel, num_members: int = 3, spread: float = 1.0, seed: int = 0):
        check_is_classifier(model)
        if model.main_input_name not in ("pixel_values", "input_ids"):
            raise ValueError(f"model is a {type(model).__name__}: pass a classifier of images or texts")
        check_is_count(num_members)
        if not (is_number(spread) and spread >= 0):
            raise ValueError(f"spread is {spread!r}: pass 0 or more")
        super().__init__(copy.deepcopy(model), num_members=num_members, spread=spread, seed=seed)
        generator = torch.Generator("cpu").manual_seed(seed)
        self.reads_images = model.main_input_name == "pixel_values"
        if self.reads_images:
            self.projection = _patch_projection(self.model)
            old = self.model.get_submodule(self.projection)
            replace(self.model, lambda _: _in_places(old, num_members, spread, generator), [old])
            _set_channels(self.model, old.in_channels, old.in_channels * num_members)
        else:
            self.projection = None
            _check_reads_embeddings(self.model)
            self.padding_position = _padding_position(self.model)
            mixing = _mixing(self.model.get_input_embeddings(), num_members, spread, generator)
            self.embeddings = nn.ParameterDict({"mixing": mixing})  # by its name known to be a part of the embeddings
        self.head = head_name(self.model)
        head = self.model.get_submodule(self.head)
        replace(self.model, lambda _: _repeated_head(head, num_members), [head])

    # Trainer takes the columns that forward names, and finds the labels by their name.
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        places: Tensor | None = None,
        **inputs: Any,
    ) -> HydraClassifierOutput:
        """As every baseline; in training with `places`, (rows, members) indices into the batch, each row reads those
        examples, and its members answer to theirs. In use, every place holds the same."""
        inputs |= {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "pixel_values": pixel_values,
        }
        if places is not None and self.training:
            if labels is None and num_items_in_batch is not None:
                raise ValueError(
                    "a MIMO learns from labels that go with their examples into the places, and Trainer has kept them back: leave "
                    "compute_loss_func and label smoothing out (of a recipe, dataclasses.replace(recipe, label_smoothing=0.0))"
                )
            if getattr(self, "_is_replica", False):  # its part of the batch has not the examples that its places name
                raise RuntimeError(
                    "nn.DataParallel splits a batch, and a MIMO in training reads examples of all of it together: train on "
                    "one GPU (CUDA_VISIBLE_DEVICES=0), or with a process for each (torchrun)"
                )
            inputs = {name: value if value is None else value[places] for name, value in inputs.items()}
            if labels is not None:
                rows = len(labels)
                labels = labels[places]
                if num_items_in_batch is not None:  # of the examples, each of which occurs several times
                    num_items_in_batch = num_items_in_batch * len(places) / rows
        return super().forward(labels=labels, num_items_in_batch=num_items_in_batch, **inputs)

    def member_logits(self, **inputs: Tensor) -> Tensor:
        """The inputs are a batch, which all places then hold, or have their places in the second dimension."""
        known = ("pixel_values",) if self.reads_images else TOKEN_ENTRIES
        if known[0] not in inputs or not inputs.keys() <= set(known):
            raise ValueError(
                f"a MIMO of {type(self.model).__name__} reads {', '.join(known)} in its places, and got {', '.join(inputs)}: pass "
                f"{known[0]}, and nothing else of the model's inputs"
            )
        tensors = {name: self._in_places(name, value) for name, value in inputs.items()}
        if self.reads_images:
            tensors["pixel_values"] = tensors["pixel_values"].flatten(
                1, 2
            )  # (rows, members * channels, height, width)
        else:
            tokens = tensors.pop("input_ids")
            embedded = self.model.get_input_embeddings()(tokens)  # (rows, members, tokens, width)
            if self.padding_position is not None:
                tensors["position_ids"] = _positions(tokens, self.padding_position)
            tensors["inputs_embeds"] = torch.einsum("rmti,moi->rto", embedded, self.embeddings["mixing"])
            for name in set(tensors) & {"attention_mask", "token_type_ids"}:
                tensors[name] = tensors[name].amax(dim=1)
        return self.model(**tensors).logits.unflatten(-1, (self.num_members, -1))

    def loss(self, member_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """The sum of the members' losses; labels are one for all, (rows, ...), or each member's own, (rows, members, ...)."""
        set_problem_type(self.config)
        several = self.config.problem_type != "single_label_classification" and member_logits.shape[-1] > 1
        if labels.dim() == (2 if several else 1):  # several numbers for each row
            return self.num_members * super().loss(member_logits, labels, **kwargs)
        of_members = zip(member_logits.unbind(dim=1), labels.unbind(dim=1), strict=True)
        return sum(super(MIMO, self).loss(logits.unsqueeze(1), own, **kwargs) for logits, own in of_members)

    def _in_places(self, name: str, value: Tensor) -> Tensor:
        """(rows, ...) or (rows, members, ...) -> (rows, members, ...)"""
        dims = {"pixel_values": 4} | dict.fromkeys(TOKEN_ENTRIES, 2)
        if name not in dims or value.dim() > dims[name]:
            return value
        return value.unsqueeze(1).expand(-1, self.num_members, *value.shape[1:])

    # Saving

    def plain_model(self) -> PreTrainedModel:
        """The model in its own shape: its projection is the sum over the places, its classifier the mean of the heads."""
        model = copy.deepcopy(self.model)
        members = self.num_members
        if self.reads_images:
            old = model.get_submodule(self.projection)
            replace(model, lambda _: _joined_places(old, members), [old])
            _set_channels(model, old.in_channels, old.in_channels // members)
        head = model.get_submodule(self.head)
        replace(model, lambda _: mean_of_heads(head, members), [head])
        return model

    def own_weights(self) -> dict[str, Tensor]:
        own = tuple(f"model.{name}." for name in (self.projection, self.head) if name is not None)
        return {name: tensor for name, tensor in self.state_dict().items() if name.startswith((*own, "embeddings."))}

    # Independence

    def independence(self, data: Any, batch_size: int = 32, seed: int = 0) -> "Independence":
        """How far each head answers to its own place and to no other, measured on labelled data (Havasi et al., 3.2).

        data: as `evaluate_uncertainty` takes it
        seed: of which examples of a batch lie together
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        right, asked = torch.zeros(2, 3, self.num_members, dtype=torch.float64)
        for batch in batches(data, batch_size, self.device):
            inputs, labels = split_labels(batch)
            if labels is None:
                raise ValueError("data has no labels: pass rows whose right class is known")
            for place, (is_right, counts) in enumerate(self._by_place(inputs, labels, generator)):
                right[place] += (is_right & counts).sum(dim=0).cpu()
                asked[place] += counts.sum(dim=0).cpu()
        if not asked.all():
            raise ValueError("data has no batch with examples of several classes: pass more rows, or mix them")
        return Independence(*(right / asked).tolist())

    def _by_place(
        self, inputs: Mapping[str, Tensor], labels: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What `Independence` counts: whether the heads are right, and whether that counts, (rows, members) each."""
        members, rows = range(self.num_members), len(labels)
        mixed = torch.stack([torch.randperm(rows, generator=generator, device="cpu") for _ in members], dim=1)
        mixed = mixed.to(labels.device)
        alike = torch.arange(rows, device=labels.device).unsqueeze(1).repeat(1, self.num_members)
        wanted = labels[mixed]
        is_only_one = (wanted.unsqueeze(1) == wanted.unsqueeze(2)).sum(dim=2) == 1  # of its class, in its row
        yield self._answers(inputs, mixed) == wanted, is_only_one
        elsewhere = []
        for member in members:
            places = alike.clone()
            places[:, member] = mixed[:, member]
            elsewhere.append(self._answers(inputs, places)[:, member])
        asked = labels.unsqueeze(1)
        yield torch.stack(elsewhere, dim=1) == asked, wanted != asked
        yield self._answers(inputs, alike) == asked, torch.ones_like(wanted, dtype=torch.bool)

    def _answers(self, inputs: Mapping[str, Tensor], places: Tensor) -> Tensor:
        """The heads' classes (rows, members) where these examples lie in the places, (rows, members)"""
        with torch.inference_mode(), evaluation_mode(self):
            read = {name: value[places] for name, value in inputs.items() if name in self.reads}
            return self.member_logits(**read).argmax(dim=-1)


@dataclass(frozen=True)
class Independence:
    """Shares of right answers by member: three lists.

    own: to what lies in the member's place, where all others hold examples of other classes. Near `together` for members
        that are independent
    others: to what lies in all other places, where the member's holds an example of another class. Not above chance for
        members that are independent
    together: where all places hold the same example, as in use
    """

    own: list[float]
    others: list[float]
    together: list[float]


class MIMOCollator:
    """Collates rows for the training of a `MIMO`, and draws which examples lie together: `Trainer(data_collator=...)`.

    num_members: of the MIMO
    rho: the share of the rows in which all places hold the same example
    repetitions: how often each example occurs in a batch; the rows of a step, and what it costs, grow with it, and the
        noise of its gradient shrinks
    collator: makes a batch of rows; by default the one that fills up texts to one length

    The paper's are 0.5 and 4; ViTs were found to need mostly rows of the same example (0.6 to 0.9). The batch itself stays
    as it is, `places` (rows, members) comes with it: in evaluation, where a MIMO does not look at it, it changes nothing.
    Several GPUs train with a process for each (`torchrun`): `nn.DataParallel`, which splits a batch, is refused.
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
        if not (is_number(rho) and 0 <= rho <= 1):
            raise ValueError(f"rho is {rho!r}: pass a share from 0 to 1")
        self.num_members, self.rho, self.repetitions, self.collator = num_members, rho, repetitions, collator

    def __call__(self, rows: Any) -> dict[str, Any]:
        batch = dict(self.collator(rows))
        tensor = next(value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0)
        return {**batch, "places": self.places(len(tensor)).to(tensor.device)}

    def places(self, examples: int) -> Tensor:
        """(examples * repetitions, members): which example lies where. Every example is in each place `repetitions` times."""
        total = examples * self.repetitions
        drawn = torch.randperm(total) % examples
        mixed = round(total * (1 - self.rho))
        columns = [torch.cat([drawn[:mixed][torch.randperm(mixed)], drawn[mixed:]]) for _ in range(self.num_members)]
        return torch.stack(columns, dim=1)


# Parts of the network


def _patch_projection(model: PreTrainedModel) -> str:
    channels = getattr(model.config, "num_channels", 3)
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Conv2d and module.in_channels == channels and module.groups == 1
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} convolutions that read {channels} channels, and a MIMO replaces the one "
            "that reads the image: pass a model like ViT"
        )
    return found[0]


@torch.no_grad()
def _check_reads_embeddings(model: PreTrainedModel) -> None:
    """Refuses a model that looks at the tokens themselves, such as a decoder for the last one in front of the padding: behind
    the places, there are only embeddings."""
    device = device_of(model)
    if device.type == "meta":
        return
    padding = model.config.pad_token_id or 0
    tokens = torch.tensor([[padding + 1 if padding == 0 else padding - 1] * 2 + [padding]], device=device)
    read = inspect.signature(model.forward).parameters
    mask = {"attention_mask": torch.tensor([[1, 1, 0]], device=device)} if "attention_mask" in read else {}
    with evaluation_mode(model):
        try:
            expected = model(input_ids=tokens, **mask).logits
            found = model(inputs_embeds=model.get_input_embeddings()(tokens), **mask).logits
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            found = None
    if found is None or not torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
        raise ValueError(
            f"{type(model).__name__} answers otherwise where it reads embeddings in place of tokens, and a MIMO reads those of all "
            "places: pass an encoder like BERT"
        )


def _padding_position(model: PreTrainedModel) -> int | None:
    """Where a model numbers only the tokens that are no padding, as RoBERTa does, the token and position of padding."""
    tables = [each for name, each in model.named_modules() if name.endswith("position_embeddings")]
    return next((each.padding_idx for each in tables if getattr(each, "padding_idx", None) is not None), None)


def _positions(tokens: Tensor, padding: int) -> Tensor:
    """The positions (rows, tokens) of what some place (rows, members, tokens) holds, as such a model would number them, which
    it does not where it reads embeddings."""
    is_there = (tokens != padding).any(dim=1).long()
    return is_there.cumsum(dim=-1) * is_there + padding


def _noise(shape: Sequence[int], num_members: int, generator: torch.Generator) -> Tensor:
    """(members, *shape) whose sum over the members is zero."""
    drawn = torch.randn(num_members, *shape, generator=generator, device="cpu", dtype=torch.float64)
    return drawn - drawn.mean(dim=0)


@torch.no_grad()
def _in_places(conv: nn.Conv2d, members: int, spread: float, generator: torch.Generator) -> nn.Conv2d:
    """The convolution for images of all places, their channels one after the other."""
    weight = widened(conv.weight)
    noise = _noise(weight.shape, members, generator).to(weight.device)
    of_places = (weight + spread * weight.std() * noise) / members  # (members, out, in, height, width)
    return _convolution(conv, of_places.transpose(0, 1).flatten(1, 2))


@torch.no_grad()
def _joined_places(conv: nn.Conv2d, members: int) -> nn.Conv2d:
    return _convolution(conv, widened(conv.weight).unflatten(1, (members, -1)).sum(dim=1))


def _convolution(like: nn.Conv2d, weight: Tensor) -> nn.Conv2d:
    """The same convolution with another weight, and the number of channels that this has."""
    shape = {
        "kernel_size": like.kernel_size,
        "stride": like.stride,
        "padding": like.padding,
        "dilation": like.dilation,
    }
    conv = nn.Conv2d(weight.shape[1], like.out_channels, **shape, bias=like.bias is not None, device="meta")
    conv.weight, conv.bias = nn.Parameter(weight.to(like.weight)), like.bias
    return conv


@torch.no_grad()
def _mixing(embeddings: nn.Embedding, members: int, spread: float, generator: torch.Generator) -> Tensor:
    """(members, width, width): behind the embeddings, what each place is read by. Their sum is the identity."""
    width = embeddings.weight.shape[1]
    noise = _noise((width, width), members, generator) * width**-0.5
    mixing = (torch.eye(width, dtype=torch.float64, device="cpu") + spread * noise) / members
    return mixing.to(embeddings.weight)


def _repeated_head(head: nn.Linear, members: int) -> nn.Linear:
    return changed(head, lambda tensor: tensor.repeat(members, *[1] * (tensor.dim() - 1)))


def _set_channels(model: PreTrainedModel, before: int, channels: int) -> None:
    """Modules that look whether an image has their number of channels expect those of all places."""
    for module in model.modules():
        if getattr(module, "num_channels", None) == before:
            module.num_channels = channels
