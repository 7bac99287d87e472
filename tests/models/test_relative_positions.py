"""Positions in the scores of attention: tables of MPNet and BEiT, and DeBERTa's comparisons of tokens with distances."""

import copy

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from hydra_transformers import HydraDebertaV2Config
from hydra_transformers.models import modeling_hydra_deberta_v2 as deberta
from hydra_transformers.models.modeling_hydra import PerMember
from tests.families import BEIT, DEBERTA, MPNET, each_of, padded_texts


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama

ONE_TABLE = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
# Family and the names of its table, ours and the backbone's.
TABLES = [
    (MPNET, {}, "mpnet.relative_attention_bias.weight", "mpnet.encoder.relative_attention_bias.weight"),
    (DEBERTA, {}, "deberta.distance_embeddings.weight", "deberta.encoder.rel_embeddings.weight"),
    (DEBERTA, {}, "deberta.distance_embeddings.LayerNorm.bias", "deberta.encoder.LayerNorm.bias"),
    (BEIT, ONE_TABLE, "beit.relative_attention_bias.weight", "beit.shared_position_bias.relative_position_bias_table"),
]
tables = pytest.mark.parametrize(("family", "fields", "ours", "theirs"), TABLES, ids=[row[2] for row in TABLES])


@tables
def test_members_share_the_mean_of_their_tables_with_their_embeddings_or_keep_their_own(family, fields, ours, theirs):
    backbones = [family.backbone(seed, **fields) for seed in range(2)]
    expected = [backbone.get_parameter(theirs) for backbone in backbones]
    one = family.hydra.from_pruned_members(backbones, shared=("embeddings",))
    torch.testing.assert_close(one.get_parameter(ours), torch.stack(expected).mean(0), rtol=0, atol=0)
    apart = family.hydra.from_pruned_members(backbones, shared=("layernorm", "mlp"))
    assert isinstance(apart.get_submodule(".".join(ours.split(".")[:2])), PerMember)
    for member, table in enumerate(expected):
        assert torch.equal(apart.member(member).get_parameter(ours), table)


@tables
def test_members_with_other_tables_have_no_layer_in_common(family, fields, ours, theirs):
    first = family.backbone(**fields)
    second = copy.deepcopy(first)
    assert family.hydra.from_pruned_members([first, second], allow_equal=True).config.trunk_layers == 3
    with torch.no_grad():
        second.get_parameter(theirs).view(-1)[0] += 1
    assert family.hydra.from_pruned_members([first, second]).config.trunk_layers == 0


