"""An engine of the engine lane on a real daemon: it maps the pool and copies stamped bytes itself.

``python -m tests.support.copier SOCKET`` keeps the chunks ``KEPT``, begins to keep ``OPEN``, says ``ready`` with that
order unanswered, closes its socket when it is told to, says so, and waits to be killed.
"""

from __future__ import annotations

import hashlib
import mmap
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvist.model.handles import ENGINE
from kvist.wire import messages as wire
from tests.support.copying import checksum, fields_of
from tests.support.engine import NAMESPACE, SMALL, describe, packed
from tests.support.layouts import ChunkMap
from tests.support.memory import GUARD, stamp
from tests.support.peer import Peer

ROOT = Path(__file__).parents[2]
KEPT = ("kept 1", "kept 2", "kept 3")
OPEN = ("open 1", "open 2", "open 3")
NBYTES = 4096
"""Of a chunk."""


def digests(names: Sequence[str]) -> bytes:
    return b"".join(hashlib.sha256(name.encode()).digest()[:16] for name in names)


def registration(request_id: int) -> wire.Register:
    """Return a description of memory that is not handed over."""
    right = describe(SMALL, request_id, chunk_tokens=NAMESPACE.chunk_tokens)
    return msgspec.structs.replace(right, memory=[wire.MemorySpec(ENGINE, nbytes) for nbytes in SMALL.memory_nbytes])


class Copier:
    """One session, and the memory and pool of this process. Requests take the first blocks there are."""

    def __init__(self, path: str, *, engine_id: str = "copier") -> None:
        self.peer = Peer(path).hello(engine_id)
        self.registered = self.peer.ask(registration(2))
        assert isinstance(self.registered, wire.Registered), self.registered
        (self.pool_fd,) = self.peer.fds
        self.pool = mmap.mmap(self.pool_fd, self.registered.pool_nbytes)
        self.memory = [np.full(nbytes, GUARD, dtype=np.uint8) for nbytes in SMALL.memory_nbytes]
        self.map = ChunkMap(SMALL, 2)
        self._number = 2

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lose the connection and the pool."""
        self.peer.close()
        self.pool.close()

    def next_id(self) -> int:
        self._number += 1
        return self._number

    def order_store(self, names: Sequence[str]) -> wire.CopyOrder:
        """Ask for chunks to be kept, and return the order to copy them."""
        chunks = self._chunks(len(names))
        for blocks, name in zip(chunks, names, strict=True):
            self.map.write(self.memory, blocks, stamp(name.encode(), NBYTES))
        order = self.peer.ask(wire.Store(self.next_id(), digests(names), b"", packed(chunks)))
        assert isinstance(order, wire.CopyOrder), order
        return order

    def put(self, order: wire.CopyOrder) -> bytes:
        """Copy a store's blocks to their slots; return the checksums."""
        slots, positions, _ = fields_of(order)
        chunks = self._chunks(max(positions) + 1)
        found = [self.map.read(self.memory, chunks[position]) for position in positions]
        for slot, chunk in zip(slots, found, strict=True):
            self.pool[slot : slot + NBYTES] = chunk
        return b"".join(map(checksum, found))

    def store(self, names: Sequence[str]) -> wire.Reply:
        """Have chunks kept."""
        order = self.order_store(names)
        checksums = self.put(order)
        return self.peer.ask(wire.CopyDone(self.next_id(), order.id, len(checksums) // 8, checksums))

    def look_up(self, names: Sequence[str]) -> wire.LookupReply:
        found = self.peer.ask(wire.Lookup(self.next_id(), digests(names)))
        assert isinstance(found, wire.LookupReply)
        return found

    def load(self, found: wire.LookupReply) -> tuple[list[bytes], wire.Reply]:
        """Copy what was found into blocks; return what they hold then, and the reply."""
        chunks = self._chunks(found.num_chunks)
        order = self.peer.ask(wire.Retrieve(self.next_id(), found.lease, 0, packed(chunks)))
        assert isinstance(order, wire.CopyOrder), order
        slots, positions, expected = fields_of(order)
        assert positions == list(range(found.num_chunks))
        failed = []
        for number, slot in enumerate(slots):
            chunk = self.pool[slot : slot + NBYTES]
            failed += [number] if checksum(chunk) != expected[number] else []
            self.map.write(self.memory, chunks[number], chunk)
        reply = self.peer.ask(wire.CopyDone(self.next_id(), order.id, len(slots), failed=failed))
        return [self.map.read(self.memory, blocks) for blocks in chunks], reply

    @staticmethod
    def _chunks(num: int) -> list[list[int]]:
        return [[2 * number, 2 * number + 1] for number in range(num)]


class CopierProcess:
    """One that runs by itself. The owner kills it."""

    def __init__(self, path: str) -> None:
        command = [sys.executable, "-m", "tests.support.copier", path]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._wait_for("ready")

    def __enter__(self) -> CopierProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def lose_connection(self) -> None:
        """Have it close its socket, and go on living."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"close\n")
        self.process.stdin.flush()
        self._wait_for("closed")

    def kill(self) -> None:
        """End it without a warning. Idempotent."""
        self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().decode().strip() == word


def main() -> None:
    """Do as the module says."""
    copier = Copier(sys.argv[1], engine_id="process")
    reply = copier.store(KEPT)
    assert isinstance(reply, wire.StoreReply)
    assert reply.num_stored + reply.num_present == len(KEPT)
    copier.look_up(KEPT)
    copier.put(copier.order_store(OPEN))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    copier.peer.close()
    sys.stdout.write("closed\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
