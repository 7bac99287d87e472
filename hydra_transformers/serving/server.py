"""A model over HTTP."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .._io.files import parse_json
from ..models.decision import with_groups
from .answerer import Answerer, RequestError, as_json
from .batcher import Batcher
from .metrics import Metrics, WatchedPromises


logger = logging.getLogger(__name__)

SECONDS_TO_CLOSE = 30  # for requests in flight
SECONDS_FOR_BODY = 30.0  # a slower client would keep others out


def create_app(
    answerer: Answerer,
    max_batch: int = 16,
    max_wait_ms: float = 5.0,
    max_queue: int = 64,
    max_body: int = 10_000_000,
    monitor: str | os.PathLike | None = None,
) -> FastAPI:
    """Make the app with POST /predict, GET /health and GET /metrics.

    Managed containers ask GET /ping and POST /invocations, which are other names of the first two.

    Args:
        answerer (`HydraPredictor` or `Cascade`): the model, or several stages.
        max_batch (`int`, defaults to 16): inputs per pass of the model, and per request.
        max_wait_ms (`float`, defaults to 5.0): how long a request waits for others to share its
            pass.
        max_queue (`int`, defaults to 64): requests that wait or are being answered; another gets
            503 and a time to retry.
        max_body (`int`, defaults to 10,000,000): bytes of a request; a larger one gets 413.
            Requests that are still arriving may hold `max_queue` times as many.
        monitor (`str` or `os.PathLike`, *optional*): the file of a `Monitor`, which counts all
            predictions; it is written every second. /health and /metrics then say whether the
            promises are kept.
    """
    answerer.most_inputs = max_batch
    watched = None
    if monitor is not None:
        if answerer.model is None:
            raise ValueError("monitor is for one model, and this is a cascade: leave it out")
        watched = WatchedPromises(answerer.model, monitor)
    batcher = Batcher(answerer.answer, max_batch, max_wait_ms / 1000)
    arriving = Arriving(max_body, max_queue)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.close()
        if watched is not None:
            watched.save()

    # The app, and what it knows of itself.
    app = FastAPI(lifespan=lifespan, openapi_url=None)  # without /docs, whose scripts come from a public server
    app.state.requests = 0
    metrics = Metrics(watched)

    @app.exception_handler(HTTPException)
    async def one_sentence(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)

    @app.get("/ping")
    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether the server is well, how many requests it has, and how the promises stand."""
        status = "closing"
        code = 503
        if batcher.is_running:
            status = "ok"
            code = 200
        content: dict[str, Any] = {"status": status, "requests": app.state.requests}
        if watched is not None:
            content["promises"] = watched.states()
        return JSONResponse(content, code)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Count requests, latencies and abstentions, for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # Predictions.
    def response(answers: list[dict[str, Any]], is_list: bool) -> JSONResponse:
        if watched is not None:
            watched.count(answers)
        answers = as_json(answers)
        metrics.count_answers(answers)
        return JSONResponse(answers if is_list else answers[0])

    async def answer(request: Request) -> JSONResponse:
        body = await arriving.read(request)
        if app.state.requests >= max_queue:
            raise arriving.too_busy()
        app.state.requests += 1
        try:
            # Large requests and responses are decoded and written outside of the event loop, which
            # others wait for.
            is_list, inputs, parameters = await asyncio.to_thread(_read, body, answerer)
            groups = parameters.pop("groups", None)  # requests with other groups share a pass
            answers = await batcher.submit(inputs, parameters)
            if groups is not None:
                answers = with_groups(answerer.model, answers, groups)
            return await asyncio.to_thread(response, answers, is_list)
        finally:
            app.state.requests -= 1

    @app.post("/invocations")
    @app.post("/predict")
    async def predict(request: Request) -> JSONResponse:
        """Predict for texts, images or audio, with the uncertainty."""
        status = 500
        with metrics.seconds.time():
            try:
                answered = await answer(request)
                status = 200
                return answered
            except HTTPException as error:
                status = error.status_code
                raise
            except Exception as error:
                logger.exception("a request was not answered")
                raise HTTPException(500, "the model failed on this request: the server's log tells why") from error
            finally:
                metrics.requests.labels(status).inc()

    return app


class Arriving:
    """Reads the bodies of requests.

    Slow clients hold bytes, not places in the queue, so they keep nobody out. Starlette can limit
    the bytes of one request; here all that are still arriving are limited together, too.

    max_body: bytes of a request
    max_queue: how many times as many all requests together may hold
    """

    def __init__(self, max_body: int, max_queue: int):
        self.max_body = max_body
        self.max_queue = max_queue
        self.held = 0

    async def read(self, request: Request) -> bytes:
        """Return a request's body; raise for one that is too large, too slow, or not JSON."""
        content_type, _, _ = request.headers.get("content-type", "").partition(";")
        if content_type.strip().lower() != "application/json":
            raise HTTPException(415, "the request is not JSON: send it with Content-Type: application/json")
        body = bytearray()
        try:
            await asyncio.wait_for(self._read_into(body, request), SECONDS_FOR_BODY)
        except ClientDisconnect as error:
            raise HTTPException(400, "the request ended before all of it had arrived") from error
        except asyncio.TimeoutError as error:  # another class before Python 3.11
            raise HTTPException(408, f"the request did not arrive within {SECONDS_FOR_BODY:.0f} seconds") from error
        finally:
            self.held -= len(body)
        return bytes(body)

    async def _read_into(self, body: bytearray, request: Request) -> None:
        """Append what arrives to `body`, and count it."""
        async for part in request.stream():
            body.extend(part)
            self.held += len(part)
            if len(body) > self.max_body:
                sentence = f"the request is larger than {self.max_body:,} bytes: send less at once, or smaller files"
                raise HTTPException(413, sentence)
            if self.held > self.max_queue * self.max_body:
                raise self.too_busy()

    def too_busy(self) -> HTTPException:
        """Make the error for a client that has to come again."""
        return HTTPException(503, f"{self.max_queue} requests wait already: try again", {"Retry-After": "1"})


def _read(body: bytes, answerer: Answerer) -> tuple[bool, list[Any], dict[str, Any]]:
    """Return whether the request has a list of inputs, and its inputs and parameters."""
    try:
        data = parse_json(body)
    except ValueError as error:
        raise HTTPException(400, "the request is not valid JSON") from error
    try:
        inputs, parameters = answerer.read(data)
    except RequestError as error:
        raise HTTPException(422, str(error)) from error
    return isinstance(data["inputs"], list), inputs, parameters


def run(app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGINT or SIGTERM, then answer the requests in flight.

    The log says where it listens.

    Args:
        app (`FastAPI`): of `create_app`.
        host (`str`, defaults to `"127.0.0.1"`): where it listens.
        port (`int`, defaults to 8000): where it listens.
    """
    settings = uvicorn.Config(
        app,
        host=host,
        port=port,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
        access_log=False,
        server_header=False,
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run()
