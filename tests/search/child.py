"""The process that test_hydrate.py kills: `python -m tests.search.child FOLDER MODEL MODEL`."""

import os
import signal
import sys

import torch

from hydra_transformers import hydrate
from hydra_transformers.pruning.extraction import GreedySearch
from tests.search.tiny import everything


def main(folder: str, *models: str) -> None:
    """Ends, as a machine that goes away does, in the second removal of the first circuit."""
    remove_one = GreedySearch.remove_one

    def deadly(self) -> None:
        if self.circuit.ranking:
            os.kill(os.getpid(), signal.SIGKILL)
        remove_one(self)

    GreedySearch.remove_one = deadly
    hydrate(list(models), device="cpu", output_dir=folder, **everything())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
