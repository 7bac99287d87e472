"""A model over HTTP."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .._io.files import parse_json
from .._version import __version__
from ..hub.handler import Answerer, RequestError, as_json
from .batcher import Batcher
from .prometheus import CONTENT_TYPE, Metrics
from .protocols import Forms, Protocol, protocols_of


logger = logging.getLogger(__name__)

SECONDS_TO_CLOSE = 30  # for requests in flight
SECONDS_FOR_BODY = 30.0  # a slower client would keep others out
RETRY_AFTER = "1"  # seconds
PARAMETERS = {
    "top_k": {"type": "integer", "default": 5, "description": "how many scores"},
    "candidate_labels": {"type": "array", "items": {"type": "string"}, "description": "for CLIP and SigLIP"},
    "hypothesis_template": {"type": "string", "description": "for CLIP and SigLIP: the sentence around a label"},
}
REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "inputs": {"description": "a text, a pair of texts, an image or WAV file in base64, or a list of these"},
        "parameters": {"type": "object", "properties": PARAMETERS},
    },
    "example": {"inputs": "a text, or an image or WAV file in base64", "parameters": {"top_k": 3}},
}
FIELDS = (
    "label, score, uncertainty and its parts, abstain and why, prediction_set or interval, scores; for a list a list"
)
RESPONSES = {
    200: {"description": FIELDS},
    422: {"description": "The request cannot be answered: `error` has one sentence, as for every status above 399"},
    503: {"description": "Too many requests wait: try again"},
}


def create_app(
    answerer: Answerer,
    max_batch: int = 16,
    max_wait_ms: float = 5.0,
    max_queue: int = 64,
    max_body: int = 10_000_000,
    docs: bool = True,
) -> FastAPI:
    """The app with POST /predict, GET /health, GET /metrics, GET / and GET /docs, and with the routes of vLLM's and KServe's
    clients.

    Args:
        answerer: a `Predictor`.
        max_batch: inputs per pass of the model, and per request.
        max_wait_ms: how long a request waits for others to share its pass.
        max_queue: requests at a time, read, waiting or being answered; another one gets 503 and a time to retry.
        max_body: bytes of a request; a larger one gets 413.
        docs: whether to have /docs, FastAPI's page to read and try the API. Its scripts come from a public server.
    """
    answerer.most_inputs = max_batch
    about = getattr(answerer, "about", {})
    batcher = Batcher(answerer.answer, max_batch, max_wait_ms / 1000)
    limits = {"max_batch": max_batch, "max_wait_ms": max_wait_ms, "max_queue": max_queue, "max_body": max_body}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.close()

    openapi_url = "/openapi.json" if docs else None
    name = about.get("model", "hydra_transformers")
    app = FastAPI(title=name, lifespan=lifespan, openapi_url=openapi_url, redoc_url=None)
    app.state.requests = 0
    metrics = Metrics(name)

    @app.exception_handler(HTTPException)
    async def one_sentence(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)

    @app.get("/")
    async def info() -> dict[str, Any]:
        """The model, its labels and the limits."""
        return about | {"limits": limits}

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the server is well, and how many requests it has."""
        status = {"status": "ok" if batcher.is_running else "closing", "requests": app.state.requests}
        return JSONResponse(status, 200 if batcher.is_running else 503)

    @app.get("/metrics")
    async def prometheus() -> PlainTextResponse:
        """Requests, latencies and refusals, for Prometheus."""
        return PlainTextResponse(metrics.text(app.state.requests), media_type=CONTENT_TYPE)

    async def respond(request: Request, path: str, read: Callable, write: Callable) -> JSONResponse:
        """Answers a request of any protocol. read: (request) -> inputs, parameters; write: (answers, request) -> response"""
        start, status = time.perf_counter(), 500
        try:
            if app.state.requests >= max_queue:
                raise HTTPException(503, f"{max_queue} requests wait already: try again", {"Retry-After": RETRY_AFTER})
            app.state.requests += 1
            try:
                data, (inputs, parameters) = await asyncio.to_thread(_read, await _body_of(request, max_body), read)
                answers = as_json(await batcher.submit(inputs, parameters))
                metrics.count_answers(answers)
                status = 200
                return JSONResponse(write(answers, data))
            except HTTPException:
                raise
            except Exception as error:
                logger.exception("a request was not answered")
                raise HTTPException(500, "the model failed on this request: the server's log tells why") from error
            finally:
                app.state.requests -= 1
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            metrics.count_request(path, status, time.perf_counter() - start)

    request_body = {"required": True, "content": {"application/json": {"schema": REQUEST}}}

    @app.post("/predict", responses=RESPONSES, openapi_extra={"requestBody": request_body})
    async def predict(request: Request) -> JSONResponse:
        """Answers texts, images or sounds, and says how sure it is."""
        return await respond(
            request,
            "/predict",
            answerer.read,
            lambda answers, data: answers if isinstance(data["inputs"], list) else answers[0],
        )

    if answerer.kind != "tokens":  # clients of these protocols know no lists of entities
        _add_protocols(app, answerer, name, respond, lambda: batcher.is_running)
    return app


