"""HydraDebertaV2: M head-pruned DeBERTa encoders, of version 2 or 3, as one network.

Each head compares tokens with each other, and tokens with the distances between them. The distances
have embeddings, one table for all layers. With its LayerNorm the table counts as embeddings:
members that share these share the mean of their tables, others keep their own. The maps from the
table to the queries and keys of a head go with that head.
"""

import math
from functools import reduce

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Embeddings, DebertaV2PreTrainedModel

from .configuration_hydra_deberta_v2 import HydraDebertaV2Config
from .ensembling import is_exporting
from .modeling_hydra import GroupedLinear, GroupedPooler, Layout, Norm, encoder_mask, shared_or_per_member
from .pretrained import HydraModelMixin
from .relative_attention import HydraBiasAttention
from .texts import HydraTypedTextClassifierMixin, HydraTypedTextEncoderMixin
from .tokens import HydraTypedTokenClassifierMixin


# By term, the map from embeddings of distances to what it compares tokens with.
POSITION_MAPS = {"c2p": "position_key_proj", "p2c": "position_query_proj"}


class HydraDebertaV2PreTrainedModel(HydraModelMixin, DebertaV2PreTrainedModel):
    config_class = HydraDebertaV2Config
    base_model_prefix = "deberta"
    architecture = "DeBERTa"
    _no_split_modules = ["DebertaV2Embeddings", "HydraLayer"]
    _supports_sdpa = True


class DistanceEmbeddings(nn.Embedding):
    """The embeddings of distances between tokens, normed in DeBERTa-v3; weight (distances to both
    sides, hidden)."""

    def __init__(self, config: HydraDebertaV2Config):
        super().__init__(2 * config.distances_to_each_side, config.hidden_size)
        self.LayerNorm = None
        if "layer_norm" in config.norm_rel_ebd.lower():
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self) -> torch.Tensor:
        if self.LayerNorm is None:
            return self.weight
        return self.LayerNorm(self.weight)


def numbers_of_distances(tokens: int, config: HydraDebertaV2Config, device: torch.device) -> torch.Tensor:
    """Return the row of the table of distances for each query and key, (tokens, tokens).

    With buckets, the nearer half of the distances has a row each, and far ones share rows in steps
    of their logarithm.
    """
    positions = torch.arange(tokens, device=device)
    distances = positions[:, None] - positions[None, :]
    if config.position_buckets > 0:
        near = config.position_buckets // 2
        # In torch as DeBERTa does it: rounded otherwise, some distances would get their neighbour's
        # row.
        longest = torch.tensor((config.longest_distance - 1) / near, device=device)
        steps = (distances.abs() / near).log() / longest.log() * (near - 1)
        far = (steps.ceil() + near) * distances.sign()
        distances = torch.where(distances.abs() <= near, distances, far).long()
    reach = config.distances_to_each_side
    return (distances + reach).clamp(0, 2 * reach - 1)


def rows_of_distances(tokens: int, config: HydraDebertaV2Config) -> slice:
    """Return the rows of the table that a text with so many tokens may read; DeBERTa itself
    computes with all of them."""
    reach = config.distances_to_each_side
    far = tokens - 1
    if config.position_buckets > 0:
        near = config.position_buckets // 2
        if far > near:
            steps = math.log(far / near) / math.log((config.longest_distance - 1) / near) * (near - 1)
            far = math.ceil(steps) + near + 1  # one more, as this is rounded otherwise than in torch
    return slice(max(0, reach - far), reach + far + 1)


