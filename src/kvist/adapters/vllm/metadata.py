"""What the two sides of one engine tell each other, once a step: small, picklable, complete in itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvist.client.planning import Places


@dataclass(frozen=True, slots=True)
class LoadPart:
    """What is written into the blocks of one layer group."""

    group: int
    first_chunk: int
    block_ids: tuple[int, ...]
    """The stored ones of whole chunks, from ``first_chunk`` on."""
    num_skipped_blocks: int
    """Leading ones that must not be written: the engine has them already, or does not have them at all."""
    is_tail: bool = False
    """These are the blocks of the prefix's tail, behind its whole chunks."""
    places: Mapping[int, Places] = field(default_factory=dict)
    """By shard: where the chunks lie in the pool, as far as that is known."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's hit, to be written into its blocks by every worker."""

    id: int
    request_id: str
    lease: bytes
    parts: tuple[LoadPart, ...]
    """At most one for each group, none for a group that needs nothing, and at most one tail."""


@dataclass(frozen=True, slots=True)
class StorePart:
    """Chunks of one layer group."""

    group: int
    digests: bytes
    parent: bytes
    """Of the first; empty where chunks stand alone, and at a prompt's start."""
    block_ids: tuple[int, ...]
    """The stored ones of each chunk."""
    is_tail: bool = False
    """This is what the request leaves behind its last whole chunk."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Chunks of one request that this step completes, to be kept by every worker."""

    id: int
    parts: tuple[StorePart, ...]
    tenant: str = ""


@dataclass
class KvistMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler → workers."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    undone: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Requests that were promised a load which could not be begun, and its blocks: to be reported as failed."""
    is_idle: bool = False
    """Nothing is computed in this step, so its worker may wait a moment for the daemon."""
    num_decoding: int = 0
    """Requests of this step, if each of them decodes one token; 0 if the step does anything else."""


@dataclass
class KvistWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers → scheduler: how many workers are done with each job, so that nothing touches its blocks any more."""

    settled: Counter[int] = field(default_factory=Counter)
    refusal: str = ""
    """Why a worker can neither load nor store, ever; empty if it can."""
    failed: frozenset[int] = frozenset()
    """Jobs of which something could not be loaded, or was not kept; told no later than that they are settled."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvistWorkerMetadata)
        return KvistWorkerMetadata(
            self.settled + other.settled, self.refusal or other.refusal, self.failed | other.failed
        )
