"""Memory is seen by others where it is and as it is, and is kept for exactly as long as somebody sees it."""

import ctypes
import gc
import math
import threading
import weakref

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvist.device.dlpack import CPU, CUDA, DTYPES, MemoryTensor, _capsule_pointer, _ManagedVersioned, _Tensor
from kvist.errors import LayoutError

NUMPY_DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
CODES = {
    "float64": (2, 64), "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int64": (0, 64),
    "int32": (0, 32), "int16": (0, 16), "int8": (0, 8), "uint8": (1, 8), "bool": (6, 8),
    "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8),
}  # fmt: skip
"""Type code and bits, from dlpack.h of DLPack 1.1."""
LEGACY, VERSIONED = (None, b"dltensor"), ((1, 0), b"dltensor_versioned")
forms = pytest.mark.parametrize(("max_version", "name"), [LEGACY, VERSIONED, ((1, 3), VERSIONED[1])])

_rename_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class Owner:
    """Keeps an array, can be watched, and counts its ends."""

    def __init__(self, array: np.ndarray, ends: list[None] | None = None):
        self.array = array
        self.ends = [] if ends is None else ends

    def __del__(self):
        self.ends.append(None)


def tensor_of(array: np.ndarray, owner: object = None, **changes) -> MemoryTensor:
    facts = {
        "address": array.ctypes.data,
        "dtype": array.dtype.name,
        "shape": array.shape,
        "strides": None,
        "storage_offset": 0,
        "nbytes": array.nbytes,
        "device_type": CPU,
        "ordinal": 0,
        "owner": array if owner is None else owner,
    }
    return MemoryTensor(**(facts | changes))


def exported(capsule: object, name: bytes) -> tuple[_Tensor, int]:
    """Return what a capsule holds, and the address of its deleter."""
    pointer = _capsule_pointer(capsule, name)
    if name == VERSIONED[1]:
        managed = _ManagedVersioned.from_address(pointer)
        assert (managed.major, managed.minor, managed.flags) == (1, 1, 0)
        return managed.tensor, managed.deleter
    # A legacy DLManagedTensor is the tensor, the manager and the deleter.
    deleter = ctypes.c_void_p.from_address(pointer + ctypes.sizeof(_Tensor) + ctypes.sizeof(ctypes.c_void_p))
    return _Tensor.from_address(pointer), deleter.value


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_sees_the_memory(dtype: str):
    """Every type that numpy has arrives with the memory's values, type, shape and strides, offset included."""
    memory = (np.arange(24) % 5).astype(dtype)
    view = np.from_dlpack(tensor_of(memory, shape=(2, 3), strides=(8, 2), storage_offset=3))
    assert view.dtype == memory.dtype
    assert view.shape == (2, 3)
    assert view.strides == (8 * memory.itemsize, 2 * memory.itemsize)
    assert view.ctypes.data == memory.ctypes.data + 3 * memory.itemsize
    assert view.tolist() == [[memory[3 + 8 * row + 2 * column] for column in range(3)] for row in range(2)]


def test_no_strides_are_row_major():
    """Without strides the last dimension is the fastest and there are no gaps."""
    memory = np.arange(26, dtype=np.int32)
    tensor = tensor_of(memory, shape=(2, 3, 4), storage_offset=2)
    assert tensor.element_strides == (12, 4, 1)
    assert tensor.end == memory.nbytes
    assert np.array_equal(np.from_dlpack(tensor), memory[2:].reshape(2, 3, 4))


def test_both_sides_write_the_same_memory():
    """A view is the memory itself: what either side writes, the other reads."""
    memory = np.zeros(8, dtype=np.int32)
    view = np.from_dlpack(tensor_of(memory, shape=(4,), strides=(2,)))
    memory[2] = 7
    assert view[1] == 7
    view[3] = 9
    assert memory[6] == 9


