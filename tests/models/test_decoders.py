"""Classifiers on causal language models: keys that several heads read, and the last token of a text."""

import pytest
import torch

from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.batches import batches, collate
from hydra_transformers.data.prediction import predict
from hydra_transformers.fusion import to_transformers
from hydra_transformers.model_info import padding_token_of
from hydra_transformers.pruning import head_scores, prune_heads
from tests.families import BERT, GEMMA3, HEAD_DIM, LLAMA, MODERNBERT, VIT, each_of, padded_texts


BACKENDS = ["eager", "sdpa"]
ROWS = [{"input_ids": [5 + row, *range(10, 11 + row % 4)], "labels": row % 3} for row in range(8)]


@torch.no_grad()
@each_of([LLAMA, MODERNBERT])
def test_positions_of_each_row_and_embedded_words_are_read_as_by_the_backbone(family):
    backbones = [family.backbone(seed) for seed in range(2)]
    inputs = family.inputs()
    inputs["position_ids"] = torch.arange(7).flip(0).expand(4, 7) * torch.tensor([[1], [2], [3], [1]])
    fused = family.hydra.from_pruned_members(backbones, shared=())  # members on the batch axis, and one alone
    hydra = family.hydra.from_backbone(backbones[0])
    expected = torch.stack([backbone(**inputs).logits for backbone in backbones], dim=1)
    torch.testing.assert_close(fused(**inputs).member_logits, expected)
    torch.testing.assert_close(hydra(**inputs).member_logits, expected[:, :1])
    words = backbones[0].get_input_embeddings()(inputs.pop("input_ids"))
    expected = backbones[0](inputs_embeds=words, **inputs).logits
    torch.testing.assert_close(hydra(inputs_embeds=words, **inputs).member_logits[:, 0], expected)
    assert hydra.get_input_embeddings().weight.equal(backbones[0].get_input_embeddings().weight)
    with pytest.raises(ValueError, match="pass input_ids or inputs_embeds, and not both"):
        hydra(**inputs)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kept",
    [
        ([0, 1, 2, 3], [0, 4], [7]),  # the first two have as many rows of q, k and v together
        ([0, 1], [0, 4], [6, 7]),  # as many heads, which read one key or two
        ([0, 1, 4, 5], [2, 3, 6, 7], [0, 3, 5, 6]),  # as many heads for each key
        ([0, 1, 2, 4], [2, 4, 6, 7], []),
    ],
    ids=["as many rows", "as many heads", "alike", "ragged"],
)
def test_fused_members_of_any_heads_are_the_mean_of_the_ablated_backbones(kept, backend):
    gone = [[head for head in range(8) if head not in heads] for heads in kept]
    sizes = {"num_attention_heads": 8, "head_dim": HEAD_DIM, "num_key_value_heads": 2}
    backbones = [LLAMA.backbone(seed, **sizes) for seed in range(3)]
    members = [LLAMA.hydra.from_backbone(each, {0: own, 2: own}) for each, own in zip(backbones, gone, strict=True)]
    hydra = LLAMA.hydra.from_pruned_members(members, shared=())
    hydra.set_attn_implementation(backend)
    found = hydra(**padded_texts()).member_logits
    for index, (backbone, own) in enumerate(zip(backbones, gone, strict=True)):
        backbone.set_attn_implementation(backend)
        expected = LLAMA.ablate(backbone, {0: own, 2: own})(**padded_texts()).logits
        torch.testing.assert_close(found[:, index], expected, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(hydra.member(index)(**padded_texts()).member_logits[:, 0], expected)


@torch.no_grad()
def test_there_is_no_cache():
    hydra = LLAMA.hydra.from_backbone(LLAMA.backbone())
    expected = hydra(**padded_texts(), use_cache=False)
    assert torch.equal(hydra(**padded_texts(), use_cache=True).logits, expected.logits)
    assert "past_key_values" not in expected
    with pytest.raises(ValueError, match="keeps no cache: leave past_key_values out"):
        hydra(**padded_texts(), past_key_values=object())


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
def test_positions_that_start_anew_tell_of_texts_in_a_row_as_they_do_the_backbone(use_cache):
    """Which makes two texts of them where it has no cache alone."""
    backbone = LLAMA.backbone(use_cache=use_cache)
    row = {"input_ids": padded_texts()["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]] * 4)}
    hydra = LLAMA.hydra.from_backbone(backbone)
    for inputs in (row, row | {"use_cache": not use_cache}):
        torch.testing.assert_close(hydra(**inputs).member_logits[:, 0], backbone(**inputs).logits)


@each_of([LLAMA, GEMMA3])
def test_16_bit_backbones_keep_their_positions_in_float32(family, tmp_path):
    """As `from_pretrained` leaves them, so that answers are those of the loaded backbone."""
    family.backbone().bfloat16().save_pretrained(tmp_path)
    backbone = type(family.backbone()).from_pretrained(tmp_path, dtype=torch.bfloat16)
    hydra = family.hydra.from_backbone(backbone)
    assert all(buffer.dtype == torch.float32 for buffer in hydra.model.rotary_emb.buffers())
    with torch.no_grad():
        found = hydra(**padded_texts()).member_logits[:, 0]
        expected = backbone(**padded_texts()).logits
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_a_plain_model_has_as_many_heads_for_every_key_or_zeros():
    sizes = {"num_attention_heads": 8, "head_dim": HEAD_DIM, "num_key_value_heads": 2}
    backbone = LLAMA.backbone(**sizes)
    texts = padded_texts()

    def same(gone: dict, heads: int, keys: int, **options) -> None:
        member = prune_heads(backbone, gone)
        plain = to_transformers(member, **options)
        assert (plain.config.num_attention_heads, plain.config.num_key_value_heads) == (heads, keys)
        torch.testing.assert_close(plain(**texts).logits, member(**texts).member_logits[:, 0])

    same({layer: [0, 3, 5, 6] for layer in range(3)}, 4, 2)
    same({layer: [0, 1, 2, 3] for layer in range(3)}, 4, 1)
    same({0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}, 8, 2, fill_up=True)
    same({0: [0, 2, 4], 1: list(range(8)), 2: [7]}, 8, 2, fill_up=True)
    with pytest.raises(ValueError, match="1 or 3 heads are left to read a key and value, and in a plain"):
        to_transformers(prune_heads(backbone, {layer: [0, 4, 5, 6] for layer in range(3)}))


@each_of([LLAMA, MODERNBERT])
def test_a_model_that_is_cast_keeps_the_frequencies_of_its_positions(family):
    hydra = family.hydra.from_backbone(family.backbone().float())
    before = dict(hydra.model.rotary_emb.named_buffers())
    for cast in (hydra.bfloat16(), hydra.double(), hydra.to("meta", torch.float16)):
        found = dict(cast.model.rotary_emb.named_buffers())
        assert found.keys() == before.keys() and {buffer.dtype for buffer in found.values()} == {torch.float32}
        assert all(found[name].is_meta or torch.equal(found[name], before[name]) for name in before)


# The last token


@pytest.fixture(scope="module")
def backbone():
    return LLAMA.backbone(pad_token_id=2)


def predictions(model, batch_size: int) -> torch.Tensor:
    return torch.cat([predict(model, batch) for batch in batches(ROWS, batch_size, "cpu")])


def test_rows_that_are_filled_up_are_answered_as_those_that_are_not(backbone):
    for model in (backbone, prune_heads(backbone), DeepEnsemble([backbone, LLAMA.backbone(1, pad_token_id=2)])):
        torch.testing.assert_close(predictions(model, 4), predictions(model, 1))
    scores = [head_scores(backbone, [*batches(ROWS, size, "cpu")], "leave_one_out") for size in (4, 1)]
    assert scores[0] == pytest.approx(scores[1])


@torch.no_grad()
def test_a_hydra_goes_by_the_mask_where_another_token_fills_up(backbone):
    hydra = prune_heads(backbone)
    text = torch.tensor([[8, 10, 11, 12, 13]])
    expected = hydra(input_ids=text).logits
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    by_zeros, by_padding = (torch.nn.functional.pad(text, (0, 2), value=value) for value in (0, 2))
    for tokens in (by_zeros, by_padding):
        torch.testing.assert_close(hydra(input_ids=tokens, attention_mask=mask).logits, expected)
    # A mask of four axes says nothing of padding: the config's token decides, as in Transformers.
    seen = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(hydra(input_ids=by_padding, attention_mask=seen).logits, expected)


def test_only_plain_causal_models_go_by_a_token(backbone):
    assert padding_token_of(backbone) == padding_token_of(DeepEnsemble([backbone])) == 2
    assert padding_token_of(LLAMA.backbone(pad_token_id=None)) is None
    assert (
        padding_token_of(prune_heads(backbone))
        is padding_token_of(BERT.backbone())
        is padding_token_of(VIT.backbone())
        is None
    )
    assert collate(ROWS[:2], padding=2)["input_ids"].tolist() == [[5, 10, 2], [6, 10, 11]]


@torch.no_grad()
def test_without_a_padding_token_texts_come_one_by_one():
    texts = padded_texts()
    backbone = LLAMA.backbone(pad_token_id=None)
    hydra = LLAMA.hydra.from_backbone(backbone)
    one = {name: rows[:1] for name, rows in texts.items()}
    torch.testing.assert_close(hydra(**one).member_logits[:, 0], backbone(**one).logits)
    with pytest.raises(ValueError, match="pad_token_id is None, and the batch has 4 texts: set it to the token"):
        hydra(**texts)
    assert hydra.model(**texts).pooler_output is None
    with pytest.raises(ValueError, match="pad_token_id is None, and the batch has 4 texts"):
        head_scores(backbone, [texts | {"labels": torch.arange(4) % 3}], "leave_one_out")
