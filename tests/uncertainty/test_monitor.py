"""A monitor counts what a calibrated model does, and says whether its promises are kept."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.monitoring import Case, Pool, draw_run, repetitions
from hydra_transformers.uncertainty import Monitor, calibrate, predict_decisions
from hydra_transformers.uncertainty.monitor import MOST_BLOCKS, validation_summary
from hydra_transformers.uncertainty.task import Outcomes
from tests import tiny_tags
from tests.uncertainty.test_tasks import NAMES, all_tasks, batch_of, calibrated, data_of, hydra_of


SUMMARY = {"rows": 400, "answered": 300, "risk": 0.05, "wrong": [9, 300], "missed": [38, 400]}
SUMMARY |= {"cuts": [0.25, 0.5, 0.75], "scores": [100, 100, 100, 100]}
SETTINGS = {"task": "", "alpha": 0.1, "threshold": 0.75, "validation": SUMMARY, "digests": {"weights": ["1"]}}


def outcomes(scores, wrong=None, missed=None):
    scores = torch.as_tensor(scores)
    wrong, missed = (None if part is None else torch.as_tensor(part).bool() for part in (wrong, missed))
    answered = scores <= 0.75
    return Outcomes(scores, answered, None if wrong is None else wrong[answered], missed)


def counts(monitor, name):
    return np.sum(monitor.streams[monitor.stream][name]["blocks"], axis=0).tolist()


@all_tasks
def test_every_task_is_watched_with_and_without_labels(name):
    hydra = calibrated(name).model.eval()
    rows = data_of(name, seed=3)
    with torch.no_grad():
        output = hydra(**batch_of(name, seed=3))
    monitor = Monitor.of(hydra)
    if name == "token_classification":
        with pytest.raises(ValueError, match="which tokens are words"):
            monitor.update(output)
        monitor.update(
            [{"entities": [], "detector": "msp", "threshold": monitor.settings["threshold"]}]
        )  # a text without any
        assert monitor.state()["inputs"].rows == 0
    else:
        monitor.update(output)
        state = monitor.state()
        assert state["answered"].rows == state["inputs"].rows == len(rows)
        assert state["answered"].rate == output.abstain.double().mean()
    monitor.update(output, torch.stack([row["labels"] for row in rows]))
    state = monitor.state()
    has_sets = name not in ("token_classification", "reward")
    assert ("coverage" in state) == has_sets and "risk" not in state  # the target was a coverage
    assert not has_sets or state["coverage"].rows == len(rows)
    assert all(one.status in ("not known yet", "kept so far") for one in state.values()), str(monitor)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "regression"])
def test_errors_are_counted_as_the_task_defines_them(name):
    hydra = calibrate(hydra_of(name), data_of(name), target={"risk": 0.8}, confidence=0.5).model.eval()
    rows = data_of(name, seed=3)
    monitor = Monitor.of(hydra)
    with torch.no_grad():
        output = hydra(**batch_of(name, seed=3))
    labels = torch.stack([row["labels"] for row in rows])
    monitor.update(output, labels)
    right, wrong = counts(monitor, "risk")
    if name == "token_classification":  # one entity of each text
        assert 0 < right + wrong <= len(rows)
        return
    assert right + wrong == int((~output.abstain).sum())
    if name == "single_label_classification":
        assert wrong == int((output.logits.argmax(dim=-1) != labels)[~output.abstain].sum())
        missed = ~output.prediction_set.gather(1, labels.unsqueeze(1)).squeeze(1)
        assert counts(monitor, "coverage") == [int((~missed).sum()), int(missed.sum())]
    elif name == "reward":
        assert wrong == int((labels.flatten() != 1)[~output.abstain].sum())


@pytest.mark.parametrize("name", ["single_label_classification", "multi_label_classification", "token_classification"])
def test_rows_of_predict_count_like_outputs(name):
    hydra = calibrated(name).model.eval()
    texts = [" ".join(tiny_tags.PIECES[5 + (row + place) % 8] for place in range(4)) for row in range(12)]
    rows = predict_decisions(hydra, texts, tiny_tags.tokenizer())
    monitor = Monitor.of(hydra)
    monitor.update(rows)
    units = [row for row in rows if row.get("entities", [row])]
    assert monitor.state()["inputs"].rows == len(units)
    if name == "token_classification":
        return
    inputs = tiny_tags.tokenizer()(texts, return_tensors="pt", padding=True)
    other = Monitor.of(hydra)
    with torch.no_grad():
        other.update(hydra(**{key: inputs[key] for key in ("input_ids", "attention_mask")}))
    assert list(other.streams.values()) == list(monitor.streams.values())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reward"])
def test_rows_of_a_model_without_a_threshold_count_and_those_of_another_do_not(name):
    hydra = calibrate(hydra_of(name), data_of(name)).model.eval()
    texts = [" ".join(tiny_tags.PIECES[5:9])] * 4
    monitor = Monitor.of(hydra)
    monitor.update(predict_decisions(hydra, texts, tiny_tags.tokenizer()))
    assert monitor.state()["inputs"].rows == 4 and "answered" not in monitor.state()
    with hydra.uncalibrated():
        rows = predict_decisions(hydra, texts, tiny_tags.tokenizer())
    for other in (rows, predict_decisions(calibrated(name).model.eval(), texts, tiny_tags.tokenizer())):
        with pytest.raises(ValueError, match="not of the calibrated model that is watched"):
            monitor.update(other)
    assert monitor.state()["inputs"].rows == 4


@pytest.mark.parametrize("name", ["single_label_classification", "multi_label_classification", "regression"])
def test_a_prediction_that_is_not_a_number_is_not_an_answer_and_its_interval_misses(name):
    hydra = calibrated(name).model.eval()
    rows = data_of(name, seed=3)
    with torch.no_grad():
        outputs = hydra.decision(hydra(**batch_of(name)).member_logits * math.nan)
        monitor = Monitor.of(hydra)
    monitor.update(outputs, torch.stack([row["labels"] for row in rows]))
    assert outputs.abstain.all() and monitor.state()["coverage"].rows == len(rows)
    assert monitor.state()["coverage"].rate == (name == "regression")  # sets have all labels


def test_evidence_is_the_average_capital_of_bets_that_start_with_each_block():
    case = Case("", rows=60, risk=0.2, error=0.6, labelled=0.5, ties=True, batch=50)
    simulated = [draw_run(case, Pool(), 1000, number) for number in range(12)]  # which bets row by row
    for run, alarms in zip(simulated, repetitions(case, Pool(), 1000, range(12)), strict=True):
        if run is None:
            continue
        monitor = Monitor(run.settings)
        noticed = run.alarms
        for end in range(50, 1001, 50):
            parts = (run.scores, run.bins["risk"], run.bins["coverage"], run.bins["answered"] == 0)
            scores, wrong, missed, answered = (torch.tensor(part[end - 50 : end]) for part in parts)
            monitor.count(Outcomes(scores, answered))
            monitor.count(Outcomes(scores, answered, wrong[wrong >= 0] == 1, missed[missed >= 0] == 1))
            for name, state in monitor.state().items():
                if state.status == "broken":
                    noticed.setdefault(name, end)
        assert noticed == alarms and "risk" in alarms


def test_a_broken_promise_is_noticed_after_a_long_good_time_and_stays_broken():
    random = np.random.default_rng(0)
    monitor = Monitor(SETTINGS)
    for rate, rows in ((0.02, 20_000), (0.2, 600), (0.02, 5_000)):
        for _ in range(rows // 100):
            monitor.count(outcomes(np.zeros(100), random.random(100) < rate, random.random(100) < 0.08))
        status = monitor.state()["risk"].status
        assert status == ("kept so far" if rows == 20_000 else "broken")
    assert monitor.state()["coverage"].status == "kept so far"
    assert monitor.promises["risk"].limits > 0.05  # 9 of 300 may be more than 5 %
    assert len(monitor.streams[monitor.stream]["risk"]["blocks"]) <= MOST_BLOCKS
    assert "Wrong answers: broken." in str(monitor) and "at most 5 % promised" in str(monitor)


def test_kept_is_what_was_promised_not_what_chance_allows():
    random = np.random.default_rng(0)
    monitor = Monitor(SETTINGS)
    for _ in range(400):
        monitor.count(outcomes(np.zeros(100), random.random(100) < 0.058, random.random(100) < 0.12))
    always = Monitor(SETTINGS | {"validation": SUMMARY | {"answered": 400}})  # on the validation rows
    always.count(outcomes(np.zeros(2000)))
    assert always.state()["answered"].status == "kept so far"
    for name, promised in (("risk", 0.05), ("coverage", 0.1)):  # 9 of 300 and 38 of 400 validation rows allow for more
        state = monitor.state()[name]
        assert promised < state.interval[0] and state.interval[1] < monitor.promises[name].limits
        assert state.status == "not known yet"


def test_other_inputs_are_noticed_without_labels():
    random = np.random.default_rng(0)
    monitor = Monitor(SETTINGS)
    monitor.count(outcomes(random.random(1000)))
    assert {one.status for one in monitor.state().values()} == {"not known yet"}
    monitor.count(outcomes(0.5 + random.random(400)))
    assert monitor.state()["inputs"].status == monitor.state()["answered"].status == "broken"
    without = Monitor(SETTINGS)
    without.count(outcomes([math.nan] * 200))  # a score that is not a number is less sure than any
    assert without.state()["inputs"].status == "broken"
    summary = validation_summary(outcomes([0.1, 0.2]), torch.zeros(0), None)  # no other rows to compare
    assert summary["scores"] == [0, 2]


@pytest.mark.parametrize("shift", [-1e-7, 0.0, 1e-7])
@pytest.mark.parametrize("tied", [0.0, 0.25, 1.0])
def test_a_score_of_many_rows_may_be_rounded_otherwise_in_use(tied, shift):
    scores = np.random.default_rng(0).random((2, 3000))
    is_tied = np.random.default_rng(1).random((2, 3000)) < 0.3
    scores = torch.tensor(np.where(is_tied, [[tied], [tied + shift]], scores))
    summary = validation_summary(outcomes(scores[0, ::2]), scores[0, 1::2], None)
    monitor = Monitor(SETTINGS | {"validation": SUMMARY | {name: summary[name] for name in ("cuts", "scores")}})
    monitor.count(outcomes(scores[1]))
    assert monitor.state()["inputs"].status == "not known yet"


def test_a_state_is_saved_resumed_and_put_together(tmp_path):
    random = np.random.default_rng(0)
    scores = random.random((6, 70))
    whole = Monitor(SETTINGS)
    resumed = Monitor(SETTINGS)
    for place, part in enumerate(scores):
        whole.count(outcomes(part))
        resumed = Monitor(SETTINGS).load(tmp_path / "monitor.json") if place else resumed
        resumed.count(outcomes(part))
        resumed.save(tmp_path / "monitor.json")
    assert list(whole.streams.values()) == list(resumed.streams.values()) and len(resumed.streams) == 1
    (tmp_path / "copy.json").write_bytes((tmp_path / "monitor.json").read_bytes())
    other = Monitor(SETTINGS)
    other.count(outcomes(scores[0]))
    other.save(tmp_path / "other.json")
    both = Monitor.read(*(tmp_path / name for name in ("copy.json", "other.json", "monitor.json")))
    assert both.state()["inputs"].rows == 7 * 70 and len(both.streams) == 2  # the copy's rows once
    means = np.mean([Monitor.read(tmp_path / name).state()["inputs"].e_value for name in ("copy.json", "other.json")])
    assert both.state()["inputs"].e_value <= means + 1e-12
    saved = json.loads((tmp_path / "monitor.json").read_text())
    for content in ({}, saved | {"version": 2}):
        (tmp_path / "wrong.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="not the state of a monitor"):
            Monitor.read(tmp_path / "wrong.json")
    with pytest.raises(ValueError, match="level is 5: pass a share"):
        Monitor(SETTINGS, level=5)
    with pytest.raises(ValueError, match="watches another calibration"):
        Monitor(SETTINGS | {"alpha": 0.2}).load(tmp_path / "monitor.json")
    assert len(json.loads((tmp_path / "monitor.json").read_text())["streams"]) == 1


def changed(content, place, value):
    """The content with one value replaced; place: the names on the way to it."""
    *way, last = place
    for name in way:
        content = content[name]
    content[last] = value


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("level",), math.nan, "level is nan, and should be a share"),
        (("streams",), [], r"streams is \[\], and should hold counts"),
        (("stream",), 3, "stream is 3, and should be a name"),
        (("batches",), {}, "batches is {}, and should be a list of names"),
        (("streams", "one"), 3, "streams.one is 3, and should hold counts"),
        (("streams", "one", "risk", "blocks", 0), [-3, 53], r"streams.one.risk.blocks\[0\] is \[-3, 53\]"),
        (("streams", "one", "risk", "blocks", 0), [math.nan, 3], r"blocks\[0\] is \[nan, 3\]"),
        (("streams", "one", "risk", "blocks", 0), [1, 2], r"blocks\[0\] has 3 rows, and should have 50"),
        (("streams", "one", "risk", "blocks", 1), [1, 2, 3], r"blocks\[1\] is \[1, 2, 3\]"),
        (("streams", "one", "risk", "blocks"), [[1, 2, 3]], "blocks of streams.one.risk should have 2 counts"),
        (("streams", "one", "risk", "size"), 0, "size is 0, and should be a multiple of 50"),
        (("streams", "one", "risk", "peak"), math.nan, "peak is nan, and should be 0 or more"),
        (("streams", "one", "risk"), {"blocks": []}, "should have size, blocks and peak"),
        (("streams", "one", "joy"), {"size": 50, "blocks": [], "peak": 0}, "streams.one.joy is of no promise"),
        (("streams", "one", "inputs", "pool"), [1, 2], "pool is .* and should be 4 counts"),
        (("settings",), {}, "settings has no validation"),
        (("settings", "threshold"), "low", "settings.threshold is 'low'"),
        (("settings", "alpha"), 2, "settings.alpha is 2, and should be a share"),
        (("settings", "validation", "risk"), math.nan, "validation.risk is nan, and should be a share"),
        (("settings", "validation", "answered"), 500, "500 answered of 400 rows"),
        (("settings", "validation", "wrong"), [9, 3], r"validation.wrong is \[9, 3\]"),
        (("settings", "validation", "cuts"), [1, 0, 2], "validation.cuts is .* numbers in order"),
        (("settings", "validation", "scores"), [1, 2, 3, -4], "validation.scores is .* 4 counts"),
    ],
    ids=str,
)
def test_a_damaged_file_is_refused_with_a_sentence(place, value, sentence, tmp_path):
    monitor = Monitor(SETTINGS)
    monitor.stream = "one"
    monitor.count(outcomes(np.zeros(60), np.zeros(60), np.zeros(60)))
    monitor.count(outcomes(np.zeros(60)))
    monitor.save(tmp_path / "monitor.json")
    Monitor.read(tmp_path / "monitor.json")  # as it is
    saved = json.loads((tmp_path / "monitor.json").read_text())
    changed(saved, place, value)
    (tmp_path / "monitor.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=f"monitor.json is damaged: .*{sentence}"):
        Monitor.read(tmp_path / "monitor.json")


def test_rows_that_were_chosen_otherwise_count_for_no_promise(tmp_path):
    monitor = Monitor(SETTINGS)
    checked = outcomes(np.zeros(200), np.ones(200), np.ones(200))
    monitor.count(checked, "other")
    assert not {"risk", "coverage"} & monitor.streams[monitor.stream].keys()
    assert "Chosen otherwise: 100 % of 200 checked rows are wrong, in no promise." in str(monitor)
    monitor.count(outcomes(np.zeros(60), np.arange(60) < 3, np.ones(60)), "answered")
    assert counts(monitor, "risk") == [57, 3] and "coverage" not in monitor.streams[monitor.stream]
    monitor.save(tmp_path / "monitor.json")
    again = Monitor.read(tmp_path / "monitor.json", tmp_path / "monitor.json")
    assert str(again) == str(monitor) and again.state()["risk"].rows == 60
    hydra = calibrated("single_label_classification").model.eval()
    with torch.no_grad():
        output = hydra(**batch_of("single_label_classification"))
    labels = torch.stack([row["labels"] for row in data_of("single_label_classification", seed=1)])
    with pytest.raises(ValueError, match="chosen is 'best': pass one of random, answered, other"):
        Monitor.of(hydra).update(output, labels, chosen="best")
    watched = Monitor.of(hydra)
    watched.update(output, labels, chosen="other")
    assert watched.state()["coverage"].rows == 0 and counts(watched, "other")[1] > 0


def test_what_is_broken_stays_broken_when_files_are_put_together(tmp_path):
    random = np.random.default_rng(0)
    bad = Monitor(SETTINGS)
    good = Monitor(SETTINGS)
    for monitor, rate, rows in ((bad, 0.3, 600), (bad, 0.01, 6000), (good, 0.01, 100)):
        monitor.count(outcomes(np.zeros(rows), random.random(rows) < rate, np.zeros(rows)))
    assert bad.promises["risk"].e_value(bad.streams[bad.stream]["risk"]) < 1 < bad.alarm  # after a long good time
    bad.save(tmp_path / "bad.json")
    good.save(tmp_path / "good.json")
    both = Monitor.read(tmp_path / "bad.json", tmp_path / "good.json")
    assert bad.state()["risk"].status == both.state()["risk"].status == "broken"


def test_rows_of_two_processes_are_never_lost(tmp_path):
    scores = np.random.default_rng(0).random((4, 60))
    file = tmp_path / "monitor.json"
    first = Monitor(SETTINGS)
    first.count(outcomes(scores[0]))
    first.save(file)
    second = Monitor(SETTINGS).load(file)
    for monitor, part in ((first, scores[1]), (second, scores[2])):
        monitor.count(outcomes(part))
    first.save(file)
    for other in (second, Monitor(SETTINGS)):
        with pytest.raises(ValueError, match="written by another monitor or process"):
            other.save(file)
    second.save(tmp_path / "second.json")
    assert Monitor.read(file).state()["inputs"].rows == 120
    with pytest.raises(ValueError, match="both go on from the same rows"):
        Monitor.read(file, tmp_path / "second.json")
    (tmp_path / "day.json").write_bytes(file.read_bytes())  # an earlier state of the same stream
    for _ in range(150):  # until blocks are joined
        first.count(outcomes(scores[3]))
    first.save(file)
    for files in ((file, tmp_path / "day.json"), (tmp_path / "day.json", file)):
        assert Monitor.read(*files).state()["inputs"].rows == 152 * 60


def test_a_monitor_is_of_one_calibration():
    name = "single_label_classification"
    hydra = calibrated(name).model.eval()
    monitor = Monitor.of(hydra)
    calibrate(hydra, data_of(name, seed=9), target={"coverage": 0.3})
    with torch.no_grad():
        output = hydra(**batch_of(name))
    for other in (monitor, Monitor(monitor.decision_settings)):
        with pytest.raises(ValueError, match="not of the model's calibration"):
            other.update(output)


def test_a_named_batch_counts_once_and_labels_by_themselves():
    hydra = calibrated("single_label_classification").model.eval()
    with torch.no_grad():
        output = hydra(**batch_of("single_label_classification"))
    labels = torch.stack([row["labels"] for row in data_of("single_label_classification", seed=1)])
    monitor = Monitor.of(hydra)
    for _ in range(2):
        monitor.update(output, batch="monday labels")
        monitor.update(output, labels, batch="monday")
    assert [state.rows for state in monitor.state().values()] == [len(labels)] * 3


def test_what_is_not_calibrated_is_refused():
    with pytest.raises(ValueError, match="not calibrated"):
        Monitor.of(hydra_of("regression"))
    hydra = calibrated("single_label_classification").model.eval()
    monitor = Monitor.of(hydra)
    with pytest.raises(ValueError, match="has no abstain"):
        monitor.update(hydra.train()(**batch_of("single_label_classification")))
    hydra.decision.settings = replace(hydra.decision.settings, validation=None)
    with pytest.raises(ValueError, match="call calibrate"):
        Monitor.of(hydra.eval())


@pytest.mark.parametrize(
    "case",
    [
        Case("tiny", rows=60, risk=0.2),
        Case("ties, few labels", rows=300, risk=0.1, ties=True, labelled=0.2),
        Case("no confidence", rows=300, confidence=None),
    ],
    ids=lambda case: case.name,
)
def test_rows_like_the_validation_rows_raise_no_alarm(case):
    runs = repetitions(case, Pool(), 1000, range(40))
    ours = [set(run) & {"risk", "coverage", "answered", "inputs"} for run in runs if run is not None]
    assert len(ours) >= 15 and sum(map(bool, ours)) <= 2  # of 40 at a level of 5 %


@pytest.mark.slow
def test_the_interval_holds_the_rate_at_all_times():
    misses = 0
    for seed in range(60):
        monitor = Monitor(SETTINGS)
        wrong = np.random.default_rng(seed).random(1000) < 0.04
        for part in np.split(wrong, 20):
            monitor.count(outcomes(np.zeros(50), part, np.zeros(50)))
            low, high = monitor.state()["risk"].interval
            if not low <= 0.04 <= high:
                misses += 1
                break
    assert misses <= 1


@pytest.mark.parametrize("name", ["single_label_classification", "reward"])
def test_labels_that_are_not_of_the_model_are_not_counted_as_errors(name):
    hydra = calibrated(name, **({"alpha": None} if name != "reward" else {})).model.eval()
    with torch.no_grad():
        output = hydra(**batch_of(name, seed=3))
    labels = torch.stack([row["labels"] for row in data_of(name, seed=3)])
    for wrong in (torch.full_like(labels, -100), labels[:-1], torch.stack([labels, labels])):
        with pytest.raises(ValueError, match=r"labels has|of shape"):
            Monitor.of(hydra).update(output, wrong)


def test_a_file_of_version_0_3_is_continued(tmp_path):
    hydra = calibrated(NAMES[0]).model.eval()
    monitor = Monitor.of(hydra)
    with torch.no_grad():
        monitor.update(hydra(**batch_of(NAMES[0])))
    file = tmp_path / "monitor.json"
    monitor.save(file)
    saved = json.loads(file.read_text())
    # A folder that 0.3 calibrated has no digest of its settings, and neither has the monitor's file.
    del saved["settings"]["digests"]["settings"]
    file.write_text(json.dumps(saved))
    digests = replace(hydra.decision.settings.digests, settings=None)
    hydra.decision.settings = replace(hydra.decision.settings, digests=digests)
    resumed = Monitor.of(hydra, file=file)
    with torch.no_grad():
        resumed.update(hydra(**batch_of(NAMES[0])))
    assert resumed.state()["inputs"].rows == 2 * monitor.state()["inputs"].rows
    resumed.save(file)
    assert Monitor.of(hydra, file=file).state()["inputs"].rows == resumed.state()["inputs"].rows


def test_a_folder_and_a_protected_file_are_refused(tmp_path, monkeypatch):
    hydra = calibrated(NAMES[0]).model.eval()
    with pytest.raises(ValueError, match=r"a folder: pass a file, such as .*monitor\.json"):
        Monitor.of(hydra, file=tmp_path)
    file = tmp_path / "monitor.json"
    monitor = Monitor.of(hydra)
    monitor.save(file)
    before = file.read_text()
    file.chmod(0o444)
    monkeypatch.setattr("os.access", lambda path, mode: path != file)  # root may write it all the same
    for attempt in (lambda: Monitor.of(hydra, file=file), lambda: monitor.save(file)):
        with pytest.raises(ValueError, match="is protected from writing: change its permissions"):
            attempt()
    assert file.read_text() == before
