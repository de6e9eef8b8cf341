"""Tells whoever started the daemon how it is: systemd, or anything that keeps its protocol (``sd_notify``).

The law: nobody who does not listen keeps the daemon from serving. Without an address nothing is said; what cannot be
delivered is logged and forgotten.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

_VARIABLE: Final = "NOTIFY_SOCKET"
_DEADLINE_S: Final = 1.0
"""Longest wait for room at a listener. Said at the start and at the stop alone, so nobody's copies wait for it."""


class Supervisor:
    """The socket that ``NOTIFY_SOCKET`` names: a path, or, behind an ``@``, a name outside of any file system."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        name = environment.get(_VARIABLE, "")
        self._address = "\0" + name[1:] if name.startswith("@") else name

    def starting(self, status: str) -> None:
        """Say what the start is waiting for."""
        self._tell(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Say that clients can connect."""
        self._tell("READY=1", f"STATUS={status}")

    def stopping(self, status: str) -> None:
        """Say that the daemon has begun to stop."""
        self._tell("STOPPING=1", f"STATUS={status}")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(_DEADLINE_S)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("supervisor not told address=%r state=%s error=%s", self._address, lines[0], error)
