"""An engine of the engine lane in a simulated daemon: it is sent orders, and carries each out when the test says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvist.model.handles import ENGINE
from kvist.wire import messages as wire
from tests.support.memory import GUARD
from tests.support.named import CHUNK_TOKENS, LAID
from tests.support.simulated import Sent, SimulatedDaemon, SimulatedEngine, SimulatedRow, Watched

CHECKSUM_NBYTES = 8


def checksum(chunk: bytes) -> bytes:
    """Return what these engines know a chunk by; no device of the daemon makes it so."""
    return hashlib.blake2b(chunk, digest_size=CHECKSUM_NBYTES).digest()


def fields_of(order: wire.CopyOrder) -> tuple[list[int], list[int], list[bytes]]:
    """Return an order's slots, positions and checksums."""
    starts = range(0, len(order.checksums), CHECKSUM_NBYTES)
    return (
        np.frombuffer(order.slots, dtype="<i8").tolist(),
        np.frombuffer(order.positions, dtype="<i4").tolist(),
        [order.checksums[start : start + CHECKSUM_NBYTES] for start in starts],
    )


class CopyingEngine(SimulatedEngine):
    """A worker whose own process copies. Its process outlives its connection until ``end_process``."""

    def __init__(self, daemon: SimulatedDaemon, laid=LAID, *, chunk_tokens: int = CHUNK_TOKENS, **more) -> None:
        self.orders: dict[int, tuple[wire.CopyOrder, Sent]] = {}
        """Those that were not answered."""
        self.pool_fds: list[int] = []
        """Descriptors that came with replies."""
        self.process: Watched | None = None
        self.is_deaf = False
        """Whether the connection breaks when the next order is sent."""
        self.has_ended = False
        super().__init__(daemon, laid, chunk_tokens=chunk_tokens, **more)

    def registration(self, request_id: int) -> wire.Register:
        memory = [wire.MemorySpec(ENGINE, memory.nbytes) for memory in self.memory]
        return msgspec.structs.replace(super().registration(request_id), memory=memory)

    def register(self) -> Sent:
        num_processes = len(self.daemon.processes)
        sent = self.send(self.registration)
        if len(self.daemon.processes) > num_processes:
            self.process = self.daemon.processes[-1]
        return sent

    def carry_out(
        self, number: int, *, num: int | None = None, is_lying: Callable[[int], bool] = lambda _: False
    ) -> list[int]:
        """Copy the first ``num`` chunks of an order, all of them if that is None, and answer it.

        A store says a wrong checksum, a load calls a right chunk wrong, of each position where it ``is_lying``; these
        positions are returned.
        """
        order, sent = self.orders[number]
        slots, positions, expected = fields_of(order)
        assert isinstance(sent.request, wire.Store | wire.Retrieve)
        row = self.rows[sent.request.row]
        num = len(slots) if num is None else num
        checksums, failed, lies = [], [], []
        for place, (slot, position) in enumerate(zip(slots[:num], positions, strict=False)):
            lies += [position] if is_lying(position) else []
            if isinstance(sent.request, wire.Store):
                found = checksum(self._put(row, slot, sent.chunks[position]))
                checksums.append(checksum(found) if lies[-1:] == [position] else found)
            elif checksum(self._slot(row, slot, sent.chunks[position])) != expected[place] or lies[-1:] == [position]:
                failed.append(place)
            else:
                self._take(row, slot, sent.chunks[position], sent.request.num_skipped_blocks if position == 0 else 0)
        self.answer(number, num, b"".join(checksums), failed)
        return lies

    def answer(self, number: int, num_done: int, checksums: bytes = b"", failed: Sequence[int] = ()) -> None:
        """Answer an order; the reply to its request follows under the answer's own id."""
        order, sent = self.orders.pop(number)
        del self.sent[order.id]
        done = next(self._ids)
        self.sent[done] = sent
        reply = self.daemon.service.handle(
            self.session, wire.CopyDone(done, order.id, num_done, checksums, list(failed)), ()
        )
        assert reply is None

    def scribble(self) -> None:
        """Write to every slot that an open store names, as a dead process's GPU may still do."""
        for order, sent in self.orders.values():
            if isinstance(sent.request, wire.Store):
                for slot in fields_of(order)[0]:
                    nbytes = self.rows[sent.request.row].map.nbytes
                    self.daemon.pool.bytes[slot : slot + nbytes] = GUARD

    def end_process(self) -> None:
        """Let the process end: nothing of it copies any more."""
        self.orders.clear()
        self.has_ended = True
        if self.process is not None:
            self.process.end()

    def slots_in_hand(self) -> set[int]:
        if self.daemon.service.is_draining:
            return set()
        return {slot for order, _ in self.orders.values() for slot in fields_of(order)[0]}

    def _receive(self, reply: wire.Reply, fds: Sequence[int] = ()) -> None:
        self.pool_fds += fds
        if not isinstance(reply, wire.CopyOrder):
            super()._receive(reply)
            return
        self.orders[reply.id] = reply, self.sent[reply.id]
        if self.is_deaf:
            self.end()

    def _slot(self, row: SimulatedRow, slot: int, blocks: list[int]) -> bytes:
        return self.daemon.pool.bytes[slot : slot + row.map_of(len(blocks)).nbytes].tobytes()

    def _put(self, row: SimulatedRow, slot: int, blocks: list[int]) -> bytes:
        chunk = row.read(blocks)
        self.daemon.pool.bytes[slot : slot + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        return chunk

    def _take(self, row: SimulatedRow, slot: int, blocks: list[int], num_skipped_blocks: int) -> None:
        old = np.frombuffer(row.read(blocks), dtype=np.uint8)
        new = np.frombuffer(self._slot(row, slot, blocks), dtype=np.uint8)
        row.write(blocks, np.where(row.map_of(len(blocks)).position < num_skipped_blocks, old, new).tobytes())
