"""The ablation engine: the logits of a network with one head turned off, for many heads at once.

A head of layer l changes nothing before l. So for each batch the states entering layer l, and the outputs of its heads, are
computed once; a candidate is these outputs with its slice zeroed, and all candidates of the layer pass the rest of the network
together, on the batch axis, where the head stays off if the layer runs again. The last layer computes the first token alone
where the classifier reads no other. Removed heads are cut out of the engine's own copy of the model.
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
from ..fusion.structure import tower_configs
from ..models.modeling_hydra import HydraAttention
from .heads import Head, Prompts, Towers, chosen_towers, has_two_towers, heads_of, tower_and_place


# From a batch's inputs to logits (candidates, batch, classes), in parts and in the order of the candidates; the last part,
# (1, batch, classes), is the network as it is.
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
        read: from the encoder's last states (1, batch, tokens or 1, hidden) and its pooled output to (1, batch, features)
        first_token_only: whether `read` and the pooling use only the first token of the last layer
        weighted_sum: what is read in place of the last states, from those of the embeddings and of all layers, where a head
            reads them all
        """
        self.encoder, self.read, self.first_token_only = encoder, read, first_token_only
        self.weighted_sum = weighted_sum
        self.heads = [list(members[0]) for members in encoder.config.kept_heads]
        names = inspect.signature(encoder.forward).parameters
        self.input_names = [name for name in names if name not in ("first_token_only", "members_only", "kwargs")]
        names = inspect.signature(encoder.pool).parameters
        self.names_to_pool = [name for name in names if name not in ("hidden_states", "inputs")]

    def remove(self, layer: int, head: int) -> None:
        """Cuts a head out for good."""
        heads = [number for number in self.heads[layer] if number != head]
        keep_heads(self.encoder.layers[layer].attention, self.heads[layer], heads)
        self.heads[layer] = heads

    def sweep(self, inputs: Mapping[str, Tensor], candidates: Candidates, memory: int) -> Iterator[Tensor]:
        """Features with one head turned off, (candidates, rows, features), in parts and in order; the last part, (1, rows,
        features), is the tower as it is.

        memory: bytes for the states of the candidates that run together
        """
        states, mask, layer_kwargs = self.encoder.embed_inputs(**inputs)
        options = dict(layer_kwargs)
        positions = options.pop("positions", ())
        together = self._candidates_together(states, positions, memory)
        numbers = list(self.encoder.layer_order or range(len(self.encoder.layers)))
        layers = [self.encoder.layers[number] for number in numbers]
        before = []
        for place, (number, layer) in enumerate(zip(numbers, layers, strict=True)):
            runs_first = number not in numbers[:place]
            before.append(states)
            only_first = self.first_token_only and place == len(layers) - 1
            normed = layer.attention_norm(states) if layer.norm_first else states
            heads, _ = layer.attention(normed, mask, only_first, *positions, **options)
            residual = states[:, :, :1] if only_first else states
            for part in _even_parts(candidates.get(number, []) if runs_first else [], together):
                # (1, candidates, rows, tokens, width); what candidates have in common is not repeated
                without = self._without(heads.unsqueeze(1), number, part)
                ablated = layer.project_and_feed(residual.unsqueeze(1), without).flatten(1, 2)
                with self._turned_off(number, part):  # it may run again
                    features = self._features(
                        layers[place + 1 :], before, ablated, mask, layer_kwargs, len(part), inputs
                    )
                yield features
            states = layer.project_and_feed(residual, heads)
        yield self._features([], before, states, mask, layer_kwargs, 1, inputs)

    def _without(self, heads: Tensor, layer: int, turned_off: Sequence[int]) -> Tensor:
        """Zeroes the slice of one head for each of `turned_off`: (1, candidates or 1, rows, tokens, width) -> (1, candidates, rows,
        tokens, width)"""
        head_dim = self.encoder.layers[layer].attention.head_dim
        keep = heads.new_ones(1, len(turned_off), 1, 1, len(self.heads[layer]), head_dim)
        for candidate, head in enumerate(turned_off):
            keep[:, candidate, ..., self.heads[layer].index(head), :] = 0
        return heads * keep.flatten(-2)

    @contextmanager
    def _turned_off(self, layer: int, turned_off: Sequence[int]) -> Iterator[None]:
        """Inside, the layer runs for the candidates of `turned_off`, which lie on the batch axis."""

        def turn_off(_: nn.Module, given: tuple[Tensor]) -> Tensor:
            heads = given[0].unflatten(1, (len(turned_off), -1))
            return self._without(heads, layer, turned_off).flatten(1, 2)

        handle = self.encoder.layers[layer].attention.o_proj.register_forward_pre_hook(turn_off)
        try:
            yield
        finally:
            handle.remove()

    def _features(
        self, layers: Any, before: Any, states: Tensor, mask: Any, layer_kwargs: dict, candidates: int, inputs: Any
    ) -> Tensor:
        """(1, candidates * rows, tokens, hidden), through `layers` -> (candidates, rows, features)

        before: the states of the embeddings and of all layers before these, (1, rows, tokens, hidden) each
        """
        mask, options = repeated_mask(mask, candidates), dict(layer_kwargs)
        positions = options.pop("positions", ())
        norm = nn.Identity() if self.encoder.last_norm is None else getattr(self.encoder, self.encoder.last_norm)
        if self.weighted_sum is not None:
            all_states = [state.repeat(1, candidates, 1, 1) for state in before] + [states]
            for layer in layers:
                all_states.append(layer(all_states[-1].contiguous(), mask, False, *positions, **options))
            if self.encoder.last_hidden_state_is_normed:
                all_states[-1] = norm(all_states[-1])
            states = self.weighted_sum(all_states)
        else:
            for index, layer in enumerate(layers, start=1):
                only_first = self.first_token_only and index == len(layers)
                states = layer(states.contiguous(), mask, only_first, *positions, **options)
            states = norm(states)
        to_pool = {name: repeated_mask(inputs[name], candidates) for name in self.names_to_pool if name in inputs}
        return self.read(states, self.encoder.pool(states, **to_pool))[0].unflatten(0, (candidates, -1))

    def _candidates_together(self, states: Tensor, positions: tuple, memory: int) -> int:
        """How many candidates fit in `memory`: a token takes its state a few times over and the MLP's inner layer twice, and
        where positions have a bias a number for each head and token, or distance, a few times."""
        config = self.encoder.config
        if getattr(self.encoder, "pools_last_token", False) and config.pad_token_id is None:
            return 1  # without a padding token it reads texts one by one
        numbers = 6 * config.hidden_size + 2 * config.layer_spec.inner_size
        if self.encoder.layers[0].attention.adds_bias:
            distances = sum(part.shape[1] for part in positions if isinstance(part, Tensor) and part.dim() == 3)
            numbers += 3 * config.num_attention_heads * (states.shape[2] + distances)
        return max(1, memory // (numbers * states.element_size() * states.shape[1] * states.shape[2]))


def repeated_mask(mask: Any, times: int) -> Any:
    """Tiles a mask along the batch; of several, by type of layers, each of them."""
    if isinstance(mask, Mapping):
        return {layer_type: repeated_mask(value, times) for layer_type, value in mask.items()}
    return mask if mask is None or times == 1 else mask.repeat(times, *[1] * (mask.dim() - 1))


def keep_heads(attention: HydraAttention, before: list[int], after: list[int]) -> None:
    """Cuts a one-member attention with the heads `before` down to those in `after`, in place."""
    qkv, output = attention.qkv_proj, attention.o_proj
    places = [before.index(head) for head in after]
    output.weight = nn.Parameter(heads_at(output.weight, places, attention.head_dim), requires_grad=False)
    for name, tensor in list(qkv.named_parameters()):
        setattr(qkv, name, nn.Parameter(qkv_rows(tensor, before, after, attention), requires_grad=False))
    for part, rows in attention.rows_per_head().items():
        module = getattr(attention, part)
        for name, tensor in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(heads_at(tensor, places, rows), requires_grad=False))
        module.set_widths([len(module.weight)])
    attention.set_kept_heads([after])
    qkv.set_widths([qkv.weight.shape[0]])
    output.set_widths([output.weight.shape[0]])