def _add_protocols(
    app: FastAPI, answerer: Answerer, name: str, respond: Callable, is_ready: Callable[[], bool]
) -> None:
    """The routes of other servers' clients. respond: of `create_app`"""

    def check_name(asked: Any) -> None:
        if isinstance(asked, str) and asked.removesuffix("/versions/1") != name:
            raise HTTPException(404, f"there is no model {asked[:100]!r} here: its name is {name}")

    def route(protocol: Protocol) -> Callable:
        def read(data: Any) -> tuple[list[Any], dict[str, Any]]:
            if not isinstance(data, dict):
                raise RequestError("the request is not an object")
            check_name(data.get("model"))
            return answerer.read(protocol.read(data))

        async def answer(request: Request) -> JSONResponse:
            check_name(request.path_params.get("name"))
            return await respond(request, protocol.paths[0], read, protocol.write)

        return answer

    for protocol in protocols_of(answerer, name):
        for path in protocol.paths:
            app.add_api_route(path, route(protocol), methods=["POST"], summary=protocol.summary, responses=RESPONSES)
    forms = Forms.of(answerer, name)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, as KServe v1 and as OpenAI's clients list it."""
        return {"models": [name], "object": "list", "data": [{"id": name, "object": "model", "owned_by": "local"}]}

    @app.get("/v1/models/{asked:path}")
    async def model_v1(asked: str) -> JSONResponse:
        check_name(asked)
        return JSONResponse({"name": name, "ready": is_ready()}, 200 if is_ready() else 503)

    @app.get("/v2")
    async def server_v2() -> dict[str, Any]:
        return {"name": "hydra_transformers", "version": __version__, "extensions": []}

    @app.get("/v2/health/live")
    @app.get("/v2/health/ready")
    async def health_v2() -> JSONResponse:
        return JSONResponse({"live": True, "ready": is_ready()}, 200 if is_ready() else 503)

    @app.get("/v2/models/{asked:path}/ready")
    async def ready_v2(asked: str) -> JSONResponse:
        check_name(asked)
        return JSONResponse({"name": name, "ready": is_ready()}, 200 if is_ready() else 503)

    @app.get("/v2/models/{asked:path}")
    async def model_v2(asked: str) -> dict[str, Any]:
        check_name(asked)
        return forms.metadata()


async def _body_of(request: Request, most: int) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the request is not JSON: send it with Content-Type: application/json")
    too_large = HTTPException(413, f"the request is larger than {most:,} bytes: send less at once, or smaller files")
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or not length.isdecimal() or int(length) > most:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), SECONDS_FOR_BODY)
    except ClientDisconnect as error:
        raise HTTPException(400, "the request ended before all of it had arrived") from error
    except asyncio.TimeoutError as error:  # another class before Python 3.11
        raise HTTPException(408, f"the request did not arrive within {SECONDS_FOR_BODY:.0f} seconds") from error


def _read(body: bytes, read: Callable) -> tuple[Any, tuple[list[Any], dict[str, Any]]]:
    """The request, and its inputs and parameters."""
    try:
        data = parse_json(body)
    except ValueError as error:
        raise HTTPException(400, "the request is not valid JSON") from error
    try:
        return data, read(data)
    except RequestError as error:
        raise HTTPException(422, str(error)) from error


def run(app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serves until SIGINT or SIGTERM, then answers the requests in flight; the log says where it listens."""
    quiet = {"access_log": False, "server_header": False}
    settings = uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=SECONDS_TO_CLOSE, **quiet)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run()
