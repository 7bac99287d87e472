"""The command line from a pre-trained model, from checkpoints and from one model to a Hydra that is used and published."""

import importlib
import io
import json
import os
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import datasets
import pandas
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForImageClassification, AutoModelForZeroShotImageClassification, ViTImageProcessorPil

from hydra_transformers import AutoHydra, HydraViTForImageClassification
from hydra_transformers._io import progress
from hydra_transformers.cli import main
from hydra_transformers.cli.folders import note_training_rows
from hydra_transformers.data import load_data
from hydra_transformers.data.batches import collate
from hydra_transformers.models.auto import load_trained
from hydra_transformers.pruning import draw_members
from hydra_transformers.reports import Report
from tests import tiny_tags
from tests.command_line import call, run
from tests.processes import exit_code, start
from tests.tiny_data import picture_rows


pytestmark = pytest.mark.slow  # whole commands one after the other

TUNE = ["--epochs", 2, "--batch-size", 8, "--learning-rate", 1e-3]
TRAIN = ["--runs", 1, *TUNE]


@pytest.fixture(autouse=True, scope="module")
def no_plots():
    """Evaluations draw nothing, which takes longest with tiny models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "plot", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def finetuned(workplace):
    run("finetune", workplace / "encoder", "--data", workplace / "splits", *TRAIN, "--output", workplace / "tuned")
    return workplace / "tuned"


@pytest.fixture(scope="module")
def calibrated(workplace):
    data = ["--data", workplace / "pictures", "--coverage", 0.5, "--alpha", 0.2]
    run("calibrate", workplace / "hydra", *data, "--output", workplace / "calibrated")
    return workplace / "calibrated"


@pytest.fixture(scope="module")
def pruned(workplace):
    data = ["--data", workplace / "pictures", "--ood-data", workplace / "grey", "--limit", 12]
    run("prune", workplace / "vit", *data, "--budget", 4, "--output", workplace / "pruned")
    return workplace / "pruned"


def test_finetune_makes_a_hydra_in_one_run_and_evaluates_it(workplace, finetuned, capsys):
    hydra = AutoModelForImageClassification.from_pretrained(finetuned)
    assert hydra.num_members == 3 and hydra.config.trunk_layers == 1
    assert list(hydra.config.id2label.values()) == ["red", "green", "blue"]
    assert ViTImageProcessorPil.from_pretrained(finetuned).size.height == 8
    page = (finetuned / "evaluation" / "report.html").read_text()
    assert ", the rows kept for the test, 12 rows. Evaluated on" in page
    assert Report.from_json(finetuned / "evaluation" / "report.json").models["tuned"]["data"]["num_samples"] == 12
    before = (finetuned / "model.safetensors").stat().st_mtime_ns
    run("finetune", workplace / "encoder", "--data", workplace / "splits", *TRAIN, "--output", finetuned)
    assert (finetuned / "model.safetensors").stat().st_mtime_ns == before, "it is finished"
    words = ["finetune", workplace / "encoder", "--data", workplace / "splits", "--members", 2, "--output", finetuned]
    assert call(*words) == 2
    assert "was made with members 3, which now is 2" in capsys.readouterr().err


def test_several_runs_are_fused_into_one_model(workplace, tmp_path, capsys):
    words = ["finetune", workplace / "encoder", "--data", workplace / "splits", *TUNE, "--members", 1]
    run(*words, "--output", tmp_path / "hydra")
    said = capsys.readouterr().out
    assert "run 1 of 2\n" in said and "run 2 of 2\n" in said and "fused: accuracy " in said
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra")
    assert hydra.num_members == 2 and hydra.config.trunk_layers == 1


def test_rows_that_were_trained_on_are_noted(workplace, finetuned, tmp_path, capsys):
    command = ["calibrate", finetuned, "--data", workplace / "splits", "--coverage", 0.5]
    for split in ("train", "training"):
        run(*command, "--split", split, "--output", tmp_path / split)
        assert "was trained on rows of" in capsys.readouterr().err
    run(*command, "--split", "validation", "--output", tmp_path / "two")
    assert "was trained on rows of" not in capsys.readouterr().err


def test_a_split_of_any_name_is_noted(tmp_path, capsys):
    (tmp_path / "finetune.json").write_text(json.dumps({"data": "org/set", "split": "full", "rows": {}}))
    note_training_rows(tmp_path, SimpleNamespace(data="org/set", split=None), SimpleNamespace(split="full[:9]"))
    assert "was trained on rows of org/set" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_that_grew_and_a_folder_without_splits_are_noted(workplace, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    rows = pandas.DataFrame({"text": ["a good film", "a bad film"] * 100, "label": ["+", "-"] * 100})
    rows.to_csv(tmp_path / "data/rows.csv", index=False)
    hydra = tmp_path / "hydra"
    folder = ["--data", tmp_path / "data"]
    run("finetune", workplace / "bert-encoder", *folder, *TRAIN, "--members", 2, "--output", hydra)
    run("calibrate", hydra, *folder, "--coverage", 0.5, "--output", tmp_path / "one")
    assert "was trained on rows of" in capsys.readouterr().err
    run("calibrate", hydra, *folder, "--split", "validation", "--coverage", 0.5, "--output", tmp_path / "two")
    assert f"rows of {tmp_path}" not in capsys.readouterr().err
    pandas.concat([rows, rows[:7]]).to_csv(tmp_path / "data/rows.csv", index=False)
    for model in ("hydra", "two"):
        run("evaluate", tmp_path / model, *folder, "--split", "test")
        assert "have changed since" in capsys.readouterr().err


def test_a_csv_of_texts_becomes_a_table_with_answers(workplace, tmp_path, capsys):
    csv = workplace / "reviews.csv"
    hydra = tmp_path / "hydra"
    decided = tmp_path / "calibrated"
    columns = ["--column", "sentence", "--label", "label"]
    run("finetune", workplace / "bert-encoder", "--data", csv, *columns, *TRAIN, "--members", 2, "--output", hydra)
    assert "--split validation --column sentence --label label --coverage 0.9" in capsys.readouterr().out
    run("calibrate", hydra, "--data", csv, "--coverage", 0.9, "--output", decided)
    promise, answers, where = capsys.readouterr().out.splitlines()[-3:]
    assert promise == "Aimed at, not promised (for that, pass a confidence): at least 90 % of the rows are answered."
    assert answers.startswith("Of the ") and "of the answers are wrong" in answers
    assert where.startswith(f"The calibrated model is in {decided}. Next: ")
    run("calibrate", hydra, "--data", csv, "--risk", 0.99, "--verbose", "--output", tmp_path / "verbose")
    assert "has the temperature" in capsys.readouterr().out
    run("evaluate", decided, "--data", csv, "--split", "test")
    assert "answered" in Report.from_json(decided / "evaluation" / "report.json").models["calibrated"]["data"]
    run("predict", decided, csv, "--output", tmp_path / "answers.csv")
    table = pandas.read_csv(tmp_path / "answers.csv")
    source = pandas.read_csv(csv)
    assert table["sentence"].tolist() == source["sentence"].tolist()
    assert {"answer", "prediction", "why", "row"} <= set(table.columns)
    abstained = table["answer"].isna()
    assert abstained.any() or (table["answer"] == table["prediction"]).all()
    assert table.loc[abstained, "why"].notna().all()


def test_token_classification_goes_the_same_way(tmp_path, capsys):
    encoder = tmp_path / "encoder"
    tiny_tags.backbone(initializer_range=0.1).bert.save_pretrained(encoder)
    tiny_tags.tokenizer().save_pretrained(encoder)
    rows = [json.dumps(row) for row in tiny_tags.rows(200, 0)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = ["--data", tmp_path / "rows.jsonl"]
    run("finetune", encoder, *data, "--epochs", 6, "--learning-rate", 3e-3, "--output", tmp_path / "hydra")
    assert "Entity F1" in capsys.readouterr().out
    run("calibrate", tmp_path / "hydra", *data, "--coverage", 0.8, "--output", tmp_path / "calibrated")
    run("predict", tmp_path / "calibrated", "annabelle smith went to paris .", "--json")
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    words = {"annabelle", "smith", "annabelle smith", "paris", "went"}
    assert {entity["word"] for entity in answer["entities"]} <= words


def test_calibrate_keeps_the_input_and_writes_all_that_belongs_to_the_model(workplace, calibrated):
    model = AutoModelForImageClassification.from_pretrained(calibrated).eval()
    assert model.is_calibrated and load_trained(workplace / "hydra").config.decision is None
    assert ViTImageProcessorPil.from_pretrained(calibrated).size.height == 8


@pytest.mark.parametrize(("name", "value"), [("threshold", 0.999), ("alpha", 2), ("state", "x")])
def test_a_model_whose_calibration_was_edited_is_calibrated_anew(name, value, workplace, calibrated, tmp_path, capsys):
    edited = shutil.copytree(calibrated, tmp_path / "edited")
    config = json.loads((edited / "config.json").read_text())
    right = config["decision"]
    config["decision"] = right | {name: value}
    (edited / "config.json").write_text(json.dumps(config))
    data = ["--data", workplace / "pictures", "--coverage", 0.5, "--alpha", 0.2]
    run("calibrate", edited, *data, "--output", tmp_path / "anew")
    assert f"note: the earlier calibration of {edited} is dropped: decision" in capsys.readouterr().err
    run("calibrate", calibrated, *data, "--output", tmp_path / "again")
    assert "is dropped" not in capsys.readouterr().err
    anew, again = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("anew", "again"))
    assert anew["decision"] == again["decision"]
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "anew").eval().is_calibrated


def test_a_model_that_never_abstains_says_so(workplace, calibrated, tmp_path, capsys):
    for name in ("hydra", "vit"):
        folder = tmp_path / name
        run("calibrate", workplace / name, "--data", workplace / "pictures", "--alpha", 0.2, "--output", folder)
        assert "It never abstains: no target was given." in capsys.readouterr().out
        run("predict", folder, workplace / "0.png")
        assert "without a target (--risk, --coverage), so it never abstains" in capsys.readouterr().err
        run("predict", folder, workplace / "pictures", "--output", tmp_path / f"{name}.csv")
        assert "without a target (--risk, --coverage), so it never abstains" in capsys.readouterr().err
    run("info", tmp_path / "hydra")
    assert "calibrated without a target: it never abstains" in capsys.readouterr().out
    run("predict", calibrated, workplace / "pictures", "--output", tmp_path / "answers.csv")
    run("info", calibrated)
    shown = capsys.readouterr()
    assert "never abstains" not in shown.out + shown.err and "\ncalibrated\n" in shown.out


def test_promises_by_class_are_kept_by_command(workplace, tmp_path, capsys):
    data = ["--data", workplace / "pictures", "--confidence", 0.5]
    targets = {
        "cost": ["--cost", "wrong=20", "--cost", "review=1"],
        "each": ["--risk", 0.9, "--by", "prediction"],
        "one": ["--risk", 0.9, "--risk-of", "red=0.95"],
        "missed": ["--missed", "red=0.6"],
    }
    for name, target in targets.items():
        run("calibrate", workplace / "hydra", *data, *target, "--output", tmp_path / name)
        decision = json.loads((tmp_path / name / "config.json").read_text())["decision"]
        if name == "cost":
            assert "a row costs at most" in capsys.readouterr().out and "thresholds" not in decision
            continue
        assert len(decision["thresholds"]) == 3 and decision["validation"]["groups"]
    assert "of the true red rows are answered as another label" in capsys.readouterr().out
    assert [group["risk"] for group in decision["validation"]["groups"]] == [None, None]
    run("evaluate", tmp_path / "one", "--data", workplace / "pictures")
    assert "wrong, predicted red" in capsys.readouterr().out


def test_promises_by_a_column_are_kept_audited_and_watched_by_command(workplace, tmp_path, capsys):
    rows = datasets.load_from_disk(workplace / "pictures")
    sites = [("north", "south")[place % 2] for place in range(len(rows))]
    rows.add_column("site", sites).save_to_disk(tmp_path / "data")
    data = ["--data", tmp_path / "data", "--confidence", 0.5]
    target = ["--by", "site", "--risk", 0.95, "--risk-of", "south=0.9"]
    run("calibrate", workplace / "hydra", *data, *target, "--output", tmp_path / "calibrated")
    assert "of each of 2 groups at most the named share of the answers is wrong" in capsys.readouterr().out
    decision = json.loads((tmp_path / "calibrated" / "config.json").read_text())["decision"]
    assert decision["by_group"]["column"] == "site" and decision["by_group"]["names"] == ["north", "south"]
    run("evaluate", tmp_path / "calibrated", "--data", tmp_path / "data")
    assert "wrong, site south" in capsys.readouterr().out
    options = ["--output", tmp_path / "answers.csv", "--monitor", tmp_path / "monitor.json", "--audit", 0.99]
    run("predict", tmp_path / "calibrated", tmp_path / "data", *options)
    reviews = pandas.read_csv(tmp_path / "answers.audit.csv")
    reviews.assign(reviewed_label=reviews["prediction"]).to_csv(tmp_path / "reviews.csv", index=False)
    capsys.readouterr()
    run("watch", tmp_path / "monitor.json", "--labels", tmp_path / "reviews.csv")
    count = int((reviews["site"] == "south").sum())
    shown = capsys.readouterr().out
    assert count and re.search(
        rf"Wrong answers, site south: .* 0 % of the checked answers are wrong \({count} rows", shown
    )


def test_a_plain_classifier_is_calibrated_beside_its_weights(workplace, tmp_path, capsys):
    data = ["--data", workplace / "pictures"]
    target = ["--coverage", 0.5]
    run("calibrate", workplace / "vit", *data, *target, "--output", tmp_path / "d")
    assert load_trained(tmp_path / "d").config.model_type == "vit"
    run("evaluate", tmp_path / "d", *data)
    assert "answered" in Report.from_json(tmp_path / "d" / "evaluation" / "report.json").models["d"]["data"]
    capsys.readouterr()
    run("predict", tmp_path / "d", workplace / "0.png", "--json")
    assert json.loads(capsys.readouterr().out)["abstain"] in (True, False)


def test_predict_says_what_the_model_says(workplace, calibrated, capsys):
    run("predict", calibrated, workplace / "0.png")
    header, line = capsys.readouterr().out.splitlines()
    model = AutoModelForImageClassification.from_pretrained(calibrated).eval()
    [expected] = model.predict([str(workplace / "0.png")], ViTImageProcessorPil.from_pretrained(calibrated))
    assert header.split()[:2] == ["input", "answer"]
    assert expected["label"] in line and ("I don't know" in line) == expected["abstain"]
    run("predict", workplace / "hydra", workplace / "0.png")
    assert "not calibrated" in capsys.readouterr().err
    assert call("predict", calibrated, workplace / "0.png", workplace / "broken.png") == 2
    captured = capsys.readouterr()
    assert "1 of 2 images could not be read, the others are answered" in captured.err
    assert expected["label"] in captured.out
    assert call("predict", calibrated, workplace / "broken.png") == 2
    assert capsys.readouterr().err.endswith("1 of 1 images could not be read\n")
    assert call("predict", calibrated, workplace / "reviews.csv", "--output", workplace / "a.csv") == 2
    assert "no image column among sentence, label, and the model reads images" in capsys.readouterr().err


def test_evaluate_matches_the_datas_class_names_with_the_models(workplace, tmp_path):
    """The data lists its classes in another order than the model: accuracy must not care."""
    sets = ["--near", f"grey={workplace / 'grey'}", "--far", f"same={workplace / 'pictures'}"]
    words = ["evaluate", workplace / "vit", "--data", workplace / "reordered", *sets]
    run(*words, "--corruptions", "gaussian_noise", "--output", tmp_path)
    report = Report.from_json(tmp_path / "report.json")
    assert report.data_sets("near") == ["grey (near)"] and len(report.data_sets("corruption")) == 5
    backbone = AutoModelForImageClassification.from_pretrained(workplace / "vit").eval()
    processor = ViTImageProcessorPil.from_pretrained(workplace / "vit")
    rows = picture_rows(30, names=["blue", "red", "green"])
    with torch.no_grad():
        pixels = processor([row["image"].convert("RGB") for row in rows], return_tensors="pt")
        names = [backbone.config.id2label[index] for index in backbone(**pixels).logits.argmax(-1).tolist()]
    right = [name == ["blue", "red", "green"][row["label"]] for name, row in zip(names, rows, strict=True)]
    assert report.models["vit"]["data"]["accuracy"] == pytest.approx(sum(right) / 30)
    assert "vit" in (tmp_path / "report.md").read_text() and (tmp_path / "report.html").exists()


def test_info_export_and_push_take_the_calibrated_model(workplace, calibrated, tmp_path, monkeypatch, capsys):
    import hydra_transformers.hub as hub

    run("info", calibrated)
    text = capsys.readouterr().out
    for part in ("\ncalibrated\n", "member 2", "3 classes: red, green, blue", "| Deep Ensemble of 3 |"):
        assert part in text
    exported = []
    pushed = {}
    formats = importlib.import_module("hydra_transformers.exporting")
    monkeypatch.setattr(formats, "export", lambda model, *others: exported.append((model, others)))
    run("export", calibrated, "--to", "torch", "--output", tmp_path / "exported")
    [(model, (folder, names, _))] = exported
    assert model.is_calibrated and folder == tmp_path / "exported" and names == ("torch",)
    assert "with its calibration" in capsys.readouterr().out

    def fake_push(model, repo_id, processor=None, report=None, **arguments):
        pushed.update(model=model, repo_id=repo_id, processor=processor, report=report, **arguments)
        return "https://huggingface.co/me/my-hydra/commit/1"

    monkeypatch.setattr(hub, "push_hydra_to_hub", fake_push)
    folder = shutil.copytree(calibrated, tmp_path / "my-hydra")
    run("evaluate", folder, "--data", workplace / "pictures")
    assert call("push", folder, "me/my-hydra") == 2
    assert "pass --dataset" in capsys.readouterr().err
    run("push", folder, "me/my-hydra", "--dataset", "colours", "--private")
    assert pushed["repo_id"] == "me/my-hydra" and pushed["model"].is_calibrated and pushed["private"] is True
    assert pushed["report_model"] == "my-hydra" and pushed["processor"].size.height == 8
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    run("push", folder, "me/my-hydra", "--dataset", "colours")
    assert "Mine." in pushed["card"].text


def test_steps_that_may_take_long_show_a_bar_on_a_terminal(workplace, calibrated, tmp_path, monkeypatch):
    Terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", 0.0)
    data = ["--data", workplace / "pictures"]
    for words in (
        ["calibrate", workplace / "hydra", *data, "--coverage", 0.5, "--output", tmp_path / "calibrated"],
        ["evaluate", calibrated, *data, "--output", tmp_path / "evaluation"],
        ["compare", workplace / "vit", workplace / "two", *data],
        ["predict", calibrated, workplace / "pictures", "--output", tmp_path / "answers.csv"],
    ):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        run(*words)
        assert re.search(r"(read|predict|member 0): +0%", terminal.getvalue()), words


def test_checkpoints_are_compared_and_fused(workplace, tmp_path, capsys):
    names = [workplace / name for name in ("vit", "two", "three")]
    data = ["--data", workplace / "pictures"]
    run("compare", *names, *data)
    said = capsys.readouterr().out
    assert "soup" in said and "Next: hydra-transformers fuse" in said
    run("fuse", *names, "--trunk-layers", 1, "--output", tmp_path / "fused")
    assert "check it with hydra-transformers compare" in capsys.readouterr().out
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "fused").eval()
    expected = AutoHydra.from_pruned_members([str(name) for name in names], trunk_layers=1).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(hydra(images).logits, expected(images).logits)
    assert (tmp_path / "fused" / "modeling_hydra.py").exists()


def test_pruned_members_are_tuned_and_fused(workplace, pruned, tmp_path, fails):
    circuits = {path.stem: json.loads(path.read_text()) for path in (pruned / "circuits").glob("*.json")}
    assert set(circuits) == {"acc", "ood", "avg"}
    for index, objective in enumerate(("acc", "ood", "avg")):
        kept = json.loads((pruned / f"member-{index}" / "config.json").read_text())["kept_heads"]
        assert all(head not in kept[layer][0] for layer, head in circuits[objective]["ranking"])
    words = ["finetune", pruned, "--data", workplace / "splits", "--epochs", 1, "--output", tmp_path / "members"]
    assert "leave out --runs, --members" in fails(*words, "--regression")
    run(*words)
    words[3] = workplace / "pictures"
    assert "member-0 was made with other rows" in fails(*words)
    run("fuse", tmp_path / "members", "--output", tmp_path / "hydra")
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra")
    assert [sum(len(layer[m]) for layer in hydra.config.kept_heads) for m in range(3)] == [4, 4, 4]
    assert (tmp_path / "hydra" / "circuits" / "acc.json").exists()


def test_members_are_tuned_by_a_recipe_of_the_paper(workplace, pruned, tmp_path, fails, monkeypatch):
    given = {}
    tune = importlib.import_module("hydra_transformers.training").finetune_members

    def watched(members, recipe, train, validation, folder, **options):
        given.update(options, recipe=recipe)
        return tune(members, recipe, train, validation, folder, **options)

    monkeypatch.setattr("hydra_transformers.training.finetune_members", watched)
    words = ["finetune", pruned, "--data", workplace / "splits", "--recipe", "cifar100", "--epochs", 1]
    run(*words, "--learning-rate", "grid", "--output", tmp_path / "tuned")
    assert (given["recipe"], given["learning_rates"], given["num_train_epochs"]) == ("cifar100", "grid", 1)
    rates = json.loads((tmp_path / "tuned" / "learning-rates.json").read_text())
    assert rates["learning_rates"] == [0.001, 0.003, 0.01, 0.03]
    record = json.loads((tmp_path / "tuned" / "member-1" / "finetune.json").read_text())
    assert (record["optim"], record["label_smoothing_factor"], record["warmup_steps"]) == ("sgd", 0.1, 0.05)
    assert record["image_change"] == "CropAndFlip(least_share=0.08)"
    assert "has no grid" in fails(*words[:4], "--learning-rate", "grid", "--output", tmp_path / "other")
    one_run = ["finetune", workplace / "encoder", "--data", workplace / "splits", "--output", tmp_path / "one"]
    for option in (["--recipe", "cifar100"], ["--learning-rate", "grid"]):
        assert "are for members that `prune` made" in fails(*one_run, *option)
    clip = tmp_path / "clip"
    for index in range(2):
        shutil.copytree(workplace / "clip", clip / f"member-{index}")
    words = ["finetune", clip, "--data", workplace / "splits", "--output", tmp_path / "pairs"]
    assert "learns from pairs of images and texts, which this command does not read" in fails(*words)


def test_without_ood_data_members_are_pruned_by_taylor_scores(workplace, tmp_path, capsys):
    """The paper's Strategy 1; `vit` has two layers of four heads."""
    data = ["--data", workplace / "pictures", "--limit", 24]
    run("prune", workplace / "vit", *data, "--heads-per-layer", 2, "--output", tmp_path / "pruned")
    assert not (tmp_path / "pruned" / "circuits").exists()
    rows = load_data(str(workplace / "pictures"), str(workplace / "vit"), limit=24, labelled=True)
    backbone = AutoModelForImageClassification.from_pretrained(workplace / "vit").eval()
    loader = DataLoader(rows, 32, collate_fn=collate)
    expected = draw_members(backbone, data=loader, heads_per_layer=2, allow_equal=True)
    for index, member in enumerate(expected):
        kept = json.loads((tmp_path / "pruned" / f"member-{index}" / "config.json").read_text())["kept_heads"]
        assert kept == member.config.kept_heads
        assert [len(heads) for [heads] in kept] == [2, 2]

    words = ["prune", workplace / "vit", *data, "--output", tmp_path / "pruned"]
    capsys.readouterr()
    assert call(*words) == 2
    assert "was made with --heads-per-layer 2, which now is None" in capsys.readouterr().err
    run("prune", workplace / "clip", *data, "--members", 2, "--output", tmp_path / "clip")
    config = json.loads((tmp_path / "clip" / "member-1" / "config.json").read_text())
    assert {len(heads) for [heads] in config["vision_config"]["kept_heads"]} == {3}, "two thirds of four, rounded"
    run("finetune", tmp_path / "pruned", "--data", workplace / "splits", *TUNE, "--output", tmp_path / "tuned")
    run("fuse", tmp_path / "tuned", "--output", tmp_path / "hydra")
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "hydra").num_members == 3


