"""Member logits of every kind of model: Hydras, plain classifiers, two towers with class prompts,
saved arrays."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from hydra_transformers.data.prediction import SavedLogits, predict
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.models.inputs import evaluation_mode
from hydra_transformers.uncertainty.features import collect_answers
from tests.families import CLIP, FEW, VIT, each_of, images, padded_texts


@each_of(FEW)
def test_a_hydra_predicts_its_members_and_a_plain_model_one(family):
    inputs = family.inputs()
    hydra = family.fused().eval()
    with torch.no_grad():
        assert torch.equal(predict(hydra, inputs), hydra(**inputs).member_logits)
        backbone = family.backbone()
        assert torch.equal(predict(backbone, inputs), family.logits(backbone, **inputs).unsqueeze(1))


def test_labels_and_columns_the_model_does_not_name_are_held_back():
    backbone = VIT.backbone()
    batch = {"pixel_values": images(2), "labels": torch.tensor([0, 99]), "row": torch.arange(2)}
    assert torch.equal(predict(backbone, batch), predict(backbone, {"pixel_values": images(2)}))
    with pytest.raises(ValueError, match=r"takes none of the batch's entries \(row\): it reads .*pixel_values"):
        predict(backbone, {"row": torch.arange(2)})
    with pytest.raises(TypeError, match="output of ViTModel has neither logits nor logits_per_image"):
        predict(backbone.vit, {"pixel_values": images(2)})


def test_every_module_is_back_in_its_mode_after_prediction():
    model = VIT.backbone().train()
    model.vit.eval()
    modes = [module.training for module in model.modules()]
    logits = predict(model, {"pixel_values": images(2)})
    assert [module.training for module in model.modules()] == modes
    assert not logits.requires_grad
    with pytest.raises(ValueError):
        predict(model, {"pixel_values": torch.zeros(1, 7, 7, 7)})
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_thread_keeps_evaluation_mode_when_another_leaves_it(is_wrapped):
    model = nn.Dropout(0.5)
    first_model = nn.Sequential(model) if is_wrapped else model
    first_is_inside = Event()
    both_are_inside = Event()
    first_has_left = Event()

    def first():
        with evaluation_mode(first_model):
            first_is_inside.set()
            assert both_are_inside.wait(60)
        first_has_left.set()

    def second():
        assert first_is_inside.wait(60)
        with evaluation_mode(model):
            both_are_inside.set()
            assert first_has_left.wait(60)
            return model(torch.ones(1_000))

    with ThreadPoolExecutor(2) as pool:
        threads = pool.submit(first), pool.submit(second)
        assert threads[1].result().eq(1).all() and threads[0].result() is None
    assert model.training and first_model.training


def collected(rows, batch_size=32):
    return collect_answers(SavedLogits(), rows, batch_size, with_features=False)


def test_collecting_gives_all_logits_and_labels_in_order():
    logits = torch.randn(7, 2, 3)
    rows = [{"member_logits": row, "labels": i} for i, row in enumerate(logits)]
    answers, _, labels = collected(rows, batch_size=3)
    assert torch.equal(answers, logits) and labels.tolist() == list(range(7))
    batch = {"member_logits": logits}
    assert collected([batch])[2] is None
    for wrong, words in (
        ([], "no batches"),
        ([{**batch, "labels": torch.arange(6)}], "7 rows and 6 labels: give each row one"),
        ([batch, {**batch, "labels": torch.zeros(7)}], "1 of 2 batches have labels"),
    ):
        with pytest.raises(ValueError, match=words):
            collected(wrong)


PROMPTS = padded_texts(batch=5)
PIXELS = {"pixel_values": images(3)}


def test_zero_shot_clip_gives_the_logits_of_clip_itself_and_a_hydra_the_mean_probabilities(monkeypatch):
    backbone = CLIP.backbone()
    hydra = CLIP.fused().eval()
    with torch.no_grad():
        reference = backbone(**PIXELS, **PROMPTS).logits_per_image
    member_logits = predict(ZeroShotClassifier(backbone, PROMPTS), PIXELS)
    torch.testing.assert_close(member_logits, reference.unsqueeze(1))
    monkeypatch.setattr(ZeroShotClassifier, "prompts_per_pass", 2)
    with torch.no_grad():
        reference = hydra(**PIXELS, **PROMPTS)
        output = ZeroShotClassifier(hydra, BatchEncoding(PROMPTS)).eval()(**PIXELS)
    torch.testing.assert_close(output.member_logits, reference.member_logits)
    torch.testing.assert_close(output.logits, reference.logits_per_image)


def test_prompts_follow_the_weights_after_refresh():
    classifier = ZeroShotClassifier(CLIP.backbone(seed=0), PROMPTS)
    classifier.model.load_state_dict(CLIP.backbone(seed=1).state_dict())
    classifier.refresh()
    expected = predict(ZeroShotClassifier(CLIP.backbone(seed=1), PROMPTS), PIXELS)
    torch.testing.assert_close(predict(classifier, PIXELS), expected)


@pytest.mark.parametrize("make", [CLIP.backbone, lambda: CLIP.fused()])
def test_a_zero_shot_classifier_in_bfloat16_answers_as_in_float32(make):
    classifier = ZeroShotClassifier(make().float(), PROMPTS)
    expected = predict(classifier, {"pixel_values": PIXELS["pixel_values"].float()})
    found = predict(classifier.to(torch.bfloat16), {"pixel_values": PIXELS["pixel_values"].bfloat16()})
    assert found.dtype == torch.float32
    scale = classifier.model.logit_scale.max().exp().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * scale)
    with pytest.raises(ValueError, match="class_prompts has no input_ids"):
        ZeroShotClassifier(CLIP.backbone(), {"input_ids": [[1, 2]]})
