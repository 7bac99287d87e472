"""DeepEnsemble: several models, asked in turn."""

import pytest
import torch

from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import ZeroShotClassifier, predict
from tests.families import BERT, CLIP, LLAMA, VIT, bert_backbone, clip_backbone, images, padded_texts, vit_backbone


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_the_members_are_the_models_and_the_answer_their_mean_probability(family):
    models, inputs = [family.backbone(seed) for seed in range(3)], family.inputs()
    with torch.no_grad():
        output = DeepEnsemble(models)(**inputs)
        singles = torch.stack([model(**inputs).logits for model in models], dim=1)
    assert torch.equal(output.member_logits, singles)
    torch.testing.assert_close(output.logits.softmax(-1), singles.softmax(-1).mean(1))


def test_the_members_of_hydras_join_those_of_plain_models():
    hydra = VIT.fused()
    plain, inputs = vit_backbone(5), VIT.inputs()
    with torch.no_grad():
        member_logits = DeepEnsemble([hydra, plain])(**inputs).member_logits
        expected = torch.cat([hydra(**inputs).member_logits, plain(**inputs).logits.unsqueeze(1)], dim=1)
    assert member_logits.shape[1] == 4
    assert torch.equal(member_logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", [VIT, BERT, CLIP, LLAMA], ids=lambda family: family.name)
def test_the_cost_is_the_sum(family):
    models = [family.backbone(seed) for seed in range(3)]
    assert count_parameters(DeepEnsemble(models)) == 3 * count_parameters(models[0])
    assert count_multiply_adds(DeepEnsemble(models)) == 3 * count_multiply_adds(models[0])


def test_clip_models_join_as_zero_shot_classifiers():
    prompts = padded_texts(batch=3)
    models = [clip_backbone(seed) for seed in range(2)]
    ensemble = DeepEnsemble([ZeroShotClassifier(model, prompts) for model in models])
    member_logits = predict(ensemble, {"pixel_values": images(2)})
    with torch.no_grad():
        expected = [model(pixel_values=images(2), **prompts).logits_per_image for model in models]
    torch.testing.assert_close(member_logits, torch.stack(expected, dim=1))


def test_entries_that_no_model_takes_are_left_out():
    batch = VIT.inputs() | {"row_number": torch.arange(4), "labels": torch.zeros(4, dtype=torch.long)}
    assert predict(DeepEnsemble([vit_backbone()]), batch).shape == (4, 1, 5)


@pytest.mark.parametrize("problem_type, num_labels", [("regression", 1), ("multi_label_classification", 3)])
def test_the_answer_is_that_of_a_hydra_of_the_same_models(problem_type, num_labels):
    models = [bert_backbone(seed, num_labels=num_labels, problem_type=problem_type) for seed in range(2)]
    hydra = BERT.hydra.from_pruned_members(models, shared=())
    with torch.no_grad():
        expected = hydra(**BERT.inputs()).logits
        for ensemble in (DeepEnsemble(models), DeepEnsemble([DeepEnsemble(models)])):
            torch.testing.assert_close(ensemble(**BERT.inputs()).logits, expected)


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        ([], ValueError, "models has no models: pass a list"),
        (None, ValueError, "models has no models: pass a list"),
        (vit_backbone(), TypeError, "models is a ViTForImageClassification: pass a list"),
        ([vit_backbone(), "google/vit"], TypeError, r"models\[1\] is a str: pass classifiers that are loaded"),
    ],
    ids=["empty", "none", "one", "name"],
)
def test_what_is_no_list_of_models_is_refused(models, error, message):
    with pytest.raises(error, match=message):
        DeepEnsemble(models)


def test_models_that_order_their_classes_otherwise_do_not_join():
    def animals(*names):
        return vit_backbone(
            num_labels=2, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
        )

    with pytest.raises(
        ValueError, match=r"models\[1\] calls its classes dog, cat, models\[0\] cat, dog: .* same order"
    ):
        DeepEnsemble([animals("cat", "dog"), animals("dog", "cat")])


def test_models_of_other_classes_do_not_join():
    ensemble = DeepEnsemble([vit_backbone(), vit_backbone(num_labels=7)])
    with pytest.raises(ValueError, match=r"models\[1\] has 7 classes, models\[0\] has 5"):
        ensemble(**VIT.inputs())
