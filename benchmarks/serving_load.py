"""`hydra-transformers serve` under load, on this machine: how many requests a second, how long each takes, and what it survives.

    python benchmarks/serving_load.py --output benchmarks/results
    python benchmarks/serving_load.py --smallest            # does it run? tiny models, a few requests

The same server answers with one Transformers model, with three of them in sequence (a Deep Ensemble), with a Hydra of 3, a sixth of the
heads of each member cut out, and with a Hydra of 3 whose first three quarters of the layers are merged; random weights, ViT-S/14 of 112
pixels. Clients send one image at a time and wait for the answer; the servers are measured in turns. CPU time is that of the server's
process per request, which other programs on the machine change little. Then the last server gets broken requests, and is killed while
clients wait. It starts from a process that has imported everything, so that a new start takes seconds longer elsewhere.
"""

import argparse
import base64
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hydra_transformers import AutoHydra
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.models.auto import load_trained
from hydra_transformers.reports.table import Table
from provenance import where_it_ran


SINGLE, IN_SEQUENCE, PRUNED = "one model", "three models in sequence", "Hydra of 3, a sixth of the heads cut out"
MERGED = "Hydra of 3, three quarters of the layers merged"
SIZES = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
LARGE = ViTConfig(num_labels=100, image_size=112, patch_size=14, **SIZES)
TINY = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6}
SMALLEST = ViTConfig(num_labels=5, image_size=16, patch_size=8, **TINY)
ROUNDS = 4  # in each, every server gets its share of the requests
CONTEXT = multiprocessing.get_context("forkserver")


@dataclass
class Row:
    """seconds: all that clients waited for; p50, p99: of the milliseconds of a request; cpu: milliseconds of the server's process per
    request"""

    what: str
    requests: int
    per_second: float
    p50: float
    p99: float
    cpu: float


# The servers


def save_models(config: ViTConfig, folder: Path) -> None:
    """Three models, the Hydra of them with heads cut out, and one of three times the last model with merged layers; both Hydras
    decide."""
    processor = ViTImageProcessorPil(size={"height": config.image_size, "width": config.image_size})
    members = []
    for number in range(3):
        torch.manual_seed(number)
        model = ViTForImageClassification(config)
        model.save_pretrained(folder / str(number))
        heads = {layer: [(layer + number) % config.num_attention_heads] for layer in range(config.num_hidden_layers)}
        members.append(AutoHydra.from_backbone(model, heads))
    pruned = AutoHydra.from_pruned_members(members, allow_equal=True)
    merged = AutoHydra.from_pruned_members([model] * 3, allow_equal=True, trunk_layers=0.75)
    images = [picture(config.image_size, seed) for seed in range(100)]
    pixel_values = processor(images, return_tensors="pt")["pixel_values"]
    rows = [{"pixel_values": pixel_values, "labels": torch.arange(100) % config.num_labels}]
    for name, hydra in (("hydra", pruned), ("merged", merged)):
        hydra.calibrate(rows, target={"coverage": 0.8}, temperature=False)
        hydra.save_pretrained(folder / name)
    processor.save_pretrained(folder)


def serve(what: str, folder: Path, port: int) -> None:
    """Runs in a process of its own."""
    from hydra_transformers.serving import HydraPredictor, create_app, run

    torch.set_num_threads(1)
    if what != IN_SEQUENCE:
        model = load_trained(folder / {SINGLE: "0", PRUNED: "hydra", MERGED: "merged"}[what])
    else:
        model = DeepEnsemble([load_trained(folder / str(number)) for number in range(3)]).eval()
    processor = ViTImageProcessorPil.from_pretrained(folder)
    run(create_app(HydraPredictor(model, processor, name=what), max_body=1_000_000), port=port)


