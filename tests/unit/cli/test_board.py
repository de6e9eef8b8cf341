"""What people read of a daemon is what its figures are."""

import io
import math

import pytest
from rich.console import Console, RenderableType

from kvist.cli.board import bar, beginning, board, duration_text, uptime_text
from kvist.watching.figures import work_out
from kvist.wire import messages as wire
from tests.support.samples import GONE, MODEL, histogram, sample, session

COUNTERS = {
    "tokens_asked": 1000, "tokens_found": 600, "tokens_loading": 150, "tokens_missed": 250,
    "bytes_loaded": 3 << 30, "load_ns": 2_000_000_000, "saved_us": 12_500_000,
}  # fmt: skip
DISK = wire.TierStatus("disk", 1000, 500, 7, 2e9, 1e9, 0, 0)


def text_of(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def lines_of(shown: RenderableType) -> dict[str, list[str]]:
    """Return the words of each line, by its first."""
    return {words[0]: words for line in text_of(shown).splitlines() if (words := line.split())}


def test_one_look_tells_all_since_the_start():
    """Hits by where they were found, copies at the rate of their own time, and how long they took."""
    looked = sample(7260, COUNTERS, tiers=[DISK], histograms={"load": histogram(0, 3, 1, 0)})
    shown = board(work_out([beginning(looked), looked]), has_rates=False)
    found = lines_of(shown)
    assert "kvist 0.1.0, pid 77, up 2 h 1 min" in text_of(shown)
    assert "since the start: 1,000 tokens asked for, 60.0% in the pool, 15.0% in tiers, 25.0% missed" in text_of(shown)
    assert found["loads"] == ["loads", "1.61", "GB/s", "3", "GiB", "≤", "10", "ms", "≤", "100", "ms"]
    assert found["stores"] == ["stores", "·", "0", "B", "·", "·"]
    assert found["disk"][1:] == [bar(0.5), "500", "B", "of", "1000", "B", "7", "0"]
    assert "12.5 s of computing saved" in text_of(shown)


def test_two_looks_tell_what_is_now():
    """Rates are differences over time, beside the ceiling that was measured."""
    first, second = sample(10, {"bytes_loaded": 0}), sample(12, {"bytes_loaded": 1_000_000})
    assert lines_of(board(work_out([first, second])))["loads"][1:4] == ["0.00", "GB/s", "50%"]


def test_what_is_wrong_comes_first():
    """A tier that is off, a wrong byte, a daemon that is stopping or gone are said in words, under the title."""
    off = wire.TierStatus("disk", 1000, 0, 0, 0.0, 0.0, 0, 0, "no space left on device")
    bad = sample(10, {"chunks_corrupt": 2}, tiers=[off], is_draining=True)
    text = text_of(board(work_out([bad]), GONE))
    for said in (GONE, "no space left on device", "2 chunks did not match", "stopping"):
        assert said in text
        assert text.index(said) < text.index("since the start")


def test_without_a_daemon_there_is_only_the_reason():
    """Nothing was ever seen: why is all there is to say."""
    assert text_of(board(None, GONE)).strip().endswith(GONE)


def test_engines_are_shown_busiest_first():
    """One line for an engine, whatever the number of its processes."""
    counters = {"lookups": 1, "chunks_found": 1, "chunks_missed": 1}
    quiet = session(1, engine_id="quiet", serves=MODEL, lane="daemon", counters=counters)
    busy = [session(number, engine_id="busy", serves=MODEL, counters={"lookups": 5}) for number in (2, 3)]
    found = lines_of(board(work_out([sample(10, sessions=[quiet, *busy])])))
    assert found["quiet"] == ["quiet", "model", "daemon", "1", "50.0%", "0", "chunks", "0", "chunks"]
    assert found["busy"] == ["busy", "model", "·", "10", "·", "0", "chunks", "0", "chunks"]
    assert list(found).index("busy") < list(found).index("quiet")


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "░░░░"), (1, "████"), (2, "████"), (-1, "░░░░"), (0.5, "██░░"), (0.53125, "██▏░"), (1 / 32, "▏░░░")],
)
def test_a_bar_is_as_full_as_its_share(share: float, shown: str):
    """To an eighth of a character, and never beyond its ends."""
    assert bar(share, chars=4) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "·"), (math.inf, "> 10 s"), (2.5, "2.5 s"), (0.25, "250 ms"), (1e-3, "1 ms"), (50e-6, "50 µs")],
)
def test_durations_have_a_unit(seconds: float | None, shown: str):
    """The largest in which they are 1 or more."""
    assert duration_text(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h")]
)
def test_uptimes_are_rounded_down(seconds: float, shown: str):
    """Two units are enough."""
    assert uptime_text(seconds) == shown
