"""Requests that wait together share a pass of the model."""

import asyncio
import threading

import pytest

from hydra_transformers.serving.batcher import Batcher


class Model:
    """Answers when it is let, and notes its passes."""

    def __init__(self):
        self.passes: list[tuple[list, dict]] = []
        self.may_answer = threading.Event()
        self.is_asked = threading.Event()

    def __call__(self, inputs, parameters):
        self.passes.append((inputs, parameters))
        self.is_asked.set()
        assert self.may_answer.wait(10)
        if "bad" in inputs:
            raise ValueError("bad")
        return [{"label": text, "scores": [text] * parameters["top_k"]} for text in inputs]


def answered(requests: list[tuple[list, dict]], max_batch: int = 4, close_early: bool = False) -> tuple[list, list]:
    """The answers to requests of which all but the first come while the model is busy, and its passes."""

    async def run():
        model = Model()
        batcher = Batcher(model, max_batch, max_wait=0)
        batcher.start()
        first = asyncio.create_task(batcher.submit(*requests[0]))
        await asyncio.to_thread(model.is_asked.wait, 10)
        others = [asyncio.create_task(batcher.submit(*request)) for request in requests[1:]]
        await asyncio.sleep(0)
        closing = asyncio.create_task(batcher.close()) if close_early else None
        model.may_answer.set()
        answers = await asyncio.gather(first, *others, return_exceptions=True)
        await (closing or batcher.close())
        assert not batcher.is_running
        return answers, model.passes

    return asyncio.run(run())


def test_requests_that_wait_share_a_pass_up_to_the_largest_batch():
    answers, passes = answered([([text], {"top_k": 1}) for text in "abcdefg"])
    assert [inputs for inputs, _ in passes] == [["a"], ["b", "c", "d", "e"], ["f", "g"]]
    assert [answer[0]["label"] for answer in answers] == list("abcdefg")
    answers, passes = answered([(list(texts), {"top_k": 1}) for texts in ("a", "bcd", "ef")])  # requests stay whole
    assert [inputs for inputs, _ in passes] == [["a"], ["b", "c", "d"], ["e", "f"]]
    assert [[each["label"] for each in answer] for answer in answers] == [["a"], ["b", "c", "d"], ["e", "f"]]


def test_requests_with_other_parameters_go_by_themselves_and_none_is_overtaken_for_ever():
    answers, passes = answered([([text], {"top_k": k}) for text, k in zip("abcde", (1, 1, 2, 1, 2), strict=True)])
    assert [inputs for inputs, _ in passes] == [["a"], ["b", "d"], ["c", "e"]]
    assert [len(answer[0]["scores"]) for answer in answers] == [1, 1, 2, 1, 2]


def test_a_request_that_fails_takes_no_other_with_it():
    answers, passes = answered([([text], {"top_k": 1}) for text in ("a", "b", "bad", "c")])
    assert [inputs for inputs, _ in passes] == [["a"], ["b", "bad", "c"], ["b"], ["bad"], ["c"]]
    assert isinstance(answers[2], ValueError)
    assert [answers[place][0]["label"] for place in (0, 1, 3)] == ["a", "b", "c"]


def test_what_waits_is_answered_before_it_closes():
    answers, _ = answered([([text], {"top_k": 1}) for text in "abcdefg"], close_early=True)
    assert [answer[0]["label"] for answer in answers] == list("abcdefg")


def test_the_first_waits_for_others():
    async def run():
        model = Model()
        model.may_answer.set()
        batcher = Batcher(model, 2, max_wait=30)
        batcher.start()
        first = asyncio.create_task(batcher.submit(["a"], {"top_k": 1}))
        await asyncio.sleep(0.01)
        assert not model.passes
        await asyncio.gather(first, batcher.submit(["b"], {"top_k": 1}))
        await batcher.close()
        with pytest.raises(RuntimeError, match="takes no more requests"):
            await batcher.submit(["c"], {"top_k": 1})
        return model.passes

    assert [inputs for inputs, _ in asyncio.run(run())] == [["a", "b"]]


def test_who_went_away_is_not_answered():
    async def run():
        model = Model()
        batcher = Batcher(model, 4, max_wait=0)
        batcher.start()
        first = asyncio.create_task(batcher.submit(["a"], {"top_k": 1}))
        await asyncio.to_thread(model.is_asked.wait, 10)
        gone, other = (asyncio.create_task(batcher.submit([text], {"top_k": 1})) for text in "bc")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        model.may_answer.set()
        await asyncio.gather(first, other)
        await batcher.close()
        return model.passes

    assert [inputs for inputs, _ in asyncio.run(run())] == [["a"], ["c"]]
