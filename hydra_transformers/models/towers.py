"""Towers of images and of texts, and both together: what CLIP and SigLIP have in common."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .images import HydraImageClassifierMixin, HydraImageEncoderMixin
from .modeling_hydra import GroupedLinear, HydraModelOutput, at_least_float32, mean_of_members
from .pretrained import Rule, attention_rules
from .texts import HydraTextEncoderMixin


TOWER_RULES = (
    *attention_rules("encoder.layers.*.self_attn.{}", ("q_proj", "k_proj", "v_proj", "out_proj")),
    Rule("layers.*.attention_norm.*", "encoder.layers.*.layer_norm1.*"),
    Rule("layers.*.mlp_norm.*", "encoder.layers.*.layer_norm2.*"),
    Rule("layers.*.mlp.*", "encoder.layers.*.mlp.*"),
)


def layer_norm_of(config: PreTrainedConfig) -> nn.LayerNorm:
    """Of a tower's config."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


@dataclass
class HydraTowersOutput(ModelOutput):
    """
    loss: scalar, where `return_loss` was set
    logits_per_image: (images, texts), the ensemble's answer
    logits_per_text: (texts, images), the ensemble's answer the other way round
    member_logits: (images, members, texts), of each member's cosines
    text_embeds: (texts, members of the text tower, projection), normalised
    image_embeds: (images, members of the vision tower, projection), normalised
    similarity: (images, texts), the mean of `member_logits` over the members
    """

    loss: torch.FloatTensor | None = None
    logits_per_image: torch.FloatTensor | None = None
    logits_per_text: torch.FloatTensor | None = None
    member_logits: torch.FloatTensor | None = None
    text_embeds: torch.FloatTensor | None = None
    image_embeds: torch.FloatTensor | None = None
    text_model_output: HydraModelOutput | None = None
    vision_model_output: HydraModelOutput | None = None
    similarity: torch.FloatTensor | None = None

    def to_tuple(self) -> tuple:
        return tuple(value.to_tuple() if isinstance(value, ModelOutput) else value for value in self.values())


class HydraVisionTowerMixin(HydraImageEncoderMixin):
    """An encoder of images, by itself, beside a text tower or below a classifier."""

    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    patch_embeddings_name = "patch_embedding"


class HydraTextTowerMixin(HydraTextEncoderMixin):
    """An encoder of texts, by itself or beside a vision tower."""

    base_model_prefix = "text_model"
    main_input_name = "input_ids"
    input_modalities = ("text",)
    word_embeddings_name = "token_embedding"


class HydraVisionTowerClassifierMixin(HydraImageClassifierMixin):
    """A vision tower with a classifier per member.

    The config is the tower's own, with the classes; a backbone's has it, as `backbone_config_key`, beside that of a text
    tower which its classifier has no use for.
    """

    base_model_prefix = "vision_model"
    backbone_config_key = "vision_config"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"
    reads_first_token = False

    tower_class: type

    def __init__(self, config):
        for name, value in self.own_fields.items():
            setattr(config, name, value)
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vision_model = self.tower_class(config)
        self.classifier = GroupedLinear(config.hidden_size, [config.head_width] * config.num_members)
        self.post_init()


class HydraTwoTowersMixin:
    """Both towers, fused. Member m pairs vision member m with text member m; a tower with a single member is used
    with all members of the other.

    A family has `text_model`, `vision_model`, `text_projection`, `visual_projection` and `logit_scale`, and says how cosines
    become the members' logits, these the ensemble's, and both a loss.
    """

    # Whether images are pooled from the first token's state alone, so that the last layer need not compute the others.
    reads_first_token = False
    # Whether texts are pooled from their last token, be it padding: they have to be padded as in training, to full length.
    reads_padding = False

    def pipeline_class(self) -> type:
        from .pipeline_hydra_zero_shot import HydraZeroShotImageClassificationPipeline  # not above, as in `predict`

        return HydraZeroShotImageClassificationPipeline

    def logits_of(self, cosine: torch.Tensor) -> torch.Tensor:
        """The members' logits: (members, images, texts) -> (members, images, texts)"""
        return cosine * self.logit_scale.exp().to(cosine.device)[:, None, None]

    def ensemble(self, member_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(images, members, texts) -> (images, texts) and (texts, images)"""
        raise NotImplementedError

    def loss_of_pairs(self, member_logits: torch.Tensor, logits_per_image, logits_per_text) -> torch.Tensor:
        """The loss where text i belongs to image i, for members' logits (images, members, texts)."""
        raise NotImplementedError

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """`member_pooler_output` is (texts, members of the text tower, projection), not normalised; `pooler_output` is its
        mean over the members."""
        outputs = self.text_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        return self._projected(self.text_projection, outputs)

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False, **kwargs
    ) -> HydraModelOutput:
        """`member_pooler_output` is (images, members of the vision tower, projection), not normalised; `pooler_output` is
        its mean over the members."""
        outputs = self.vision_model(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            return_dict=True,
            **kwargs,
        )
        return self._projected(self.visual_projection, outputs)

    def _projected(self, projection: nn.Module, outputs: HydraModelOutput) -> HydraModelOutput:
        """Its pooled states (batch, members, hidden) become (batch, members, projection)."""
        pooled = projection(outputs.member_pooler_output.transpose(0, 1))
        outputs.member_pooler_output, outputs.pooler_output = pooled.transpose(0, 1), mean_of_members(pooled)
        return outputs

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_loss: bool | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs,
    ) -> HydraTowersOutput:
        """
        input_ids, attention_mask, position_ids: (texts, tokens)
        pixel_values: (images, channels, height, width)
        return_loss: whether to return the loss of pairs; text i then belongs to image i
        """
        vision_outputs = self.get_image_features(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            first_token_only=self.reads_first_token,
            return_dict=True,
            **kwargs,
        )
        text_outputs = self.get_text_features(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        image_embeds = nn.functional.normalize(vision_outputs.member_pooler_output, dim=-1)
        text_embeds = nn.functional.normalize(text_outputs.member_pooler_output, dim=-1)

        # (members, images, texts)
        cosine = image_embeds.transpose(0, 1) @ text_embeds.to(image_embeds.device).permute(1, 2, 0)
        member_logits = self.logits_of(cosine).transpose(0, 1)
        logits_per_image, logits_per_text = self.ensemble(member_logits)
        loss = None
        if return_loss:
            if member_logits.shape[0] != member_logits.shape[2]:
                raise ValueError(
                    f"return_loss got {member_logits.shape[0]} images and {member_logits.shape[2]} texts: pass them in pairs"
                )
            loss = self.loss_of_pairs(member_logits, logits_per_image, logits_per_text)
        return self.output_class(
            loss=loss,
            logits_per_image=logits_per_image,
            logits_per_text=logits_per_text,
            member_logits=member_logits,
            text_embeds=text_embeds,
            image_embeds=image_embeds,
            text_model_output=text_outputs,
            vision_model_output=vision_outputs,
            similarity=at_least_float32(member_logits).mean(dim=1),
        )
