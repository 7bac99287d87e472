"""Ray: the parts of a job predicted by the workers of a cluster, and the server as a Ray Serve application."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .jobs import PartReader


try:
    import ray
    import ray.data
except ImportError as error:
    raise ImportError("engine='ray' (--engine ray) needs Ray: pip install 'ray[data,serve]==2.60.*'") from error


def start_cluster(workers: int | None, device: str | None) -> tuple[int, float]:
    """Starts Ray, or finds its cluster; returns how many workers there will be, and the share of a GPU that each gets.

    workers: by default one per GPU, or without GPUs one; an error if there are not so many CPUs, for which Ray would wait
    device: "cpu" leaves GPUs alone
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # RAY_ADDRESS names a cluster; otherwise one starts on this machine
    resources = ray.cluster_resources()
    gpus, cpus = 0 if device == "cpu" else int(resources.get("GPU", 0)), int(resources["CPU"])
    workers = workers or gpus or 1
    if workers > cpus:
        raise ValueError(f"workers is {workers}, and the cluster has {cpus} CPUs: pass at most {cpus}")
    # Ray counts shares to four decimals; a third, rounded up, would leave no room for three.
    return workers, math.floor(10_000 / math.ceil(workers / gpus)) / 10_000 if gpus else 0.0


class PartWorker:
    """Predicts for parts in another process, which must have the same package, model and number of rows."""

    def __init__(self, digest: str, num_rows: int, **of_reader: Any):
        self.reader = PartReader(**of_reader)
        if self.reader.model_digest != digest or len(self.reader.rows) != num_rows:
            raise RuntimeError(
                "a worker finds another package version, model or data than the process that was started: share one copy, and "
                "leave it as it is while the job runs"
            )

    def __call__(self, batch: dict[str, Any]) -> Any:
        import pyarrow

        number = int(batch["part"][0])
        content = pyarrow.array([self.reader.predicted(number)], pyarrow.large_binary())
        return pyarrow.table({"part": pyarrow.array([number]), "content": content})


def predicted_by_workers(
    arguments: dict[str, Any], parts: Sequence[int], workers: int, gpu_share: float
) -> Iterator[tuple[int, bytes]]:
    """The number and the content of each part, as they come; a worker that dies is replaced, and its part is predicted again.

    arguments: of `PartWorker`; workers, gpu_share: of `start_cluster`
    """
    numbers = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
    predicted = numbers.map_batches(
        PartWorker,
        fn_constructor_kwargs=arguments,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))),
        num_gpus=gpu_share or None,
    )
    try:
        for row in predicted.iter_rows():
            yield row["part"], row["content"]
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RuntimeError(f"a worker failed: {(lines or [type(error).__name__])[-1]}") from error


def deployment(
    model: str,
    replicas: int = 2,
    processor: str | None = None,
    device: str | None = None,
    gpus_per_replica: float = 0,
    **limits: Any,
) -> Any:
    """The server of a model as a Ray Serve application: `serve.run(deployment("my-calibrated-hydra"))`.

    Each replica is a process with the model and the routes of `create_app`, and gathers its requests into batches.

    Args:
        model (`str`): a folder or Hub name that every machine of the cluster sees.
        replicas (`int`, defaults to 2): how many processes answer.
        processor, device (`str`, *optional*): as in `HydraPredictor`.
        gpus_per_replica (`float`, defaults to 0): 1 for a GPU each, 0.5 for two replicas on one.
        limits: of `create_app`: max_batch, max_wait_ms, max_queue, max_body, docs.
    """
    from ray import serve

    def app() -> Any:
        from hydra_transformers.serving import HydraPredictor, create_app

        return create_app(HydraPredictor(model, processor, device), **limits)

    @serve.deployment(num_replicas=replicas, ray_actor_options={"num_gpus": gpus_per_replica})
    @serve.ingress(app)
    class HydraServer:
        pass

    return HydraServer.bind()
