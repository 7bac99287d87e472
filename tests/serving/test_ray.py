"""Ray: jobs over the processes of a local cluster, the predictor in Ray Data, and Ray Serve."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pyarrow.parquet
import pytest

from hydra_transformers.serving import HydraPredictor, jobs, predict_data
from tests.serving.test_conformance import ROWS, image_files, save_calibrated_texts, texts
from tests.serving.tiny import base64_of
from tests.tiny_data import pictures


ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[data,serve]==2.60.*'")
pytestmark = pytest.mark.slow

PICTURES = pictures([0, 1, 2, 1], seed=4)
ROOT = Path(__file__).parents[2]


class NumberedPredictor(HydraPredictor):
    """Keeps the number of each row, as Ray Data promises no order."""

    def __call__(self, batch):
        return {**super().__call__(batch), "row": batch["row"]}


@pytest.fixture(scope="module")
def cluster():
    """Two processes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # workers would give way to every other process of a busy machine
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # The GPU is only a number: two workers share it.
        ray.init(
            num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables}
        )
        yield
        ray.shutdown()


@pytest.fixture
def paths(tmp_path) -> Path:
    """A table of the images of the test of conformance, of odd modes, of which one is broken."""
    files = [tmp_path / f"{number}.png" for number in range(ROWS)]
    for file, content in zip(files, image_files(), strict=True):
        file.write_bytes(content)
    files[7].write_bytes(b"no image")
    table = tmp_path / "paths.jsonl"
    table.write_text("".join(json.dumps({"file": str(file)}) + "\n" for file in files))
    return table


