"""ALBERT: a layer that runs several times has its weights once, and a head that is cut out is missing each time."""

import pytest
import torch

from hydra_transformers import AutoHydra
from hydra_transformers.cost import count_multiply_adds, count_parameters, inputs_for
from hydra_transformers.pruning import head_scores
from hydra_transformers.pruning.ablation import ablation_of
from tests.families import ALBERT, HEAD_DIM, padded_texts


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama

ONE_LAYER = {"num_hidden_layers": 3, "num_hidden_groups": 1}  # as all published models
HEADS = ({0: [1]}, {0: [0, 3]}, {0: [2, 3]})


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("shared", [(), ("embeddings", "layernorm", "mlp")], ids=str)
def test_members_of_one_layer_are_fused_and_taken_apart(shared):
    backbones = [ALBERT.backbone(0 if shared else seed, **ONE_LAYER) for seed in range(3)]
    members = [AutoHydra.from_backbone(*each) for each in zip(backbones, HEADS, strict=True)]
    hydra = AutoHydra.from_pruned_members(members, shared)
    assert hydra.config.kept_heads == [[[0, 2, 3], [1, 2], [0, 1]]]
    references = [ALBERT.ablate(*each) for each in zip(backbones, HEADS, strict=True)]
    expected = [model(**padded_texts()).logits for model in references]
    for index, logits in enumerate(expected):
        assert_close(hydra(**padded_texts()).member_logits[:, index], logits)
        assert_close(hydra.member(index)(**padded_texts()).logits.softmax(-1), logits.softmax(-1))
    mean = torch.stack([logits.softmax(-1) for logits in expected]).mean(0)
    assert_close(hydra(**padded_texts()).logits.softmax(-1), mean)


@torch.no_grad()
def test_the_engine_turns_a_head_off_each_time_that_its_layer_runs():
    for fields, layers in ((ONE_LAYER, 1), ({}, 3)):
        backbone = ALBERT.backbone(**fields)
        engine = ablation_of(AutoHydra.from_backbone(backbone))
        heads = [(layer, head) for layer in range(layers) for head in range(4)]
        found = torch.cat(list(engine.over(heads)(padded_texts())))
        for logits, (layer, head) in zip(found, heads, strict=False):
            assert_close(logits, ALBERT.ablate(backbone, {layer: [head]})(**padded_texts()).logits)
        engine.remove((0, 2))
        left = torch.cat(list(engine.over([(0, 1)])(padded_texts())))
        assert_close(left[0], ALBERT.ablate(backbone, {0: [1, 2]})(**padded_texts()).logits)


def test_scores_are_about_all_the_times_that_a_layer_runs():
    backbone = ALBERT.backbone(**ONE_LAYER)
    batch = padded_texts() | {"labels": torch.tensor([0, 1, 2, 0])}
    michel = head_scores(backbone, [batch], "michel")
    # One factor on the head's slice of the output projection is its gate in all runs.
    output = ALBERT.output_projection(backbone, "", 0).weight.data
    step = 1e-6
    changes = []
    with torch.no_grad():
        for row in range(4):
            sample = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            losses = []
            for factor in (1 + step, (1 - step) / (1 + step)):
                output[:, HEAD_DIM : 2 * HEAD_DIM] *= factor
                losses.append(backbone(**sample).loss)
            output[:, HEAD_DIM : 2 * HEAD_DIM] /= 1 - step
            changes.append(abs(float(losses[0] - losses[1])) / (2 * step))
    assert michel[0, 1] == pytest.approx(sum(changes) / 4, rel=1e-6)


def test_weights_count_once_and_multiply_adds_each_time():
    short, long = (ALBERT.backbone(num_hidden_layers=runs, num_hidden_groups=1) for runs in (3, 6))
    hydras = [AutoHydra.from_backbone(model) for model in (short, long)]
    assert count_parameters(hydras[0]) == count_parameters(hydras[1]) == count_parameters(short)
    tokens = inputs_for(long, 1)["input_ids"].shape[1]
    hidden = 32
    of_a_head = 4 * tokens * hidden * HEAD_DIM + 2 * tokens**2 * HEAD_DIM
    of_first_token = (
        2 * (tokens + 1) * hidden * HEAD_DIM + 2 * tokens * HEAD_DIM
    )  # all that the last run has to compute
    saved = count_multiply_adds(hydras[1]) - count_multiply_adds(AutoHydra.from_backbone(long, {0: [1]}))
    assert saved == 5 * of_a_head + of_first_token
    mlp = 2 * tokens * hidden * 40
    assert count_multiply_adds(hydras[1]) - count_multiply_adds(hydras[0]) == 3 * (4 * of_a_head + mlp)
