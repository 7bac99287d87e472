"""A long run is safe: checkpoints, the marked fast mode, and nothing that goes wrong silently."""

import copy
import json
import signal
import sys
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hydra_transformers import HydraViTModel
from hydra_transformers._io import progress
from hydra_transformers.pruning import Circuit, extract_circuit, extraction, taylor_prune
from hydra_transformers.pruning.ablation import Tower
from hydra_transformers.pruning.extraction import GreedySearch
from tests.processes import exit_code, start
from tests.pruning import worker
from tests.pruning.backbones import CLASSES, class_prompts, family, images, vit
from tests.pruning.reference import judge, restore_slice, zero_slice


def extract(model, id_batches, ood_batches, objective="avg", budget=5, **arguments) -> Circuit:
    return extract_circuit(model, id_batches, ood_batches, objective, budget=budget, **arguments)


class Stopped(Exception):
    pass


def stop_at_evaluation(monkeypatch, number: int) -> None:
    evaluate, calls = GreedySearch.evaluate, []

    def stopping(self, candidates):
        calls.append(candidates)
        if len(calls) == number:
            raise Stopped
        return evaluate(self, candidates)

    monkeypatch.setattr(GreedySearch, "evaluate", stopping)


@pytest.mark.parametrize(("mode", "stopped_at"), [({}, 1), ({}, 4), ({"mode": "shortlist"}, 4)])
def test_a_stopped_run_resumes_and_ends_with_the_same_circuit(tmp_path, monkeypatch, mode, stopped_at):
    monkeypatch.setattr(extraction, "LEAST_SHORTLIST", 3)
    monkeypatch.setattr(extraction, "CHECK_EVERY", 3)
    model, id_batches, ood_batches, _ = family("vit")
    expected = extract(model, id_batches, ood_batches, **mode)
    with monkeypatch.context() as patched:
        stop_at_evaluation(patched, stopped_at)
        with pytest.raises(Stopped):
            extract(model, id_batches, ood_batches, checkpoint=tmp_path / "run.json", **mode)
    evaluations = []
    evaluate = GreedySearch.evaluate
    monkeypatch.setattr(
        GreedySearch, "evaluate", lambda self, heads: evaluations.append(heads) or evaluate(self, heads)
    )
    assert extract(model, id_batches, ood_batches, checkpoint=tmp_path / "run.json", **mode) == expected
    assert len(evaluations) == 5 - (stopped_at - 1)


@pytest.mark.slow
def test_a_killed_process_leaves_a_checkpoint_that_another_finishes(tmp_path):
    path = tmp_path / "run.json"
    log = tmp_path / "log"
    assert exit_code(start(log, worker.kill, path, 3)) == -signal.SIGKILL, log.read_text()
    assert len(json.loads(path.read_text())["circuit"]["ranking"]) == 2
    model, id_batches, ood_batches, _ = family("vit")
    resumed = extract(model, id_batches, ood_batches, checkpoint=path)
    assert resumed == extract(model, id_batches, ood_batches)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_end_with_the_circuit_and_the_analyses_of_one(processes, tmp_path):
    logs = [tmp_path / f"{rank}.log" for rank in range(processes)]
    workers = [start(log, worker.join, tmp_path, rank, processes) for rank, log in enumerate(logs)]
    assert [exit_code(each) for each in workers] == [0] * processes, "\n".join(log.read_text() for log in logs)
    for name in ("vit", "clip"):
        model, id_batches, ood_batches, prompts = family(name, batch=worker.BATCH)
        expected = extract(model, id_batches, ood_batches, budget=3, class_prompts=prompts)
        assert [Circuit.load(tmp_path / f"{name}-{rank}.json") for rank in range(processes)] == [expected] * processes
        checkpoint = json.loads((tmp_path / f"{name}-checkpoint.json").read_text())
        assert Circuit.from_dict(checkpoint["circuit"]) == expected
    model, id_batches, ood_batches, _ = family("vit")
    expected = json.loads(json.dumps(worker.analyses(model, id_batches, ood_batches)))
    for rank in range(processes):
        assert json.loads((tmp_path / f"analyses-{rank}.json").read_text()) == expected
        assert "data has no labels" in (tmp_path / f"refusal-{rank}.txt").read_text()
        assert "shuffle" in (tmp_path / f"shuffled-{rank}.txt").read_text()
        assert "its sampler is a SubsetRandomSampler" in (tmp_path / f"subset-{rank}.txt").read_text()
        assert "already split between the processes" in (tmp_path / f"split-{rank}.txt").read_text()
    # Only the first process shows a progress bar.
    assert ["circuit (avg)" in log.read_text() for log in logs] == [True] + [False] * (processes - 1)


