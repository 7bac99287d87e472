"""What goes wrong is told in one sentence, without a trace, and with an exit code."""

import importlib
import json
import os
import shutil
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
from transformers import AutoConfig

from hydra_transformers.cli import info, main
from hydra_transformers.models import auto
from tests.command_line import run
from tests.tiny_data import grey_rows, picture_rows, save_bert, save_vit


OTHER = {"dense_score": 0.9, "objective": "acc", "mode": "exact", "made_from": {}, "checks": [], "chance_from": None}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "vit")
    save_bert(folder / "bert")
    picture_rows(6).save_to_disk(folder / "pictures")
    grey_rows(6).save_to_disk(folder / "grey")
    return folder


@pytest.fixture(scope="module")
def pruned(workplace):
    words = prune(workplace, workplace, "--budget", 2, "--output", workplace / "pruned")
    run(*words)
    return workplace / "pruned"


@pytest.fixture(scope="module")
def hydra(workplace, pruned):
    assert main(["fuse", str(pruned), "--output", str(workplace / "hydra")]) == 0
    return workplace / "hydra"


def prune(workplace, tmp_path, *words, model="vit"):
    return ["prune", workplace / model, "--data", workplace / "pictures", "--output", tmp_path / "out", *words]


def refusing(error: Exception):
    """A stand-in for from_pretrained or load_dataset that raises as the Hub's libraries do: wrapped in an OSError."""

    def refuse(*_, **__):
        raise OSError("a long text\nof several lines") from error

    return refuse


def hub_error(kind: type, status: int) -> Exception:
    return kind("refused", response=SimpleNamespace(headers={}, request=None, status_code=status))


def no_route() -> Exception:
    """What the HTTP library that huggingface_hub is built on raises without a network."""
    return importlib.import_module(HTTPError.__module__.split(".")[0]).ConnectError("no route")


