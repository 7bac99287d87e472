"""Pipelines and `predict` that say how sure they are, against plain computations."""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, ViTImageProcessorPil, pipeline

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.models.auto import load_trained
from hydra_transformers.uncertainty import calibrate, decompose, predict_decisions
from tests.fresh_process import run_without_package
from tests.tiny_data import CLASSES, picture_rows, pictures, save_bert, save_clip, save_vit


TEXTS = ["a film of joy", "a bad film", "good", "a bad bad film of joy"]
IMAGES = pictures([0, 1, 2, 0, 1], seed=3)
LABELS = ["red", "green", "blue"]
PARTS = {"uncertainty": "total", "aleatoric": "aleatoric", "epistemic": "epistemic"}


def save_hydra(backbone_folder, folder, processor, heads=lambda pruned: pruned):
    """Three members with different heads cut out, and the backbone's processor."""
    backbone = load_trained(backbone_folder)
    members = [AutoHydra.from_backbone(backbone, heads({0: [head], 1: [head + 1]})) for head in range(3)]
    AutoHydra.from_pruned_members(members, shared=()).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    vit = save_vit(folder / "vit")
    bert = save_bert(folder / "bert")
    clip = save_clip(folder / "clip")
    save_hydra(vit, folder / "images", ViTImageProcessorPil.from_pretrained(vit))
    save_hydra(bert, folder / "texts", AutoTokenizer.from_pretrained(bert))
    save_hydra(
        clip,
        folder / "zero-shot",
        AutoProcessor.from_pretrained(clip),
        lambda pruned: {"vision": pruned, "text": pruned},
    )
    calibrated = load_trained(folder / "images")
    calibrated.calibrate(batches_of(folder / "images", picture_rows(60)), target={"coverage": 0.5}, alpha=0.3)
    calibrated.save_pretrained(folder / "calibrated")
    ViTImageProcessorPil.from_pretrained(vit).save_pretrained(folder / "calibrated")
    return folder


def processor_for(folder):
    """Named, and not found: older versions of Transformers ask for torchvision even where Pillow would do."""
    kinds = {"texts": AutoTokenizer, "zero-shot": AutoProcessor}
    return kinds.get(folder.name, ViTImageProcessorPil).from_pretrained(folder)


def pipeline_in(folder, task, **options):
    processor = processor_for(folder)
    kinds = {"texts": ["tokenizer"], "zero-shot": ["image_processor", "tokenizer"]}
    names = kinds.get(folder.name, ["image_processor"])
    processors = {name: getattr(processor, name, processor) for name in names}
    return pipeline(task, model=str(folder), **processors, **options)


def batches_of(folder, rows) -> list[dict]:
    pixels = ViTImageProcessorPil.from_pretrained(folder)(list(rows["image"]), return_tensors="pt")
    return [{"pixel_values": pixels["pixel_values"], "labels": torch.tensor(list(rows["label"]))}]


@torch.no_grad()
def outputs_of(folder, inputs):
    """What the model gives for all inputs at once, and the names of its classes."""
    model = load_trained(folder)
    reader = processor_for(folder)
    if folder.name == "zero-shot":
        prompts = [f"This is a photo of {label}." for label in LABELS]
        return model(**reader(text=prompts, images=inputs, return_tensors="pt", padding=True)), LABELS
    padding = {"padding": True} if folder.name == "texts" else {}
    return model(**reader(inputs, return_tensors="pt", **padding)), list(model.config.id2label.values())


CASES = {
    "images": ("hydra-image-classification", IMAGES, {}),
    "texts": ("hydra-text-classification", TEXTS, {}),
    "zero-shot": ("hydra-zero-shot-image-classification", IMAGES, {"candidate_labels": LABELS}),
    "calibrated": ("hydra-image-classification", IMAGES, {}),
}


@pytest.fixture(params=CASES)
def case(request, folders):
    return (folders / request.param, *CASES[request.param])


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in ("label", "abstain", "prediction_set", "detector"):
            assert one[name] == other[name], name
        assert (one["threshold"] is None) == (other["threshold"] is None)
        assert one.get("truncated") == other.get("truncated") and (one["reason"] is None) == (other["reason"] is None)
        # Members apart and fused round differently, and so do the scores a threshold is one of.
        for name in ("score", "threshold", *PARTS):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
        assert [each["label"] for each in one["scores"]] == [each["label"] for each in other["scores"]]


