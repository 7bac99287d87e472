"""HydraDebertaV2 configuration."""

from huggingface_hub.dataclasses import strict
from transformers import DebertaV2Config

from .configuration_hydra import HydraConfigMixin
from .configuration_hydra_bert import bert_layer_spec


@strict
class HydraDebertaV2Config(HydraConfigMixin, DebertaV2Config):
    r"""A [`DebertaV2Config`], of DeBERTa-v2 or v3, with the fields of [`HydraConfigMixin`].

    Args:
        share_att_key (`bool`, *optional*, defaults to `False`):
            Whether distances pass the maps of the tokens to queries and keys, or have maps of their
            own.
        position_buckets (`int`, *optional*, defaults to -1):
            How many distances there are to each side, far ones taken together; -1 for
            `max_relative_positions` of them.
        norm_rel_ebd (`str`, *optional*, defaults to `"none"`):
            `"layer_norm"` for a LayerNorm on the embeddings of the distances.
        embedding_size (`int`, *optional*):
            How wide word embeddings are; by default as wide as the hidden size.
        cls_dropout (`float`, *optional*):
            Dropout in front of the classifier; by default `hidden_dropout_prob`.
        conv_kernel_size (`int`, *optional*, defaults to 0):
            Of the convolution beside the first layer of DeBERTa-v2-xlarge and -xxlarge, which a
            Hydra does not have.
    """

    model_type = "hydra_deberta_v2"

    # DebertaV2Config has no fields for them, but Transformers' model reads them.
    share_att_key: bool = False
    position_buckets: int = -1
    norm_rel_ebd: str = "none"
    embedding_size: int | None = None
    cls_dropout: float | int | None = None
    conv_kernel_size: int = 0

    auto_classes = {
        "AutoConfig": "configuration_hydra_deberta_v2.HydraDebertaV2Config",
        "AutoModel": "modeling_hydra_deberta_v2.HydraDebertaV2Model",
        "AutoModelForSequenceClassification": "modeling_hydra_deberta_v2.HydraDebertaV2ForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_deberta_v2.HydraDebertaV2ForTokenClassification",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.conv_kernel_size > 0:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size}: a Hydra has no convolution beside its first layer, as "
                "DeBERTa-v2-xlarge and -xxlarge have; use DeBERTa-v3, which has none either"
            )
        self.embedding_size = self.embedding_size or self.hidden_size

    @property
    def longest_distance(self) -> int:
        if self.max_relative_positions > 0:
            return self.max_relative_positions
        return self.max_position_embeddings

    @property
    def distances_to_each_side(self) -> int:
        if self.position_buckets > 0:
            return self.position_buckets
        return self.longest_distance

    @property
    def terms(self) -> tuple[str, ...]:
        """Return what distances between tokens add to the scores: "c2p" compares a query with the
        key of its distance to each token, "p2c" a token's key with the query of that distance."""
        chosen = self.pos_att_type or ()
        return tuple(term for term in ("c2p", "p2c") if term in chosen)

    layer_spec = property(bert_layer_spec)
