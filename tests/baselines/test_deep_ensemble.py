"""DeepEnsemble: several models, asked in turn."""

import pytest
import torch

from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.prediction import predict
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from tests.families import BERT, VIT, clip_backbone, images, padded_texts, vit_backbone


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_the_members_are_the_models_and_the_answer_their_mean_probability(family):
    models = [family.backbone(seed) for seed in range(3)]
    inputs = family.inputs()
    with torch.no_grad():
        output = DeepEnsemble(models)(**inputs)
        singles = torch.stack([model(**inputs).logits for model in models], dim=1)
    assert torch.equal(output.member_logits, singles)
    torch.testing.assert_close(output.logits.softmax(-1), singles.softmax(-1).mean(1))


def test_the_members_of_hydras_join_those_of_plain_models():
    hydra = VIT.fused()
    plain = vit_backbone(5)
    inputs = VIT.inputs()
    with torch.no_grad():
        member_logits = DeepEnsemble([hydra, plain])(**inputs).member_logits
        expected = torch.cat([hydra(**inputs).member_logits, plain(**inputs).logits.unsqueeze(1)], dim=1)
    assert member_logits.shape[1] == 4
    assert torch.equal(member_logits, expected)


def test_clip_models_join_as_zero_shot_classifiers():
    prompts = padded_texts(batch=3)
    models = [clip_backbone(seed) for seed in range(2)]
    ensemble = DeepEnsemble([ZeroShotClassifier(model, prompts) for model in models])
    member_logits = predict(ensemble, {"pixel_values": images(2)})
    with torch.no_grad():
        expected = [model(pixel_values=images(2), **prompts).logits_per_image for model in models]
    torch.testing.assert_close(member_logits, torch.stack(expected, dim=1))