def test_they_answer_what_the_model_gives(case):
    folder, task, inputs, options = case
    outputs, names = outputs_of(folder, inputs)
    logits = outputs.logits_per_image if folder.name == "zero-shot" else outputs.logits
    parts = decompose(outputs.member_logits)
    answers = pipeline_in(folder, task)(inputs, top_k=2, **options)
    assert len(answers) == len(inputs)
    for row, answer in enumerate(answers):
        probabilities = logits[row].softmax(-1)
        best = probabilities.argsort(descending=True).tolist()
        assert answer["label"] == names[best[0]] and answer["score"] == pytest.approx(
            probabilities.max().item(), abs=1e-5
        )
        assert [each["label"] for each in answer["scores"]] == [names[index] for index in best[:2]]
        for name, part in PARTS.items():
            assert answer[name] == pytest.approx(getattr(parts, part)[row].item(), abs=1e-5)
        assert answer["epistemic"] > 0
        if folder.name == "calibrated":
            assert answer["abstain"] is outputs.abstain[row].item()
            in_set = [names[index] for index in best if outputs.prediction_set[row, index]]
            assert answer["prediction_set"] == in_set != []
            threshold = load_trained(folder).config.decision["threshold"]
            assert answer["detector"] == "msp" and answer["threshold"] == threshold
            assert answer["detector_score"] == pytest.approx(outputs.detector_score[row].item(), abs=1e-5)
            why = f"msp (1 - the largest probability) is {answer['detector_score']:.3g}, above the threshold {threshold:.3g}."
            if len(in_set) == 1:  # no answer beside a set of one class is explained
                why += " Prediction sets are right for 70 % of all rows, less often for rows as unsure as this one."
            assert answer["reason"] == (why if answer["abstain"] else None)
        else:
            decided = ("abstain", "prediction_set", "detector", "detector_score", "threshold", "reason")
            assert all(answer[name] is None for name in decided)
        assert ("truncated" in answer) == (folder.name == "texts")
    if folder.name == "calibrated":
        assert len({answer["abstain"] for answer in answers}) == 2


def test_batches_streams_single_inputs_and_predict_are_answered_alike(case):
    folder, task, inputs, options = case
    answer = pipeline_in(folder, task)
    one_by_one = [answer(each, **options) for each in inputs]
    assert all(isinstance(each, dict) for each in one_by_one)
    assert_same(answer(inputs, batch_size=3, **options), one_by_one)
    stream = answer((each for each in inputs), batch_size=2, **options)
    assert not isinstance(stream, list)
    assert_same(list(stream), one_by_one)
    hydra = load_trained(folder).train()
    assert_same(hydra.predict(inputs, processor_for(folder), batch_size=2, **options), one_by_one)
    assert all(module.training for module in hydra.modules())
    assert hydra.predict([], processor_for(folder), **options) == []


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_scores_are_those_of_the_standard_pipeline(kind, folders):
    task, inputs, _ = CASES[kind]
    ours, theirs = (pipeline_in(folders / kind, name)(inputs, top_k=3) for name in (task, task.removeprefix("hydra-")))
    with pytest.raises(ValueError, match="function_to_apply is not a parameter here"):
        pipeline_in(folders / kind, task)(inputs, function_to_apply="sigmoid")
    for one, other in zip(ours, theirs, strict=True):
        assert [each["label"] for each in one["scores"]] == [each["label"] for each in other]
        assert [each["score"] for each in one["scores"]] == pytest.approx([each["score"] for each in other], abs=1e-6)


def test_long_texts_are_cut_to_what_the_model_reads(folders):
    texts = ["good film " * 40, "good film " * 7]
    [long, short] = load_trained(folders / "texts").predict(texts)
    assert long["score"] == pytest.approx(short["score"], abs=1e-5)
    assert long["truncated"] is True and short["truncated"] is False
    answer = pipeline_in(folders / "texts", "hydra-text-classification")
    for batch_size in (1, 2):
        assert_same(answer(texts, batch_size=batch_size), [long, short])


@pytest.mark.parametrize("text", ["", "  ", "\n\t", "\u200b", {"text": "", "text_pair": " "}])
def test_empty_texts_are_not_answered(text, folders):
    answer = pipeline_in(folders / "texts", "hydra-text-classification")
    for found in (answer(text), answer([text, "good"], batch_size=2)[0]):
        assert found["abstain"] is True and found["reason"] == "The text is empty."
    assert answer("good")["reason"] is None
    [found] = predict_decisions(load_trained(folders / "bert"), [text])
    assert found["abstain"] is True and found["reason"] == "The text is empty."