def test_a_job_of_two_workers_of_which_one_dies_equals_one_process(cluster, folders, paths, tmp_path, monkeypatch):
    """In order, nothing lost or twice, with the calibration, and with the bad row named."""
    from hydra_transformers.serving import ray_engine

    monkeypatch.setattr(jobs, "ROWS_PER_PART", 25)
    died = tmp_path / "died"
    made = ray_engine.worker_class

    def dies_once(arguments, version):
        plain = made(arguments, version)

        class Dies(plain):
            def __call__(self, batch):
                if int(batch["part"][0]) == 4 and not os.path.exists(died):
                    open(died, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain.__call__(self, batch)

        return Dies

    monkeypatch.setattr(ray_engine, "worker_class", dies_once)
    predict_data(folders["images"], paths, tmp_path / "one.parquet", image="file", device="cpu")
    predict_data(folders["images"], paths, tmp_path / "two.parquet", image="file", engine="ray", workers=2)
    assert died.exists()
    one, two = (pyarrow.parquet.read_table(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert one.schema == two.schema and two.column("row").to_pylist() == [*range(7), *range(8, ROWS)]
    assert set(two.column("abstain").to_pylist()) == {True, False}
    for name in one.column_names:
        expected = one.column(name).to_pylist()
        if name in ("score", "uncertainty", "aleatoric", "epistemic", "detector_score"):
            expected = pytest.approx(expected, abs=1e-6)
        if name not in ("scores", "reason"):
            assert two.column(name).to_pylist() == expected, name
    bad = [(tmp_path / f"{name}.bad-rows.jsonl").read_text() for name in ("one", "two")]
    assert bad[0] == bad[1] and json.loads(bad[0])["row"] == 7


def test_more_workers_than_the_cluster_has_cpus_are_refused(cluster, folders, paths, tmp_path):
    with pytest.raises(ValueError, match="workers is 4, and the cluster has 3 CPUs: pass at most 3"):
        predict_data("nowhere", paths, tmp_path / "a.parquet", engine="ray", workers=4)


def test_a_worker_with_another_version_ends_the_job_at_once(cluster, folders, paths, tmp_path, monkeypatch):
    from hydra_transformers.serving import ray_engine

    monkeypatch.setattr(ray_engine, "__version__", "9.9")
    with pytest.raises(
        RuntimeError, match=r"^a worker has hydra_transformers .*, this process 9.9: install one version"
    ):
        predict_data(
            folders["images"], paths, tmp_path / "a.parquet", image="file", device="cpu", engine="ray", workers=1
        )


def test_ray_data_takes_the_predictor_as_it_is(cluster, tmp_path):
    """With the texts of the test of conformance, and its calibrated model."""
    rows, model = texts(), str(save_calibrated_texts(tmp_path))
    numbered = ray.data.from_items([{"text": text, "row": place} for place, text in enumerate(rows)])
    answered = numbered.map_batches(
        NumberedPredictor,
        fn_constructor_args=(model,),
        fn_constructor_kwargs={"device": "cpu"},
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    found = sorted(answered.take_all(), key=lambda row: row["row"])
    expected = HydraPredictor(model, device="cpu")({"text": rows})
    assert set(expected["abstain"]) == {True, False}
    for name in ("label", "abstain", "prediction_set"):
        assert [row[name] for row in found] == expected[name]
    for name in ("score", "uncertainty", "epistemic"):
        assert [row[name] for row in found] == pytest.approx(expected[name], abs=1e-6)


def test_two_workers_load_the_models_own_code_at_once(cluster, folders, tmp_path):
    """Without this package, into one cache of modules."""

    @ray.remote(num_cpus=1, runtime_env={"env_vars": {"HF_MODULES_CACHE": str(tmp_path / "modules")}})
    def loads(number: int) -> tuple[str, list]:
        import time

        import torch
        from transformers import AutoModelForImageClassification

        (tmp_path / f"ready-{number}").touch()
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.001)
        model = AutoModelForImageClassification.from_pretrained(folders["images"], trust_remote_code=True).eval()
        with torch.no_grad():
            found = model(torch.linspace(-1, 1, 192).view(1, 3, 8, 8))
        return type(model).__module__.partition(".")[0], [found.logits.tolist(), found.abstain.tolist()]

    (module, first), (_, second) = ray.get([loads.remote(number) for number in range(2)], timeout=300)
    assert module == "transformers_modules" and first == second


def test_a_worker_without_the_package_or_with_another_version_says_so(folders, paths, tmp_path, monkeypatch):
    from hydra_transformers.serving import ray_engine

    sent = []

    def keeps(arguments, parts, workers):
        sent.append(ray.cloudpickle.dumps(ray_engine.worker_class(arguments, "9.9")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ray_engine, "answered_by_workers", keeps)
        patch.setattr(ray_engine, "start_cluster", lambda workers, device: None)
        with pytest.raises(KeyboardInterrupt):
            predict_data(folders["images"], paths, tmp_path / "a.csv", image="file", device="cpu", engine="ray")
    with pytest.raises(
        RuntimeError, match=r"a worker has hydra_transformers .*, this process 9.9: install one version"
    ):
        ray.cloudpickle.loads(sent[0])()
    installed = [name for name in sys.modules if name.partition(".")[0] == "hydra_transformers"]
    with monkeypatch.context() as patch:
        for name in installed:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "hydra_transformers", None)  # as if it were not installed
        with pytest.raises(
            RuntimeError, match=r"a worker cannot import hydra_transformers .*: install hydra_tr"
        ) as told:
            ray.cloudpickle.loads(sent[0])()
    trace = f"ray::MapWorker\n  File x\nRuntimeError: {told.value}\n\nSome more lines."
    assert ray_engine._sentence_of_worker(RuntimeError(trace)) == str(told.value).rstrip(".")


def test_ray_serve_answers_with_two_replicas(cluster, folders):
    from ray import serve

    from hydra_transformers.serving.ray_engine import deployment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(deployment(str(folders["images"]), replicas=2, device="cpu"), name="hydra")
    try:
        [server] = serve.status().applications["hydra"].deployments.values()
        assert server.replica_states == {"RUNNING": 2}
        expected = HydraPredictor(folders["images"], device="cpu")({"image": PICTURES})
        body = {"inputs": [base64_of(image) for image in PICTURES]}
        for _ in range(4):
            found = httpx.post(f"http://127.0.0.1:{port}/predict", json=body, timeout=60).json()
            assert [answer["label"] for answer in found] == expected["label"]
            assert [answer["abstain"] for answer in found] == expected["abstain"]
        listed = httpx.post(f"http://127.0.0.1:{port}/classify", json={"input": body["inputs"]}, timeout=60).json()
        assert [item["label"] for item in listed["data"]] == expected["label"]
    finally:
        serve.shutdown()
