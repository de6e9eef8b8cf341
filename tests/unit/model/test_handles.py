"""Handles that could name no memory are refused, with the numbers; two are equal only if all they say is equal."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import LayoutError
from kvist.model.handles import CUDA_IPC, CUDA_VMM, HOST, MemoryHandle

UUID = "GPU-1d1f4a3c-0000-4000-8000-123456789abc"
PAYLOAD = bytes(range(64))
HANDLES = {
    HOST: MemoryHandle(HOST, 4096),
    CUDA_IPC: MemoryHandle(CUDA_IPC, 4096, UUID, PAYLOAD),
    CUDA_VMM: MemoryHandle(CUDA_VMM, 6144, UUID, b"", (4096, 2048)),
    "abacus": MemoryHandle("abacus", 4096, "shelf", b"beads", (4095, 1)),
}


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (HOST, {"nbytes": 0}, "an allocation of 0 bytes"),
        (HOST, {"nbytes": -1}, "an allocation of -1 bytes"),
        (HOST, {"kind": ""}, "names of 0 and 0 characters; at most 64"),
        (HOST, {"kind": "k" * 65}, "names of 65 and 0 characters"),
        (CUDA_IPC, {"device": "d" * 65}, "names of 8 and 65 characters"),
        (CUDA_VMM, {"part_nbytes": (6144, 0)}, "segments of 0 bytes"),
        (CUDA_VMM, {"part_nbytes": (6145, -1)}, "segments of -1 bytes"),
        (CUDA_VMM, {"part_nbytes": (4096, 2047)}, "segments of 6143 bytes in memory of 6144"),
        (CUDA_VMM, {"part_nbytes": (6145,)}, "segments of 6145 bytes in memory of 6144"),
        ("abacus", {"part_nbytes": (4095,)}, "segments of 4095 bytes in memory of 4096"),
        (HOST, {"device": UUID}, f"kind 'host' on device '{UUID}'"),
        (CUDA_IPC, {"device": ""}, "kind 'cuda_ipc' on device ''"),
        (CUDA_VMM, {"device": ""}, "kind 'cuda_vmm' on device ''"),
        (HOST, {"payload": b"x"}, "a handle of 1 bytes; 'host' has 0"),
        (CUDA_IPC, {"payload": PAYLOAD[1:]}, "a handle of 63 bytes; 'cuda_ipc' has 64"),
        (CUDA_IPC, {"payload": PAYLOAD + b"x"}, "a handle of 65 bytes; 'cuda_ipc' has 64"),
        (CUDA_VMM, {"payload": PAYLOAD}, "a handle of 64 bytes; 'cuda_vmm' has 0"),
        (HOST, {"part_nbytes": (4096,)}, "1 segments in memory of kind 'host'"),
        (CUDA_IPC, {"part_nbytes": (4095, 1)}, "2 segments in memory of kind 'cuda_ipc'"),
        (CUDA_VMM, {"part_nbytes": ()}, "0 segments in memory of kind 'cuda_vmm'"),
    ],
    ids=str,
)
def test_what_cannot_be_memory_is_refused(kind: str, change: dict[str, object], words: str):
    """Sizes below one, names too long, segments that do not add up, and parts of another kind are refused."""
    with pytest.raises(LayoutError) as refused:
        replace(HANDLES[kind], **change)
    assert words in str(refused.value)


def test_names_may_be_as_long_as_the_limit():
    """64 characters of kind and of device are accepted."""
    assert MemoryHandle("k" * 64, 1, "d" * 64).device == "d" * 64


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=20))
def test_segments_that_add_up_are_accepted(part_nbytes: list[int]):
    """Any sizes with the sum of the allocation are accepted, and with any other sum refused."""
    nbytes = sum(part_nbytes)
    assert MemoryHandle(CUDA_VMM, nbytes, UUID, b"", tuple(part_nbytes)).num_fds == len(part_nbytes)
    with pytest.raises(LayoutError, match=f"segments of {nbytes} bytes in memory of {nbytes + 1}"):
        MemoryHandle(CUDA_VMM, nbytes + 1, UUID, b"", tuple(part_nbytes))


@pytest.mark.parametrize("field", [field.name for field in fields(MemoryHandle)])
def test_equal_handles_say_the_same(field: str):
    """Handles are equal if every field is, and are then one key; any field that differs makes another."""
    handle = HANDLES["abacus"]
    same = MemoryHandle("abacus", 4096, "shelf", b"beads", (4095, 1))
    assert same == handle
    assert len({same, handle}) == 1
    others = {"kind": "slate", "device": "desk", "payload": b"rods", "part_nbytes": (1, 4095)}
    change = {"nbytes": 4097, "part_nbytes": (4096, 1)} if field == "nbytes" else {field: others[field]}
    assert replace(handle, **change) != handle
    assert replace(HANDLES[CUDA_IPC], payload=PAYLOAD[::-1]) != HANDLES[CUDA_IPC]
    assert replace(HANDLES[CUDA_IPC], device="GPU-2") != HANDLES[CUDA_IPC]


@pytest.mark.parametrize(
    ("kind", "num_fds"), [(HOST, 1), (CUDA_IPC, 0), (CUDA_VMM, 2), ("abacus", 2)], ids=lambda value: str(value)
)
def test_descriptors_that_travel_beside_it(kind: str, num_fds: int):
    """Host memory has one descriptor, a CUDA handle of bytes none, memory in segments one for each."""
    assert HANDLES[kind].num_fds == num_fds


def test_lanes_are_named_after_the_device():
    """All memory of one GPU is served by one lane, however it was exported; host memory has a lane without a name."""
    assert HANDLES[HOST].lane == "host"
    assert HANDLES[CUDA_IPC].lane == HANDLES[CUDA_VMM].lane == f"cuda:{UUID}"
    assert replace(HANDLES[CUDA_IPC], device="GPU-2").lane == "cuda:GPU-2"
    assert HANDLES["abacus"].lane == "abacus:shelf"
    assert MemoryHandle("abacus", 1).lane == "abacus"
