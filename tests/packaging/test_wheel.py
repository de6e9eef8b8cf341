"""What is installed from the wheel is whole, brings little with it, and says what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from kvist import __version__
from tests.packaging.conftest import ROOT, Installation
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def served(wheel: Path, light: Installation, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Install kvist as the daemon's host has it, where ``light`` could be installed."""
    made = Installation(tmp_path_factory.mktemp("served"))
    assert made.install(f"{wheel}[server]") == ""
    return made


def test_the_wheel_holds_the_package(wheel: Path):
    """Every file of the package is in the wheel, those that are no Python included, and nothing else of the tree is."""
    source = ROOT / "src"
    files = [path for path in (source / "kvist").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {str(path.relative_to(source)) for path in files}
    assert {"kvist/py.typed", "kvist/device/kernels/paged_copy.cu"} <= names
    packed = zipfile.ZipFile(wheel).namelist()
    assert {name for name in packed if ".dist-info/" not in name} == names


def test_an_engine_needs_two_packages(light: Installation):
    """Without extras, msgspec and numpy are all that comes with it, and all that client and connector load."""
    assert light.distributions() == {"kvist", "msgspec", "numpy"}
    modules = "kvist.client.client, kvist.adapters.vllm.plugin, kvist.adapters.vllm.options, kvist.device.kernels"
    program = f"import {modules}; assert 'gather' in kvist.device.kernels.SOURCE; print(kvist.__file__)"
    done = light.run("python", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(light.bin.parent)), "another tree was imported"


def test_vllm_finds_the_connector(light: Installation):
    """The installed metadata names the entry point that vLLM looks for, and it can be loaded."""
    program = (
        "from importlib.metadata import entry_points\n"
        "for point in entry_points(group='vllm.general_plugins'): print(point.name, point.load().__module__)"
    )
    assert light.run("python", "-c", program).stdout == "kvist kvist.adapters.vllm.plugin\n"


@pytest.mark.parametrize("command", [["kvist", "serve"], ["python", "-m", "kvist", "version"]])
def test_the_command_says_what_it_needs(light: Installation, command: list[str]):
    """Without the daemon's packages, the command is one sentence with the line to type, and exit code 2."""
    done = light.run(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvist: this command needs ")
    assert done.stderr.endswith(": pip install 'kvist[server]'\n")
    assert done.stderr.count("\n") == 1


def test_the_daemon_runs_from_the_wheel(served: Installation):
    """With ``[server]``, a daemon starts, answers and stops in order, in a home where nothing is."""
    assert served.run("kvist", "version").stdout.startswith(f"kvist {__version__}, protocol ")
    path = str(served.home / "kvist.sock")
    serve = [str(served.bin / "kvist"), "serve", "--pool", "16MiB", "--socket", path]
    with subprocess.Popen(serve, env=served.environment, cwd=served.home, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            wait_until(lambda: os.path.exists(path) or daemon.poll() is not None)
            status = served.run("kvist", "status", "--socket", path)
            assert status.returncode == 0, status.stderr
            assert f", pid {daemon.pid}," in status.stdout
        finally:
            daemon.send_signal(signal.SIGTERM)
            _, said = daemon.communicate(timeout=30)
    assert daemon.returncode == 0, said
    assert "kvist: ready" in said
    assert served.run("kvist", "status", "--socket", path).returncode == 1
