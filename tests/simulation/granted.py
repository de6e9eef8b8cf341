"""Leases as the engines of a simulation know them."""

from collections import Counter
from dataclasses import dataclass

from kvist.model.rows import Row
from tests.support.kinds import Kind
from tests.support.simulated import SimulatedEngine


@dataclass(eq=False)
class Granted:
    """A lease as its engine knows it."""

    id: bytes
    kind: Kind
    digests: list[bytes]
    """Of its chunks; the last is a tail if it has one."""
    tail_blocks: int
    """Of its tail, 0 if it has none."""
    granter: SimulatedEngine
    deadline: float
    unclaimed: Counter[Row]
    is_released: bool = False

    @property
    def num_whole(self) -> int:
        return len(self.digests) - (self.tail_blocks > 0)
