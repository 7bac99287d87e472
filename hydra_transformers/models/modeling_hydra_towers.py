"""HydraCLIP and HydraSiglip: M head-pruned models of two towers as one network, for zero-shot
classification that knows its limits; and their image classifiers, a vision tower with a head.

SigLIP says of an image and a text whether they belong together, by a sigmoid: probabilities of
several texts need not add up to 1, and the ensemble's probability of a pair is the mean of the
members', whatever else is in the call.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.models.clip.modeling_clip import CLIPPreTrainedModel, CLIPTextEmbeddings, CLIPVisionEmbeddings
from transformers.models.siglip.modeling_siglip import (
    SiglipMultiheadAttentionPoolingHead,
    SiglipPreTrainedModel,
    SiglipTextEmbeddings,
    SiglipVisionEmbeddings,
)
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .configuration_hydra_towers import (
    HydraCLIPConfig,
    HydraCLIPTextConfig,
    HydraCLIPVisionConfig,
    HydraSiglipConfig,
    HydraSiglipTextConfig,
    HydraSiglipVisionConfig,
)
from .ensembling import at_least_float32, log_mean_probability
from .images import HydraImageClassifierMixin, HydraImageEncoderMixin, PatchProductMixin
from .modeling_hydra import (
    Grouped,
    GroupedLinear,
    HydraModelOutput,
    encoder_mask,
    mean_of_members,
    shared_or_per_member,
)
from .pretrained import HydraModelMixin
from .task_multi_label import logit_of_mean_probability
from .texts import HydraTextEncoderMixin


@dataclass
class HydraTowersOutput(ModelOutput):
    """
    loss: scalar, where `return_loss` was set
    logits_per_image: (images, texts), the ensemble's prediction. For CLIP the log of the members'
        mean probability over the texts of this call, so that a single text has the logit 0; for
        SigLIP the log-odds of the mean probability that both belong together
    logits_per_text: (texts, images), the same the other way round
    member_logits: (images, members, texts), logit scale times cosine, for SigLIP plus the logit
        bias
    text_embeds: (texts, members of the text tower, projection), normalised
    image_embeds: (images, members of the vision tower, projection), normalised
    similarity: (images, texts), the mean of `member_logits` over the members: of one image and one
        text, whatever else is in the call. For retrieval, thresholds and single pairs; what CLIP
        itself calls `logits_per_image`
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
    last_norm = "final_layer_norm"


class HydraVisionTowerClassifierMixin(HydraImageClassifierMixin):
    """A vision tower with a classifier per member, which reads the mean of the patches: `logits` is
    the ensemble's prediction, `member_logits` each member's.

    The config is the tower's own, with the classes; a backbone's has it, as `backbone_config_key`,
    beside that of a text tower which its classifier has no use for.
    """

    base_model_prefix = "vision_model"
    backbone_config_key = "vision_config"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"
    reads_first_token = False

    def __init__(self, config: PreTrainedConfig):
        for name, value in self.own_fields.items():
            setattr(config, name, value)
        super().__init__(config)


class HydraTwoTowersMixin:
    """Both towers, fused: `HydraTowersOutput`. Member m pairs vision member m with text member m; a
    tower with a single member is used with all members of the other.

    A family has `text_model`, `vision_model`, `text_projection`, `visual_projection` and
    `logit_scale`, and says how cosines become the members' logits (`logits_of`), these the
    ensemble's (`ensemble`), and both a loss (`loss_of_pairs`).
    """

    # Whether images are pooled from the first token's state alone, so that the last layer need not
    # compute the others.
    reads_first_token = False
    # Whether texts are pooled from their last token, be it padding: they have to be padded as in
    # training, to full length.
    reads_padding = False

    def pipeline_class(self) -> type:
        from .pipeline_hydra_zero_shot import HydraZeroShotImageClassificationPipeline  # not above, as in `predict`

        return HydraZeroShotImageClassificationPipeline

    def logits_of(self, cosine: torch.Tensor) -> torch.Tensor:
        """The members' logits: (members, images, texts) -> (members, images, texts)"""
        return cosine * self.logit_scale.exp().to(cosine.device)[:, None, None]

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """Return the features of texts, not normalised: `member_pooler_output` is (texts, members
        of the text tower, projection), `pooler_output` is its mean over the members."""
        outputs = self.text_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        return self._projected(self.text_projection, outputs)

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False, **kwargs
    ) -> HydraModelOutput:
        """Return the features of images, not normalised: `member_pooler_output` is (images, members
        of the vision tower, projection), `pooler_output` is its mean over the members."""
        outputs = self.vision_model(
            pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, return_dict=True, **kwargs
        )
        return self._projected(self.visual_projection, outputs)

    def _projected(self, projection: nn.Module, outputs: HydraModelOutput) -> HydraModelOutput:
        """Project the pooled states: (batch, members, hidden) -> (batch, members, projection)"""
        pooled = projection(outputs.member_pooler_output.transpose(0, 1))
        outputs.member_pooler_output = pooled.transpose(0, 1)
        outputs.pooler_output = mean_of_members(pooled)
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
                    f"return_loss got {member_logits.shape[0]} images and {member_logits.shape[2]} texts: pass them "
                    "in pairs"
                )
            loss = self.loss_of_pairs(member_logits, logits_per_image, logits_per_text)
        return HydraTowersOutput(
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


class HydraCLIPVisionEmbeddings(PatchProductMixin, CLIPVisionEmbeddings):
    convolution_name = "patch_embedding"


class HydraCLIPPreTrainedModel(HydraModelMixin, CLIPPreTrainedModel):
    config_class = HydraCLIPConfig
    base_model_prefix = "clip"
    architecture = "CLIP"
    _no_split_modules = ["CLIPTextEmbeddings", "HydraCLIPVisionEmbeddings", "HydraLayer"]

    def initial_std(self, module: Grouped) -> float:
        return module.columns**-0.5 * self.config.initializer_factor

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, HydraCLIPModel):
            init.constant_(module.logit_scale, self.config.logit_scale_init_value)


