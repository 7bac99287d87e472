"""The ablation engine: the logits of a network with one head turned off, for many heads at once.

A head of layer l changes nothing before l. So for a batch the states entering layer l are computed once, and so are the
outputs of its heads; every candidate head of the layer is then these outputs with its slice zeroed, and all candidates go
through the rest of the network together, on the batch axis. The last layer is computed for the first token alone where
the classifier reads no other. Heads that were removed for good are cut out of the engine's own weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from ..models.attention import mask_of_first_token
from ..models.fusion import tower_configs
from ..models.grouped import embed
from ..models.kernels import add_and_layer_norm, layer_norm
from ..prediction import check_class_prompts
from .heads import Head, chosen_towers, heads_of, tower_and_place


# (heads turned off, logits (heads, batch, classes)); at last ([], logits (1, batch, classes)) of the network as it is.
Ablated = tuple[list[Head], Tensor]

PROMPTS_PER_PASS = 256
GIB = 2**30


class Block:
    """A transformer layer, with the projections of the heads that are left packed into one product."""

    def __init__(self, layer: nn.Module, heads: Sequence[int]):
        attention = layer.attention
        self.heads = list(heads)
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        by_head = (3, len(heads), self.head_dim)
        self.qkv_weight = torch.cat([projection.weight for projection in projections]).unflatten(0, by_head)
        has_bias = attention.q_proj.bias is not None
        biases = [projection.bias for projection in projections]
        self.qkv_bias = torch.cat(biases).unflatten(0, by_head) if has_bias else None
        self.o_weight = attention.o_proj.weight.t().unflatten(1, by_head[1:])
        self.o_bias = attention.o_proj.bias[0]
        self.mlp = layer.mlp
        self.is_pre_norm = layer.is_pre_norm
        self.layernorms = tuple(getattr(layer, name) for name in layer.norms)
        self._pack()

    def _pack(self) -> None:
        self.width = len(self.heads) * self.head_dim
        self.packed_qkv = self.qkv_weight.flatten(0, 2).contiguous()
        self.packed_qkv_bias = None if self.qkv_bias is None else self.qkv_bias.flatten().contiguous()
        self.packed_o = self.o_weight.flatten(1).contiguous()

    def remove(self, head: int) -> None:
        """Cuts a head out for good."""
        left = [place for place, name in enumerate(self.heads) if name != head]
        self.heads = [self.heads[place] for place in left]
        index = torch.tensor(left, dtype=torch.long, device=self.o_weight.device)
        self.qkv_weight = self.qkv_weight.index_select(1, index)
        self.qkv_bias = None if self.qkv_bias is None else self.qkv_bias.index_select(1, index)
        self.o_weight = self.o_weight.index_select(1, index)
        self._pack()

    def head_outputs(self, states: Tensor, mask: Tensor | None, is_causal: bool, first_token_only: bool) -> Tensor:
        """What the output projection reads: (rows, tokens, hidden) -> (rows, tokens or 1, heads * head_dim)"""
        rows, tokens = states.shape[:2]
        if not self.heads:
            return states.new_zeros(rows, 1 if first_token_only else tokens, 0)
        normed = layer_norm(self.layernorms[0], states) if self.is_pre_norm else states
        if first_token_only:
            queries = self._project(normed[:, :1], slice(0, self.width))
            keys, values = self._project(normed, slice(self.width, None)).chunk(2, dim=-1)
            mask = mask_of_first_token(mask)
        else:
            queries, keys, values = self._project(normed, slice(None)).chunk(3, dim=-1)
        outputs = nn.functional.scaled_dot_product_attention(
            self._split_heads(queries),
            self._split_heads(keys),
            self._split_heads(values),
            attn_mask=mask,
            is_causal=is_causal and mask is None,
            scale=self.scaling,
        )
        return outputs.transpose(1, 2).flatten(2)

    def _project(self, states: Tensor, rows: slice) -> Tensor:
        bias = None if self.packed_qkv_bias is None else self.packed_qkv_bias[rows]
        return nn.functional.linear(states, self.packed_qkv[rows], bias)

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (len(self.heads), self.head_dim)).transpose(1, 2)

    def without(self, outputs: Tensor, heads: Sequence[int]) -> Tensor:
        """`outputs` with one head's slice zeroed, for each of `heads`: (rows, tokens, width) -> (heads, rows, tokens, width)"""
        keep = outputs.new_ones(len(heads), 1, 1, len(self.heads), self.head_dim)
        for candidate, head in enumerate(heads):
            keep[candidate, ..., self.heads.index(head), :] = 0
        return outputs * keep.flatten(-2)

    def complete(self, states: Tensor, outputs: Tensor, first_token_only: bool) -> Tensor:
        """The layer after its heads: (..., tokens, hidden), from states that may lack the leading axis of `outputs`."""
        if first_token_only:
            states = states[..., :1, :]
        attention = nn.functional.linear(outputs, self.packed_o, self.o_bias)
        if self.is_pre_norm:
            states, normed = add_and_layer_norm(self.layernorms[1], states, attention)
            return self.mlp(normed).add_(states)
        _, states = add_and_layer_norm(self.layernorms[0], states, attention)
        return add_and_layer_norm(self.layernorms[1], states, self.mlp(states))[1]


