"""HTTP as a caller sees it: against a real server, and against an application in this process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """What came back."""

    code: int
    headers: Mapping[str, str]
    """By their names in small letters."""
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


def request(
    url: str, path: str, *, method: str = "GET", body: bytes = b"", headers: Mapping[str, str] | None = None,
    deadline_s: float = 20.0,
) -> Answer:  # fmt: skip
    """Ask a server."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=deadline_s)
    try:
        connection.request(method, path, body or None, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def call(
    app: Starlette, path: str, *, method: str = "GET", body: bytes = b"", headers: Mapping[str, str] | None = None,
    fault: tuple[type[Exception], ...] = (),
) -> Answer:  # fmt: skip
    """Ask an application of this process; it thinks that it is ``localhost``. A ``fault`` is for a log."""
    sent: list[dict[str, Any]] = []
    pieces = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "client": None,
        "server": ("localhost", 80),
        "headers": [
            (name.lower().encode(), value.encode()) for name, value in {"host": "localhost", **(headers or {})}.items()
        ],
    }  # fmt: skip

    async def receive() -> Any:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    with contextlib.suppress(*fault):
        asyncio.run(app(scope, receive, send))
    return Answer(
        sent[0]["status"],
        {name.decode(): value.decode() for name, value in sent[0]["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )


def families(text: str) -> dict[str, Any]:
    """Return the families of a scrape by their names, counters with their ``_total``."""
    return {one.name + ("_total" if one.type == "counter" else ""): one for one in text_string_to_metric_families(text)}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values of a scrape by name and labels."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
