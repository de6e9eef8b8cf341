"""The wheel, built once, and environments of their own for whatever is installed from it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from kvist.server.config import process_environment

ROOT = Path(__file__).parents[2]
INSTALL_S = 110


class Installation:
    """A fresh virtual environment, and a home with nothing in it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.bin = folder / "venv" / "bin"
        make = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
        subprocess.run(make, check=True, timeout=INSTALL_S)
        outside = process_environment()
        kept = {
            name: value
            for name, value in outside.items()
            if not name.startswith(("KVIST_", "PYTHON")) and name not in ("HOME", "VIRTUAL_ENV", "NOTIFY_SOCKET")
        }
        self.environment = {
            **kept,
            "HOME": str(self.home),
            "PATH": f"{self.bin}:{outside['PATH']}",
            "PIP_CACHE_DIR": str(folder.parent / "packages"),  # Each is downloaded once for all installations.
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs to the end, away from the source tree."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            env=self.environment, cwd=self.home, capture_output=True, text=True, check=False, timeout=INSTALL_S,
        )  # fmt: skip

    def install(self, *requirements: str) -> str:
        """Install with the pip at hand, which is not part of it; return what went wrong, if anything did."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "install", "--quiet", "--no-compile", *requirements],
            env=self.environment, cwd=self.home, capture_output=True, text=True, check=False, timeout=INSTALL_S,
        )  # fmt: skip
        return done.stderr if done.returncode else ""

    def distributions(self) -> set[str]:
        """Return the names of all that is installed."""
        program = "from importlib import metadata; print(*{one.metadata['Name'] for one in metadata.distributions()})"
        return set(self.run("python", "-c", program).stdout.split())


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from this tree."""
    missing = [name for name in ("pip", "hatchling") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"a wheel cannot be built here: {', '.join(missing)} not installed; pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", str(ROOT), "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *build], capture_output=True, text=True, check=False, timeout=INSTALL_S
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Install kvist as an engine on a CPU has it. Skips where packages cannot be had."""
    made = Installation(tmp_path_factory.mktemp("light"))
    if complaint := made.install("msgspec", "numpy"):
        pytest.skip(f"packages cannot be installed here: {complaint.strip().splitlines()[-1]}")
    assert made.install(str(wheel)) == ""
    return made