class HydraDebertaV2Attention(HydraBiasAttention):
    """Queries are compared with the keys of distances, and keys with the queries of distances
    (`config.terms`).

    positions: which tokens are not padding, (batch, tokens), or None; the embeddings of distances,
        (members or 1, distances, hidden), and the number of the distance between each query and
        key, (tokens, tokens), where there are terms
    """

    def __init__(self, config: HydraDebertaV2Config, layer: int, norm: Norm):
        super().__init__(config, layer, norm)
        # Each term adds to the scores' variance. The root is that of a float32, whatever the
        # model's dtype.
        variance = torch.tensor((1 + len(config.terms)) * self.head_dim, device="cpu")
        self.scaling = 1 / variance.float().sqrt().item()
        self.terms = ()
        if config.relative_attention:
            self.terms = config.terms
        self.position_dropout = config.hidden_dropout_prob
        if not config.share_att_key:  # otherwise distances pass the maps of the tokens
            for term in self.terms:
                setattr(self, POSITION_MAPS[term], GroupedLinear(config.hidden_size, self.widths))

    def rows_per_head(self) -> dict[str, int]:
        return {name: self.head_dim for name in POSITION_MAPS.values() if hasattr(self, name)}

    def place(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        is_text=None,
        *positions,
    ) -> tuple[torch.Tensor, ...]:
        return self.without_padding(query, is_text), key, value

    def without_padding(self, states: torch.Tensor, is_text: torch.Tensor | None) -> torch.Tensor:
        """Return queries or scores (rows, heads, query tokens, ...) with zeros for padding, which
        sees all tokens alike, whatever they are; rows are a multiple of the batch."""
        if is_text is None:
            return states
        is_padding = ~is_text[:, None, : states.shape[2], None]
        if not is_exporting() and len(is_padding) != len(states):  # no size may decide on an exported graph
            is_padding = is_padding.repeat(len(states) // len(is_padding), 1, 1, 1)
        return states.masked_fill(is_padding, 0)

    def bias(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, is_text=None, *positions
    ) -> torch.Tensor:
        if not self.terms:
            return query.new_zeros(1, 1, query.shape[2], key.shape[2])
        embeddings, distances = positions
        distances = distances[: query.shape[2]]  # the first token's alone, where only it is computed
        if self.training and self.position_dropout:
            by_member = embeddings.expand(self.num_members, -1, -1)
            embeddings = nn.functional.dropout(by_member, self.position_dropout)
        terms = []
        for term in self.terms:
            states = query
            numbers = distances
            if term == "p2c":
                states = key
                numbers = distances.t()
            # (rows, heads, query tokens or tokens, distances), of which each pair of tokens picks
            # one
            heads_of_distances = self._heads_of_distances(term, embeddings)
            scores = torch.matmul(states, heads_of_distances.transpose(1, 2))
            picked = scores.gather(-1, numbers.expand(*scores.shape[:2], -1, -1))
            if term == "p2c":
                picked = picked.transpose(2, 3)
            terms.append(picked)
        return self.without_padding(reduce(torch.add, terms) * self.scaling, is_text)

    def _heads_of_distances(self, term: str, embeddings: torch.Tensor) -> torch.Tensor:
        """Return keys ("c2p") or queries ("p2c") of the distances: (heads of all members,
        distances, head_dim)"""
        if hasattr(self, POSITION_MAPS[term]):
            projected = getattr(self, POSITION_MAPS[term])(embeddings)
        else:
            place = 1 if term == "c2p" else 0
            rows = [slice(place * width, (place + 1) * width) for width in self.widths]
            projected = self.qkv_proj(embeddings, rows)
        heads = [of_member.unflatten(-1, (-1, self.head_dim)) for of_member in projected]
        return torch.cat(heads, dim=-2).transpose(0, 1)


class HydraDebertaV2Model(HydraTypedTextEncoderMixin, HydraDebertaV2PreTrainedModel):
    embeddings_class = DebertaV2Embeddings
    attention_class = HydraDebertaV2Attention

    def add_positions(self, config: HydraDebertaV2Config) -> None:
        self.distance_embeddings = None
        if config.relative_attention:
            self.distance_embeddings = shared_or_per_member(config, "embeddings", lambda: DistanceEmbeddings(config))

    def embed_inputs(self, attention_mask: torch.Tensor | None = None, **inputs):
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.dim()} axes: DeBERTa also masks its embeddings, pass (batch, "
                "tokens)"
            )
        hidden_states, mask, layer_kwargs = super().embed_inputs(mask=attention_mask, **inputs)
        is_text = None
        if attention_mask is not None:  # padding itself sees everything, as in DeBERTa
            is_text = attention_mask.bool()
            mask = (is_text[:, None, :] | ~is_text[:, :, None]).unsqueeze(1)
            mask = encoder_mask(self.config, hidden_states, mask)
        positions = (is_text,)
        if self.config.relative_attention and self.config.terms:
            tokens = hidden_states.shape[2]
            embeddings = self.distance_embeddings()
            embeddings = embeddings.view(-1, *embeddings.shape[-2:])
            distances = numbers_of_distances(tokens, self.config, hidden_states.device)
            if not (torch.compiler.is_compiling() or is_exporting()):  # whose graphs serve texts of every length
                rows = rows_of_distances(tokens, self.config)
                embeddings = embeddings[:, rows]
                distances = distances - rows.start
            positions = (is_text, embeddings, distances)
        return hidden_states, mask, layer_kwargs | {"positions": positions}


class HydraDebertaV2ForSequenceClassification(HydraTypedTextClassifierMixin, HydraDebertaV2PreTrainedModel):
    encoder_class = HydraDebertaV2Model
    head_dropout = ("cls_dropout", "hidden_dropout_prob")

    def add_head(self, config: HydraDebertaV2Config) -> None:
        size = config.pooler_hidden_size
        self.pooler_dropout = nn.Dropout(config.pooler_dropout)
        self.pooler = GroupedPooler(size, size, config.num_members, ACT2FN[config.pooler_hidden_act])
        super().add_head(config)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return self.dropout(self.pooler(self.pooler_dropout(hidden_states[:, :, :1])))


class HydraDebertaV2ForTokenClassification(HydraTypedTokenClassifierMixin, HydraDebertaV2PreTrainedModel):
    encoder_class = HydraDebertaV2Model
