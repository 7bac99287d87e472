"""The groups of rows are read from a column."""

import numpy as np
import pandas
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from torch.utils.data import DataLoader

from hydra_transformers.data.groups import check_are_groups, groups_of
from hydra_transformers.data.loading import PreparedData


SITES = ["north", "south", "north"]
ROWS = [{"input_ids": torch.ones(3, dtype=torch.long), "site": site} for site in SITES]


def test_groups_are_read_from_every_form_of_rows():
    named = Features({"text": Value("string"), "site": ClassLabel(names=["south", "north"])})
    forms = {
        "rows": ROWS,
        "batches": [
            {"input_ids": torch.ones(2, 3), "site": SITES[:2]},
            {"input_ids": torch.ones(1, 3), "site": SITES[2:]},
        ],
        "frame": pandas.DataFrame({"text": ["a", "b", "c"], "site": SITES}),
        "dataset": Dataset.from_dict({"text": ["a", "b", "c"], "site": SITES}),
        "class labels": Dataset.from_dict({"text": ["a", "b", "c"], "site": [1, 0, 1]}, features=named),
        "prepared": PreparedData([{"text": "a", "site": site} for site in SITES], None, "text", ("text",)),
    }
    for name, data in forms.items():
        assert groups_of(data, "site") == SITES, name


def test_a_number_has_one_name_however_it_is_written():
    rows = [{"site": 3}, {"site": 3.0}, {"site": np.int64(3)}, {"site": torch.tensor(3)}, {"site": "3"}, {"site": 2.5}]
    assert groups_of(rows, "site") == ["3"] * 5 + ["2.5"]
    assert groups_of([{"site": torch.tensor([3, 4])}], "site") == ["3", "4"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (ROWS, "data has no column 'camera', by which promises are made: it has input_ids, site"),
        (Dataset.from_dict({"site": SITES}), "data has no column 'camera'"),
        ([{"camera": "a"}, {"camera": ""}], "row 1 of the data has nothing in the column 'camera'"),
        ([{"camera": "a"}, {"camera": None}], "row 1 of the data has nothing"),
        ([{"camera": 1.0}, {"camera": float("nan")}], "row 1 of the data has nothing"),
        (DataLoader(ROWS), "data is a DataLoader, which drops the column 'camera'"),
        ([torch.ones(3)], "data holds a Tensor in place of rows"),
    ],
    ids=["no column", "no column of a Dataset", "empty", "none", "nan", "DataLoader", "tensors"],
)
def test_columns_that_give_no_groups_are_refused(data, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        groups_of(data, "camera")


def test_a_column_with_a_value_for_every_row_names_no_groups():
    with pytest.raises(ValueError, match="the column 'id' has 40 values in 60 rows: pass a column of groups"):
        check_are_groups([str(row % 40) for row in range(60)], "id")
    check_are_groups([str(row % 30) for row in range(60)], "id")
