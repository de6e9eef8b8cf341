"""Events of an engine's streams, for copies that must not begin before the engine's work so far is done.

The law: an event is recorded before anybody waits for it; recorded anew, it stands for later work of the same stream,
which is after the earlier: whoever waits for it waits for enough.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

from kvist.device.cuda.driver import EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, IPC_HANDLE_NBYTES, call, is_event_done
from kvist.errors import DeviceError, FenceError


class StreamFences:
    """Events for this very process: its copies wait for them, or it looks at them itself."""

    def __init__(self, current_stream: Callable[[], int]) -> None:
        """``current_stream`` returns the calling thread's stream; its context must be current."""
        self._current_stream = current_stream
        self._free: deque[Any] = deque()

    def record(self) -> object:
        """Return an event behind everything that the stream was given until now."""
        event: object = self._free.popleft() if self._free else call("cuEventCreate", EVENT_DISABLE_TIMING)
        call("cuEventRecord", event, self._current_stream())
        return event

    def is_done(self, fence: object) -> bool:
        """Return whether everything that a fence stands behind is done.

        Raises:
            DeviceError: the engine's own work has failed.
        """
        return is_event_done(fence)

    def give_back(self, fence: object) -> None:
        """Use an event again. May be called from any thread."""
        self._free.append(fence)


class SharedFence:
    """One event that the daemon can wait for."""

    def __init__(self, current_stream: Callable[[], int]) -> None:
        """Create the event; see ``StreamFences``.

        Raises:
            FenceError: events cannot be shared here.
        """
        self._current_stream = current_stream
        try:
            self._event = call("cuEventCreate", EVENT_DISABLE_TIMING | EVENT_INTERPROCESS)
            raw = call("cuIpcGetEventHandle", self._event)  # Has the bytes; its pointer is good as long as it lives.
        except DeviceError as error:
            raise FenceError(f"the engine's event cannot be shared: {error}") from error
        self.handle = ctypes.string_at(int(raw.getPtr()), IPC_HANDLE_NBYTES)
        """What ``Register.fence`` carries."""
        self.record()

    def record(self) -> None:
        """Set it behind everything that the stream was given until now."""
        call("cuEventRecord", self._event, self._current_stream())
