import json
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from hydra_transformers.data.prediction import SavedLogits
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import (
    UncertaintyAccumulator,
    calibrate,
    classification_metrics,
    diversity_metrics,
)
from tests.processes import exit_code, start


def ensemble(samples, members=3, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, members, classes, generator=generator)
    return logits, torch.randint(classes, (samples,), generator=generator)


LOGITS, LABELS = ensemble(101)
WHOLE = classification_metrics(LOGITS, LABELS) | diversity_metrics(LOGITS)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 101))
def test_any_batch_size_gives_the_same_bits(batch_size):
    accumulator = UncertaintyAccumulator()
    for logits, labels in zip(LOGITS.split(batch_size), LABELS.split(batch_size), strict=True):
        accumulator.update(logits, labels)
    assert len(accumulator) == 101
    assert accumulator.compute() == WHOLE


def test_repeated_samples_are_dropped_by_their_index():
    accumulator = UncertaintyAccumulator()
    accumulator.update(LOGITS, LABELS, index=torch.arange(101))
    accumulator.update(LOGITS[:7], LABELS[:7], index=range(7))
    assert len(accumulator.gather()) == 101 and accumulator.gather().compute() == WHOLE


def test_without_labels_only_the_diversity_is_computed():
    accumulator = UncertaintyAccumulator(score="energy")
    accumulator.update(LOGITS)
    assert accumulator.compute() == diversity_metrics(LOGITS)
    assert set(accumulator.values()) == {"confidence", "total", "aleatoric", "epistemic", "disagreement", "score"}


@pytest.mark.slow
def test_memory_does_not_grow_with_members_and_classes():
    generator = torch.Generator().manual_seed(0)
    accumulator = UncertaintyAccumulator()

    def update() -> int:
        accumulator.update(torch.randn(25, 3, 8000, generator=generator), torch.zeros(25, dtype=torch.long))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = update()  # with what one update needs for a while
    for _ in range(40):  # 1000 samples x 3 x 8000 float32 logits would hold 96 MB
        grown_kilobytes = update() - before
    assert grown_kilobytes < 60_000
    assert sum(rows.nbytes for rows in accumulator._rows) == 80 * len(accumulator)


def in_one_of_two_processes(rank, folder):
    """Judge half of the data, and write what this process believes about the whole."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    accumulator = UncertaintyAccumulator()
    rows = list(zip(LOGITS, LABELS, range(101), strict=True))
    for logits, labels, index in DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows, shuffle=True)):
        accumulator.update(logits, labels, index)
    report = evaluated()
    results = {"local": len(accumulator), "metrics": accumulator.gather().compute(), "report": report.to_json()}
    rows = [{"member_logits": logits, "labels": label} for logits, label in zip(LOGITS, LABELS, strict=True)]
    ordered = evaluate_uncertainty(SavedLogits(), DataLoader(rows, batch_size=9))
    results["loader"] = {name: ordered.models["SavedLogits"]["data"][name] for name in WHOLE}
    results["refusals"] = [
        refusal(DataLoader(rows, sampler=DistributedSampler(rows))),
        refusal(DataLoader(rows, batch_size=9, shuffle=True)),
        refusal(DataLoader(rows, batch_size=9, sampler=Shuffled(rows))),
        refusal(DataLoader(rows, batch_sampler=[[0, 1], [2]])),
    ]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


class Shuffled(SequentialSampler):
    """In another order in each process."""

    def __iter__(self):
        return iter(torch.randperm(len(self.data_source)).tolist())


def refusal(loader):
    with pytest.raises(ValueError) as caught:
        evaluate_uncertainty(SavedLogits(), loader)
    return str(caught.value)


def evaluated():
    calibrated = calibrate(SavedLogits(), batches_of(*ensemble(200, seed=1)), target={"coverage": 0.6}).model
    models = {"plain": SavedLogits(), "calibrated": calibrated}
    return evaluate_uncertainty(models, batches_of(LOGITS, LABELS), {"far": {"one": batches_of(-LOGITS[:9])}})


def batches_of(logits, labels=None, size=9):
    labels = torch.zeros(len(logits), dtype=torch.long) if labels is None else labels
    pairs = zip(logits.split(size), labels.split(size), strict=True)
    return [{"member_logits": part, "labels": truth} for part, truth in pairs]


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path):
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    group = [start(log, in_one_of_two_processes, rank, tmp_path) for rank, log in enumerate(logs)]
    assert [exit_code(each) for each in group] == [0, 0], "\n".join(log.read_text() for log in logs)
    alone = evaluated()
    assert {"answered", "answered_risk", "set_coverage"} < set(alone.models["calibrated"]["data"])
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results["local"] == 51  # the sampler repeats one sample to make the halves equal
        assert results["metrics"] == WHOLE
        assert results["report"] == alone.to_json()
        assert results["loader"] == WHOLE
        split, shuffled, unknown, by_list = results["refusals"]
        assert "data is already split between the processes" in split
        assert "data may be shuffled (its sampler is a RandomSampler), so 2 processes cannot share it" in shuffled
        assert "its sampler is a Shuffled" in unknown and "its sampler is a list" in by_list
