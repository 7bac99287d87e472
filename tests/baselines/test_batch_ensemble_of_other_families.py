"""BatchEnsemble of families whose rows go other ways: right, or refused."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    SegformerConfig,
    SegformerForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from hydra_transformers.baselines import BatchEnsemble
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.hub import create_model_card
from tests.families import SIGLIP_CLASSIFIER, randomise


TEXTS = torch.tensor([[5, 6, 7, 8, 9, 4], [7, 9, 11, 5, 3, 4]])
FEW = {"vocab_size": 40, "num_labels": 3}


def small_xlnet() -> XLNetForSequenceClassification:
    """Its states are (tokens, batch, width), and it knows no largest position."""
    return XLNetForSequenceClassification(XLNetConfig(**FEW, d_model=8, n_layer=1, n_head=2, d_inner=8))


def small_bloom() -> BloomForSequenceClassification:
    """Its config has no largest position at all."""
    return BloomForSequenceClassification(BloomConfig(**FEW, hidden_size=8, n_layer=1, n_head=2, pad_token_id=0))


@pytest.mark.parametrize("make", [small_xlnet, small_bloom])
def test_members_without_a_table_of_positions_answer_as_their_plain_models(make):
    model = randomise(make().double(), seed=0)
    ensemble = BatchEnsemble(model, num_members=2, std=0.5).eval()
    member_logits = ensemble(input_ids=TEXTS).member_logits
    for index in range(2):
        expected = ensemble.member(index)(input_ids=TEXTS).logits
        torch.testing.assert_close(member_logits[:, index], expected, rtol=1e-10, atol=1e-10)


def test_a_model_that_picks_rows_of_its_inputs_has_layers():
    """A decoder picks the last token of each row that it was given: behind its layers, there are those of all members."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = randomise(LlamaForSequenceClassification(LlamaConfig(**FEW, **sizes, pad_token_id=0)).double(), seed=0)
    ensemble = BatchEnsemble(model, num_members=2, std=0.5, layers=1).eval()
    inputs = {"input_ids": TEXTS, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7]])}
    expected = torch.stack([ensemble.member(index)(**inputs).logits for index in range(2)], dim=1)
    torch.testing.assert_close(ensemble(**inputs).member_logits, expected)
    assert count_multiply_adds(ensemble) < 1.6 * count_multiply_adds(model)


def test_a_model_that_cannot_be_tried_is_refused():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    waves = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,), "num_conv_pos_embeddings": 4}
    config = Wav2Vec2Config(**sizes, **waves, num_conv_pos_embedding_groups=2, num_labels=3)
    model = Wav2Vec2ForSequenceClassification(config)
    with pytest.raises(
        ValueError, match="Wav2Vec2ForSequenceClassification cannot be tried on made-up images or texts"
    ):
        BatchEnsemble(model)


def test_a_classifier_of_one_tower_is_described_and_has_layers():
    """Its config is that of two, of which it has one."""
    ensemble = BatchEnsemble(SIGLIP_CLASSIFIER.backbone(), num_members=2, std=0.5, layers=1).eval()
    inputs = SIGLIP_CLASSIFIER.inputs()
    expected = torch.stack([ensemble.member(index)(**inputs).logits for index in range(2)], dim=1)
    torch.testing.assert_close(ensemble(**inputs).member_logits, expected)
    assert "| Multiply-adds per image |" in create_model_card(ensemble, repo_id="me/tiny").text


def test_a_model_of_images_of_any_size_has_members_and_a_cost():
    """Its config names no size."""
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "mlp_ratios": [1] * 4}
    model = randomise(SegformerForImageClassification(SegformerConfig(**sizes, num_labels=3)).double(), seed=0)
    ensemble = BatchEnsemble(model, num_members=2, std=0.5).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 32, 64, dtype=torch.float64)}
    expected = torch.stack([ensemble.member(index)(**inputs).logits for index in range(2)], dim=1)
    torch.testing.assert_close(ensemble(**inputs).member_logits, expected)
    assert count_multiply_adds(ensemble) == 2 * count_multiply_adds(model)
