"""A real daemon in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import itertools
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvist.client.client import Client
from kvist.errors import Unreachable
from kvist.wire import messages as wire
from tests.support.memory import num_fds
from tests.support.waiting import wait_until

START_S = 30.0


def command(*arguments: str) -> list[str]:
    """Return how the program is run."""
    return [sys.executable, "-m", "kvist", *arguments]


class Daemon:
    """``kvist serve`` on a socket below ``folder``. Stop it, or leave it as a context."""

    def __init__(
        self, folder: Path, *, pool: str = "16MiB", socket: str = "kvist.sock", arguments: Sequence[str] = ()
    ) -> None:
        self.path = str(folder / socket)
        self.log = folder / "daemon.log"
        self._arguments = ["serve", "--pool", pool, "--socket", self.path, "--http", "off", *arguments]
        self._observer = Client(self.path, engine_id="observer", name="test", deadline_s=START_S)
        self.start()

    def start(self) -> None:
        """Start the process, and return when it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command(*self._arguments), stderr=log)
        wait_until(lambda: self.process.poll() is not None or self._answers(), deadline_s=START_S)
        assert self.process.poll() is None, self.log.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def status(self) -> wire.StatusReply:
        """Return the daemon's counters; its sessions include the one that asks."""
        reply = self._observer.call(wire.Status)
        assert isinstance(reply, wire.StatusReply)
        return reply

    def count(self, counter: str) -> int:
        return self.status().counters.get(counter, 0)

    def num_fds(self) -> int:
        return num_fds(self.pid)

    @property
    def fds_max(self) -> int:
        """How many descriptors it may have."""
        return resource.prlimit(self.pid, resource.RLIMIT_NOFILE)[0]

    @contextmanager
    def room_for(self, num: int) -> Iterator[None]:
        """Let it have so many descriptors more than it has now, and no others, for a while."""
        soft, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        taken = {int(name) for name in os.listdir(f"/proc/{self.pid}/fd")}
        free = (number for number in itertools.count() if number not in taken)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (next(itertools.islice(free, num, None)), hard))
        try:
            yield
        finally:
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (soft, hard))

    def num_rests(self) -> int:
        """Return how often its loop has waited, as opposed to having been interrupted."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(fields["voluntary_ctxt_switches"])

    @property
    def url(self) -> str:
        """Where it answers HTTP, which it says before it is ready."""
        wait_until(lambda: "kvist: ready" in self.log.read_text(), deadline_s=START_S)
        return re.findall(r"^kvist: (http://\S+)$", self.log.read_text(), re.MULTILINE)[-1]

    @property
    def http_pid(self) -> int:
        """The process that it has started last to answer HTTP."""
        wait_until(lambda: self.num_logged("http process started"), deadline_s=START_S)
        return int(re.findall(r"http process started pid=(\d+)", self.log.read_text())[-1])

    def num_logged(self, text: str) -> int:
        return self.log.read_text().count(text)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poison(self, chunk: bytes, *, place: int) -> None:
        """Change one byte of a chunk where it lies in the daemon's pool, through the kernel's door to it."""
        folder = Path(f"/proc/{self.pid}/fd")
        pool = next(link for link in folder.iterdir() if "memfd:kvist-pool" in os.readlink(link))
        fd = os.open(pool, os.O_RDWR)
        try:
            start = os.pread(fd, os.fstat(fd).st_size, 0).index(chunk)
            assert os.pwrite(fd, bytes([chunk[place] ^ 1]), start + place) == 1
        finally:
            os.close(fd)

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        self._observer.close()
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def kill(self) -> None:
        """End it without a warning."""
        self.process.kill()
        self.process.wait(START_S)
        self._observer.close()

    def check_quiet(self, *, num_fds: int, num_sessions: int = 1) -> None:
        """Wait until nothing is held, and assert that what is used is what can be read."""
        wait_until(lambda: self.status().num_sessions == num_sessions, what=str(self.status()))
        status = self.status()
        assert (status.num_leases, status.num_pinned, status.num_reserved, status.num_copies_in_flight) == (0, 0, 0, 0)
        assert (status.pool_used_nbytes > 0) is (status.num_sealed > 0)
        wait_until(lambda: self.num_fds() == num_fds, what=f"{self.num_fds()} descriptors, {num_fds} at first")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            self._observer.call(wire.Ping, deadline_s=START_S)
        except Unreachable:
            return False
        return True