def _even_parts(heads: list[int], most: int) -> list[list[int]]:
    """`heads` in parts of at most `most`, as equal as can be."""
    count = -(-len(heads) // most)
    return [heads[len(heads) * part // count : len(heads) * (part + 1) // count] for part in range(count)]


class Ablation:
    """Heads of a model's towers turned off one by one.

    towers: by name; the first reads the data
    heads: the candidates
    """

    def __init__(self, towers: Mapping[str, Tower], heads: list[Head], num_classes: int, memory: int):
        self.towers, self.heads, self.num_classes, self.memory = towers, heads, num_classes, memory
        self.input_names = next(iter(towers.values())).input_names

    def remove(self, head: Head) -> None:
        """Cuts a head out for good."""
        tower, layer, number = tower_and_place(head)
        self.towers[tower].remove(layer, number)
        self.heads = [candidate for candidate in self.heads if candidate != head]

    def over(self, candidates: Sequence[Head]) -> Ablate:
        """A function from a batch's inputs to the logits with each of `candidates` (in order) turned off."""
        by_tower: dict[str, dict[int, list[int]]] = {tower: {} for tower in self.towers}
        for tower, layer, head in map(tower_and_place, candidates):
            by_tower[tower].setdefault(layer, []).append(head)
        return self._over(by_tower)

    def _over(self, candidates: Mapping[str, Candidates]) -> Ablate:
        raise NotImplementedError


class ClassifierAblation(Ablation):
    """Heads of a classifier turned off one by one."""

    def __init__(self, model: PreTrainedModel, memory: int):
        weighted_sum = model.weighted_sum if model.reads_all_layers else None
        tower = Tower(model.base_model, model.prepare, model.reads_first_token, weighted_sum)
        super().__init__({"": tower}, heads_of(model), model.config.num_labels, memory)
        self.classify = model.get_submodule(model.last_map)

    def _over(self, candidates: Mapping[str, Candidates]) -> Ablate:
        def ablate(inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
            for features in self.towers[""].sweep(inputs, candidates[""], self.memory):
                yield self.classify(features.flatten(0, 1).unsqueeze(0))[0].unflatten(0, features.shape[:2])

        return ablate


class ZeroShotAblation(Ablation):
    """Heads of two towers turned off one by one, in zero-shot classification with fixed class prompts.

    Candidates of the vision tower share the prompts' features. Those of the text tower share the images' features, and are
    computed once for all batches.
    """

    def __init__(self, model: PreTrainedModel, memory: int, class_prompts: Prompts, chosen: Towers | None):
        def features(projection: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
            return lambda _, pooled: nn.functional.normalize(projection(pooled), dim=-1)

        towers = {
            "vision": Tower(model.vision_model, features(model.visual_projection), model.reads_first_token),
            "text": Tower(model.text_model, features(model.text_projection), first_token_only=False),
        }
        super().__init__(towers, heads_of(model, chosen), len(class_prompts["input_ids"]), memory)
        self.model = model
        names = towers["text"].input_names
        self.prompts = {name: value.to(model.device) for name, value in class_prompts.items() if name in names}

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
        """The features of `Tower.sweep` for all prompts: (candidates, classes, features)."""
        parts = [
            {name: value[start : start + PROMPTS_PER_PASS] for name, value in self.prompts.items()}
            for start in range(0, self.num_classes, PROMPTS_PER_PASS)
        ]
        # With several parts one candidate at a time, so that all parts group the candidates alike.
        memory = self.memory if len(parts) == 1 else 0
        for features in zip(*(self.towers["text"].sweep(part, candidates, memory) for part in parts), strict=True):
            yield torch.cat(features, dim=1)

    def _logits(self, images: Tensor, prompts: Tensor) -> Tensor:
        """(candidates or 1, batch, features), (candidates or 1, classes, features) -> (candidates, batch, classes)"""
        return logits_of_cosines(self.model, images @ prompts.transpose(1, 2))


def ablation_of(
    model: PreTrainedModel, class_prompts: Prompts | None = None, towers: Towers | None = None, memory: int = GIB
) -> Ablation:
    """The engine for a one-member Hydra.

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
