"""Texts that are longer than a model reads are cut, and texts of nothing not answered, also with a tokenizer that knows no limit."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hydra_transformers.models.inputs import most_tokens
from tests.families import BERT, MPNET, QWEN2, ROBERTA


@pytest.fixture
def tokenizer():
    """Without special tokens, and without a limit."""
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("family, most", [(ROBERTA, 15), (MPNET, 14), (BERT, 16)], ids=["roberta", "mpnet", "bert"])
def test_a_long_text_is_cut_to_the_positions_that_there_are(family, most, tokenizer):
    hydra = family.fused().float()
    assert most_tokens(hydra) == most_tokens(family.backbone()) == most
    [cut, whole] = hydra.predict(["a b " * 50, "a b " * (most // 2) + "a" * (most % 2)], tokenizer)
    assert cut["score"] == pytest.approx(whole["score"], abs=1e-6)
    assert cut["truncated"] is True and whole["truncated"] is False


def test_a_text_without_tokens_is_not_answered_from_the_padding_of_others(tokenizer):
    hydra = QWEN2.fused().float()
    [alone] = hydra.predict([""], tokenizer)
    [among, other] = hydra.predict(["", "a b"], tokenizer, batch_size=2)
    assert alone["score"] == pytest.approx(among["score"], abs=1e-6)
    assert alone["abstain"] is True and alone["reason"] == among["reason"] == "The text is empty."
    assert other["abstain"] is None and other["reason"] is None
