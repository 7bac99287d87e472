"""Classifiers of texts on causal language models: rotary positions, a causal mask, the last token read."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import members_mask
from .ensembling import HydraModelOutput
from .fixed_dtype import FixedDtype
from .grouped import GroupedLinear, of_members
from .layer import hydra_layers
from .modeling_hydra import Rule, attention_rules
from .norms import norm_of
from .texts import HydraTextEncoderMixin, HydraUntypedTextClassifierMixin


DECODER_RULES = (
    *attention_rules("layers.*.self_attn.{}_proj", "qkvo"),
    Rule("layers.*.attention_norm.*", "layers.*.input_layernorm.*"),
    Rule("layers.*.mlp_norm.*", "layers.*.post_attention_layernorm.*"),
    Rule("layers.*.mlp.fc1.*", ("layers.*.mlp.gate_proj.*", "layers.*.mlp.up_proj.*"), lambda *maps: torch.cat(maps)),
    Rule("layers.*.mlp.fc2.*", "layers.*.mlp.down_proj.*"),
    Rule("embeddings.word_embeddings.*", "embed_tokens.*"),
    Rule("classifier.*", "score.*"),
)


class HydraDecoderEmbeddings(nn.Module):
    """Word embeddings; positions are in the attention."""

    def __init__(self, config: PreTrainedConfig, embedding_class: type[nn.Embedding]):
        super().__init__()
        self.word_embeddings = embedding_class(config.vocab_size, config.hidden_size, config.pad_token_id)

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds


def last_token(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad: int) -> torch.Tensor:
    """The place of the last token of each text, which may be padded on either side: (batch, tokens) -> (batch,)

    What a mask of shape (batch, tokens) leaves out is padding too, whatever token stands there: rows are often filled up
    with another one than the config names.
    """
    is_text = input_ids != pad
    if attention_mask is not None and attention_mask.dim() == 2:
        is_text = is_text & attention_mask.to(input_ids.device).bool()
    return (torch.arange(input_ids.shape[1], device=input_ids.device) * is_text).argmax(dim=-1)


class HydraRotaryEmbedding(FixedDtype, LlamaRotaryEmbedding):
    """Of causal language models of Llama's kind."""


class HydraDecoderMixin(HydraTextEncoderMixin):
    """The layers of a causal language model; pooled is the state of each text's last token.

    Texts are read whole: there is no cache of keys and values. Without `use_cache`, position_ids that start anew in a row without
    a mask tell of several texts in it, which do not see each other: as in the backbone.
    """

    embedding_class: type[nn.Embedding] = nn.Embedding
    last_norm = "norm"

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.embeddings = of_members(
            config, "embeddings", lambda: HydraDecoderEmbeddings(config, self.embedding_class)
        )
        self.layers = hydra_layers(config)
        self.norm = of_members(config, "layernorm", lambda: norm_of(config.anatomy, config.hidden_size))
        self.rotary_emb = HydraRotaryEmbedding(config)
        self.post_init()

    def start(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
    ):
        states = self.embedded(input_ids, inputs_embeds)
        has_texts_in_a_row = not (self.config.use_cache if use_cache is None else use_cache)
        places = position_ids if has_texts_in_a_row else None
        mask = self._causal_mask(create_causal_mask, states, attention_mask, places)
        # A config may have fields that its backbone does not read: the anatomy says what is.
        if self.config.anatomy.sliding_window is not None and "sliding_attention" in self.config.layer_types:
            window = self._causal_mask(create_sliding_window_causal_mask, states, attention_mask, places)
            mask = {"full_attention": mask, "sliding_attention": window}
        if position_ids is None:
            position_ids = torch.arange(states.shape[2], device=states.device).unsqueeze(0)
        # What the masks went by: some models have their tokens read those behind them, too.
        is_causal = getattr(self.config, "is_causal", True)
        return states, mask, {"is_causal": is_causal, "position_embeddings": self.rotary_emb(states, position_ids)}

    def _causal_mask(self, create: Callable, states: torch.Tensor, attention_mask, position_ids: torch.Tensor | None):
        mask = create(
            config=self.config,
            inputs_embeds=states[0],
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        return members_mask(mask, states.shape[1], self.num_members)

    def finish(
        self,
        states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ):
        return self.pool(self.norm(states), input_ids, attention_mask)

    def pool(
        self,
        states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ):
        pad, batch = self.config.pad_token_id, states.shape[1]
        if pad is None:
            return states, states[:, :, -1] if batch == 1 else None
        if input_ids is None:
            return states, states[:, :, -1]
        last = last_token(input_ids, attention_mask, pad).to(states.device)
        return states, states[:, torch.arange(batch, device=states.device), last]

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        members_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_ids, attention_mask, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden), in place of input_ids; the last token is then the last of all
        members_only: compute no more than a classifier reads, see `encode`
        """
        if kwargs.pop("past_key_values", None) is not None:
            raise ValueError(f"{type(self).__name__} reads texts whole and keeps no cache: leave past_key_values out")
        use_cache = kwargs.pop("use_cache", None)
        states, mask, for_layers = self.start(input_ids, attention_mask, inputs_embeds, position_ids, use_cache)
        finish_with = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.encode(states, mask, members_only=members_only, finish_with=finish_with, **kwargs | for_layers)


class HydraDecoderClassifierMixin(HydraUntypedTextClassifierMixin):
    """A head per member on the last token of each text, as `GenericForSequenceClassification` of Transformers reads it."""

    encoder_class: type[nn.Module]
    reads_first_token = False

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.encoder_class(config)
        self.classifier = GroupedLinear(config.hidden_size, [config.num_labels] * config.num_members, bias=False)
        self.post_init()

    def read(self, states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        if pooled is None:
            raise ValueError(
                f"config.pad_token_id is None, and the batch has {states.shape[1]} texts: set it to the token that pads them, "
                "by which the last token of each is found"
            )
        return pooled
