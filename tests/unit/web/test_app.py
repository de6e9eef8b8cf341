"""Each route answers with what the daemon says, in the shape that ``/openapi.json`` tells, or says in JSON why not."""

import jsonschema
import msgspec
import pytest
from starlette.routing import Route

from kvist.errors import DeadlineExceeded, KeyInvalid, Malformed, Overloaded, ProtocolError, Unreachable
from kvist.web.answers import BODY_NBYTES_MAX, on_kvist_error
from kvist.web.app import FRESH_S, SILENT_S_MAX, make_app
from kvist.wire import messages as wire
from tests.support.http import JSON, Answer, call
from tests.unit.web.conftest import NAMESPACE, TOKENS, Seen


def look(seen: Seen, tokens: list[int], **more: str) -> Answer:
    return call(
        seen.app, "/api/lookup", method="POST", headers=JSON, body=msgspec.json.encode({"tokens": tokens, **more})
    )


def check_shape(document: dict, path: str, method: str, code: int, answer: Answer) -> None:
    """Assert that an answer is one that the document tells of."""
    responses = document["paths"][path][method]["responses"]
    told = responses.get(str(code), responses["default"])["content"]
    content_type = answer.headers["content-type"].partition(";")[0]
    assert list(told) == [content_type]
    if content_type == "application/json":
        schema = {**told[content_type]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json)


PAGE = ("/", "/parts/{name}", "/history.json")
"""Routes for people, which no program needs described."""


def test_every_answer_is_as_described(seen: Seen):
    """The document has every route and its methods, and what each answers, refusals too, is valid under its schema."""
    document = call(seen.app, "/openapi.json").json
    routes = {(one.path, method) for one in seen.app.routes if isinstance(one, Route) for method in one.methods}
    routes = {(path, method) for path, method in routes if path not in PAGE}
    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert {(path, method) for path, method in routes if method != "HEAD"} == told
    seen.join("one", NAMESPACE)
    body = msgspec.json.encode({"tokens": TOKENS})
    answer = call(seen.app, "/api/purge", method="POST", headers=JSON, body=b'{"everything": true}')
    assert (answer.code, "http_token_file" in answer.json["error"]) == (403, True)
    check_shape(document, "/api/purge", "post", 403, answer)
    told.remove(("/api/purge", "POST"))
    for path, method in told:
        answer = call(seen.app, path, method=method, headers=JSON, body=body if method == "POST" else b"")
        assert (path, answer.code) == (path, 200)
        check_shape(document, path, method.lower(), 200, answer)
    seen.client.is_silent = True
    seen.daemon.now += SILENT_S_MAX + 1
    seen.watcher.sample()
    for path, method in told - {("/openapi.json", "GET"), ("/metrics", "GET")}:
        answer = call(seen.app, path, method=method, headers=JSON, body=body if method == "POST" else b"")
        assert (path, answer.code, answer.json) == (path, 503, {"error": "it says nothing"})
        check_shape(document, path, method.lower(), 503, answer)


def test_the_status_is_what_the_daemon_says(seen: Seen):
    """``/status`` decodes to the reply that the command line prints, and ``/api/sessions`` to who is connected."""
    seen.daemon.now += FRESH_S + 1
    status = msgspec.json.decode(call(seen.app, "/status").body, type=wire.StatusReply)
    direct = seen.daemon.status()
    assert msgspec.structs.replace(status, id=0) == msgspec.structs.replace(direct, id=0)
    sessions = msgspec.json.decode(call(seen.app, "/api/sessions").body, type=wire.Description).sessions
    assert [one.name for one in sessions][-1] == "kvist web"
    assert len(sessions) == status.num_sessions


def test_what_is_fresh_is_not_asked_for_again(seen: Seen):
    """Within half a second all who look see one sample; after that the daemon is asked, once."""
    num_asked = seen.client.num_asked
    for path in ("/status", "/metrics", "/status"):
        assert call(seen.app, path).code == 200
    assert seen.client.num_asked == num_asked
    seen.daemon.now += FRESH_S + 0.1
    for path in ("/status", "/metrics", "/status"):
        assert call(seen.app, path).code == 200
    assert seen.client.num_asked == num_asked + 2  # How it is, and who is connected.


def test_health_is_told_without_asking(seen: Seen):
    """Healthy is a daemon that has answered within the last seconds; a probe itself asks nothing."""
    num_asked = seen.client.num_asked
    seen.daemon.now += SILENT_S_MAX
    assert call(seen.app, "/healthz").json == {"silent_s": SILENT_S_MAX}
    seen.daemon.now += 0.1
    answer = call(seen.app, "/healthz")
    assert (answer.code, "said nothing for 5.1 s" in answer.json["error"]) == (503, True)
    assert call(seen.app, "/readyz").code == 503
    assert seen.client.num_asked == num_asked