@forms
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("device", [(CPU, 0), (CUDA, 0), (CUDA, 3)])
def test_a_capsule_says_what_the_tensor_is(dtype: str, device: tuple[int, int], max_version, name: bytes):
    """Type, device, address, shape and strides are the tensor's, in both forms, and no byte of it is read."""
    code, bits = CODES[dtype]
    device_type, ordinal = device
    tensor = MemoryTensor(0x7F00_0000_0200, dtype, (5, 3), (4, 1), 6, 1 << 20, device_type, ordinal, None)
    capsule = tensor.__dlpack__(stream=2, max_version=max_version)
    held, _ = exported(capsule, name)
    assert tensor.__dlpack_device__() == device
    assert (held.device_type, held.ordinal) == device
    assert (held.code, held.bits, held.lanes) == (code, bits, 1)
    assert (held.data, held.byte_offset) == (0x7F00_0000_0200 + 6 * bits // 8, 0)
    assert (held.shape[: held.num_dimensions], held.strides[: held.num_dimensions]) == ([5, 3], [4, 1])


@st.composite
def views(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    strides = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
    return draw(st.sampled_from(NUMPY_DTYPES)), shape, strides, draw(st.integers(0, 9))


@given(views())
@example(("float32", (), (), 0))
@example(("float32", (0,), (1,), 0))
@example(("int16", (3, 0, 2), (9, 9, 9), 5))
def test_a_view_is_what_numpy_would_stride(drawn: tuple[str, tuple[int, ...], tuple[int, ...], int]):
    """Any tensor that just fits its memory is numpy's own strided view of it; with a byte less it is refused."""
    dtype, shape, strides, offset = drawn
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0
    memory = (np.arange(max(offset + reach, 1)) % 101).astype(dtype)
    nbytes = (offset + reach) * memory.itemsize
    tensor = tensor_of(memory, shape=shape, strides=strides, storage_offset=offset, nbytes=nbytes)
    expected = np.lib.stride_tricks.as_strided(memory[offset:], shape, [n * memory.itemsize for n in strides])
    found = np.from_dlpack(tensor)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()
    if math.prod(shape):
        assert found.ctypes.data == expected.ctypes.data
        assert [s for n, s in zip(shape, found.strides, strict=True) if n > 1] == [
            s for n, s in zip(shape, expected.strides, strict=True) if n > 1
        ]
    if nbytes:
        with pytest.raises(LayoutError, match=rf"ends at byte {nbytes} of memory of {nbytes - 1}:"):
            tensor_of(memory, shape=shape, strides=strides, storage_offset=offset, nbytes=nbytes - 1)


def test_the_owner_lives_with_its_consumers():
    """The last view, not the tensor or an earlier view, lets the memory's owner go, once."""
    ends: list[None] = []
    owner = Owner(np.arange(8.0), ends)
    tensor = tensor_of(owner.array, owner)
    watched = weakref.ref(owner)
    first, second = np.from_dlpack(tensor), np.from_dlpack(tensor)
    del owner, tensor, first
    gc.collect()
    assert watched() is not None
    part = second[2:4]
    del second
    gc.collect()
    assert part.tolist() == [2.0, 3.0]
    del part
    gc.collect()
    assert watched() is None
    assert len(ends) == 1


@forms
def test_an_unconsumed_capsule_lets_go(max_version, name: bytes):
    """A capsule that nobody consumes holds the owner while it exists, and no longer."""
    ends: list[None] = []
    owner = Owner(np.arange(8.0), ends)
    capsule = tensor_of(owner.array, owner).__dlpack__(max_version=max_version)
    watched = weakref.ref(owner)
    del owner
    gc.collect()
    assert watched() is not None
    assert name in repr(capsule).encode()
    del capsule
    gc.collect()
    assert watched() is None
    assert len(ends) == 1


@forms
def test_a_consumer_deletes_from_any_thread(max_version, name: bytes):
    """A consumed capsule leaves the owner to the deleter, which needs no interpreter lock and works in any thread."""
    ends: list[None] = []
    owner = Owner(np.arange(8.0), ends)
    capsule = tensor_of(owner.array, owner).__dlpack__(max_version=max_version)
    pointer = _capsule_pointer(capsule, name)
    _, deleter = exported(capsule, name)
    used = b"used_" + name
    assert _rename_capsule(capsule, used) == 0
    del owner, capsule
    gc.collect()
    assert not ends
    # A CFUNCTYPE lets go of the interpreter lock, as a consumer's own thread would not hold it.
    thread = threading.Thread(target=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter), args=(pointer,))
    thread.start()
    thread.join()
    gc.collect()
    assert len(ends) == 1


def test_an_exception_in_flight_survives():
    """A consumer that fails, or drops its view while it fails, raises its own exception, and still lets go."""
    ends: list[None] = []
    owner = Owner(np.arange(8.0), ends)
    tensor = tensor_of(owner.array, owner)
    with pytest.raises(IndexError, match="100"):
        np.from_dlpack(tensor)[100]
    with pytest.raises((RuntimeError, BufferError), match="dtype"):
        np.from_dlpack(tensor_of(owner.array, owner, dtype="bfloat16"))
    del owner, tensor
    gc.collect()
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"dtype": "complex64"}, "'complex64'"),
        ({"dtype": "torch.float32"}, r"'torch\.float32'"),
        ({"strides": (1, 1)}, "2 strides for 1 dimensions"),
        ({"strides": ()}, "0 strides for 1 dimensions"),
        ({"shape": (-1,)}, r"negative.*shape=\(-1,\)"),
        ({"strides": (-3,)}, r"negative.*strides=\(-3,\)"),
        ({"storage_offset": -2}, "negative.*storage_offset=-2"),
        ({"nbytes": -64, "shape": (0,)}, "negative.*nbytes=-64"),
        ({"shape": (9,)}, "ends at byte 72 of memory of 64"),
        ({"shape": (4,), "strides": (3,)}, "ends at byte 80 of memory of 64"),
        ({"storage_offset": 1}, "ends at byte 72 of memory of 64"),
        ({"shape": (), "storage_offset": 8}, "ends at byte 72 of memory of 64"),
        ({"shape": (0,), "storage_offset": 9}, "ends at byte 72 of memory of 64"),
        ({"shape": (2**40, 2**40), "strides": (0, 0)}, f"{2**83} bytes"),
        ({"shape": (0, 2**40, 2**40)}, f"{2**83} bytes"),
        ({"shape": (1,), "strides": (2**62,)}, f"{2**65} bytes"),
        ({"shape": (1,) * 33}, "33 dimensions; at most 32"),
        ({"address": 0}, "64 bytes lies at 0x0"),
        ({"address": -8}, "64 bytes lies at -0x8"),
        ({"address": 2**64 - 63}, "64 bytes lies at 0xffffffffffffffc1"),
        ({"device_type": 10}, "device 0 of DLPack type 10"),
        ({"device_type": CPU, "ordinal": 1}, "device 1 of DLPack type 1"),
        ({"device_type": CUDA, "ordinal": -1}, "device -1 of DLPack type 2"),
    ],
)
def test_what_is_no_tensor_is_refused(changes: dict[str, object], numbers: str):
    """What would leave its memory, or cannot be said in DLPack, is refused when it is made, with the numbers."""
    memory = np.arange(8.0)
    tensor_of(memory)
    with pytest.raises(LayoutError, match=numbers):
        tensor_of(memory, **changes)


