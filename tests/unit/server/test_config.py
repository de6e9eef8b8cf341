"""A configuration is run as it is written, or refused with the name of the key and where it came from."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import ConfigError
from kvist.server.config import ServeConfig, load_config
from kvist.units import GIB, KIB, MIB, align_up, ceil_div, format_nbytes, parse_nbytes
from kvist.wire.address import SOCKET_PATH_NBYTES_MAX


def load(tmp_path: Path, *, file: str = "", flags: dict[str, Any] | None = None, **environment: str) -> ServeConfig:
    path = tmp_path / "kvist.toml"
    path.write_text(file)
    return load_config(path, flags or {}, environment)


def test_nothing_said_is_the_defaults():
    """Without file, environment and flags the daemon runs, at the user's own socket."""
    config = load_config(None, {"pool": None, "socket": None}, {"PATH": "/bin"})
    assert config == ServeConfig()
    assert config.socket_path == f"/tmp/kvist-{os.getuid()}/kvist.sock"
    assert config.pool == 4 * GIB


def test_later_sources_win(tmp_path):
    """Flags beat the environment, which beats the file, which beats the defaults: each key by itself."""
    config = load(
        tmp_path,
        file='pool = "1GiB"\nlease_ttl_s = 1\nsessions_max = 3\nallow_uids = [7]',
        flags={"pool": "3GiB", "lease_ttl_s": None},
        KVIST_POOL="2GiB",
        KVIST_LEASE_TTL_S="2.5",
        KVIST_ISOLATE="true",
        KVIST_ALLOW_UIDS="8,9",
        OTHER_POOL="9GiB",
    )
    assert config == ServeConfig(pool=3 * GIB, lease_ttl_s=2.5, sessions_max=3, allow_uids=(8, 9), isolate=True)


@pytest.mark.parametrize(
    ("sources", "source"),
    [
        ({"file": "pol = 1"}, "kvist.toml"),
        ({"KVIST_POL": "1"}, "the environment"),
        ({"flags": {"pol": 1}}, "the command line"),
    ],
    ids=["file", "environment", "flags"],
)
def test_an_unknown_key_is_named_with_its_source(tmp_path, sources, source: str):
    """A misspelt key stops the start: the message has the key, its source, and the keys that there are."""
    with pytest.raises(ConfigError, match=rf"unknown key 'pol' in .*{source}; known keys: .*\bpool\b"):
        load(tmp_path, **sources)


BAD_VALUES = [
    ("pool", "many"),
    ("pool", "8XB"),
    ("pool", "-1GiB"),
    ("pool", ""),
    ("pool", "65535"),
    ("lease_ttl_s", "soon"),
    ("lease_ttl_s", "0"),
    ("lease_ttl_s", "-1"),
    ("lease_ttl_s", "nan"),
    ("lease_ttl_s", "inf"),
    ("drain_s", "-inf"),
    ("copy_threads", "0"),
    ("copy_threads", "1.5"),
    ("sessions_max", "-1"),
    ("requests_max", "x"),
    ("copies_max", "0"),
    ("allow_uids", "root"),
    ("log_level", "loud"),
    ("isolate", "maybe"),
    ("tenant_quota", "team-a"),
    ("tenant_quota", "team-a=many"),
    ("tenant_quota", "team-a=0"),
    ("socket", "/tmp/" + "x" * 200),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=lambda value: value[:12])
@pytest.mark.parametrize("source", ["kvist.toml", "the environment", "the command line"])
def test_a_value_that_does_not_fit_is_named_with_its_key_and_source(tmp_path, source: str, key: str, value: str):
    """A value that cannot be run stops the start, wherever it came from: key, value and source are in the message."""
    quoted = f'"{value}"'
    sources: dict[str, Any] = {
        "kvist.toml": {"file": f"{key} = {quoted}"},
        "the environment": {f"KVIST_{key.upper()}": value},
        "the command line": {"flags": {key: value}},
    }[source]
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, **sources)
    message = str(refused.value)
    assert key in message
    assert value in message
    assert source in message


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("pool = [1]", "pool"),
        ("pool = 1.5", "pool"),
        ("pool = true", "pool"),
        ("copy_threads = 'two'", "copy_threads"),
        ("allow_uids = ['a']", "allow_uids"),
        ("[pool]\nx = 1", "pool"),
        ("socket = 3", "socket"),
        ("pool = ", "kvist.toml cannot be read"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, file: str, named: str):
    """A file's values have their option's type; a file that is no TOML is named."""
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, file=file)


