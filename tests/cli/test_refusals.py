"""What goes wrong is told in one sentence, before any long work, and leaves files as they were."""

import importlib
import re
import shlex
import warnings
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
from transformers import AutoConfig
from transformers.utils import logging

from hydra_transformers.cli import main
from hydra_transformers.serving import saved_models
from hydra_transformers.training import trackers


PRUNE = "prune vit --data pictures --output OUT"
FINETUNE = "finetune encoder --data pictures --output OUT"
CALIBRATE = "calibrate hydra --data pictures --output OUT"
EVALUATE = "evaluate vit --data pictures --output OUT"
REFUSED = [
    ("fuse vit bert --output OUT", r"members\[1\] is a BertForSequenceClassification"),
    (
        "fuse vit cats --output OUT",
        r"members\[1\] has (num_labels|id2label) = .*pass models fine-tuned on the same labels",
    ),
    ("fuse vit vit --output OUT", "same (heads and )?weights"),
    ("fuse vit ./nothing --output OUT", "there is no folder ./nothing"),
    ("fuse vit two --trunk-layers 3 --output OUT", "trunk.layers is 3"),
    ("fuse vit two --output full", "full exists already: pass another --output"),
    ("fuse vit two --output file/out", "file/out cannot be written into .Not a directory: "),
    ("fuse one-of-two --output OUT", "has 1 of 2 members: run its command again"),
    (f"{PRUNE} --method circuits --budget 8", "budget is 8"),
    (f"{PRUNE} --budget 2", "--budget is 2, and the method is taylor: leave it out, or pass --method circuits"),
    (f"{PRUNE} --ood-data grey --heads-per-layer 1", "--heads-per-layer is 1, and the method is circuits"),
    (f"{PRUNE} --ood-data grey --method taylor", "--ood-data is for the method circuits"),
    (f"{PRUNE} --heads-per-layer 9", "--heads-per-layer is 9"),
    (f"{PRUNE} --data red", "have the same label, so there is nothing to choose heads by"),
    (f"{PRUNE} --data ./nothing", "there is no folder or file ./nothing"),
    (f"{PRUNE} --column photo", "no column 'photo'"),
    ("prune encoder --data pictures --output OUT", "pass a model that is trained"),
    ("prune hydra --data pictures --output OUT", "Hydra of 3 members"),
    (f"{FINETUNE} --output full", "full (exists|holds)"),
    (f"{FINETUNE} --data red", "nothing to learn"),
    (f"{FINETUNE} --set weigth_decay=0.1", "--set weigth_decay: .* no such field, did you mean weight_decay"),
    (f"{FINETUNE} --set learning_rate=0.1", "--set .*: use --learning-rate"),
    (f"{FINETUNE} --set weight_decay=much", "--set: .*weight_decay.*: invalid float value: 'much'"),
    (f"{FINETUNE} --set weight_decay", "is not NAME=VALUE"),
    (f"{FINETUNE} --report-to nothing", "--report-to is 'nothing': pass one or more of .*tensorboard"),
    ("finetune bert-encoder --data pictures --output OUT", "no text column"),
    (f"{CALIBRATE} --risk 0.1 --coverage 0.9", "--risk and --coverage exclude each other: pass one of them"),
    (f"{CALIBRATE} --missed red=0.1 --risk 0.1", "--missed is a target by itself"),
    (f"{CALIBRATE} --cost wrong=3 --cost review=1 --risk 0.1", "--cost is a target by itself"),
    (f"{CALIBRATE} --cost wrong=3", "prices are of wrong and review: pass both"),
    (f"{CALIBRATE} --cost wrong=x --cost review=1", "a price is no number"),
    (f"{CALIBRATE} --cost wrong=-3 --cost review=1", "wrong is -3.0: pass a price"),
    (f"{CALIBRATE} --missed red=3", "the share of red: 3"),
    (f"{CALIBRATE} --missed black=0.1", "names the label 'black', and the model's labels are"),
    (f"{CALIBRATE} --risk-of red=0.1", "--risk-of names the risk of some labels: pass --risk for the others"),
    (f"{CALIBRATE} --coverage 0.9 --by prediction", "by is for a risk, and target is"),
    (f"{CALIBRATE} --then two --coverage 0.9", "--coverage is for one model, and --then makes a cascade"),
    (f"{CALIBRATE} --then two --risk 0.1 --alpha 0.1", "--alpha is for one model, and --then makes a cascade"),
    (f"{CALIBRATE} --then two --risk 0.1 --by prediction", "--by is for one model, and --then makes a cascade"),
    (f"{CALIBRATE} --then two --risk 0.1 --verbose", "--verbose is for one model, and --then makes a cascade"),
    (f"{CALIBRATE} --then two", "--then makes a cascade, which promises a risk: pass --risk 0.05"),
    (f"{CALIBRATE} --then cats --risk 0.1", r"stage cats has other classes \(cat, dog, bird\) than hydra"),
    (f"{CALIBRATE} --then bert --risk 0.1", "stage bert reads texts, and hydra reads images"),
    (f"{CALIBRATE} --then ./nothing --risk 0.1", "there is no folder ./nothing"),
    (f"{CALIBRATE} --then two --risk 0.001", "risk=0.001 cannot be guaranteed with 90 % confidence on these 30 rows"),
    ("predict vit 0.png --then two", "vit has no cascade.json: calibrate the two together: .* --then two"),
    ("serve vit --then two", "vit has no cascade.json: calibrate the two together"),
    (f"{CALIBRATE} --risk 5", "is 5.0: pass a share between 0 and 1"),
    (CALIBRATE, "the model would never abstain: pass --risk 0.05 or --coverage 0.9, or --alpha alone"),
    (f"{CALIBRATE} --confidence 0.9", "the model would never abstain"),
    (f"{CALIBRATE} --alpha 0.2 --confidence 0.9", "has no effect without a target"),
    (f"{CALIBRATE} --alpha 0.2 --limit 10", "data has 10 rows: pass at least 20"),
    (f"{CALIBRATE} --alpha 0.2 --data grey", "label"),
    (f"{CALIBRATE} --alpha 0.2 --output full", "full exists already"),
    (f"{EVALUATE} --far a=grey --far a=red", "--far has a name twice"),
    (f"{EVALUATE} --output file/out", "file/out cannot be written into"),
    (
        f"{EVALUATE} --output reported",
        "reported has report.md and plots, which `evaluate` did not write: pass another",
    ),
    (
        "evaluate hydra --data pictures --output pictures",
        "output is pictures, inside the data pictures: pass a folder",
    ),
    ("evaluate hydra --data pictures --output pictures/in", "output is pictures/in, inside the data pictures"),
    ("evaluate cats --data pictures --output OUT", "the class 'red', which the model does not know"),
    ("evaluate one-of-two --data pictures", "fuse them first"),
    ("evaluate reward --data reviews --output OUT", "has no pairs, by which a reward model is measured"),
    ("evaluate reward --data reviews --near a=grey --output OUT", "--near, --far and --corruptions are not for"),
    ("predict ./nowhere text", "there is no folder ./nowhere"),
    ("watch nothing.json", "there is no file nothing.json"),
    ("watch full", r"full is a folder: pass the files that --monitor wrote, such as full/\*.json"),
    (
        "predict bert reviews.csv --output OUT.csv --monitor reviews.csv",
        "among the data .*reviews.csv: pass a file else",
    ),
    ("predict vit pictures --output OUT.csv --monitor pictures/a.json", "among the data .*pictures: pass a file else"),
    ("predict bert reviews.csv --output OUT.csv --monitor file/a.json", "file cannot be written into"),
    (
        f"{EVALUATE} --split tset",
        r"has no splits: .* 'tset'; .* \(--split validation\) and .* \(--split test\) would",
    ),
    (f"{FINETUNE} --data nothing.csv", "there is no folder or file nothing.csv"),
    ("predict ./nowhere nothing.csv --output a.csv", "there is no folder or file nothing.csv"),
    ("predict hydra pictures --output OUT.csv --monitor OUT.json", "run `hydra-transformers calibrate` first"),
    (
        "predict hydra pictures --output OUT.csv --monitor OUT.csv",
        "monitor and output are both .*out.csv: pass a file",
    ),
    ("predict hydra pictures --output b.csv --monitor ./b.csv", "monitor and output are both b.csv: pass a file"),
    ("predict hydra pictures --output OUT.csv --monitor pictures", "monitor is pictures, a folder"),
    ("predict hydra pictures --output OUT.csv --monitor file/m.json", "file/m.json|file cannot be written into"),
    ("predict clip 0.png", "--labels is missing: clip chooses among classes that you name"),
    ("predict clip 0.png --labels red --labels red", "--labels names a class twice"),
    ("predict vit 0.png --labels red", "--labels is for CLIP and SigLIP, vit has its own: leave it out"),
    ("predict bert txets.csv", "there is no file txets.csv: pass a data set with --output, or a text"),
    ("predict vit pictures", "pictures is a data set: name the file of its answers with --output"),
    ("predict vit 0.png --column image", "--column is for a data set"),
    ("predict bert file", "file is a file, and bert reads texts"),
    ("predict vit 0.png 0.png --output a.csv", "--output is for one data set, and there are 2 inputs"),
    ("predict vit pictures --output a.xls", "a.xls"),
    ("predict file text", "file is a file: pass the folder or Hub name of a model"),
    ("app vit --labels cat", "--labels is for CLIP and SigLIP"),
    ("app nowhere/at-all", "nowhere/at-all is not on this machine"),
    ("info ./nothing", "there is no folder ./nothing"),
    ("info empty", "has no config.json"),
    ("info file", "file is a file: pass the folder or Hub name of a model"),
    ("info vit", "is a plain vit: pass a Hydra"),
    ("push vit me/vit", "is a plain vit: pass a Hydra"),
    ("push hydra 'a b'", "repo_id is 'a b'"),
    ("export vit --output OUT", "is a plain vit: pass a Hydra"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED, ids=lambda value: None)
def test_it_is_refused(line, sentence, workplace, tmp_path, fails, monkeypatch):
    """The last of two equal options counts, so a row may replace one."""
    monkeypatch.chdir(workplace)
    before = {path: path.stat().st_mtime_ns for path in workplace.rglob("*") if path.is_file()}
    error = fails(*shlex.split(line.replace("OUT", str(tmp_path / "out"))))
    assert re.search(sentence, error), error
    assert not list((tmp_path / "out").glob("member-*")) and not (tmp_path / "out" / "config.json").exists()
    assert {path: path.stat().st_mtime_ns for path in workplace.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("comet_ml", "comet-ml")])
