"""HydraCLIP: M head-pruned CLIP models as one network, for zero-shot classification that knows its limits; and CLIP's image
classifier, a vision tower with a head."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import CLIPForImageClassification, CLIPModel, CLIPTextModel, CLIPVisionModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.models.clip.modeling_clip import CLIPPreTrainedModel, CLIPTextEmbeddings, CLIPVisionEmbeddings

from .configuration_hydra_clip import HydraCLIPConfig, HydraCLIPTextConfig, HydraCLIPVisionConfig
from .images import as_patch_projection
from .modeling_hydra import (
    Grouped,
    GroupedLinear,
    at_least_float32,
    hydra_layers,
    log_mean_probability,
    members_mask,
    shared_or_per_member,
)
from .pretrained import HydraModelMixin, Rule
from .towers import (
    TOWER_RULES,
    HydraTextTowerMixin,
    HydraTowersOutput,
    HydraTwoTowersMixin,
    HydraVisionTowerClassifierMixin,
    HydraVisionTowerMixin,
    layer_norm_of,
)


@dataclass
class HydraCLIPOutput(HydraTowersOutput):
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
        *TOWER_RULES,
        Rule("pre_layernorm.*", "pre_layrnorm.*"),
    )

    def initial_std(self, module: Grouped) -> float:
        return module.columns**-0.5 * self.config.initializer_factor

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, HydraCLIPModel):
            init.constant_(module.logit_scale, self.config.logit_scale_init_value)


class HydraCLIPTextModel(HydraTextTowerMixin, HydraCLIPPreTrainedModel):
    """The fused text tower: `HydraModelOutput`; pooled is the state of the first end-of-text token."""

    config_class = HydraCLIPTextConfig
    config: HydraCLIPTextConfig
    backbone_types = ("clip_text_model",)
    backbone_classes = (CLIPTextModel,)
    last_norm = "final_layer_norm"

    def __init__(self, config: HydraCLIPTextConfig):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: CLIPTextEmbeddings(config))
        self.layers = hydra_layers(config)
        self.final_layer_norm = shared_or_per_member(config, "layernorm", lambda: layer_norm_of(config))
        self.post_init()

    def embed_inputs(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        if input_ids is None:
            raise ValueError("input_ids is missing: pass the tokenizer's output, in which the end of a text is found")
        hidden_states = self.embed_words(input_ids, inputs_embeds, position_ids=position_ids)
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden_states[0], attention_mask=attention_mask, past_key_values=None
        )
        return hidden_states, members_mask(mask, hidden_states.shape[1], self.num_members), {"is_causal": True}

    def pool(self, hidden_states: torch.Tensor, input_ids: torch.Tensor, **inputs) -> torch.Tensor:
        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return hidden_states[:, rows, self._end_of_text(input_ids.to(hidden_states.device))]

    def _end_of_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Position of the token that stands for the text: (batch, tokens) -> (batch,)"""
        if self.config.eos_token_id == 2:
            # Configs from before transformers 4.30 name a wrong end-of-text token; it has the highest id of all.
            return input_ids.int().argmax(dim=-1)
        return (input_ids == self.config.eos_token_id).int().argmax(dim=-1)


class HydraCLIPVisionModel(HydraVisionTowerMixin, HydraCLIPPreTrainedModel):
    """The fused vision tower: `HydraModelOutput`; pooled is the normalised state of the [CLS] token."""

    config_class = HydraCLIPVisionConfig
    config: HydraCLIPVisionConfig
    backbone_types = ("clip_vision_model",)
    backbone_classes = (CLIPVisionModel,)

    def __init__(self, config: HydraCLIPVisionConfig):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: HydraCLIPVisionEmbeddings(config))
        self.pre_layernorm = shared_or_per_member(config, "layernorm", lambda: layer_norm_of(config), layer=0)
        self.layers = hydra_layers(config)
        self.post_layernorm = shared_or_per_member(config, "layernorm", lambda: layer_norm_of(config))
        self.post_init()

    def embed_inputs(self, **inputs):
        hidden_states, mask, layer_kwargs = super().embed_inputs(**inputs)
        return self.pre_layernorm(hidden_states), mask, layer_kwargs

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return self.post_layernorm(hidden_states[:, :, 0])


class HydraCLIPModel(HydraTwoTowersMixin, HydraCLIPPreTrainedModel):
    """Both towers, fused: `HydraCLIPOutput`."""

    backbone_classes = (CLIPModel,)
    per_member_parameters = ("logit_scale",)
    reads_first_token = True
    output_class = HydraCLIPOutput

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

    def ensemble(self, member_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return log_mean_probability(member_logits), log_mean_probability(member_logits.permute(2, 1, 0))

    def loss_of_pairs(self, member_logits: torch.Tensor, logits_per_image, logits_per_text) -> torch.Tensor:
        if self.config.ensemble_loss == "ensemble":
            return -(logits_per_image.diagonal().mean() + logits_per_text.diagonal().mean()) / 2
        members = at_least_float32(member_logits).transpose(0, 1)  # (members, images, texts)
        over_texts = members.log_softmax(dim=2).diagonal(dim1=1, dim2=2)
        over_images = members.log_softmax(dim=1).diagonal(dim1=1, dim2=2)
        return -(over_texts.mean() + over_images.mean()) / 2


class HydraCLIPForImageClassification(HydraVisionTowerClassifierMixin, HydraCLIPPreTrainedModel):
    """The fused image classifier, which reads the mean of the patches: `logits` is the ensemble's answer, `member_logits` each
    member's."""

    config_class = HydraCLIPVisionConfig
    config: HydraCLIPVisionConfig
    backbone_classes = (CLIPForImageClassification,)
    tower_class = HydraCLIPVisionModel
    unread = ("vision_model.post_layernorm.",)

    def select_features(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return hidden_states[:, :, 1:].mean(dim=2)


__all__ = [
    "HydraCLIPForImageClassification",
    "HydraCLIPModel",
    "HydraCLIPPreTrainedModel",
    "HydraCLIPTextModel",
    "HydraCLIPVisionModel",
]
