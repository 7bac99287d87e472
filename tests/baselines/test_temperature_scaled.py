"""temperature_scaled: a classifier with the temperature that suits validation data."""

import copy

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from transformers import CLIPModel

from hydra_transformers.baselines import temperature_scaled, temperature_scaled_clip
from hydra_transformers.data.prediction import predict
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.uncertainty.features import collect_answers
from hydra_transformers.uncertainty.temperature import best_temperature
from tests.families import CLIP, images, padded_texts, vit_backbone


def validation(rows: int = 64) -> list[dict]:
    """Labels drawn from the model's own probabilities at temperature 2."""
    pixel_values = images(rows, seed=3)
    with torch.no_grad():
        probabilities = (vit_backbone()(pixel_values=pixel_values).logits / 2).softmax(-1)
    labels = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    return [
        {"pixel_values": part, "labels": row}
        for part, row in zip(pixel_values.split(20), labels.split(20), strict=True)
    ]


def test_the_temperature_has_the_least_validation_loss():
    model = vit_backbone()
    data = validation()
    with torch.no_grad():
        logits = torch.cat([model(pixel_values=batch["pixel_values"]).logits for batch in data])
        labels = torch.cat([batch["labels"] for batch in data])
        best = minimize_scalar(lambda t: nn.functional.cross_entropy(logits / t, labels).item(), bounds=(0.1, 20))
        scaled = temperature_scaled(model, data)
        output = scaled(pixel_values=images(2))
        expected = model(pixel_values=images(2)).logits / best.x
    assert scaled.scaling.temperature == pytest.approx(best.x, rel=1e-3)
    torch.testing.assert_close(output.member_logits[:, 0], expected, rtol=1e-3, atol=1e-5)


FIRST = padded_texts(batch=4, seed=1)
SECOND = padded_texts(batch=6, seed=2)
DATA = [{"pixel_values": images(seed=seed), "labels": torch.arange(4)} for seed in range(5)]


def fused():
    members = [CLIP.hydra.from_backbone(CLIP.backbone(), heads) for heads in CLIP.heads_to_prune]
    return CLIP.hydra.from_pruned_members(members)


@pytest.mark.parametrize("make", [CLIP.backbone, fused], ids=["clip", "hydra"])
def test_it_is_one_number_for_every_label_set_and_every_member(make, tmp_path):
    model = make()
    before = copy.deepcopy(model.state_dict())
    scaled = temperature_scaled_clip(model, FIRST, DATA)
    logits, _, labels = collect_answers(ZeroShotClassifier(model, FIRST), DATA)
    temperature = best_temperature(logits, labels, pooled=False)
    assert temperature != pytest.approx(1.0, rel=1e-2)
    for prompts in (FIRST, SECOND):  # of four and of six classes
        plain = ZeroShotClassifier(model, prompts)
        own = ZeroShotClassifier(scaled, prompts)
        torch.testing.assert_close(predict(own, DATA[0]), predict(plain, DATA[0]) / temperature)
        assert torch.equal(predict(own, DATA[0]).argmax(-1), predict(plain, DATA[0]).argmax(-1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if make is CLIP.backbone:  # saved it is a plain CLIP
        scaled.save_pretrained(tmp_path)
        assert torch.equal(CLIPModel.from_pretrained(tmp_path).logit_scale.double(), scaled.logit_scale)


def test_a_temperature_that_half_precision_rounds_is_told():
    data = [{name: each.bfloat16() if each.is_floating_point() else each for name, each in DATA[0].items()}]
    with pytest.warns(UserWarning, match=r"logit_scale is torch\.bfloat16, which rounds the temperature"):
        temperature_scaled_clip(CLIP.backbone().bfloat16(), FIRST, data)
