"""Crops, flips and RandAugment, against what they are defined as."""

import numpy as np
import pytest
import torch
from PIL import Image

from hydra_transformers.data import image_changes
from hydra_transformers.data.image_changes import OPERATIONS, CropAndFlip, InTurn, RandAugment


WIDTH = 40
HEIGHT = 30


def gradient() -> Image.Image:
    """A picture whose pixel (x, y) says where it was: red is x, green is y."""
    columns, rows = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    return Image.fromarray(np.stack([columns, rows, np.full_like(rows, 200)], axis=-1).astype(np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("least_share", [0.08, 0.7, 1.0])
def test_crops_are_rectangles_of_the_image_of_the_asked_size_half_of_them_mirrored(least_share):
    torch.manual_seed(0)
    mirrored = 0
    shares = []
    for _ in range(300):
        found = pixels(CropAndFlip(least_share)(gradient()))
        height, width, _ = found.shape
        steps = np.diff(found[:, :, 0], axis=1)
        mirrored += int((steps == -1).all() and width > 1)
        assert (steps == steps.flat[0]).all() and abs(steps.flat[0]) == 1, "whole columns, in order"
        assert (np.diff(found[:, :, 1], axis=0) == 1).all(), "rows are never turned upside down"
        shares.append(width * height / (WIDTH * HEIGHT))
        assert 0.7 < width / height < 1.4 or (width, height) == (WIDTH, HEIGHT)
    assert 110 < mirrored < 190
    assert min(shares) >= 0.93 * least_share, "but for rounding"
    assert max(shares) > 0.8 * min(1.0, (3 / 4) ** -1 * HEIGHT / WIDTH)
    if least_share == 0.08:
        assert min(shares) < 0.2


def operation(name: str):
    return next(each for each in OPERATIONS if each.__name__ == f"_{name}")


@pytest.mark.parametrize("sign", [1, -1])
def test_geometry_is_that_of_torchvision_at_magnitude_12(sign):
    """12 of 30: a shear of 0.12, a shift by 150/331 of the side times 0.4, a turn by 12 degrees."""
    strength = sign * 12 / 30
    image = gradient()
    moved = pixels(operation("shift_x")(image, strength))
    by = int(150 / 331 * WIDTH * 0.4)
    inside = np.s_[:, : WIDTH - by] if sign > 0 else np.s_[:, by:]
    columns = np.arange(WIDTH)[inside[1]] + sign * by
    assert (moved[inside][:, :, 0] == columns).all()
    assert (np.delete(moved, np.arange(WIDTH)[inside[1]], axis=1) == 0).all(), "what is left open is black"
    moved = pixels(operation("shift_y")(image, strength))
    by = int(150 / 331 * HEIGHT * 0.4)
    rows = slice(0, HEIGHT - by) if sign > 0 else slice(by, HEIGHT)
    assert (moved[rows, :, 1] == (np.arange(HEIGHT)[rows] + sign * by)[:, None]).all()

    sheared = pixels(operation("shear_x")(image, strength))
    for y in range(0, HEIGHT, 7):
        for x in range(6, WIDTH - 6, 5):
            assert abs(sheared[y, x, 0] - (x + sign * 0.12 * y)) <= 1, "to the nearest pixel"
    turned = pixels(operation("rotate")(image, strength))
    angle = np.radians(sign * 12)
    for y, x in ((10, 20), (15, 12), (20, 28)):
        across = x + 0.5 - WIDTH / 2
        down = y + 0.5 - HEIGHT / 2
        source = np.cos(angle) * across - np.sin(angle) * down + WIDTH / 2
        assert abs(turned[y, x, 0] + 0.5 - source) <= 1.01


def test_colours_are_those_of_torchvision_at_magnitude_12():
    """Factors of 1.36 and 0.64, six bits, all above 153 inverted."""
    levels = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert("RGB")
    values = np.arange(256).reshape(16, 16)

    def changed(name: str, strength: float) -> np.ndarray:
        return pixels(operation(name)(levels, strength))[:, :, 0]

    assert (np.abs(changed("brightness", 0.4) - np.clip(1.36 * values, 0, 255)) <= 1).all()
    assert (np.abs(changed("brightness", -0.4) - 0.64 * values) <= 1).all()
    assert (np.abs(changed("contrast", -0.4) - (0.64 * values + 0.36 * 127.5)) <= 1).all()
    assert (changed("posterize", -0.4) == values // 4 * 4).all()
    assert (changed("solarize", 0.4) == np.where(values < 153, values, 255 - values)).all()
    assert (changed("autocontrast", 0.4) == values).all() and (changed("identity", 0.4) == values).all()
    narrow = Image.fromarray((100 + np.arange(16, dtype=np.uint8)).reshape(4, 4)).convert("RGB")
    spread = pixels(operation("autocontrast")(narrow, 0.4))[:, :, 0]
    assert (spread.min(), spread.max()) == (0, 255)
    many = narrow.resize((160, 160), Image.Resampling.NEAREST)
    evened = np.unique(pixels(operation("equalize")(many, 0.4)))
    assert len(evened) == 16 and (np.abs(np.diff(evened) - 17) <= 2).all(), "evenly over 0 to 255"
    grey = pixels(operation("colour")(Image.new("RGB", (2, 2), (200, 100, 0)), -0.4))
    assert grey[0, 0, 0] < 200 and grey[0, 0, 2] > 0, "towards grey"
    assert pixels(operation("sharpness")(levels, 0.4)).shape == (16, 16, 3)


def test_two_operations_are_drawn_anew_with_either_sign(monkeypatch):
    calls = []

    def recorded(place: int):
        return lambda image, strength: calls.append((place, strength)) or image

    monkeypatch.setattr(image_changes, "OPERATIONS", tuple(map(recorded, range(14))))
    torch.manual_seed(0)
    for _ in range(400):
        RandAugment(operations=2, magnitude=12)(gradient())
    assert len(calls) == 800
    assert {place for place, _ in calls} == set(range(14))
    counts = np.bincount([place for place, _ in calls])
    assert counts.min() > 25 and counts.max() < 95, "57 each, on average"
    assert {strength for _, strength in calls} == {0.4, -0.4}


def test_changes_are_applied_in_turn_and_repeat_with_the_seed():
    change = InTurn((CropAndFlip(0.08), RandAugment()))
    torch.manual_seed(3)
    first = [pixels(change(gradient())) for _ in range(20)]
    torch.manual_seed(3)
    again = [pixels(change(gradient())) for _ in range(20)]
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert len({found.tobytes() for found in first}) > 15
    for mode in ("L", "RGB"):
        assert all(change(gradient().convert(mode)).mode == mode for _ in range(30))


def test_wrong_settings_are_refused():
    for share in (0, 1.5):
        with pytest.raises(ValueError, match=f"least_share is {share}: pass a part of the area"):
            CropAndFlip(share)
    for settings in ({"operations": -1}, {"magnitude": 31}, {"magnitude": -1}):
        with pytest.raises(ValueError, match="magnitude from 0 to 30"):
            RandAugment(**settings)
