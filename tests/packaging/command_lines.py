"""Command lines as people read them, in pages and in files of deployments, and what of them can be checked unrun."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from typer.main import get_command

from kvist.adapters.vllm.options import parse_options
from kvist.cli.main import app
from kvist.server.config import ServeConfig
from tests.packaging.conftest import ROOT

Words = list[str]
_BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_FLAG = {
    "kv_connector": "KvistConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_KEYWORDS = {"until", "while", "if", "do", "then", "else", "!", "exec", "sudo"}


def commands_of_page(page: Path) -> Iterator[Words]:
    """Yield each command of a page's ``sh`` and ``console`` blocks, with the variables that are set before it."""
    for block in _BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            yield from commands_of_line(line.removeprefix("$ "))


def commands_of_line(line: str) -> Iterator[Words]:
    """Yield the commands of a line of a shell, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for is_operator, group in itertools.groupby(lexer, lambda word: set(word) <= set("();<>|&")):
        words = list(itertools.dropwhile(_KEYWORDS.__contains__, group))
        if words and not is_operator:
            yield words


def check_command(words: Words) -> str | None:
    """Check a command as far as its program is known; return the program's name, or None if it is not.

    Raises:
        Exception: it would not be accepted, or names something that is not there.
    """
    is_set = [bool(_ASSIGNMENT.match(word)) for word in words]
    num_set = is_set.index(False) if False in is_set else len(words)
    check_environment(word.partition("=")[0] for word in words[:num_set])
    if num_set == len(words):
        return None
    name, arguments = Path(words[num_set]).name, words[num_set + 1 :]
    checks = {"kvist": check_kvist, "vllm": check_vllm, "pip": check_pip, "make": check_make}
    if name not in checks:
        return None
    checks[name](arguments)
    return name


def check_kvist(arguments: Sequence[str]) -> None:
    """Let the real command line parse ``arguments``, and run nothing."""
    command, context, name = get_command(app), None, "kvist"
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None


def check_environment(names: Iterable[str]) -> None:
    """Every variable that begins like an option is one."""
    for name in names:
        if name.startswith("KVIST_"):
            assert name.removeprefix("KVIST_").lower() in ServeConfig.__struct_fields__, f"{name} is no option"


def check_vllm(arguments: Sequence[str]) -> None:
    """The connector's flag names kvist, and options that exist."""
    assert arguments[0] == "serve", f"vllm {arguments[0]} is not known here"
    for text in (after for flag, after in itertools.pairwise(arguments) if flag == "--kv-transfer-config"):
        check_flag(json.loads(text))


def check_flag(flag: dict[str, object]) -> None:
    """The value of ``--kv-transfer-config`` is what the README gives, with options that parse."""
    options = flag.pop("kv_connector_extra_config", {})
    assert flag == _FLAG, f"{flag} is not what the README gives"
    parse_options(options)


def check_pip(arguments: Sequence[str]) -> None:
    """What is installed is kvist, with extras that exist."""
    assert arguments[0] == "install", f"pip {arguments[0]} is not known here"
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for what in (word for word in arguments[1:] if not word.startswith("-")):
        name, _, extras = what.rstrip("]").partition("[")
        assert name in ("kvist", ".", "/source"), f"{what} is not kvist"
        assert set(filter(None, extras.split(","))) <= known, f"{what}: the extras are {', '.join(sorted(known))}"


def check_make(arguments: Sequence[str]) -> None:
    """Every target is in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in (word for word in arguments if not _ASSIGNMENT.match(word)):
        assert target in targets, f"make {target}: there is no such target"
