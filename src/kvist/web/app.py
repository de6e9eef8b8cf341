"""The routes, and what each of them answers.

The laws: a route shows what the daemon says over its socket, and nothing of this process, its files or its environment;
it runs no code that comes with a request. Health never waits for the daemon.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvist.client.client import Build, Client, expect
from kvist.client.locating import Located, locate
from kvist.errors import KvistError, Malformed, NotPermitted, Unreachable
from kvist.watching.watcher import Sample, Watcher
from kvist.web import dashboard
from kvist.web.answers import answer, answer_text, on_fault, on_http_error, on_kvist_error, read_body
from kvist.web.guard import Guard
from kvist.web.metrics import Exposition
from kvist.web.openapi import Endpoint, describe
from kvist.wire import messages as wire

FRESH_S: Final = 0.5
"""How old a sample may be that is shown as what is so now."""
SILENT_S_MAX: Final = 5.0
"""For how long the daemon may say nothing and be called healthy."""


_PURGE_S: Final = 60.0
_NO_PURGE: Final = "every user of this host reaches this address: to purge over it, set http_token_file"


class Healthy(msgspec.Struct, frozen=True):
    """The daemon has answered lately."""

    silent_s: float
    """For how many seconds it has not."""


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt to look for."""

    tokens: list[int]
    engine: str = ""
    """An engine's id or a model's name; empty if only one set of keys is in use."""
    adapter: str = ""
    salt: str = ""


class Purge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to drop: of a tenant, of a model, of both, or everything."""

    tenant: str | None = None
    """Empty for those without a name."""
    model: str | None = None
    everything: bool = False


def make_app(watcher: Watcher, *, token: str = "", is_loopback: bool = True) -> Starlette:
    """Return the application. With a ``token``, all but health, metrics and ``/openapi.json`` asks for it."""
    routes = _Routes(watcher, may_purge=bool(token))
    endpoints = routes.table()
    guard = Middleware(
        Guard,
        token=token,
        is_loopback=is_loopback,
        open_paths=frozenset(one.path for one in endpoints if one.is_open),
    )
    return Starlette(
        routes=[
            *(Route(one.path, one.handle, methods=[one.method]) for one in endpoints),
            *dashboard.routes(watcher),
        ],
        middleware=[guard],
        exception_handlers={HTTPException: on_http_error, KvistError: on_kvist_error, Exception: on_fault},
    )


class _Routes:
    """What is answered, out of what the watcher sees. Plain functions run on threads, and may wait for the daemon."""

    def __init__(self, watcher: Watcher, *, may_purge: bool) -> None:
        self._watcher = watcher
        self._may_purge = may_purge
        self._exposition = Exposition(lambda: watcher.recent(FRESH_S))
        self._document = describe(self.table())

    def table(self) -> list[Endpoint]:
        """Return every route."""
        return [
            Endpoint("GET", "/healthz", "Whether the daemon answers.", self._healthz, Healthy, is_open=True),
            Endpoint("GET", "/readyz", "Whether it takes new work.", self._readyz, Healthy, is_open=True),
            Endpoint("GET", "/metrics", "Counters for Prometheus.", self._metrics, str, is_open=True),
            Endpoint("GET", "/status", "What 'kvist status --json' prints.", self._status, wire.StatusReply),
            Endpoint("GET", "/api/sessions", "Who is connected.", self._sessions, wire.Description),
            Endpoint("POST", "/api/lookup", "Where a prompt's chunks are.", self._lookup, Located, takes=Prompt),
            Endpoint("POST", "/api/purge", "Drop what is cached.", self._purge, wire.PurgeReply, takes=Purge),
            Endpoint("GET", "/openapi.json", "This description.", self._describe, dict, is_open=True),
        ]

    async def _healthz(self, _: Request) -> Response:
        return answer(self._healthy())

    async def _readyz(self, _: Request) -> Response:
        healthy = self._healthy()
        latest = self._watcher.latest
        if latest is not None and latest.status.is_draining:
            raise Unreachable(f"the daemon (pid {latest.status.pid}) is stopping")
        return answer(healthy)

    def _healthy(self) -> Healthy:
        """Return for how long the daemon has said nothing.

        Raises:
            Unreachable: for too long.
        """
        silent_s = self._watcher.silent_s
        if silent_s > SILENT_S_MAX:
            raise Unreachable(self._watcher.failure or f"the daemon has said nothing for {silent_s:.1f} s")
        return Healthy(silent_s)

    def _metrics(self, _: Request) -> Response:
        return answer_text(self._exposition.render(), self._exposition.content_type)

    def _status(self, _: Request) -> Response:
        return answer(self._sample().status)

    def _sessions(self, _: Request) -> Response:
        return answer(self._watcher.ask(wire.Describe, wire.Description))

    async def _lookup(self, request: Request) -> Response:
        return answer(await run_in_threadpool(self._locate, await read_body(request, Prompt)))

    def _locate(self, prompt: Prompt) -> Located:
        def ask(build: Build) -> wire.Found:
            return self._watcher.ask(build, wire.Found)

        return locate(
            ask, self._sample().sessions, prompt.tokens,
            engine=prompt.engine, adapter=prompt.adapter, salt=prompt.salt,
        )  # fmt: skip

    async def _purge(self, request: Request) -> Response:
        if not self._may_purge:
            raise NotPermitted(_NO_PURGE)
        wanted = await read_body(request, Purge)
        if wanted.everything == (wanted.tenant is not None or wanted.model is not None):
            raise Malformed(f"{wanted}: name a tenant, a model, or both; or say everything")
        return answer(await run_in_threadpool(self._drop, wanted))

    def _drop(self, wanted: Purge) -> wire.PurgeReply:
        """Purge over a connection of its own, since health must not wait for it."""
        client = Client(self._watcher.socket_path, engine_id="kvist-web", name="kvist web purge", deadline_s=_PURGE_S)
        with contextlib.closing(client):
            reply = client.call(lambda number: wire.Purge(number, wanted.tenant, wanted.model))
        return expect(reply, wire.PurgeReply)

    async def _describe(self, _: Request) -> Response:
        return answer(self._document)

    def _sample(self) -> Sample:
        """Return what is so now.

        Raises:
            Unreachable: the daemon does not say.
        """
        sample = self._watcher.recent(FRESH_S)
        if sample is None:
            raise Unreachable(self._watcher.failure)
        return sample
