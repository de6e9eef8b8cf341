"""The routes as a table, and the table as an OpenAPI 3.1 document.

The law: whatever a route answers or takes is one type, whose schema is made of it and not written beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvist import __version__
from kvist.web.answers import Failed

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route."""

    method: str
    path: str
    summary: str
    handle: Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]
    answers: Any
    """The type of its answer; ``str`` for text."""
    takes: Any = None
    """The type of its body; None for no body."""
    is_open: bool = False
    """Answered without a token."""


def describe(endpoints: Sequence[Endpoint]) -> dict[str, object]:
    """Return the document."""
    types = [one for endpoint in endpoints for one in (endpoint.answers, endpoint.takes) if one is not None]
    schemas, components = msgspec.json.schema_components([*types, Failed], ref_template="#/components/schemas/{name}")
    schema_of = dict(zip([*types, Failed], schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvist", "version": __version__, "summary": "A KV-cache service for LLM inference."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(one: Endpoint, schema_of: dict[Any, dict[str, Any]]) -> dict[str, object]:
    content_type = "text/plain" if one.answers is str else JSON
    operation: dict[str, object] = {
        "summary": one.summary,
        "security": [{}] if one.is_open else [{}, {"token": []}],
        "responses": {
            "200": {
                "description": "What was asked for.",
                "content": {content_type: {"schema": schema_of[one.answers]}},
            },
            "default": {"description": "Why not.", "content": {JSON: {"schema": schema_of[Failed]}}},
        },
    }
    if one.takes is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[one.takes]}}}
    return operation
