"""Every function takes the rows of `dataset.map(tokenize)`, as they are or in a DataLoader with `DataCollatorWithPadding`."""

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import temperature_scaled
from hydra_transformers.pruning import draw_members, extract_circuit, taylor_scores
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import calibrate, detector_by_name, predict_uncertainty
from tests.tiny_data import save_bert


TEXTS = ["a good film", "bad", "a film of joy", "a bad film of a bad film", "joy", "good good", "film", "of a bad joy"]
ROWS = 64  # texts of different lengths in each batch


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = save_bert(tmp_path_factory.mktemp("bert"))
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenized(bert):
    rows = {"text": [TEXTS[row * row % 8] for row in range(ROWS)], "label": [row % 3 % 2 for row in range(ROWS)]}
    return Dataset.from_dict(rows).map(lambda row: bert[1](row["text"]))


@pytest.fixture(scope="module")
def forms(bert, tokenized):
    """The same rows: filled up by hand, as `map` leaves them, and collated by Transformers."""
    numbers = tokenized.remove_columns("text")
    collator = DataCollatorWithPadding(bert[1])
    by_hand = [
        dict(bert[1](tokenized["text"][start : start + 32], padding=True, return_tensors="pt"))
        | {"labels": torch.tensor(tokenized["label"][start : start + 32])}
        for start in range(0, ROWS, 32)
    ]
    return {"by hand": by_hand, "rows": tokenized, "loader": DataLoader(numbers, batch_size=32, collate_fn=collator)}


def judged(model, data):
    [result] = evaluate_uncertainty(model, data, {"far": {"same": data}}).models.values()
    return result["data"] | result["same (far)"]


READERS = {
    "predict_uncertainty": lambda model, data: predict_uncertainty(model, data).total.tolist(),
    "evaluate_uncertainty": judged,
    "calibrate": lambda model, data: calibrate(AutoHydra.from_backbone(model), data).temperature,
    "temperature_scaled": lambda model, data: temperature_scaled(model, data).scaling.temperature,
    "detectors": lambda model, data: detector_by_name("energy").score(model, data).tolist(),
    "extract_circuit": lambda model, data: extract_circuit(model, data, data, "avg", budget=2).scores,
    "taylor_scores": lambda model, data: list(taylor_scores(model, data).values()),
    "draw_members": lambda model, data: [
        each.config.kept_heads
        for each in draw_members(model, data=data, heads_per_layer=2, num_members=2, allow_equal=True)
    ],
}


SLOW = ("draw_members", "extract_circuit")


@pytest.mark.filterwarnings("ignore")  # tiny models know little
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in READERS]
)
def test_rows_and_loaders_are_read_as_batches_filled_up_by_hand(name, bert, forms):
    expected, *others = (READERS[name](bert[0], data) for data in forms.values())
    for values in others:
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
