"""DeBERTa's attention: tokens compared with tokens, and with the distances between them."""

import copy

import pytest
import torch
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from hydra_transformers import HydraDebertaV2Config, HydraDebertaV2ForSequenceClassification
from hydra_transformers.fusion import to_transformers
from hydra_transformers.models.modeling_hydra import PerMember
from hydra_transformers.models.modeling_hydra_deberta_v2 import numbers_of_distances, rows_of_distances
from tests.families import DEBERTA, DEBERTA_V2, padded_texts


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama

BOTH = ["p2c", "c2p"]
# Every field that changes the attention or the embeddings, each way.
CONFIGS = {
    "v3": {},
    "own maps": {"share_att_key": False},
    "c2p": {"pos_att_type": ["c2p"]},
    "p2c": {"pos_att_type": "p2c"},
    "c2p, own maps": {"pos_att_type": ["c2p"], "share_att_key": False},
    "p2c, own maps": {"pos_att_type": ["p2c"], "share_att_key": False},
    "no term": {"pos_att_type": None},
    "no buckets": {"position_buckets": -1},
    "longest distance": {"position_buckets": -1, "max_relative_positions": 3},
    "no norm": {"norm_rel_ebd": "none"},
    "absolute positions": {"position_biased_input": True},
    "absolute alone": {"relative_attention": False, "norm_rel_ebd": "none", "position_biased_input": True},
    "types and size": {"type_vocab_size": 2, "embedding_size": 24},
}


def padded_left(batch: int = 4, tokens: int = 7) -> dict[str, torch.Tensor]:
    return {name: value.flip(1) for name, value in padded_texts(batch, tokens).items()}


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_deberta_is_itself(name):
    backbone = DEBERTA.backbone(**CONFIGS[name])
    hydra = HydraDebertaV2ForSequenceClassification.from_backbone(backbone)
    pruned = HydraDebertaV2ForSequenceClassification.from_backbone(backbone, {0: [1], 1: [0, 2, 3]})
    ablated = DEBERTA.ablate(backbone, {0: [1], 1: [0, 2, 3]})
    assert hydra.config._attn_implementation == "sdpa"
    for implementation in ("sdpa", "eager"):
        for model in (hydra, pruned):
            model.set_attn_implementation(implementation)
        for inputs in (padded_texts(), padded_left(), {"input_ids": padded_texts()["input_ids"]}):
            expected, found = (model(**inputs, output_hidden_states=True) for model in (backbone, hydra))
            torch.testing.assert_close(found.member_logits[:, 0], expected.logits, atol=1e-10, rtol=0)
            for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(ours[:, 0], theirs, atol=1e-10, rtol=0)  # of padding, too
            torch.testing.assert_close(
                pruned(**inputs).member_logits[:, 0], ablated(**inputs).logits, atol=1e-10, rtol=0
            )


@pytest.mark.parametrize(
    ("buckets", "longest", "tokens"), [(256, 512, 600), (256, -1, 512), (4, 16, 20), (32, 100, 140), (-1, 16, 40)]
)
def test_distances_have_the_numbers_that_they_have_in_deberta(buckets, longest, tokens):
    config = HydraDebertaV2Config(
        position_buckets=buckets, max_relative_positions=longest, max_position_embeddings=512
    )
    states = torch.empty(1, tokens, 1)
    [expected] = build_relative_position(states, states, buckets, config.longest_distance)
    reach = config.distances_to_each_side
    found = numbers_of_distances(tokens, config, states.device)
    assert torch.equal(found, (expected + reach).clamp(0, 2 * reach - 1))


@pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (256, -1), (4, 16), (32, 100), (-1, 16)])
def test_the_rows_that_a_text_reads_are_those_that_are_computed(buckets, longest):
    config = HydraDebertaV2Config(
        position_buckets=buckets, max_relative_positions=longest, max_position_embeddings=512
    )
    for tokens in (1, 2, 3, 17, 33, 129, 130, 200, 511, 512, 600):
        rows = rows_of_distances(tokens, config)
        numbers = numbers_of_distances(tokens, config, torch.device("cpu")) - rows.start
        computed = len(range(2 * config.distances_to_each_side)[rows])
        assert 0 <= numbers.min() <= 1 and computed - 3 <= numbers.max() < computed


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_padding_makes_no_nan_in_16_bits(implementation, dtype, is_autocast):
    hydra = DEBERTA.fused().to(torch.float32 if is_autocast else dtype)
    hydra.set_attn_implementation(implementation)
    texts = padded_left()
    texts["attention_mask"][1] = 0  # a text of padding alone
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        outputs = hydra(**texts, output_hidden_states=True)
    assert all(states.isfinite().all() for states in (*outputs.hidden_states, outputs.logits))