def test_a_daemon_that_stops_is_healthy_and_not_ready(seen: Seen):
    """While it is draining, nothing should be sent to it, and nothing is wrong with it."""
    assert call(seen.app, "/readyz").code == 200
    seen.daemon.service.begin_draining()
    seen.watcher.sample()
    assert call(seen.app, "/healthz").code == 200
    answer = call(seen.app, "/readyz")
    assert (answer.code, "is stopping" in answer.json["error"]) == (503, True)


def test_a_prompt_is_found_where_it_is(seen: Seen):
    """A lookup over HTTP finds the chunks that the engine has stored under the same tokens and salt, and no others."""
    seen.join("one", NAMESPACE)
    seen.store_prompt(TOKENS, num_chunks=2, salt="tenant")
    for named in ("", "one", "a model"):
        assert look(seen, TOKENS, engine=named, salt="tenant").json == {
            "model": "a model", "chunk_tokens": 4, "num_tokens": 13, "num_tokens_now": 8, "num_tokens_with_tiers": 8,
            "tiers": ["memory"],
            "rows": [{"group": 0, "shard": 0, "num_chunks": {"nowhere": 1, "pool": 2, "memory": 0}}],
        }  # fmt: skip
    assert look(seen, TOKENS).json["num_tokens_now"] == 0
    assert look(seen, TOKENS, salt="tenant", adapter="one").json["num_tokens_now"] == 0
    assert look(seen, TOKENS[:3]).json["rows"] == []


def test_an_engine_that_is_not_meant_is_named(seen: Seen):
    """Without an engine, with an unknown one, or with two that share no keys, the answer says who is connected."""
    assert look(seen, TOKENS).json == {"error": "no engine that tells what it serves is connected"}
    seen.join("one", NAMESPACE)
    seen.join("one", NAMESPACE)
    seen.join("two", msgspec.structs.replace(NAMESPACE, revision="other"))
    for named, words in (("three", "no engine 'three'"), ("", "2 engines"), ("a model", "2 engines")):
        answer = look(seen, TOKENS, engine=named)
        assert answer.code == 404
        assert words in answer.json["error"]
        assert "connected are one (a model), two (a model)" in answer.json["error"]
    assert look(seen, TOKENS, engine="two").code == 200


def test_what_is_no_request_is_refused_with_the_reason(seen: Seen):
    """Unknown paths, other methods, bodies that are too long, of another type or of another shape: a code and JSON."""
    seen.join("one", NAMESPACE)
    for path, method, headers, body, code, words in (
        ("/nothing", "GET", {}, b"", 404, "Not Found"),
        ("/status/../etc", "GET", {}, b"", 404, "Not Found"),
        ("/status", "POST", JSON, b"{}", 405, "Method Not Allowed"),
        ("/api/lookup", "GET", {}, b"", 405, "Method Not Allowed"),
        ("/api/lookup", "POST", {"content-type": "text/plain"}, b'{"tokens": []}', 415, "application/json"),
        ("/api/lookup", "POST", JSON, b"", 400, "truncated"),
        ("/api/lookup", "POST", JSON, b"{", 400, "truncated"),
        ("/api/lookup", "POST", JSON, b'{"tokens": "abc"}', 400, "Expected `array`"),
        ("/api/lookup", "POST", JSON, b'{"tokens": [1], "more": 1}', 400, "unknown field `more`"),
        ("/api/lookup", "POST", JSON, b'{"tokens": [-1, 2, 3, 4]}', 400, "token ids must be in"),
        ("/api/lookup", "POST", JSON, b'{"tokens": [1], "salt": "' + b"x" * 5000 + b'"}', 400, "salt is 5000 bytes"),
        ("/api/lookup", "POST", JSON, b" " * (BODY_NBYTES_MAX + 1), 413, "longer than 1048576 bytes"),
    ):
        answer = call(seen.app, path, method=method, headers=headers, body=body)
        assert (path, body[:30], answer.code) == (path, body[:30], code)
        assert words in answer.json["error"]
    assert call(seen.app, "/status", method="POST").headers["allow"] in ("GET, HEAD", "HEAD, GET")


def test_what_the_daemon_refuses_has_a_code_of_its_own(seen: Seen):
    """Too busy or gone may be tried again, a wrong request may not, and a wrong answer is the server's fault."""
    errors = (Overloaded, Unreachable, DeadlineExceeded, Malformed, KeyInvalid, ProtocolError)
    assert [on_kvist_error(None, kind("why")).status_code for kind in errors] == [503, 503, 504, 400, 400, 502]


def test_a_fault_tells_nothing_of_itself(seen: Seen, monkeypatch: pytest.MonkeyPatch):
    """What goes wrong inside is logged, and the caller gets 500 without a word of it."""
    watcher = seen.watcher
    monkeypatch.setattr(watcher, "recent", lambda _: {}["the secret"])
    answer = call(make_app(watcher), "/status", fault=(KeyError,))
    assert (answer.code, answer.json) == (500, {"error": "a fault in kvist; the daemon's log has its traceback"})
