"""Where the backbones of each family have the parameters of a one-member Hydra. Models are built by
it, and run without it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .families import FAMILIES


@dataclass(frozen=True)
class Rule:
    """Where a backbone has parameters of a one-member Hydra.

    ours, theirs: names with `*` for what both have in common, such as the number of the layer
    transform: makes one tensor of theirs; by default they are the same
    """

    ours: str
    theirs: str | tuple[str, ...]
    transform: Callable[..., torch.Tensor] = lambda tensor: tensor


def joined(*tensors: torch.Tensor) -> torch.Tensor:
    """Join the weights, or biases, of several maps as those of one."""
    return torch.cat(tensors)


def as_row(vector: torch.Tensor) -> torch.Tensor:
    """Return a vector of one member as the row that it has among several: (numbers) -> (1,
    numbers)"""
    return vector.unsqueeze(0)


def with_key_bias_of_zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Join the biases of queries, keys and values where keys have none.

    A key bias of any size changes no prediction: it adds the same number to all scores of a query.
    """
    return torch.cat([query, torch.zeros_like(query), value])


def attention_rules(layer: str, projections: Iterable[str]) -> tuple[Rule, ...]:
    """Return the rules for a layer's attention.

    layer: what names in a layer begin with, with `*` for its number
    projections: the names of query, key, value and output; two, where the first three are one map
    """
    *joint, output = (layer + name for name in projections)
    rules = [Rule("layers.*.attention.qkv_proj.*", tuple(f"{name}.*" for name in joint), joined)]
    if len(joint) == 3:
        # Of several rules the first whose names exist: this one where keys have no bias.
        query_and_value = (f"{joint[0]}.bias", f"{joint[-1]}.bias")
        rules.append(Rule("layers.*.attention.qkv_proj.bias", query_and_value, with_key_bias_of_zeros))
    rules.append(Rule("layers.*.attention.o_proj.weight", f"{output}.weight", torch.t))
    rules.append(Rule("layers.*.attention.o_proj.bias", f"{output}.bias", as_row))
    return tuple(rules)


def layer_scale_rules(layer: str, attention: str, mlp: str) -> tuple[Rule, ...]:
    """Return the rules for the factors on a layer's two branches, by their names."""
    return (
        Rule("layers.*.attention_scale.weight", layer + attention, as_row),
        Rule("layers.*.mlp_scale.weight", layer + mlp, as_row),
    )


def mlp_rules(layer: str, first: str, second: str, gate: str | None = None) -> tuple[Rule, ...]:
    """Return the rules for a layer's MLP, by the names of its maps."""
    inner = [f"{layer}{first}.*"]
    if gate is not None:
        inner.insert(0, f"{layer}{gate}.*")
    return (
        Rule("layers.*.mlp.fc1.*", tuple(inner), joined),
        Rule("layers.*.mlp.fc2.*", f"{layer}{second}.*"),
    )


def norm_rules(layer: str, attention: str, mlp: str) -> tuple[Rule, ...]:
    return (
        Rule("layers.*.attention_norm.*", f"{layer}{attention}.*"),
        Rule("layers.*.mlp_norm.*", f"{layer}{mlp}.*"),
    )


def names(pattern: str, *projections: str) -> list[str]:
    return [pattern.format(name) for name in projections]


VIT = (
    *attention_rules("layers.*.", names("attention.{}_proj", *"qkvo")),
    *norm_rules("layers.*.", "layernorm_before", "layernorm_after"),
    Rule("classifier.out_proj.*", "classifier.dense.*"),  # AST's
)
LAYER = "encoder.layer.*."
DINO_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
BERT_MLP = (
    *norm_rules(LAYER, "attention.output.LayerNorm", "output.LayerNorm"),
    *mlp_rules(LAYER, "intermediate.dense", "output.dense"),
)
ALBERT_LAYER = "encoder.albert_layer_groups.*.albert_layers.0."

