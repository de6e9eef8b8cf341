"""What an engine's connector counts, in vLLM's own metrics and in its log.

The laws: a number says what has happened since it was last taken, so sums over workers and steps are right, and nothing
is said twice; where nothing has happened, nothing is sent. A figure of a request is counted once, by the scheduler's
side, however many workers have a part in it; one of chunks by each worker, for its own rows, as the daemon counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvist.wire.messages import LookupReply, StoreReply

PREFIX: Final = "vllm:kvist_"
COUNTERS: Final = {
    "requests_not_cached": "Requests that were neither looked up nor stored.",
    "lookups": "Requests that the daemon was asked for and has answered.",
    "lookups_late": "Lookups that were not answered within deadline_s; the prompt was computed.",
    "lookups_lost": "Lookups that no daemon has answered, or that it has refused.",
    "tokens_asked": "Tokens of all whole chunks that lookups asked for.",
    "tokens_found": "Of tokens_asked: those that the daemon had in its pool when it was first asked.",
    "tokens_loading": "Of tokens_asked: those that it was reading from a tier then.",
    "tokens_loaded": "Tokens that were loaded instead of being computed.",
    "tokens_stored": "Tokens that were offered to the daemon, and of which it has all chunks.",
    "loads_failed": "Loads of which not every block can be used; what is missing was computed.",
    "chunks_loaded": "Chunks of all rows that were written into the workers' blocks.",
    "chunks_stored": "Chunks of all rows that the daemon has newly kept.",
    "chunks_present": "Chunks of all rows that were offered, and there already.",
    "chunks_refused": "Chunks of all rows that were offered, and not kept.",
}
"""With what each counts."""
LOAD_SECONDS: Final = "load_seconds"
_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Tally:
    """What one side has counted since it was last asked."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}

    def add(self, name: str, number: int = 1) -> None:
        """Count; 0 leaves no trace."""
        assert name in COUNTERS, name
        if number:
            self._data[name] = self._data.get(name, 0) + number

    def note_lookup(self, reply: LookupReply | None, num_chunks: int, chunk_tokens: int) -> None:
        """Count a request's first lookup, for so many chunks; ``reply`` is None if it was lost or refused."""
        if reply is None:
            self.add("lookups_lost")
            return
        self.add("lookups")
        self.add("tokens_asked", num_chunks * chunk_tokens)
        self.add("tokens_found", reply.num_chunks * chunk_tokens)
        self.add("tokens_loading", reply.num_loading * chunk_tokens)

    def note_load(self, seconds: float, num_tokens: int, *, has_failed: bool) -> None:
        """Count a load that all workers are done with."""
        self._data.setdefault(LOAD_SECONDS, []).append(seconds)
        if has_failed:
            self.add("loads_failed")
        else:
            self.add("tokens_loaded", num_tokens)

    def note_stored(self, reply: StoreReply) -> None:
        """Count what has become of one row's chunks."""
        self.add("chunks_stored", reply.num_stored)
        self.add("chunks_present", reply.num_present)
        self.add("chunks_refused", reply.num_refused)

    def take(self) -> dict[str, Any]:
        """Return what was counted since the last call: numbers, and the seconds of each load; empty if nothing was."""
        data, self._data = self._data, {}
        return data


@dataclass
class KvistStats(KVConnectorStats):  # type: ignore[misc]
    """What tallies have given, as vLLM carries it from its workers and schedulers to where metrics are kept."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KvistStats:
        """Return both together; neither is changed."""
        names = self.data.keys() | other.data.keys()
        return KvistStats({name: _sum(self.data.get(name), other.data.get(name)) for name in names})

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log says of an interval: what has happened in it, in the order of ``COUNTERS``."""
        reduced: dict[str, int | float] = {name: self.data[name] for name in COUNTERS if name in self.data}
        if seconds := self.data.get(LOAD_SECONDS):
            reduced["loads"] = len(seconds)
            reduced["load_seconds_mean"] = round(sum(seconds) / len(seconds), 4)
            reduced["load_seconds_max"] = round(max(seconds), 4)
        return reduced


class KvistPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same figures for Prometheus, for each engine of vLLM's process; all are there, with 0, from the start."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        metrics = {
            name: self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        metrics[LOAD_SECONDS] = self._histogram_cls(
            name=PREFIX + LOAD_SECONDS, documentation="Seconds from the allocation of a load's blocks to its end.",
            buckets=_BUCKETS_S, labelnames=labelnames,
        )  # fmt: skip
        self._metrics = {
            (engine, name): metric.labels(*values)
            for engine, values in per_engine_labelvalues.items()
            for name, metric in metrics.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Take in what one step of an engine has brought. A name or an engine that is not known is passed over."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get((engine_idx, name))
            if metric is None:
                continue
            if name == LOAD_SECONDS:
                for seconds in value:
                    metric.observe(seconds)
            else:
                metric.inc(value)


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other
