"""Answers waiting requests together, in one pass of the model."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Waiting:
    """A request in the queue, and the future of its answers."""

    inputs: list[Any]
    parameters: dict[str, Any]
    answers: "asyncio.Future[list[dict[str, Any]]]"


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
        self.changed = asyncio.Condition()
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
        async with self.changed:
            self.queue.append(waiting)
            self.changed.notify_all()
        return await waiting.answers

    async def close(self) -> None:
        """Answers the waiting requests, then ends."""
        self.is_closing = True
        async with self.changed:
            self.changed.notify_all()
        if self.task is not None:
            await self.task
        self.thread.shutdown()

    async def _run(self) -> None:
        while self.queue or not self.is_closing:
            async with self.changed:
                await self.changed.wait_for(lambda: self.queue or self.is_closing)
                with suppress(asyncio.TimeoutError):  # the first request has waited long enough
                    await asyncio.wait_for(self.changed.wait_for(self._is_ready), self.max_wait)
            if batch := self._next_batch():
                await self._answer(batch)

    def _is_ready(self) -> bool:
        return self.is_closing or sum(len(request.inputs) for request in self.queue) >= self.max_batch

    def _next_batch(self) -> list[Waiting]:
        """Takes the first request and those that fit it out of the queue; clients that went away are dropped."""
        self.queue = [request for request in self.queue if not request.answers.done()]
        batch, size = self.queue[:1], sum(len(request.inputs) for request in self.queue[:1])
        for request in self.queue[1:]:
            if request.parameters == batch[0].parameters and size + len(request.inputs) <= self.max_batch:
                batch.append(request)
                size += len(request.inputs)
        self.queue = [request for request in self.queue if request not in batch]
        return batch

    async def _answer(self, batch: list[Waiting]) -> None:
        inputs, parameters = [value for request in batch for value in request.inputs], batch[0].parameters
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self.thread, self.answer, inputs, parameters)
            if len(answers) != len(inputs):  # they could go to the wrong clients
                raise RuntimeError(f"the model gave {len(answers)} answers to {len(inputs)} inputs")
        except Exception as error:
            if len(batch) > 1:  # one request may have caused it: the others deserve their answers
                for request in batch:
                    await self._answer([request])
            elif not batch[0].answers.done():
                batch[0].answers.set_exception(error)
            return
        remaining = iter(answers)
        for request in batch:
            answers = [next(remaining) for _ in request.inputs]
            if not request.answers.done():
                request.answers.set_result(answers)
