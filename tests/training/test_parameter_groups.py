"""Every parameter of every model belongs to one part, the right one."""

import math
import re

import pytest
from torch import nn
from transformers import Trainer, TrainingArguments

from hydra_transformers.fusion.reading import backbone_names
from hydra_transformers.training import HydraTrainer
from hydra_transformers.training.parameter_groups import layer_dropouts, places
from tests.training.tiny import FAMILIES, FORMS, QUIET, tiny_model


# By hand: the last names of a parameter's path, without numbers, and the part they belong to.
EXPECTED = {
    "embeddings": """
        conv.weight conv.bias conv1.weight conv1.bias conv2.weight conv2.bias embed_positions.weight
        weight.original0 weight.original1 conv_layers.layer_norm.weight conv_layers.layer_norm.bias
        feature_projection.layer_norm.weight feature_projection.layer_norm.bias masked_spec_embed
        embeddings.layer_norm.weight embeddings.layer_norm.bias wav2vec2.encoder.layer_norm.weight
        wav2vec2.encoder.layer_norm.bias wavlm.encoder.layer_norm.weight wavlm.encoder.layer_norm.bias
        rel_attn_embed.weight distillation_token mask_token register_tokens cls_token position_embeddings
        projection.weight projection.bias word_embeddings.weight embeddings_project.weight embeddings_project.bias
        embedding_hidden_mapping_in.weight embedding_hidden_mapping_in.bias position_embeddings.weight
        token_type_embeddings.weight embeddings.LayerNorm.weight embeddings.LayerNorm.bias token_embedding.weight
        position_embedding.weight class_embedding patch_embedding.weight patch_embedding.bias tok_embeddings.weight
        embeddings.norm.weight embed_tokens.weight relative_attention_bias.weight embed_proj.weight
        rel_embeddings.weight encoder.LayerNorm.weight encoder.LayerNorm.bias distance_embeddings.weight
        distance_embeddings.LayerNorm.weight distance_embeddings.LayerNorm.bias
    """,
    "attention": """
        attention.query.weight attention.query.bias attention.key.weight attention.key.bias attention.value.weight
        attention.value.bias qkv_proj.weight qkv_proj.bias layer_scale1.lambda1 attention_scale.weight q_lin.weight
        q_lin.bias k_lin.weight k_lin.bias v_lin.weight v_lin.bias out_lin.weight out_lin.bias q_proj.weight
        q_proj.bias k_proj.weight k_proj.bias v_proj.weight v_proj.bias o_proj.weight o_proj.bias out_proj.weight
        out_proj.bias self.query.weight self.query.bias self.key.weight self.key.bias self.value.weight
        self.value.bias attn.q.weight attn.q.bias attn.k.weight attn.k.bias attn.v.weight attn.v.bias attn.o.weight
        attn.o.bias q_norm.weight k_norm.weight query_norm.weight key_norm.weight attention.output.dense.weight
        attention.output.dense.bias attention.dense.weight attention.dense.bias attn.Wqkv.weight attn.Wo.weight
        gru_rel_pos_const gru_rel_pos_linear.weight gru_rel_pos_linear.bias bias_gate.weight maps.weight maps.bias
        query_proj.weight query_proj.bias key_proj.weight key_proj.bias value_proj.weight value_proj.bias
        pos_key_proj.weight pos_key_proj.bias pos_query_proj.weight pos_query_proj.bias position_key_proj.weight
        position_key_proj.bias position_query_proj.weight position_query_proj.bias lambda_1 distance_bias.weight
        relative_position_bias_table
    """,
    "mlp": """
        intermediate_dense.weight intermediate_dense.bias output_dense.weight output_dense.bias
        layer_scale2.lambda1 mlp_scale.weight lambda_2 weights_in.weight weights_in.bias weights_out.weight
        weights_out.bias lin1.weight lin1.bias lin2.weight lin2.bias ffn.weight ffn.bias ffn_output.weight
        ffn_output.bias gate_proj.weight gate_proj.bias up_proj.weight up_proj.bias down_proj.weight down_proj.bias
        fc1.weight fc1.bias fc2.weight fc2.bias intermediate.dense.weight intermediate.dense.bias
        layer.output.dense.weight layer.output.dense.bias mlp.Wi.weight mlp.Wo.weight
    """,
    "layernorm": """
        self_attn_layer_norm.weight self_attn_layer_norm.bias layers.layer_norm.weight layers.layer_norm.bias
        encoder.layer_norm.weight encoder.layer_norm.bias full_layer_layer_norm.weight full_layer_layer_norm.bias
        final_norm.bias layernorm_before.weight layernorm_before.bias layernorm_after.weight layernorm_after.bias
        layernorm.weight layernorm.bias attention_norm.weight attention_norm.bias mlp_norm.weight mlp_norm.bias
        norm1.weight norm1.bias norm2.weight norm2.bias sa_layer_norm.weight sa_layer_norm.bias
        output_layer_norm.weight output_layer_norm.bias output.LayerNorm.weight output.LayerNorm.bias
        attention.LayerNorm.weight attention.LayerNorm.bias layer_norm1.weight layer_norm1.bias layer_norm2.weight
        layer_norm2.bias pre_layrnorm.weight pre_layrnorm.bias pre_layernorm.weight pooler.layernorm.weight
        pooler.layernorm.bias pre_layernorm.bias post_layernorm.weight post_layernorm.bias final_layer_norm.weight
        final_layer_norm.bias attn_norm.weight final_norm.weight input_layernorm.weight
        post_attention_layernorm.weight norm.weight pre_feedforward_layernorm.weight
        post_feedforward_layernorm.weight attention_branch_norm.weight mlp_branch_norm.weight
    """,
    "classifier": """
        projector.weight projector.bias layer_weights classifier.weight classifier.bias pooler.weight pooler.bias
        pooler.dense.weight pooler.dense.bias logit_scale visual_projection.weight text_projection.weight
        classifier.dense.weight classifier.dense.bias classifier.out_proj.weight classifier.out_proj.bias
        classifier.layernorm.weight classifier.layernorm.bias pre_classifier.weight pre_classifier.bias
        head.dense.weight head.norm.weight score.weight logit_bias head.weight head.bias head.probe
        head.attention.in_proj_weight head.attention.in_proj_bias head.attention.out_proj.weight
        head.attention.out_proj.bias head.layernorm.weight head.layernorm.bias head.mlp.fc1.weight
        head.mlp.fc1.bias head.mlp.fc2.weight head.mlp.fc2.bias
    """,
}


