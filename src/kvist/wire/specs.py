"""Values of the model as parts of messages. The laws are those of ``wire.messages``."""

from __future__ import annotations

import msgspec


class PlaneSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``model.layout.LayerPlane`` on the wire."""

    memory: int
    offset: int
    num_blocks: int
    block_stride: int
    row_nbytes: int
    num_kv: int = 1
    kv_stride: int = 0
    num_tokens: int = 1
    token_stride: int = 0
    num_heads: int = 1
    head_stride: int = 0


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row that a worker holds, ``model.rows.RowMemory``, on the wire."""

    kind: str
    block_tokens: int
    planes: list[PlaneSpec]
    null_block: int | None = None
    window: int | None = None
    """Tokens, for kinds that have a window."""
    group: int = 0
    """Number of the layer group, which all workers of all engines that share chunks give it."""
    shard: int = 0


class MemorySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``model.handles.MemoryHandle`` on the wire; each owns the next ``num_fds`` file descriptors of its session."""

    kind: str
    nbytes: int
    device: str = ""
    payload: bytes = b""
    part_nbytes: list[int] = []


class NeedSpec(msgspec.Struct, frozen=True):
    """``model.coverage.Need`` on the wire."""

    kind: str
    span: int | None = None
    """Chunks, for kinds that have a window."""
    num_shards: int = 1
    num_readers: int = 1
    """Workers that will read each row: more than one where KV is replicated."""


class NamespaceSpec(msgspec.Struct, frozen=True):
    """``model.keys.Namespace`` on the wire."""

    model: str
    revision: str
    dtype: str
    layout: str
    shards: str
    chunk_tokens: int
    weights: str = ""
