"""`export`: what is inside, what is beside it, and what is refused. That every family answers alike is in models/test_exports,
and the example of the page in serving/test_conformance.
"""

import errno
import json
import warnings
from types import SimpleNamespace

import onnxruntime
import pytest
import torch
from transformers import AutoTokenizer, ViTImageProcessorPil

from hydra_transformers import AutoHydra, export
from hydra_transformers import exporting as formats
from hydra_transformers.cli import main
from hydra_transformers.exporting import ExportError, inputs_of
from hydra_transformers.models.auto import load_trained
from hydra_transformers.models.configuration_hydra import OUTPUTS_OF_HYDRAS
from tests.families import BERT, CLIP, DINOV2, VIT, WAV2VEC2, images
from tests.tiny_data import save_bert


def calibrated_hydra():
    backbone = VIT.backbone(0, num_hidden_layers=1).float()  # exporters take their time for every layer
    hydra = AutoHydra.from_pruned_members([AutoHydra.from_backbone(backbone, {0: [head]}) for head in range(2)])
    data = [{"pixel_values": images(120).float(), "labels": torch.arange(120) % 5}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing was learnt, so the temperature is at an end of its range
        hydra.calibrate(data, target={"coverage": 0.5}, detector="knn", alpha=0.3)
    return hydra


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A calibrated Hydra, and the folder with its files."""
    hydra = calibrated_hydra().train()
    folder = export(hydra, tmp_path_factory.mktemp("export") / "exported", ["onnx", "torch"])
    assert hydra.training
    return hydra.eval(), folder


@pytest.mark.slow
def test_the_calibration_is_inside(exported):
    hydra, folder = exported
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.onnx", "model.pt2"}
    inputs = {"pixel_values": images(40, seed=1).float()}
    expected = hydra(**inputs)
    names = ["logits", *(name for name in OUTPUTS_OF_HYDRAS if expected.get(name) is not None)]
    assert 0 < expected.abstain.sum() < 40 and expected.prediction_set.sum(dim=1).unique().numel() > 1
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    found = dict(zip(names, session.run(names, {"pixel_values": inputs["pixel_values"].numpy()}), strict=True))
    for by_format in (found, torch.export.load(folder / "model.pt2").module()(**inputs)):
        assert set(by_format) == set(names)
        for name in names:
            torch.testing.assert_close(torch.as_tensor(by_format[name]), expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_thresholds_of_each_class_are_inside(tmp_path):
    hydra = calibrated_hydra()
    data = [{"pixel_values": images(120).float(), "labels": torch.arange(120) % 5}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hydra.calibrate(data, target={"risk": 0.9}, by="prediction", confidence=0.5, alpha=None)
    thresholds = torch.tensor(hydra.decision.settings.thresholds)
    folder = export(hydra, tmp_path / "exported", ["onnx", "torch"])
    inputs = {"pixel_values": images(40, seed=1).float()}
    expected = hydra(**inputs)
    assert torch.equal(expected.abstain, expected.detector_score > thresholds[expected.logits.argmax(dim=-1)])
    assert 0 < expected.abstain.sum() < 40 and thresholds.unique().numel() > 1
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    [found] = session.run(["abstain"], {"pixel_values": inputs["pixel_values"].numpy()})
    assert found.tolist() == expected.abstain.tolist()
    found = torch.export.load(folder / "model.pt2").module()(**inputs)["abstain"]
    assert torch.equal(found, expected.abstain)


@pytest.mark.slow
def test_thresholds_of_each_group_are_inside(tmp_path):
    hydra = calibrated_hydra()
    pixel_values = images(120).float()
    with torch.no_grad(), hydra.uncalibrated():
        labels = hydra(pixel_values=pixel_values).logits.argmax(dim=-1)
    data = [{"pixel_values": pixel_values, "labels": labels, "site": ["north", "south", "east"] * 40}]
    target = {"risk": {"north": 0.001, "*": 0.5}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hydra.calibrate(data, target=target, by="site", confidence=0.5, alpha=None)
    thresholds = torch.tensor(hydra.decision.settings.by_group.thresholds)
    folder = export(hydra, tmp_path / "exported", ["onnx", "torch"])
    inputs = {"pixel_values": images(40, seed=1).float(), "group": torch.arange(40) % 5 - 1}
    expected = hydra(**inputs)
    is_known = (inputs["group"] >= 0) & (inputs["group"] < 3)
    is_below = expected.detector_score <= thresholds[inputs["group"].clamp(0, 2)]
    assert torch.equal(expected.abstain, ~(is_known & is_below))
    assert expected.abstain[is_known].any() and not expected.abstain[is_known].all()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert {value.name: value.shape for value in session.get_inputs()}["group"] == ["batch"]
    [found] = session.run(["abstain"], {name: value.numpy() for name, value in inputs.items()})
    assert found.tolist() == expected.abstain.tolist()
    found = torch.export.load(folder / "model.pt2").module()(**inputs)["abstain"]
    assert torch.equal(found, expected.abstain)


@pytest.mark.slow
def test_a_calibration_of_other_weights_stays_outside(tmp_path):
    hydra = calibrated_hydra()
    with torch.no_grad():
        hydra.classifier.weight.mul_(2)
    folder = export(hydra, tmp_path / "exported", "torch")
    assert list(torch.export.load(folder / "model.pt2").module()(pixel_values=images(3).float())) == [
        "logits",
        "member_logits",
    ]
    assert hydra.decision is not None


@pytest.mark.slow
def test_the_command_writes_a_folder_that_reads_texts(tmp_path, capsys):
    backbone = load_trained(save_bert(tmp_path / "bert"))
    members = [AutoHydra.from_backbone(backbone, {0: [head]}) for head in range(2)]
    hydra = AutoHydra.from_pruned_members(members)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    hydra.save_pretrained(tmp_path / "hydra")
    tokenizer.save_pretrained(tmp_path / "hydra")
    words = ["export", str(tmp_path / "hydra"), "--to", "torch", "--output", str(tmp_path / "exported")]
    assert main(words) == 0
    assert "model.pt2: not calibrated" in capsys.readouterr().out
    folder = tmp_path / "exported"
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    inputs = AutoTokenizer.from_pretrained(folder)(["a film", "a good film of joy"], padding=True, return_tensors="pt")
    found = torch.export.load(folder / "model.pt2").module()(**inputs)  # token_type_ids are among them
    torch.testing.assert_close(found["member_logits"], hydra.eval()(**inputs).member_logits)
    assert main(words) == 2
    assert "exported exists already: pass another --output" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "bert"), "--output", str(tmp_path / "other")]) == 2
    assert "is a plain bert: pass a Hydra" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (BERT, {"input_ids": ["batch", "tokens"], "attention_mask": ["batch", "tokens"], "logits": ["batch", 3]}),
        (WAV2VEC2, {"input_values": ["batch", "samples"], "logits": ["batch", 5]}),
        (
            CLIP,
            {
                "pixel_values": ["batch", 3, 8, 8],
                "input_ids": ["texts", "tokens"],
                "logits": ["batch", "texts"],
            },
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_axes_of_an_onnx_file_have_names(family, expected, tmp_path):
    export(family.fused().float(), tmp_path / "exported")
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "model.onnx")
    shapes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
    assert {name: shapes[name] for name in expected} == expected


def test_what_cannot_be_exported_is_refused_with_a_sentence(tmp_path, monkeypatch):
    hydra = VIT.fused()
    with pytest.raises(ValueError, match=r"to is \['tflite'\]: pass one or more of onnx, torch"):
        export(hydra, tmp_path / "new", "tflite")
    for other in (VIT.backbone(), hydra.vit, CLIP.fused().vision_model):
        with pytest.raises(TypeError, match="pass a Hydra that classifies, or one of CLIP or SigLIP"):
            export(other, tmp_path / "new")
    with pytest.raises(ValueError, match=r"model is in bfloat16.*pass model.float\(\)"):
        export(VIT.fused().bfloat16(), tmp_path / "new")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        export(hydra, tmp_path)
    assert (tmp_path / "mine.txt").exists()
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ImportError, match="needs onnxscript: pip install onnx onnxruntime onnxscript"):
        export(hydra, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_images_are_of_the_size_that_the_processor_makes():
    """DINOv2 was pre-trained with 518 pixels, and is used with 224."""
    hydra = DINOV2.fused()
    assert inputs_of(hydra, None, 2, 1.0)["pixel_values"].shape == (2, 3, 8, 8)
    processor = ViTImageProcessorPil(size={"height": 12, "width": 16})
    assert inputs_of(hydra, processor, 2, 1.0)["pixel_values"].shape == (2, 3, 12, 16)


@pytest.mark.parametrize("wrong_by", [1.0, float("nan")])
def test_a_format_that_answers_otherwise_is_not_written(wrong_by, tmp_path, monkeypatch):
    hydra = VIT.fused()

    def run(inputs):
        return {"logits": hydra(**inputs).logits, "member_logits": hydra(**inputs).member_logits + wrong_by}

    monkeypatch.setattr(formats.Exportable, "program", lambda self: None)
    monkeypatch.setitem(formats.WRITERS, "torch", lambda program, path, exportable: path.write_bytes(b""))
    monkeypatch.setitem(formats.RUNNERS, "torch", lambda path: run)
    with pytest.raises(ExportError, match=r"gives other outputs than the model \(member_logits differs by"):
        export(hydra, tmp_path / "new", "torch")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_not_blamed_on_the_model(tmp_path, monkeypatch):
    class Exportable:
        def example(self, *sizes):
            return {}

        def __call__(self):
            return {"logits": None}

    def save(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: SimpleNamespace(save=save))
    with pytest.raises(ExportError, match=r"model\.onnx cannot be written \(No space left on device\): pass a folder"):
        formats._write_onnx(None, tmp_path / "model.onnx", Exportable())
