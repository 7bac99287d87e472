"""HydraLlama, HydraQwen2, HydraQwen3, HydraGemma and HydraGemma3Text: M head-pruned causal language
models as one network, for
classification of texts and tokens: rotary positions, a causal mask, the last token read.
"""

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma.modeling_gemma import GemmaPreTrainedModel, GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel, Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

from .configuration_hydra_decoders import (
    HydraGemma3TextConfig,
    HydraGemmaConfig,
    HydraLlamaConfig,
    HydraQwen2Config,
    HydraQwen3Config,
)
from .fixed_dtype import FixedDtype
from .modeling_hydra import (
    HydraAttention,
    HydraLayer,
    HydraModelOutput,
    Layout,
    Norm,
    PerMember,
    encoder_mask,
    shared_or_per_member,
)
from .pretrained import HydraModelMixin
from .rotary_attention import HydraRotaryAttention, RotaryTables, for_each_query, queries_per_kv_head
from .texts import HydraTextClassifierMixin, HydraTextEncoderMixin
from .tokens import HydraTokenClassifierMixin


class HydraScaledEmbedding(nn.Embedding):
    """Word embeddings times the root of their size, as Gemma has them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Rounded to the type of the weights before it multiplies.
        scale = torch.full((), self.embedding_dim**0.5, dtype=self.weight.dtype, device=self.weight.device)
        return super().forward(input) * scale


class HydraDecoderEmbeddings(nn.Module):
    """Word embeddings; positions are in the attention."""

    def __init__(self, config: PreTrainedConfig, embedding_class: type[nn.Embedding]):
        super().__init__()
        self.word_embeddings = embedding_class(config.vocab_size, config.hidden_size, config.pad_token_id)

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        if inputs_embeds is not None:
            return inputs_embeds
        return self.word_embeddings(input_ids)


def last_token(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad: int) -> torch.Tensor:
    """Return the place of the last token of each text, which may be padded on either side: (batch,
    tokens) -> (batch,)

    What a mask of shape (batch, tokens) leaves out is padding too, whatever token stands there:
    rows are often filled up with another one than the config names.
    """
    is_text = input_ids != pad
    if attention_mask is not None and attention_mask.dim() == 2:
        is_text = is_text & attention_mask.to(input_ids.device).bool()
    return (torch.arange(input_ids.shape[1], device=input_ids.device) * is_text).argmax(dim=-1)


class HydraDecoderAttention(HydraRotaryAttention):
    """With grouped queries: heads are query heads; a head of keys and values stays as long as a
    query head reads it, and is computed once."""

    def set_kept_heads(self, kept_heads: list[list[int]]) -> None:
        # How many query heads read each head of keys and values: of every member, and in the order
        # of the head axis that all members are on.
        self.queries_per_kv_head = [queries_per_kv_head(heads, self.config.queries_per_key) for heads in kept_heads]
        self.queries_of_all_members = [count for counts in self.queries_per_kv_head for count in counts]
        super().set_kept_heads(kept_heads)

    def fits_batch_axis(self) -> bool:
        return all(counts == self.queries_per_kv_head[0] for counts in self.queries_per_kv_head)

    def qkv_widths(self) -> list[int]:
        return [self.head_dim * (sum(counts) + 2 * len(counts)) for counts in self.queries_per_kv_head]

    def place(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, *positions):
        query, key, value = super().place(query, key, value, layout, *positions)
        if self.config.queries_per_key > 1:
            counts = self.queries_per_kv_head[0]
            if layout is self.layout_on_heads:
                counts = self.queries_of_all_members
            key = for_each_query(key, counts)
            value = for_each_query(value, counts)
        return query, key, value


class HydraNormedDecoderAttention(HydraDecoderAttention):
    """Each head norms its queries and keys, before positions turn them."""

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm):
        super().__init__(config, layer, norm)
        # Part of the attention, which members never share.
        self.query_norm, self.key_norm = (
            shared_or_per_member(config, "attention", partial(norm, self.head_dim), layer) for _ in range(2)
        )

    def place(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, *positions):
        query_heads = [len(heads) for heads in self.kept_heads]
        key_heads = [len(queries) for queries in self.queries_per_kv_head]
        query = norm_heads(self.query_norm, query, query_heads, layout)
        key = norm_heads(self.key_norm, key, key_heads, layout)
        return super().place(query, key, value, layout, *positions)


def norm_heads(norm: nn.Module, states: torch.Tensor, heads: list[int], layout: Layout) -> torch.Tensor:
    """Pass queries or keys, (rows, heads, tokens, head_dim), through the norm, or each member's
    through its own.

    heads: how many of them each member has
    """
    if isinstance(norm, PerMember):
        return layout.norm(norm, states, heads)
    return norm(states)


class HydraRotaryEmbedding(FixedDtype, LlamaRotaryEmbedding):
    """Of causal language models of Llama's kind."""


