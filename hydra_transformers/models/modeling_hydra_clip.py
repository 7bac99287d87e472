"""HydraCLIP: M head-pruned CLIP models as one network, for zero-shot classification that knows its limits."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import CLIPModel, CLIPTextModel, CLIPVisionModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.models.clip.modeling_clip import CLIPPreTrainedModel, CLIPTextEmbeddings, CLIPVisionEmbeddings
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import members_mask
from .configuration_hydra_clip import HydraCLIPConfig, HydraCLIPTextConfig, HydraCLIPVisionConfig
from .encoder import HydraEncoderMixin
from .ensembling import HydraModelOutput, at_least_float32, log_mean_probability, mean_of_members, wants_every_token
from .grouped import Grouped, GroupedLinear, embed, of_members
from .layer import hydra_layers
from .modeling_hydra import HydraModelMixin, Rule, attention_rules
from .patch_embedding import as_patch_projection


@dataclass
class HydraCLIPOutput(ModelOutput):
    """
    loss: scalar, where `return_loss` was set
    logits_per_image: (images, texts), the log of the members' mean probability over the texts of this call: for
        classification among them. A single text always has probability 1, so its logit is 0
    logits_per_text: (texts, images), the log of the members' mean probability over the images of this call
    member_logits: (images, members, texts), logit scale times cosine
    text_embeds: (texts, members of the text tower, projection), normalised
    image_embeds: (images, members of the vision tower, projection), normalised
    similarity: (images, texts), the mean of `member_logits` over the members: of one image and one text, whatever else
        is in the call. For retrieval, thresholds and single pairs; what CLIP itself calls `logits_per_image`
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


class HydraCLIPVisionEmbeddings(CLIPVisionEmbeddings):
    """CLIP's image embeddings with the patches embedded by a product."""

    def __init__(self, config: HydraCLIPVisionConfig):
        super().__init__(config)
        self.patch_embedding = as_patch_projection(self.patch_embedding)


class HydraCLIPPreTrainedModel(HydraModelMixin, CLIPPreTrainedModel):
    config_class = HydraCLIPConfig
    config: HydraCLIPConfig
    base_model_prefix = "clip"
    architecture = "CLIP"
    _no_split_modules = ["CLIPTextEmbeddings", "HydraCLIPVisionEmbeddings", "HydraLayer"]
    backbone_types = ("clip",)
    backbone_rules = (
        *attention_rules("encoder.layers.*.self_attn.{}", ("q_proj", "k_proj", "v_proj", "out_proj")),
        Rule("layers.*.attention_norm.*", "encoder.layers.*.layer_norm1.*"),
        Rule("layers.*.mlp_norm.*", "encoder.layers.*.layer_norm2.*"),
        Rule("layers.*.mlp.*", "encoder.layers.*.mlp.*"),
        Rule("pre_layernorm.*", "pre_layrnorm.*"),
    )

    def initial_std(self, module: Grouped) -> float:
        return module.columns**-0.5 * self.config.initializer_factor

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, HydraCLIPModel):
            init.constant_(module.logit_scale, self.config.logit_scale_init_value)


