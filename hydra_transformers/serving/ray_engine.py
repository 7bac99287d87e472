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
    """Start Ray, or find its cluster.

    Returns how many workers there will be, and the share of a GPU that each gets.

    Args:
        workers (`int`, *optional*): by default one per GPU, or without GPUs one. Raises if there
            are not so many CPUs, for which Ray would wait.
        device (`str`, *optional*): "cpu" leaves GPUs alone.
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # RAY_ADDRESS names a cluster; otherwise one starts on this machine
    resources = ray.cluster_resources()
    cpus = int(resources["CPU"])
    gpus = 0
    if device != "cpu":
        gpus = int(resources.get("GPU", 0))
    workers = workers or gpus or 1
    if workers > cpus:
        raise ValueError(f"workers is {workers}, and the cluster has {cpus} CPUs: pass at most {cpus}")
    if gpus == 0:
        return workers, 0.0
    # Ray counts shares to four decimals; a third, rounded up, would leave no room for three.
    workers_per_gpu = math.ceil(workers / gpus)
    return workers, math.floor(10_000 / workers_per_gpu) / 10_000


class PartWorker:
    """Predicts for parts in another process, with the same package, model and number of rows."""

    def __init__(self, make_job: Callable, identity: list[Any], **arguments: Any):
        self.job = make_job(**arguments)
        if self.job.identity != identity:
            raise RuntimeError(
                "a worker finds another package version, model or data than the process that was started: share one "
                "copy, and leave it as it is while the job runs"
            )

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Return a table of the part's number and content."""
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
    """Yield the number and the content of each part, as they come.

    A worker that dies is replaced, and its part is predicted again.

    Args:
        make_job (`Callable`), arguments (`dict`): make the job in a worker.
        identity (`list`): of the job in this process, which those of the workers must equal.
        parts (`Sequence[int]`): the numbers of the parts to predict.
        workers (`int`), gpu_share (`float`): of `start_cluster`.
    """
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
        last_line = lines[-1] if lines else type(error).__name__
        raise RuntimeError(f"a worker failed: {last_line}") from error
