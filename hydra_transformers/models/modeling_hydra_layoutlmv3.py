"""HydraLayoutLMv3: M head-pruned LayoutLMv3 encoders of documents as one network.

A document is words, their boxes on the page, and an image of the page, whose patches follow the words. LayoutLMv3 adds to each
head's scores numbers that depend on how far two of them are apart, in the order of reading and on the page: three tables for all
layers, which count as embeddings. They are not trained, as in Transformers.
"""

import torch
from torch import nn
from transformers import LayoutLMv3ForSequenceClassification, LayoutLMv3ForTokenClassification, LayoutLMv3Model
from transformers import initialization as init
from transformers.models.layoutlmv3.modeling_layoutlmv3 import (
    LayoutLMv3Encoder,
    LayoutLMv3PatchEmbeddings,
    LayoutLMv3PreTrainedModel,
    LayoutLMv3TextEmbeddings,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hydra_layoutlmv3 import HydraLayoutLMv3Config
from .images import as_patch_projection
from .modeling_hydra import (
    GroupedLinear,
    HydraClassifierMixin,
    HydraClassifierOutput,
    HydraModelOutput,
    PerMember,
    encoder_mask,
    hydra_layers,
    shared_or_per_member,
)
from .modeling_hydra_bert import HydraBertPreTrainedModel
from .pretrained import HydraModelMixin, Rule
from .texts import GroupedClassificationHead, HydraTextEncoderMixin
from .tokens import HydraTokenClassifierMixin


LABELS_FOR_TWO_MAPS = 10  # from so many on, LayoutLMv3's classifier of tokens has two maps
# Of distances in the order of reading, and on the page; ours and LayoutLMv3's names.
TABLES = {"order": "rel_pos_bias", "across": "rel_pos_x_bias", "down": "rel_pos_y_bias"}


class HydraLayoutLMv3Embeddings(LayoutLMv3TextEmbeddings):
    """Embeddings of words and their boxes, and where the model has them of patches of the page."""

    def __init__(self, config: HydraLayoutLMv3Config):
        super().__init__(config)
        if config.visual_embed:
            self.patch_embed = LayoutLMv3PatchEmbeddings(config)
            self.patch_embed.proj = as_patch_projection(self.patch_embed.proj)
            patches = self.patch_embed.patch_shape[0] * self.patch_embed.patch_shape[1]
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
            self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, config.hidden_size))
            self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
            self.joint_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixel_values: torch.Tensor | None = None, **of_words) -> torch.Tensor:
        """Words, then patches: (batch, tokens, hidden), or (members, batch, tokens, hidden) where each member drops its own"""
        words = super().forward(**of_words)
        if pixel_values is None:
            return words
        patches = self.patch_embed(pixel_values)
        patches = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        patches = self.norm(patches + self.pos_embed)
        joint = self.joint_norm(torch.cat([words, patches.expand(*words.shape[:-2], -1, -1)], dim=-2))
        return nn.functional.dropout(joint, self.dropout.p, self.training)


