"""Functions that take data and a model take the name, folder or file of a data set, too."""

import pytest

from hydra_transformers import AutoHydra, calibrate, evaluate_uncertainty, load_data
from hydra_transformers.models.auto import load_trained
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
