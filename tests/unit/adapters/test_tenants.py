"""A tenant's name, from an engine's or a request's options to keys and stores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvist.errors import ConfigError, KeyInvalid
from kvist.model.layout import GroupKind
from kvist.wire import messages as wire
from kvist.wire.codec import encode
from tests.support.engine import packed
from tests.support.fake_vllm import adapter
from tests.support.named import connect
from tests.support.scheduled import Request
from tests.support.simulated import SimulatedDaemon
from tests.support.simulated_client import Link
from tests.unit.adapters.test_scheduler import Bench
from tests.unit.adapters.test_worker import STORE, Recorder, metadata

FULL = ((GroupKind.FULL, 8, None, False),)


def bench(tenant: str = "") -> Bench:
    made = Bench(FULL)
    made.side._options = adapter("options").Options(tenant=tenant)
    return made


def request_of(salt: str = "", tenant: str | None = None) -> Request:
    request = Request("r", list(range(40)), 0)
    request.cache_salt = salt
    request.kv_transfer_params = {"kvist": {"tenant": tenant}} if tenant is not None else None
    return request


def asked(made: Bench, salt: str = "", tenant: str | None = None) -> bytes:
    """Return the digests that a request is looked up with."""
    made.connector.on_new_request(request_of(salt, tenant))
    lookup = made.client.sent[-1]
    assert isinstance(lookup, wire.Lookup)
    return lookup.digests


def test_tenants_are_apart_and_a_request_overrides_its_engine():
    """Other keys for each tenant and salt; the engine's tenant is that of requests that say none."""
    keys = [asked(bench(tenant), salt) for tenant in ("", "a", "b") for salt in ("", "a", "b")]
    assert len(set(keys)) == 9
    assert asked(bench("a"), tenant="b") == asked(bench("b")) == asked(bench(), tenant="b")
    assert asked(bench("a"), tenant="") == asked(bench("a"))


def test_a_stores_tenant_travels_to_the_daemon():
    """A job names the tenant of its request, and each of its stores does."""
    made = bench("a")
    request = made.request(40)
    made.allocate(request, 0, [1, 2, 3, 4, 5])
    meta = made.step(0, 40, [1, 2, 3, 4, 5], is_new=True)
    assert [job.tenant for job in meta.stores] == ["a"]
    recorder = Recorder()
    side = adapter("worker").WorkerSide(deadline_s=1.0, clock=lambda: 0.0)
    side.connect(recorder)
    side.store(metadata.KvistMetadata(stores=[replace(STORE, tenant="a"), replace(STORE, id=9)]))
    tenants = [sent.tenant for sent, _ in recorder.sent]
    assert tenants == ["a"] * (len(tenants) // 2) + [""] * (len(tenants) // 2)
    assert tenants


@pytest.mark.parametrize("tenant", ["*", "x" * 257, "\ud800"], ids=["star", "long", "no text"])
def test_a_name_that_no_tenant_can_have_is_refused(tenant: str):
    """An engine does not start with it; a request with it is not cached."""
    options = adapter("options")
    with pytest.raises(ConfigError, match="tenant"):
        options.parse_options({"tenant": tenant})
    with pytest.raises(KeyInvalid, match="tenant"):
        options.parse_request_options({"kvist": {"tenant": tenant}})
    made = bench()
    made.connector.on_new_request(request_of(tenant=tenant))
    assert not made.client.sent
    assert not made.connector._faults


def test_another_tenants_prompt_is_as_if_never_stored():
    """The daemon answers a lookup of another tenant's tokens with the bytes of one for tokens that nobody has."""
    daemon = SimulatedDaemon(16)
    engine = connect(daemon)
    mine, other = asked(bench("a")), asked(bench("b"))
    chunks = engine.take_chunks(len(mine) // 16)
    reply = engine.call(lambda number: wire.Store(number, mine, b"", packed(chunks), tenant="a"))
    assert isinstance(reply, wire.StoreReply)
    assert reply.num_stored == len(chunks) > 0
    answers = []
    for digests in (other, bytes(range(len(other))), mine):
        pending = Link(daemon, "scheduler").submit(
            lambda number, digests=digests: wire.Lookup(number, digests, wants_places=True)
        )
        answers.append(pending.reply)
    assert encode(answers[0]) == encode(answers[1])
    assert isinstance(answers[2], wire.LookupReply)
    assert answers[2].num_chunks == len(chunks)