def test_a_tracker_that_is_not_installed_is_refused_at_once(tracker, package, tmp_path, fails, monkeypatch):
    """Before the model and the data are looked for."""
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard"])
    words = ["finetune", "no-model", "--data", "no-data", "--output", tmp_path / "out"]
    sentence = f"--report-to is '{tracker}', which is not installed: pip install {package}"
    assert fails(*words, "--report-to", "tensorboard", "--report-to", tracker).endswith(sentence)
    assert not (tmp_path / "out").exists()


def hub_error(kind: type, status: int) -> Exception:
    return kind("refused", response=SimpleNamespace(headers={}, request=None, status_code=status))


# What the HTTP library that huggingface_hub is built on raises without a network.
NO_ROUTE = importlib.import_module(HTTPError.__module__.split(".")[0]).ConnectError("no route")


@pytest.mark.parametrize("kind", ["model", "data set"])
@pytest.mark.parametrize(
    ("error", "offline", "sentence"),
    [
        (hub_error(GatedRepoError, 403), "", "is gated: ask for access on https://huggingface.co/"),
        (hub_error(RepositoryNotFoundError, 404), "", "that you can see: check the name"),
        (NO_ROUTE, "", "the Hub could not be reached for the {kind} meta/secret"),
        (ConnectionError("no route"), "1", "HF_HUB_OFFLINE forbids the download"),
    ],
    ids=["gated", "wrong name", "no network", "offline"],
)
def test_what_cannot_be_had_from_the_hub(kind, error, offline, sentence, fails, workplace, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("a long text\nof several lines") from error

    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    if kind == "model":
        monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
        words = ["info", "meta/secret"]
    else:
        for name in ("get_dataset_split_names", "load_dataset", "load_dataset_builder"):
            monkeypatch.setattr(datasets, name, refuse)
        words = ["prune", workplace / "vit", "--data", "meta/secret", "--output", tmp_path / "out"]
    assert sentence.format(kind=kind) in fails(*words)


def test_warnings_of_models_are_notes_and_those_of_libraries_are_not_shown(workplace, monkeypatch, capsys):
    load = saved_models.load_config

    def warns(model):
        for name in ("transformers.hydra_transformers.models.decision", "transformers.modeling_utils"):
            logging.get_logger(name).warning(f"{name} is careful")
        for module in ("hydra_transformers.uncertainty.temperature", "torch.nn"):
            warnings.warn_explicit(f"{module} is odd", UserWarning, "a.py", 1, module)
        return load(model)

    monkeypatch.setattr(saved_models, "load_config", warns)
    assert main(["info", str(workplace / "hydra")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: transformers.hydra_transformers.models.decision is careful",
        "note: hydra_transformers.uncertainty.temperature is odd",
    ]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), "the disk is full: free some space, and the same command continues"),
        (PermissionError(13, "Permission denied", "a.csv"), "Permission denied: 'a.csv'"),
    ],
)
def test_errors_of_the_system_have_no_numbers(error, sentence, fails, workplace, monkeypatch):
    def broken(name):
        raise error

    monkeypatch.setattr(saved_models, "load_config", broken)
    assert fails("info", workplace / "hydra") == f"hydra-transformers info: {sentence}"


@pytest.mark.parametrize(("error", "code"), [(ValueError("wrong"), 2), (ZeroDivisionError("odd"), 1)])
def test_a_trace_is_shown_with_debug_alone(error, code, workplace, monkeypatch, capsys):
    def broken(name):
        raise error

    monkeypatch.setattr(saved_models, "load_config", broken)
    assert main(["info", str(workplace / "hydra")]) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said and len(said.splitlines()) == 1
    assert ("unexpected" in said) == (code == 1)
    assert main(["--debug", "info", str(workplace / "hydra")]) == code
    assert "Traceback" in capsys.readouterr().err
