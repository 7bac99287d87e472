"""HydraSiglip: M head-pruned SigLIP models as one network, for zero-shot classification that knows its limits; and SigLIP's
image classifier, a vision tower with a head.

SigLIP says of an image and a text whether they belong together, by a sigmoid: probabilities of several texts need not add up
to 1, and the ensemble's probability of a pair is the mean of the members', whatever else is in the call.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import SiglipForImageClassification, SiglipModel, SiglipTextModel, SiglipVisionModel
from transformers import initialization as init
from transformers.models.siglip.modeling_siglip import (
    SiglipMultiheadAttentionPoolingHead,
    SiglipPreTrainedModel,
    SiglipTextEmbeddings,
    SiglipVisionEmbeddings,
)

from .configuration_hydra_siglip import HydraSiglipConfig, HydraSiglipTextConfig, HydraSiglipVisionConfig
from .images import as_patch_projection
from .modeling_hydra import (
    Grouped,
    GroupedLinear,
    at_least_float32,
    hydra_layers,
    logit_of_mean_probability,
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
class HydraSiglipOutput(HydraTowersOutput):
    """
    loss: scalar, where `return_loss` was set
    logits_per_image: (images, texts), whose sigmoid is the mean over the members of the probability that both belong together
    logits_per_text: (texts, images), the same the other way round
    member_logits: (images, members, texts), logit scale times cosine, plus logit bias
    text_embeds: (texts, members of the text tower, projection), normalised
    image_embeds: (images, members of the vision tower, projection), normalised
    similarity: (images, texts), the mean of `member_logits` over the members
    """


class HydraSiglipVisionEmbeddings(SiglipVisionEmbeddings):
    """SigLIP's image embeddings with the patches embedded by a product."""

    def __init__(self, config: HydraSiglipVisionConfig):
        super().__init__(config)
        self.patch_embedding = as_patch_projection(self.patch_embedding)


class HydraSiglipPreTrainedModel(HydraModelMixin, SiglipPreTrainedModel):
    config_class = HydraSiglipConfig
    config: HydraSiglipConfig
    base_model_prefix = "siglip"
    architecture = "SigLIP"
    _no_split_modules = [
        "SiglipTextEmbeddings",
        "HydraSiglipVisionEmbeddings",
        "HydraLayer",
        "SiglipMultiheadAttentionPoolingHead",
    ]
    backbone_types = ("siglip",)
    backbone_rules = (
        *TOWER_RULES,
        *(Rule(name, name, lambda tensor: tensor.squeeze(0)) for name in ("logit_scale", "logit_bias")),
    )

    def initial_std(self, module: Grouped) -> float:
        return module.columns**-0.5

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, HydraSiglipModel):
            init.zeros_(module.logit_scale)
            init.zeros_(module.logit_bias)


class HydraSiglipTextModel(HydraTextTowerMixin, HydraSiglipPreTrainedModel):
    """The fused text tower: `HydraModelOutput`; pooled is what a head per member makes of the last token, be it padding."""

    config_class = HydraSiglipTextConfig
    config: HydraSiglipTextConfig
    backbone_types = ("siglip_text_model",)
    backbone_classes = (SiglipTextModel,)
    last_norm = "final_layer_norm"

    def __init__(self, config: HydraSiglipTextConfig):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: SiglipTextEmbeddings(config))
        self.layers = hydra_layers(config)
        self.final_layer_norm = shared_or_per_member(config, "layernorm", lambda: layer_norm_of(config))
        self.head = GroupedLinear(config.hidden_size, [config.projection_size] * config.num_members)
        self.post_init()

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return self.head(hidden_states[:, :, -1])


class HydraSiglipVisionModel(HydraVisionTowerMixin, HydraSiglipPreTrainedModel):
    """The fused vision tower: `HydraModelOutput`; pooled is what a probe per member reads of all tokens, by an attention of its
    own whose heads are not pruned."""

    config_class = HydraSiglipVisionConfig
    config: HydraSiglipVisionConfig
    backbone_types = ("siglip_vision_model",)
    backbone_classes = (SiglipVisionModel,)
    last_norm = "post_layernorm"
    has_pooled_token = False  # all tokens are patches

    def __init__(self, config: HydraSiglipVisionConfig):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: HydraSiglipVisionEmbeddings(config))
        self.layers = hydra_layers(config)
        self.post_layernorm = shared_or_per_member(config, "layernorm", lambda: layer_norm_of(config))
        self.head = None
        if config.vision_use_head:
            self.head = shared_or_per_member(config, "head", lambda: SiglipMultiheadAttentionPoolingHead(config))
        self.post_init()

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor | None:
        """(members or 1, batch, tokens, hidden) -> (members, batch, hidden)"""
        if self.head is None:
            return None
        return self.head(hidden_states) if self.num_members > 1 else self.head(hidden_states[0]).unsqueeze(0)


class HydraSiglipModel(HydraTwoTowersMixin, HydraSiglipPreTrainedModel):
    """Both towers, fused: `HydraSiglipOutput`."""

    backbone_classes = (SiglipModel,)
    per_member_parameters = ("logit_scale", "logit_bias")
    reads_padding = True
    output_class = HydraSiglipOutput

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
        """Minus the log probability that pairs belong together and all others do not: the sum over texts, the mean over
        images and members."""
        if self.config.ensemble_loss == "ensemble":
            member_logits = logits_per_image.unsqueeze(1)
        members = at_least_float32(member_logits).transpose(0, 1)  # (members, images, texts)
        sign = 2 * torch.eye(members.shape[-1], device=members.device, dtype=members.dtype) - 1
        return -logsigmoid(sign * members).sum(dim=-1).mean()


class HydraSiglipForImageClassification(HydraVisionTowerClassifierMixin, HydraSiglipPreTrainedModel):
    """The fused image classifier, which reads the mean of the patches: `logits` is the ensemble's answer, `member_logits` each
    member's."""

    config_class = HydraSiglipVisionConfig
    config: HydraSiglipVisionConfig
    backbone_classes = (SiglipForImageClassification,)
    tower_class = HydraSiglipVisionModel
    # A backbone's classifier has the pooling head, and does not read it.
    own_fields = {"vision_use_head": False}
    unread = ("vision_model.head.",)

    def select_features(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return hidden_states.mean(dim=2)


__all__ = [
    "HydraSiglipForImageClassification",
    "HydraSiglipModel",
    "HydraSiglipPreTrainedModel",
    "HydraSiglipTextModel",
    "HydraSiglipVisionModel",
]
