"""Probes of machines that are made up, and of this one: what is seen is what is there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvist.doctor.disks import filesystem_of, look_at_disk
from kvist.doctor.facts import Listener, NotConnected, NotKnown, NumaNode, Silence
from kvist.doctor.gpus import gpu_nodes, installed_gpus, look_at_gpus
from kvist.doctor.host import look_at_host, numa_nodes
from kvist.doctor.ipc_probe import open_in_another_process, read_memory, share_memory
from kvist.doctor.sockets import ask_daemon, look_at_socket
from kvist.errors import DeviceError
from kvist.model.handles import CUDA_IPC, MemoryHandle
from kvist.storage.disk.tier import DiskTier
from kvist.units import GIB, KIB, MIB
from tests.support.fake_cuda import GPU, Machine, Process

MOUNTS = """\
22 1 252:1 / / rw,relatime - ext4 /dev/vda1 rw
30 22 0:25 / /tmp rw - tmpfs tmpfs rw
31 22 0:26 / /mnt/a\\040b rw - xfs /dev/vdb rw
32 22 0:27 / /tmp rw master:3 - overlay overlay rw
"""


def test_nodes_are_read_from_the_kernel(tmp_path: Path):
    """Each node's number and bytes; without any, a reason."""
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "meminfo").write_text(
            f"Node {number} MemTotal:       1048576 kB\nNode {number} MemFree:        {number}024 kB\n"
        )
    assert numa_nodes(tmp_path) == (NumaNode(0, GIB, 24 * KIB), NumaNode(1, GIB, 1024 * KIB))
    assert isinstance(numa_nodes(tmp_path / "none"), NotKnown)


def test_this_machine_has_memory_and_copies():
    """Limits leave what can be negative only where they are exceeded, and copies take time."""
    host = look_at_host()
    assert host.kernel >= (5, 14)
    assert "the machine's available memory" in dict(host.memory_left)
    assert 1e7 < host.copy_rate < 1e12


def test_the_longest_mount_point_counts(tmp_path: Path):
    """Of two on one point the later one hides; names with blanks are read as the kernel writes them."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    for path, kind in (("/x/y", "ext4"), ("/tmp/z", "overlay"), ("/mnt/a b/c", "xfs"), ("/tmpx", "ext4")):
        assert filesystem_of(Path(path), mounts) == kind
    assert isinstance(filesystem_of(Path("/x"), tmp_path / "none"), NotKnown)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path):
    """Rates are of bytes that have moved; what is there is what was there."""
    disk = look_at_disk(tmp_path)
    assert (disk.is_there, disk.refusal, disk.user, disk.unusable) == (True, "", "", "")
    assert disk.write_rate > 1e5
    assert disk.read_rate > 1e5
    assert disk.device == tmp_path.stat().st_dev
    assert os.listdir(tmp_path) == []


def test_a_directory_to_come_is_looked_at_in_its_parent(tmp_path: Path):
    """The daemon makes it itself, if the parent is there."""
    disk = look_at_disk(tmp_path / "new")
    assert (disk.is_there, disk.has_parent, disk.refusal) == (False, True, "")
    assert os.listdir(tmp_path) == []
    gone = look_at_disk(tmp_path / "new" / "newer")
    assert (gone.has_parent, gone.refusal) == (False, "No such file or directory")


def test_a_directorys_user_and_version_are_seen(tmp_path: Path):
    """Who has it locked; afterwards, what it holds, and whether this version can use that."""
    folder = tmp_path / "disk"
    tier = DiskTier([folder], MIB)
    assert look_at_disk(folder).user == str(os.getpid())
    tier.close()
    disk = look_at_disk(folder)
    assert (disk.user, disk.unusable) == ("", "")
    assert disk.own_nbytes >= MIB // 2
    raw = bytearray((folder / "kvist.log").read_bytes())
    raw[8] = 9
    (folder / "kvist.log").write_bytes(raw)
    assert "format version 9" in look_at_disk(folder).unusable


def test_a_file_is_no_directory(tmp_path: Path):
    """Nothing is written beside it."""
    (tmp_path / "file").write_text("mine")
    assert look_at_disk(tmp_path / "file").refusal == "Not a directory"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else for a while")
def test_what_may_not_be_seen_is_refused_and_not_raised(tmp_path: Path):
    """A user whom the directories do not let through learns that, of sockets and of disks."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        tmp_path.chmod(0o700)
        os.seteuid(65534)
        try:
            found, disk = look_at_socket(path), look_at_disk(tmp_path / "disk")
        finally:
            os.seteuid(0)
    assert found.peer == NotConnected("EACCES", "Permission denied")
    assert (disk.has_parent, disk.refusal) == (True, "Permission denied")
    assert isinstance(disk.free_nbytes, NotKnown)


def test_who_listens_is_seen(tmp_path: Path):
    """The process and its user, as the kernel names them, and the command that it runs."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        peer = look_at_socket(path).peer
        assert isinstance(peer, Listener)
        assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
        assert "python" in str(peer.program)
        assert ask_daemon(path, peer, deadline_s=0.05) == Silence(0.05)


def test_gpus_are_read_from_the_driver(tmp_path: Path):
    """UUIDs as CUDA has them, and the node of each by its PCI address."""
    driver, devices = tmp_path / "gpus", tmp_path / "devices"
    for number, address in enumerate(("0000:17:00.0", "0000:65:00.0")):
        (driver / address).mkdir(parents=True)
        (driver / address / "information").write_text(f"Model: \t H200\nGPU UUID: \t GPU-{number}{GPU[1:].upper()}\n")
        (devices / address).mkdir(parents=True)
        (devices / address / "numa_node").write_text(f"{number - 1}\n")
    assert installed_gpus(driver) == (f"0{GPU[1:]}", f"1{GPU[1:]}")
    assert gpu_nodes(driver, devices) == (("0000:65:00.0", 0),)
    assert installed_gpus(tmp_path / "none") == ()


def test_shared_memory_is_read_by_another_process():
    """What was written here is read there, and nothing stays open on either side."""
    machine = Machine()
    other = Process(machine)

    def read_there(handle: MemoryHandle) -> bytes:
        with machine.running(other):
            return read_memory(handle)

    with machine.installed():
        share_memory(GPU, read_there)
        with pytest.raises(DeviceError, match="another process has read 00 where"):
            share_memory(GPU, lambda _: b"\0")
    assert machine.daemon.left() == []
    assert other.left() == []


def test_a_child_that_sees_no_gpu_says_why():
    """Its last line is the reason, whatever it was that it lacks."""
    with pytest.raises(DeviceError, match=r"the other process: (CUDA|there is no CUDA|GPU|cuDevice)"):
        open_in_another_process(MemoryHandle(CUDA_IPC, MIB, GPU, bytes(64)))


def test_visible_gpus_are_those_of_cuda():
    """All UUIDs, and that sharing was tried with the first of them."""
    other = f"f{GPU[1:]}"
    with Machine(uuids=(other, GPU)).installed():
        gpus = look_at_gpus({"CUDA_VISIBLE_DEVICES": "1,0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert gpus.visible == (GPU, other)
    assert gpus.visible_devices == "1,0"
    assert gpus.allocator == "expandable_segments:True"
    assert isinstance(gpus.sharing, NotKnown)
    assert gpus.sharing.because.startswith("the other process: ")
