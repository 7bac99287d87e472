"""Answers waiting requests together, in one pass of the model."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Waiting:
    """A request in the queue, and the future of its answers."""

    inputs: list[Any]
    parameters: dict[str, Any]
    answers: "asyncio.Future[list[dict[str, Any]]]"

    def fits(self, other: "Waiting") -> bool:
        """Whether one pass can answer both: `top_k` may differ, CLIP's labels may not."""
        names = (self.parameters.keys() | other.parameters.keys()) - {"top_k"}
        return all(self.parameters.get(name) == other.parameters.get(name) for name in names)


class Batcher:
    """A queue in front of a model that answers one batch at a time, in its own thread.

    answer: (inputs, parameters) -> a dict for each input
    max_batch: inputs per pass; a request with more goes alone
    max_wait: seconds that the first request waits for others. While the model is busy they gather anyway
    """

    def __init__(
        self, answer: Callable[[list[Any], dict[str, Any]], list[dict[str, Any]]], max_batch: int, max_wait: float
    ):
        self.answer, self.max_batch, self.max_wait = answer, max_batch, max_wait
        self.queue: list[Waiting] = []
        self.changed = asyncio.Event()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self.task: asyncio.Task | None = None
        self.is_closing = False

    def start(self) -> None:
        """Call it in the event loop that submits."""
        self.task = asyncio.create_task(self._run())

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done() and not self.is_closing

    async def submit(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        if self.is_closing:
            raise RuntimeError("the server is closing and takes no more requests")
        waiting = Waiting(inputs, parameters, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self.changed.set()
        return await waiting.answers

    async def close(self) -> None:
        """Answers the waiting requests, then ends."""
        self.is_closing = True
        self.changed.set()
        if self.task is not None:
            await self.task
        self.thread.shutdown()

    async def _run(self) -> None:
        while True:
            while not self.queue and not self.is_closing:
                self.changed.clear()
                await self.changed.wait()
            if not self.queue:
                return
            await self._gather()
            batch = self._next_batch()
            if batch:
                await self._answer(batch)

    async def _gather(self) -> None:
        """Waits for a full batch, or until the first request has waited long enough."""
        deadline = asyncio.get_running_loop().time() + self.max_wait
        while sum(len(each.inputs) for each in self.queue) < self.max_batch and not self.is_closing:
            self.changed.clear()
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self.changed.wait(), max(left, 0))
            except asyncio.TimeoutError:  # another class before Python 3.11
                return

    def _next_batch(self) -> list[Waiting]:
        """Takes the first request and those that fit it out of the queue; clients that went away are dropped."""
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
            if len(answers) != len(inputs):  # they could go to the wrong clients
                raise RuntimeError(f"the model gave {len(answers)} answers to {len(inputs)} inputs")
        except Exception as error:
            if len(batch) > 1:  # one request may have caused it: the others deserve their answers
                for each in batch:
                    await self._answer([each])
            elif not batch[0].answers.done():
                batch[0].answers.set_exception(error)
            return
        for each in batch:
            own, answers = answers[: len(each.inputs)], answers[len(each.inputs) :]
            if not each.answers.done():
                top_k = each.parameters["top_k"]
                # Answers about tokens have entities in place of scores.
                cut = [{"scores": answer["scores"][:top_k]} if "scores" in answer else {} for answer in own]
                each.answers.set_result([answer | scores for answer, scores in zip(own, cut, strict=True)])
