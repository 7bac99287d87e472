"""SigLIP reads the last token of a prompt, be it padding: prompts of another length than in training are told of."""

import warnings

import pytest
import torch

from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.pruning import prune_heads, taylor_scores
from hydra_transformers.uncertainty.calibrated_classifier import prompts_of
from tests.families import CLIP, SIGLIP, padded_texts, pixels


def test_prompts_that_are_not_padded_to_full_length_are_told_of():
    backbone = SIGLIP.backbone()
    for model in (backbone, prune_heads(backbone)):
        with pytest.warns(
            UserWarning, match='have 7 tokens, and .* reads the last of 16: tokenize with padding="max_'
        ):
            ZeroShotClassifier(model, padded_texts())
    data = [pixels() | {"labels": torch.arange(4)}]
    with pytest.warns(UserWarning, match="have 7 tokens, and HydraSiglipModel reads the last of 16"):
        taylor_scores(backbone, data, class_prompts=padded_texts())


def test_prompts_of_full_length_and_those_of_clip_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZeroShotClassifier(SIGLIP.backbone(), padded_texts(tokens=16))
        ZeroShotClassifier(CLIP.backbone(), padded_texts())


@pytest.mark.filterwarnings("ignore:class_prompts have")
@pytest.mark.parametrize(("family", "is_same"), [(CLIP, True), (SIGLIP, False)], ids=["clip", "siglip"])
def test_a_decision_for_other_padding_is_of_the_same_prompts_where_padding_is_not_read(family, is_same):
    short = padded_texts(tokens=8)
    long = {name: torch.nn.functional.pad(value, (0, 8)) for name, value in short.items()}
    first, second = (ZeroShotClassifier(family.backbone(), prompts).eval() for prompts in (short, long))
    with torch.no_grad():
        logits = [classifier(**pixels()).logits for classifier in (first, second)]
    assert torch.allclose(*logits, atol=1e-6) == is_same
    assert (prompts_of(first) == prompts_of(second)) == is_same
