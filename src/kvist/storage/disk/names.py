"""Whose numbers the log of one directory says.

The laws: a number is said before, or together with, the first chunk that has it. Names take a small part of the log's
room, and there may be so many chunks less.
"""

from __future__ import annotations

from typing import Final

from kvist.model.owners import Owner
from kvist.storage.disk.format import encode_names, num_name_entries

_SHARE_MAX: Final = 16
"""A part of the log's entries that names may take."""


class LogNames:
    """Begins with what the log says already."""

    def __init__(self, named: dict[int, Owner], chunks_max: int) -> None:
        self._named = named
        self._entries_max = chunks_max // _SHARE_MAX
        self._unsaid: dict[int, Owner] = {}
        self.num_entries = sum(map(num_name_entries, named.values()))
        """That the names take in a log that has just been written anew."""

    def has_room(self, number: int, owner: Owner) -> bool:
        """Return whether a number is said, or can be."""
        is_known = number == 0 or number in self._named
        return is_known or self.num_entries + num_name_entries(owner) <= self._entries_max

    def add(self, number: int, owner: Owner) -> None:
        """See to it that the next batch says a number, if none has."""
        if number and number not in self._named:
            self._named[number] = self._unsaid[number] = owner
            self.num_entries += num_name_entries(owner)

    def take_unsaid(self) -> bytes:
        """Return the entries of the next batch."""
        entries = encode_names(self._unsaid)
        self._unsaid.clear()
        return entries

    def all(self) -> dict[int, Owner]:
        """Return a copy of what a log says that is written anew."""
        return dict(self._named)
