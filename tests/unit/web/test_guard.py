"""Callers get what they may have, whatever else they send."""

import base64

import pytest

from kvist.web.app import make_app
from tests.support.http import JSON, call
from tests.unit.web.conftest import Seen

TOKEN = "0123456789abcdef"
OPEN = ("/healthz", "/readyz", "/metrics", "/openapi.json")
CLOSED = ("/status", "/api/sessions", "/api/lookup", "/api/purge", "/", "/nothing", "/metrics/", "//metrics")


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


@pytest.mark.parametrize("is_loopback", [True, False])
def test_only_the_token_opens(seen: Seen, is_loopback: bool):
    """With a token, all but health, metrics and the document needs it, on loopback too, and nothing like it will do."""
    app = make_app(seen.watcher, token=TOKEN, is_loopback=is_loopback)
    for path in OPEN:
        assert call(app, path).code == 200
    for presented in (
        "", TOKEN, "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x",
        f"Bearer x {TOKEN}", f"Bearer {TOKEN.upper()}", "Bearer \xff\xfe",
        basic(TOKEN), basic(f"{TOKEN}:"), basic(f":{TOKEN}x"), "Basic", "Basic \xff\xfe",
    ):  # fmt: skip
        for path in CLOSED:
            answer = call(app, path, headers={"authorization": presented} if presented else {})
            assert (path, presented, answer.code) == (path, presented, 401)
            assert answer.headers["www-authenticate"] == 'Bearer, Basic realm="kvist"'
            assert TOKEN not in str(answer)
    for presented in (basic(f":{TOKEN}"), basic(f"anybody:{TOKEN}")):  # What browsers send.
        assert call(app, "/", headers={"authorization": presented}).code == 200
    for scheme in ("Bearer", "bearer"):
        assert call(app, "/status", headers={"authorization": f"{scheme} {TOKEN}"}).code == 200
        assert call(app, "/nothing", headers={"authorization": f"{scheme} {TOKEN}"}).code == 404


def test_only_names_of_this_machine_are_answered_on_loopback(seen: Seen):
    """A page whose own name means this machine sends that name as the host, and gets nothing, not even health."""
    for host in ("localhost", "localhost:8437", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8437", "[::1]", "[::1]:8437"):
        assert call(seen.app, "/status", headers={"host": host}).code == 200
    for host in (
        "", "evil.example", "evil.example:8437", "localhost.evil.example", "127.0.0.1.evil.example",
        "localhost@evil.example", "evil.example#localhost", "[::1", "0.0.0.0", "127.0.0.2", "10.0.0.1:8437",
    ):  # fmt: skip
        for path in ("/healthz", "/status", "/metrics", "/nothing"):
            assert (host, call(seen.app, path, headers={"host": host}).code) == (host, 421)
    elsewhere = make_app(seen.watcher, token=TOKEN, is_loopback=False)
    assert call(elsewhere, "/healthz", headers={"host": "kvist.example"}).code == 200


def test_another_sites_page_changes_nothing(seen: Seen):
    """What a browser sends for another origin's script is refused before its body is looked at."""
    for origin in ("http://evil.example", "null", "http://localhost:8437", "https://localhost.evil.example"):
        answer = call(seen.app, "/api/lookup", method="POST", headers={**JSON, "origin": origin}, body=b"{}")
        assert (origin, answer.code) == (origin, 403)
    own = {**JSON, "host": "localhost:8437", "origin": "http://localhost:8437"}
    assert call(seen.app, "/api/lookup", method="POST", headers=own, body=b"{}").code == 400