def test_a_finished_checkpoint_gives_shorter_and_longer_circuits(tmp_path):
    model, id_batches, ood_batches, _ = family("vit")
    five = extract(model, id_batches, ood_batches, checkpoint=tmp_path / "run.json")
    assert extract(model, id_batches, ood_batches, budget=3, checkpoint=tmp_path / "run.json") == five.first(3)
    six = extract(model, id_batches, ood_batches, budget=6, checkpoint=tmp_path / "run.json")
    assert six == extract(model, id_batches, ood_batches, budget=6)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    model, id_batches, ood_batches, _ = family("vit")
    arguments = {"model": model, "id_batches": id_batches, "ood_batches": ood_batches, "budget": 1}
    path = tmp_path / "run.json"
    extract(**arguments, checkpoint=path)
    config = copy.deepcopy(model.config)
    config.hidden_act = "relu"
    with_relu = type(model)(config).to(model.dtype).eval()
    with_relu.load_state_dict(model.state_dict())
    for change, difference in (
        ({"objective": "ood"}, "other objective"),
        ({"mode": "shortlist"}, "other mode"),
        ({"model": vit(seed=7)}, "other weights"),
        ({"model": copy.deepcopy(model).float()}, "other weights, dtype|other weights.*dtype"),
        ({"model": with_relu}, "other config or class_prompts"),
        ({"id_batches": id_batches[:1]}, "other data"),
        ({"ood_batches": ood_batches[:1]}, "other ood_data"),
    ):
        with pytest.raises(ValueError, match=difference):
            extract(**arguments | change, checkpoint=path)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    model, id_batches, ood_batches, _ = family("vit")
    path = tmp_path / "run.json"
    for content in (b'{"circuit"', b"\x80\xff\x00", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"checkpoint .* cannot be read"):
            extract(model, id_batches, ood_batches, checkpoint=path)
    extract(model, id_batches, ood_batches, budget=1).save(path)
    with pytest.raises(
        ValueError, match=r"run\.json cannot be read as that of an extraction: pass another path, or delete"
    ):
        extract(model, id_batches, ood_batches, checkpoint=path)


def test_the_shortlist_evaluates_few_heads_and_says_how_often_it_agreed(monkeypatch):
    model, id_batches, ood_batches, _ = family("vit")
    monkeypatch.setattr(extraction, "LEAST_SHORTLIST", 3)
    monkeypatch.setattr(extraction, "CHECK_EVERY", 3)
    counts, evaluate = [], GreedySearch.evaluate
    monkeypatch.setattr(
        GreedySearch, "evaluate", lambda self, heads: counts.append(len(heads)) or evaluate(self, heads)
    )
    circuit = extract(model, id_batches, ood_batches, budget=7, mode="shortlist")
    assert counts == [9, 3, 3, 6, 3, 3, 3]
    assert [removal for removal, _ in circuit.checks] == [4, 7]
    assert circuit.mode == "shortlist"
    assert circuit.agreement == sum(agreed for _, agreed in circuit.checks) / 2
    assert circuit.checks[1][1], "a short list of all heads that are left holds the exact choice"


def test_the_shortlist_takes_the_best_of_the_heads_that_last_cost_least(monkeypatch):
    monkeypatch.setattr(extraction, "LEAST_SHORTLIST", 1)
    model, id_batches, ood_batches, _ = family("vit")
    first = extract(model, id_batches, ood_batches, budget=1)
    circuit = extract(model, id_batches, ood_batches, budget=2, mode="shortlist")
    alone = {
        (layer, head): extract_alone(model, id_batches, ood_batches, (layer, head))
        for layer in range(3)
        for head in range(3)
        if (layer, head) != first.ranking[0]
    }
    assert circuit.ranking[1] == max(alone, key=alone.__getitem__)


def extract_alone(model, id_batches, ood_batches, head) -> tuple[float, float]:
    before = zero_slice(model, head)
    score = judge(model, id_batches, ood_batches, "avg")
    restore_slice(model, head, before)
    return score


def test_nan_is_refused_with_the_head_that_causes_it(monkeypatch):
    model, id_batches, ood_batches, _ = family("vit")
    without = Tower._without

    def overflowing(self, outputs, layer, heads):
        ablated = without(self, outputs, layer, heads)
        return torch.stack([ablated[:, row] / (head != 1) * (head != 1) for row, head in enumerate(heads)], dim=1)

    monkeypatch.setattr(Tower, "_without", overflowing)
    with pytest.raises(ValueError, match=r"without head \(0, 1\) the logits on data are NaN"):
        extract(model, id_batches, ood_batches, budget=1)
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(ValueError, match="logits on data are NaN with 0 heads removed"):
        extract(model, id_batches, ood_batches, budget=1)


