"""A server that is killed loses what was in flight and nothing else; one that is ended answers that first."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hydra_transformers.cli import main
from tests import processes
from tests.serving.tiny import base64_of
from tests.tiny_data import pictures


PICTURES = [base64_of(image) for image in pictures([0, 1], seed=4)]
WAIT_MS = 1500  # so that a request for one image is in flight for a while; two are a full batch, and go at once


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """Started from nothing each time, from the same folder and at the same port."""

    def __init__(self, folder, log):
        self.folder = folder
        self.log = log
        self.port = free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def start(self) -> None:
        options = ["--port", self.port, "--max-batch", 2, "--max-wait-ms", WAIT_MS]
        self.process = processes.start(self.log, main, ["serve", str(self.folder), *map(str, options)])
        self.wait_for(0)

    def wait_for(self, requests: int) -> None:
        """Until it is there, with so many requests in flight."""
        for _ in range(1200):
            try:
                if self.client.get("/health").json()["requests"] == requests:
                    return
            except httpx.TransportError:
                assert self.process.is_alive(), self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def ask(self, inputs):
        return self.client.post("/predict", json={"inputs": inputs}).raise_for_status().json()


@pytest.mark.slow
def test_killed_and_started_again_it_lost_nothing_but_what_was_in_flight(folders, tmp_path):
    server = Server(folders["images"], tmp_path / "log.txt")
    server.start()
    before = server.ask(PICTURES)
    files = {path.name: path.stat().st_mtime_ns for path in server.folder.iterdir()}
    with ThreadPoolExecutor(1) as threads:
        in_flight = threads.submit(server.ask, PICTURES[0])
        server.wait_for(1)
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            in_flight.result()
    assert processes.exit_code(server.process) == -signal.SIGKILL
    server.start()
    assert server.ask(PICTURES) == before
    with ThreadPoolExecutor(1) as threads:
        in_flight = threads.submit(server.ask, PICTURES[0])
        server.wait_for(1)
        os.kill(server.process.pid, signal.SIGTERM)
        assert in_flight.result()["label"] == before[0]["label"]
    assert processes.exit_code(server.process) == -signal.SIGTERM
    assert {path.name: path.stat().st_mtime_ns for path in server.folder.iterdir()} == files
    assert "Traceback" not in server.log.read_text()