class HydraDecoderMixin(HydraTextEncoderMixin):
    """The layers of a causal language model; pooled is the state of each text's last token.

    Texts are read whole: there is no cache of keys and values. Without `use_cache`, position_ids
    that start anew in a row without a mask tell of several texts in it, which do not see each
    other: as in the backbone.
    """

    embedding_class: type[nn.Embedding] = nn.Embedding
    norm_class: type[nn.Module] = LlamaRMSNorm
    rotary_class: type[nn.Module] = HydraRotaryEmbedding
    attention_class: type[HydraAttention] = HydraDecoderAttention
    last_norm = "norm"
    last_hidden_state_is_normed = True
    pools_last_token = True  # of each text, in place of the first

    def embeddings_class(self, config: PreTrainedConfig) -> HydraDecoderEmbeddings:
        return HydraDecoderEmbeddings(config, self.embedding_class)

    def make_norm(self, config: PreTrainedConfig) -> Norm:
        return partial(self.norm_class, eps=config.rms_norm_eps)

    def add_positions(self, config: PreTrainedConfig) -> None:
        self.rotary_emb = self.rotary_class(config)

    def embed_inputs(
        self,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **inputs,
    ):
        hidden_states, _, _ = super().embed_inputs(**inputs)

        # The masks. Positions may tell several texts in a row apart, except where there is a cache.
        if use_cache is None:
            use_cache = self.config.use_cache
        options = {"past_key_values": None, "position_ids": None}
        if not use_cache:
            options["position_ids"] = position_ids
        mask = encoder_mask(self.config, hidden_states, attention_mask, create_causal_mask, **options)
        if self.config.attention_window is not None and "sliding_attention" in self.config.layer_types:
            create = create_sliding_window_causal_mask
            window = encoder_mask(self.config, hidden_states, attention_mask, create, **options)
            mask = {"full_attention": mask, "sliding_attention": window}

        # The positions.
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[2], device=hidden_states.device).unsqueeze(0)
        # As the masks were made: some models have their tokens read those behind them, too.
        is_causal = getattr(self.config, "is_causal", True)
        tables = self.rotary_tables(hidden_states, position_ids)
        return hidden_states, mask, {"is_causal": is_causal, "positions": (tables,)}

    def rotary_tables(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor
    ) -> RotaryTables | dict[str, RotaryTables]:
        """Return the tables for all layers, or by `config.layer_types`."""
        return self.rotary_emb(hidden_states, position_ids)

    def pool(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **inputs,
    ) -> torch.Tensor | None:
        pad = self.config.pad_token_id
        batch = hidden_states.shape[1]
        if pad is None and batch > 1:
            return None
        if pad is None or input_ids is None:
            return hidden_states[:, :, -1]
        last = last_token(input_ids, attention_mask, pad).to(hidden_states.device)
        return hidden_states[:, torch.arange(batch, device=hidden_states.device), last]

    def encode(self, inputs: dict, *args, past_key_values=None, use_cache=None, **kwargs) -> HydraModelOutput:
        if past_key_values is not None:
            raise ValueError(f"{type(self).__name__} reads texts whole and keeps no cache: leave past_key_values out")
        return super().encode({**inputs, "use_cache": use_cache}, *args, **kwargs)


class HydraDecoderClassifierMixin(HydraTextClassifierMixin):
    """A head per member on the last token of each text, as `GenericForSequenceClassification` of
    Transformers reads it."""

    reads_first_token = False
    has_head_bias = False

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        if pooled is None:
            raise ValueError(
                f"config.pad_token_id is None, and the batch has {hidden_states.shape[1]} texts: set it to the token "
                "that pads them, by which the last token of each is found"
            )
        return pooled


class HydraDecoderBase:
    """What all decoders have in common, with a head and without."""

    base_model_prefix = "model"
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraLayer"]


class HydraLlamaPreTrainedModel(HydraDecoderBase, HydraModelMixin, LlamaPreTrainedModel):
    config_class = HydraLlamaConfig
    architecture = "Llama"


