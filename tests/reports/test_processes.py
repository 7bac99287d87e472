"""Single-label models are measured batch by batch, and by several processes at once: the numbers are the same bits."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import calibrate, classification_metrics
from hydra_transformers.uncertainty.metrics import diversity_metrics
from tests.processes import exit_code, start


def ensemble(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, 3, 5, generator=generator)
    return logits, torch.randint(5, (samples,), generator=generator)


LOGITS, LABELS = ensemble(101)
WHOLE = classification_metrics(LOGITS, LABELS) | diversity_metrics(LOGITS)
ROWS = [{"member_logits": logits, "labels": label} for logits, label in zip(LOGITS, LABELS, strict=True)]


def batches_of(logits, labels=None, size=9):
    labels = torch.zeros(len(logits), dtype=torch.long) if labels is None else labels
    pairs = zip(logits.split(size), labels.split(size), strict=True)
    return [{"member_logits": part, "labels": truth} for part, truth in pairs]


def metrics_of(data):
    found = evaluate_uncertainty(SavedLogits(), data).models["SavedLogits"]["data"]
    return {name: found[name] for name in WHOLE}


def evaluated():
    calibrated = calibrate(SavedLogits(), batches_of(*ensemble(200, seed=1)), target={"coverage": 0.6}).model
    models = {"plain": SavedLogits(), "calibrated": calibrated}
    return evaluate_uncertainty(models, batches_of(LOGITS, LABELS), {"far": {"one": batches_of(-LOGITS[:9])}})


@pytest.mark.parametrize("size", [1, 2, 17, 50, 100, 101])
def test_any_batch_size_gives_the_same_bits(size):
    assert metrics_of(batches_of(LOGITS, LABELS, size)) == WHOLE


class Shuffled(SequentialSampler):
    """In another order in each process."""

    def __iter__(self):
        return iter(torch.randperm(len(self.data_source)).tolist())


def refusal(loader):
    with pytest.raises(ValueError) as caught:
        evaluate_uncertainty(SavedLogits(), loader)
    return str(caught.value)


def in_one_of_two_processes(rank, folder):
    """Writes what this process believes about the whole."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {"report": evaluated().to_json(), "loader": metrics_of(DataLoader(ROWS, batch_size=9))}
    results["few"] = metrics_of(DataLoader(ROWS, batch_size=101))  # one process has no batch
    results["refusals"] = [
        refusal(DataLoader(ROWS, sampler=DistributedSampler(ROWS))),
        refusal(DataLoader(ROWS, batch_size=9, shuffle=True)),
        refusal(DataLoader(ROWS, batch_size=9, sampler=Shuffled(ROWS))),
        refusal(DataLoader(ROWS, batch_sampler=[[0, 1], [2]])),
    ]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path):
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    group = [start(log, in_one_of_two_processes, rank, tmp_path) for rank, log in enumerate(logs)]
    assert [exit_code(each) for each in group] == [0, 0], "\n".join(log.read_text() for log in logs)
    alone = evaluated()
    assert {"answered", "answered_risk", "set_coverage"} < set(alone.models["calibrated"]["data"])
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results["report"] == alone.to_json()
        assert results["loader"] == results["few"] == WHOLE
        split, shuffled, unknown, by_list = results["refusals"]
        assert "data is already split between the processes" in split
        assert "data may be shuffled (its sampler is a RandomSampler), so 2 processes cannot share it" in shuffled
        assert "its sampler is a Shuffled" in unknown and "its sampler is a list" in by_list
