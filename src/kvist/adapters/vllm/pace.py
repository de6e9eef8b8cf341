"""How fast this engine computes prompts, seen from its scheduler. Pure: times are passed in.

The law: a prompt's pace is what it has waited from the step in which its first token was scheduled until its answer
began, for each token that was computed: that is what a hit would have saved it, beside whatever else the engine does.
"""

from __future__ import annotations

from typing import Final

_REMEMBERED: Final = 0.8
"""What of the past counts when a prompt is added to it."""
TOKENS_MIN: Final = 32
"""Shorter prompts tell what a step takes, and not what a token does."""


class PrefillPace:
    """A mean over the last prompts, each counting by its tokens."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take note of a prompt whose answer has begun."""
        if num_tokens >= TOKENS_MIN and seconds > 0:
            self._tokens = num_tokens + _REMEMBERED * self._tokens
            self._seconds = seconds + _REMEMBERED * self._seconds

    def seconds(self, num_tokens: int) -> float:
        """Return what so many tokens take to be computed; 0 if that is not known."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0
