"""Every exception that this package raises on purpose.

* KvistError
  + ConfigError             the operator gave us something that we cannot run with
  + LayoutError             a KV layout does not describe real, disjoint memory, or is of a kind not served
    - FenceError            an event of another process cannot be opened
  + DeviceError             an accelerator, or the software that reaches it, fails or is missing
  + KeyInvalid              something cannot be part of a key: too long, out of range
  + UnknownEngine           no connected engine has this name, or several that share no keys do
  + ProtocolError           a peer broke the wire contract; its connection is closed
    - VersionMismatch       the two ends do not share a protocol version
  + Refused                 the daemon understood the request, and the answer is no
    - Malformed             the request does not decode, or its fields contradict each other
    - NotPermitted          this user may not use this daemon
    - NotRegistered         the session has not registered its KV memory
    - AlreadyRegistered     the session has registered it already
    - LayoutRefused         the registered layout is not served; the text says why
    - FenceRefused          the engine's event cannot be opened by the daemon; the engine waits for it itself
    - PoolKept              no engine gets the daemon's pool; the daemon copies for it instead
    - InvalidBlocks         block ids out of range, duplicate, too few, or the null block
    - UnknownLease          the lease expired, was released, or never existed
    - ForeignLease          the lease belongs to another engine
    - LeaseClaimed          this row has no claim left, or the lease holds nothing of it
    - Overloaded            a bounded queue is full; recompute
    - Draining              the daemon is stopping
  + Unreachable             no daemon is listening, or it died
    - DeadlineExceeded      the daemon is there and did not answer in time

A miss is no error: it is a value (``LookupReply.num_chunks == 0``). ``Refused`` crosses the wire as its ``code``
and text, and is raised again, as the same class, by a client that waits for the answer.
"""

from __future__ import annotations

from typing import ClassVar


class KvistError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(KvistError):
    """The configuration cannot be run."""


class LayoutError(KvistError):
    """A KV layout is inconsistent with the memory that it claims to describe."""


class FenceError(LayoutError):
    """An event of another process cannot be opened here."""


class DeviceError(KvistError):
    """An accelerator, or the software that reaches it, fails or is missing."""


class KeyInvalid(KvistError):
    """A value cannot be part of a key."""


class UnknownEngine(KvistError):
    """No connected engine is meant, or several are that share no keys."""


class ProtocolError(KvistError):
    """A peer violated the wire protocol."""


class VersionMismatch(ProtocolError):
    """Client and daemon do not share a protocol version."""


class Refused(KvistError):
    """The daemon declined a request; nothing was copied, nothing is held."""

    code: ClassVar[str] = "refused"


class Malformed(Refused):
    """The request does not decode, or its fields contradict each other."""

    code = "malformed"


class NotPermitted(Refused):
    """The peer's user is neither the daemon's nor on its allow-list."""

    code = "not_permitted"


class NotRegistered(Refused):
    """The session has no registered KV memory."""

    code = "not_registered"


class AlreadyRegistered(Refused):
    """The session has registered its KV memory before."""

    code = "already_registered"


class LayoutRefused(Refused):
    """The layout does not fit its memory, or is of a kind that is not served."""

    code = "layout_refused"


class FenceRefused(Refused):
    """The daemon cannot open the engine's event: the engine waits for its own work before it asks."""

    code = "fence_refused"


class PoolKept(Refused):
    """The daemon keeps its pool to itself: it copies where it can reach the memory."""

    code = "pool_kept"


class InvalidBlocks(Refused):
    """Block ids are out of range, duplicate, too few, or name the null block."""

    code = "invalid_blocks"


class UnknownLease(Refused):
    """The lease expired, was released, or was never granted."""

    code = "unknown_lease"


class ForeignLease(Refused):
    """The lease was granted to another engine."""

    code = "foreign_lease"


class LeaseClaimed(Refused):
    """All readers of this row have claimed this lease already, or it holds nothing of the row."""

    code = "lease_claimed"


class Overloaded(Refused):
    """A bounded queue is full."""

    code = "overloaded"


class Draining(Refused):
    """The daemon is stopping and takes no new work."""

    code = "draining"


class Unreachable(KvistError):
    """No daemon is listening, or it went away."""


class DeadlineExceeded(Unreachable):
    """The daemon did not answer in time."""


REFUSALS: dict[str, type[Refused]] = {
    kind.code: kind
    for kind in (
        Refused, Malformed, NotPermitted, NotRegistered, AlreadyRegistered, LayoutRefused, FenceRefused, PoolKept,
        InvalidBlocks, UnknownLease, ForeignLease, LeaseClaimed, Overloaded, Draining,
    )
}  # fmt: skip


def refusal(code: str, detail: str) -> Refused:
    """Return what an error reply says, as the class that it was."""
    return REFUSALS.get(code, Refused)(detail)
