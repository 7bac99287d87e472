"""HydraCLIP: M head-pruned CLIP models as one network, for zero-shot classification that knows its limits."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPPreTrainedModel, CLIPTextEmbeddings, CLIPVisionEmbeddings
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import HydraAttention, HydraMLP, mask_of_first_token, members_mask
from .bare_layers import run_layers
from .configuration_hydra_clip import HydraCLIPConfig, HydraCLIPTextConfig, HydraCLIPVisionConfig
from .ensembling import (
    HydraCLIPOutput,
    RecordedStates,
    at_least_float32,
    batch_first,
    log_mean_probability,
    wants_every_token,
)
from .fusion import HydraModelMixin, Member
from .grouped import Grouped, GroupedLinear, embed, init_grouped, shared_or_per_member
from .kernels import add_and_layer_norm, layer_norm
from .patches import as_patch_projection


class HydraCLIPVisionEmbeddings(CLIPVisionEmbeddings):
    """CLIP's image embeddings with the patches embedded by a product."""

    def __init__(self, config: HydraCLIPVisionConfig):
        super().__init__(config)
        self.patch_embedding = as_patch_projection(self.patch_embedding)


class HydraCLIPLayer(GradientCheckpointingLayer):
    """The fused pre-norm Transformer layer of both towers, equations 4 to 7."""

    norms = ("layernorm_before", "layernorm_after")
    is_pre_norm = True

    def __init__(self, config: HydraCLIPTextConfig | HydraCLIPVisionConfig, layer: int):
        super().__init__()
        members, shared = config.num_members, config.shared

        def layernorm():
            return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

        self.layernorm_before = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.attention = HydraAttention(
            config, config.kept_heads[layer], dropout=config.attention_dropout, bias=True, float32_softmax=True
        )
        self.layernorm_after = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.mlp = shared_or_per_member(lambda: HydraMLP(config), members, "mlp" in shared)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        first_token_only: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden)"""
        normed = layer_norm(self.layernorm_before, hidden_states)
        queries = None
        if first_token_only:
            hidden_states, queries = hidden_states[:, :, :1], normed[:, :, :1]
            attention_mask = mask_of_first_token(attention_mask)
        attention, _ = self.attention(normed, attention_mask, queries, **kwargs)
        hidden_states, normed = add_and_layer_norm(self.layernorm_after, hidden_states, attention)
        return hidden_states + self.mlp(normed)


class HydraCLIPPreTrainedModel(HydraModelMixin, CLIPPreTrainedModel):
    config_class = HydraCLIPConfig
    config: HydraCLIPConfig
    base_model_prefix = "clip"
    _no_split_modules = ["CLIPTextEmbeddings", "HydraCLIPVisionEmbeddings", "HydraCLIPLayer"]
    _can_record_outputs = {"hidden_states": RecordedStates, "attentions": HydraAttention}
    backbone_types = ("clip",)
    backbone_names = (
        ("layers.", "encoder.layers."),
        (".attention.o_proj.", ".attention.out_proj."),
        (".attention.", ".self_attn."),
        (".layernorm_before.", ".layer_norm1."),
        (".layernorm_after.", ".layer_norm2."),
        ("pre_layernorm.", "pre_layrnorm."),
    )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, Grouped):
            init_grouped(module, std=module.columns**-0.5 * self.config.initializer_factor)
        elif isinstance(module, HydraCLIPModel):
            init.constant_(module.logit_scale, self.config.logit_scale_init_value)


class HydraCLIPTextModel(HydraCLIPPreTrainedModel):
    """The fused text tower. `last_hidden_state` is (batch, members, tokens, hidden), `pooler_output`
    (batch, members, hidden), the state of the first end-of-text token."""

    config_class = HydraCLIPTextConfig
    config: HydraCLIPTextConfig
    base_model_prefix = "text_model"
    backbone_types = ("clip_text_model",)
    main_input_name = "input_ids"
    input_modalities = ("text",)
    _input_embed_layer = "token_embedding"

    def __init__(self, config: HydraCLIPTextConfig):
        super().__init__(config)
        members, shared = config.num_members, config.shared
        self.embeddings = shared_or_per_member(lambda: CLIPTextEmbeddings(config), members, "embeddings" in shared)
        self.layers = nn.ModuleList(HydraCLIPLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.recorded_states = RecordedStates()
        self.final_layer_norm = shared_or_per_member(
            lambda: nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps), members, "layernorm" in shared
        )
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """input_ids, attention_mask, position_ids: (batch, tokens)"""
        if input_ids is None:
            raise ValueError("input_ids is missing: pass the tokenizer's output")
        hidden_states = embed(self.embeddings, input_ids=input_ids, position_ids=position_ids)
        attention_mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden_states[0], attention_mask=attention_mask, past_key_values=None
        )
        attention_mask = members_mask(attention_mask, hidden_states.shape[1], self.num_members)
        kwargs["is_causal"] = True
        hidden_states = run_layers(self, hidden_states, attention_mask, **kwargs)
        hidden_states = self.final_layer_norm(hidden_states)

        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        pooled = hidden_states[:, rows, self._end_of_text(input_ids.to(hidden_states.device))]
        return BaseModelOutputWithPooling(
            last_hidden_state=batch_first(hidden_states, self.num_members),
            pooler_output=batch_first(pooled, self.num_members),
        )

    def _end_of_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Position of the token that stands for the text: (batch, tokens) -> (batch,)"""
        if self.config.eos_token_id == 2:
            # Configs from before transformers 4.30 name a wrong end-of-text token; it has the highest id of all.
            return input_ids.int().argmax(dim=-1)
        return (input_ids == self.config.eos_token_id).int().argmax(dim=-1)


