"""Data are known again by their rows, cheaply, and whatever is drawn at random when they are read."""

import random

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from PIL import Image

from hydra_transformers.data.fingerprints import ROWS_IN_SAMPLE, fingerprint_of_data


def rows(count: int = 5, first: float = 0.0) -> list[dict]:
    return [{"pixel_values": torch.arange(4.0) + n + first * (n == 3), "labels": n % 3} for n in range(count)]


def image(shade: int) -> Image.Image:
    return Image.new("RGB", (4, 4), (shade, 0, 0))


@pytest.mark.parametrize(
    ("data", "other"),
    [
        (rows(), rows(first=1e-6)),
        (rows(), rows(6)),
        ([{"text": "a cat"}], [{"text": "a dog"}]),
        ([{"labels": 1}], [{"label": 1}]),
        ([{"labels": 1.0}], [{"labels": 2.0}]),
        ([{"labels": None}], [{"labels": 0}]),
        ([{"ids": [1, [2, 3]]}], [{"ids": [1, [2, 4]]}]),
        ([{"ids": np.arange(3)}], [{"ids": np.arange(3.0)}]),
        ([{"image": image(1)}], [{"image": image(2)}]),
        ([{"image": {"bytes": b"1", "path": None}}], [{"image": {"bytes": b"2", "path": None}}]),
        ([(torch.zeros(2), 1)], [(torch.zeros(2), 2)]),
        ({"a": rows(), "b": rows()}, {"a": rows(), "b": rows(first=1.0)}),
        (Dataset.from_list([{"labels": 1}]), Dataset.from_list([{"labels": 2}])),
    ],
)
def test_data_are_told_apart_by_what_they_hold(data, other):
    assert fingerprint_of_data(data) == fingerprint_of_data(data)
    assert fingerprint_of_data(data) != fingerprint_of_data(other)


def test_streams_are_known_by_their_first_rows():
    def stream(first: int) -> IterableDataset:
        return IterableDataset.from_generator(lambda: ({"labels": first + n} for n in range(1_000)))

    assert fingerprint_of_data(stream(0)) == fingerprint_of_data(stream(0))
    assert fingerprint_of_data(stream(0)) != fingerprint_of_data(stream(1))
    once = iter(rows())
    fingerprint_of_data(once)
    assert len(list(once)) == 5  # what can be read once is left to the training


class Counted:
    def __init__(self, length: int):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return {"labels": index}


def test_of_many_rows_a_few_are_read_and_always_the_same():
    data, again = Counted(10**6), Counted(10**6)
    assert fingerprint_of_data(data) == fingerprint_of_data(again)
    assert data.read == again.read and len(data.read) == 2 * ROWS_IN_SAMPLE
    assert min(data.read) < 10**5 and max(data.read) > 9 * 10**5


class Noisy(list):
    """Noise from the generators that everybody uses, or from one of its own."""

    def __init__(self, data, own: bool):
        super().__init__(data)
        self.generator = np.random.default_rng() if own else np.random

    def __getitem__(self, index):
        row = super().__getitem__(index)
        noise = self.generator.normal() + random.random() + torch.rand(4)
        return {**row, "pixel_values": row["pixel_values"] + noise}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("in_worker", [False, True])
def test_what_is_drawn_at_random_does_not_make_other_data(own, in_worker):
    first = fingerprint_of_data(Noisy(rows(), own), in_worker)
    assert fingerprint_of_data(Noisy(rows(), own)) == first
    relabelled = [{**row, "labels": 1} for row in rows()]
    assert fingerprint_of_data(Noisy(relabelled, own)) != first
    # Noise that always comes out anew hides the values below it; noise that can be drawn again does not.
    assert (fingerprint_of_data(Noisy(rows(first=1.0), own)) == first) == own


def test_random_numbers_go_on_as_if_nothing_had_been():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    fingerprint_of_data(Noisy(rows(), own=False))
    assert draw() == expected


class OpenedOnce(list):
    """Opens its file with the first row, in the process that reads it."""

    opened = False

    def __getitem__(self, index):
        self.opened = True
        return super().__getitem__(index)


def test_with_workers_nothing_is_opened_in_this_process():
    data = OpenedOnce(rows())
    expected = fingerprint_of_data(rows())
    assert fingerprint_of_data(data, in_worker=True) == expected
    assert not data.opened
