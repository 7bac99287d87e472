"""Functions that take data and a model take the name, folder or file of a data set, too."""

import pytest
from datasets import DatasetDict

from hydra_transformers import AutoHydra, calibrate, evaluate_uncertainty, load_data
from hydra_transformers.models.auto import load_trained
from hydra_transformers.search import hydration
from hydra_transformers.search.sources import rows_in
from tests.tiny_data import grey_rows, picture_rows, save_vit


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    save_vit(folder / "vit")
    picture_rows(60).save_to_disk(folder / "pictures")
    grey_rows(20).save_to_disk(folder / "grey")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_named_data_is_loaded_for_the_model(place):
    model = load_trained(place / "vit")
    data, grey = load_data(place / "pictures", model), load_data(place / "grey", model)
    found, expected = (
        evaluate_uncertainty(model, *sets)
        for sets in (
            (place / "pictures", {"far": {"grey": str(place / "grey")}}),
            (data, {"far": {"grey": grey}}),
        )
    )
    assert found.to_markdown() == expected.to_markdown()
    found, expected = (
        calibrate(AutoHydra.from_backbone(model), *sets, target={"tpr": 0.5})
        for sets in ((str(place / "pictures"), place / "grey"), (data, grey))
    )
    assert str(found) == str(expected)


def test_hydrate_loads_named_data_and_takes_classes_from_it(place, monkeypatch, tmp_path):
    given = {}

    def held_out(data, ood_data, *settings):
        given.update(data=data, ood_data=ood_data)
        raise InterruptedError

    monkeypatch.setattr(hydration, "held_out", held_out)
    vit, pictures = place / "vit", str(place / "pictures")
    with pytest.raises(InterruptedError):
        hydration.hydrate(vit, data=pictures, ood_data=place / "grey", output_dir=tmp_path / "out")
    assert (len(given["data"]), len(given["ood_data"])) == (60, 20) and given["data"].labels[:3] == [0, 1, 2]
    with pytest.raises(InterruptedError):
        hydration.hydrate(vit, train_data=pictures, data=pictures, finetune=True, output_dir=tmp_path / "out")
    assert given["data"][0]["labels"] in (0, 1, 2)


def test_hydrate_judges_on_the_validation_split_of_named_training_data(place, monkeypatch, tmp_path):
    """And cuts nothing out of the rows to train on."""
    splits = {"train": picture_rows(90), "validation": picture_rows(70), "test": picture_rows(20)}
    DatasetDict(splits).save_to_disk(tmp_path / "splits")
    given, held_out = {}, hydration.held_out

    def count_held_out(*arguments):
        rows = held_out(*arguments)
        given["held out"] = sum(map(rows_in, (rows.search, rows.calibration, rows.evaluation)))
        return rows

    def stop(train_data):
        given["train"] = len(train_data)
        raise InterruptedError

    monkeypatch.setattr(hydration, "held_out", count_held_out)
    monkeypatch.setattr(hydration, "fingerprint_of_data", stop)
    with pytest.raises(InterruptedError):
        hydration.hydrate(place / "vit", tmp_path / "splits", finetune=True, output_dir=tmp_path / "out")
    assert given == {"train": 90, "held out": 70}
