"""The ablation engine: the logits of a network with one head turned off, for many heads at once.

A head of layer l changes nothing before l. So for each batch the states entering layer l, and the
outputs of its heads, are computed once; a candidate is these outputs with its slice zeroed, and all
candidates of the layer pass the rest of the network together, on the batch axis, where the head
stays off if the layer runs again. The last layer computes the first token alone where the
classifier reads no other. Removed heads are cut out of the engine's own copy of the model.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.zero_shot import check_class_prompts, logits_of_cosines
from ..fusion.packed_heads import heads_at, qkv_rows
from ..fusion.structure import has_two_towers, tower_configs
from ..models.modeling_hydra import HydraAttention
from .heads import Head, Prompts, Towers, chosen_towers, heads_of, tower_and_place


# From a batch's inputs to logits (candidates, batch, classes), in parts and in the order of the
# candidates; the last part, (1, batch, classes), is the network as it is.
Ablate = Callable[[Mapping[str, Tensor]], Iterator[Tensor]]
Candidates = Mapping[int, list[int]]  # heads to turn off, by layer

PROMPTS_PER_PASS = 256
GIB = 2**30


class Tower:
    """An encoder of one member, whose heads are turned off one by one."""

    def __init__(
        self,
        encoder: PreTrainedModel,
        read: Callable[[Tensor, Tensor | None], Tensor],
        first_token_only: bool,
        weighted_sum: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ):
        """
        read: from the encoder's last states (1, batch, tokens or 1, hidden) and its pooled output
            to (1, batch, features)
        first_token_only: whether `read` and the pooling use only the first token of the last layer
        weighted_sum: for a head that reads the states of all layers: sums those of the embeddings
            and of every layer into what `read` takes in place of the last states
        """
        self.encoder = encoder
        self.read = read
        self.first_token_only = first_token_only
        self.weighted_sum = weighted_sum
        self.heads = [list(members[0]) for members in encoder.config.kept_heads]

        forward_names = inspect.signature(encoder.forward).parameters
        not_inputs = ("first_token_only", "members_only", "kwargs")
        self.input_names = [name for name in forward_names if name not in not_inputs]

        pool_names = inspect.signature(encoder.pool).parameters
        self.names_to_pool = [name for name in pool_names if name not in ("hidden_states", "inputs")]

    def remove(self, layer: int, head: int) -> None:
        """Cut a head out for good."""
        heads = [number for number in self.heads[layer] if number != head]
        keep_heads(self.encoder.layers[layer].attention, self.heads[layer], heads)
        self.heads[layer] = heads

    def sweep(self, inputs: Mapping[str, Tensor], candidates: Candidates, memory: int) -> Iterator[Tensor]:
        """Yield features with one head turned off, (candidates, rows, features), in parts and in
        order; the last part, (1, rows, features), is the tower as it is.

        memory: bytes for the states of the candidates that run together
        """
        # The states that enter the first layer, and what all layers take beside them.
        states, mask, layer_kwargs = self.encoder.embed_inputs(**inputs)
        options = dict(layer_kwargs)
        positions = options.pop("positions", ())
        together = self._candidates_together(states, positions, memory)

        # The layers in the order in which they run; a shared layer runs several times.
        numbers = list(self.encoder.layer_order or range(len(self.encoder.layers)))
        layers = [self.encoder.layers[number] for number in numbers]
        states_before = []
        for index, (number, layer) in enumerate(zip(numbers, layers, strict=True)):
            states_before.append(states)
            only_first = self.first_token_only and index == len(layers) - 1

            # The outputs of the layer's heads, which all candidates have in common.
            normed = states
            if layer.norm_first:
                normed = layer.attention_norm(states)
            heads, _ = layer.attention(normed, mask, only_first, *positions, **options)
            residual = states
            if only_first:
                residual = states[:, :, :1]

            # Heads are turned off where their layer runs first, and stay off when it runs again.
            runs_first = number not in numbers[:index]
            candidates_here = []
            if runs_first:
                candidates_here = candidates.get(number, [])
            for part in _even_parts(candidates_here, together):
                # (1, candidates, rows, tokens, width); what candidates have in common has length 1
                without = self._without(heads.unsqueeze(1), number, part)
                ablated = layer.project_and_feed(residual.unsqueeze(1), without).flatten(1, 2)
                with self._turned_off(number, part):
                    features = self._features(
                        layers[index + 1 :], states_before, ablated, mask, layer_kwargs, len(part), inputs
                    )
                yield features

            # The network as it is goes on to the next layer.
            states = layer.project_and_feed(residual, heads)
        yield self._features([], states_before, states, mask, layer_kwargs, 1, inputs)

    def _without(self, heads: Tensor, layer: int, turned_off: Sequence[int]) -> Tensor:
        """Zero the slice of one head for each of `turned_off`.

        (1, candidates or 1, rows, tokens, width) -> (1, candidates, rows, tokens, width)
        """
        head_dim = self.encoder.layers[layer].attention.head_dim
        keep = heads.new_ones(1, len(turned_off), 1, 1, len(self.heads[layer]), head_dim)
        for candidate, head in enumerate(turned_off):
            index = self.heads[layer].index(head)
            keep[:, candidate, ..., index, :] = 0
        return heads * keep.flatten(-2)

    @contextmanager
    def _turned_off(self, layer: int, turned_off: Sequence[int]) -> Iterator[None]:
        """Run the layer for the candidates of `turned_off`, which lie on the batch axis."""

        def turn_off(_: nn.Module, args: tuple[Tensor]) -> Tensor:
            heads = args[0].unflatten(1, (len(turned_off), -1))
            return self._without(heads, layer, turned_off).flatten(1, 2)

        handle = self.encoder.layers[layer].attention.o_proj.register_forward_pre_hook(turn_off)
        try:
            yield
        finally:
            handle.remove()

    def _features(
        self,
        layers: Any,
        states_before: Any,
        states: Tensor,
        mask: Any,
        layer_kwargs: dict,
        candidates: int,
        inputs: Any,
    ) -> Tensor:
        """Run `layers` and read features from the last states.

        (1, candidates * rows, tokens, hidden) -> (candidates, rows, features)

        states_before: the states of the embeddings and of all layers before these, (1, rows,
            tokens, hidden) each
        """
        # What the layers take beside states, for each candidate.
        mask = repeated_mask(mask, candidates)
        options = dict(layer_kwargs)
        positions = options.pop("positions", ())

        # The remaining layers, and the sum of the states of all of them where the head reads that.
        last_norm = nn.Identity()
        if self.encoder.last_norm is not None:
            last_norm = getattr(self.encoder, self.encoder.last_norm)
        if self.weighted_sum is not None:
            all_states = [state.repeat(1, candidates, 1, 1) for state in states_before]
            all_states.append(states)
            for layer in layers:
                contiguous = all_states[-1].contiguous()
                all_states.append(layer(contiguous, mask, False, *positions, **options))
            if self.encoder.last_hidden_state_is_normed:
                all_states[-1] = last_norm(all_states[-1])
            states = self.weighted_sum(all_states)
        else:
            for index, layer in enumerate(layers, start=1):
                only_first = self.first_token_only and index == len(layers)
                states = layer(states.contiguous(), mask, only_first, *positions, **options)
            states = last_norm(states)

        # Pool and read.
        pool_inputs = {}
        for name in self.names_to_pool:
            if name in inputs:
                pool_inputs[name] = repeated_mask(inputs[name], candidates)
        pooled = self.encoder.pool(states, **pool_inputs)
        features = self.read(states, pooled)[0]
        return features.unflatten(0, (candidates, -1))

    def _candidates_together(self, states: Tensor, positions: tuple, memory: int) -> int:
        """Return how many candidates fit in `memory`.

        A token takes its state a few times over and the MLP's inner layer twice; where positions
        have a bias, also a number for each head and token, or distance, a few times.
        """
        config = self.encoder.config
        if getattr(self.encoder, "pools_last_token", False) and config.pad_token_id is None:
            return 1  # without a padding token it reads texts one by one

        numbers_per_token = 6 * config.hidden_size + 2 * config.layer_spec.inner_size
        _, rows, tokens, _ = states.shape
        if self.encoder.layers[0].attention.adds_bias:
            tables = [part for part in positions if isinstance(part, Tensor) and part.dim() == 3]
            distances = sum(table.shape[1] for table in tables)
            numbers_per_token += 3 * config.num_attention_heads * (tokens + distances)
        bytes_per_candidate = numbers_per_token * states.element_size() * rows * tokens
        return max(1, memory // bytes_per_candidate)


def repeated_mask(mask: Any, times: int) -> Any:
    """Tile a mask along the batch; of several masks, by type of layer, each of them."""
    if isinstance(mask, Mapping):
        return {layer_type: repeated_mask(value, times) for layer_type, value in mask.items()}
    if mask is None or times == 1:
        return mask
    other_axes = [1] * (mask.dim() - 1)
    return mask.repeat(times, *other_axes)


def keep_heads(attention: HydraAttention, before: list[int], after: list[int]) -> None:
    """Cut a one-member attention with the heads `before` down to those in `after`, in place."""
    places = [before.index(head) for head in after]

    # The output projection reads a slice of each head.
    output = attention.o_proj
    output_weight = heads_at(output.weight, places, attention.head_dim)
    output.weight = nn.Parameter(output_weight, requires_grad=False)

    # Queries, keys and values are rows of one projection.
    qkv = attention.qkv_proj
    for name, tensor in list(qkv.named_parameters()):
        rows = qkv_rows(tensor, before, after, attention)
        setattr(qkv, name, nn.Parameter(rows, requires_grad=False))

    # Other parts with rows for each head, such as gates and biases of positions.
    for part, rows_per_head in attention.rows_per_head().items():
        module = getattr(attention, part)
        for name, tensor in list(module.named_parameters(recurse=False)):
            rows = heads_at(tensor, places, rows_per_head)
            setattr(module, name, nn.Parameter(rows, requires_grad=False))
        module.set_widths([len(module.weight)])

    attention.set_kept_heads([after])
    qkv.set_widths([qkv.weight.shape[0]])
    output.set_widths([output.weight.shape[0]])


def _even_parts(heads: list[int], most: int) -> list[list[int]]:
    """Cut `heads` into parts of at most `most`, as equal as can be."""
    count = -(-len(heads) // most)  # rounded up
    parts = []
    for part in range(count):
        start = len(heads) * part // count
        end = len(heads) * (part + 1) // count
        parts.append(heads[start:end])
    return parts


class Ablation:
    """Heads of a model's towers turned off one by one.

    towers: by name; the first reads the data
    heads: the candidates
    """

    def __init__(self, towers: Mapping[str, Tower], heads: list[Head], num_classes: int, memory: int):
        self.towers = towers
        self.heads = heads
        self.num_classes = num_classes
        self.memory = memory
        first_tower = next(iter(towers.values()))
        self.input_names = first_tower.input_names

    def remove(self, head: Head) -> None:
        """Cut a head out for good."""
        tower, layer, number = tower_and_place(head)
        self.towers[tower].remove(layer, number)
        self.heads = [candidate for candidate in self.heads if candidate != head]

    def over(self, candidates: Sequence[Head]) -> Ablate:
        """Return a function from a batch's inputs to the logits with each of `candidates`, in
        order, turned off.
        """
        by_tower: dict[str, dict[int, list[int]]] = {tower: {} for tower in self.towers}
        for candidate in candidates:
            tower, layer, head = tower_and_place(candidate)
            by_tower[tower].setdefault(layer, []).append(head)
        return self._over(by_tower)

    def _over(self, candidates: Mapping[str, Candidates]) -> Ablate:
        raise NotImplementedError


class ClassifierAblation(Ablation):
    """Heads of a classifier turned off one by one."""

    def __init__(self, model: PreTrainedModel, memory: int):
        weighted_sum = None
        if model.reads_all_layers:
            weighted_sum = model.weighted_sum
        tower = Tower(model.base_model, model.prepare, model.reads_first_token, weighted_sum)
        super().__init__({"": tower}, heads_of(model), model.config.num_labels, memory)
        self.classify = model.get_submodule(model.last_map)

    def _over(self, candidates: Mapping[str, Candidates]) -> Ablate:
        def ablate(inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
            for features in self.towers[""].sweep(inputs, candidates[""], self.memory):
                # All candidates pass the classifier as one batch.
                logits = self.classify(features.flatten(0, 1).unsqueeze(0))[0]
                yield logits.unflatten(0, features.shape[:2])

        return ablate


class ZeroShotAblation(Ablation):
    """Heads of two towers turned off one by one, in zero-shot classification with fixed prompts.

    Candidates of the vision tower share the prompts' features. Those of the text tower share the
    images' features, and are computed once for all batches.
    """

    def __init__(self, model: PreTrainedModel, memory: int, class_prompts: Prompts, chosen: Towers | None):
        def unit_features(projection: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
            return lambda _, pooled: nn.functional.normalize(projection(pooled), dim=-1)

        vision = Tower(model.vision_model, unit_features(model.visual_projection), model.reads_first_token)
        text = Tower(model.text_model, unit_features(model.text_projection), first_token_only=False)
        towers = {"vision": vision, "text": text}
        super().__init__(towers, heads_of(model, chosen), len(class_prompts["input_ids"]), memory)
        self.model = model
        self.prompts = {}
        for name, value in class_prompts.items():
            if name in text.input_names:
                self.prompts[name] = value.to(model.device)

    def _over(self, candidates: Mapping[str, Candidates]) -> Ablate:
        *ablated_prompts, prompts = self._text_features(candidates["text"])

        def ablate(inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
            *ablated_images, images = self.towers["vision"].sweep(inputs, candidates["vision"], self.memory)
            for features in ablated_images:
                yield self._logits(features, prompts)
            for texts in (*ablated_prompts, prompts):
                yield self._logits(images, texts)

        return ablate

    def _text_features(self, candidates: Candidates) -> Iterator[Tensor]:
        """Yield the features of `Tower.sweep` for all prompts: (candidates, classes, features)."""
        parts = []
        for start in range(0, self.num_classes, PROMPTS_PER_PASS):
            end = start + PROMPTS_PER_PASS
            parts.append({name: value[start:end] for name, value in self.prompts.items()})

        # With several parts one candidate at a time, so that all parts group the candidates alike.
        memory = self.memory
        if len(parts) > 1:
            memory = 0
        sweeps = [self.towers["text"].sweep(part, candidates, memory) for part in parts]
        for features in zip(*sweeps, strict=True):
            yield torch.cat(features, dim=1)

    def _logits(self, images: Tensor, prompts: Tensor) -> Tensor:
        """Compare images with prompts.

        (candidates or 1, batch, features), (candidates or 1, classes, features)
        -> (candidates, batch, classes)
        """
        cosines = images @ prompts.transpose(1, 2)
        return logits_of_cosines(self.model, cosines)


def ablation_of(
    model: PreTrainedModel, class_prompts: Prompts | None = None, towers: Towers | None = None, memory: int = GIB
) -> Ablation:
    """Return the engine for a one-member Hydra.

    model: the engine changes it, so pass a copy
    class_prompts: the tokenizer's output with one row per class, for CLIP and SigLIP
    towers: the towers of CLIP whose heads are candidates
    memory: bytes for the states of the candidates that run together
    """
    chosen_towers(model, towers)
    for config in tower_configs(model.config).values():
        config._attn_implementation = "sdpa"  # whose masks can be repeated
    if has_two_towers(model):
        check_class_prompts(class_prompts, model)
        return ZeroShotAblation(model, memory, class_prompts, towers)
    if class_prompts is not None:
        raise ValueError(f"class_prompts is for CLIP and SigLIP, model is a {type(model).__name__}: leave it out")
    if not hasattr(model, "last_map"):
        raise TypeError(f"{type(model).__name__} has no classifier: pass the model with its classification head")
    return ClassifierAblation(model, memory)
