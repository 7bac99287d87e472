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
    max_wait: seconds that the first request waits for others; while the model is busy they gather
        anyway
    """

    def __init__(
        self, answer: Callable[[list[Any], dict[str, Any]], list[dict[str, Any]]], max_batch: int, max_wait: float
    ):
        self.answer = answer
        self.max_batch = max_batch
        self.max_wait = max_wait
        self.queue: list[Waiting] = []
        self.changed = asyncio.Condition()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self.task: asyncio.Task | None = None
        self.is_closing = False

    def start(self) -> None:
        """Start to answer; call it in the event loop that submits."""
        self.task = asyncio.create_task(self._run())

    @property
    def is_running(self) -> bool:
        """Whether it answers requests."""
        return self.task is not None and not self.task.done() and not self.is_closing

    async def submit(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """Wait for the answers to a request."""
        if self.is_closing:
            raise RuntimeError("the server is closing and takes no more requests")
        waiting = Waiting(inputs, parameters, asyncio.get_running_loop().create_future())
        async with self.changed:
            self.queue.append(waiting)
            self.changed.notify_all()
        return await waiting.answers

    async def close(self) -> None:
        """Answer the waiting requests, then end."""
        self.is_closing = True
        async with self.changed:
            self.changed.notify_all()
        if self.task is not None:
            await self.task
        self.thread.shutdown()

    async def _run(self) -> None:
        """Answer one batch after the other, until it is closed and the queue is empty."""
        while self.queue or not self.is_closing:
            async with self.changed:
                await self.changed.wait_for(lambda: self.queue or self.is_closing)
                with suppress(asyncio.TimeoutError):  # the first request has waited long enough
                    await asyncio.wait_for(self.changed.wait_for(self._is_ready), self.max_wait)
            if batch := self._next_batch():
                await self._answer(batch)

    def _is_ready(self) -> bool:
        """Whether there is no reason to wait for more requests."""
        num_inputs = sum(len(request.inputs) for request in self.queue)
        return self.is_closing or num_inputs >= self.max_batch

    def _next_batch(self) -> list[Waiting]:
        """Take the first request, and those that fit it, out of the queue.

        Clients that went away are dropped.
        """
        self.queue = [request for request in self.queue if not request.answers.done()]
        if not self.queue:
            return []
        first, *others = self.queue
        batch = [first]
        size = len(first.inputs)
        for request in others:
            has_room = size + len(request.inputs) <= self.max_batch
            if has_room and request.parameters == first.parameters:
                batch.append(request)
                size += len(request.inputs)
        self.queue = [request for request in self.queue if request not in batch]
        return batch

    async def _answer(self, batch: list[Waiting]) -> None:
        """Run the model on a batch, and hand its answers or its error to the requests."""
        inputs = [value for request in batch for value in request.inputs]
        parameters = batch[0].parameters
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self.thread, self.answer, inputs, parameters)
            if len(answers) != len(inputs):  # they could go to the wrong clients
                raise RuntimeError(f"the model gave {len(answers)} answers to {len(inputs)} inputs")
        except Exception as error:
            if len(batch) > 1:  # one request may have caused it: the others deserve their answers
                for request in batch:
                    await self._answer([request])
            elif not batch[0].answers.done():
                batch[0].answers.set_exception(error)
            return

        # To each request its own.
        remaining = iter(answers)
        for request in batch:
            answers = [next(remaining) for _ in request.inputs]
            if not request.answers.done():
                request.answers.set_result(answers)
