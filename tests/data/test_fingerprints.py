"""Fingerprints identify data by a sample of its rows, also if reading a row draws random numbers."""

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
def test_other_content_gives_another_fingerprint(data, other):
    assert fingerprint_of_data(data) == fingerprint_of_data(data)
    assert fingerprint_of_data(data) != fingerprint_of_data(other)


def test_the_fingerprint_of_a_stream_is_that_of_its_first_rows():
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


def test_the_same_few_of_many_rows_are_read():
    data, again = Counted(10**6), Counted(10**6)
    assert fingerprint_of_data(data) == fingerprint_of_data(again)
    assert data.read == again.read and len(data.read) == 2 * ROWS_IN_SAMPLE
    assert min(data.read) < 10**5 and max(data.read) > 9 * 10**5


class Noisy(list):
    """Adds noise from the global generators, or from its own."""

    def __init__(self, data, own: bool):
        super().__init__(data)
        self.generator = np.random.default_rng() if own else np.random

    def __getitem__(self, index):
        row = super().__getitem__(index)
        noise = self.generator.normal() + random.random() + torch.rand(4)
        return {**row, "pixel_values": row["pixel_values"] + noise}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("in_worker", [False, True])
def test_random_noise_does_not_change_the_fingerprint(own, in_worker):
    first = fingerprint_of_data(Noisy(rows(), own), in_worker)
    assert fingerprint_of_data(Noisy(rows(), own)) == first
    relabelled = [{**row, "labels": 1} for row in rows()]
    assert fingerprint_of_data(Noisy(relabelled, own)) != first
    # Noise that cannot be repeated hides the values below it; noise that can be does not.
    assert (fingerprint_of_data(Noisy(rows(first=1.0), own)) == first) == own


def test_random_states_are_restored():
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
