"""Corruptions are seeded by what they corrupt, grow with severity, and are the same for every form of an image."""

import colorsys
import difflib
import io
import re
import statistics

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate
from transformers import CLIPImageProcessorPil, ViTImageProcessorPil

from hydra_transformers.shift import corrupt
from hydra_transformers.shift.corruptions import CORRUPTIONS, SEVERITIES, corruption_names, pixel_scale
from hydra_transformers.shift.image_corruptions import normal, row_keys, uniform
from hydra_transformers.shift.text_corruptions import NEIGHBOURS
from tests.pages import ROOT


ON_IMAGES = [name for name, corruption in CORRUPTIONS.items() if corruption.kind == "image"]
ON_TEXTS = [name for name, corruption in CORRUPTIONS.items() if corruption.kind == "text"]
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
TEXTS = [
    "It is a charming and often affecting journey, if you let it.",
    "unflinchingly bleak and desperate",
    "The acting, costumes, music, cinematography and sound are all astounding given the locales of 1999.",
    "a sometimes tedious film about nothing much that happens to nobody in particular",
]


def photos(rows: int = 6, side: int = 32, seed: int = 0) -> torch.Tensor:
    """Soft blots with grain on them, in 256 levels: uint8 (rows, 3, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(rows, 3, 7, 7, generator=generator)
    soft = interpolate(coarse, size=side, mode="bicubic").clamp(0, 1)
    grain = torch.rand(rows, 3, side, side, generator=generator)
    return ((0.8 * soft + 0.2 * grain) * 255).round().to(torch.uint8)


IMAGES = photos().float() / 255


@pytest.mark.parametrize("name", ON_IMAGES)
def test_images_change_more_with_the_severity_and_alike_in_any_batch_and_order(name, monkeypatch):
    changed = [corrupt(IMAGES, name, severity) for severity in SEVERITIES]
    distances = [0.0] + [(each - IMAGES).square().mean().item() for each in changed]
    assert distances == sorted(set(distances))
    assert all(each.shape == IMAGES.shape and each.min() >= 0 and each.max() <= 1 for each in changed)
    together = changed[2]
    order = torch.tensor([3, 1, 5])
    assert torch.equal(together, torch.stack([corrupt(image, name, 3) for image in IMAGES]))
    assert torch.equal(corrupt(IMAGES[order], name, 3), together[order])
    monkeypatch.setattr("hydra_transformers.shift.corruptions.VALUES_AT_A_TIME", 2 * IMAGES[0].numel())
    assert torch.equal(corrupt(IMAGES, name, 3), together)


@pytest.mark.parametrize("name", ON_IMAGES)
def test_tensors_bytes_pictures_and_pixel_values_are_corrupted_alike(name):
    given = photos(rows=2)
    as_bytes = corrupt(given, name, 3)
    pictures = corrupt([Image.fromarray(each.permute(1, 2, 0).numpy()) for each in given], name, 3)
    of_pictures = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])
    as_floats = corrupt(given.float() / 255, name, 3)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    processor = ViTImageProcessorPil(image_mean=MEAN, image_std=STD)
    normalised = corrupt((given.float() / 255 - mean) / std, name, 3, processor=processor)
    assert torch.equal(as_bytes, of_pictures)
    assert ((as_floats * 255).round() - as_bytes.float()).abs().max() == 0
    assert torch.allclose(normalised * std + mean, as_floats, atol=2e-5)
    # Grey images of any size, too
    grey = photos(rows=1, side=40)[:, :1, :23, :]
    assert corrupt(grey, name, 5).shape == grey.shape
    picture = Image.fromarray(grey[0, 0].numpy())
    assert corrupt(picture, name, 5).mode == "L" and corrupt(picture, name, 5).size == (40, 23)
    assert corrupt(picture.convert("RGBA"), name, 1).mode == "RGB"


def test_another_seed_gives_other_noise_and_data_and_random_state_stay_as_they_are():
    state = torch.get_rng_state()
    first, again, other = (corrupt(IMAGES, "gaussian_noise", 1, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first, again) and not torch.equal(first, other)
    given = IMAGES.to(torch.float64).requires_grad_()
    changed = corrupt(given, "contrast", 5)
    assert changed.dtype == torch.float64 and not changed.requires_grad
    assert torch.equal(given.detach(), IMAGES.double()) and torch.equal(torch.get_rng_state(), state)
    assert corrupt(IMAGES[:0], "contrast", 5).shape == (0, 3, 32, 32)


def test_noise_is_what_it_is_called():
    grey = torch.full((1, 3, 128, 128), 0.5)
    noise = corrupt(grey, "gaussian_noise", 1) - grey
    assert abs(noise.mean()) < 0.002 and abs(noise.std() - 0.08) < 0.002
    photons = corrupt(grey, "shot_noise", 2) * 25
    assert torch.allclose(photons, photons.round(), atol=1e-4)
    level = 128 / 255 * 25  # an image has 256 levels
    assert abs(photons.mean() - level) < 0.1 and abs(photons.var() - level) < 0.35
    hit = corrupt(grey, "impulse_noise", 5) != grey
    assert abs(hit.float().mean() - 0.27) < 0.01
    assert abs(corrupt(grey, "impulse_noise", 5)[hit].mean() - 0.5) < 0.02


def test_blurs_leave_a_plain_image_as_it_is_and_brightness_is_that_of_hsv():
    plain = torch.tensor([0.2, 0.5, 0.7]).view(1, 3, 1, 1).expand(1, 3, 24, 24)
    for name in ("defocus_blur", "motion_blur", "zoom_blur", "contrast", "pixelate"):
        assert torch.allclose(corrupt(plain, name, 5), plain, atol=1e-5), name
    pixel = torch.tensor([0.6, 0.3, 0.2])
    hue, saturation, value = colorsys.rgb_to_hsv(*pixel.tolist())
    brighter = corrupt(pixel.view(3, 1, 1), "brightness", 2).flatten()
    assert torch.allclose(brighter, torch.tensor(colorsys.hsv_to_rgb(hue, saturation, value + 0.2)), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_a_file_of_imagenet_cs_qualities(channels):
    given = photos(rows=1, side=48)[0, :channels, :45, :37]
    array = given.permute(1, 2, 0).numpy()
    for severity, quality in enumerate((25, 18, 15, 10, 7), start=1):
        file = io.BytesIO()
        Image.fromarray(array if channels == 3 else array[..., 0]).save(file, "JPEG", quality=quality)
        decoded = torch.from_numpy(np.array(Image.open(file))).view(45, 37, channels).permute(2, 0, 1)
        assert torch.equal(corrupt(given, "jpeg_compression", severity), decoded)


def test_random_numbers_are_uniform_normal_and_of_their_own_row():
    keys = row_keys(photos(rows=2).float() / 255, "name", 0)
    numbers = uniform(keys, 3, 100, 100)
    others = uniform(keys, 3, 100, 100, stream=1)
    assert numbers.min() > 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005 and abs(numbers.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(numbers.flatten(1))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([numbers[0], others[0]]).flatten(1))[0, 1]) < 0.02
    bell = normal(keys, 3, 100, 100)
    assert abs(bell.mean()) < 0.01 and abs(bell.std() - 1) < 0.01 and abs((bell > 1.645).float().mean() - 0.05) < 0.004


def test_a_processors_scale_is_undone():
    size = {"size": {"height": 8, "width": 8}}
    picture = Image.fromarray(np.full((8, 8, 3), 96, dtype=np.uint8))
    for processor in (
        ViTImageProcessorPil(**size, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]),
        ViTImageProcessorPil(**size, do_normalize=False),
        ViTImageProcessorPil(**size, do_rescale=False, image_mean=[99] * 3, image_std=[5] * 3),
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
    ):
        pixel_values = processor(picture, return_tensors="pt")["pixel_values"]
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in pixel_scale(processor))
        torch.testing.assert_close((pixel_values * std + mean).float(), torch.full((1, 3, 8, 8), 96 / 255))
    processor = ViTImageProcessorPil(**size, do_rescale=False)  # reads images in [0, 1]
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    noisy = corrupt((images - 0.5) / 0.5, "gaussian_noise", 3, processor=processor)
    torch.testing.assert_close(noisy, (corrupt(images, "gaussian_noise", 3) - 0.5) / 0.5)
    with pytest.raises(ValueError, match="not 0 to 1"):
        corrupt((255 * images - 0.5) / 0.5, "gaussian_noise", 3, processor=processor)


@pytest.mark.parametrize("name", ON_TEXTS)
def test_texts_change_more_with_the_severity_and_alike_alone_and_among_others(name):
    def likeness(severity):
        changed = [corrupt(text, name, severity, seed=seed) for text in TEXTS for seed in range(3)]
        clean = [text for text in TEXTS for _ in range(3)]
        return statistics.mean(
            difflib.SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in zip(clean, changed, strict=True)
        )

    ratios = [likeness(severity) for severity in SEVERITIES]
    assert ratios == sorted(ratios, reverse=True) and ratios[-1] < ratios[0] <= 1
    together = corrupt(TEXTS, name, 4, seed=1)
    assert together == [corrupt(text, name, 4, seed=1) for text in TEXTS]
    assert together != corrupt(TEXTS, name, 4, seed=2)
    assert corrupt(["", "a"], name, 5) == ["", "a"]  # a single letter or word stays


def test_text_corruptions_do_what_they_are_called():
    text = TEXTS[2]
    mistyped = corrupt(text, "typos", 5)
    changed = [(old, new) for old, new in zip(text, mistyped, strict=True) if old != new]
    assert changed and all(
        new.lower() in NEIGHBOURS[old.lower()] and old.isupper() == new.isupper() for old, new in changed
    )
    assert len(NEIGHBOURS) == 26 and all(key in NEIGHBOURS[near] for key in NEIGHBOURS for near in NEIGHBOURS[key])
    words = corrupt(text, "word_drops", 5).split()
    assert 0 < len(words) < len(text.split()) and set(words) <= set(text.split())
    assert len(corrupt(text, "character_drops", 5)) < len(text)


def test_names_groups_and_all_of_a_kind():
    assert corruption_names("all", "image") == ON_IMAGES and corruption_names("all", "text") == ON_TEXTS
    blurs = [name for name in ON_IMAGES if name.endswith("_blur")]
    assert corruption_names(["blur", "motion_blur", "contrast"], "image") == [*blurs, "contrast"]
    page = (ROOT / "docs/uncertainty.md").read_text()
    for each in CORRUPTIONS.values():
        assert re.search(rf"\| .*`{each.group}`.*, {each.kind}s \| .*`{each.name}`.* \|", page)


@pytest.mark.parametrize(
    ("data", "name", "severity", "words"),
    [
        (IMAGES, "jpeg", 1, "no corruption is called 'jpeg': there are"),
        (IMAGES, "contrast", 6, "from 1 to 5"),
        ("a text", "contrast", 1, "contrast is for images, and the data are texts"),
        ({"pixel_values": IMAGES}, "contrast", 1, r"corrupted\(data"),
        (IMAGES - 1, "contrast", 1, "pass the processor that made them"),
        (IMAGES.long(), "contrast", 1, "torch.int64"),
        (IMAGES[:, :2], "contrast", 1, "1 or 3 channels"),
        (Image.new("I;16", (4, 4)), "contrast", 1, "mode I;16, of more than 256 levels"),
    ],
)
def test_wrong_data_names_and_scales_raise(data, name, severity, words):
    with pytest.raises((TypeError, ValueError), match=words):
        corrupt(data, name, severity)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_corrupts_as_a_cpu_does():
    for name in ON_IMAGES:
        there = corrupt(IMAGES.cuda(), name, 3)
        # a coefficient or a count that lies between two steps may be rounded to the other
        assert ((there.cpu() - corrupt(IMAGES, name, 3)).abs() > 1e-4).float().mean() < 0.01, name
