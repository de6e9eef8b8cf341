"""Who may connect is decided by what the kernel says of the peer."""

import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvist.errors import ConfigError
from kvist.server.listening import Access, listen, peer_of

STRANGER, GROUP = 54321, 43210
OWN = os.getuid()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can look into, unlike the runner's own."""
    with tempfile.TemporaryDirectory(prefix="kvist-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def connect_as(path: str, listener: socket.socket, groups: Sequence[int]) -> socket.socket:
    """Return the daemon's end of a connection of another user, who is in these groups."""
    listener.settimeout(10)
    pid = os.fork()
    if pid == 0:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                os.setgroups(list(groups))
                os.setresgid(STRANGER, STRANGER, STRANGER)
                os.setresuid(STRANGER, STRANGER, STRANGER)
                sock.connect(path)
        finally:
            os._exit(0)
    accepted, _ = listener.accept()
    os.waitpid(pid, 0)
    return accepted


@pytest.mark.parametrize(
    ("uids", "group", "mode"),
    [
        ((), "", 0o600),
        ((), str(os.getgid()), 0o660),
        ((STRANGER,), "", 0o666),
        ((STRANGER,), str(os.getgid()), 0o666),
        ((OWN,), "", 0o600),
    ],
)
def test_the_mode_lets_through_who_may(folder: Path, uids: tuple[int, ...], group: str, mode: int):
    """Nobody else, unless single users are named, whom no mode can tell from others."""
    path = str(folder / "s")
    lock_fd, listener = listen(path, Access.of(uids, group))
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    listener.close()
    os.close(lock_fd)


@pytest.mark.skipif(OWN != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("uids", "group", "groups", "may"),
    [
        ((), "", [GROUP], False),
        ((), str(GROUP), [GROUP], True),
        ((), str(GROUP), [GROUP + 1, GROUP], True),
        ((), str(GROUP), [GROUP + 1], False),
        ((), str(STRANGER), [], True),
        ((STRANGER,), "", [], True),
        ((STRANGER + 1,), "", [], False),
    ],
)
def test_a_peer_is_judged_by_its_user_and_groups(
    folder: Path, uids: tuple[int, ...], group: str, groups: list[int], may: bool
):
    """Its own group, and those that it is in besides; whoever got past the mode is looked at all the same."""
    path = str(folder / "s")
    access = Access.of(uids, group)
    lock_fd, listener = listen(path, access)
    os.chmod(path, 0o666)
    with connect_as(path, listener, groups) as sock:
        pid, uid, gid = peer_of(sock)
        assert (uid, gid, pid > 0) == (STRANGER, STRANGER, True)
        assert access.allows(sock, uid, gid) is may
    listener.close()
    os.close(lock_fd)


def test_a_group_that_there_is_not_stops_the_start():
    """With its name and the option's."""
    with pytest.raises(ConfigError, match="socket_group: there is no group 'no such group'"):
        Access.of((), "no such group")


def test_who_may_is_told():
    """In the words of a refusal."""
    assert str(Access(frozenset({0, 7}), 9)) == "users [0, 7] and group 9"
