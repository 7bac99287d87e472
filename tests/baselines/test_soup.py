"""soup: one model whose weights are the mean of several fine-tunings'."""

import copy

import pytest
import torch
from transformers import SwinConfig, SwinForImageClassification

from hydra_transformers.baselines import soup
from hydra_transformers.data.prediction import predict
from hydra_transformers.models.auto import AutoHydra
from tests.families import BERT, VIT, images, vit_backbone


def fine_tunings(model, count: int = 3) -> list:
    """Models that are not far from the given one."""
    found = [copy.deepcopy(model) for _ in range(count)]
    for seed, each in enumerate(found):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return found


def small_swin() -> SwinForImageClassification:
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}
    return SwinForImageClassification(SwinConfig(image_size=8, patch_size=2, initializer_range=0.2, **sizes)).double()


@pytest.mark.parametrize("make", [VIT.backbone, BERT.backbone, small_swin], ids=["vit", "bert", "swin"])
def test_its_weights_are_the_mean_and_the_models_stay_as_they_were(make):
    models = fine_tunings(make())
    before = [copy.deepcopy(model.state_dict()) for model in models]
    found = soup(models)
    assert type(found) is type(models[0]) and not found.training
    mean = {name: sum(each[name] for each in before) / 3 for name in before[0] if before[0][name].is_floating_point()}
    torch.testing.assert_close({name: found.state_dict()[name] for name in mean}, mean)
    for model, state in zip(models, before, strict=True):
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_the_soup_of_equal_models_is_that_model_to_the_last_bit():
    model = vit_backbone().float()
    torch.testing.assert_close(soup([model, model, model]).state_dict(), model.state_dict(), rtol=0, atol=0)


def test_members_with_the_same_heads_have_the_soup_of_their_models():
    models = fine_tunings(vit_backbone())
    members = [AutoHydra.from_backbone(model) for model in models]
    torch.testing.assert_close(predict(soup(members), VIT.inputs()), predict(soup(models), VIT.inputs()))


def test_the_soup_of_calibrated_members_is_not_calibrated(tmp_path):
    members = [AutoHydra.from_backbone(model.float()) for model in fine_tunings(vit_backbone(), 2)]
    labels = torch.arange(32) % 5
    for member in members:
        member.calibrate([{"pixel_values": images(32).float(), "labels": labels}], detector="mahalanobis")
    soup(members).save_pretrained(tmp_path)
    loaded = VIT.hydra.from_pretrained(tmp_path)
    assert loaded.decision is None and all(member.is_calibrated for member in members)
