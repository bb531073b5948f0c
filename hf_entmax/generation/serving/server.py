"""Transformers' server, whose clients are told why a request was refused."""

from __future__ import annotations

import functools
from typing import Any

from hf_entmax.generation.serving.hooks import HOOKED, NO_ROOM, has_server


def prepare_server() -> None:
    """Make every server that is started from now on answer a request without room with status 400 and the reason.

    Otherwise its client sees status 500 and "Internal Server Error", and the reason stands in the server's log alone.

    Raises:
        ImportError: if packages of the server are missing.
    """
    if not has_server():
        raise ImportError('The server needs more packages: pip install "hf_entmax[serving]"')
    from transformers.cli.serving import server

    if hasattr(server.build_server, HOOKED):
        return
    original = server.build_server

    @functools.wraps(original)
    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)
        app.add_exception_handler(RuntimeError, _explain)
        return app

    setattr(build_server, HOOKED, True)
    server.build_server = build_server


async def _explain(_request: Any, error: Exception) -> Any:
    from fastapi.responses import JSONResponse

    # The engine hands over the text of an error, and the server raises its own with it.
    if NO_ROOM not in str(error):
        raise error
    reason = {
        "message": str(error),
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    return JSONResponse({"error": reason}, status_code=400)
