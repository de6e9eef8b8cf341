"""An engine process that stores, looks up and loads at random, and compares every byte that it is given.

``python -m tests.support.worker SOCKET SEED NUM_REQUESTS``; prints what it saw as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

from kvist.errors import UnknownLease
from kvist.wire import messages as wire
from tests.support.engine import NAMESPACE, FakeEngine, packed

NUM_PROMPTS = 96
CHUNKS_MAX = 8
NUM_SHARED = 2
"""Chunks that each four prompts have in common."""
NUM_CHUNKS = NUM_PROMPTS * (CHUNKS_MAX - NUM_SHARED) + NUM_PROMPTS // 4 * NUM_SHARED
"""Different chunks, over all prompts."""


def prompt_of(number: int) -> list[int]:
    """Return one of the prompts."""
    width = NAMESPACE.chunk_tokens
    return [number // 4] * (NUM_SHARED * width) + [1000 + number] * ((CHUNKS_MAX - NUM_SHARED) * width)


class Worker:
    """One engine, one after another request, and leases that it sometimes forgets."""

    def __init__(self, path: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.engine = FakeEngine(path, engine_id=f"worker {seed}")
        self.engine.client.register()
        self.seen: Counter[str] = Counter()

    def run(self, num_requests: int) -> None:
        while self.seen["requests"] < num_requests:
            prompt = prompt_of(self.chance.randrange(NUM_PROMPTS))[: self.chance.randint(1, CHUNKS_MAX) * 8]
            found = self.engine.look_up(prompt)
            self.seen["requests"] += 1
            self.seen["found"] += found.num_chunks
            if found.num_chunks:
                self.use(prompt, found)
            if found.num_chunks * 8 < len(prompt):
                self.store(prompt, found.num_chunks)

    def use(self, prompt: list[int], found: wire.LookupReply) -> None:
        """Load what was found, or give it back, or forget about it; claim what is gone, now and then."""
        way = self.chance.random()
        if way < 0.8:
            first = self.chance.randrange(found.num_chunks)
            failed = self.engine.load(prompt, found, first=first)
            self.seen["loaded"] += found.num_chunks - first - len(failed)
            self.seen["failed"] += len(failed)
        elif way < 0.95:
            self.engine.release(found.lease)
            try:
                self.engine.client.call(lambda number: wire.Retrieve(number, found.lease, 0, packed([[0, 1]])))
            except UnknownLease:
                self.seen["refused"] += 1
        self.seen["requests"] += 1

    def store(self, prompt: list[int], first: int) -> None:
        reply = self.engine.store(prompt, first=first)
        self.seen["stored"] += reply.num_stored
        self.seen["present"] += reply.num_present
        self.seen[reply.reason] += reply.num_refused
        self.seen["requests"] += 1


def main() -> None:
    """Work, and tell."""
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    worker.run(int(sys.argv[3]))
    assert worker.engine.is_untouched()
    sys.stdout.write(json.dumps(worker.seen))


if __name__ == "__main__":
    main()
