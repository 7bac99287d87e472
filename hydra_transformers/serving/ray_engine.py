"""Ray: the parts of a job predicted by the workers of a cluster."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any


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

    def __init__(self, make_job: Callable, identity: list[Any], **arguments: Any):
        self.job = make_job(**arguments)
        if self.job.identity != identity:
            raise RuntimeError(
                "a worker finds another package version, model or data than the process that was started: share one copy, and "
                "leave it as it is while the job runs"
            )

    def __call__(self, batch: dict[str, Any]) -> Any:
        import pyarrow

        number = int(batch["part"][0])
        content = pyarrow.array([self.job.predicted(number)], pyarrow.large_binary())
        return pyarrow.table({"part": pyarrow.array([number]), "content": content})


def predicted_by_workers(
    make_job: Callable,
    arguments: dict[str, Any],
    identity: list[Any],
    parts: Sequence[int],
    workers: int,
    gpu_share: float,
) -> Iterator[tuple[int, bytes]]:
    """The number and the content of each part, as they come; a worker that dies is replaced, and its part is predicted again."""
    numbers = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
    predicted = numbers.map_batches(
        PartWorker,
        fn_constructor_kwargs=arguments | {"make_job": make_job, "identity": identity},
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
