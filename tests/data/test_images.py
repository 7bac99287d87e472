"""Images are read alike everywhere: raw rows, saved data sets, `predict`, the endpoint handler, the
page, the command line."""

import base64

import datasets
import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageClassification, ViTImageProcessorPil

from hydra_transformers import load_data
from hydra_transformers.models.inputs import image_mode, read_image
from hydra_transformers.models.pipeline_hydra import HydraImageClassificationPipeline
from hydra_transformers.serving.answerer import read_image as read_request
from tests.tiny_data import pictures


@pytest.fixture(scope="module")
def classifier(vit):
    return AutoModelForImageClassification.from_pretrained(vit).eval(), ViTImageProcessorPil.from_pretrained(vit)


def saved(mode: str, folder) -> str:
    """A picture with something in each corner, in a file; "turned" has an EXIF tag that asks for a
    quarter turn."""
    image = Image.merge("RGB", [channel.resize((12, 8)) for channel in pictures([0], seed=3)[0].split()])
    image.putpixel((0, 0), (255, 255, 255))
    path = folder / "picture.png"
    exif = Image.Exif()
    if mode == "turned":
        exif[0x0112] = 6
    elif mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    else:
        image = image.convert(mode)
    image.save(path, exif=exif)
    return str(path)


def ways(path: str, model, processor, folder) -> dict[str, torch.Tensor]:
    """The pixel values that each way makes of a file."""

    def processed(image):
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    pipeline = HydraImageClassificationPipeline(model=model, image_processor=processor)
    rows = datasets.Dataset.from_dict({"image": [path]}).cast_column("image", datasets.Image())
    rows.save_to_disk(folder / "rows")
    with open(path, "rb") as file:
        content = base64.b64encode(file.read()).decode()
    with Image.open(path) as opened:
        return {
            "list": load_data([{"image": opened}], processor)[0]["pixel_values"],
            "Dataset": load_data(rows, processor)[0]["pixel_values"],
            "saved": load_data(folder / "rows", model.config, processor=processor)[0]["pixel_values"],
            "predict": pipeline.preprocess(opened)["pixel_values"][0],
            "predict path": pipeline.preprocess(path)["pixel_values"][0],
            "handler, server and page": pipeline.preprocess(read_request(content, "inputs[0]"))["pixel_values"][0],
            "command line": processed(read_image(path, mode=image_mode(model.config))),
        }


@pytest.mark.parametrize("mode", ["RGB", "turned", "L", "LA", "P", "RGBA", "1"])
def test_every_way_reads_the_same_pixels(mode, classifier, tmp_path):
    model, processor = classifier
    path = saved(mode, tmp_path)
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image).convert("RGB")
    assert image.size == ((8, 12) if mode == "turned" else (12, 8))
    expected = processor(images=image, return_tensors="pt")["pixel_values"][0]
    for way, pixels in ways(path, model, processor, tmp_path).items():
        assert torch.equal(pixels, expected), way
    with Image.open(path) as image:
        before = dict(image.getexif())
        read_image(image)
        assert dict(image.getexif()) == before, "the user's image is left alone"


def test_a_model_of_one_channel_reads_grey(classifier, tmp_path):
    model = classifier[0]
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5])
    grey = pictures([0])[0].convert("L")
    grey.save(tmp_path / "grey.png")
    model.config.num_channels = 1
    try:
        for way, pixels in ways(str(tmp_path / "grey.png"), model, processor, tmp_path).items():
            assert torch.equal(pixels, processor(images=grey, return_tensors="pt")["pixel_values"][0]), way
    finally:
        model.config.num_channels = 3


def test_what_is_not_an_image_raises():
    for image, error, words in (
        (Image.new("I;16", (4, 4)), ValueError, "mine has the mode I;16, of more than 256 levels: scale it to 8 bits"),
        (b"bytes", TypeError, "mine is a bytes: pass an image of PIL, a path or a URL"),
        ("nowhere.png", FileNotFoundError, r"nowhere\.png"),
    ):
        with pytest.raises(error, match=words):
            read_image(image, "mine")