@pytest.mark.parametrize(
    ("error", "offline", "sentence"),
    [
        (
            hub_error(GatedRepoError, 403),
            "",
            "the model meta/secret is gated: ask for access on https://huggingface.co/meta/secret",
        ),
        (
            hub_error(RepositoryNotFoundError, 404),
            "",
            "the Hub has no model meta/secret that you can see: check the name",
        ),
        (no_route(), "", "the Hub could not be reached for the model meta/secret: check the network"),
        (ConnectionError("no route"), "1", "HF_HUB_OFFLINE forbids the download"),
    ],
    ids=["gated", "wrong name", "no network", "offline"],
)
def test_a_model_that_cannot_be_had(error, offline, sentence, fails, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(AutoConfig, "from_pretrained", refusing(error))
    assert sentence in fails("info", "meta/secret")


@pytest.mark.parametrize(
    ("error", "offline", "sentence"),
    [
        (hub_error(GatedRepoError, 403), "", "gated: ask for access on https://huggingface.co/datasets/meta/secret"),
        (hub_error(RepositoryNotFoundError, 404), "", "the Hub has no data set meta/secret that you can see"),
        (no_route(), "", "the Hub could not be reached for the data set meta/secret"),
        (ConnectionError("no route"), "1", "HF_HUB_OFFLINE forbids the download"),
        (
            ValueError("Config name is missing.\nPlease pick one among: ['sst2', 'mnli']"),
            "",
            "has several configs, name one as meta/secret:CONFIG: sst2, mnli",
        ),
    ],
    ids=["gated", "wrong name", "no network", "offline", "no config"],
)
def test_a_data_set_that_cannot_be_had(error, offline, sentence, fails, workplace, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refusing(error))
    assert sentence in fails(*prune(workplace, tmp_path, "--data", "meta/secret"))


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "no-model", "--data", "rows"],
        ["calibrate", "no-model", "--data", "rows", "--output", "FULL"],
        ["prune", "no-model", "--data", "rows", "--output", "FULL"],
        ["finetune", "no-model", "--data", "rows", "--output", "FULL"],
        ["build", "no-model", "--data", "rows", "--output", "FULL"],
        ["build", "no-model", "--data", "rows", "--output", "FULL", "--target", "balance"],
        ["export", "no-model", "--output", "FULL"],
        ["analyse", "no-model", "--data", "rows", "--ood", "a=b", "--output", "FULL"],
        ["fuse", "no-model", "other", "--output", "FULL"],
        ["benchmark", "no-model", "--output", "FULL"],
        ["predict", "no-model", "nothing.png"],
        ["serve", "no-model"],
        ["app", "no-model"],
        ["info", "no-model"],
        ["card", "no-model"],
        ["push", "no-model", "me/model"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_missing_model_is_told_before_anything_else(words, fails, tmp_path, monkeypatch):
    """Before the data, and before a folder to write into that is wrong, too."""

    def missing(*_, **__):
        raise hub_error(RepositoryNotFoundError, 404)

    (tmp_path / "thesis.txt").write_text("mine")
    monkeypatch.setattr(auto, "is_offline_mode", lambda: False)
    monkeypatch.setattr(auto.HfApi, "model_info", missing)
    sentence = fails(*(str(tmp_path) if word == "FULL" else word for word in words))
    assert sentence.endswith("there is no folder no-model, and no such model on the Hub: check the name")


def test_a_model_whose_files_are_broken(fails, tmp_path, workplace):
    folder = shutil.copytree(workplace / "vit", tmp_path / "vit")
    weights, command = folder / "model.safetensors", ["prune", folder, "--data", workplace / "pictures", "--output"]
    weights.write_bytes(weights.read_bytes()[:200])
    assert "vit cannot be read, its weights are broken" in fails(*command, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    assert "vit cannot be read, its config.json is broken" in fails("info", folder)


def test_a_processor_may_be_named_and_another_split_of_the_data_be_out_of_distribution(tmp_path, workplace):
    folder = shutil.copytree(workplace / "vit", tmp_path / "vit")
    (folder / "preprocessor_config.json").unlink()
    splits = {"train": picture_rows(6), "unknown": picture_rows(6, seed=3)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    words = ["--data", tmp_path / "both", "--ood-data", tmp_path / "both", "--ood-split", "unknown", "--budget", 1]
    words += ["--processor", workplace / "vit", "--allow-equal"]  # so few pictures tell few heads apart
    run(*prune(tmp_path, tmp_path, *words))


def finetune(workplace, pruned, tmp_path, *words):
    data = ["--data", workplace / "pictures", "--recipe", "cifar100", "--max-steps", 1]
    return ["finetune", pruned, *data, "--output", tmp_path / "members", *words]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("garbage", "acc.json is no circuit"),
        (json.dumps(OTHER | {"ranking": [[0, 0]], "scores": [0.5]}), "not those by which these members lost"),
        (json.dumps(OTHER | {"ranking": [], "scores": []}), "not those by which these members lost"),
        (
            json.dumps(OTHER | {"ranking": [[0, 0]], "scores": [0.5], "objective": "ood"}),
            "are not those by which these members lost their heads",
        ),
    ],
    ids=["garbage", "of others", "empty", "of another objective"],
)
def test_circuits_of_which_no_card_can_be_made_are_refused_by_fuse(content, sentence, fails, tmp_path, pruned):
    folder = shutil.copytree(pruned, tmp_path / "pruned")
    (folder / "circuits" / "acc.json").write_text(content)
    assert sentence in fails("fuse", folder, "--output", tmp_path / "hydra")
    assert not (tmp_path / "hydra").exists()


def test_a_broken_record_of_a_step(fails, tmp_path, workplace, pruned):
    folder = shutil.copytree(pruned, tmp_path / "out")
    (folder / "prune.json").write_text('{"members"')
    assert "prune.json is broken" in fails("fuse", folder, "--output", tmp_path / "hydra")
    assert "prune.json is broken" in fails(*prune(workplace, tmp_path))


def test_the_model_in_the_working_directory_has_a_name(fails, workplace, monkeypatch):
    monkeypatch.chdir(workplace / "vit")
    command = ["evaluate", ".", "--data", workplace / "pictures", "--compare", f"vit={workplace / 'vit'}"]
    assert "--compare calls another model vit" in fails(*command)


def test_push_names_no_argument_that_is_no_flag(fails, hydra, monkeypatch):
    from hydra_transformers.hub import publishing

    monkeypatch.setattr(publishing, "get_token", lambda: None)
    said = fails("push", hydra, "me/hydra")
    assert said.endswith("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN")


def test_a_folder_takes_the_right_call_after_a_refusal_and_no_other_pruning_after_that(fails, tmp_path, workplace):
    assert "gives 1 row" in fails(*prune(workplace, tmp_path, "--limit", 1))
    assert "no column 'x'" in fails(*prune(workplace, tmp_path, "--label-column", "x"))
    run(*prune(workplace, tmp_path, "--budget", 1))
    assert "was made with budget 1, which now is 2" in fails(*prune(workplace, tmp_path, "--budget", 2))


def test_a_build_that_refused_its_data_takes_other_arguments(fails, tmp_path, workplace):
    command = ["build", workplace / "vit", "--data", workplace / "pictures", "--output", tmp_path / "out"]
    assert "no column 'x'" in fails(*command, "--label-column", "x")
    assert "no column 'y'" in fails(*command, "--label-column", "y", "--members", 2)


def test_a_folder_takes_the_right_fine_tuning_after_a_refusal_and_no_other_after_that(
    fails, tmp_path, workplace, pruned
):
    command = finetune(workplace, pruned, tmp_path)
    assert "gives 1 row" in fails(*command, "--limit", 1)
    run(*command)
    fewer = shutil.copytree(pruned, tmp_path / "fewer")
    (fewer / "prune.json").unlink()
    shutil.rmtree(fewer / "member-2")
    assert "was made with members 3, which now is 2" in fails(*finetune(workplace, fewer, tmp_path))


def test_a_card_is_not_replaced_unless_asked_for_and_stays_if_writing_fails(fails, tmp_path, hydra, monkeypatch):
    folder = shutil.copytree(hydra, tmp_path / "hydra")
    assert main(["card", str(folder)]) == 0
    assert "pass --overwrite" in fails("card", folder)
    card = (folder / "README.md").read_bytes()
    monkeypatch.setattr(os, "replace", refusing(OSError("no space left")))
    assert "a long text" in fails("card", folder, "--overwrite", "--base-model", "a/b")
    assert (folder / "README.md").read_bytes() == card


def test_debug_shows_the_trace(workplace, tmp_path, capsys):
    assert main(["info", str(tmp_path / "nothing"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_of_the_package_is_called_unexpected(workplace, monkeypatch, capsys):
    monkeypatch.setattr(info, "load_config", lambda name: {}["config"])
    assert main(["info", str(workplace / "vit")]) == 1
    assert "unexpected KeyError: 'config' (--debug shows where)" in capsys.readouterr().err