@each_of([MPNET, DEBERTA])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_every_kind_of_checkpoint_lets_gradients_through_to_the_table(family, is_reentrant):
    name = next(ours for row, _, ours, _ in TABLES if row is family)

    def gradient(hydra: torch.nn.Module) -> torch.Tensor:
        hydra(**family.inputs(), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        return hydra.get_parameter(name).grad

    expected = gradient(family.fused())
    hydra = family.fused()
    for layer in hydra.base_model.layers:  # as in training, which would drop out
        layer.training = True
    hydra.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    assert expected.ne(0).any()
    torch.testing.assert_close(gradient(hydra), expected, atol=1e-12, rtol=0)


def without_flash(family):
    return family.hydra.from_backbone(family.backbone()).set_attn_implementation("flash_attention_2")


def by_flash(family):
    hydra = family.hydra.from_backbone(family.backbone())
    hydra.config._attn_implementation = "flash_attention_2"
    return hydra(input_ids=family.inputs()["input_ids"])


def with_a_mask_of_four_axes():
    return DEBERTA.fused()(DEBERTA.inputs()["input_ids"], torch.ones(4, 1, 7, 7))


REFUSALS = [
    (lambda: without_flash(MPNET), "Flash Attention"),
    (lambda: without_flash(DEBERTA), "Flash Attention"),
    (lambda: by_flash(MPNET), "'flash_attention_2', which cannot add a bias of positions: use 'eager' or"),
    (lambda: BEIT.fused().set_attn_implementation("flex_attention"), "flex_attention"),
    (lambda: BEIT.fused()(torch.zeros(1, 3, 12, 8).double()), r"pixel_values are 12 x 8: .* pass images of size 8"),
    # as many patches as in a square image
    (lambda: BEIT.fused()(torch.zeros(1, 3, 4, 16).double()), r"pixel_values are 4 x 16: .* pass images of size 8"),
    (
        lambda: DEBERTA.hydra.from_backbone(DEBERTA.backbone(conv_kernel_size=3)),
        "conv_kernel_size is 3: a Hydra has no",
    ),
    (with_a_mask_of_four_axes, "attention_mask has 4 axes"),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_what_cannot_be_computed_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# MPNet


@torch.no_grad()
def test_a_text_of_padding_alone_is_what_it_is_for_mpnet():
    backbone = MPNET.backbone()
    texts = MPNET.inputs()
    texts["attention_mask"][1] = 0
    hydra = MPNET.hydra.from_backbone(backbone)
    for backend in ("eager", "sdpa"):
        hydra.set_attn_implementation(backend)
        torch.testing.assert_close(hydra(**texts).member_logits[:, 0], backbone(**texts).logits, atol=1e-10, rtol=0)


# DeBERTa


@pytest.mark.parametrize(
    ("buckets", "longest", "tokens"), [(256, 512, 600), (256, -1, 512), (4, 16, 20), (32, 100, 140), (-1, 16, 40)]
)
def test_distances_have_the_numbers_that_they_have_in_deberta(buckets, longest, tokens):
    config = HydraDebertaV2Config(position_buckets=buckets, max_relative_positions=longest)
    states = torch.empty(1, tokens, 1)
    [expected] = build_relative_position(states, states, buckets, config.longest_distance)
    reach = config.distances_to_each_side
    found = deberta.numbers_of_distances(tokens, config, states.device)
    assert torch.equal(found, (expected + reach).clamp(0, 2 * reach - 1))
    for tokens in (1, 2, 3, 17, 33, 129, 130, 200, 511, 512, 600):  # those that are read are those that are computed
        rows = deberta.rows_of_distances(tokens, config)
        numbers = deberta.numbers_of_distances(tokens, config, torch.device("cpu")) - rows.start
        computed = len(range(2 * reach)[rows])
        assert 0 <= numbers.min() <= 1 and computed - 3 <= numbers.max() < computed


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_padding_makes_no_nan_in_16_bits(implementation, dtype, is_autocast):
    hydra = DEBERTA.fused().to(torch.float32 if is_autocast else dtype)
    hydra.set_attn_implementation(implementation)
    texts = {name: value.flip(1) for name, value in padded_texts().items()}
    texts["attention_mask"][1] = 0  # a text of padding alone
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        outputs = hydra(**texts, output_hidden_states=True)
    assert all(states.isfinite().all() for states in (*outputs.hidden_states, outputs.logits))


def test_members_drop_parts_of_the_distances_independently_in_training():
    hydra = DEBERTA.fused("all", shared=()).train()
    attention = hydra.deberta.layers[0].attention
    attention.position_dropout = 0.5
    query = key = torch.randn(2, 12, 7, 8, dtype=torch.float64)
    table = torch.randn(1, 8, 32, dtype=torch.float64)
    distances = deberta.numbers_of_distances(7, hydra.config, table.device)
    first, second = (attention.bias(query, query, key, None, table, distances) for _ in range(2))
    hydra.eval()
    whole = attention.bias(query, query, key, None, table, distances)
    assert not torch.equal(first, second) and not torch.equal(first, whole)


@pytest.mark.parametrize("fields", [{}, {"relative_attention": False}], ids=["distances", "no-distances"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_gradients_through_padding_are_those_of_deberta(backend, fields):
    """Padded on the left, so that the head reads padding, which sees all tokens alike."""
    texts = {name: values.flip(1) for name, values in DEBERTA.inputs().items()}
    backbone = DEBERTA.backbone(**fields)
    hydra = DEBERTA.hydra.from_backbone(backbone)
    hydra.set_attn_implementation(backend)
    for model in (backbone, hydra):
        model(**texts).logits.log_softmax(-1)[:, 0].sum().backward()
    for ours, theirs in ((hydra.deberta, backbone.deberta), (hydra.classifier, backbone.classifier)):
        found = dict(ours.named_parameters())
        expected = dict(theirs.named_parameters())
        for name in found.keys() & expected.keys():
            torch.testing.assert_close(found[name].grad, expected[name].grad, atol=1e-12, rtol=1e-10)
    names = ("query_proj", "key_proj", "value_proj")
    for layer, attention in enumerate(each.attention for each in hydra.deberta.layers):
        theirs = backbone.deberta.encoder.layer[layer].attention.self
        expected = torch.cat([getattr(theirs, name).weight.grad for name in names])
        torch.testing.assert_close(attention.qkv_proj.weight.grad, expected, atol=1e-12, rtol=1e-10)