class HydraCLIPTextModel(HydraEncoderMixin, HydraCLIPPreTrainedModel):
    """The fused text tower: `HydraModelOutput`; pooled is the state of the first end-of-text token."""

    config_class = HydraCLIPTextConfig
    config: HydraCLIPTextConfig
    base_model_prefix = "text_model"
    backbone_types = ("clip_text_model",)
    backbone_classes = (CLIPTextModel,)
    main_input_name = "input_ids"
    input_modalities = ("text",)
    _input_embed_layer = "token_embedding"
    is_base_model = False

    def __init__(self, config: HydraCLIPTextConfig):
        super().__init__(config)
        self.embeddings = of_members(config, "embeddings", lambda: CLIPTextEmbeddings(config))
        self.layers = hydra_layers(config)
        self.final_layer_norm = of_members(config, "layernorm", lambda: _layer_norm(config))
        self.post_init()

    def start(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ):
        if input_ids is None:
            raise ValueError("input_ids is missing: pass the tokenizer's output")
        states = embed(self.embeddings, input_ids=input_ids, position_ids=position_ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=states[0], attention_mask=attention_mask, past_key_values=None
        )
        return states, members_mask(mask, states.shape[1], self.num_members), {"is_causal": True}

    def finish(self, states: torch.Tensor, input_ids: torch.Tensor):
        states = self.final_layer_norm(states)
        rows = torch.arange(states.shape[1], device=states.device)
        return states, states[:, rows, self._end_of_text(input_ids.to(states.device))]

    def _end_of_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Position of the token that stands for the text: (batch, tokens) -> (batch,)"""
        if self.config.eos_token_id == 2:
            # Configs from before transformers 4.30 name a wrong end-of-text token; it has the highest id of all.
            return input_ids.int().argmax(dim=-1)
        return (input_ids == self.config.eos_token_id).int().argmax(dim=-1)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """input_ids, attention_mask, position_ids: (batch, tokens)"""
        states, mask, for_layers = self.start(input_ids, attention_mask, position_ids)
        return self.encode(states, mask, finish_with={"input_ids": input_ids}, **kwargs | for_layers)


class HydraCLIPVisionModel(HydraEncoderMixin, HydraCLIPPreTrainedModel):
    """The fused vision tower: `HydraModelOutput`; pooled is the normalised state of the [CLS] token."""

    config_class = HydraCLIPVisionConfig
    config: HydraCLIPVisionConfig
    base_model_prefix = "vision_model"
    backbone_types = ("clip_vision_model",)
    backbone_classes = (CLIPVisionModel,)
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"
    is_base_model = False

    def __init__(self, config: HydraCLIPVisionConfig):
        super().__init__(config)
        self.embeddings = of_members(config, "embeddings", lambda: HydraCLIPVisionEmbeddings(config))
        self.pre_layernorm = of_members(config, "layernorm", lambda: _layer_norm(config), layer=0)
        self.layers = hydra_layers(config)
        self.post_layernorm = of_members(config, "layernorm", lambda: _layer_norm(config))
        self.post_init()

    def start(self, pixel_values: torch.Tensor | None = None, interpolate_pos_encoding: bool = False):
        if pixel_values is None:
            raise ValueError("pixel_values is missing: pass the image processor's output")
        states = embed(self.embeddings, pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        return self.pre_layernorm(states), None, {}

    def finish(self, states: torch.Tensor):
        return states, self.post_layernorm(states[:, :, 0])

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        first_token_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        pixel_values: (batch, channels, height, width)
        first_token_only: let the last layer compute the [CLS] token alone, which is all that the pooled output needs;
            states then have one token
        """
        states, mask, for_layers = self.start(pixel_values, interpolate_pos_encoding)
        return self.encode(states, mask, first_token_only, **for_layers, **kwargs)


def _layer_norm(config: HydraCLIPTextConfig | HydraCLIPVisionConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class HydraCLIPModel(HydraCLIPPreTrainedModel):
    """Both towers, fused. Member m pairs vision member m with text member m; a tower with a single member is used
    with all members of the other."""

    backbone_classes = (CLIPModel,)
    per_member_parameters = ("logit_scale",)

    def __init__(self, config: HydraCLIPConfig):
        super().__init__(config)
        text_config, vision_config = config.text_config, config.vision_config
        self.text_model = HydraCLIPTextModel._from_config(text_config)
        self.vision_model = HydraCLIPVisionModel._from_config(vision_config)
        self.visual_projection = GroupedLinear(
            vision_config.hidden_size, [config.projection_dim] * vision_config.num_members, bias=False
        )
        self.text_projection = GroupedLinear(
            text_config.hidden_size, [config.projection_dim] * text_config.num_members, bias=False
        )
        self.logit_scale = nn.Parameter(torch.full((config.num_members,), float(config.logit_scale_init_value)))
        self.post_init()

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

    def _projected(self, projection: GroupedLinear, outputs: HydraModelOutput) -> HydraModelOutput:
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
    ) -> HydraCLIPOutput:
        """
        input_ids, attention_mask, position_ids: (texts, tokens)
        pixel_values: (images, channels, height, width)
        return_loss: whether to return the contrastive loss; text i then belongs to image i
        """
        every_token = wants_every_token(self.config, kwargs) or wants_every_token(self.config.vision_config, kwargs)
        vision_outputs = self.get_image_features(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            first_token_only=not every_token,
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
        member_logits = (cosine * self.logit_scale.exp().to(cosine.device)[:, None, None]).transpose(0, 1)
        logits_per_image = log_mean_probability(member_logits)
        logits_per_text = log_mean_probability(member_logits.permute(2, 1, 0))
        loss = None
        if return_loss:
            loss = self._contrastive_loss(member_logits, logits_per_image, logits_per_text)
        return HydraCLIPOutput(
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

    def _contrastive_loss(self, member_logits, logits_per_image, logits_per_text) -> torch.Tensor:
        if member_logits.shape[0] != member_logits.shape[2]:
            raise ValueError(
                f"return_loss got {member_logits.shape[0]} images and {member_logits.shape[2]} texts: pass them in pairs"
            )
        if self.config.ensemble_loss == "ensemble":
            return -(logits_per_image.diagonal().mean() + logits_per_text.diagonal().mean()) / 2
        members = at_least_float32(member_logits).transpose(0, 1)  # (members, images, texts)
        over_texts = members.log_softmax(dim=2).diagonal(dim1=1, dim2=2)
        over_images = members.log_softmax(dim=1).diagonal(dim1=1, dim2=2)
        return -(over_texts.mean() + over_images.mean()) / 2


__all__ = ["HydraCLIPModel", "HydraCLIPPreTrainedModel", "HydraCLIPTextModel", "HydraCLIPVisionModel"]
