"""Configurations of HydraLlama, HydraQwen2, HydraQwen3, HydraGemma and HydraGemma3Text."""

from dataclasses import replace

from huggingface_hub.dataclasses import strict
from transformers import Gemma3TextConfig, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

from .configuration_hydra import HydraConfigMixin, LayerSpec


class HydraDecoderConfigMixin(HydraConfigMixin):
    """To which a family's adds `auto_classes`, and to its layer_spec what differs from Llama's."""

    # The backbone's plans name modules that a Hydra does not have.
    base_model_tp_plan = None
    base_model_pp_plan = None
    # Whether layers may have windows; some backbones have `sliding_window` and do not read it.
    has_windows = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, num_key_value_heads {self.num_key_value_heads}: "
                "pass a multiple of these"
            )
        if self.has_windows:
            known = ["full_attention"]
            if self.sliding_window is not None:
                known.append("sliding_attention")
            for layer_type in self.layer_types:
                if layer_type not in known:
                    raise ValueError(
                        f"layer_types names {layer_type!r}, and sliding_window is {self.sliding_window}: layers are "
                        "of type 'full_attention', or where there is a window 'sliding_attention'"
                    )
        if getattr(self, "use_bidirectional_attention", None):
            raise ValueError("use_bidirectional_attention is True: tokens read those before them, set it to False")

    @property
    def queries_per_key(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def attention_window(self) -> int | None:
        if self.has_windows:
            return self.sliding_window
        return None

    @property
    def layer_spec(self) -> LayerSpec:
        has_bias = getattr(self, "attention_bias", False)
        return self.make_layer_spec(
            norm_eps=self.rms_norm_eps,
            head_dim=getattr(self, "head_dim", None),
            gated_mlp=True,
            mlp_bias=getattr(self, "mlp_bias", False),
            qkv_bias=has_bias,
            output_bias=has_bias,
            attention_dropout=self.attention_dropout or 0.0,
        )


@strict
class HydraLlamaConfig(HydraDecoderConfigMixin, LlamaConfig):
    r"""A [`LlamaConfig`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_llama"
    auto_classes = {
        "AutoConfig": "configuration_hydra_decoders.HydraLlamaConfig",
        "AutoModel": "modeling_hydra_decoders.HydraLlamaModel",
        "AutoModelForSequenceClassification": "modeling_hydra_decoders.HydraLlamaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_decoders.HydraLlamaForTokenClassification",
    }


@strict
class HydraQwen2Config(HydraDecoderConfigMixin, Qwen2Config):
    r"""A [`Qwen2Config`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_qwen2"
    auto_classes = {
        "AutoConfig": "configuration_hydra_decoders.HydraQwen2Config",
        "AutoModel": "modeling_hydra_decoders.HydraQwen2Model",
        "AutoModelForSequenceClassification": "modeling_hydra_decoders.HydraQwen2ForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_decoders.HydraQwen2ForTokenClassification",
    }
    has_windows = True

    @property
    def layer_spec(self) -> LayerSpec:
        return replace(super().layer_spec, qkv_bias=True, output_bias=False)


@strict
class HydraQwen3Config(HydraDecoderConfigMixin, Qwen3Config):
    r"""A [`Qwen3Config`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_qwen3"
    auto_classes = {
        "AutoConfig": "configuration_hydra_decoders.HydraQwen3Config",
        "AutoModel": "modeling_hydra_decoders.HydraQwen3Model",
        "AutoModelForSequenceClassification": "modeling_hydra_decoders.HydraQwen3ForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_decoders.HydraQwen3ForTokenClassification",
    }
    has_windows = True


@strict
class HydraGemmaConfig(HydraDecoderConfigMixin, GemmaConfig):
    r"""A [`GemmaConfig`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_gemma"
    auto_classes = {
        "AutoConfig": "configuration_hydra_decoders.HydraGemmaConfig",
        "AutoModel": "modeling_hydra_decoders.HydraGemmaModel",
        "AutoModelForSequenceClassification": "modeling_hydra_decoders.HydraGemmaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_decoders.HydraGemmaForTokenClassification",
    }


@strict
class HydraGemma3TextConfig(HydraDecoderConfigMixin, Gemma3TextConfig):
    r"""A [`Gemma3TextConfig`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_gemma3_text"
    attribute_map = {"hidden_act": "hidden_activation"}
    auto_classes = {
        "AutoConfig": "configuration_hydra_decoders.HydraGemma3TextConfig",
        "AutoModel": "modeling_hydra_decoders.HydraGemma3TextModel",
        "AutoModelForSequenceClassification": "modeling_hydra_decoders.HydraGemma3TextForSequenceClassification",
    }
    has_windows = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.attn_logit_softcapping is not None:
            raise ValueError(f"attn_logit_softcapping is {self.attn_logit_softcapping}: set it to None")
