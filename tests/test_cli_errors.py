"""What goes wrong is told in one sentence, without a trace, and with an exit code."""

import importlib
import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
from transformers import AutoConfig, BertConfig, BertModel, ResNetConfig

from hydra_transformers.cli import main
from tests.tiny_data import picture_rows, save_bert, save_vit


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "vit")
    save_bert(folder / "bert")
    picture_rows(6).save_to_disk(folder / "pictures")
    return folder


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail, and returns its one sentence."""

    def run(*words) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 1
        error = capsys.readouterr().err.strip()
        assert "Traceback" not in error
        assert len(error.splitlines()) == 1
        return error

    return run


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
        (
            no_route(),
            "",
            "the Hub could not be reached for the model meta/secret: check the network",
        ),
        (ConnectionError("no route"), "1", "HF_HUB_OFFLINE forbids to fetch it"),
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
        (ConnectionError("no route"), "1", "HF_HUB_OFFLINE forbids to fetch it"),
        (
            ValueError("Config name is missing.\nPlease pick one among: ['sst2', 'mnli']"),
            "",
            "has several configs, name one as meta/secret:CONFIG: sst2, mnli",
        ),
    ],
    ids=["gated", "wrong name", "no network", "offline", "no config"],
)
def test_a_data_set_that_cannot_be_had(error, offline, sentence, fails, workplace, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refusing(error))
    assert sentence in fails(*prune(workplace, tmp_path, "--data", "meta/secret"))


def test_a_folder_that_is_not_there(fails, tmp_path, workplace):
    assert "there is no folder" in fails("info", tmp_path / "nothing")
    assert "there is no folder or file" in fails(*prune(workplace, tmp_path, "--data", tmp_path / "nothing"))
    assert "there is no folder" in fails("fuse", tmp_path / "nothing", "--output", tmp_path / "out")


def test_a_folder_without_a_model(fails, tmp_path):
    assert "has no config.json" in fails("info", tmp_path)


def test_a_model_of_another_kind(fails, tmp_path):
    ResNetConfig().save_pretrained(tmp_path)
    assert "is a resnet: pass a vit, bert, clip" in fails("info", tmp_path)


def test_a_model_without_a_trained_classifier(fails, tmp_path, workplace):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=11, **sizes)).save_pretrained(tmp_path / "bare")
    command = ["prune", tmp_path / "bare", "--data", workplace / "pictures", "--output", tmp_path / "out"]
    assert "has no classifier.bias: pass a model that is trained for classification" in fails(*command)


def test_a_model_without_its_processor(fails, tmp_path, workplace):
    folder = shutil.copytree(workplace / "vit", tmp_path / "vit")
    (folder / "preprocessor_config.json").unlink()
    command = ["prune", folder, "--data", workplace / "pictures", "--output", tmp_path / "out"]
    assert "--processor" in fails(*command)
    assert main([str(word) for word in [*command, "--processor", workplace / "vit", "--budget", 1]]) == 0


def test_a_missing_column(fails, tmp_path, workplace):
    assert "no column 'photo': it has image, label" in fails(*prune(workplace, tmp_path, "--image-column", "photo"))


def test_images_for_a_model_of_texts(fails, tmp_path, workplace):
    picture_rows(4, names=["red", "green"]).save_to_disk(tmp_path / "two")
    command = prune(workplace, tmp_path, "--data", tmp_path / "two", model="bert")
    assert "no text column among image, label" in fails(*command)


def test_classes_that_do_not_fit(fails, tmp_path, workplace):
    save_vit(tmp_path / "other", classes=["cat", "dog", "bird"])
    command = ["evaluate", tmp_path / "other", "--data", workplace / "pictures"]
    assert "has the class 'red', which the model does not know (it knows cat, dog, bird)" in fails(*command)


def test_arguments_that_do_not_go_together(fails, tmp_path, workplace):
    assert "--heads-per-layer is for --method taylor" in fails(*prune(workplace, tmp_path, "--heads-per-layer", 2))
    assert "--budget is for --method circuits" in fails(
        *prune(workplace, tmp_path, "--method", "taylor", "--budget", 2)
    )
    assert "pass --ood-data" in fails(*prune(workplace, tmp_path, "--objectives", "ood"))
    assert "the device nowhere is not there" in fails(*prune(workplace, tmp_path, "--device", "nowhere"))


def test_a_budget_beyond_the_model(fails, tmp_path, workplace):
    assert "8 heads compete" in fails(*prune(workplace, tmp_path, "--budget", 30, "--out-of", 40))


def test_a_folder_that_another_run_made_is_refused_but_not_one_in_which_nothing_was_made(fails, tmp_path, workplace):
    assert main([str(word) for word in prune(workplace, tmp_path, "--budget", 1)]) == 0
    assert "no column 'x'" in fails(*prune(workplace, tmp_path, "--output", tmp_path / "free", "--label-column", "x"))
    assert main([str(word) for word in prune(workplace, tmp_path, "--output", tmp_path / "free", "--budget", 1)]) == 0
    assert "was made with another budget (1, now 2)" in fails(*prune(workplace, tmp_path, "--budget", 2))
    assert "exists already" in fails("fuse", tmp_path / "out", "--output", workplace / "vit")


def test_members_where_a_model_is_needed(fails, tmp_path, workplace):
    assert main([str(word) for word in prune(workplace, tmp_path, "--budget", 1)]) == 0
    evaluate = ["evaluate", tmp_path / "out", "--data", workplace / "pictures"]
    assert "fuse them first" in fails(*evaluate)


def test_a_model_where_members_are_needed(fails, tmp_path, workplace):
    assert "holds no members" in fails("fuse", workplace / "vit", "--output", tmp_path / "out")


def test_a_lost_member(fails, tmp_path, workplace):
    assert main([str(word) for word in prune(workplace, tmp_path, "--budget", 1)]) == 0
    shutil.rmtree(tmp_path / "out" / "member-1")
    assert "lacks a member, it has member-0, member-2" in fails(
        "fuse", tmp_path / "out", "--output", tmp_path / "hydra"
    )


def test_a_plain_model_where_a_hydra_is_needed(fails, workplace):
    for command in (["info"], ["benchmark"], ["card"]):
        assert "is a plain vit: pass a Hydra" in fails(*command, workplace / "vit")
    assert "is a plain vit: pass a Hydra" in fails("push", workplace / "vit", "me/vit")


def test_models_with_other_classes_are_not_compared(fails, tmp_path, workplace):
    save_vit(tmp_path / "other", classes=["cat", "dog", "bird"])
    command = [
        "evaluate",
        workplace / "vit",
        "--data",
        workplace / "pictures",
        "--compare",
        f"other={tmp_path / 'other'}",
    ]
    assert "other has other classes" in fails(*command)


def test_a_report_that_is_not_there(fails, tmp_path, workplace):
    assert main([str(word) for word in prune(workplace, tmp_path, "--budget", 1)]) == 0
    assert main(["fuse", str(tmp_path / "out"), "--output", str(tmp_path / "hydra")]) == 0
    assert "there is no report" in fails("card", tmp_path / "hydra", "--report", tmp_path / "none.json")
    assert main(["card", str(tmp_path / "hydra")]) == 0
    assert "pass --overwrite" in fails("card", tmp_path / "hydra")


def test_debug_shows_the_trace(workplace, tmp_path, capsys):
    assert main(["info", str(tmp_path / "nothing"), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_of_the_package_is_called_unexpected(fails, workplace, monkeypatch):
    from hydra_transformers.cli import judging

    monkeypatch.setattr(judging, "load_config", lambda name: {}["config"])
    assert "unexpected KeyError: 'config' (--debug shows where)" in fails("info", workplace / "vit")


@pytest.mark.parametrize(
    "words",
    [[], ["unknown"], ["prune"], ["evaluate", "x", "--data", "y", "--near", "no-name"], ["demo", "--limit", "3"]],
)
def test_a_wrong_call_is_answered_with_usage_and_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: hydra-transformers" in capsys.readouterr().err