def expected_part(name: str) -> str:
    """The part whose list has the longest ending of `name`."""
    plain = "." + ".".join(piece for piece in name.split(".") if not piece.isdigit())
    endings = [(len(end), key) for key, ends in EXPECTED.items() for end in ends.split() if plain.endswith(f".{end}")]
    assert endings, f"{name} is in no list"
    return max(endings)[1]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_parameter_has_its_part(family):
    for form in FORMS if family in ("vit", "bert", "clip") else ("backbone", "fused"):
        model = tiny_model(family, form)
        found = places(model)
        assert set(found) == {name for name, _ in model.named_parameters()}
        assert {name: place.part for name, place in found.items()} == {name: expected_part(name) for name in found}


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_counted_from_the_end_of_their_tower(form):
    found = places(tiny_model("clip", form))
    layers = {name: place.layers_to_end for name, place in found.items() if "layers." in name}
    assert layers == {name: 3 - int(name.split("layers.")[1][0]) for name in layers}
    final = {place.layers_to_end for name, place in found.items() if "post_lay" in name or "final_lay" in name}
    assert final == {0}
    assert {place.layers_to_end for name, place in found.items() if "pre_lay" in name} == {math.inf}
    assert {place.layers_to_end for name, place in found.items() if "embeddings" in name} == {math.inf}
    with pytest.raises(ValueError, match=r"0\.weight of Sequential belongs to no part.*or one of AutoHydra"):
        places(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("family", "form", "per_layer"),
    [
        ("vit", "fused", 2),
        ("vit", "backbone", 1),
        ("bert", "backbone", 2),
        ("clip", "fused", 0),
        ("distilbert", "backbone", 1),
    ],
)
def test_dropouts_inside_layers_are_those_of_the_hidden_states(family, form, per_layer):
    model = tiny_model(family, form)
    dropouts = layer_dropouts(model)
    assert len(dropouts) == 3 * per_layer
    names = [name for name, module in model.named_modules() if any(module is found for found in dropouts)]
    assert all(".layer" in name and ".self." not in name for name in names)


@pytest.mark.parametrize("name", FAMILIES)
def test_weight_decay_is_on_the_weights_that_have_it_in_the_plain_model(name, tmp_path):
    plain, member, unshared = (tiny_model(name, form) for form in ("backbone", "member", "unshared"))
    of_plain = set(Trainer.get_decay_parameter_names(None, plain))
    theirs_of = backbone_names(type(member), plain)
    arguments = TrainingArguments(tmp_path, **QUIET)
    trainer = HydraTrainer(member, arguments, train_dataset=[])

    decayed = set(trainer.get_decay_parameter_names(member))
    for ours, theirs in theirs_of.items():
        assert {key in of_plain for key in theirs} == {ours in decayed}, ours
    # The copies that members have of it follow: the number of the copy is one more part of the
    # name.
    of_members = set(trainer.get_decay_parameter_names(unshared))
    for copy_name, _ in unshared.named_parameters():
        ours = re.sub(r"\.\d+\.(weight|bias)$", r".\1", copy_name)
        known = copy_name if copy_name in theirs_of else ours
        if known in theirs_of:
            assert (copy_name in of_members) == (known in decayed), copy_name
