"""``kvist disk``: what it says of a directory, and that it leaves one alone that is in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvist.storage.disk.tier import DiskTier
from kvist.units import MIB
from tests.support.tiers import key_of, store


def kvist(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvist", "disk", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    tier = DiskTier([tmp_path / "disk"], MIB)
    for name, parent in (("a0", None), ("a1", "a0"), ("b0", None)):
        assert store(tier, name, parent)
    tier.close()
    return tmp_path / "disk"


def test_a_sound_directory_passes(disk: Path):
    """All chunks are read, none is bad, and the code is 0; the figures are those of the files."""
    done = kvist("verify", disk)
    assert (done.returncode, done.stdout.strip()) == (0, f"{disk}: 3 chunks, 0 bad")
    facts = json.loads(kvist("stats", disk, "--json").stdout)
    assert (facts["num_chunks"], facts["chunk_nbytes"], facts["is_damaged"]) == (3, 15_000, False)
    assert facts["slab_nbytes"] == (disk / "kvist.slab").stat().st_size
    assert facts["log_nbytes"] == (disk / "kvist.log").stat().st_size
    assert "3 (14.65 KiB)" in kvist("stats", disk).stdout


def test_bad_chunks_are_named(disk: Path):
    """One wrong byte: that chunk's key and place, and the code 1. Nothing is repaired."""
    raw = bytearray((disk / "kvist.slab").read_bytes())
    at = raw.find(bytes(key_of("a1"))) - 40
    raw[at + 5000] ^= 1
    (disk / "kvist.slab").write_bytes(raw)
    done = kvist("verify", disk, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["bad"] == [
        {"key": key_of("a1").hex(), "offset": at, "reason": "it is not what was written there"}
    ]
    done = kvist("verify", disk)
    assert done.returncode == 1
    assert f"{key_of('a1').hex()} at {at}" in done.stdout
    assert (disk / "kvist.slab").read_bytes() == raw


def test_a_slab_of_another_log_is_damaged(disk: Path, tmp_path: Path):
    """Files that do not belong together are told, with the code 1."""
    DiskTier([tmp_path / "other"], MIB).close()
    (tmp_path / "other" / "kvist.slab").rename(disk / "kvist.slab")
    done = kvist("verify", disk)
    assert done.returncode == 1
    assert "do not belong together" in done.stdout


def test_a_directory_in_use_is_left_alone(disk: Path):
    """Each command refuses with the code 2 and the process that uses it."""
    tier = DiskTier([disk], MIB)
    for command in ("verify", "stats", "purge"):
        done = kvist(command, disk)
        assert done.returncode == 2
        assert f"{disk} is in use by the process with pid {os.getpid()}" in done.stderr
    tier.close()
    assert kvist("verify", disk).returncode == 0


def test_a_purge_removes_all_of_ours_and_nothing_else(disk: Path):
    """Also what a newer version wrote; other files stay."""
    (disk / "mine").write_text("mine")
    raw = bytearray((disk / "kvist.log").read_bytes())
    raw[8] = 9
    (disk / "kvist.log").write_bytes(raw)
    done = kvist("verify", disk)
    assert done.returncode == 2
    assert "has format version 9, this kvist knows 1" in done.stderr
    assert kvist("purge", disk).returncode == 0
    assert [path.name for path in disk.iterdir()] == ["mine"]
    assert kvist("verify", disk).returncode == 2
