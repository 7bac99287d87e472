"""Inputs of other sizes: sounds row by row or of other lengths, and texts one by one."""

import pytest
import torch

from hydra_transformers.data.batches import batches
from hydra_transformers.pruning import head_scores
from tests.families import AST, LLAMA, spectrograms


def test_sounds_without_labels_are_rows():
    rows = [{"input_values": sound} for sound in spectrograms(5)]
    assert [len(batch["input_values"]) for batch in batches(rows, 2, "cpu")] == [2, 2, 1]
    assert [len(batch["input_values"]) for batch in batches([{"input_values": spectrograms(5)}], 2, "cpu")] == [5]


@torch.no_grad()
def test_sounds_of_another_length_are_refused_with_a_sentence():
    hydra, wanted = AST.fused(), "the model reads 10 of 7: give the feature extractor max_length=10 and num_mel_bins=7"
    for shape, found in (((1, 40, 7), "40 frames of 7 mel bins"), ((1, 10, 13), "10 frames of 13 mel bins")):
        with pytest.raises(ValueError, match=f"input_values has {found}, {wanted}"):
            hydra(input_values=torch.zeros(shape, dtype=torch.float64))
    # Frames that begin no patch are not read, as in Transformers.
    longer = torch.cat([spectrograms(), torch.ones(4, 2, 7, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(hydra(input_values=longer).logits, hydra(input_values=spectrograms()).logits)


def test_heads_of_a_decoder_without_padding_are_scored_on_texts_one_by_one():
    texts = torch.randint(3, 38, (4, 5), generator=torch.Generator().manual_seed(0))
    single = [{"input_ids": text[None], "labels": torch.tensor([row % 3])} for row, text in enumerate(texts)]
    together = [{"input_ids": texts, "labels": torch.arange(4) % 3}]
    expected = head_scores(LLAMA.backbone(), together, "leave_one_out")
    backbone = LLAMA.backbone(pad_token_id=None)
    assert head_scores(backbone, single, "leave_one_out") == pytest.approx(expected)
    with pytest.raises(ValueError, match="pad_token_id is None, and the batch has 4 texts"):
        head_scores(backbone, together, "leave_one_out")