class Tower:
    """One encoder: embeddings, blocks, and what is read from the last states. A family says how it starts and ends."""

    input_names: tuple[str, ...] = ()
    is_causal = False
    reads_first_token = True

    def __init__(self, encoder: nn.Module):
        self.encoder = encoder
        self.blocks = [
            Block(layer, members[0]) for layer, members in zip(encoder.layers, encoder.config.kept_heads, strict=True)
        ]

    def start(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The states entering the first layer (rows, tokens, hidden) and the attention mask."""
        raise NotImplementedError

    def read(self, states: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Features from the last states: (candidates, rows, tokens or 1, hidden) -> (candidates, rows, features)"""
        raise NotImplementedError

    def sweep(
        self, inputs: Mapping[str, Tensor], candidates: Mapping[int, list[int]], memory: int
    ) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
        """Features with one head turned off: ([(layer, head), ...], (candidates, rows, features)), in order.

        candidates: the heads to turn off, by layer
        memory: bytes that the states of the candidates that run together may take
        At last comes ([], (1, rows, features)) of the tower as it is.
        """
        states, mask = self.start(inputs)
        together = self._candidates_together(states, memory)
        for layer, block in enumerate(self.blocks):
            first_token_only = self._is_short(layer)
            outputs = block.head_outputs(states, mask, self.is_causal, first_token_only)
            for part in _even_parts(candidates.get(layer, []), together):
                ablated = block.complete(states, block.without(outputs, part), first_token_only)
                yield [(layer, head) for head in part], self._finish(ablated, mask, layer + 1, inputs)
            states = block.complete(states, outputs, first_token_only)
        yield [], self.read(states.unsqueeze(0), inputs)

    def _finish(self, states: Tensor, mask: Tensor | None, layer: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """(candidates, rows, tokens, hidden), entering `layer` -> (candidates, rows, features)"""
        candidates, rows = states.shape[:2]
        states = states.flatten(0, 1)
        if mask is not None:
            mask = mask.repeat(candidates, 1, 1, 1)
        for block, first_token_only in ((self.blocks[k], self._is_short(k)) for k in range(layer, len(self.blocks))):
            outputs = block.head_outputs(states, mask, self.is_causal, first_token_only)
            states = block.complete(states, outputs, first_token_only)
        return self.read(states.unflatten(0, (candidates, rows)), inputs)

    def _is_short(self, layer: int) -> bool:
        return self.reads_first_token and layer == len(self.blocks) - 1

    def _candidates_together(self, states: Tensor, memory: int) -> int:
        """How many candidates fit in `memory`; a token holds its state a few times over and the MLP's inner layer twice."""
        config = self.encoder.config
        per_token = (6 * config.hidden_size + 2 * config.intermediate_size) * states.element_size()
        return max(1, memory // (per_token * states.shape[0] * states.shape[1]))


def _even_parts(heads: list[int], most: int) -> list[list[int]]:
    """`heads` in parts of at most `most`, as equal as can be."""
    count = -(-len(heads) // most)
    return [heads[len(heads) * part // count : len(heads) * (part + 1) // count] for part in range(count)]


class ViTTower(Tower):
    input_names = ("pixel_values",)

    def start(self, inputs):
        return embed(self.encoder.embeddings, inputs["pixel_values"])[0], None

    def read(self, states, inputs):
        return self.encoder.layernorm(states[:, :, 0])


class BertTower(Tower):
    input_names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")

    def start(self, inputs):
        names = ("input_ids", "token_type_ids", "position_ids")
        states = embed(self.encoder.embeddings, **{name: inputs.get(name) for name in names})[0]
        mask = create_bidirectional_mask(
            config=self.encoder.config, inputs_embeds=states, attention_mask=inputs.get("attention_mask")
        )
        return states, mask

    def read(self, states, inputs):
        dense = self.encoder.pooler.dense
        pooled = nn.functional.linear(states[:, :, 0], dense.weight, dense.bias)
        return self.encoder.pooler.activation(pooled)


class CLIPVisionTower(Tower):
    input_names = ("pixel_values",)

    def __init__(self, encoder: nn.Module, projection: nn.Module):
        super().__init__(encoder)
        self.projection = projection

    def start(self, inputs):
        return self.encoder.pre_layernorm(embed(self.encoder.embeddings, inputs["pixel_values"])[0]), None

    def read(self, states, inputs):
        pooled = self.encoder.post_layernorm(states[:, :, 0])
        return _normalized(nn.functional.linear(pooled, self.projection.weight))


class CLIPTextTower(Tower):
    input_names = ("input_ids", "attention_mask", "position_ids")
    is_causal = True
    reads_first_token = False

    def __init__(self, encoder: nn.Module, projection: nn.Module):
        super().__init__(encoder)
        self.projection = projection

    def start(self, inputs):
        position_ids = inputs.get("position_ids")
        states = embed(self.encoder.embeddings, input_ids=inputs["input_ids"], position_ids=position_ids)[0]
        mask = create_causal_mask(
            config=self.encoder.config,
            inputs_embeds=states,
            attention_mask=inputs.get("attention_mask"),
            past_key_values=None,
        )
        return states, mask

    def read(self, states, inputs):
        rows = torch.arange(states.shape[1], device=states.device)
        pooled = self.encoder.final_layer_norm(states[:, rows, self.encoder._end_of_text(inputs["input_ids"])])
        return _normalized(nn.functional.linear(pooled, self.projection.weight))


def _normalized(features: Tensor) -> Tensor:
    return nn.functional.normalize(features, dim=-1)


CLASSIFIER_TOWERS = {"hydra_vit": ViTTower, "hydra_bert": BertTower}


class ClassifierAblation:
    """Heads of an image or text classifier turned off one by one."""

    def __init__(self, model: PreTrainedModel, memory: int):
        self.tower = CLASSIFIER_TOWERS[model.config.model_type](model.base_model)
        self.classifier = model.classifier
        self.num_classes = model.config.num_labels
        self.memory = memory
        self.input_names = self.tower.input_names
        self.heads = heads_of(model)

    def remove(self, head: Head) -> None:
        """Cuts a head out for good."""
        self.tower.blocks[head[0]].remove(head[1])
        self.heads = [left for left in self.heads if left != head]

    def over(self, candidates: Sequence[Head]) -> Callable[[Mapping[str, Tensor]], Iterator[Ablated]]:
        """A function from a batch's inputs to the logits with each of `candidates` (in order) turned off."""
        by_layer = _by_layer(candidates)[""]

        def ablate(inputs: Mapping[str, Tensor]) -> Iterator[Ablated]:
            for heads, features in self.tower.sweep(inputs, by_layer, self.memory):
                yield heads, nn.functional.linear(features, self.classifier.weight, self.classifier.bias)

        return ablate


class ZeroShotAblation:
    """Heads of CLIP's towers turned off one by one, in zero-shot classification with fixed class prompts.

    Candidates of the vision tower share the prompts' features; those of the text tower, which need no image to be
    computed, share the images'.
    """

    input_names = ("pixel_values",)

    def __init__(
        self, model: PreTrainedModel, memory: int, class_prompts: Mapping[str, Tensor], towers: Sequence[str]
    ):
        self.vision = CLIPVisionTower(model.vision_model, model.visual_projection)
        self.text = CLIPTextTower(model.text_model, model.text_projection)
        self.logit_scale = model.logit_scale.exp()
        self.num_classes = len(class_prompts["input_ids"])
        self.memory = memory
        self.prompts = {
            name: value.to(model.device) for name, value in class_prompts.items() if name in self.text.input_names
        }
        self.heads = heads_of(model, towers)

    def remove(self, head: Head) -> None:
        """Cuts a head out for good."""
        tower, layer, number = head
        (self.vision if tower == "vision" else self.text).blocks[layer].remove(number)
        self.heads = [left for left in self.heads if left != head]

    def over(self, candidates: Sequence[Head]) -> Callable[[Mapping[str, Tensor]], Iterator[Ablated]]:
        """A function from a batch's images to the logits with each of `candidates` (in order) turned off."""
        by_layer = _by_layer(candidates)
        texts = list(self._text_features(by_layer["text"]))
        prompts = texts[-1][1]

        def ablate(inputs: Mapping[str, Tensor]) -> Iterator[Ablated]:
            for heads, images in self.vision.sweep(inputs, by_layer["vision"], self.memory):
                if heads:
                    yield [("vision", *head) for head in heads], self._logits(images, prompts)
            for heads, ablated_prompts in texts[:-1]:
                yield [("text", *head) for head in heads], self._logits(images, ablated_prompts)
            yield [], self._logits(images, prompts)

        return ablate

    def _text_features(self, candidates: Mapping[int, list[int]]) -> Iterator[tuple[list, Tensor]]:
        """Like `Tower.sweep`, with the prompts taken a part at a time: (candidates, classes, features)."""
        parts = [
            {name: value[start : start + PROMPTS_PER_PASS] for name, value in self.prompts.items()}
            for start in range(0, self.num_classes, PROMPTS_PER_PASS)
        ]
        # One candidate at a time where there are several parts, so that the parts agree on who runs together.
        memory = self.memory if len(parts) == 1 else 0
        for swept in zip(*(self.text.sweep(part, candidates, memory) for part in parts), strict=True):
            yield swept[0][0], torch.cat([features for _, features in swept], dim=1)

    def _logits(self, images: Tensor, prompts: Tensor) -> Tensor:
        """(candidates or 1, batch, features), (candidates or 1, classes, features) -> (candidates, batch, classes)"""
        return images @ prompts.transpose(1, 2) * self.logit_scale


def _by_layer(candidates: Sequence[Head]) -> dict[str, dict[int, list[int]]]:
    by_layer: dict[str, dict[int, list[int]]] = {"": {}, "vision": {}, "text": {}}
    for tower, layer, head in map(tower_and_place, candidates):
        by_layer[tower].setdefault(layer, []).append(head)
    return by_layer


def ablation_of(
    model: PreTrainedModel,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    memory: int = GIB,
) -> ClassifierAblation | ZeroShotAblation:
    """The engine for a one-member Hydra.

    model: the engine's own copy, with the weights it runs on and with its attention backend
    class_prompts: the tokenizer's output with one row per class, for CLIP
    towers: the towers of CLIP whose heads are candidates
    memory: bytes that the states of the candidates that run together may take
    """
    chosen_towers(model, towers)
    for config in tower_configs(model.config).values():
        config._attn_implementation = "sdpa"  # the form in which the masks are made
    if model.config.model_type == "hydra_clip":
        check_class_prompts(class_prompts)
        return ZeroShotAblation(model, memory, class_prompts, towers)
    if class_prompts is not None:
        raise ValueError(f"class_prompts is for CLIP, model is a {type(model).__name__}: leave it out")
    if not hasattr(model, "classifier"):
        raise TypeError(f"{type(model).__name__} has no classifier: pass the model with its classification head")
    return ClassifierAblation(model, memory)
