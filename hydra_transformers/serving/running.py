"""The app on a port, until it is told to end."""

from contextlib import suppress

import uvicorn
from fastapi import FastAPI


SECONDS_TO_CLOSE = 30  # for what is in flight


def run(app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serves until SIGINT or SIGTERM, then answers what is in flight; tells where it listens."""
    settings = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run()
