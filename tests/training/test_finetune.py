"""finetune: a pre-trained model and data in, a fine-tuned Hydra out."""

import itertools
import json
import os
import re
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import datasets
import pandas
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertTokenizer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hydra_transformers import AutoHydra, HydraTrainingArguments
from hydra_transformers.data.loading import PreparedData, classes_in, load_data
from hydra_transformers.data.rows import DataSource
from hydra_transformers.models.task import task_name
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.serving import HydraPredictor, predict_data
from hydra_transformers.training import DivergedError, epoch_lines, finetune, lora_config, trackers
from hydra_transformers.training.defaults import learning_rate_for
from hydra_transformers.training.finetune import no_better_than_most_frequent, no_gain_by_fusing
from tests.tiny_data import WORDS, picture_rows, save_bert, save_vit
from tests.training.tiny import assert_same_weights


FAST = {"runs": 1, "epochs": 2, "batch_size": 8, "progress": False, "use_cpu": True, "learning_rate": 1e-3}

KEEP = {"load_best_model_at_end": False}  # without evaluations none is the best


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("bert"))


def reviews(count: int = 40) -> list[dict]:
    return [{"text": f"a {word} film", "label": sign} for word, sign in (("good", "+"), ("bad", "-")) * (count // 2)]


def csv_of(rows: list[dict], path) -> str:
    datasets.Dataset.from_list(rows).to_csv(path)
    return str(path)


def test_a_file_of_texts_becomes_a_hydra_of_three_with_splits_that_do_not_overlap(bert, tmp_path, monkeypatch):
    data = csv_of(reviews(), tmp_path / "reviews.csv")
    output = tmp_path / "hydra"
    result = finetune(bert, data, output, **FAST)
    assert (result.model.num_members, result.model.config.trunk_layers) == (3, 1) and not result.model.training
    assert set(result.model.config.id2label.values()) == {"+", "-"}
    assert (len(result.train), len(result.validation), len(result.test)) == (32, 4, 4)
    said = f"HydraBertForSequenceClassification of 3 members: {output}\n32 training, 4 validation and 4 test rows; "
    assert repr(result).startswith(f"{said}validation accuracy {result.metrics['eval_accuracy']:.4g}, loss ")
    assert_same_weights(AutoHydra.from_pretrained(output), result.model)
    assert isinstance(BertTokenizer.from_pretrained(output), BertTokenizer) and not (output / "checkpoints").exists()
    start = AutoHydra.from_backbone(bert, num_members=3, class_names=list(result.model.config.id2label.values()))
    assert not torch.equal(start.bert.layers[0].mlp.fc1.weight, result.model.bert.layers[0].mlp.fc1.weight)
    monkeypatch.chdir(tmp_path)  # other names of the same folders, and other batches to evaluate it with
    again = finetune(f"{bert}/", "reviews.csv", "hydra", column="text", **FAST | {"batch_size": 4})
    assert_same_weights(again.model, result.model)
    assert again.metrics["eval_accuracy"] == result.metrics["eval_accuracy"]
    assert again.model.config.name_or_path == str(output)
    with pytest.raises(ValueError, match="was made with members 3, which now is 2: pass another folder"):
        finetune(bert, data, output, num_members=2, **FAST)
    for change in ({"learning_rate": 1e-2}, {"epochs": 3}, {"max_length": 8}, {"seed": 1}):
        with pytest.raises(ValueError, match=r"was made with (learning_rate|num_train_epochs|max_length|seed)"):
            finetune(bert, data, output, **FAST | change)
    other = AutoModelForSequenceClassification.from_pretrained(bert)
    other.bert.encoder.layer[0].attention.self.query.bias.data += 1
    shorter = [{**row, "text": row["text"][2:]} for row in reviews()]
    for words, model, rows in (
        ("starting weights", other, data),
        ("texts", bert, shorter),
        ("rows", bert, reviews(44)),
    ):
        with pytest.raises(ValueError, match=f"was made with other {words}"):
            finetune(model, rows, output, **FAST)


def test_the_default_learning_rate_falls_with_the_number_of_steps(bert, tmp_path, monkeypatch):
    class Seen(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            found.append((args.learning_rate, state.max_steps))
            control.should_training_stop = True

    found = []
    data = csv_of(reviews(), tmp_path / "reviews.csv")
    options = {name: value for name, value in FAST.items() if name != "learning_rate"} | {"callbacks": [Seen()]}
    finetune(bert, data, tmp_path / "few", **options)
    finetune(bert, data, tmp_path / "many", **options | {"epochs": 1000, "gradient_accumulation_steps": 2})
    finetune(bert, data, tmp_path / "counted", **options | {"max_steps": 500})
    finetune(bert, data, tmp_path / "endless", **options | {"max_steps": 10**6})
    assert found == [(2e-4, 8), (1e-4, 2000), (2e-4, 500), (2e-5, 10**6)]
    monkeypatch.setattr(
        "hydra_transformers.training.defaults.learning_rate_for", lambda *_: 1e-6
    )  # with more processes
    finetune(bert, data, tmp_path / "few", **options)
    assert len(found) == 4, "it is finished"
    arguments = HydraTrainingArguments(tmp_path, max_steps=500)
    kinds = ("words", "audio")
    rates = {kind: learning_rate_for(arguments, PreparedData([], None, kind, ())) for kind in kinds}
    assert rates == {"words": 2e-4, "audio": 1e-4}


@pytest.mark.parametrize(("batch_size", "rate"), [(256, 1e-4), (64, 5e-5), (4, 2e-5)])
def test_the_learning_rate_of_images_goes_by_the_rows_of_a_step(tmp_path, batch_size, rate):
    images = PreparedData([], None, "image", ())
    for steps in (100, 10_000):
        arguments = HydraTrainingArguments(tmp_path, per_device_train_batch_size=batch_size, max_steps=steps)
        assert learning_rate_for(arguments, images) == pytest.approx(rate)


def test_several_runs_are_fused_and_their_scores_are_told(bert, tmp_path, capsys):
    """The model is what `from_pruned_members` makes of Hydras that were fine-tuned apart, with
    seeds of their own."""
    several = FAST | {"runs": 2, "num_members": 2, "seed": 5}
    result = finetune(bert, reviews(), tmp_path / "hydra", **several | {"progress": True})
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("run ")] == [
        "run 1 of 2",
        "run 2 of 2",
    ]
    assert (result.model.num_members, result.model.config.trunk_layers) == (4, 1)
    assert list(result.runs) == ["run 1", "run 2", "soup", "fused"]
    assert result.runs["fused"]["loss"] == pytest.approx(result.metrics["eval_loss"])
    assert "run 1: accuracy " in repr(result) and "fused: accuracy " in repr(result)

    # The same by hand: other classifiers, another order of the data.
    runs = [finetune(bert, reviews(), tmp_path / "first", **several | {"runs": 1}).model]
    hydra = AutoHydra.from_backbone(bert, num_members=2, class_names=["+", "-"], seed=7)
    first = AutoHydra.from_backbone(bert, num_members=4, class_names=["+", "-"], seed=5)
    assert torch.equal(hydra.classifier.weight, first.classifier.weight[4:]), "no classifier is drawn twice"
    apart = [result.model.classifier.weight[rows] for rows in (slice(0, 4), slice(4, 8))]
    assert torch.equal(apart[0], runs[0].classifier.weight) and not torch.equal(*apart)
    branch = result.model.bert.layers[-1]
    for member, own in enumerate(runs[0].bert.layers[-1].mlp):
        assert torch.equal(branch.mlp[member].fc1.weight, own.fc1.weight), "MLPs of the branches are not merged"
    assert_same_weights(AutoHydra.from_pretrained(tmp_path / "hydra"), result.model)
    assert not (tmp_path / "hydra/checkpoints").exists()

    # Called again, it is loaded, with its scores; another number of runs is refused.
    again = finetune(bert, reviews(), tmp_path / "hydra", **several)
    assert_same_weights(again.model, result.model)
    assert again.runs == result.runs
    with pytest.raises(ValueError, match="was made with runs 2, which now is 3"):
        finetune(bert, reviews(), tmp_path / "hydra", **several | {"runs": 3})


def test_plain_runs_are_fused_with_merged_layers_and_one_run_of_one_member_is_a_plain_model(bert, tmp_path):
    result = finetune(bert, reviews(), tmp_path / "two", **FAST | {"runs": 2, "num_members": 1, "trunk_layers": 1})
    assert (result.model.num_members, result.model.config.trunk_layers) == (2, 1)
    single = finetune(bert, reviews(), tmp_path / "one", **FAST | {"num_members": 1})
    assert single.model.num_members == 1 and single.runs == {}
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"runs is {wrong}: pass 1 or more"):
            finetune(bert, reviews(), tmp_path / "none", **FAST | {"runs": wrong})


def test_several_runs_go_on_where_they_were_cut_off(bert, tmp_path):
    class Stop(Exception):
        pass

    class StoppingInTheSecond(TrainerCallback):
        begun: ClassVar[list[int]] = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.begun.append(args.seed)

        def on_step_end(self, args, state, control, **kwargs):
            if len(self.begun) == 2 and state.global_step == 6:
                raise Stop

    several = FAST | {"runs": 2, "num_members": 2}
    whole = finetune(bert, reviews(), tmp_path / "whole", **several)
    stopping = StoppingInTheSecond()
    with pytest.raises(Stop):
        finetune(bert, reviews(), tmp_path / "cut", callbacks=[stopping], **several)
    with pytest.raises(ValueError, match=r"was made with num_train_epochs 2, which now is 3"):
        finetune(bert, reviews(), tmp_path / "cut", **several | {"epochs": 3})
    resumed = finetune(bert, reviews(), tmp_path / "cut", callbacks=[stopping], **several)
    assert stopping.begun == [0, 1, 1], "the first run is not repeated"
    assert_same_weights(resumed.model, whole.model)


def test_runs_that_lose_by_being_fused_are_told():
    scores = {"run 1": {"loss": 0.5}, "run 2": {"loss": 0.6}, "soup": {"loss": 0.1}, "fused": {"loss": 0.45}}
    assert no_gain_by_fusing(scores) == []
    [sentence] = no_gain_by_fusing(scores | {"fused": {"loss": 0.57}})
    assert "the validation loss is 0.57, and that of a run 0.55 on average" in sentence


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(bert, tmp_path):
    class Stop(Exception):
        pass

    class Stopping(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise Stop

    data = csv_of(reviews(), tmp_path / "reviews.csv")
    whole = finetune(bert, data, tmp_path / "whole", **FAST)
    with pytest.raises(Stop):
        finetune(bert, data, tmp_path / "cut", callbacks=[Stopping()], **FAST)
    with pytest.raises(ValueError, match=r"was made with learning_rate 0\.001, which now is 0.01"):
        finetune(bert, data, tmp_path / "cut", **FAST | {"learning_rate": 0.01})
    assert_same_weights(finetune(bert, data, tmp_path / "cut", **FAST).model, whole.model)


def test_what_an_older_version_has_finished_is_loaded_and_what_it_has_begun_is_refused(bert, tmp_path):
    class Stop(Exception):
        pass

    class Stopping(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            if state.epoch >= 1:
                raise Stop

    def age(folder):
        record = json.loads((folder / "finetune.json").read_text())
        assert record.pop("version") == 2
        for name in ("texts", "tokenizer"):
            del record[name]
        (folder / "finetune.json").write_text(json.dumps(record | {"inputs": {"training": "abc"}}))

    whole = finetune(bert, reviews(), tmp_path / "whole", **FAST)
    age(tmp_path / "whole")
    assert_same_weights(finetune(bert, reviews(), tmp_path / "whole", **FAST).model, whole.model)
    with pytest.raises(ValueError, match="was made with seed 0, which now is 1"):
        finetune(bert, reviews(), tmp_path / "whole", **FAST | {"seed": 1})

    with pytest.raises(Stop):
        finetune(bert, reviews(), tmp_path / "cut", callbacks=[Stopping()], **FAST)
    age(tmp_path / "cut")
    with pytest.raises(
        ValueError, match=r"cut has a training that another version .* has begun, .* pass another folder"
    ):
        finetune(bert, reviews(), tmp_path / "cut", **FAST)


def test_what_stopped_before_its_first_checkpoint_may_begin_with_other_settings(bert, tmp_path):
    data = csv_of(reviews(), tmp_path / "reviews.csv")
    rate = {"classifier_learning_rate": None, "epochs": 1}
    with pytest.raises(DivergedError, match="lower the learning rate"):
        finetune(bert, data, tmp_path / "hydra", **FAST | rate | {"learning_rate": 1e30})
    assert finetune(bert, data, tmp_path / "hydra", **FAST | rate).metrics["eval_loss"] < 2


@pytest.mark.slow
def test_a_finetuned_model_reads_inputs_with_the_processor_it_was_trained_with(bert, tmp_path):
    """Not with that of the backbone's folder; and adapters on it do not name that folder."""
    peft = pytest.importorskip("peft")
    reversed_words = BertTokenizer(vocab={word: index for index, word in enumerate([*WORDS[:5], *WORDS[:4:-1]])})
    model = finetune(bert, reviews(), tmp_path / "hydra", processor=reversed_words, max_length=4, **FAST).model
    loaded = AutoHydra.from_pretrained(tmp_path / "hydra")
    texts = ["a good film of joy", "bad"]
    assert model.predict(texts) == loaded.predict(texts)
    assert load_data(reviews(), model).max_length == 4
    with pytest.raises(ValueError, match="was made with other tokenizer"):
        finetune(bert, reviews(), tmp_path / "hydra", max_length=4, **FAST)
    for hydra in (model, AutoHydra.from_backbone(bert, num_members=2, num_labels=2)):
        peft.get_peft_model(hydra, lora_config(hydra, r=2)).save_pretrained(tmp_path / "adapters")
        named = json.loads((tmp_path / "adapters/adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == (str(tmp_path / "hydra") if hydra is model else None)


def test_a_class_without_training_rows_is_a_class(bert, tmp_path):
    held_out = int(torch.randperm(41, generator=torch.Generator().manual_seed(0))[0])
    rows = reviews()
    rows.insert(held_out, {"text": "a film of joy", "label": "rare"})
    result = finetune(bert, rows, tmp_path / "hydra", max_steps=1, **FAST)
    assert result.model.num_labels == 3 and len(set(result.train.labels)) == 2
    assert json.loads((tmp_path / "hydra/finetune.json").read_text())["data"] is None  # no folder called "data"
    for wrong in ({"epochs": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="have to be positive"):
            finetune(bert, rows, tmp_path / "other", **FAST | wrong)


def test_a_column_of_codes_or_of_names_of_rows_is_not_one_of_classes():
    numbered = [{"text": "film", "id": f"{n}", "code": 1000 + n % 2, "class": 11 * (n % 2)} for n in range(9)]
    for column, words in (("id", "has another label in each row"), ("code", "has 2 labels, up to 1001: .* as texts")):
        with pytest.raises(ValueError, match=words):
            classes_in(DataSource(numbered, label=column, part="all"))
    some_repeat = [*numbered, *({"text": "film", "id": "9"} for _ in range(7))]
    with pytest.raises(ValueError, match=r"has 10 labels in 16 rows, too many .* regression=True"):
        classes_in(DataSource(some_repeat, label="id", part="all"))
    assert len(classes_in(DataSource(numbered, label="class", part="all"))[0]) == 12
    splits = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list(numbered)))
    assert len(classes_in(DataSource(splits, label="id", part="all"))[0]) == 9  # one row of each class to learn from


def test_classes_are_counted_from_0_or_named():
    """A model of labels from 1 to 3 would have a class without rows, LABEL_0."""
    stars = [{"text": "film", "stars": 1 + n % 3, "name": str(1 + n % 3), "rare": n % 2 * 3} for n in range(9)]
    with pytest.raises(ValueError, match=r"the labels 1 to 3, and numbers count classes from 0: .* as texts"):
        classes_in(DataSource(stars, label="stars", part="all"))
    assert classes_in(DataSource(stars, label="stars", part="all"), are_numbers=True) == (["stars"], "regression")
    assert classes_in(DataSource(stars, label="name", part="all")) == (["1", "2", "3"], None)
    assert classes_in(DataSource(stars, label="rare", part="all"))[0] == [f"LABEL_{n}" for n in range(4)]


def test_what_is_found_in_the_data_is_printed_before_the_training(bert, tmp_path, capsys, caplog):
    class Stop(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            raise KeyboardInterrupt

    shown = FAST | {"progress": True, "callbacks": [Stop()]}
    number = {"+": 3, "-": 0}
    forms = {
        "one of": (reviews(), [], "task: one of 2 classes: + (20), - (20)"),
        "empty": (
            [row | {"label": number[row["label"]]} for row in reviews(8)],
            ["6 training rows are very few, have 20 or more"],
            "task: one of 4 classes: LABEL_0 (4), LABEL_3 (4), LABEL_1 (0), LABEL_2 (0)\n"
            "no row has the class LABEL_1, LABEL_2",
        ),
        "many": (
            [row | {"label": f"{n % 7} {row['label']}"} for n, row in enumerate(reviews(57))],
            ["46 training rows are very few, have 70"],
            "task: one of 14 classes: from ",
        ),
        "numbers": (
            [row | {"label": n / 4} for n, row in enumerate(reviews())],
            [],
            "task: regression, of numbers from 0 to 9.75",
        ),
        "any of": (
            [row | {"label": ["a"] if n % 4 else ["a", "b"]} for n, row in enumerate(reviews())],
            [],
            "task: any of 2 classes: a (40), b (10)",
        ),
        "tags": (
            [{"tokens": row["text"].split(), "tags": ["O", "XY"[n % 2], "O"]} for n, row in enumerate(reviews())],
            [],
            "task: one of 3 classes for each word: O (80), X (20), Y (20)",
        ),
    }
    for name, (rows, notes, task) in forms.items():
        caplog.clear()
        with pytest.raises(KeyboardInterrupt):
            finetune(bert, rows, tmp_path / name, **shown)
        lines = capsys.readouterr().out
        held_out = max(1, len(rows) // 10)
        assert f"data: {len(rows) - 2 * held_out} rows, a random part for training\n" in lines
        assert f"data: {held_out} rows, a random part for test\n" in lines and "labels: column " in lines
        assert task in lines, lines
        few = [message for message in caplog.messages if "very few" in message]
        assert len(few) == len(notes) and all(map(str.startswith, few, notes))


def test_a_log_gets_one_line_for_each_epoch(bert, tmp_path, capsys):
    """Where stderr is no terminal: with the losses, the accuracy and the time left; and none with
    progress=False."""
    shown = FAST | {"progress": True, "num_members": 2}
    finetune(bert, reviews(), tmp_path / "hydra", **shown)
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if line.startswith(("epoch", "step"))]
    number = r"\d\.?\d*"
    measured = rf"loss {number}, validation loss {number}, validation accuracy \d+\.\d%"
    assert re.fullmatch(rf"epoch 1 of 2, {measured}, \d+ seconds? left", lines[0]), lines
    assert re.fullmatch(rf"epoch 2 of 2, {measured}", lines[1]) and len(lines) == 2
    finetune(bert, reviews(), tmp_path / "steps", max_steps=3, eval_strategy="no", save_strategy="no", **shown | KEEP)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("epoch", "step"))]
    assert re.fullmatch(rf"step 3 of 3, loss {number}", line)
    finetune(bert, reviews(), tmp_path / "silent", **shown | {"progress": False, "max_steps": 1})
    captured = capsys.readouterr()
    assert not captured.out and "epoch" not in captured.err


@pytest.fixture
def clock(monkeypatch):
    """Let each epoch take a second: the callback looks at the clock when it starts, and once an
    epoch."""
    seconds = itertools.count()
    monkeypatch.setattr(epoch_lines, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


def test_the_lines_of_several_runs_name_their_run_and_the_time_that_all_still_need(bert, tmp_path, capsys, clock):
    several = {"progress": True, "num_members": 1, "runs": 2, "batch_size": 32}
    finetune(bert, reviews(), tmp_path / "hydra", **FAST | several)
    lines = [line.split(", ") for line in capsys.readouterr().err.splitlines() if "epoch" in line]
    assert [line[:2] for line in lines] == [
        [f"run {run} of 2", f"epoch {epoch} of 2"] for run in (1, 2) for epoch in (1, 2)
    ]
    assert [line[-1] for line in lines[:-1]] == ["3 seconds left", "2 seconds left", "1 second left"]
    assert "left" not in lines[-1][-1]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", list)
    for report_to in ("wandb", ["wandb"]):
        with pytest.raises(ImportError, match="report_to is 'wandb', which is not installed: pip install wandb"):
            finetune("no-model", "no-data", tmp_path / "hydra", report_to=report_to)
    assert not (tmp_path / "hydra").exists()
    for known in (None, "none", "all", ["all"]):
        trackers.check_can_report_to(known)


def test_a_training_is_logged_for_tensorboard_beside_the_model(bert, tmp_path, monkeypatch):
    """Its checkpoints, where Trainer would log, are removed."""
    seen = []

    class Board(TrainerCallback):
        def __init__(self):
            seen.append(os.environ["TENSORBOARD_LOGGING_DIR"])

    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard"])
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Board)
    finetune(bert, reviews(), tmp_path / "hydra", report_to=["tensorboard"], max_steps=1, **FAST)
    assert seen == [str(tmp_path / "hydra" / "runs")] and "TENSORBOARD_LOGGING_DIR" not in os.environ
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "elsewhere")
    finetune(bert, reviews(), tmp_path / "other", report_to=["tensorboard"], max_steps=1, **FAST)
    assert seen[1] == "elsewhere" == os.environ["TENSORBOARD_LOGGING_DIR"]


def test_a_model_remembers_the_columns_it_was_finetuned_on(bert, tmp_path):
    """Two columns of texts and two of labels fit: what was named once need not be named again."""
    rows = [
        {"title": "a film", "body": row["text"], "kind": row["label"], "label": "x" * (n % 3)}
        for n, row in enumerate(reviews(80))
    ]
    frame = pandas.DataFrame(rows)
    named = {"column": "body", "label": "kind"}
    finetune(bert, frame, tmp_path / "hydra", max_steps=1, **named, **FAST)
    hydra = AutoHydra.from_pretrained(tmp_path / "hydra")
    expected = load_data(frame, hydra, part="validation", **named)
    found = load_data(frame, hydra, part="validation")
    assert (found.columns, found.label) == (("body",), "kind")
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in expected]
    assert found.labels == expected.labels
    hydra.calibrate(frame, target={"coverage": 0.9})
    assert evaluate_uncertainty(hydra, frame).models["HydraBertForSequenceClassification"]["data"]["num_samples"] == 80
    predict_data(hydra, frame, tmp_path / "answers.csv")
    answered = pandas.read_csv(tmp_path / "answers.csv")["prediction"].tolist()
    assert answered == HydraPredictor(hydra)({"body": [row["body"] for row in rows]})["label"]
    # Other names, and data without these columns
    titles = load_data(frame, hydra, column="title")
    assert titles.columns == ("title",) and titles.label == "kind"
    assert load_data([{"text": "good", "label": "+"}], hydra).columns == ("text",)
    renamed = frame.rename(columns={"body": "review", "kind": "sign"})
    for measure in (hydra.calibrate, partial(evaluate_uncertainty, hydra)):
        with pytest.raises(ValueError, match="has the class '', which the model does not know"):
            measure(renamed)
        measure(renamed, column="review", label="sign")
        with pytest.raises(
            ValueError, match=r"column is for a name, file, folder or DataFrame, .* load_data\(data, model"
        ):
            measure([{"text": "good"}], column="text")


def test_images_with_splits_of_their_own_are_changed_in_training_only(tmp_path):
    vit = save_vit(tmp_path / "vit")
    splits = {"train": picture_rows(18), "validation": picture_rows(6, seed=1), "test": picture_rows(9, seed=2)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "pictures")
    result = finetune(vit, tmp_path / "pictures", tmp_path / "hydra", num_members=2, **FAST)
    assert (len(result.train), len(result.validation), len(result.test)) == (18, 6, 9)
    assert result.train.change is None and result.model.num_members == 2


TASKS = {
    "regression": lambda index, text: {"text": text, "label": 0.5 * index},
    "multi_label_classification": lambda index, text: {"text": text, "label": ["x"] * (index % 2) + ["y"]},
    "token_classification": lambda index, text: {"tokens": text.split(), "tags": ["O", "BI"[index % 2] + "-X", "O"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_task_is_that_of_the_labels(task, bert, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(TASKS[task](index, row["text"])) for index, row in enumerate(reviews())))
    result = finetune(bert, path, tmp_path / "hydra", num_members=2, **FAST)
    assert task_name(result.model) == task and "eval_loss" in result.metrics
    assert ("eval_accuracy" in result.metrics) == (task == "token_classification")  # chooses the epoch


@pytest.mark.slow
def test_class_weights_make_classes_count_as_if_they_were_equally_frequent(bert, tmp_path):
    """Nothing tells the classes apart here, so that a model learns how frequent they are: 4 of 40,
    or one half."""
    rows = [{"text": "a film", "label": "rare" if index % 10 == 0 else "frequent"} for index in range(40)]
    data = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list(rows)))
    shares = {}
    for weights in (None, "balanced"):
        options = FAST | {"epochs": 6, "classifier_learning_rate": 0.02, "class_weights": weights}
        model = finetune(bert, data, tmp_path / str(weights), num_members=2, **options).model
        with torch.no_grad():
            shares[weights] = model(torch.tensor([[2, 5, 6, 3]])).logits.softmax(-1)[0, model.config.label2id["rare"]]
    assert shares[None] < 0.25 and 0.4 < shares["balanced"] < 0.6


def test_a_model_that_has_learned_nothing_is_told(bert, tmp_path, caplog):
    rows = reviews(80)
    for row in rows[::5]:
        row["label"] = "+"
    still = FAST | {"learning_rate": 0.0, "epochs": 1, "classifier_learning_rate": None}
    result = finetune(bert, rows, tmp_path / "hydra", **still)
    accuracy = result.metrics["eval_accuracy"]
    share = max(result.validation.labels.count(each) for each in (0, 1)) / 8
    assert bool(result.warnings) == (accuracy <= share)
    [sentence] = no_better_than_most_frequent(0.6, [0, 0, 0, 1, 1], result.model.config)
    assert "the validation accuracy is 60.0%, and always predicting '+' has 60.0%" in sentence or "'-'" in sentence
    assert no_better_than_most_frequent(0.61, [0, 0, 0, 1, 1], result.model.config) == []


def test_a_folder_that_holds_something_else_is_left_alone(bert, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a training"):
        finetune(bert, "missing.csv", tmp_path, **FAST)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "tuned/member-0").mkdir(parents=True)
    (tmp_path / "tuned/finetune.json").write_text("{}")
    with pytest.raises(ValueError, match="holds something else than a training"):
        finetune(bert, "missing.csv", tmp_path / "tuned", **FAST)
