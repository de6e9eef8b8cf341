"""The seam between the daemon and an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvist.model.handles import MemoryHandle
from kvist.model.layout import LayerGroup
from kvist.model.transfer import CopyPlan, Direction

GoOn = Callable[[], bool]
"""Asked between chunks, on any thread: whether a copy may begin another one."""

IsShared = Callable[[], bool]
"""Asked during a copy, on any thread: whether others wait for the link meanwhile, and must be let in."""


def never() -> bool:
    """Nobody else needs the link."""
    return False


class Device(Protocol):
    """One accelerator. Every method runs on the device's own executor thread; all tests of it are one suite."""

    @property
    def kind(self) -> str:
        """Which memory handles it opens."""
        ...

    def open_memory(self, handle: MemoryHandle, fds: Sequence[int]) -> int:
        """Map a peer's allocation and return its address here; the caller keeps and closes ``fds``.

        Raises:
            LayoutError: the memory is not what the handle says, or could be taken away while it is mapped. Nothing
                stays mapped.
        """
        ...

    def close_memory(self, address: int, nbytes: int) -> None:
        """Unmap what ``open_memory`` returned. The caller guarantees that no copy on it is running or will."""
        ...

    def prepare(self, group: LayerGroup, blocks_per_chunk: int, bases: Sequence[int]) -> None:
        """Work out and allocate what copies of a registered layout need, so that the first is like all others.

        Raises:
            LayoutError: the device cannot copy such a layout, or has no room for what that needs.
        """
        ...

    def open_fence(self, payload: bytes) -> object:
        """Return a peer's event, which its process records, for ``wait_for``.

        Raises:
            LayoutError: this device has no events, or the payload names none.
        """
        ...

    def close_fence(self, fence: object) -> None:
        """Give up what ``open_fence`` returned."""
        ...

    def wait_for(self, direction: Direction, fence: object) -> None:
        """Let the next copy of a direction touch no block before the event that was recorded last has happened."""
        ...

    def gather(
        self, plan: CopyPlan, bases: Sequence[int], chunks: range, go_on: GoOn, is_shared: IsShared = never
    ) -> list[bytes]:
        """Copy the blocks of some of a plan's chunks into their slots; return a checksum of each that was copied.

        A checksum is of the device's own making and depends on the canonical bytes and their order alone.

        ``bases`` holds the address of each allocation that the plan's planes name. All bytes have landed on return.
        Where ``go_on`` says no, the copy ends early: what is returned is of the first of ``chunks``.
        """
        ...

    def scatter(
        self,
        plan: CopyPlan,
        bases: Sequence[int],
        chunks: range,
        checksums: Sequence[bytes],
        go_on: GoOn,
        is_shared: IsShared = never,
    ) -> list[bool]:
        """Copy slots into the blocks of some of a plan's chunks; return which of them are as their checksums say.

        The blocks of a chunk that is not must not be used, whatever is in them. The plan's skipped blocks are verified
        and not written.
        Where ``go_on`` says no, the copy ends early, as in ``gather``.
        """
        ...

    def close(self) -> None:
        """Give back what the device holds besides opened memory, of which none is left. Idempotent."""
        ...
