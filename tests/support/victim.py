"""An engine process that gets to a certain point, says so, and waits there to be killed.

``python -m tests.support.victim SOCKET POINT NUMBER``: another number, another prompt. Prints ``ready`` at the point.
"""

from __future__ import annotations

import sys

from kvist.wire import messages as wire
from kvist.wire.codec import encode
from tests.support.engine import FakeEngine, packed
from tests.support.layouts import Shape, opaque
from tests.support.peer import Peer

LARGE = opaque(Shape(num_layers=1, num_blocks=96, block_tokens=8, num_heads=1, row_nbytes=128 * 1024))
"""Chunks of one block and 2 MiB, too many to be copied in the blink of an eye."""
MEMORY_NAME = "kvist-victim"
POINTS = ("connected", "greeted", "registered", "storing", "retrieving", "holding a lease", "inside a frame")


def reach(path: str, point: str, number: int) -> object:
    """Get to a point and return what must be kept alive there."""
    if point in ("connected", "greeted", "inside a frame"):
        peer = Peer(path)
        if point != "connected":
            peer.hello()
        if point == "inside a frame":
            peer.send(encode(wire.Store(2, b"x" * 1600, b"", b"y" * 100_000))[:70_000])
        return peer
    engine = FakeEngine(path, laid=LARGE, name=MEMORY_NAME, engine_id="victim")
    engine.client.register()
    prompt = [number, *range(1, 96 * 8)]
    digests = b"".join(engine.digests(prompt))
    chunks = engine.take_chunks(96)
    if point == "registered":
        return engine
    storing = engine.client.submit(lambda id_: wire.Store(id_, digests, b"", packed(chunks)))
    if point == "storing":
        return engine
    engine.client.wait(storing)
    assert storing.reply is not None
    found = engine.look_up(prompt)
    assert found.num_chunks > 0
    if point == "retrieving":
        wanted = packed(chunks[: found.num_chunks])
        engine.client.submit(lambda id_: wire.Retrieve(id_, found.lease, 0, wanted))
    return engine


def main() -> None:
    """Reach the point named on the command line, and wait there for the end."""
    kept = reach(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
