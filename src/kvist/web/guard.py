"""Who may ask what over HTTP, decided before any route is looked at.

The laws: where a token is set, only what tells nothing about prompts, sessions or files is answered without it, and the
comparison takes as long whatever was presented. On loopback only names of this machine are answered to, so that no
web page can make its own name mean this machine (DNS rebinding); and nothing that another page's script sends changes
anything.
"""

from __future__ import annotations

import base64
import hmac
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvist.web.answers import refuse

_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_SAFE_METHODS: Final = ("GET", "HEAD")


class Guard:
    """Asks every caller for what it needs, and passes on those who have it."""

    def __init__(self, app: ASGIApp, *, token: str, is_loopback: bool, open_paths: frozenset[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._is_loopback = is_loopback
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # Neither WebSockets nor a lifespan are served.
            return
        refusal = self._refusal(scope["path"], scope["method"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            code, reason = refusal
            headers = {"www-authenticate": 'Bearer, Basic realm="kvist"'} if code == 401 else {}
            await refuse(code, reason, headers)(scope, receive, send)

    def _refusal(self, path: str, method: str, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._is_loopback and _name(host) not in _LOCAL_NAMES:
            return 421, f"this answers to {', '.join(_LOCAL_NAMES)} alone, not to the Host of this request"
        origin = headers.get("origin")
        if origin is not None and method not in _SAFE_METHODS and urlsplit(origin).netloc != host:
            return 403, "this request comes from another site's page"
        if self._token and path not in self._open_paths and not self._is_known(headers.get("authorization", "")):
            return 401, (
                "this needs the header 'Authorization: Bearer TOKEN', with the token of http_token_file; in a browser "
                "it is the password"
            )
        return None

    def _is_known(self, authorization: str) -> bool:
        scheme, _, presented = authorization.partition(" ")
        said = presented.strip().encode("latin-1")
        if scheme.lower() == "basic":
            said = _password(said)
        return hmac.compare_digest(said, self._token) and scheme.lower() in ("bearer", "basic")


def _password(credentials: bytes) -> bytes:
    """Return the password that a browser has asked for, whatever the user's name; empty if there is none."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _name(host: str) -> str:
    """Return the host of ``host``, ``host:port`` or ``[host]:port``, in small letters; empty if it is none of them."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
