"""Ray: jobs over the processes of a local cluster, the predictor in Ray Data, and Ray Serve."""

import os
import signal
import socket
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


@pytest.fixture(scope="module")
def cluster():
    """Processes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # workers would give way to every other process of a busy machine
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        settings = {"include_dashboard": False, "log_to_driver": False, "runtime_env": {"env_vars": variables}}
        ray.init(num_cpus=3, num_gpus=1, **settings)  # the GPU is only a number: two workers share it
        yield
        ray.shutdown()


@pytest.fixture
def data(tmp_path) -> Path:
    """The images of the test of conformance, of odd modes, of which one is broken."""
    files = [tmp_path / "data" / f"{number:03d}.png" for number in range(ROWS)]
    files[0].parent.mkdir()
    for file, content in zip(files, image_files(), strict=True):
        file.write_bytes(content)
    files[7].write_bytes(b"no image")
    return files[0].parent


def test_a_job_of_two_workers_of_which_one_dies_equals_one_process(cluster, folders, data, tmp_path, monkeypatch):
    """In order, nothing lost or twice, with the calibration, and with the bad row named."""
    from hydra_transformers.serving import ray_engine

    monkeypatch.setattr(jobs, "ROWS_PER_PART", 25)
    died = tmp_path / "died"
    plain = ray_engine.PartWorker

    class Dies(plain):
        def __call__(self, batch):
            if int(batch["part"][0]) == 4 and not os.path.exists(died):
                open(died, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return plain.__call__(self, batch)

    monkeypatch.setattr(ray_engine, "PartWorker", Dies)
    one = tmp_path / "one.parquet"
    two = tmp_path / "two.parquet"
    alone = predict_data(folders["images"], data, one, device="cpu")
    together = predict_data(folders["images"], data, two, engine="ray", workers=2)
    assert died.exists() and alone.bad_rows == together.bad_rows == [7]
    expected = pyarrow.parquet.read_table(one)
    found = pyarrow.parquet.read_table(two)
    assert expected.schema == found.schema and found["row"].to_pylist() == list(range(ROWS))
    assert set(found["abstain"].to_pylist()) == {True, False, None}
    for name in set(found.column_names) - {"scores", "why"}:
        values = expected[name].to_pylist()
        if name in ("score", "uncertainty", "aleatoric", "epistemic", "detector_score"):
            values = [value if value is None else pytest.approx(value, abs=1e-6) for value in values]
        assert found[name].to_pylist() == values, name


def test_what_would_wait_for_ever_or_mix_models_raises_an_error(cluster, folders, data, tmp_path):
    from hydra_transformers.serving.ray_engine import predicted_by_workers

    with pytest.raises(ValueError, match="workers is 4, and the cluster has 3 CPUs: pass at most 3"):
        predict_data("nowhere", data, tmp_path / "a.parquet", engine="ray", workers=4)
    source = jobs.DataSource(str(data))
    arguments = {"model": str(folders["images"]), "source": source, "rows_per_part": 25, "settings": {"device": "cpu"}}
    with pytest.raises(RuntimeError, match="a worker finds another package version, model or data"):
        list(predicted_by_workers(jobs.Job, arguments, ["of another model", ROWS], [0], 1, 0.0))


def test_ray_data_takes_the_predictor_as_it_is(cluster, tmp_path):
    """With the texts of the test of conformance, and its calibrated model."""
    rows = texts()
    model = str(save_calibrated_texts(tmp_path))

    class Numbered(HydraPredictor):
        """Keeps the number of each row, as Ray Data promises no order."""

        def __call__(self, batch):
            return {**HydraPredictor.__call__(self, batch), "row": batch["row"]}

    numbered = ray.data.from_items([{"text": text, "row": place} for place, text in enumerate(rows)])
    answered = numbered.map_batches(
        Numbered,
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


def test_ray_serve_answers_with_two_replicas_of_the_app(cluster, folders):
    """As docs/serving.md shows."""
    from ray import serve

    model = str(folders["images"])

    def app():
        from hydra_transformers.serving import HydraPredictor, create_app

        return create_app(HydraPredictor(model, device="cpu"))

    @serve.deployment(num_replicas=2)
    @serve.ingress(app)
    class Server:
        pass

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(Server.bind(), name="hydra")
    try:
        [server] = serve.status().applications["hydra"].deployments.values()
        assert server.replica_states == {"RUNNING": 2}
        expected = HydraPredictor(folders["images"], device="cpu")({"image": PICTURES})
        body = {"inputs": [base64_of(image) for image in PICTURES]}
        for _ in range(4):
            found = httpx.post(f"http://127.0.0.1:{port}/predict", json=body, timeout=60).json()
            assert [answer["label"] for answer in found] == expected["label"]
            assert [answer["abstain"] for answer in found] == expected["abstain"]
    finally:
        serve.shutdown()
