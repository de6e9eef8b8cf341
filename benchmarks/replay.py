"""What a trace of prompts finds in pools of several sizes, beside what could be found, and what a lookup costs.

usage: replay.py TRACE [--chunks N,N,...] [--first N] [--whole-blocks]

TRACE is one of Mooncake's (FAST'25), a line of JSON for each request, plain or packed with xz; a block of its
``hash_ids`` is one chunk here. The real index and slots, without bytes: look the prompt up, pin what is found, let go,
reserve and seal what is missing. Ceilings: a list of the least recently used prefixes, where the end of a prompt is
older than its beginning, and a cache without a limit. Processor time is that of the lookups alone.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import time
from collections import OrderedDict
from collections.abc import Container, Sequence
from pathlib import Path

from common import report
from kvist.index.chunk_index import Chunk, ChunkIndex
from kvist.index.eviction import LeastRecentlyUsed
from kvist.index.prefixes import find_prefix
from kvist.model.coverage import Need
from kvist.model.keys import Digest, chunk_keys
from kvist.model.layout import GroupKind
from kvist.model.rows import Row
from kvist.storage.slots import SLOT_ALIGNMENT, SlotAllocator
from kvist.tiering.reserving import Reserver

BLOCK_TOKENS = 512
NEEDS = (Need(GroupKind.FULL),)
ROW = Row(0, 0)
TARGET = 0.99
"""Of what the list of prefixes finds."""


def read_trace(path: Path, first: int | None, *, is_whole: bool) -> list[list[int]]:
    """Return the block ids of each request; only of blocks that its prompt fills, if it is said so."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        requests = [json.loads(line) for line in lines][:first]
    ends = [request["input_length"] // BLOCK_TOKENS if is_whole else None for request in requests]
    return [request["hash_ids"][:end] for request, end in zip(requests, ends, strict=True)]


def unbounded_hits(trace: Sequence[Sequence[int]]) -> int:
    """Count the leading blocks of all requests that came before."""
    seen: set[int] = set()
    hits = 0
    for ids in trace:
        hits += num_leading(ids, seen)
        seen.update(ids)
    return hits


def prefix_lru_hits(trace: Sequence[Sequence[int]], capacity: int) -> int:
    """Count what a list of so many blocks finds, each request touched from its end to its beginning."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in trace:
        hits += num_leading(ids, resident.keys())
        for block in reversed(ids):
            resident[block] = None
            resident.move_to_end(block)
            if len(resident) > capacity:
                resident.popitem(last=False)
    return hits


def num_leading(ids: Sequence[int], there: Container[int]) -> int:
    """Count the first ids that are there."""
    return next((number for number, block in enumerate(ids) if block not in there), len(ids))


class Pool:
    """An index over slots for so many chunks."""

    def __init__(self, num_chunks: int) -> None:
        slots = SlotAllocator(num_chunks * SLOT_ALIGNMENT, extent_nbytes=SLOT_ALIGNMENT * (num_chunks // 8))
        self._index = ChunkIndex(LeastRecentlyUsed(), slots.free)
        self._reserver = Reserver(self._index, slots)
        self.lookups_s: list[float] = []

    def serve(self, digests: Sequence[Digest]) -> int:
        """Look a prompt up and keep what is missing of it, as far as there is room; return how much was found."""
        begin = time.process_time()
        num_found, rows = find_prefix(self._index, digests, NEEDS)
        found = rows[ROW].chunks
        self._index.touch(found)
        for chunk in found:
            self._index.pin(chunk)
        self.lookups_s.append(time.process_time() - begin)
        for chunk in found:
            self._index.unpin(chunk)
        parent, reserved = found[-1] if found else None, list[Chunk]()
        for key in chunk_keys(digests[num_found:], group=0, shard=0):
            slot_offset = self._reserver.allocate(SLOT_ALIGNMENT, below=parent)
            if slot_offset is None:
                break
            parent = self._index.reserve(key, parent, slot_offset, SLOT_ALIGNMENT)
            reserved.append(parent)
        for chunk in reserved:
            self._index.seal(chunk, b"")
        return num_found


def main() -> None:
    """Replay and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--chunks", default="1000,5000,10000,50000", help="pool sizes, multiples of 8")
    parser.add_argument("--first", type=int, help="only so many requests")
    parser.add_argument("--whole-blocks", action="store_true", help="leave out a last block that is not full")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, arguments.first, is_whole=arguments.whole_blocks)
    prompts = [[Digest(block.to_bytes(16, "big")) for block in ids] for ids in trace]
    num_asked = sum(map(len, trace))
    num_distinct = len({block for ids in trace for block in ids})
    most = unbounded_hits(trace)
    report("trace", requests=len(trace), chunks=num_asked, distinct=num_distinct, unbounded=most / num_asked)
    for num_chunks in map(int, arguments.chunks.split(",")):
        pool = Pool(num_chunks)
        hits = sum(map(pool.serve, prompts))
        ceiling = prefix_lru_hits(trace, num_chunks)
        report(
            f"pool of {num_chunks}", hits=hits, lru_hits=ceiling, hit_rate=hits / num_asked,
            lru_hit_rate=ceiling / num_asked, of_lru=hits / ceiling, target=TARGET,
            lookup_us=statistics.fmean(pool.lookups_s) * 1e6,
            lookup_us_p99=statistics.quantiles(pool.lookups_s, n=100)[98] * 1e6,
        )  # fmt: skip


if __name__ == "__main__":
    main()
