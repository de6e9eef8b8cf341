"""Waiting for a condition, with a deadline: the only way in which a test spends time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, deadline_s: float = 20.0, what: str = "") -> float:
    """Return after how many seconds ``condition`` held; fail if it does not in time."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - began < deadline_s, f"not within {deadline_s} s: {what or condition}"
        pause.wait(0.001)
    return time.monotonic() - began
