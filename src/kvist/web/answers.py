"""Values as HTTP answers, and bodies as values.

The laws: whatever goes wrong is JSON with one ``error``; nothing is kept by caches or guessed to be of another type; a
body is bounded in bytes and in time, and decodes to what its type says or is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvist.errors import (
    DeadlineExceeded,
    Draining,
    KeyInvalid,
    KvistError,
    NotPermitted,
    Overloaded,
    Refused,
    UnknownEngine,
    Unreachable,
)

BODY_NBYTES_MAX: Final = 1 << 20
BODY_S: Final = 10.0
"""How long a body may take to come."""
_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_CODES: Final[Mapping[type[KvistError], int]] = {
    UnknownEngine: 404,
    KeyInvalid: 400,
    DeadlineExceeded: 504,
    Unreachable: 503,
    Draining: 503,
    Overloaded: 503,
    NotPermitted: 403,
    Refused: 400,
}
"""The first class that an error is of; what is none of them is 502."""

T = TypeVar("T")


class Failed(msgspec.Struct, frozen=True):
    """What went wrong."""

    error: str


def answer(value: object, code: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(value), code, _HEADERS, "application/json")


def answer_text(content: bytes, content_type: str) -> Response:
    """Return text as it is."""
    return Response(content, 200, {**_HEADERS, "content-type": content_type})


def refuse(code: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return why there is no answer."""
    response = answer(Failed(reason), code)
    response.headers.update(headers or {})
    return response


def on_http_error(_: Request, error: Exception) -> Response:
    """Return what the framework refuses: an unknown path, a method that is not served."""
    assert isinstance(error, HTTPException)
    return refuse(error.status_code, error.detail, error.headers)


def on_kvist_error(_: Request, error: Exception) -> Response:
    """Return what the daemon refuses, or why it does not say anything."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), 502)
    return refuse(code, str(error))


def on_fault(_: Request, __: Exception) -> Response:
    """Return that there is a fault, which the log tells of."""
    return refuse(500, "a fault in kvist; the daemon's log has its traceback")


async def read_body(request: Request, expected: type[T]) -> T:
    """Return what a request's body says.

    Raises:
        HTTPException: it is no JSON, says something else, is too long, or does not come to its end.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be of the type application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_NBYTES_MAX:
                    raise HTTPException(
                        413, f"the body is longer than {BODY_NBYTES_MAX} bytes", {"connection": "close"}
                    )
    except TimeoutError as error:
        raise HTTPException(408, f"the body took more than {BODY_S:g} s", {"connection": "close"}) from error
    try:
        return msgspec.json.decode(body, type=expected)
    except msgspec.DecodeError as error:
        raise HTTPException(400, str(error)) from error