@pytest.mark.parametrize("kind", ["images", "zero-shot", "calibrated"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_images_of_one_colour_are_not_answered(kind, mode, folders, tmp_path):
    options = {"candidate_labels": LABELS} if kind == "zero-shot" else {}
    flat = Image.new(mode, (9, 7), {"RGB": (10, 20, 30), "L": 7, "RGBA": (1, 2, 3, 0)}[mode])
    flat.save(tmp_path / "flat.png")
    for batch_size in (1, 3):
        [first, second, other] = load_trained(folders / kind).predict(
            [flat, tmp_path / "flat.png", IMAGES[0]], processor_for(folders / kind), batch_size, **options
        )
        assert first["abstain"] is True and first["reason"] == "The image has one colour only."
        assert_same([first], [second])
        assert other["reason"] != first["reason"]


@pytest.mark.parametrize("kind", ["images", "calibrated"])
def test_answers_that_are_no_numbers_abstain(kind, folders):
    hydra = load_trained(folders / kind)
    with torch.no_grad():
        hydra.classifier.weight.fill_(torch.nan)
    if kind == "calibrated":
        hydra.decision.remember(hydra)
    [answer] = hydra.predict(IMAGES[:1], processor_for(folders / kind))
    assert answer["abstain"] is True and answer["reason"] == "The answer is not a number."
    if kind == "calibrated":
        assert sorted(answer["prediction_set"]) == sorted(CLASSES)


@pytest.mark.parametrize("kind, problem_type", [("images", "regression"), ("vit", None)])
def test_a_number_beyond_all_numbers_abstains(kind, problem_type, folders):
    model = load_trained(folders / kind)
    model.config.problem_type = problem_type
    with torch.no_grad():
        model.classifier.bias[0] = torch.inf  # as beyond 65,504 in float16
    [answer] = predict_decisions(model, IMAGES[:1], processor_for(folders / kind))
    assert answer["abstain"] is True and answer["reason"] == "The answer is not a number."


WITHOUT_THE_PACKAGE = """
import json, sys
from PIL import Image
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, AutoProcessor
from transformers import ViTImageProcessorPil, pipeline
folder = sys.argv[1]
image = Image.open(f"{folder}/image.png")
pixels = ViTImageProcessorPil.from_pretrained(f"{folder}/calibrated")
both = AutoProcessor.from_pretrained(f"{folder}/zero-shot", trust_remote_code=True)
task, of_images = "hydra-image-classification", {"image_processor": pixels, "trust_remote_code": True}
of_both = {"image_processor": both.image_processor, "tokenizer": both.tokenizer, "trust_remote_code": True}
answer = pipeline(task, model=f"{folder}/calibrated", **of_images)
repr(answer.model.config)
answers = [answer(image)]
model = AutoModelForImageClassification.from_pretrained(f"{folder}/calibrated", trust_remote_code=True)
answers += model.predict([image], pixels)
model.save_pretrained(f"{folder}/again")
answer.save_pretrained(f"{folder}/again")
answers += [pipeline(task, model=f"{folder}/again", **of_images)(image)]
text = pipeline("hydra-text-classification", model=f"{folder}/texts", trust_remote_code=True)
zero_shot = pipeline("hydra-zero-shot-image-classification", model=f"{folder}/zero-shot", **of_both)
others = [text("a bad film"), zero_shot(image, candidate_labels=["red", "green", "blue"])]
model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/texts", trust_remote_code=True)
labels = [model.predict(["a bad film"])[0]["label"]]
print(json.dumps([answers, others, labels]))
"""


def test_a_process_without_the_package_answers_alike(folders, tmp_path):
    IMAGES[0].save(folders / "image.png")
    result = run_without_package(WITHOUT_THE_PACKAGE, folders, folder=tmp_path, answers="n\n" * 9)
    assert result.returncode == 0, result.stderr
    assert "is not supported for" not in result.stderr  # as check_model_type would say
    assert "[y/N]" not in result.stdout + result.stderr  # trust is asked for once
    answers, others, labels = json.loads(result.stdout.splitlines()[-1])
    with Image.open(folders / "image.png") as image:
        assert_same(
            answers, load_trained(folders / "calibrated").predict([image], processor_for(folders / "calibrated")) * 3
        )
        expected = load_trained(folders / "texts").predict(["a bad film"])
        expected += load_trained(folders / "zero-shot").predict(
            [image], processor_for(folders / "zero-shot"), candidate_labels=LABELS
        )
    assert_same(others, expected)
    assert labels == [expected[0]["label"]]


# Any classifier


def test_any_classifier_answers_with_its_uncertainty(folders):
    vit = load_trained(folders / "vit")
    processor = ViTImageProcessorPil.from_pretrained(folders / "vit")
    for answer in predict_decisions(vit, IMAGES, processor):
        assert (
            answer["epistemic"] == 0 and answer["uncertainty"] == answer["aleatoric"] > 0 and answer["abstain"] is None
        )
    hydra = load_trained(folders / "images")
    ensemble = DeepEnsemble([hydra.member(index) for index in range(3)])
    assert_same(predict_decisions(ensemble, IMAGES, processor, batch_size=2), hydra.predict(IMAGES, processor))
    options = {"target": {"coverage": 0.5}, "alpha": 0.3}
    deciding = calibrate(ensemble, batches_of(folders / "vit", picture_rows(60)), **options).model
    answers = predict_decisions(deciding, IMAGES, processor)
    assert_same(answers, load_trained(folders / "calibrated").predict(IMAGES, processor))
    assert {answer["abstain"] for answer in answers} == {True, False}
