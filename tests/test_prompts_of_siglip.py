"""SigLIP reads the last token of a prompt, be it padding: prompts of another length than in training are told of."""

import warnings

import pytest
import torch

from hydra_transformers.data.prediction import ZeroShotClassifier
from hydra_transformers.pruning import prune_heads, taylor_scores
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
