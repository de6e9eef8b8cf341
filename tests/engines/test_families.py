"""What kvist gives back to an engine is what an engine computed, for every family of models.

For each family three engines run: one without kvist, one that asks kvist in rounds, and one more after it has gone. All
answer the same prompts. Tokens are compared exactly, but for families whose element type is in ``unsteady_in``: there a
prefill that is resumed rounds otherwise than one computed at once, and the choice of experts makes much of a rounding.
So only the first token is that of the engine without kvist, while hits still equal hits.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from child import EngineProcess
from kvist.wire import messages as wire
from tests.engines.conftest import launch_engine
from tests.engines.families import (
    FAMILIES,
    NUM_TOKENS,
    Answers,
    Family,
    Ledger,
    Prompts,
    answer_each,
    hits_by_kind,
    make_prompts,
)
from tests.support.daemon import Daemon

POOL = "1GiB"
NUM_WIPED = 4


@dataclass(frozen=True, slots=True)
class Alone:
    """What an engine without kvist says."""

    computed: Answers
    """To all prompts, each computed at once."""
    resumed: Answers
    """To all prompts, with the help of its own prefix cache."""
    changed: dict[int, int]
    """How many tokens became others when the KV of a group was zeroed, by group."""


@dataclass(frozen=True, slots=True)
class Served:
    """What two engines with kvist say, one after the other."""

    cold: Answers
    """To the first prompts; nothing is cached."""
    hits: Answers
    """To the same prompts, the engine's own cache being empty."""
    partial: Answers
    """To the later prompts: a part is known, to kvist or to the engine."""
    restarted: Answers
    """To all, from a new engine."""


@dataclass(frozen=True, slots=True)
class Run:
    """All that was seen of a family."""

    family: Family
    prompts: Prompts
    alone: Alone
    served: Served
    ledger: Ledger
    num_groups: int
    status: wire.StatusReply
    log: str
    """What the first engine with kvist logged."""


class Engines:
    """Starts the engines of one family; leaving it ends them."""

    def __init__(self, family: Family, folder: Path, socket: str) -> None:
        self._family, self._folder, self._socket = family, folder, socket
        self._started: list[EngineProcess] = []

    def start(self, name: str, *, has_kvist: bool) -> EngineProcess:
        log = self._folder / f"{name}.log"
        socket = self._socket if has_kvist else None
        engine = launch_engine(self._family.name, socket, log, script="blocks.py", **self._family.options)
        self._started.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._started:
            engine.close()


def run_alone(engine: EngineProcess, prompts: Prompts) -> Alone:
    """Answer without kvist: computed at once, resumed, and with each group's KV zeroed after the first token."""
    computed = answer_each(engine, prompts.all, is_own_kept=False)
    resumed = answer_each(engine, prompts.all)
    num_groups = len(engine.ask("groups")["groups"])
    changed = dict.fromkeys(range(num_groups), 0)
    for prompt, expected in list(zip(prompts.all, computed.tokens, strict=True))[:NUM_WIPED]:
        for group in changed:
            assert engine.ask("forget")["ok"]
            reply = engine.ask("answer", prompt=prompt, num_tokens=NUM_TOKENS, wiped_group=group)
            changed[group] += sum(one != other for one, other in zip(reply["tokens"], expected, strict=True))
    return Alone(computed, resumed, changed)


def run_family(family: Family, folder: Path, daemon: Daemon, engines: Engines) -> Run:
    """Ask three engines; two of them start and work at a time."""
    prompts = make_prompts(family)

    def alone_and_next() -> tuple[Alone, EngineProcess]:
        engine = engines.start("alone", has_kvist=False)
        alone = run_alone(engine, prompts)
        engine.close()
        return alone, engines.start("second", has_kvist=True)

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(alone_and_next)
        first = engines.start("first", has_kvist=True)
        groups: list[dict[str, Any]] = first.ask("groups")["groups"]
        ledger = Ledger([group["block_tokens"] for group in groups])
        cold = answer_each(first, prompts.first, ledger)
        hits = answer_each(first, prompts.first, ledger, is_own_kept=False)
        partial = answer_each(first, prompts.later, ledger)
        first.kill()
        alone, second = beside.result()
    restarted = answer_each(second, prompts.all, ledger)
    served = Served(cold, hits, partial, restarted)
    log = (folder / "first.log").read_text()
    return Run(family, prompts, alone, served, ledger, len(groups), daemon.status(), log)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp(request.param.name)
    with Daemon(folder, pool=POOL) as daemon:
        engines = Engines(request.param, folder, daemon.path)
        try:
            yield run_family(request.param, folder, daemon, engines)
        finally:
            engines.close()


def test_tokens_depend_on_every_group(run: Run) -> None:
    """Zeros in place of the KV of any one group change the tokens: wrong KV would be seen in the tests below."""
    assert len(run.alone.changed) == run.num_groups
    assert all(run.alone.changed.values()), run.alone.changed


def test_tokens_are_those_without_kvist(run: Run) -> None:
    """Cold, hit, hit in part, and hit by a new engine, each prompt has the tokens of an engine without kvist."""
    expected, num_first = run.alone.computed.tokens, len(run.prompts.first)
    rounds = [
        (run.served.cold, expected[:num_first]),
        (run.served.hits, expected[:num_first]),
        (run.served.partial, expected[num_first:]),
        (run.served.restarted, expected),
        (run.alone.resumed, expected),
    ]
    num_compared = NUM_TOKENS if run.family.is_steady else 1
    for answers, tokens in rounds:
        assert [one[:num_compared] for one in answers.tokens] == [one[:num_compared] for one in tokens]
    assert run.served.restarted.tokens[:num_first] == run.served.hits.tokens


def test_loaded_blocks_are_computed_blocks(run: Run) -> None:
    """Every block of every group that an engine found in a cache has the bytes that an engine computed for it."""
    assert run.ledger.wrong == []
    assert set(run.ledger.found) == set(range(run.num_groups))


def test_whole_prefixes_hit(run: Run) -> None:
    """Of a prompt that was asked before, all whole chunks before its last token come from kvist, for all kinds."""
    chunk = run.family.chunk_tokens
    known = [(len(prompt) - 1) // chunk * chunk for prompt in run.prompts.all]
    for answers, least in ((run.served.hits, known[: len(run.prompts.first)]), (run.served.restarted, known)):
        assert all(found >= tokens for found, tokens in zip(answers.cached, least, strict=True))
    assert sum(run.served.partial.cached) > 0
    hits = hits_by_kind(run.status)
    assert all(hits.get(kind, 0) > 0 for kind in run.family.kinds), hits


def test_no_family_runs_without_a_cache(run: Run) -> None:
    """No engine says that it is refused."""
    assert "this engine runs WITHOUT a cache" not in run.log
