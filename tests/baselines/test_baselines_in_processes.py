"""Two processes train a baseline together as one does alone."""

import socket

import pytest
import torch
from safetensors.torch import load_file

from tests.baselines.child import GLOBAL_BATCH, main, train
from tests.processes import exit_code, start
from tests.training.child import GROUP


@pytest.mark.slow
def test_two_processes_train_a_baseline_as_one_does(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in "01":
        group = dict(zip(GROUP, ("127.0.0.1", port, "2", "2", rank, rank), strict=True))
        ranks.append(start(tmp_path / f"{rank}.log", main, tmp_path, environment=group))
    codes = [exit_code(process) for process in ranks]
    assert codes == [0, 0], "".join(log.read_text() for log in sorted(tmp_path.glob("*.log")))
    for kind in ("batch-ensemble", "mimo"):
        alone = train(kind, tmp_path / "alone", GLOBAL_BATCH)
        for rank in range(2):
            found = load_file(tmp_path / f"{kind}-{rank}.safetensors")
            assert found.keys() == alone.keys()
            for name, weight in alone.items():
                torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
