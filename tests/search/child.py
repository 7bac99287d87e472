"""The process that test_hydrate.py kills."""

import os
import signal

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