# By `model_type`, or for all families in a file by its name; parameters without a rule have the
# same name in both.
RULES: dict[str, tuple[Rule, ...]] = {
    "vit": VIT,
    "deit": VIT,
    "ast": VIT,
    "beit": (
        *layer_scale_rules("layers.*.", "lambda_1", "lambda_2"),
        *VIT,
        Rule(
            "layers.*.attention.distance_bias.weight",
            "layers.*.relative_position_bias.relative_position_bias_table",
            torch.t,
        ),
        Rule("relative_attention_bias.weight", "shared_position_bias.relative_position_bias_table"),
    ),
    "dinov2": (
        *attention_rules(LAYER, names("attention.{}_proj", *"qkvo")),
        # as it was called before transformers 5.18
        *attention_rules(
            LAYER, names("attention.{}", *names("attention.{}", "query", "key", "value"), "output.dense")
        ),
        *layer_scale_rules(LAYER, *DINO_SCALES),
        *norm_rules(LAYER, "norm1", "norm2"),
        *mlp_rules(LAYER, "mlp.fc1", "mlp.fc2"),
        *mlp_rules(LAYER, "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
        *mlp_rules(LAYER, "mlp.weights_in", "mlp.weights_out"),
    ),
    "dinov3_vit": (
        *attention_rules("model.layer.*.", names("attention.{}_proj", *"qkvo")),
        *layer_scale_rules("model.layer.*.", *DINO_SCALES),
        *norm_rules("model.layer.*.", "norm1", "norm2"),
        *mlp_rules("model.layer.*.", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
        *mlp_rules("model.layer.*.", "mlp.up_proj", "mlp.down_proj"),
    ),
    "towers": (
        *attention_rules("encoder.layers.*.", names("self_attn.{}_proj", *"qkv", "out")),
        *norm_rules("encoder.layers.*.", "layer_norm1", "layer_norm2"),
        *mlp_rules("encoder.layers.*.", "mlp.fc1", "mlp.fc2"),
        Rule("pre_layernorm.*", "pre_layrnorm.*"),
        *(Rule(name, name, lambda tensor: tensor.squeeze(0)) for name in ("logit_scale", "logit_bias")),
    ),
    "bert": (
        *attention_rules(LAYER, names("attention.{}", "self.query", "self.key", "self.value", "output.dense")),
        *BERT_MLP,
        Rule("embeddings.projection.*", "embeddings_project.*"),
    ),
    "deberta_v2": (
        *attention_rules(
            LAYER, names("attention.{}", *names("self.{}_proj", "query", "key", "value"), "output.dense")
        ),
        *BERT_MLP,
        Rule("layers.*.attention.position_key_proj.*", "encoder.layer.*.attention.self.pos_key_proj.*"),
        Rule("layers.*.attention.position_query_proj.*", "encoder.layer.*.attention.self.pos_query_proj.*"),
        Rule("distance_embeddings.weight", "encoder.rel_embeddings.weight"),
        Rule("distance_embeddings.LayerNorm.*", "encoder.LayerNorm.*"),
    ),
    "mpnet": (
        *attention_rules(LAYER, names("attention.attn.{}", *"qkvo")),
        *norm_rules(LAYER, "attention.LayerNorm", "output.LayerNorm"),
        *BERT_MLP,
        Rule("relative_attention_bias.weight", "encoder.relative_attention_bias.weight"),
    ),
    "hydra_albert": (
        *attention_rules(ALBERT_LAYER, names("attention.{}", "query", "key", "value", "dense")),
        *norm_rules(ALBERT_LAYER, "attention.LayerNorm", "full_layer_layer_norm"),
        *mlp_rules(ALBERT_LAYER, "ffn", "ffn_output"),
        Rule("embeddings.projection.*", "encoder.embedding_hidden_mapping_in.*"),
        Rule("pooler.dense.*", "pooler.*"),
    ),
    "hydra_distilbert": (
        *attention_rules("transformer.layer.*.", names("attention.{}_lin", *"qkv", "out")),
        *norm_rules("transformer.layer.*.", "sa_layer_norm", "output_layer_norm"),
        *mlp_rules("transformer.layer.*.", "ffn.lin1", "ffn.lin2"),
    ),
    "modernbert": (
        *attention_rules("layers.*.", names("attn.{}", "Wqkv", "Wo")),
        *norm_rules("layers.*.", "attn_norm", "mlp_norm"),
        *mlp_rules("layers.*.", "mlp.Wi", "mlp.Wo"),
    ),
    "decoders": (
        *attention_rules("layers.*.", names("self_attn.{}_proj", *"qkvo")),
        Rule("layers.*.attention.query_norm.*", "layers.*.self_attn.q_norm.*"),
        Rule("layers.*.attention.key_norm.*", "layers.*.self_attn.k_norm.*"),
        # Gemma 3's, which has four norms
        Rule("layers.*.attention_branch_norm.*", "layers.*.post_attention_layernorm.*"),
        Rule("layers.*.mlp_branch_norm.*", "layers.*.post_feedforward_layernorm.*"),
        Rule("layers.*.mlp_norm.*", "layers.*.pre_feedforward_layernorm.*"),
        *norm_rules("layers.*.", "input_layernorm", "post_attention_layernorm"),
        *mlp_rules("layers.*.", "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
        Rule("embeddings.word_embeddings.*", "embed_tokens.*"),
        Rule("classifier.*", "score.*"),
    ),
    "waveforms": (
        *attention_rules("encoder.layers.*.", names("attention.{}_proj", *"qkv", "out")),
        *norm_rules("encoder.layers.*.", "layer_norm", "final_layer_norm"),
        *mlp_rules("encoder.layers.*.", "feed_forward.intermediate_dense", "feed_forward.output_dense"),
        Rule("embeddings.feature_extractor.*", "feature_extractor.*"),
        Rule("embeddings.feature_projection.*", "feature_projection.*"),
        Rule("embeddings.masked_spec_embed", "masked_spec_embed"),
        Rule("embeddings.pos_conv_embed.*", "encoder.pos_conv_embed.*"),
        # One norm of the backbone: in front of the layers, or with `do_stable_layer_norm` behind
        # them.
        Rule("embeddings.layer_norm.*", "encoder.layer_norm.*"),
        Rule("final_norm.*", "encoder.layer_norm.*"),
        # WavLM's
        Rule("layers.*.attention.bias_gate.maps.*", "encoder.layers.*.attention.gru_rel_pos_linear.*"),
        Rule(
            "layers.*.attention.bias_gate.weight",
            "encoder.layers.*.attention.gru_rel_pos_const",
            lambda weight: weight.reshape(-1, 1),
        ),
        Rule("relative_attention_bias.weight", "encoder.layers.0.attention.rel_attn_embed.weight"),
    ),
    "hydra_whisper": (
        *attention_rules("layers.*.", names("self_attn.{}_proj", *"qkv", "out")),
        *norm_rules("layers.*.", "self_attn_layer_norm", "final_layer_norm"),
        *mlp_rules("layers.*.", "fc1", "fc2"),
        *(Rule(f"embeddings.{name}.*", f"{name}.*") for name in ("conv1", "conv2", "embed_positions")),
    ),
}


def backbone_rules(hydra: type) -> tuple[Rule, ...]:
    """Return the rules of a Hydra class. Of several for one parameter, the first holds whose names
    the backbone has."""
    model_type = hydra.config_class.model_type
    return RULES.get(model_type, RULES[FAMILIES[model_type].module])


def backbone_types(hydra: type) -> tuple[str, ...]:
    """Return the `model_type`s of the models of Transformers that a Hydra class is built from."""
    return tuple(backbone.config_class.model_type for backbone in hydra.backbone_classes)