class HydraLlamaModel(HydraDecoderMixin, HydraLlamaPreTrainedModel):
    pass


class HydraLlamaForSequenceClassification(HydraDecoderClassifierMixin, HydraLlamaPreTrainedModel):
    encoder_class = HydraLlamaModel


class HydraLlamaForTokenClassification(HydraTokenClassifierMixin, HydraLlamaPreTrainedModel):
    encoder_class = HydraLlamaModel


class HydraQwen2PreTrainedModel(HydraDecoderBase, HydraModelMixin, Qwen2PreTrainedModel):
    config_class = HydraQwen2Config
    architecture = "Qwen2"


class HydraQwen2Model(HydraDecoderMixin, HydraQwen2PreTrainedModel):
    pass


class HydraQwen2ForSequenceClassification(HydraDecoderClassifierMixin, HydraQwen2PreTrainedModel):
    encoder_class = HydraQwen2Model


class HydraQwen2ForTokenClassification(HydraTokenClassifierMixin, HydraQwen2PreTrainedModel):
    encoder_class = HydraQwen2Model


class HydraQwen3PreTrainedModel(HydraDecoderBase, HydraModelMixin, Qwen3PreTrainedModel):
    config_class = HydraQwen3Config
    architecture = "Qwen3"


class HydraQwen3Model(HydraDecoderMixin, HydraQwen3PreTrainedModel):
    attention_class = HydraNormedDecoderAttention


class HydraQwen3ForSequenceClassification(HydraDecoderClassifierMixin, HydraQwen3PreTrainedModel):
    encoder_class = HydraQwen3Model


class HydraQwen3ForTokenClassification(HydraTokenClassifierMixin, HydraQwen3PreTrainedModel):
    encoder_class = HydraQwen3Model


class HydraGemmaPreTrainedModel(HydraDecoderBase, HydraModelMixin, GemmaPreTrainedModel):
    config_class = HydraGemmaConfig
    architecture = "Gemma"


class HydraGemmaModel(HydraDecoderMixin, HydraGemmaPreTrainedModel):
    embedding_class = HydraScaledEmbedding
    norm_class = GemmaRMSNorm


class HydraGemmaForSequenceClassification(HydraDecoderClassifierMixin, HydraGemmaPreTrainedModel):
    encoder_class = HydraGemmaModel


class HydraGemmaForTokenClassification(HydraTokenClassifierMixin, HydraGemmaPreTrainedModel):
    encoder_class = HydraGemmaModel


class HydraGemma3TextPreTrainedModel(HydraDecoderBase, HydraModelMixin, Gemma3PreTrainedModel):
    config_class = HydraGemma3TextConfig
    architecture = "Gemma 3"
    input_modalities = ("text",)
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraGemma3Layer"]


class HydraGemma3Layer(HydraLayer):
    """A branch is normed before it is added to the residual stream, too."""

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm, attention_class: type[HydraAttention]):
        super().__init__(config, layer, norm, attention_class)
        self.attention_branch_norm, self.mlp_branch_norm = (
            shared_or_per_member(config, "layernorm", partial(norm, config.hidden_size), layer) for _ in range(2)
        )

    def project_and_feed(self, hidden_states: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention_branch_norm(self.attention.o_proj(heads))
        return hidden_states + self.mlp_branch_norm(self.mlp(self.mlp_norm(hidden_states)))


class HydraGemma3Attention(HydraNormedDecoderAttention):
    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm):
        super().__init__(config, layer, norm)
        self.scaling = config.query_pre_attn_scalar**-0.5


class HydraGemma3RotaryEmbedding(FixedDtype, Gemma3RotaryEmbedding):
    """A table for each kind of layers."""


class HydraGemma3TextModel(HydraDecoderMixin, HydraGemma3TextPreTrainedModel):
    embedding_class = HydraScaledEmbedding
    norm_class = GemmaRMSNorm
    rotary_class = HydraGemma3RotaryEmbedding
    attention_class = HydraGemma3Attention
    layer_class = HydraGemma3Layer

    def rotary_tables(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> dict[str, RotaryTables]:
        kinds = sorted(set(self.config.layer_types))
        return {kind: self.rotary_emb(hidden_states, position_ids, kind) for kind in kinds}


class HydraGemma3TextForSequenceClassification(HydraDecoderClassifierMixin, HydraGemma3TextPreTrainedModel):
    encoder_class = HydraGemma3TextModel
