"""The same rows by every way to ask a model: forward, pipeline, predictor, HTTP, ONNX, torch.export.

Ray gets the same rows in test_ray.py.
"""

import base64
import io
import random
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoTokenizer, BertForSequenceClassification

from hydra_transformers import export, load_data
from hydra_transformers.exporting import FILES, RUNNERS
from hydra_transformers.models.auto import auto_class_of, load_trained
from hydra_transformers.models.configuration_hydra import OUTPUTS_OF_HYDRAS
from hydra_transformers.models.families import pipeline_class
from hydra_transformers.serving import HydraPredictor, create_app
from hydra_transformers.uncertainty import decompose
from tests.pages import run_python_blocks
from tests.serving.tiny import hydra_of
from tests.tiny_data import WORDS, review_rows, save_bert


ROWS = 200
CLOSE = 1e-3  # of probabilities and nats


def texts() -> list[str]:
    """Of one to twenty words, so that most are padded and some are cut."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS[5:], k=1 + place % 20)) for place in range(ROWS)]


def image_files() -> list[bytes]:
    """PNG files of odd sizes and modes, some turned by their EXIF tag."""
    draw = np.random.default_rng(0)
    files = []
    for place in range(ROWS):
        pixels = draw.integers(0, 256, (4 + place % 7, 5 + place % 5, 4), dtype=np.uint8)
        image = Image.fromarray(pixels, "RGBA").convert(("RGB", "RGBA", "L", "LA", "P", "1")[place % 6])
        exif = Image.Exif()
        exif[0x0112] = 6 if place % 3 == 0 else 1
        file = io.BytesIO()
        image.save(file, "PNG", exif=exif)
        files.append(file.getvalue())
    return files


def save_calibrated_texts(folder: Path) -> Path:
    backbone = save_bert(folder / "bert")
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    one_layer = BertForSequenceClassification.from_pretrained(backbone, num_hidden_layers=1)
    hydra = hydra_of(one_layer, [{0: [0]}, {0: [1, 2]}, {0: [3]}])
    rows = review_rows(60).map(lambda row, place: {"sentence": texts()[place]}, with_indices=True)
    hydra.calibrate(load_data(rows, tokenizer, max_length=16), target={"coverage": 0.5}, alpha=0.2)
    hydra.save_pretrained(folder / "calibrated-texts")
    tokenizer.save_pretrained(folder / "calibrated-texts")
    return folder / "calibrated-texts"


def export_as_on_the_page(folder: Path) -> Path:
    """The model of images in ONNX, by the example of docs/export.md."""
    shutil.copytree(folder, "my-calibrated-hydra")
    for name, image in (("one.jpg", Image.radial_gradient("L")), ("two.jpg", Image.linear_gradient("L"))):
        image.convert("RGB").save(name)
    names = run_python_blocks("docs/export.md")
    assert names["logits"].shape[0] == 2 and names["abstain"].shape == (2,)
    outputs = {output.name for output in onnxruntime.InferenceSession("my-onnx/model.onnx").get_outputs()}
    assert outputs == {"logits", *OUTPUTS_OF_HYDRAS} - {"interval"}  # of regression
    assert Path("my-onnx", "preprocessor_config.json").exists()
    return Path("my-onnx")


def of_outputs(outputs) -> dict[str, torch.Tensor]:
    """Of a forward or an exported file, all (rows, ...)."""
    parts = decompose(torch.as_tensor(outputs["member_logits"]).double())
    decisions = {name: torch.as_tensor(outputs[name]) for name in ("abstain", "prediction_set")}
    scores = torch.as_tensor(outputs["logits"]).softmax(-1)
    return {"scores": scores, "uncertainty": parts.total, "epistemic": parts.epistemic, **decisions}


def of_dicts(answers: list[dict], names: list[str]) -> dict[str, torch.Tensor]:
    scores = [{each["label"]: each["score"] for each in answer["scores"]} for answer in answers]
    columns = {name: [answer[name] for answer in answers] for name in ("uncertainty", "epistemic", "abstain")}
    columns["scores"] = [[found[name] for name in names] for found in scores]
    columns["prediction_set"] = [[name in answer["prediction_set"] for name in names] for answer in answers]
    return {name: torch.tensor(column) for name, column in columns.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "image"])
def test_every_way_to_ask_gives_the_same_answers(kind, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = folders["images"] if kind == "image" else save_calibrated_texts(tmp_path)
    hydra = load_trained(folder)
    names = list(hydra.config.id2label.values())
    if kind == "text":
        rows = sent = texts()
        reader = "tokenizer"
        processor = AutoTokenizer.from_pretrained(folder)
        prepared = dict(processor(rows, padding=True, truncation=True, max_length=16, return_tensors="pt"))
    else:
        files = image_files()
        rows = [Image.open(io.BytesIO(file)) for file in files]
        sent = [base64.b64encode(file).decode() for file in files]
        reader = "image_processor"
        processor = AutoImageProcessor.from_pretrained(folder)
        upright = [ImageOps.exif_transpose(image).convert("RGB") for image in rows]
        prepared = dict(processor(upright, return_tensors="pt"))
    with torch.no_grad():
        outputs = hydra(**prepared)
    expected = of_outputs(outputs)
    threshold = float(hydra.config.decision["threshold"])
    is_on_the_edge = (outputs.detector_score - threshold).abs() < 1e-5
    assert is_on_the_edge.sum() < 5 and 0 < outputs.abstain.sum() < ROWS

    pipeline = pipeline_class(auto_class_of(hydra.config))(model=hydra, **{reader: processor})
    answers = pipeline(rows, batch_size=7, top_k=None)
    found = {"pipeline": of_dicts(answers, names)}
    predictor = HydraPredictor(folder, device="cpu", top_k=None, batch_size=32)
    columns = predictor({kind: rows if kind == "text" else files})
    found["predictor"] = of_dicts(
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], names
    )
    with TestClient(create_app(predictor, max_batch=ROWS)) as client:
        body = {"inputs": sent, "parameters": {"top_k": len(names)}}
        found["/predict"] = of_dicts(client.post("/predict", json=body).json(), names)
    # Both formats are made of one program, and ONNX takes long.
    exported = export(hydra, "exported", "torch", processor) if kind == "text" else export_as_on_the_page(folder)
    to = "torch" if kind == "text" else "onnx"
    found[to] = of_outputs(RUNNERS[to](exported / FILES[to])(prepared))
    for way, answers in found.items():
        for name, value in expected.items():
            if value.is_floating_point():
                assert (answers[name].double() - value.double()).abs().max() < CLOSE, (way, name)
            else:
                assert not (answers[name] != value)[~is_on_the_edge].any(), (way, name)
