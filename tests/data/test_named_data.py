"""Functions that take data and a model take the name, folder or file of a data set, or a DataFrame,
too."""

from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from hydra_transformers import AutoHydra, calibrate, evaluate_uncertainty, load_data
from hydra_transformers.models.auto import load_trained
from hydra_transformers.reports import compare_fusions
from tests.tiny_data import review_rows, save_bert


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    save_bert(folder / "bert")
    review_rows(60).save_to_disk(folder / "reviews")
    (folder / "other.csv").write_text("text\n" + "bad bad\ngood of\n" * 10)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_named_data_and_dataframes_are_loaded_for_the_model(place):
    model = load_trained(place / "bert")
    frames = review_rows(60).to_pandas(), pd.DataFrame({"text": ["bad bad", "good of"] * 10}, index=range(20, 0, -1))
    forms = [
        (load_data(place / "reviews", model), load_data(place / "other.csv", model)),
        (place / "reviews", str(place / "other.csv")),
        frames,
    ]
    reports = [evaluate_uncertainty({"bert": model}, data, {"far": {"other": ood}}) for data, ood in forms]
    calibrations = [calibrate(AutoHydra.from_backbone(model), *sets, target={"tpr": 0.5}) for sets in forms]
    for results in (list(map(str, reports)), list(map(str, calibrations))):
        assert results[0] == results[1] == results[2]
    other = load_trained(place / "bert")
    with torch.no_grad():
        other.classifier.weight.mul_(1.1)
    compared = compare_fusions([model, other], frames[0]).report.models["member 0"]["data"]
    expected = reports[0].models["bert"]["data"]
    assert {name: compared[name] for name in ("accuracy", "nll")} == pytest.approx(
        {name: expected[name] for name in ("accuracy", "nll")}
    )


def test_predict_takes_the_column_of_a_dataframe_and_not_its_names(place):
    hydra = AutoHydra.from_backbone(load_trained(place / "bert"))
    frame = pd.DataFrame({"text": ["a film", "bad bad"], "label": [1, 0]}, index=[3, 3])
    expected = hydra.predict(["a film", "bad bad"])
    assert hydra.predict(frame) == hydra.predict(frame["text"]) == hydra.predict(frame[["text"]]) == expected
    with pytest.raises(TypeError, match="inputs has the columns first, second: pass one of them"):
        hydra.predict(pd.DataFrame({"first": ["a"], "second": ["b"]}))
    with pytest.raises(TypeError, match="inputs is a dict: pass a list of texts"):
        hydra.predict(frame.to_dict("list"))


def test_predict_loads_the_processor_once_for_a_model_and_thread(place, monkeypatch):
    hydra = AutoHydra.from_backbone(load_trained(place / "bert"))
    loaded = []
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda name, **options: loaded.append(name) or load(name, **options)
    )
    answers = [hydra.predict(["a film"]) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2] and len(loaded) == 1
    with ThreadPoolExecutor(1) as pool:  # tokenizers are not thread-safe
        assert pool.submit(hydra.predict, ["a film"]).result() == answers[0] and len(loaded) == 2
    hydra.config.name_or_path = str(place / "other")
    with pytest.raises(ValueError, match=r"none could be loaded from .*other"):
        hydra.predict(["a film"])