def test_a_model_at_chance_goes_on_with_one_warning_and_a_mark():
    model, id_batches, ood_batches, _ = family("vit")
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.arange(CLASSES))
    for batch in id_batches:
        batch["labels"] %= CLASSES - 1  # all answers are the last class, which no sample is of
    with pytest.warns(UserWarning, match="at removal 1 no candidate scores better than chance") as warned:
        circuit = extract(model, id_batches, ood_batches, "acc", budget=3)
    assert len(warned) == 1
    assert circuit.chance_from == 1 and len(circuit.ranking) == 3


def test_labels_that_are_missing_or_no_class_indices_are_named():
    model, id_batches, ood_batches, _ = family("vit")
    for batch in id_batches:
        batch["labels"] = batch["labels"].double()
    with pytest.raises(ValueError, match=r"labels of data are torch.float64 of shape \(13,\): pass class indices"):
        extract(model, id_batches, ood_batches)
    for batch in id_batches:
        del batch["labels"]
    with pytest.raises(ValueError, match="data has no labels"):
        extract(model, id_batches, ood_batches, "acc")


def test_data_that_says_nothing_is_refused_or_causes_a_warning():
    model, id_batches, ood_batches, _ = family("vit")
    one_image = [{"pixel_values": images(1, seed=0)}]
    labelled = [{"pixel_values": images(1, seed=0), "labels": torch.tensor([1])}]
    for arguments, problem in (
        ((id_batches, one_image), "ood_data has 1 sample"),
        ((labelled, None, "acc"), "data has 1 sample"),
        (([], ood_batches), "data has no samples"),
        ((id_batches, None, "ood"), "objective 'ood' needs ood_data"),
        (([{"pixels": images(2, 0)}], ood_batches), "data has no pixel_values"),
    ):
        with pytest.raises(ValueError, match=problem):
            extract(model, *arguments)
    with pytest.warns(UserWarning, match="every sample of ood_data is in data too"):
        extract(model, id_batches, [{"pixel_values": batch["pixel_values"]} for batch in id_batches[::-1]], budget=1)


def test_labels_without_a_class_are_refused():
    model, batches, _, _ = family("vit")
    for label in (CLASSES, -100):
        batches[0]["labels"][2] = label
        with pytest.raises(ValueError, match=f"data has the label {label}: the model's classes are 0 to 4"):
            extract(model, batches, None, "acc")
        with pytest.raises(ValueError, match=f"data has the label {label}: the model's classes are 0 to 4"):
            taylor_prune(model, batches, heads_per_layer=2)


def test_bad_arguments_get_one_sentence():
    model, id_batches, ood_batches, _ = family("vit")
    for arguments, sentence in (
        *(({"budget": budget}, f"budget is {budget}: 9 heads compete, so pass 1 to 8") for budget in (0, 9, 20)),
        *(({"budget": budget}, f"budget is {budget!r}: pass a whole number, 1 to 8") for budget in (2.5, "3", True)),
        ({"objective": "auroc"}, "objective is 'auroc': pass one of 'acc', 'ood', 'avg'"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"checkpoint": __file__ + "/run.json"}, "where no file can be written"),
        ({"checkpoint": "."}, "where no file can be written"),
        ({"towers": ("vision",)}, "only CLIP and SigLIP have towers"),
        ({"class_prompts": class_prompts()}, "class_prompts is for CLIP and SigLIP"),
        ({"model": HydraViTModel.from_backbone(model)}, "HydraViTModel has no classifier"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            extract(**{"model": model, "id_batches": id_batches, "ood_batches": ood_batches} | arguments)
    clip, id_batches, ood_batches, prompts = family("clip")
    with pytest.raises(ValueError, match="class_prompts has no input_ids"):
        extract(clip, id_batches, ood_batches)
    with pytest.raises(ValueError, match='pass some of "vision" and "text"'):
        extract(clip, id_batches, ood_batches, class_prompts=prompts, towers=("audio",))


def test_a_data_set_of_rows_and_a_loader_give_the_same_circuit():
    model, id_batches, ood_batches, _ = family("vit")
    rows = [
        {"pixel_values": image, "labels": label}
        for batch in id_batches
        for image, label in zip(batch["pixel_values"], batch["labels"], strict=True)
    ]
    loader = DataLoader(rows, batch_size=8)
    assert extract(model, loader, ood_batches) == extract(model, id_batches, ood_batches)


def test_progress_is_shown_with_the_score_on_a_terminal(capsys, monkeypatch):
    model, id_batches, ood_batches, _ = family("vit")
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", 0.0)
    monkeypatch.setattr(progress, "tqdm", partial(tqdm, mininterval=0))
    extract_circuit(model, id_batches, ood_batches, "avg", budget=2)
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    circuit = extract_circuit(model, id_batches, ood_batches, "avg", budget=2)
    shown = capsys.readouterr().err
    assert "circuit (avg): 100%" in shown and f"score={circuit.scores[-1]:.4f}" in shown
