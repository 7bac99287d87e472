"""A long run is safe: checkpoints, the marked fast mode, and nothing that goes wrong silently."""

import copy
import json
import signal

import pytest
import torch

from hydra_transformers.pruning import Circuit, extract_circuit, extraction
from hydra_transformers.pruning.ablation import Tower
from hydra_transformers.pruning.extraction import GreedySearch
from tests.processes import exit_code, start
from tests.pruning import worker
from tests.pruning.backbones import CLASSES, family, vit
from tests.pruning.reference import all_heads, judge, restore_slice, zero_slice


def extract(model, id_batches, ood_batches, objective="avg", budget=5, **arguments) -> Circuit:
    return extract_circuit(model, id_batches, ood_batches, objective, budget=budget, **arguments)


class Stopped(Exception):
    pass


def count_evaluations(monkeypatch, stop_at: int | None = None) -> list[int]:
    """How many heads are evaluated, time by time."""
    evaluate = GreedySearch.evaluate
    counts = []

    def counting(self, candidates):
        counts.append(len(candidates))
        if len(counts) == stop_at:
            raise Stopped
        return evaluate(self, candidates)

    monkeypatch.setattr(GreedySearch, "evaluate", counting)
    return counts


@pytest.mark.parametrize(("mode", "stopped_at"), [({}, 1), ({}, 4), ({"mode": "shortlist"}, 4)])
def test_a_stopped_run_resumes_and_ends_with_the_same_circuit(tmp_path, monkeypatch, mode, stopped_at):
    monkeypatch.setattr(extraction, "LEAST_SHORTLIST", 3)
    monkeypatch.setattr(extraction, "CHECK_EVERY", 3)
    model, id_batches, ood_batches, _ = family("vit")
    expected = extract(model, id_batches, ood_batches, **mode)
    with monkeypatch.context() as patched:
        count_evaluations(patched, stopped_at)
        with pytest.raises(Stopped):
            extract(model, id_batches, ood_batches, checkpoint=tmp_path / "run.json", **mode)
    evaluations = count_evaluations(monkeypatch)
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
def test_processes_end_with_the_circuit_of_one(tmp_path):
    processes = 3
    logs = [tmp_path / f"{rank}.log" for rank in range(processes)]
    workers = [start(log, worker.join, tmp_path, rank, processes) for rank, log in enumerate(logs)]
    assert [exit_code(each) for each in workers] == [0] * processes, "\n".join(log.read_text() for log in logs)
    for name in ("vit", "clip"):
        model, id_batches, ood_batches, prompts = family(name, batch=worker.BATCH)
        expected = extract(model, id_batches, ood_batches, budget=3, class_prompts=prompts)
        assert [Circuit.load(tmp_path / f"{name}-{rank}.json") for rank in range(processes)] == [expected] * processes
        checkpoint = json.loads((tmp_path / f"{name}-checkpoint.json").read_text())
        assert Circuit.from_dict(checkpoint["circuit"]) == expected
    for rank in range(processes):
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


def test_a_checkpoint_of_something_else_and_a_file_that_is_not_one_are_refused(tmp_path):
    model, id_batches, ood_batches, _ = family("vit")
    arguments = {"model": model, "id_batches": id_batches, "ood_batches": ood_batches, "budget": 1}
    path = tmp_path / "run.json"
    circuit = extract(**arguments, checkpoint=path)
    config = copy.deepcopy(model.config)
    config.hidden_act = "relu"
    with_relu = type(model)(config).to(model.dtype).eval()
    with_relu.load_state_dict(model.state_dict())
    for change, difference in (
        ({"objective": "ood"}, "other objective"),
        ({"mode": "shortlist"}, "other mode"),
        ({"trunk_layers": 2}, "other trunk_layers: delete it"),
        ({"model": vit(seed=7)}, "other weights"),
        ({"model": copy.deepcopy(model).float()}, "weights, dtype"),
        ({"model": with_relu}, "other config or class_prompts"),
        ({"id_batches": id_batches[:1]}, "other data"),
        ({"ood_batches": ood_batches[:1]}, "other ood_data"),
    ):
        with pytest.raises(ValueError, match=difference):
            extract(**arguments | change, checkpoint=path)
    for content in (b'{"circuit"', b"\x80\xff\x00", json.dumps(circuit.to_dict()).encode()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"run\.json cannot be read as that of an extraction: pass another path"):
            extract(**arguments, checkpoint=path)


def test_the_shortlist_evaluates_few_heads_and_says_how_often_it_agreed(monkeypatch):
    model, id_batches, ood_batches, _ = family("vit")
    monkeypatch.setattr(extraction, "LEAST_SHORTLIST", 3)
    monkeypatch.setattr(extraction, "CHECK_EVERY", 3)
    counts = count_evaluations(monkeypatch)
    circuit = extract(model, id_batches, ood_batches, budget=7, mode="shortlist")
    assert counts == [9, 3, 3, 6, 3, 3, 3]
    assert [removal for removal, _ in circuit.checks] == [4, 7]
    assert circuit.mode == "shortlist"
    assert circuit.checks[1][1], "a short list of all heads that are left holds the exact choice"


def test_the_shortlist_takes_the_best_of_the_heads_that_last_cost_least(monkeypatch):
    monkeypatch.setattr(extraction, "LEAST_SHORTLIST", 1)
    model, id_batches, ood_batches, _ = family("vit")
    first = extract(model, id_batches, ood_batches, budget=1)
    circuit = extract(model, id_batches, ood_batches, budget=2, mode="shortlist")
    alone = {}
    for head in (each for each in all_heads(model) if each != first.ranking[0]):
        before = zero_slice(model, head)
        alone[head] = judge(model, id_batches, ood_batches, "avg")
        restore_slice(model, head, before)
    assert circuit.ranking[1] == max(alone, key=alone.__getitem__)


def test_nan_is_refused_with_the_head_that_causes_it(monkeypatch):
    model, id_batches, ood_batches, _ = family("vit")
    without = Tower._without

    def overflowing(self, outputs, layer, heads):
        ablated = without(self, outputs, layer, heads)
        return torch.stack([ablated[:, row] / (head != 1) * (head != 1) for row, head in enumerate(heads)], dim=1)

    monkeypatch.setattr(Tower, "_without", overflowing)
    with pytest.raises(ValueError, match=r"the logits on data are NaN without head \(0, 1\)"):
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
    model, id_batches, _, _ = family("vit")
    with pytest.warns(UserWarning, match="every sample of ood_data is in data too"):
        extract(model, id_batches, [{"pixel_values": batch["pixel_values"]} for batch in id_batches[::-1]], budget=1)
