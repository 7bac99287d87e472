"""Clients that know classes and scores alone can abstain: config.json and the ONNX file say below which score."""

import json

import onnxruntime
import pytest
import torch
from transformers import AutoConfig, ImageClassificationPipeline, ViTForImageClassification, ViTImageProcessorPil

from hydra_transformers import AutoHydra, export, load_data
from tests.serving.tiny import hydra_of
from tests.tiny_data import picture_rows, pictures, save_vit


IMAGES = pictures([0, 1, 2] * 6, seed=4)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return ViTImageProcessorPil.from_pretrained(save_vit(tmp_path_factory.mktemp("models") / "vit"))


@pytest.fixture
def hydra(processor, tmp_path):
    """Calibrated to refuse half of all pictures."""
    hydra = hydra_of(ViTForImageClassification.from_pretrained(save_vit(tmp_path / "vit")))
    hydra.calibrate(load_data(picture_rows(60), processor), target={"coverage": 0.5})
    return hydra


def saved(hydra, folder) -> dict:
    hydra.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def test_a_pipeline_of_transformers_abstains_as_the_model_does(hydra, processor, tmp_path):
    config = saved(hydra, tmp_path / "hydra")
    pipeline = ImageClassificationPipeline(
        model=AutoHydra.from_pretrained(tmp_path / "hydra"), image_processor=processor
    )
    scores = [answers[0]["score"] for answers in pipeline(IMAGES, top_k=1)]
    with torch.no_grad():
        expected = hydra(**processor(IMAGES, return_tensors="pt")).abstain.tolist()
    assert [score < config["abstain_below"] for score in scores] == expected and set(expected) == {True, False}
    assert "answering 50 % cuts errors" in config["promise"]


@pytest.mark.slow
def test_the_onnx_file_says_so_too(hydra, processor, tmp_path):
    folder = export(hydra, tmp_path / "onnx", "onnx", processor)
    config = json.loads((folder / "config.json").read_text())
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    metadata = session.get_modelmeta().custom_metadata_map
    assert float(metadata["abstain_below"]) == config["abstain_below"] and metadata["promise"] == config["promise"]
    inputs = dict(processor(IMAGES, return_tensors="np"))
    logits, abstain = session.run(["logits", "abstain"], inputs)
    scores = torch.from_numpy(logits).softmax(dim=-1).amax(dim=-1)
    assert (scores < float(metadata["abstain_below"])).tolist() == abstain.tolist()
    with torch.no_grad():
        hydra.classifier.weight.mul_(2)
    other = export(hydra, tmp_path / "other", "onnx", processor)
    assert onnxruntime.InferenceSession(other / "model.onnx").get_modelmeta().custom_metadata_map == {}
    assert "abstain_below" not in json.loads((other / "config.json").read_text())


def test_what_one_score_does_not_tell_is_not_said(hydra, processor, tmp_path):
    data = load_data(picture_rows(60), processor)
    of_one_score = [{"target": {"coverage": 0.9}}, {"target": {"risk": 0.5}, "confidence": 0}]
    others = [
        {"target": None, "alpha": 0.2},
        {"target": {"coverage": 0.5}, "detector": "entropy"},
        {"target": {"risk": 0.9}, "by": "prediction", "confidence": 0.5},
    ]
    for options in (*of_one_score, *others):
        hydra.calibrate(data, **options)
        config = saved(hydra, tmp_path / "hydra")
        assert ("abstain_below" in config) == ("promise" in config) == (options in of_one_score), options


def test_it_goes_with_the_weights_that_it_is_about(hydra, tmp_path):
    config = saved(hydra, tmp_path / "hydra")
    loaded = AutoHydra.from_pretrained(tmp_path / "hydra")
    for model in (hydra, loaded):
        assert not hasattr(model.config, "abstain_below") and not hasattr(model.config, "promise")
    assert saved(loaded, tmp_path / "again")["abstain_below"] == config["abstain_below"]
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "again"), "abstain_below")
    with torch.no_grad():
        loaded.classifier.weight.mul_(2)
    changed = saved(loaded, tmp_path / "again")
    assert changed["decision"] is not None and "abstain_below" not in changed and "promise" not in changed
    for name, made in {"member": hydra.member(0), "plain": loaded.member(0)}.items():
        assert "abstain_below" not in saved(made, tmp_path / name)


@pytest.mark.parametrize(("threshold", "below"), [("inf", 0.0), ("-inf", 2.0), (0.25, 0.75), (-0.1, 1.1)])
def test_where_all_or_none_are_answered_it_is_a_number_too(threshold, below, hydra):
    settings = hydra.decision.settings.to_dict() | {"threshold": threshold}
    fields = type(hydra.decision.settings).read(settings).fields_for_any_client()
    assert fields["abstain_below"] == pytest.approx(below) and json.dumps(fields, allow_nan=False)
