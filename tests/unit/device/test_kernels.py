"""The kernels compile for every architecture that is served, without a GPU, and once only."""

import ctypes
import gc
import re
import shutil
from pathlib import Path

import pytest

from kvist.device.cuda.pipe import _SliceArguments
from kvist.device.kernels import NAMES, SOURCE, THREADS, compile_kernels
from kvist.errors import DeviceError

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
TYPES = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64}


@pytest.fixture(autouse=True, scope="module")
def nvrtc() -> None:
    from cuda.bindings import nvrtc  # noqa: PLC0415 -- may be missing

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that all tests may use and none may spoil, because compiling takes a second."""
    return tmp_path_factory.mktemp("kernels")


def kept_files(cache: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_they_compile(arch: str, shared: Path):
    """For each architecture there is a cubin, an ELF, that has each kernel by its name."""
    cubin = compile_kernels(arch, cache=shared)
    assert cubin.startswith(b"\x7fELF")
    for name in NAMES:
        assert b"\0.text." + name.encode() + b"\0" in cubin


def test_the_second_time_they_are_found(shared: Path, tmp_path: Path):
    """What was compiled is kept, and returned as it was kept; another architecture has an entry of its own."""
    cubin, other = (compile_kernels(arch, cache=shared) for arch in ("sm_90", "sm_80"))
    assert cubin != other
    cache = shutil.copytree(shared, tmp_path / "cache")
    before = kept_files(cache)
    assert [compile_kernels(arch, cache=cache) for arch in ("sm_90", "sm_80")] == [cubin, other]
    assert kept_files(cache) == before
    (kept,) = (path for path, content in before.items() if content == cubin)
    assert list(before.values()).count(other) == 1
    kept.write_bytes(cubin + b"kept")
    assert [compile_kernels(arch, cache=cache) for arch in ("sm_90", "sm_80")] == [cubin + b"kept", other]


def test_without_a_place_to_keep_them_they_compile(shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Where nothing can be kept they are compiled all the same, the same, and the operator is told why."""
    (tmp_path / "file").write_bytes(b"")
    cubin = compile_kernels("sm_90", cache=tmp_path / "file" / "cache")
    assert cubin == compile_kernels("sm_90", cache=shared)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("compiled kernels are not kept error=")


# cuda-core 1.2 prints a complaint when a program that was refused is collected, which may be during a later test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("arch", ["sm_1", "sm_banana", "gfx942"])
def test_an_unknown_architecture_is_refused(arch: str, tmp_path: Path):
    """What the compiler does not know is a DeviceError that names it; nothing is kept."""
    with pytest.raises(DeviceError, match=f"cannot be compiled for {arch}: "):
        compile_kernels(arch, cache=tmp_path)
    assert not [path for path, content in kept_files(tmp_path).items() if content.startswith(b"\x7fELF")]
    gc.collect()


def test_arguments_are_what_the_kernels_read():
    """A launch passes the fields of the kernels' ``struct Slice``, in order, with the sizes that they have there."""
    fields = re.findall(
        r"^ *(?:const )?(\w+\*?) (\w+);", SOURCE.split("struct Slice {")[1].split("};")[0], re.MULTILINE
    )
    expected = [(name, ctypes.c_uint64 if "*" in kind else TYPES[kind]) for kind, name in fields]
    assert list(_SliceArguments._fields_) == expected


def test_names_and_threads_are_those_of_the_source():
    """Each kernel of the source is named, and launched with the threads that it was compiled for."""
    found = re.findall(r"__global__ void __launch_bounds__\((\d+)\) (\w+)\(", SOURCE)
    assert [(int(threads), name) for threads, name in found] == [(THREADS, name) for name in NAMES]
