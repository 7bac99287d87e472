"""Ray: the parts of a job answered by the workers of a cluster, and the server as a Ray Serve application."""

import math
from collections.abc import Iterator
from typing import Any

from .._version import __version__


try:
    import ray
    import ray.data
except ImportError as error:
    raise ImportError("engine='ray' (--engine ray) needs Ray: pip install 'ray[data,serve]==2.60.*'") from error


def start_cluster(workers: int | None, device: str | None) -> tuple[int, float]:
    """Starts Ray, or finds its cluster; returns how many workers there will be, and the share of a GPU that each gets.

    workers: by default one per GPU, or without GPUs one; refused if there are not so many CPUs, for which Ray would wait
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


def answered_by_workers(
    arguments: dict[str, Any], parts: dict[int, int], workers: int | None
) -> Iterator[tuple[int, Any]]:
    """The number and the table of each part, in order; a worker that dies is replaced, and its parts are answered again.

    arguments: of `reader_of_worker`; the source as a dict, as nothing of this package may be sent
    parts: number -> rows
    workers: as in `start_cluster`
    """
    workers, gpu_share = start_cluster(workers, arguments["settings"].get("device"))
    context = ray.data.DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    try:
        numbers = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
        tables = numbers.map_batches(
            worker_class(arguments, __version__),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))),
            num_gpus=gpu_share or None,
        )
        yield from _whole_parts(iter(tables.iter_batches(batch_size=None, batch_format="pyarrow")), parts)
    except ray.exceptions.RayError as error:
        raise RuntimeError(_sentence_of_worker(error)) from error
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before


def worker_class(arguments: dict[str, Any], version: str) -> type:
    """What runs in a worker. It is sent as it is, not by name, so that it can say that a worker lacks this package."""

    class Worker:
        def __init__(self) -> None:
            try:
                import hydra_transformers
                from hydra_transformers.serving.jobs import reader_of_worker
            except ImportError as error:
                raise RuntimeError(
                    f"a worker cannot import hydra_transformers ({error}): install hydra_transformers {version} on every "
                    "machine of the cluster."
                ) from error
            if hydra_transformers.__version__ != version:
                raise RuntimeError(
                    f"a worker has hydra_transformers {hydra_transformers.__version__}, this process {version}: install one "
                    "version on every machine of the cluster."
                )
            self.reader = reader_of_worker(**arguments)

        def __call__(self, batch: dict[str, Any]) -> Any:
            return self.reader.answered(int(batch["part"][0]))

    return Worker


def _whole_parts(tables: Iterator[Any], parts: dict[int, int]) -> Iterator[tuple[int, Any]]:
    """Puts together what Ray may have cut: a part is a table of as many rows as it has."""
    import pyarrow

    rest = None
    for part, rows in parts.items():
        while rest is None or rest.num_rows < rows:
            following = next(tables, None)
            if following is None:
                raise RuntimeError("the workers ended before all rows were answered: run the command again")
            rest = following if rest is None else pyarrow.concat_tables([rest, following])
        yield part, rest.slice(0, rows)
        rest = rest.slice(rows)


def _sentence_of_worker(error: Exception) -> str:
    """The last line of what went wrong in a worker, without the traces of Ray's own processes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("RuntimeError: a worker ")]
    return (own or lines or [type(error).__name__])[-1].removeprefix("RuntimeError: ").rstrip(".")


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
        model: a folder or Hub name that every machine of the cluster sees.
        replicas: how many processes answer.
        processor, device: as in `HydraPredictor`.
        gpus_per_replica: 1 for a GPU each, 0.5 for two replicas on one.
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
