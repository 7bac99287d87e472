"""A ViLU is trained by `Trainer`, and counted, like the other baselines."""

import pytest
import torch

from hydra_transformers.baselines import ViLU
from hydra_transformers.cost import compare_costs, count_multiply_adds
from hydra_transformers.data.prediction import ZeroShotClassifier
from tests.families import BERT, CLIP, VIT, bert_backbone, images, padded_texts


PROMPTS = padded_texts(seed=9)


def test_its_loss_is_divided_by_the_rows_of_all_batches_of_a_step():
    """Trainer does not divide it again: with as many more batches, each counts for its part."""
    vilu = ViLU(VIT.backbone())
    batch = VIT.inputs() | {"labels": torch.tensor([0, 1, 2, 0])}
    torch.testing.assert_close(vilu(**batch, num_items_in_batch=16).loss, vilu(**batch).loss / 4)


def test_its_zero_shot_classifier_has_a_cost():
    """An image, its products with the classes (for the answer, for the predictor and for their mean), and the predictor."""
    clip = CLIP.backbone()
    vilu = ViLU(clip)
    classifier = vilu.zero_shot(PROMPTS)
    predictor = sum(each.numel() for name, each in vilu.predictor.named_parameters() if name.endswith("weight"))
    plain = count_multiply_adds(ZeroShotClassifier(clip, PROMPTS))
    products = len(PROMPTS["input_ids"]) * clip.config.projection_dim
    assert compare_costs({"ViLU": classifier})["ViLU"].multiply_adds == plain + 2 * products + predictor


def test_a_batch_without_images_or_texts_is_refused():
    vilu = ViLU(CLIP.backbone())
    with pytest.raises(ValueError, match="the batch has no pixel_values"):
        vilu(**PROMPTS)
    with pytest.raises(ValueError, match="the batch has no input_ids"):
        vilu(pixel_values=images())


def test_a_fit_that_is_refused_leaves_an_earlier_one_as_it_was():
    model = VIT.backbone()
    vilu = ViLU(model)
    answers = model(**VIT.inputs()).logits.argmax(dim=-1)
    vilu.fit([VIT.inputs() | {"labels": torch.where(torch.arange(4) < 2, answers, -1)}], epochs=1)
    expected = vilu(**VIT.inputs()).detector_score
    for labels, message in (({}, "data has no labels"), ({"labels": answers}, "answers all of the 4 rows")):
        with pytest.raises(ValueError, match=message):
            vilu.fit([VIT.inputs() | labels])
        assert torch.equal(vilu(**VIT.inputs()).detector_score, expected)


def test_the_model_itself_is_never_in_training():
    vilu = ViLU(bert_backbone(hidden_dropout_prob=0.5)).train()
    assert vilu.predictor.training and torch.equal(vilu(**BERT.inputs()).logits, vilu(**BERT.inputs()).logits)


def test_a_training_that_comes_to_nothing_is_told():
    labels = torch.where(torch.arange(4) < 2, VIT.backbone()(**VIT.inputs()).logits.argmax(dim=-1), -1)
    with pytest.raises(ValueError, match=r"are not finite after training \(learning_rate is inf\)"):
        ViLU(VIT.backbone()).fit([VIT.inputs() | {"labels": labels}], learning_rate=float("inf"), epochs=1)


def test_a_label_that_no_class_has_is_refused():
    with pytest.raises(ValueError, match="data has the label 5: the classes are 0 to 4"):
        ViLU(VIT.backbone()).fit([VIT.inputs() | {"labels": torch.tensor([1, 2, 3, 5])}])
