"""Where the chunks of a prompt are, for people: tokens to digests, and what the daemon finds under them.

The law: the digests are those that the engine itself makes of the same tokens, from what it has told the daemon of its
keys; so what is found here is what the engine would find, but for media items, which are not tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvist.client.client import Build, expect
from kvist.errors import UnknownEngine
from kvist.model.keys import as_tokens, chain_digests, root_digest
from kvist.wire import messages as wire
from kvist.wire.describing import parse_namespace

_NAMED_MAX: Final = 8


class LocatedRow(msgspec.Struct, frozen=True):
    """Where the chunks of one layer group on one shard are."""

    group: int
    shard: int
    num_chunks: dict[str, int]
    """By place: ``nowhere``, ``pool`` and the tiers' names, all of them."""


class Located(msgspec.Struct, frozen=True):
    """Where the chunks of a prompt are."""

    model: str
    chunk_tokens: int
    num_tokens: int
    """Of the prompt."""
    num_tokens_now: int
    """Of the prefix that an engine would find in the pool."""
    num_tokens_with_tiers: int
    """Of the prefix that pool and tiers could serve together."""
    tiers: list[str]
    """Behind the pool, the fastest first."""
    rows: list[LocatedRow]


def locate(
    ask: Callable[[Build], wire.Reply],
    sessions: Sequence[wire.SessionStatus],
    tokens: Sequence[int],
    *,
    engine: str = "",
    adapter: str = "",
    salt: str = "",
) -> Located:
    """Return where a prompt's chunks are, in the keys of one of the engines that are connected.

    ``ask`` sends the daemon a request, ``engine`` is an engine's id or a model's name, and may be empty if only one set
    of keys is in use.

    Raises:
        UnknownEngine: no engine of that name is connected, or several that share no keys.
        KeyInvalid: a token, the adapter or the salt cannot be part of a key.
        Refused: the prompt is longer than what may be asked for.
    """
    spec, needs = _pick(sessions, engine)
    namespace = parse_namespace(spec)
    root = root_digest(namespace, adapter=adapter, salt=salt)
    digests = chain_digests(root, as_tokens(tokens), namespace.chunk_tokens)
    found = wire.Found(0, 0, 0, [], [])
    if digests:
        # An engine that has not told what it needs asks without that, too: it has one group, of all tokens.
        reply = ask(lambda number: wire.Find(number, digests, needs) if needs else wire.Find(number, digests))
        found = expect(reply, wire.Found)
    places = ["nowhere", "pool", *found.tiers]
    return Located(
        model=namespace.model,
        chunk_tokens=namespace.chunk_tokens,
        num_tokens=len(tokens),
        num_tokens_now=found.num_chunks * namespace.chunk_tokens,
        num_tokens_with_tiers=found.num_with_tiers * namespace.chunk_tokens,
        tiers=found.tiers,
        rows=[_count(row, places) for row in found.rows],
    )


def _pick(sessions: Sequence[wire.SessionStatus], engine: str) -> tuple[wire.NamespaceSpec, tuple[wire.NeedSpec, ...]]:
    engines = {one.engine_id: (one.serves, one.needs) for one in sessions if one.serves is not None}
    keys = {key for name, key in engines.items() if engine in ("", name, key[0].model)}
    if len(keys) == 1:
        return keys.pop()
    names = [f"{name} ({serves.model})" for name, (serves, _) in engines.items()][:_NAMED_MAX]
    connected = f"connected are {', '.join(names)}" if names else "no engine that tells what it serves is connected"
    if not keys:
        raise UnknownEngine(f"no engine {engine!r}; {connected}" if engine else connected)
    raise UnknownEngine(f"{len(keys)} engines that share no keys are meant by {engine!r}; name one: {connected}")


def _count(row: wire.FoundRow, places: Sequence[str]) -> LocatedRow:
    counts = Counter(row.places)
    return LocatedRow(row.group, row.shard, {place: counts[number] for number, place in enumerate(places)})
