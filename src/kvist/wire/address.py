"""Where a daemon listens if nobody says otherwise: both ends must come to the same answer."""

from __future__ import annotations

from typing import Final

SOCKET_PATH_NBYTES_MAX: Final = 107
"""What fits in ``sockaddr_un`` on Linux, with its closing NUL."""


def default_socket_path(uid: int) -> str:
    """Return the socket of the daemon that serves user ``uid``."""
    return f"/tmp/kvist-{uid}/kvist.sock"  # noqa: S108 -- the directory is private to the user and checked at start
