"""The copy kernels: compiled for one architecture when they are first needed there, and kept on disk.

The law: a cubin is found again only for the same source, options, compiler and architecture. Compiling needs NVRTC and
no GPU, so that every architecture can be tried anywhere.
"""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import Final

from kvist.errors import DeviceError

logger = logging.getLogger(__name__)

SOURCE: Final = files(__name__).joinpath("paged_copy.cu").read_text()
NAMES: Final = ("gather", "scatter", "check")
THREADS: Final = 256
"""Threads of a thread block, as the source says."""


def compile_kernels(arch: str, *, cache: Path | None = None) -> bytes:
    """Return the kernels' cubin for an architecture such as ``sm_90``.

    ``cache`` is the directory in which compiled code is kept, shared by processes; with None, the user's own.

    Raises:
        DeviceError: NVRTC is missing or refuses; carries its words.
    """
    try:
        from cuda.core import Program, ProgramOptions  # noqa: PLC0415 -- only where a GPU's memory is opened
        from cuda.core.utils import FileStreamProgramCache  # noqa: PLC0415
    except ImportError as error:
        raise DeviceError(f"CUDA memory needs cuda-core: {error}; pip install 'kvist[cuda]'") from error
    try:
        program = Program(SOURCE, "c++", ProgramOptions(std="c++17", arch=arch))
        try:
            with FileStreamProgramCache(cache) as kept:
                return bytes(program.compile("cubin", cache=kept).code)
        except OSError as error:
            logger.warning("compiled kernels are not kept error=%s", error)
            return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda-core raises what NVRTC, nvJitLink and Python raise.
        raise DeviceError(f"the copy kernels cannot be compiled for {arch}: {error}") from error
