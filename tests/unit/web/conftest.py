"""A simulated daemon that has done some of everything, and the application that looks at it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from starlette.applications import Starlette

from kvist.model.keys import as_tokens, chain_digests, root_digest
from kvist.server.sessions import Peer
from kvist.watching.watcher import Watcher
from kvist.web.app import make_app
from kvist.wire import messages as wire
from kvist.wire.describing import parse_namespace
from tests.support.engine import packed
from tests.support.memory_tier import MemoryTier
from tests.support.named import CHUNK_TOKENS, NUM_SLOTS, answer, connect, look_up, store
from tests.support.simulated import SimulatedDaemon, SimulatedEngine
from tests.support.web import WatchingClient, watch

NAMESPACE = wire.NamespaceSpec("a model", "main", "bfloat16", "layout", "heads1.pp1", CHUNK_TOKENS)
TOKENS = list(range(3 * CHUNK_TOKENS + 1))


@dataclass
class Seen:
    """A daemon, and who looks at it."""

    daemon: SimulatedDaemon
    engine: SimulatedEngine
    client: WatchingClient
    watcher: Watcher
    app: Starlette

    def join(self, engine_id: str, namespace: wire.NamespaceSpec, **more) -> None:
        """Connect a process that tells what it serves, as an engine's scheduler does."""
        hello = wire.Hello(0, wire.MAGIC, wire.PROTOCOL_VERSION, engine_id, "scheduler", namespace, **more)
        self.daemon.service.open_session(Peer(os.getpid(), os.getuid()), hello, lambda *_: None)
        self.watcher.sample()

    def store_prompt(self, tokens: list[int], *, num_chunks: int, salt: str = "") -> None:
        """Store the first chunks of a prompt, as the engine of ``NAMESPACE`` would."""
        root = root_digest(parse_namespace(NAMESPACE), salt=salt)
        digests = chain_digests(root, as_tokens(tokens[: num_chunks * CHUNK_TOKENS]), CHUNK_TOKENS)
        chunks = self.engine.take_chunks(num_chunks)
        sent = self.engine.send(lambda number: wire.Store(number, digests, b"", packed(chunks)), chunks)
        assert answer(self.engine, sent).num_stored == num_chunks
        self.engine.give_back(chunks)


@pytest.fixture
def seen() -> Iterator[Seen]:
    daemon = SimulatedDaemon(NUM_SLOTS, tiers=[MemoryTier()])
    engine = connect(daemon)
    store(engine, "a1", "a2")
    look_up(engine, "a1", "a2", "a3")
    watcher, client = watch(daemon)
    yield Seen(daemon, engine, client, watcher, make_app(watcher))
    daemon.close()
