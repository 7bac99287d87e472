"""What is built on models of two towers, with SigLIP, which says yes or no to each text; and on image classifiers that are one
tower of two."""

import copy

import pytest
import torch
from transformers import AutoProcessor, CLIPForImageClassification, SiglipForImageClassification, pipeline

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import DeepEnsemble, temperature_scaled_clip
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.fusion import to_transformers
from hydra_transformers.hub import create_model_card
from hydra_transformers.models.auto import load_trained
from hydra_transformers.pruning import prune_heads
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.training.parameter_groups import unused_parameters
from hydra_transformers.uncertainty import calibrate, decompose, predict_uncertainty
from hydra_transformers.uncertainty.features import AnswerReader
from tests.families import CLIP, CLIP_CLASSIFIER, SIGLIP, SIGLIP_CLASSIFIER, images, padded_texts
from tests.tiny_data import CLASSES, picture_rows, pictures, save_siglip


PROMPTS = padded_texts(3)
LABELLED = [{"pixel_values": images(30, seed=3), "labels": torch.arange(30) % 3}]
CLASSIFIERS = pytest.mark.parametrize("family", [CLIP_CLASSIFIER, SIGLIP_CLASSIFIER], ids=lambda family: family.name)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    """A folder with a backbone, a Hydra of it and pictures."""
    folder = tmp_path_factory.mktemp("siglip")
    backbone = load_trained(save_siglip(folder / "siglip"))
    members = [prune_heads(backbone, {"vision": {0: [head]}, "text": {1: [head]}}) for head in range(3)]
    AutoHydra.from_pruned_members(members).save_pretrained(folder / "hydra")
    AutoProcessor.from_pretrained(folder / "siglip").save_pretrained(folder / "hydra")
    picture_rows(24).save_to_disk(folder / "pictures")
    for number, image in enumerate(pictures([0, 1, 2], seed=4)):
        image.save(folder / f"{number}.png")
    return folder


# Classes that exclude each other


@torch.no_grad()
@pytest.mark.parametrize("make", [SIGLIP.backbone, SIGLIP.fused], ids=["siglip", "hydra"])
def test_fixed_prompts_choose_one_class_by_a_softmax_over_the_logits_of_pairs(make):
    model = make()
    outputs = model(pixel_values=images(), **PROMPTS)
    logits = outputs.get("member_logits", outputs.logits_per_image.unsqueeze(1))
    found = ZeroShotClassifier(model, PROMPTS)(images())
    torch.testing.assert_close(found.member_logits, logits)
    torch.testing.assert_close(found.logits.softmax(-1), logits.softmax(-1).mean(dim=1))
    # the probability of each class given that exactly one of them is right
    yes = logits.sigmoid()
    exactly_one = torch.stack([yes[..., k] * (1 - yes).prod(-1) / (1 - yes[..., k]) for k in range(3)], dim=-1)
    torch.testing.assert_close(logits.softmax(-1), exactly_one / exactly_one.sum(-1, keepdim=True))


@torch.no_grad()
def test_without_a_zero_shot_classifier_siglip_decides_on_each_text_and_clip_chooses_one():
    batch = {"pixel_values": images(), **PROMPTS}
    for model in (SIGLIP.fused(), DeepEnsemble([SIGLIP.backbone(seed) for seed in range(2)])):
        outputs = model(**batch)
        answer = outputs.logits_per_image if "logits_per_image" in outputs else outputs.logits
        torch.testing.assert_close(predict_uncertainty(model, [batch]).mean_probabilities, answer.sigmoid().double())
    for model in (ZeroShotClassifier(SIGLIP.fused(), PROMPTS), CLIP.fused()):
        assert torch.allclose(predict_uncertainty(model, [batch]).mean_probabilities.sum(-1), torch.ones(4).double())
    fewer = {"pixel_values": images(2), **padded_texts(2)}
    with pytest.raises(ValueError, match="not all have the same classes and texts: pass the same"):
        predict_uncertainty(CLIP.fused(), [batch, fewer])


def test_a_siglip_is_judged_and_calibrated_by_class_prompts():
    hydra = SIGLIP.fused()
    report = evaluate_uncertainty({"Hydra": hydra}, LABELLED, class_prompts=PROMPTS)
    with torch.no_grad():
        member_logits = hydra(pixel_values=LABELLED[0]["pixel_values"], **PROMPTS).member_logits
    right = decompose(member_logits).prediction == LABELLED[0]["labels"]
    assert report.models["Hydra"]["data"]["accuracy"] == pytest.approx(right.double().mean().item())
    classifier = calibrate(ZeroShotClassifier(hydra, PROMPTS), LABELLED, target={"coverage": 0.5}).model.eval()
    assert classifier(pixel_values=images()).abstain.shape == (4,)
    with pytest.raises(ValueError, match="whose classes are those of each call's prompts"):
        calibrate(hydra, LABELLED, target={"coverage": 0.5})


