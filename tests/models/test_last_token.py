"""Which token of a text stands for it in causal language models: the last one, whatever fills up the rows."""

from functools import wraps

import pytest
import torch

from experiments.heads.separation import head_vectors
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.batches import batches, collate
from hydra_transformers.data.evaluation_data import read_data
from hydra_transformers.data.prediction import padding_of, predict
from hydra_transformers.pruning import head_scores, prune_heads
from hydra_transformers.training.finetune import finetune_members
from hydra_transformers.training.recipes import recipe
from tests.families import BERT, LLAMA, VIT


ROWS = [{"input_ids": [5 + row, *range(10, 11 + row % 4)], "labels": row % 3} for row in range(8)]


@pytest.fixture(scope="module")
def backbone():
    return LLAMA.backbone(pad_token_id=2)


def one_by_one(model) -> torch.Tensor:
    return torch.cat([predict(model, batch) for batch in batches(ROWS, 1, "cpu")])


def together(model) -> torch.Tensor:
    return torch.cat([predict(model, batch) for batch in batches(ROWS, 4, "cpu")])


def test_rows_that_are_filled_up_are_answered_as_those_that_are_not(backbone):
    for model in (backbone, prune_heads(backbone), DeepEnsemble([backbone, LLAMA.backbone(1, pad_token_id=2)])):
        torch.testing.assert_close(together(model), one_by_one(model))


@torch.no_grad()
def test_a_hydra_goes_by_the_mask_where_another_token_fills_up(backbone):
    hydra = prune_heads(backbone)
    text = torch.tensor([[8, 10, 11, 12, 13]])
    expected, mask = hydra(input_ids=text).logits, torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    by_zeros, by_padding = (torch.nn.functional.pad(text, (0, 2), value=value) for value in (0, 2))
    for tokens in (by_zeros, by_padding):
        torch.testing.assert_close(hydra(input_ids=tokens, attention_mask=mask).logits, expected)
    # A mask of four axes says nothing of padding: the config's token decides, as in Transformers.
    seen = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(hydra(input_ids=by_padding, attention_mask=seen).logits, expected)


def test_heads_are_scored_alike_in_batches_of_any_size(backbone):
    batched, single = ([*batches(ROWS, size, "cpu")] for size in (4, 1))
    for method in ("leave_one_out", "taylor"):
        assert head_scores(backbone, batched, method) == pytest.approx(head_scores(backbone, single, method))


def test_only_plain_causal_models_go_by_a_token(backbone):
    assert padding_of(backbone) == padding_of(DeepEnsemble([backbone])) == 2
    assert padding_of(LLAMA.backbone(pad_token_id=None)) is None
    assert padding_of(prune_heads(backbone)) is padding_of(BERT.backbone()) is padding_of(VIT.backbone()) is None
    assert collate(ROWS[:2], padding=2)["input_ids"].tolist() == [[5, 10, 2], [6, 10, 11]]


def test_a_plain_causal_model_trains_on_the_last_token(backbone, tmp_path, monkeypatch):
    read, forward = [], type(backbone).forward

    @wraps(forward)  # Trainer goes by its arguments
    def listening(self, **given):
        read.append(given)
        return forward(self, **given)

    monkeypatch.setattr(type(backbone), "forward", listening)
    steps = {"max_steps": 1, "per_device_train_batch_size": 8, "use_cpu": True}
    finetune_members([backbone.float()], recipe("finetune-texts"), ROWS, ROWS, tmp_path, **steps)
    filled_up = read[0]["input_ids"][read[0]["attention_mask"] == 0]
    assert len(filled_up) > 0 and (filled_up == 2).all()


@torch.no_grad()
def test_heads_are_looked_at_where_the_text_ends():
    backbone = LLAMA.backbone(pad_token_id=2)
    hydra = prune_heads(backbone).eval()
    data = read_data(ROWS, "data", ["input_ids", "attention_mask"], 4, hydra.device, hydra.dtype, None)
    found = head_vectors(hydra, data)
    outputs = []
    projection = backbone.model.layers[2].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, given: outputs.append(given[0][0, -1]))
    for row in ROWS:
        backbone(input_ids=torch.tensor([row["input_ids"]]))
    handle.remove()
    torch.testing.assert_close(found[2, 1], torch.stack(outputs)[:, 8:16])
