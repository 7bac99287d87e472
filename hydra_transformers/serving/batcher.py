"""Answers requests that wait together by one pass of the model."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


Answer = Callable[[list[Any], dict[str, Any]], list[dict[str, Any]]]


@dataclass(eq=False)
class Waiting:
    """A request that was read: its inputs, how they are to be answered, and who waits for that."""

    inputs: list[Any]
    parameters: dict[str, Any]
    answers: "asyncio.Future[list[dict[str, Any]]]"

    def fits(self, other: "Waiting") -> bool:
        """Whether both can be answered by one pass: `top_k` may differ, the labels that CLIP chooses among may not."""
        names = (self.parameters.keys() | other.parameters.keys()) - {"top_k"}
        return all(self.parameters.get(name) == other.parameters.get(name) for name in names)


class Batcher:
    """A queue in front of a model that answers one batch at a time, in a thread of its own.

    answer: (inputs, parameters) -> a dict for each input
    max_batch: inputs per pass; a request with more goes by itself
    max_wait: seconds that the first request waits for others. While the model is busy they gather anyway
    """

    def __init__(self, answer: Answer, max_batch: int, max_wait: float):
        self.answer, self.max_batch, self.max_wait = answer, max_batch, max_wait
        self.queue: list[Waiting] = []
        self.changed = asyncio.Event()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self.task: asyncio.Task | None = None
        self.is_closing = False

    def start(self) -> None:
        """Within the event loop that submits."""
        self.task = asyncio.create_task(self._run())

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done() and not self.is_closing

    async def submit(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        if self.is_closing:
            raise RuntimeError("the server closes, and takes no more requests")
        waiting = Waiting(inputs, parameters, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self.changed.set()
        return await waiting.answers

    async def close(self) -> None:
        """Answers what waits, then ends."""
        self.is_closing = True
        self.changed.set()
        if self.task is not None:
            await self.task
        self.thread.shutdown()

    async def _run(self) -> None:
        while await self._something_waits():
            await self._gathered()
            batch = self._next()
            if batch:
                await self._answer(batch)

    async def _something_waits(self) -> bool:
        while not self.queue and not self.is_closing:
            self.changed.clear()
            await self.changed.wait()
        return bool(self.queue)

    async def _gathered(self) -> None:
        """Until there is a full batch, or the first has waited long enough."""
        deadline = asyncio.get_running_loop().time() + self.max_wait
        while sum(len(each.inputs) for each in self.queue) < self.max_batch and not self.is_closing:
            self.changed.clear()
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self.changed.wait(), max(left, 0))
            except asyncio.TimeoutError:  # another class before Python 3.11
                return

    def _next(self) -> list[Waiting]:
        """Takes out the first request and those that fit to it; who went away is left out."""
        self.queue = [each for each in self.queue if not each.answers.done()]
        batch: list[Waiting] = []
        for each in self.queue:
            size = sum(len(other.inputs) for other in batch)
            if not batch or (batch[0].fits(each) and size + len(each.inputs) <= self.max_batch):
                batch.append(each)
        self.queue = [each for each in self.queue if each not in batch]
        return batch

    async def _answer(self, batch: list[Waiting]) -> None:
        inputs = [one for each in batch for one in each.inputs]
        parameters = batch[0].parameters | {"top_k": max(each.parameters["top_k"] for each in batch)}
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self.thread, self.answer, inputs, parameters)
            if len(answers) != len(inputs):  # nobody knows whose they are
                raise RuntimeError(f"the model gave {len(answers)} answers to {len(inputs)} inputs")
        except Exception as error:
            if len(batch) > 1:
                # One of them may be at fault, and the others are not.
                for each in batch:
                    await self._answer([each])
            elif not batch[0].answers.done():
                batch[0].answers.set_exception(error)
            return
        for each in batch:
            own, answers = answers[: len(each.inputs)], answers[len(each.inputs) :]
            if not each.answers.done():
                each.answers.set_result(
                    [answer | {"scores": answer["scores"][: each.parameters["top_k"]]} for answer in own]
                )
