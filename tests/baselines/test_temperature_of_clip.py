"""A temperature that is fitted with one label set of CLIP and carried to another."""

import copy

import pytest
import torch
from transformers import CLIPModel

from hydra_transformers.baselines import temperature_scaled, temperature_scaled_clip
from hydra_transformers.data.prediction import ZeroShotClassifier, collect_member_logits, predict
from hydra_transformers.uncertainty import TemperatureScaling, classification_metrics
from tests.families import CLIP, VIT, images, padded_texts


FIRST, SECOND = padded_texts(batch=4, seed=1), padded_texts(batch=6, seed=2)
DATA = [{"pixel_values": images(seed=seed), "labels": torch.arange(4)} for seed in range(5)]


def fused():
    members = [CLIP.hydra.from_backbone(CLIP.backbone(), heads) for heads in CLIP.heads_to_prune]
    return CLIP.hydra.from_pruned_members(members)


@pytest.mark.parametrize("make", [CLIP.backbone, fused], ids=["clip", "hydra"])
def test_it_is_one_number_for_every_label_set_and_every_member(make):
    model = make()
    before = copy.deepcopy(model.state_dict())
    scaled = temperature_scaled_clip(model, FIRST, DATA)
    scaling = temperature_scaled(ZeroShotClassifier(model, FIRST), DATA).scaling
    assert scaling.temperature[0] != pytest.approx(1.0, rel=1e-2)
    for prompts in (FIRST, SECOND):  # of four and of six classes
        plain, own = ZeroShotClassifier(model, prompts), ZeroShotClassifier(scaled, prompts)
        torch.testing.assert_close(predict(own, DATA[0]), predict(scaling.wrap(plain), DATA[0]))
        assert torch.equal(predict(own, DATA[0]).argmax(-1), predict(plain, DATA[0]).argmax(-1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_it_has_the_smallest_nll_of_its_label_set():
    scaled = temperature_scaled_clip(CLIP.backbone(), FIRST, DATA)
    logits, labels = collect_member_logits(ZeroShotClassifier(scaled, FIRST), DATA)
    best = classification_metrics(logits, labels, num_bins=2)["nll"]
    for temperature in (0.5, 0.9, 1.1, 2.0):
        assert classification_metrics(TemperatureScaling(temperature)(logits), labels, num_bins=2)["nll"] > best


def test_saved_it_is_a_plain_clip(tmp_path):
    scaled = temperature_scaled_clip(CLIP.backbone(), FIRST, DATA)
    scaled.save_pretrained(tmp_path)
    loaded = CLIPModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded.logit_scale, scaled.logit_scale)
    expected = predict(ZeroShotClassifier(scaled, SECOND), DATA[0])
    torch.testing.assert_close(predict(ZeroShotClassifier(loaded, SECOND), DATA[0]), expected)


def test_a_model_without_texts_is_refused():
    with pytest.raises(TypeError, match="ViTForImageClassification, no model of two towers"):
        temperature_scaled_clip(VIT.backbone(), {}, [])


def test_a_temperature_that_half_precision_rounds_is_told():
    data = [{name: each.bfloat16() if each.is_floating_point() else each for name, each in DATA[0].items()}]
    with pytest.warns(UserWarning, match=r"logit_scale is torch\.bfloat16, which rounds the temperature"):
        temperature_scaled_clip(CLIP.backbone().bfloat16(), FIRST, data)