@torch.no_grad()
@pytest.mark.parametrize("make", [SIGLIP.backbone, SIGLIP.fused], ids=["siglip", "hydra"])
def test_a_temperature_divides_the_logits_of_pairs_with_their_bias(make):
    model = make()
    scaled = temperature_scaled_clip(model, PROMPTS, LABELLED)
    before, after = (each(pixel_values=images(), **padded_texts(2, seed=5)) for each in (model, scaled))
    name = "member_logits" if "member_logits" in before else "logits_per_image"
    ratio = before[name] / after[name]
    assert ratio[0].flatten()[0] != 1 and torch.allclose(ratio, ratio.flatten()[0])


@pytest.mark.parametrize("family", [CLIP, SIGLIP], ids=lambda family: family.name)
def test_features_of_members_are_their_image_embeddings(family):
    hydra = AutoHydra.from_pruned_members([prune_heads(family.backbone(), {"vision": {0: [head]}}) for head in (0, 1)])
    reader = AnswerReader(ZeroShotClassifier(hydra, PROMPTS))
    logits, features = reader({"pixel_values": images(4, seed=3)})
    embeddings = hydra.get_image_features(pixel_values=images(4, seed=3)).member_pooler_output
    torch.testing.assert_close(features, torch.nn.functional.normalize(embeddings, dim=-1))
    assert logits.shape == (4, 2, len(PROMPTS["input_ids"]))


# Pipelines, cards, the command line


@torch.no_grad()
def test_pipelines_give_the_mean_probability_of_each_text_by_itself(siglip):
    processor = AutoProcessor.from_pretrained(siglip / "hydra")
    hydra = load_trained(siglip / "hydra")
    parts = {"image_processor": processor.image_processor, "tokenizer": processor.tokenizer}
    image = str(siglip / "0.png")
    asked = {"candidate_labels": CLASSES}
    plain = pipeline("zero-shot-image-classification", model=str(siglip / "hydra"), **parts)(image, **asked)
    texts = [f"This is a photo of {label}." for label in CLASSES]
    inputs = processor(
        text=texts, images=pictures([0], seed=4), padding="max_length", max_length=64, return_tensors="pt"
    )
    member_logits = hydra(**inputs).member_logits
    mean = dict(zip(CLASSES, member_logits.sigmoid().mean(dim=1)[0].tolist(), strict=True))
    assert {each["label"]: pytest.approx(each["score"], abs=1e-5) for each in plain} == mean

    [answer] = hydra.predict([image], processor, **asked)
    assert [each["label"] for each in answer["scores"]] == [each["label"] for each in plain]
    parts = decompose(member_logits, "multi_label_classification")
    for name, part in (("uncertainty", parts.total), ("epistemic", parts.epistemic)):
        assert answer[name] == pytest.approx(part.sum().item(), abs=1e-5) and answer[name] > 0


def test_the_card_of_a_siglip_asks_each_text_by_itself():
    card = str(create_model_card(SIGLIP.fused().float(), repo_id="me/pairs"))
    assert 'padding="max_length", max_length=64' in card and "outputs.member_logits.sigmoid()" in card
    assert "the logit of the members' mean probability" in card
    assert "logit bias, logit scale, text model head and vision model head" in card
    assert "Multiply-adds per image" in card and "SigLIP" in card


# Image classifiers that are one tower of two


@pytest.mark.parametrize(
    ("towers", "classifier"), [(CLIP, CLIPForImageClassification), (SIGLIP, SiglipForImageClassification)]
)
def test_two_pretrained_towers_become_image_classifiers_with_the_vision_tower(towers, classifier, tmp_path):
    pretrained = towers.backbone().float()
    pretrained.save_pretrained(tmp_path)
    theirs = dict(pretrained.vision_model.named_parameters())
    for source in (pretrained, tmp_path):
        hydra = AutoHydra.from_backbone(source, num_members=2, class_names=["a", "b", "c"])
        one, other = (to_transformers(hydra.member(index)) for index in range(2))
        assert type(one) is classifier and one.config.num_labels == 3
        assert not torch.equal(one.classifier.weight, other.classifier.weight)
        for name, parameter in one.vision_model.named_parameters():
            if not name.startswith("head."):  # which no classifier reads
                assert torch.equal(parameter, theirs[name]), name


def test_what_no_head_reads_is_not_trained():
    idle = unused_parameters(CLIP_CLASSIFIER.hydra.from_backbone(CLIP_CLASSIFIER.backbone()))
    assert idle == {"vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias"}


@CLASSIFIERS
def test_a_classifier_of_one_tower_is_calibrated_and_its_encoder_is_not(family, tmp_path):
    hydra = copy.deepcopy(family.fused()).float()
    rows = [{"pixel_values": images(40, seed=3).float(), "labels": torch.arange(40) % 5}]
    calibrate(hydra, rows, target={"coverage": 0.5})
    hydra.save_pretrained(tmp_path)
    loaded = load_trained(tmp_path)
    assert loaded.is_calibrated and loaded.vision_model.decision is None
    assert torch.equal(loaded(images().float()).abstain, hydra(images().float()).abstain)
