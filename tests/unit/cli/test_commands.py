"""Every command explains itself, and says with its exit code how it went."""

import ast
import json
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvist import __version__
from kvist.cli import flags
from kvist.cli.bench import summarise
from kvist.cli.lookup import read_tokens
from kvist.cli.main import app
from kvist.cli.serve import started_lines
from kvist.client.synthetic import Round, Shape
from kvist.errors import KeyInvalid, LayoutError
from kvist.server.config import ServeConfig
from kvist.server.daemon import Started
from kvist.wire import messages as wire
from tests.support.samples import QUIET

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def run(*arguments: str, env: dict[str, str] | None = None):
    return CliRunner().invoke(app, list(arguments), env=env)


def test_every_command_has_a_page():
    """``docs/cli.md`` has a heading for each command, and none for what is no command."""
    headings = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("## `kvist")]
    assert sorted({heading.split()[1] for heading in headings}) == COMMANDS


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "disk"])
def test_every_command_shows_an_example(command: str):
    """Its help ends with one that can be copied."""
    shown = run(command, "--help", env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "Example: " in shown.output
    assert f"kvist {command}" in shown.output.partition("Example: ")[2]


def test_every_key_is_a_flag():
    """The daemon's configuration has no key that ``kvist serve`` cannot be told."""
    assert sorted(flags.HELP) == sorted(ServeConfig.__struct_fields__)
    (serve,) = (command for name, command in get_command(app).commands.items() if name == "serve")  # type: ignore[attr-defined]
    assert {parameter.name for parameter in serve.params} >= set(ServeConfig.__struct_fields__)


def test_no_help_is_written_twice():
    """The texts of the flags stand in one table."""
    tree = ast.parse(Path(flags.__file__).read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert all(texts.count(text) == 1 for text in flags.HELP.values())


def test_config_says_where_each_value_comes_from(tmp_path: Path):
    """Flags go before the environment, that before the file, and that before defaults."""
    file = tmp_path / "kvist.toml"
    file.write_text('pool = "1GiB"\ncopy_threads = 3\nlease_ttl_s = 5.0\n')
    shown = run(
        "config",
        "--json",
        "--config",
        str(file),
        "--pool",
        "3GiB",
        env={"KVIST_POOL": "2GiB", "KVIST_COPY_THREADS": "4"},
    )
    found = json.loads(shown.output)
    assert shown.exit_code == 0
    assert found["pool"] == {"value": 3 << 30, "source": "the command line"}
    assert found["copy_threads"] == {"value": 4, "source": "the environment"}
    assert found["lease_ttl_s"] == {"value": 5.0, "source": str(file)}
    assert found["drain_s"] == {"value": 10.0, "source": "the default"}


def test_config_of_what_would_not_start_ends_with_2():
    """And names the key."""
    shown = run("config", "--disk-size", "1GiB")
    assert (shown.exit_code, "disk_size" in shown.output) == (2, True)


def test_versions_are_shown_to_programs():
    """As JSON, with the protocol's."""
    assert json.loads(run("version", "--json").output) == {"version": __version__, "protocol": wire.PROTOCOL_VERSION}


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"], ["status", "--json"], ["describe"], ["top", "--once"], ["purge", "--all", "--yes"],
        ["bench", "--tokens", "256"], ["lookup", "--tokens", "TOKENS"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_without_a_daemon_commands_end_with_1(tmp_path: Path, arguments: list[str]):
    """And name the socket at which nobody is."""
    path = str(tmp_path / "no.sock")
    (tmp_path / "tokens").write_text("[1, 2, 3]")
    words = [str(tmp_path / "tokens") if word == "TOKENS" else word for word in arguments]
    shown = run(*words, "--socket", path, env={"COLUMNS": "300"})
    assert (shown.exit_code, path in shown.output) == (1, True), shown.output


@pytest.mark.parametrize("arguments", [[], ["--all", "--tenant", "a"], ["--all", "--model", "m"]], ids=" ".join)
def test_a_purge_names_what_it_means(arguments: list[str]):
    """Nothing, or everything and something, is a mistake, and nothing is asked of the daemon."""
    assert run("purge", *arguments).exit_code == 2


def test_everything_is_dropped_only_when_that_is_confirmed():
    """A plain no ends the command."""
    assert CliRunner().invoke(app, ["purge", "--all", "--socket", "/nowhere"], input="n\n").exit_code == 1


@pytest.mark.parametrize(
    ("text", "ids"), [("[1, 2,3]", [1, 2, 3]), ("1 2\n3\n", [1, 2, 3]), ("", []), ("[]", []), ("7", [7])]
)
def test_token_ids_are_read_as_people_write_them(text: str, ids: list[int]):
    """As JSON, or with blanks between."""
    assert read_tokens(text) == ids


@pytest.mark.parametrize("text", ["[1, two]", '{"a": 1}', "1.5"])
def test_what_is_no_token_id_is_refused(text: str):
    """With what was found."""
    with pytest.raises(KeyInvalid, match="token ids are numbers"):
        read_tokens(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_tokens": 100}, "less than a chunk"),
        ({"block_tokens": 24}, "no whole number"),
        ({"num_heads": 0}, "num_heads"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, int], said: str):
    """With its numbers."""
    right = {
        "num_tokens": 1000, "num_layers": 2, "num_heads": 8, "head_size": 128, "element_nbytes": 2, "block_tokens": 16,
        "chunk_tokens": 256,
    }  # fmt: skip
    shape = Shape(**right)
    assert (shape.num_chunks, shape.blocks_per_prompt, shape.token_nbytes, shape.nbytes) == (
        3,
        48,
        8192,
        3 * 256 * 8192,
    )
    with pytest.raises(LayoutError, match=said):
        Shape(**{**right, **change})


def test_rates_are_of_the_median_round():
    """One slow round moves the tail, and not the rate."""
    rounds = [Round(0.5, 1e-3, 1.0, 0.25)] * 3 + [Round(50.0, 1.0, 100.0, 25.0)]
    result = summarise(rounds, 1000)
    assert (result.store_rate, result.load_rate, result.memcpy_rate) == (2000, 1000, 4000)
    assert result.store_p50_s == 0.5
    assert result.store_p99_s > 40


def test_a_start_tells_what_it_has_measured():
    """One line for the pool, one for each tier, the place of HTTP, and last that clients can connect."""
    tiers = [
        wire.TierStatus("disk", 2 << 30, 0, 12, 3.1e9, 2.4e9, 0, 0),
        wire.TierStatus("far", 0, 0, 0, 0.0, 0.0, 0, 0, "gone"),
    ]
    status = wire.StatusReply(
        **{name: getattr(QUIET, name) for name in QUIET.__struct_fields__ if name not in ("tiers", "lane_rates")},
        tiers=tiers, lane_rates={"populate": 4.1e9, "memcpy": 9.8e9},
    )  # fmt: skip
    assert started_lines(Started(status, "http://127.0.0.1:8437")) == [
        "pool 1000 B, present at 4.10 GB/s, one thread copies 9.80 GB/s",
        "disk 2 GiB with 12 chunks, reads 3.10 GB/s, writes 2.40 GB/s",
        "far 0 B with 0 chunks, off: gone",
        "http://127.0.0.1:8437",
        "ready",
    ]
    assert "http" not in "".join(started_lines(Started(status, "")))