def test_clip_is_pruned_fused_and_judged_without_training(workplace, tmp_path, capsys):
    data = ["--data", workplace / "pictures", "--limit", 9]
    circuits = ["--method", "circuits", "--budget", 4, "--members", 2]
    run("prune", workplace / "clip", *data, *circuits, "--output", tmp_path / "pruned")
    run("fuse", tmp_path / "pruned", "--output", tmp_path / "hydra")
    run("evaluate", tmp_path / "hydra", *data, "--near", f"grey={workplace / 'grey'}")
    run("info", tmp_path / "hydra")
    assert "vision tower" in capsys.readouterr().out
    assert AutoModelForZeroShotImageClassification.from_pretrained(tmp_path / "hydra").num_members == 2


def killed_at_the_second_member(words: list[str]) -> None:
    save = HydraViTForImageClassification.save_pretrained

    def deadly(model, folder, *words, **named):
        save(model, folder, *words, **named)
        if "member-1" in str(folder):
            os.kill(os.getpid(), signal.SIGKILL)

    HydraViTForImageClassification.save_pretrained = deadly
    main(words)


def test_a_prune_that_was_killed_is_not_fused_and_goes_on(workplace, tmp_path, capsys):
    """`kill -9` while the second member is written; a finished one does nothing."""
    out = tmp_path / "out"
    data = ["--data", workplace / "pictures", "--limit", 12, "--method", "circuits", "--budget", 2]
    words = [str(word) for word in ["prune", workplace / "vit", *data, "--output", out]]
    assert exit_code(start(tmp_path / "log", killed_at_the_second_member, words)) == -signal.SIGKILL
    assert [path.name for path in out.glob("member-*")] == ["member-0"]
    assert call("fuse", out, "--output", tmp_path / "next") == 2
    assert "has 1 of 3 members: run its command again" in capsys.readouterr().err
    run(*words)
    before = (out / "member-0" / "model.safetensors").stat().st_mtime_ns
    run(*words)
    assert "finished already" in capsys.readouterr().out
    assert (out / "member-0" / "model.safetensors").stat().st_mtime_ns == before
    assert call(*words[:-2], "--seed", 1, "--output", out) == 2
    assert "was made with seed 0, which now is 1" in capsys.readouterr().err
    run("fuse", out, "--output", tmp_path / "next")