def test_memory_is_neither_copied_nor_moved():
    """Who asks for a copy or for another device gets a BufferError; who asks for what there is gets it."""
    memory = np.arange(8.0)
    tensor = tensor_of(memory)
    with pytest.raises(BufferError, match="64 bytes"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match=r"\(1, 0\).*\(2, 0\)"):
        tensor.__dlpack__(dl_device=(CUDA, 0))
    for stream in (None, -1, 0, 1, 2, 0x7F00_0000_0000):
        assert tensor.__dlpack__(stream=stream, dl_device=(CPU, 0), copy=False)


@forms
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_torch_sees_the_memory(dtype: str, max_version, name: bytes):
    """torch shares the memory too, in both forms, also where numpy lacks the type, and its errors stay its own."""
    torch = pytest.importorskip("torch")
    memory = (torch.arange(24) % 2).to(getattr(torch, dtype))
    ends: list[None] = []
    owner = Owner(memory, ends)
    nbytes = memory.numel() * memory.element_size()
    tensor = MemoryTensor(memory.data_ptr(), dtype, (2, 3), (8, 2), 3, nbytes, CPU, 0, owner)
    view = torch.from_dlpack(tensor.__dlpack__(max_version=max_version))
    expected = memory.as_strided((2, 3), (8, 2), 3)
    assert (view.dtype, view.shape, view.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert view.data_ptr() == expected.data_ptr()
    assert torch.equal(view.float(), expected.float())
    memory[3] = 0
    assert view[0, 0].float() == 0
    with pytest.raises(IndexError):
        torch.from_dlpack(tensor)[100]
    del owner, tensor
    gc.collect()
    assert not ends
    del view
    gc.collect()
    assert len(ends) == 1
