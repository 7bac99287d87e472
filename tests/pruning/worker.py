"""What runs in a process of its own: `kill` dies in an evaluation, `join` is one of several processes."""

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from hydra_transformers._io import progress
from hydra_transformers.pruning import extract_circuit
from hydra_transformers.pruning.extraction import GreedySearch
from tests.pruning.backbones import family


BATCH = 5  # enough batches for all processes


def kill(path: Path, number: int) -> None:
    """Dies in the evaluation with this number."""
    evaluate = GreedySearch.evaluate
    calls = []

    def deadly(self, candidates):
        calls.append(candidates)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(self, candidates)

    GreedySearch.evaluate = deadly
    model, id_batches, ood_batches, _ = family("vit")
    extract_circuit(model, id_batches, ood_batches, "avg", budget=5, checkpoint=path)


def join(folder: Path, rank: int, world_size: int) -> None:
    sys.stderr.isatty = lambda: True
    progress.SECONDS_BEFORE_A_BAR = 0.0
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    for name in ("vit", "clip"):
        model, id_batches, ood_batches, prompts = family(name, batch=BATCH)
        settings = {"budget": 3, "class_prompts": prompts, "checkpoint": f"{folder}/{name}-checkpoint.json"}
        circuit = extract_circuit(model, id_batches, ood_batches, "avg", **settings)
        circuit.save(f"{folder}/{name}-{rank}.json")

    model, id_batches, ood_batches, _ = family("vit")
    del id_batches[1]["labels"]  # the second process alone sees this batch
    shuffled = DataLoader(id_batches, batch_size=None, shuffle=True)
    subset = DataLoader(id_batches, batch_size=None, sampler=SubsetRandomSampler(range(len(id_batches))))
    split = DataLoader(id_batches, batch_size=None, sampler=DistributedSampler(id_batches))
    cases = {"refusal": id_batches, "shuffled": shuffled, "subset": subset, "split": split}
    for file, data in cases.items():
        try:
            extract_circuit(model, data, ood_batches, "avg", budget=5)
        except ValueError as error:
            Path(f"{folder}/{file}-{rank}.txt").write_text(str(error))
    dist.destroy_process_group()