class Server:
    def __init__(self, what: str, folder: Path):
        self.what, self.folder, self.port = what, folder, free_port()
        self.start()

    def start(self) -> float:
        """Until it answers; the seconds that took."""
        start = time.perf_counter()
        self.process = CONTEXT.Process(target=serve, args=(self.what, self.folder, self.port), daemon=True)
        self.process.start()
        with self.client() as client:
            while not self.is_well(client):
                if not self.process.is_alive():
                    raise SystemExit(f"the server with {self.what} does not start")
                time.sleep(0.05)
        return time.perf_counter() - start

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=600)

    def is_well(self, client: httpx.Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def end(self, by: int) -> None:
        os.kill(self.process.pid, by)
        self.process.join(60)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


# Load


def picture(size: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def base64_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def ask(client: httpx.Client, image: str) -> tuple[float, dict]:
    """Milliseconds, and the answer."""
    start = time.perf_counter()
    answer = client.post("/predict", json={"inputs": image}).raise_for_status().json()
    return 1000 * (time.perf_counter() - start), answer


def load(server: Server, images: list[str], clients: int) -> tuple[list[float], float, float]:
    """The milliseconds of each request, the seconds of all, and those of the server's CPU."""
    with server.client() as client, ThreadPoolExecutor(clients) as threads:
        cpu, start = server.cpu_seconds(), time.perf_counter()
        times = [each[0] for each in threads.map(lambda image: ask(client, image), images)]
        return times, time.perf_counter() - start, server.cpu_seconds() - cpu


def measure(servers: list[Server], images: list[str], clients: int) -> list[Row]:
    found: dict[str, list[tuple]] = {server.what: [] for server in servers}
    for number in range(-1, ROUNDS):  # the first does not count
        for server in servers:
            share = images[: 2 * clients] if number < 0 else images[number::ROUNDS]
            result = load(server, share, clients)
            if number >= 0:
                found[server.what].append(result)
    rows = []
    for what, results in found.items():
        times = [value for each, _, _ in results for value in each]
        seconds, cpu = (sum(each[place] for each in results) for place in (1, 2))
        percentiles = statistics.quantiles(times, n=100, method="inclusive")
        per_request = 1000 * cpu / len(times)
        rows.append(Row(what, len(times), len(times) / seconds, percentiles[49], percentiles[98], per_request))
        print(rows[-1], flush=True)
    return rows


# What it survives


def broken_requests(count: int, good: str) -> Iterator[Callable[[httpx.Client, int], str]]:
    """Ways to ask wrongly, drawn at random; each returns the status, or how the connection ended."""
    draw = random.Random(0)
    in_json = {"content-type": "application/json"}

    def body(content: bytes, headers: dict[str, str] = in_json) -> Callable[[httpx.Client, int], str]:
        return lambda client, port: str(client.post("/predict", content=content, headers=headers).status_code)

    def raw(content: bytes) -> Callable[[httpx.Client, int], str]:
        def send(client: httpx.Client, port: int) -> str:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
                sock.sendall(content)
                sock.shutdown(socket.SHUT_WR)
                answer = sock.recv(100).split()
            return answer[1].decode() if len(answer) > 1 else "closed"

        return send

    bomb = base64_of(Image.new("L", (6000, 6000)))
    ways: list[Callable[[], Callable[[httpx.Client, int], str]]] = [
        lambda: body(draw.randbytes(draw.randrange(2000))),
        lambda: body(json.dumps({"inputs": good}).encode()[: draw.randrange(1, len(good))]),
        lambda: body(json.dumps({"inputs": good[: 4 * draw.randrange(len(good) // 8)]}).encode()),
        lambda: body(json.dumps({"inputs": base64.b64encode(draw.randbytes(500)).decode()}).encode()),
        lambda: body(json.dumps({"inputs": bomb}).encode()),
        lambda: body(
            json.dumps({"inputs": draw.choice(["/etc/passwd", "file:///x", "http://x", 1, None, [], {}])}).encode()
        ),
        lambda: body(json.dumps({"inputs": good, "parameters": draw.choice([1, {"top_k": -1}, {"x": 1}])}).encode()),
        lambda: body(b"[" * draw.randrange(1, 100_000)),
        lambda: body(b"A" * 1_100_000),
        lambda: body(json.dumps({"inputs": good}).encode(), {"content-type": "text/plain"}),
        lambda: raw(draw.randbytes(200) + b"\r\n\r\n"),
        lambda: raw(b"POST /predict HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"),
    ]
    for number in range(count):
        yield ways[number % len(ways)]()


def survive_broken(server: Server, good: str, count: int, clients: int) -> dict[str, int]:
    """What broken requests were answered with; the server must be the same process, and answer as before."""
    with server.client() as client, ThreadPoolExecutor(clients) as threads:
        process, before = server.process.pid, ask(client, good)[1]
        requests = list(broken_requests(count, good))
        statuses = Counter(threads.map(lambda request: request(client, server.port), requests))
        if not server.is_well(client) or server.process.pid != process or ask(client, good)[1] != before:
            raise SystemExit("the server is not what it was before the broken requests")
    print(statuses, flush=True)
    return dict(sorted(statuses.items()))


def survive_kill(server: Server, images: list[str], clients: int) -> dict[str, float]:
    """Killed in the middle of the requests, started again, and asked again for what was lost."""

    def try_ask(place: int) -> dict | None:
        if place == len(images) // 2:
            server.end(signal.SIGKILL)
        try:
            with server.client() as client:
                return ask(client, images[place])[1]
        except httpx.TransportError as error:
            # A refused connection is a request that was never taken.
            return {} if isinstance(error, httpx.ConnectError) else None

    with server.client() as client:
        expected = [ask(client, image)[1] for image in images]
    with ThreadPoolExecutor(clients) as threads:
        found = list(threads.map(try_ask, range(len(images))))
    seconds = server.start()
    with server.client() as client:
        again = [answer or ask(client, image)[1] for answer, image in zip(found, images, strict=True)]
    same = sum(one["label"] == other["label"] for one, other in zip(again, expected, strict=True))
    result = {
        "requests": len(images),
        "clients": clients,
        "answered before the kill": sum(bool(answer) for answer in found),
        "lost in flight": sum(answer is None for answer in found),
        "refused while it was down": sum(answer == {} for answer in found),
        "seconds until it answered again": seconds,
        "same answers in the end": same,
    }
    print(result, flush=True)
    if result["lost in flight"] > clients or same < len(images):
        raise SystemExit("more than what was in flight was lost")
    return result


def to_markdown(rows: list[Row], statuses: dict[str, int], kill: dict[str, float], machine: dict[str, str]) -> str:
    speed = Table(
        ["served", "requests", "requests a second", "p50, ms", "p99, ms", "CPU ms per request"],
        [
            [
                row.what,
                str(row.requests),
                f"{row.per_second:.2f}",
                f"{row.p50:.0f}",
                f"{row.p99:.0f}",
                f"{row.cpu:.0f}",
            ]
            for row in rows
        ],
    ).markdown()
    broken = Table(
        ["status", "broken requests"], [[name, f"{count:,}"] for name, count in statuses.items()]
    ).markdown()
    killed = Table(
        ["killed with SIGKILL", ""],
        [[name, f"{value:.1f}" if isinstance(value, float) else str(value)] for name, value in kill.items()],
    ).markdown()
    where = "\n".join(f"{key}: {value}  " for key, value in machine.items())
    return "\n\n".join([where, speed, broken, killed]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="to each server")
    parser.add_argument("--broken", type=int, default=1000, help="broken requests")
    parser.add_argument("--clients", type=int, default=8, help="at a time")
    parser.add_argument("--output", type=Path, help="folder for serving_load_cpu.md and .json")
    parser.add_argument("--smallest", action="store_true", help="tiny models: shows that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = SMALLEST if args.smallest else LARGE
    images = [base64_of(picture(config.image_size, seed)) for seed in range(args.requests)]
    machine = where_it_ran("cpu") | {
        "measured": f"{args.clients} clients, ViT of {config.num_hidden_layers} layers, {config.image_size} pixels, float32"
    }
    CONTEXT.set_forkserver_preload(["hydra_transformers.serving", "hydra_transformers.cli"])
    with tempfile.TemporaryDirectory() as temporary:
        save_models(config, Path(temporary))
        servers = [Server(what, Path(temporary)) for what in (SINGLE, IN_SEQUENCE, PRUNED, MERGED)]
        rows = measure(servers, images, args.clients)
        statuses = survive_broken(servers[-1], images[0], args.broken, args.clients)
        kill = survive_kill(servers[-1], images[: 8 * args.clients], args.clients)
        for server in servers:
            server.end(signal.SIGTERM)
    if args.output:
        write_atomically(args.output / "serving_load_cpu.md", to_markdown(rows, statuses, kill, machine))
        report = {"machine": machine, "rows": [asdict(row) for row in rows], "broken": statuses, "kill": kill}
        write_atomically(args.output / "serving_load_cpu.json", json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