class HydraCLIPVisionModel(HydraCLIPPreTrainedModel):
    """The fused vision tower. `last_hidden_state` is (batch, members, tokens, hidden), `pooler_output`
    (batch, members, hidden), the normalised state of the [CLS] token."""

    config_class = HydraCLIPVisionConfig
    config: HydraCLIPVisionConfig
    base_model_prefix = "vision_model"
    backbone_types = ("clip_vision_model",)
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"

    def __init__(self, config: HydraCLIPVisionConfig):
        super().__init__(config)
        members, shared = config.num_members, config.shared

        def layernorm():
            return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

        self.embeddings = shared_or_per_member(
            lambda: HydraCLIPVisionEmbeddings(config), members, "embeddings" in shared
        )
        self.pre_layernorm = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.layers = nn.ModuleList(HydraCLIPLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.recorded_states = RecordedStates()
        self.post_layernorm = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        first_token_only: bool = False,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """
        pixel_values: (batch, channels, height, width)
        first_token_only: let the last layer compute the [CLS] token alone, which is all that the pooled output needs;
            `last_hidden_state` then has one token
        """
        if pixel_values is None:
            raise ValueError("pixel_values is missing: pass the image processor's output")
        hidden_states = embed(self.embeddings, pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        hidden_states = self.pre_layernorm(hidden_states)
        hidden_states = run_layers(self, hidden_states, None, first_token_only, **kwargs)
        pooled = self.post_layernorm(hidden_states[:, :, 0])
        return BaseModelOutputWithPooling(
            last_hidden_state=batch_first(hidden_states, self.num_members),
            pooler_output=batch_first(pooled, self.num_members),
        )


class HydraCLIPModel(HydraCLIPPreTrainedModel):
    """Both towers, fused. Member m pairs vision member m with text member m; a tower with a single member is used
    with all members of the other."""

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

    @classmethod
    def can_share_text_tower(cls, members: list[Member]) -> bool:
        """Members that differ in the vision tower only need the text tower once."""
        first = members[0].tensors

        def is_equal_in_all(side: str) -> bool:
            names = [name for name in first if name.startswith(side)]
            others = members[1:]
            return all(
                torch.equal(other.tensors[name].to(first[name].device), first[name])
                for other in others
                for name in names
            )

        return is_equal_in_all("text_") and not is_equal_in_all("vis")

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """`pooler_output` is (texts, members of the text tower, projection), not normalised."""
        outputs = self.text_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        outputs.pooler_output = self._project(self.text_projection, outputs.pooler_output)
        return outputs

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False, **kwargs
    ) -> BaseModelOutputWithPooling:
        """`pooler_output` is (images, members of the vision tower, projection), not normalised."""
        outputs = self.vision_model(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            return_dict=True,
            **kwargs,
        )
        outputs.pooler_output = self._project(self.visual_projection, outputs.pooler_output)
        return outputs

    def _project(self, projection: GroupedLinear, pooled: torch.Tensor) -> torch.Tensor:
        """(batch, members, hidden) -> (batch, members, projection)"""
        return projection(pooled.transpose(0, 1)).transpose(0, 1)

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
        image_embeds = nn.functional.normalize(vision_outputs.pooler_output, dim=-1)
        text_embeds = nn.functional.normalize(text_outputs.pooler_output, dim=-1)

        # (members, images, texts)
        similarity = image_embeds.transpose(0, 1) @ text_embeds.to(image_embeds.device).permute(1, 2, 0)
        member_logits = (similarity * self.logit_scale.exp().to(similarity.device)[:, None, None]).transpose(0, 1)
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
