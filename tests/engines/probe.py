"""An engine process that also watches its connector: runs in vLLM's own environment, beside ``tools/vllm/engine.py``.

Every stored chunk of every group is stamped with a digest of its blocks' bytes at the moment of the store, every loaded
one compared with the stamps of its key when its load is reported: there are several where requests of other batches,
which round otherwise, have computed it as well. A signal can be sent to the daemon at the moment a load is begun.
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
from kvist.adapters.vllm.metadata import LoadJob, StorePart
from kvist.adapters.vllm.scheduler import SchedulerSide
from kvist.adapters.vllm.worker import WorkerSide
from kvist.model.keys import split_digests

STAMPS: dict[str, list[str]] = {}
COUNTS: Counter[str] = Counter()
LOADING: dict[int, list[list[str]]] = {}
"""Of each load: the keys of the chunks of each of its parts."""
LAYERS: dict[int, list[torch.Tensor]] = {}
"""By group."""
SIGNAL: dict[str, int] = {}


def stamp(group: int, block_ids: tuple[int, ...]) -> str:
    """Return a digest of the bytes of some blocks, over all layers of a group."""
    hasher = hashlib.sha256()
    for layer in LAYERS[group]:
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
        for number, group in enumerate(self._cache_config.kv_cache_groups):
            LAYERS[number] = [kv_caches[name] for name in group.layer_names]

    def on_store(self: WorkerSide, part: StorePart, row: int, tenant: str) -> Any:
        note_stamps(stamps_of(part))
        return send_store(self, part, row, tenant)

    def on_load(self: SchedulerSide, tracked: Any, *arguments: Any) -> None:
        if SIGNAL:
            os.kill(SIGNAL.pop("pid"), SIGNAL.pop("number"))
        begin_load(self, tracked, *arguments)
        LOADING[self._loads[-1].id] = keys_of(self._loads[-1], tracked, self._groups)

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


def note_stamps(stamps: dict[str, list[str]]) -> None:
    for name, found in stamps.items():
        STAMPS[name] = sorted({*STAMPS.get(name, ()), *found})


def key(group: int, digest: bytes) -> str:
    return f"{group}:{digest.hex()}"


def stamps_of(part: StorePart) -> dict[str, list[str]]:
    """Return the stamps of what is stored, by key."""
    digests = split_digests(part.digests)
    COUNTS["stored"] += len(digests)
    size = len(part.block_ids) // len(digests)
    return {
        key(part.group, digest): [stamp(part.group, part.block_ids[number * size : (number + 1) * size])]
        for number, digest in enumerate(digests)
    }


def keys_of(job: LoadJob, tracked: Any, groups: Any) -> list[list[str]]:
    """Return the keys of the chunks of each part of a load."""
    sizes = {group.number: group.stored_blocks_per_chunk for group in groups}
    ends = [part.first_chunk + len(part.block_ids) // sizes[part.group] for part in job.parts]
    return [
        [key(part.group, digest) for digest in split_digests(tracked.packed(part.first_chunk, end))]
        for part, end in zip(job.parts, ends, strict=True)
    ]


def compare(job: LoadJob, failed: set[int]) -> None:
    """Hold the blocks of a finished load against the stamps of what was stored under their keys."""
    for part, keys in zip(job.parts, LOADING.pop(job.id), strict=True):
        size = len(part.block_ids) // len(keys)
        for number, name in enumerate(keys):
            block_ids = part.block_ids[number * size : (number + 1) * size]
            if failed & set(block_ids):
                COUNTS["failed"] += 1
            elif name not in STAMPS:
                COUNTS["unknown"] += 1
            elif number == 0 and 0 in block_ids:
                COUNTS["partly there"] += 1
            else:
                COUNTS["equal" if stamp(part.group, block_ids) in STAMPS[name] else "different"] += 1


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

    def do_stamps(self, known: dict[str, list[str]] | None = None) -> dict[str, Any]:
        """Learn the stamps of another process; return all."""
        note_stamps(known or {})
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
