"""An engine process that also watches its connector: runs in vLLM's own environment, beside ``tools/vllm/engine.py``.

Every stored chunk is stamped with a digest of its blocks' bytes at the moment of the store, every loaded one compared
with the stamp of its key when its load is reported. A signal can be sent to the daemon at the moment a load is begun.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from typing import Any

import torch
from vllm import SamplingParams

from engine import Engine, main
from kvist.adapters.vllm.connector import KvistConnector
from kvist.adapters.vllm.metadata import LoadJob, StoreJob
from kvist.adapters.vllm.scheduler import SchedulerSide
from kvist.adapters.vllm.worker import WorkerSide
from kvist.model.keys import split_digests

STAMPS: dict[str, str] = {}
COUNTS: Counter[str] = Counter()
LOADING: dict[int, list[str]] = {}
LAYERS: list[torch.Tensor] = []
SIGNAL: dict[str, int] = {}


def stamp(block_ids: tuple[int, ...]) -> str:
    """Return a digest of the bytes of some blocks, over all layers."""
    hasher = hashlib.sha256()
    for layer in LAYERS:
        for block_id in block_ids:
            hasher.update(layer[block_id].contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def watch() -> None:
    """Put the watching in place. It wraps methods and changes none of their results, but for one call left out."""
    register, send_store = KvistConnector.register_kv_caches, WorkerSide._send_store
    begin_load, failed_blocks = SchedulerSide._begin_load, WorkerSide._failed_blocks
    begin_stores, wait_for_save = SchedulerSide.begin_stores, KvistConnector.wait_for_save

    def on_register(self: KvistConnector, kv_caches: dict[str, torch.Tensor]) -> None:
        register(self, kv_caches)
        LAYERS.extend(kv_caches.values())

    def on_store(self: WorkerSide, job: StoreJob) -> Any:
        digests = split_digests(job.digests)
        size = len(job.block_ids) // len(digests)
        for number, digest in enumerate(digests):
            STAMPS[digest.hex()] = stamp(job.block_ids[number * size : (number + 1) * size])
            COUNTS["stored"] += 1
        return send_store(self, job)

    def on_load(self: SchedulerSide, tracked: Any, lookup: Any, num_external_tokens: int) -> None:
        if SIGNAL:
            os.kill(SIGNAL.pop("pid"), SIGNAL.pop("number"))
        begin_load(self, tracked, lookup, num_external_tokens)
        job = self._loads[-1]
        num_chunks = len(job.block_ids) // self._blocks_per_chunk
        packed = tracked.packed(job.first_chunk, job.first_chunk + num_chunks)
        LOADING[job.id] = [digest.hex() for digest in split_digests(packed)]

    def on_loaded(self: WorkerSide, load: Any) -> Any:
        failed = failed_blocks(self, load)
        compare(load.job, set(failed))
        return failed

    def on_stores(self: SchedulerSide, scheduler_output: Any) -> Any:
        COUNTS["preempted"] += len(scheduler_output.preempted_req_ids or ())
        return begin_stores(self, scheduler_output)

    def on_save(self: KvistConnector) -> None:
        # vLLM up to 0.30 does not call it in a step that computes nothing, so nothing may rest on that.
        if self._meta is None or not self._meta.is_idle:
            wait_for_save(self)

    KvistConnector.wait_for_save = on_save
    KvistConnector.register_kv_caches = on_register
    WorkerSide._send_store = on_store
    SchedulerSide._begin_load = on_load
    WorkerSide._failed_blocks = on_loaded
    SchedulerSide.begin_stores = on_stores


def compare(job: LoadJob, failed: set[int]) -> None:
    """Hold the blocks of a finished load against the stamps of what was stored under their keys."""
    digests = LOADING.pop(job.id)
    size = len(job.block_ids) // len(digests)
    for number, digest in enumerate(digests):
        block_ids = job.block_ids[number * size : (number + 1) * size]
        if failed & set(block_ids):
            COUNTS["failed"] += 1
        elif digest not in STAMPS:
            COUNTS["unknown"] += 1
        else:
            COUNTS["equal" if stamp(block_ids) == STAMPS[digest] else "different"] += 1


class ProbedEngine(Engine):
    """Commands for tests."""

    def do_counts(self) -> dict[str, Any]:
        """Return what was seen since the last call, and what the engine still holds."""
        counts = dict(COUNTS)
        COUNTS.clear()
        scheduler = self._scheduler
        side = scheduler.connector._scheduler
        return {
            "counts": counts,
            "held": sum(len(job.blocks) for job in side._jobs.values()) if side else 0,
            "tracked": len(side._tracked) if side else 0,
            "used_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks
            - 1
            - scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def do_stamps(self, known: dict[str, str] | None = None) -> dict[str, Any]:
        """Learn the stamps of another process; return all."""
        STAMPS.update(known or {})
        return {"stamps": STAMPS}

    def do_signal_at_load(self, pid: int, number: int) -> dict[str, Any]:
        """Send a signal to a process when the next load is begun."""
        SIGNAL.update(pid=pid, number=number)
        return {}

    def do_abort(self, prompts: list[list[int]], num_tokens: int, num_steps: int) -> dict[str, Any]:
        """Begin some requests, and abort every second one after some steps; run the others to their end."""
        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        names = [f"abort-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        outputs: dict[str, list[int]] = {}
        step = 0
        while engine.has_unfinished_requests():
            if step == num_steps:
                engine.abort_request(names[1::2], internal=False)
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
        self.settle()
        return {"tokens": [outputs.get(name) for name in names]}

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler


if __name__ == "__main__":
    watch()
    main(ProbedEngine)
