"""What a transfer costs a decode that runs beside it, on one GPU, for each lane.

The decode is a CUDA graph of matrix-vector products that reads some 33 GB, as a decode step of a large model does, with
a step's small copies before and behind it: ids and tables in, tokens out. Its steps are timed alone, while KV is
stored, and while it is loaded, 256 MB at a time without a pause. The last figures say how much of the interpreter the
engine lane takes: how much slower a Python loop runs beside it. Needs torch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from common import daemon, report
from gpu import LLAMA_8B, GpuEngine, start_lane
from kvist.client.client import Pending
from kvist.transfer.governor import Governor
from kvist.wire import messages as wire
from transfer import CHUNK_TOKENS, Case

TOKENS = 2_048
STEPS = 200
IN_FLIGHT = 4
NUM_INPUTS, INPUT_NBYTES = 8, 16 << 10
"""What a step of vLLM 0.24 with 32 requests sends to the GPU, roughly."""


class Decode:
    """A graph that reads ``nbytes`` of weights, and how long its steps take."""

    def __init__(self, nbytes: int) -> None:
        self.governor = Governor(math.inf)
        """Told of every step."""
        rows, columns = 4096, 16384
        self._weights = [
            torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
            for _ in range(nbytes // (rows * columns * 2))
        ]
        self._x = torch.randn(columns, dtype=torch.bfloat16, device="cuda")
        self._y = torch.empty(rows, dtype=torch.bfloat16, device="cuda")
        torch.mv(self._weights[0], self._x, out=self._y)
        self._inputs = [torch.zeros(INPUT_NBYTES, dtype=torch.uint8).pin_memory() for _ in range(NUM_INPUTS)]
        self._on_gpu = [torch.empty_like(one, device="cuda") for one in self._inputs]
        self._output = torch.empty_like(self._y, device="cpu").pin_memory()
        self._done = torch.cuda.Event()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for weight in self._weights:
                torch.mv(weight, self._x, out=self._y)

    def step_ms(self) -> float:
        begin = time.perf_counter()
        for source, target in zip(self._inputs, self._on_gpu, strict=True):
            target.copy_(source, non_blocking=True)
        self._graph.replay()
        self._output.copy_(self._y, non_blocking=True)
        self._done.record()
        self._done.synchronize()
        seconds = time.perf_counter() - begin
        self.governor.begin_step(is_computing=True)
        self.governor.step(time.monotonic(), seconds, 1)
        return seconds * 1e3


def beside(work: Callable[[], Any], begin: Callable[[], Pending], poll: Callable[[], None]) -> tuple[list[Any], float]:
    """Do ``work`` many times while transfers run without a pause; return what it returned, and transfers a second."""
    results, num_over = [], 0
    running = [begin() for _ in range(IN_FLIGHT)]
    start = time.perf_counter()
    for _ in range(STEPS):
        results.append(work())
        poll()
        for number, pending in enumerate(running):
            if pending.is_over:
                assert not pending.is_lost and not isinstance(pending.reply, wire.Error), pending
                num_over += 1
                running[number] = begin()
    seconds = time.perf_counter() - start
    while not all(pending.is_over for pending in running):
        poll()
    return results, num_over / seconds


def count_loops(seconds: float = 0.01) -> float:
    """Return how many rounds of an empty loop fit into a second."""
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        count += 1
    return count / seconds


def measure(name: str, case: Case, decode: Decode, kinds: Sequence[str]) -> None:
    """Measure one lane."""
    poll = case.lane.poll

    def store() -> Pending:
        return case.store(case.digests(), case.blocks())

    def load() -> Pending:
        return case.retrieve(case.find(loaded), case.blocks())

    for kind in kinds:
        begin = store if kind == "store" else load
        loaded, blocks = case.digests(), case.blocks()
        pending = case.store(loaded, blocks)
        while not pending.is_over:
            poll()
        alone = [decode.step_ms() for _ in range(STEPS)]
        steps, rate = beside(decode.step_ms, begin, poll)
        loops_alone = statistics.median(count_loops() for _ in range(50))
        loops, _ = beside(count_loops, begin, poll)
        report(
            f"{name}, {kind}",
            gb_per_s=rate * case.nbytes / 1e9,
            step_ms_alone=[float(np.percentile(alone, q)) for q in (50, 99)],
            step_ms_beside=[float(np.percentile(steps, q)) for q in (50, 99)],
            mean_slowdown=statistics.mean(steps) / statistics.mean(alone) - 1,
            p99_slowdown=float(np.percentile(steps, 99) / np.percentile(alone, 99)) - 1,
            interpreter_share=1 - statistics.median(loops) / loops_alone,
        )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="engine,daemon")
    arguments = parser.parse_args()
    torch.cuda.init()
    decode = Decode(33 << 30)
    with daemon("16GiB") as (socket, _):
        engine = GpuEngine(socket, LLAMA_8B[1], 400, chunk_tokens=CHUNK_TOKENS, name=LLAMA_8B[1].name)
        # As fast as the link allows, within the default budget, and with the link never left idle for the steps' sake.
        budgets = {"engine lane": math.inf, "engine lane, governed": 0.03, "engine lane, not shared": None}
        for name, budget in budgets.items() if "engine" in arguments.lanes else ():
            decode.governor = Governor(budget or math.inf)
            lane = start_lane(socket, engine, decode.governor if budget else None)
            measure(name, Case(engine, TOKENS, lane), decode, ["store"] if budget == 0.03 else ["store", "load"])
            lane.close()
        if "daemon" in arguments.lanes:
            measure("daemon lane", Case(engine, TOKENS), decode, ["store", "load"])


if __name__ == "__main__":
    main()