def test_a_file_that_is_not_there_is_named(tmp_path):
    """A missing or unreadable file stops the start with its path."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: .*No such file"):
        load_config(tmp_path / "nowhere.toml", {}, {})
    (tmp_path / "latin.toml").write_bytes(b"log_level = '\xff'")
    with pytest.raises(ConfigError, match=r"latin\.toml cannot be read"):
        load_config(tmp_path / "latin.toml", {}, {})


def test_the_longest_socket_path_is_taken():
    """A path that just fits into a Unix address is taken, in bytes and not in characters; one byte more is not."""
    path = "/" + "é" * (SOCKET_PATH_NBYTES_MAX // 2)
    assert len(path.encode()) == SOCKET_PATH_NBYTES_MAX
    assert ServeConfig(socket=path).socket_path == path
    with pytest.raises(ConfigError, match=rf"{SOCKET_PATH_NBYTES_MAX} bytes of a Unix address"):
        ServeConfig(socket=path + "x")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * GIB),
        (" 512 mib ", 512 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2kb", 2000),
        ("3MB", 3_000_000),
        ("1gb", 10**9),
        ("0", 0),
        ("1073741824", GIB),
        ("9007199254740993", 2**53 + 1),
        ("77 b", 77),
        ("1KiB", KIB),
    ],
)
def test_numbers_of_bytes_are_read_as_people_write_them(text: str, nbytes: int):
    """Binary and decimal units, in any case, with or without a space; whole numbers exactly."""
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "1 TiBs", "1e9", "-1", "1,5GiB", "1GiB2", "0x10", "1..5", "٣GiB x"])
def test_what_is_no_number_of_bytes_is_refused(text: str):
    """The refusal shows the text and how to write it."""
    with pytest.raises(ConfigError, match="write it as 8GiB") as refused:
        parse_nbytes(text)
    assert repr(text) in str(refused.value)


@given(st.integers(0, 2**60), st.integers(1, 2**20))
def test_rounding_is_exact(number: int, unit: int):
    """Rounded up means: a multiple, not below, and less than one unit above."""
    assert align_up(number, unit) % unit == 0
    assert 0 <= align_up(number, unit) - number < unit
    assert ceil_div(number, unit) * unit == align_up(number, unit)


@given(st.integers(0, 2**50))
def test_bytes_are_shown_about_right(nbytes: int):
    """What people read is within a part in a thousand of the number."""
    shown = format_nbytes(nbytes)
    assert abs(parse_nbytes(shown) - nbytes) <= nbytes / 1000


def test_a_disk_is_given_with_its_size(tmp_path):
    """Directories come from a list, from a text with commas, or from a flag that is repeated; a size has its unit."""
    for source in (
        {"file": 'disk = ["/a", "/b"]\ndisk_size = "2GiB"'},
        {"KVIST_DISK": "/a,/b", "KVIST_DISK_SIZE": "2GiB"},
        {"flags": {"disk": ["/a", "/b"], "disk_size": "2GiB", "disk_write": "always"}},
    ):
        config = load(tmp_path, **source)
        assert (config.disk, config.disk_size, config.disk_write) == (("/a", "/b"), 2 * GIB, "always")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"disk": ["/a"]}, ("--disk-size", "/a")),
        ({"disk_size": "1GiB"}, ("--disk PATH", str(GIB))),
        ({"disk": ["/a"], "disk_size": "-1"}, ("disk_size", "-1")),
        ({"disk": ["/a"], "disk_size": "1GiB", "disk_write": "never"}, ("never", "always, second-use")),
    ],
)
def test_half_a_disk_is_refused(flags: dict[str, Any], words: tuple[str, ...]):
    """A directory without a size, a size without a directory, and what is no policy say what to change."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, flags, {})
    assert all(word in str(caught.value) for word in words)


def test_quotas_are_read_by_name(tmp_path: Path):
    """A name may have an equals sign, or be empty, or stand for all others; none is there twice."""
    config = load(tmp_path, flags={"tenant_quota": ["a=b=1KiB", "=2KiB", "*=1.5GiB"]})
    assert dict(config.quotas.nbytes) == {"a=b": 1024, "": 2048, "*": 3 << 29}
    assert load(tmp_path, KVIST_TENANT_QUOTA="a=1KiB,b=3").quotas.nbytes == {"a": 1024, "b": 3}
    with pytest.raises(ConfigError, match="'a' is there twice"):
        load(tmp_path, flags={"tenant_quota": ["a=1KiB", "a=2KiB"]})