class HydraCLIPTextModel(HydraTextTowerMixin, HydraCLIPPreTrainedModel):
    """The fused text tower: `HydraModelOutput`; pooled is the state of the first end-of-text
    token."""

    config_class = HydraCLIPTextConfig
    embeddings_class = CLIPTextEmbeddings

    def embed_inputs(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **inputs
    ):
        if input_ids is None:
            raise ValueError("input_ids is missing: pass the tokenizer's output, in which the end of a text is found")
        hidden_states, _, _ = super().embed_inputs(input_ids, **inputs)
        mask = encoder_mask(self.config, hidden_states, attention_mask, create_causal_mask, past_key_values=None)
        return hidden_states, mask, {"is_causal": True}

    def pool(self, hidden_states: torch.Tensor, input_ids: torch.Tensor, **inputs) -> torch.Tensor:
        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return hidden_states[:, rows, self._end_of_text(input_ids.to(hidden_states.device))]

    def _end_of_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Position of the token that stands for the text: (batch, tokens) -> (batch,)"""
        if self.config.eos_token_id == 2:
            # Configs from before transformers 4.30 name a wrong end-of-text token; it has the
            # highest id of all.
            return input_ids.int().argmax(dim=-1)
        return (input_ids == self.config.eos_token_id).int().argmax(dim=-1)


class HydraCLIPVisionModel(HydraVisionTowerMixin, HydraCLIPPreTrainedModel):
    """The fused vision tower: `HydraModelOutput`; pooled is the normalised state of the [CLS]
    token."""

    config_class = HydraCLIPVisionConfig
    embeddings_class = HydraCLIPVisionEmbeddings

    def add_positions(self, config: HydraCLIPVisionConfig) -> None:
        norm = partial(self.make_norm(config), config.hidden_size)
        self.pre_layernorm = shared_or_per_member(config, "layernorm", norm, layer=0)

    def add_pooling(self, config: HydraCLIPVisionConfig) -> None:
        # Behind the layers, where it runs: a trunk is as long as what comes before it is equal.
        norm = partial(self.make_norm(config), config.hidden_size)
        self.post_layernorm = shared_or_per_member(config, "layernorm", norm)

    def embed_inputs(self, **inputs):
        hidden_states, mask, layer_kwargs = super().embed_inputs(**inputs)
        return self.pre_layernorm(hidden_states), mask, layer_kwargs

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return self.post_layernorm(hidden_states[:, :, 0])


class HydraCLIPModel(HydraTwoTowersMixin, HydraCLIPPreTrainedModel):
    per_member_parameters = ("logit_scale",)
    reads_first_token = True

    def __init__(self, config: HydraCLIPConfig):
        super().__init__(config)
        text_config = config.text_config
        vision_config = config.vision_config
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
        """(images, members, texts) -> (images, texts) and (texts, images)"""
        return log_mean_probability(member_logits), log_mean_probability(member_logits.permute(2, 1, 0))

    def loss_of_pairs(self, member_logits: torch.Tensor, logits_per_image, logits_per_text) -> torch.Tensor:
        if self.config.ensemble_loss == "ensemble":
            return -(logits_per_image.diagonal().mean() + logits_per_text.diagonal().mean()) / 2
        members = at_least_float32(member_logits).transpose(0, 1)  # (members, images, texts)
        over_texts = members.log_softmax(dim=2).diagonal(dim1=1, dim2=2)
        over_images = members.log_softmax(dim=1).diagonal(dim1=1, dim2=2)
        return -(over_texts.mean() + over_images.mean()) / 2


class HydraCLIPForImageClassification(HydraVisionTowerClassifierMixin, HydraCLIPPreTrainedModel):
    config_class = HydraCLIPVisionConfig
    encoder_class = HydraCLIPVisionModel
    unused_prefixes = ("vision_model.post_layernorm.",)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return hidden_states[:, :, 1:].mean(dim=2)


class HydraSiglipVisionEmbeddings(PatchProductMixin, SiglipVisionEmbeddings):
    convolution_name = "patch_embedding"


class HydraSiglipPreTrainedModel(HydraModelMixin, SiglipPreTrainedModel):
    config_class = HydraSiglipConfig
    base_model_prefix = "siglip"
    architecture = "SigLIP"
    _no_split_modules = [
        "SiglipTextEmbeddings",
        "HydraSiglipVisionEmbeddings",
        "HydraLayer",
        "SiglipMultiheadAttentionPoolingHead",
    ]

    def initial_std(self, module: Grouped) -> float:
        return module.columns**-0.5

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, HydraSiglipModel):
            init.zeros_(module.logit_scale)
            init.zeros_(module.logit_bias)


class HydraSiglipTextModel(HydraTextTowerMixin, HydraSiglipPreTrainedModel):
    """The fused text tower: `HydraModelOutput`; pooled is what a head per member makes of the last
    token, be it padding."""

    config_class = HydraSiglipTextConfig
    embeddings_class = SiglipTextEmbeddings

    def add_pooling(self, config: HydraSiglipTextConfig) -> None:
        self.head = GroupedLinear(config.hidden_size, [config.projection_size] * config.num_members)

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return self.head(hidden_states[:, :, -1])


class HydraSiglipVisionModel(HydraVisionTowerMixin, HydraSiglipPreTrainedModel):
    """The fused vision tower: `HydraModelOutput`; pooled is what a probe per member reads of all
    tokens, by an attention of its own whose heads are not pruned."""

    config_class = HydraSiglipVisionConfig
    last_norm = "post_layernorm"
    embeddings_class = HydraSiglipVisionEmbeddings

    def add_pooling(self, config: HydraSiglipVisionConfig) -> None:
        self.head = None
        if config.vision_use_head:
            self.head = shared_or_per_member(config, "head", lambda: SiglipMultiheadAttentionPoolingHead(config))

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor | None:
        """(members or 1, batch, tokens, hidden) -> (members, batch, hidden)"""
        if self.head is None:
            return None
        if self.num_members == 1:
            return self.head(hidden_states[0]).unsqueeze(0)
        return self.head(hidden_states)


class HydraSiglipModel(HydraTwoTowersMixin, HydraSiglipPreTrainedModel):
    per_member_parameters = ("logit_scale", "logit_bias")
    reads_padding = True

    def __init__(self, config: HydraSiglipConfig):
        super().__init__(config)
        self.text_model = HydraSiglipTextModel._from_config(config.text_config)
        self.vision_model = HydraSiglipVisionModel._from_config(config.vision_config)
        self.text_projection = self.visual_projection = nn.Identity()  # the towers' heads have done it
        self.logit_scale = nn.Parameter(torch.zeros(config.num_members))
        self.logit_bias = nn.Parameter(torch.zeros(config.num_members))
        self.post_init()

    def logits_of(self, cosine: torch.Tensor) -> torch.Tensor:
        return super().logits_of(cosine) + self.logit_bias.to(cosine.device)[:, None, None]

    def ensemble(self, member_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logit_of_mean_probability(member_logits)
        return logits, logits.t()

    def loss_of_pairs(self, member_logits: torch.Tensor, logits_per_image, logits_per_text) -> torch.Tensor:
        """Return minus the log probability that pairs belong together and all others do not: the
        sum over texts, the mean over images and members."""
        if self.config.ensemble_loss == "ensemble":
            member_logits = logits_per_image.unsqueeze(1)
        members = at_least_float32(member_logits).transpose(0, 1)  # (members, images, texts)
        sign = 2 * torch.eye(members.shape[-1], device=members.device, dtype=members.dtype) - 1
        return -logsigmoid(sign * members).sum(dim=-1).mean()


class HydraSiglipForImageClassification(HydraVisionTowerClassifierMixin, HydraSiglipPreTrainedModel):
    config_class = HydraSiglipVisionConfig
    encoder_class = HydraSiglipVisionModel
    # A backbone's classifier has the pooling head, and does not read it.
    own_fields = {"vision_use_head": False}
    unused_prefixes = ("vision_model.head.",)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return hidden_states.mean(dim=2)
