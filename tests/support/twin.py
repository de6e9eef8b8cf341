"""A GPU's device, played on the host: the same checksums, the same fences, the copies of ``HostDevice``."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np
from xxhash import xxh3_64_digest

from kvist.device.base import GoOn, IsShared, never
from kvist.device.checksum import vector_checksum
from kvist.device.host import HostDevice, cut_into_pieces
from kvist.model.transfer import CopyPlan, Direction


class TwinDevice(HostDevice):
    """Copies between this process's own memory and a pool that it maps from a descriptor."""

    def __init__(self, pool_fd: int, pool_nbytes: int) -> None:
        self._mapping = mmap.mmap(pool_fd, pool_nbytes)
        self.pool = np.frombuffer(self._mapping, dtype=np.uint8)
        super().__init__(self.pool.data, self.pool.ctypes.data, num_threads=1)
        self.is_held = False
        self.waited: list[tuple[Direction, object]] = []
        self.before_copy: Callable[[Direction], None] = lambda _: None

    @property
    def kind(self) -> str:
        return "twin"

    def hold(self) -> None:
        self.is_held = True

    def wait_for(self, direction: Direction, fence: object) -> None:
        self.waited.append((direction, fence))

    def gather(
        self, plan: CopyPlan, bases: Sequence[int], chunks: range, go_on: GoOn, is_shared: IsShared = never
    ) -> list[bytes]:
        assert self.is_held
        self.before_copy(plan.direction)
        num_done = len(super().gather(plan, bases, chunks, go_on))
        return [self._checksum(plan, chunk) for chunk in chunks[:num_done]]

    def scatter(
        self,
        plan: CopyPlan,
        bases: Sequence[int],
        chunks: range,
        checksums: Sequence[bytes],
        go_on: GoOn,
        is_shared: IsShared = never,
    ) -> list[bool]:
        assert self.is_held
        self.before_copy(plan.direction)
        found = []
        for number, chunk in enumerate(chunks):
            if not go_on():
                break
            is_right = self._checksum(plan, chunk) == checksums[number]
            if is_right:
                self._copy_into_blocks(plan, bases, chunk)
            found.append(is_right)
        return found

    def close(self) -> None:
        self.is_held = False
        super().close()

    def _checksum(self, plan: CopyPlan, chunk: int) -> bytes:
        slot = int(plan.slot_offsets[chunk])
        return vector_checksum(self.pool[slot : slot + plan.chunk_nbytes]).to_bytes(8, "little")

    def _copy_into_blocks(self, plan: CopyPlan, bases: Sequence[int], chunk: int) -> None:
        # The host's own checksums of a slot are had by gathering nothing: the slot is what it is.
        slot = int(plan.slot_offsets[chunk])
        pieces = cut_into_pieces(plan.group, plan.block_ids.shape[1])
        digest = b"".join(
            xxh3_64_digest(self.pool[slot + piece.slot_offset : slot + piece.slot_end].tobytes()) for piece in pieces
        )
        assert super().scatter(plan, bases, range(chunk, chunk + 1), [digest], lambda: True) == [True]
