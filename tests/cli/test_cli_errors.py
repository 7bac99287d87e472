"""What goes wrong is told in one sentence, without a trace, and with an exit code."""

import importlib
import json
import os
import re
import shutil
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
from transformers import AutoConfig, BertConfig, BertModel, ResNetConfig

from hydra_transformers.cli import card as card_command
from hydra_transformers.cli import finetune as finetune_command
from hydra_transformers.cli import info, main
from hydra_transformers.models import auto
from hydra_transformers.pruning import member_plan
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
    assert (
        main([str(word) for word in prune(workplace, workplace, "--budget", 2, "--output", workplace / "pruned")]) == 0
    )
    return workplace / "pruned"


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail, and returns its one sentence."""

    def run(*words) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
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
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refusing(error))
    assert sentence in fails(*prune(workplace, tmp_path, "--data", "meta/secret"))


def test_a_folder_that_is_not_there(fails, tmp_path, workplace):
    assert "there is no folder" in fails("info", tmp_path / "nothing")
    assert "there is no folder or file" in fails(*prune(workplace, tmp_path, "--data", tmp_path / "nothing"))
    assert "there is no folder" in fails("fuse", tmp_path / "nothing", "--output", tmp_path / "out")


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


def test_a_folder_without_a_model(fails, tmp_path):
    assert "has no config.json" in fails("info", tmp_path)


def test_a_model_whose_files_are_broken(fails, tmp_path, workplace):
    folder = shutil.copytree(workplace / "vit", tmp_path / "vit")
    weights, command = folder / "model.safetensors", ["prune", folder, "--data", workplace / "pictures", "--output"]
    weights.write_bytes(weights.read_bytes()[:200])
    assert "vit cannot be read, its weights are broken" in fails(*command, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    assert "vit cannot be read, its config.json is broken" in fails("info", folder)


def test_the_same_model_twice_is_refused_before_the_first_circuit(fails, tmp_path, workplace, monkeypatch):
    monkeypatch.setattr(member_plan, "extract_circuit", lambda *_, **__: pytest.fail("work began"))
    command = ["prune", workplace / "vit", workplace / "vit", "--data", workplace / "pictures"]
    assert "MODEL[0] and MODEL[1] have the same heads and weights" in fails(*command, "--output", tmp_path / "out")


def test_a_batch_size_twice(fails, tmp_path):
    assert "--batch-sizes has 1 twice" in fails("benchmark", tmp_path, "--batch-sizes", 1, 1)


def test_a_model_of_another_kind(fails, tmp_path):
    ResNetConfig().save_pretrained(tmp_path)
    assert "is a resnet: pass a hydra_ast, audio-spectrogram-transformer, hydra_bert, bert, hydra_clip" in fails(
        "info", tmp_path
    )


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
    assert "--heads-per-layer is for the method taylor" in fails(*prune(workplace, tmp_path, "--heads-per-layer", 2))
    assert "--budget is for the method circuits" in fails(
        *prune(workplace, tmp_path, "--method", "taylor", "--budget", 2)
    )
    assert "pass --ood-data" in fails(*prune(workplace, tmp_path, "--objectives", "ood"))
    assert "the device nowhere is not there" in fails(*prune(workplace, tmp_path, "--device", "nowhere"))


def test_a_budget_beyond_the_model(fails, tmp_path, workplace):
    assert "8 heads compete" in fails(*prune(workplace, tmp_path, "--budget", 30, "--out-of", 40))


REFUSED_PRUNINGS = [
    (["--budget", 8], "--budget is 8: 8 heads compete, so pass 1 to 7"),
    (
        ["--budget", 6, "--out-of", 3],
        "--out-of is 3: a member loses 6 of them, and 8 heads compete, so pass 6 to 7",
    ),
    (["--budget", 2, "--out-of", 8], "--out-of is 8: a member loses 2 of them"),
    (["--budget", 7], "there are only 1 ways to lose 7 of 7 heads, for 3 members"),
    (["--budget", 2, "--out-of", 2], "there are only 1 ways to lose 2 of 2 heads, for 3 members"),
    (["--method", "taylor", "--heads-per-layer", 4], "--heads-per-layer is 4, of at most 4 heads in a layer"),
    (["--method", "taylor", "--mode", "shortlist"], "--mode is for the method circuits"),
    (["--method", "taylor", "--score", "energy"], "--score is for the method circuits"),
    (["--score", "energy"], "the score energy is for the objectives ood and avg: leave it out, or name one of them"),
    (["--objectives", "acc", "acc"], "--objectives has acc twice: name each once"),
    (["--objectives", "avg", "acc"], "the objective avg needs out-of-distribution data: pass --ood-data"),
    (["--ood-split", "train"], "--ood-split is a split of --ood-data"),
    (["--ood-data", "GREY", "--objectives", "acc"], "--ood-data is for the objectives ood and avg"),
    (["--ood-data", "GREY", "--out-of", 5], "--out-of is for a single objective, here are 3"),
    (["--ood-data", "PICTURES"], "is the data itself, which cannot be out of its own distribution"),
    (["--ood-data", "GREY", "--limit", 1], "gives 1 row, too few to choose heads by"),
    (["--limit", 1], "gives 1 row, too few to choose heads by"),
    (["--data", "RED"], "all 4 rows of .*red have the same label, so there is nothing to choose heads by"),
]


def test_what_the_arguments_tell_is_refused_before_any_work_and_the_folder_takes_the_right_call(
    fails, tmp_path, workplace, monkeypatch
):
    picture_rows(12).filter(lambda row: row["label"] == 0).save_to_disk(tmp_path / "red")
    places = {"GREY": workplace / "grey", "PICTURES": workplace / "pictures", "RED": tmp_path / "red"}
    with monkeypatch.context() as patched:
        for name in ("extract_circuit", "draw_members"):
            patched.setattr(member_plan, name, lambda *_, **__: pytest.fail("work began"))
        for words, sentence in REFUSED_PRUNINGS:
            error = fails(*prune(workplace, tmp_path, *(places.get(word, word) for word in words)))
            assert re.search(sentence, error), words
    assert main([str(word) for word in prune(workplace, tmp_path, "--budget", 1)]) == 0


def test_other_data_of_a_single_row_is_refused_before_the_first_circuit(fails, tmp_path, workplace, monkeypatch):
    grey_rows(1).save_to_disk(tmp_path / "grey")
    monkeypatch.setattr(member_plan, "extract_circuit", lambda *_, **__: pytest.fail("work began"))
    assert "grey gives 1 row, too few to tell it from" in fails(
        *prune(workplace, tmp_path, "--ood-data", tmp_path / "grey")
    )


def test_another_split_of_the_data_may_be_out_of_distribution(tmp_path, workplace):
    splits = {"train": picture_rows(6), "unknown": picture_rows(6, seed=3)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    words = ["--data", tmp_path / "both", "--ood-data", tmp_path / "both", "--ood-split", "unknown", "--budget", 1]
    words.append("--allow-equal")  # so few pictures tell few heads apart
    assert main([str(word) for word in prune(workplace, tmp_path, *words)]) == 0


def test_a_hydra_is_no_backbone(fails, tmp_path, workplace, pruned):
    assert main(["fuse", str(pruned), "--output", str(tmp_path / "hydra")]) == 0
    command = ["prune", tmp_path / "hydra", "--data", workplace / "pictures", "--output", tmp_path / "out"]
    assert "is a Hydra of 3 members: pass the backbone, or one member" in fails(*command)


def finetune(workplace, pruned, tmp_path, *words):
    data = ["--data", workplace / "pictures", "--recipe", "cifar100", "--max-steps", 1]
    return ["finetune", pruned, *data, "--output", tmp_path / "members", *words]


REFUSED_FINE_TUNINGS = [
    (["--recipe", "sst2", "--learning-rates", "grid"], "the recipe sst2 has no grid of learning rates"),
    (["--learning-rates", "grid", "0.1"], "has numbers and the word grid: pass either"),
    (["--learning-rates", "0.1", "1e-1"], "--learning-rates has 0.1 twice"),
    (["--output", "PRUNED"], "is where the members are read from: pass another --output"),
    (["--output", "VIT"], "vit exists already: pass another --output"),
    (["--output", "OTHER"], "member-0 holds something else than a fine-tuning"),
    (["--data", "SPLITS", "--validation-split", "train"], "has rows of the training split train"),
    (["--data", "SPLITS", "--validation-split", "train[:3]"], "has rows of the training split train"),
    (["--data", "RED"], "all 4 rows of .*red have the same label, so there is nothing to learn"),
    (["--limit", "1"], "gives 1 row, too few to learn"),
]


def test_what_the_arguments_of_a_fine_tuning_tell_is_refused_before_any_work(
    fails, tmp_path, workplace, pruned, monkeypatch
):
    picture_rows(12).filter(lambda row: row["label"] == 0).save_to_disk(tmp_path / "red")
    datasets.DatasetDict({"train": picture_rows(6), "test": picture_rows(6)}).save_to_disk(tmp_path / "splits")
    (tmp_path / "other" / "member-0").mkdir(parents=True)
    (tmp_path / "other" / "member-0" / "config.json").write_text("{}")
    places = {"PRUNED": pruned, "VIT": workplace / "vit", "OTHER": tmp_path / "other"}
    places |= {"RED": tmp_path / "red", "SPLITS": tmp_path / "splits"}
    with monkeypatch.context() as patched:
        patched.setattr(finetune_command, "load_model", lambda *_: pytest.fail("work began"))
        for words, sentence in REFUSED_FINE_TUNINGS:
            error = fails(*finetune(workplace, pruned, tmp_path, *(places.get(word, word) for word in words)))
            assert re.search(sentence, error), words
    assert main([str(word) for word in finetune(workplace, pruned, tmp_path)]) == 0


def test_a_fine_tuning_of_another_number_of_members_is_another(fails, tmp_path, workplace, pruned):
    assert main([str(word) for word in finetune(workplace, pruned, tmp_path)]) == 0
    fewer = shutil.copytree(pruned, tmp_path / "fewer")
    (fewer / "prune.json").unlink()
    shutil.rmtree(fewer / "member-2")
    assert "was made of another number of members (3, now 2)" in fails(*finetune(workplace, fewer, tmp_path))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("garbage", "acc.json is no circuit"),
        (json.dumps(OTHER | {"ranking": [[0, 0]], "scores": [0.5]}), "not those by which these members lost"),
        (json.dumps(OTHER | {"ranking": [], "scores": []}), "not those by which these members lost"),
        (
            json.dumps(OTHER | {"ranking": [[0, 0]], "scores": [0.5], "objective": "ood"}),
            "is a circuit for 'ood', not",
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--compare", "vit=VIT"], "--compare calls another model vit, as .*vit itself is called: name it otherwise"),
        (["--compare", "a=VIT", "--compare", "a=VIT"], "--compare has a twice"),
        (["--near", "x=GREY", "--near", "x=PICTURES"], "--near has x twice: name each once"),
        (["--far", "x=GREY", "--far", "x=GREY"], "--far has x twice: name each once"),
    ],
)
def test_a_name_stands_for_one_thing(words, sentence, fails, tmp_path, workplace):
    places = {"VIT": workplace / "vit", "GREY": workplace / "grey", "PICTURES": workplace / "pictures"}
    for name, place in places.items():
        words = [word.replace(f"={name}", f"={place}") for word in words]
    command = ["evaluate", workplace / "vit", "--data", workplace / "pictures", "--output", tmp_path / "out", *words]
    assert re.search(sentence, fails(*command))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--fit-data", "GREY"], "--fit-data is for scores that are fitted, msp is not"),
        (["--fit-split", "train"], "--fit-split is for scores that are fitted, msp is not"),
        (["--score", "knn"], "knn would be fitted on the rows that it is judged on"),
        (["--score", "knn", "--fit-data", "PICTURES"], "pass the training data with --fit-data or --fit-split"),
        (["--score", "mahalanobis", "--fit-data", "RED"], "all 4 rows of .*red have the same label"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_score_that_cannot_be_fitted(words, sentence, fails, tmp_path, workplace):
    picture_rows(12).filter(lambda row: row["label"] == 0).save_to_disk(tmp_path / "red")
    places = {"GREY": workplace / "grey", "PICTURES": workplace / "pictures", "RED": tmp_path / "red"}
    words = [places.get(word, word) for word in words]
    command = ["evaluate", workplace / "vit", "--data", workplace / "pictures", "--output", tmp_path / "out", *words]
    assert re.search(sentence, fails(*command))
    assert not (tmp_path / "out").exists()


def test_the_model_in_the_working_directory_has_a_name(fails, workplace, monkeypatch):
    monkeypatch.chdir(workplace / "vit")
    command = ["evaluate", ".", "--data", workplace / "pictures", "--compare", f"vit={workplace / 'vit'}"]
    assert "--compare calls another model vit" in fails(*command)


def test_a_part_of_a_split_that_cannot_be_read(fails, tmp_path, workplace):
    assert "has no splits: leave out the split 'train[:3]'" in fails(
        *prune(workplace, tmp_path, "--split", "train[:3]")
    )


def test_push_names_no_argument_that_is_no_flag(fails, tmp_path, pruned, monkeypatch):
    from hydra_transformers.hub import publishing

    assert main(["fuse", str(pruned), "--output", str(tmp_path / "hydra")]) == 0
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    said = fails("push", tmp_path / "hydra", "me/hydra")
    assert said.endswith("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN")


def test_names_that_cannot_be_on_the_hub_are_refused_before_the_model_is_loaded(fails, tmp_path, pruned, monkeypatch):
    assert main(["fuse", str(pruned), "--output", str(tmp_path / "hydra")]) == 0
    monkeypatch.setattr(card_command, "load_model", lambda *_: pytest.fail("a model was loaded"))
    assert "repo_id is 'a b'" in fails("push", tmp_path / "hydra", "a b")
    assert "dataset is './data'" in fails("card", tmp_path / "hydra", "--dataset", "./data")
    assert "--report-model is a name in a report" in fails("card", tmp_path / "hydra", "--report-model", "x")


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


def test_a_report_that_is_not_there_and_a_card_that_is(fails, tmp_path, workplace, monkeypatch):
    assert main([str(word) for word in prune(workplace, tmp_path, "--budget", 1)]) == 0
    assert main(["fuse", str(tmp_path / "out"), "--output", str(tmp_path / "hydra")]) == 0
    assert "there is no report" in fails("card", tmp_path / "hydra", "--report", tmp_path / "none.json")
    assert main(["card", str(tmp_path / "hydra")]) == 0
    assert "pass --overwrite" in fails("card", tmp_path / "hydra")
    card = (tmp_path / "hydra" / "README.md").read_bytes()
    monkeypatch.setattr(os, "replace", refusing(OSError("no space left")))
    assert "a long text" in fails("card", tmp_path / "hydra", "--overwrite", "--base-model", "a/b")
    assert (tmp_path / "hydra" / "README.md").read_bytes() == card


def test_debug_shows_the_trace(workplace, tmp_path, capsys):
    assert main(["info", str(tmp_path / "nothing"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_of_the_package_is_called_unexpected(workplace, monkeypatch, capsys):
    monkeypatch.setattr(info, "load_config", lambda name: {}["config"])
    assert main(["info", str(workplace / "vit")]) == 1
    assert "unexpected KeyError: 'config' (--debug shows where)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["unknown"],
        ["prune"],
        ["evaluate", "x", "--data", "y", "--near", "no-name"],
        ["demo", "--limit", "3"],
        ["benchmark", "x", "--seconds", "-1"],
        ["benchmark", "x", "--seconds", "nan"],
        ["prune", "x", "--data", "y", "--output", "z", "--seed", "-1"],
        *(
            ["finetune", "x", "--recipe", "cifar100", "--data", "y", "--output", "z", "--learning-rates", rate]
            for rate in ("nan", "inf", "-0.1", "0", "fast")
        ),
    ],
)
def test_a_wrong_call_is_answered_with_usage_and_2(words, capsys):
    assert main(words) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith("hydra-transformers") and sentence.endswith("--help lists what there is)")