class DocumentPositionBias(nn.Module):
    """What is added to the scores of each of the backbone's heads: tables (distances, heads)."""

    def __init__(self, config: HydraLayoutLMv3Config):
        super().__init__()
        self.config = config
        self.order = nn.Embedding(config.rel_pos_bins, config.num_attention_heads)
        if config.has_spatial_attention_bias:
            self.across, self.down = (
                nn.Embedding(config.rel_2d_pos_bins, config.num_attention_heads) for _ in range(2)
            )

    @torch.no_grad()
    def forward(self, order: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        """order: (1, tokens); boxes: (batch, tokens, 4) -> (batch or 1, heads, tokens, tokens)"""
        config = self.config
        bias = self.order(numbers_of_distances(order, config.rel_pos_bins, config.max_rel_pos))
        if config.has_spatial_attention_bias:
            for table, place in ((self.across, 0), (self.down, 3)):
                numbers = numbers_of_distances(boxes[..., place], config.rel_2d_pos_bins, config.max_rel_2d_pos)
                bias = bias + table(numbers)
        return bias.permute(0, 3, 1, 2) / (config.hidden_size // config.num_attention_heads) ** 0.5


def numbers_of_distances(places: torch.Tensor, bins: int, longest: int) -> torch.Tensor:
    """(batch or 1, tokens) -> (batch or 1, tokens, tokens)"""
    distances = places.unsqueeze(-2) - places.unsqueeze(-1)
    return LayoutLMv3Encoder.relative_position_bucket(None, distances, num_buckets=bins, max_distance=longest)


class HydraLayoutLMv3PreTrainedModel(HydraModelMixin, LayoutLMv3PreTrainedModel):
    config_class = HydraLayoutLMv3Config
    config: HydraLayoutLMv3Config
    base_model_prefix = "layoutlmv3"
    architecture = "LayoutLMv3"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HydraLayoutLMv3Embeddings", "HydraLayer"]
    _supports_sdpa = True
    backbone_types = ("layoutlmv3",)
    backbone_rules = (
        *HydraBertPreTrainedModel.backbone_rules,
        *(Rule(f"embeddings.{each}", each) for each in ("cls_token", "pos_embed", "patch_embed.*", "norm.*")),
        Rule("embeddings.joint_norm.*", "LayerNorm.*"),
        *(
            Rule(f"relative_attention_bias.{ours}.weight", f"encoder.{theirs}.weight", lambda table: table.t())
            for ours, theirs in TABLES.items()
        ),
    )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, HydraLayoutLMv3Embeddings) and self.config.visual_embed:
            init.zeros_(module.cls_token)
            init.zeros_(module.pos_embed)


class HydraLayoutLMv3Model(HydraTextEncoderMixin, HydraLayoutLMv3PreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (LayoutLMv3Model,)

    def __init__(self, config: HydraLayoutLMv3Config):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: HydraLayoutLMv3Embeddings(config))
        self.relative_attention_bias = None
        if config.has_relative_attention_bias:
            self.relative_attention_bias = shared_or_per_member(
                config, "embeddings", lambda: DocumentPositionBias(config)
            )
        self.layers = hydra_layers(config)
        self.post_init()

    def embed_inputs(
        self,
        input_ids: torch.Tensor | None = None,
        bbox: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        **for_embeddings,
    ):
        if input_ids is None and inputs_embeds is None:
            raise ValueError("input_ids is missing: pass the processor's output, words and boxes with the image")
        words = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        boxes = words.new_zeros(*words.shape, 4, dtype=torch.long) if bbox is None else bbox
        hidden_states = self.embed_words(
            input_ids, inputs_embeds, bbox=boxes, pixel_values=pixel_values, **for_embeddings
        )
        order = torch.arange(words.shape[1], device=words.device)
        if pixel_values is not None:
            patches = hidden_states.shape[2] - words.shape[1]
            order = torch.cat([order, torch.arange(patches, device=words.device)])
            boxes = torch.cat([boxes, self._boxes_of_patches(boxes)], dim=1)
            if attention_mask is not None:
                attention_mask = nn.functional.pad(attention_mask, (0, patches), value=1)
        mask = None if attention_mask is None else encoder_mask(self.config, hidden_states, attention_mask)
        if self.relative_attention_bias is None:
            return hidden_states, mask, {}
        tables = self.relative_attention_bias
        tables = tables if isinstance(tables, PerMember) else [tables]
        bias = torch.stack([table(order.unsqueeze(0), boxes) for table in tables])
        return hidden_states, mask, {"position_bias": bias.to(hidden_states.dtype)}

    def _boxes_of_patches(self, like: torch.Tensor) -> torch.Tensor:
        """(batch, patches, 4)"""
        side = self.config.input_size // self.config.patch_size
        return LayoutLMv3Model.create_visual_bbox(None, (side, side)).to(like).expand(like.shape[0], -1, -1)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        bbox: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        first_token_only: bool = False,
        members_only: bool = False,
        words_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_ids, attention_mask, token_type_ids, position_ids: (batch, tokens)
        bbox: (batch, tokens, 4), left, upper, right and lower edge of each word's box, from 0 to 1000
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        pixel_values: (batch, channels, height, width), the page; its patches follow the words in the outputs
        first_token_only, members_only: compute no more than a classifier reads, see `encode`
        words_only: leave the patches out of `member_last_hidden_state`
        """
        inputs = {
            "input_ids": input_ids,
            "bbox": bbox,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
        }
        outputs = self.encode(inputs, first_token_only, members_only, **kwargs)
        if words_only:
            words = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
            outputs.member_last_hidden_state = outputs.member_last_hidden_state[:, :, :words]
        return outputs


class DocumentClassifierMixin(HydraClassifierMixin):
    def pipeline_class(self) -> type:
        raise TypeError(
            f"{type(self).__name__} reads documents, words with their boxes and an image, and no pipeline here does: call the model "
            "with its processor's output"
        )


class HydraLayoutLMv3ForSequenceClassification(DocumentClassifierMixin, HydraLayoutLMv3PreTrainedModel):
    """The fused classifier of documents: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (LayoutLMv3ForSequenceClassification,)

    def __init__(self, config: HydraLayoutLMv3Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.layoutlmv3 = HydraLayoutLMv3Model(config)
        self.classifier = GroupedClassificationHead(config, nn.Tanh(), config.classifier_dropout)
        self.post_init()

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier.prepare(features)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        bbox: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """As `HydraLayoutLMv3Model.forward`; labels: (batch,) class indices, or what the config's `problem_type` asks for"""
        inputs = {
            "input_ids": input_ids,
            "bbox": bbox,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
        }
        return self.encode_and_classify(inputs, labels, **kwargs)


class HydraLayoutLMv3ForTokenClassification(
    DocumentClassifierMixin, HydraTokenClassifierMixin, HydraLayoutLMv3PreTrainedModel
):
    """The fused classifier of a document's words: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (LayoutLMv3ForTokenClassification,)
    encoder_class = HydraLayoutLMv3Model

    def add_head(self, config: HydraLayoutLMv3Config) -> None:
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        if config.num_labels < LABELS_FOR_TWO_MAPS:
            self.classifier = GroupedLinear(config.hidden_size, [config.head_width] * config.num_members)
        else:
            self.classifier = GroupedClassificationHead(config, nn.Tanh(), config.classifier_dropout)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        has_two_maps = self.config.num_labels >= LABELS_FOR_TWO_MAPS
        return self.classifier.prepare(features) if has_two_maps else features

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        bbox: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """As `HydraLayoutLMv3Model.forward`; labels: (batch, tokens) class indices, -100 where a token has none"""
        inputs = {
            "input_ids": input_ids,
            "bbox": bbox,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
            "words_only": True,
        }
        return self.encode_and_classify(inputs, labels, **kwargs)


__all__ = [
    "HydraLayoutLMv3ForSequenceClassification",
    "HydraLayoutLMv3ForTokenClassification",
    "HydraLayoutLMv3Model",
    "HydraLayoutLMv3PreTrainedModel",
]
