"""The quickstart's first block does what the page says, as it stands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from kvist import __version__
from tests.packaging.conftest import INSTALL_S, ROOT, Installation

MARKED = re.compile(r"<!-- The next block is run as it stands .*-->\n```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(300)
def test_the_quickstart_is_true(light: Installation, tmp_path: Path):
    """In an empty home, the block installs the program, runs a daemon that answers, stops it and finds its disk."""
    (block,) = MARKED.findall((ROOT / "docs" / "quickstart.md").read_text())
    python = os.path.dirname(os.path.realpath(light.bin / "python"))
    socket = tmp_path / "kvist.sock"
    changed = {"HOME": str(tmp_path), "PATH": f"{python}:{os.defpath}", "KVIST_SOCKET": str(socket), "COLUMNS": "200"}
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=ROOT, env={**light.environment, **changed}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, complaints = shell.communicate(timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)  # The shell and the daemon that it started.
        raise
    assert shell.returncode == 0, complaints
    assert f"kvist {__version__}, protocol " in said
    assert "0 sealed, 0 being written, 0 pinned" in said
    assert "every byte verified" in said
    (loaded,) = re.findall(r'^kvist_bytes_total\{direction="load"\} (\S+)$', said, re.MULTILINE)
    assert float(loaded) > 0
    assert "kvist: ready" in complaints
    assert re.search(rf"directory +{tmp_path}/kvist-chunks *\n", said)
    assert re.search(r"state +sound *\n", said)
    assert not socket.exists(), "the daemon was stopped in order"