@pytest.mark.parametrize(("shared", "is_one"), [(("embeddings", "mlp"), True), (("layernorm", "mlp"), False)])
def test_members_share_the_mean_of_their_tables_with_their_embeddings_or_keep_their_own(shared, is_one):
    found = DEBERTA.fused(shared=shared).deberta.distance_embeddings
    encoders = [DEBERTA.backbone(seed).deberta.encoder for seed in range(3)]
    for ours, theirs in (("weight", "rel_embeddings.weight"), ("LayerNorm.bias", "LayerNorm.bias")):
        tables = [encoder.get_parameter(theirs) for encoder in encoders]
        if is_one:
            assert torch.equal(found.get_parameter(ours), torch.stack(tables).mean(0))
        else:
            assert isinstance(found, PerMember)
            assert all(torch.equal(own.get_parameter(ours), table) for own, table in zip(found, tables, strict=True))


def test_a_head_takes_its_maps_of_positions_along():
    member = HydraDebertaV2ForSequenceClassification.from_backbone(DEBERTA_V2.backbone(), {0: [1, 2]})
    attention = member.deberta.layers[0].attention
    theirs = DEBERTA_V2.backbone().deberta.encoder.layer[0].attention.self
    for ours, of_backbone in (("position_key_proj", "pos_key_proj"), ("position_query_proj", "pos_query_proj")):
        for name in ("weight", "bias"):
            heads = theirs.get_parameter(f"{of_backbone}.{name}").unflatten(0, (4, 8))
            assert torch.equal(attention.get_parameter(f"{ours}.{name}"), heads[[0, 3]].flatten(0, 1))


@torch.no_grad()
@pytest.mark.parametrize("family", [DEBERTA, DEBERTA_V2], ids=["shared maps", "own maps"])
def test_a_plain_deberta_answers_as_its_member(family):
    member = family.hydra.from_backbone(family.backbone(), {0: [1], 2: [0, 3]})
    plain = to_transformers(member, fill_up=True)
    torch.testing.assert_close(
        plain(**family.inputs()).logits, member(**family.inputs()).member_logits[:, 0], atol=1e-10, rtol=0
    )


def test_members_drop_parts_of_the_distances_independently_in_training():
    hydra = DEBERTA.fused("all", shared=()).train()
    attention = hydra.deberta.layers[0].attention
    attention.position_dropout = 0.5
    query = key = torch.randn(2, 12, 7, 8, dtype=torch.float64)
    table = torch.randn(1, 8, 32, dtype=torch.float64)
    distances = numbers_of_distances(7, hydra.config, table.device)
    first, second = (attention._position_terms(query, key, table, distances) for _ in range(2))
    hydra.eval()
    whole = attention._position_terms(query, key, table, distances)
    assert not torch.equal(first, second)
    assert not torch.equal(first, whole)


def test_members_of_one_backbone_with_other_tables_have_no_layer_in_common():
    first = DEBERTA.backbone()
    second = copy.deepcopy(first)
    assert DEBERTA.hydra.from_pruned_members([first, second], allow_equal=True).config.trunk_layers == 3
    with torch.no_grad():
        second.deberta.encoder.rel_embeddings.weight[0, 0] += 1
    assert DEBERTA.hydra.from_pruned_members([first, second]).config.trunk_layers == 0


def test_members_with_other_buckets_are_refused():
    with pytest.raises(ValueError, match="position_buckets = 6"):
        DEBERTA.hydra.from_pruned_members([DEBERTA.backbone(), DEBERTA.backbone(position_buckets=6)])


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_every_kind_of_checkpoint_lets_gradients_through_to_the_table(is_reentrant):
    def gradient(hydra: torch.nn.Module) -> torch.Tensor:
        hydra(**DEBERTA.inputs(), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        return hydra.deberta.distance_embeddings.weight.grad

    expected = gradient(DEBERTA.fused())
    hydra = DEBERTA.fused()
    for layer in hydra.deberta.layers:  # as in training, which would drop out
        layer.training = True
    hydra.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    assert expected.ne(0).any()
    torch.testing.assert_close(gradient(hydra), expected, atol=1e-12, rtol=0)


def test_what_does_not_work_is_refused():
    with pytest.raises(ValueError, match="conv_kernel_size is 3: a Hydra has no convolution"):
        HydraDebertaV2ForSequenceClassification.from_backbone(DEBERTA.backbone(conv_kernel_size=3))
    hydra = DEBERTA.fused()
    with pytest.raises(ValueError, match="Flash Attention"):
        hydra.set_attn_implementation("flash_attention_2")
    with pytest.raises(ValueError, match="attention_mask has 4 axes"):
        hydra(input_ids=DEBERTA.inputs()["input_ids"], attention_mask=torch.ones(4, 1, 7, 7))


def test_the_fields_of_deberta_survive_the_config():
    config = HydraDebertaV2Config(
        **DebertaV2Config(position_buckets=256, share_att_key=True).to_dict() | {"model_type": "x"}
    )
    assert (config.position_buckets, config.share_att_key) == (256, True)
    assert config.distances_to_each_side == 256
