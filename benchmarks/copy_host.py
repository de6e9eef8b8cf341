"""Store and retrieve through the daemon against one thread's memcpy of the same bytes, interleaved in one run.

The time is the client's, from its call to the daemon's answer; the checksum is always on. The ceiling is one thread of
this process that copies the same bytes, page by page as they lie in the engine's memory, into shared memory of the
pool's kind. Beside it stands one memcpy of as many contiguous bytes, for which libc can use stores that pass the cache.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import numpy.typing as npt

from common import (
    DEADLINE_S,
    Copy,
    FakeEngine,
    Shape,
    daemon,
    make_digests,
    make_tokens,
    memcpy_s,
    quartiles,
    report,
    shared_memory,
)
from kvist.wire import messages as wire

ROUNDS = 15
SHAPES = [
    # 3 KV heads of 64, K and V, bfloat16: 98,304 B a page of 128 tokens.
    Shape("SmolLM2-135M, 4,000 tokens", num_layers=30, page_nbytes=98_304, num_blocks=64),
    # 8 KV heads of 128, K and V, bfloat16: 524,288 B a page of 128 tokens.
    Shape("Llama-3-8B, 2,048 tokens", num_layers=32, page_nbytes=524_288, num_blocks=34),
]


def measure(socket: str, shape: Shape) -> None:
    """Store and retrieve one prompt again and again under new keys, each time beside a memcpy."""
    engine = FakeEngine(socket, shape, name=shape.name)
    client, memory = engine.client, engine.memory
    memory[:] = np.arange(shape.num_blocks, dtype=np.uint8)[None, :, None]
    num_chunks = min(31, shape.num_blocks - 2) if "SmolLM2" in shape.name else 16
    nbytes = num_chunks * shape.chunk_nbytes
    rng = np.random.default_rng(0)
    # The ceiling copies as much between memory of the same kind: from the engine's into shared pages like the pool's.
    source = memory.reshape(-1)
    target = shared_memory(nbytes)
    ratios: dict[str, list[float]] = {"store": [], "retrieve": []}
    of_whole: dict[str, list[float]] = {"store": [], "retrieve": []}
    rates: dict[str, list[float]] = {"store": [], "retrieve": [], "memcpy": []}
    for number in range(ROUNDS + 2):
        digests = make_digests(
            make_tokens(num_chunks * shape.block_tokens, seed=number), shape.block_tokens, shape.name
        )
        blocks = rng.permutation(np.arange(1, shape.num_blocks))[:num_chunks].astype("<i4").tobytes()
        ids = np.frombuffer(blocks, dtype="<i4").tolist()
        whole = memcpy_s([(source.ctypes.data, target.ctypes.data, nbytes)])
        pages = copies_of(memory, ids, target)
        paged = [memcpy_s(pages)]
        begin = time.perf_counter()
        stored = client.call(lambda i: wire.Store(i, digests, b"", blocks), DEADLINE_S)
        store_s = time.perf_counter() - begin
        assert isinstance(stored, wire.StoreReply) and stored.num_stored == num_chunks, stored
        found = client.call(lambda i: wire.Lookup(i, digests), DEADLINE_S)
        assert isinstance(found, wire.LookupReply) and found.num_chunks == num_chunks, found
        paged.append(memcpy_s(pages))
        begin = time.perf_counter()
        loaded = client.call(lambda i: wire.Retrieve(i, found.lease, 0, blocks), DEADLINE_S)
        retrieve_s = time.perf_counter() - begin
        assert isinstance(loaded, wire.RetrieveReply) and not loaded.failed, loaded
        if number < 2:
            continue  # Pages are mapped at first touch.
        ceiling_s = statistics.mean(paged)
        for case, seconds in (("store", store_s), ("retrieve", retrieve_s)):
            ratios[case].append(ceiling_s / seconds)
            rates[case].append(nbytes / seconds / 1e9)
            of_whole[case].append(whole / seconds)
        rates["memcpy"].append(nbytes / ceiling_s / 1e9)
    for case, values in ratios.items():
        report(
            f"{case}, {shape.name}", share_of_memcpy=statistics.median(values), quartiles=quartiles(values),
            gb_per_s=statistics.median(rates[case]), memcpy_gb_per_s=statistics.median(rates["memcpy"]),
            share_of_contiguous_memcpy=statistics.median(of_whole[case]), nbytes=nbytes, target=0.75,
        )  # fmt: skip
    client.close()


def copies_of(memory: npt.NDArray[np.uint8], ids: list[int], target: npt.NDArray[np.uint8]) -> list[Copy]:
    """Return (source, target, bytes) of every page of some blocks, in the order of a chunk."""
    num_layers, _, page = memory.shape
    base, place = memory.ctypes.data, target.ctypes.data
    places = ((layer, block) for block in ids for layer in range(num_layers))
    return [
        (base + layer * memory.strides[0] + block * memory.strides[1], place + number * page, page)
        for number, (layer, block) in enumerate(places)
    ]


def main() -> None:
    """Measure and report."""
    with daemon("3GiB") as (socket, _):
        for shape in SHAPES:
            measure(socket, shape)


if __name__ == "__main__":
    main()
