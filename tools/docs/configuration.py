"""Write ``docs/configuration.md``: every option of the daemon, of an engine and of a request, from the code.

The law: a name, a default or a meaning is never written twice. Fields and defaults are those of the classes that read
the options, meanings are the docstrings below the fields, flags are those of the command line. A field without a
docstring stops it. ``make docs`` runs it; with ``--print`` the page goes to the standard output.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from typer.main import get_command

from kvist.adapters.vllm.options import Options, RequestOptions
from kvist.cli.main import app
from kvist.server.config import ServeConfig
from kvist.units import format_nbytes
from kvist.wire.address import default_socket_path

PAGE: Final = Path(__file__).parents[2] / "docs" / "configuration.md"
_SIZES: Final = ("pool", "disk_size")
_TEXT: Final = """# Configuration

<!-- Made by tools/docs/configuration.py from the code; `make docs` makes it anew. Do not edit it here. -->

## The daemon

Defaults, then the TOML file of `--config`, then the environment, then flags; later ones win. An unknown key, or a value
that does not fit, stops the start with the name of the key and of its source. How to choose:
[operations](operations.md).

{daemon}

Sizes are bytes, or texts such as `8GiB`, `512MiB` and `1.5GB`. In a file a list is a list; in the environment its
members have commas between them; a flag is repeated. A user's default socket is `{socket}`, for the
daemon as for engines.

## An engine

Keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. An unknown key, or a value that does not fit, is
named in the engine's log, and the engine goes on without a cache.

{engine}

## A request

Keys of the object `kvist` in a request's `kv_transfer_params`.

{request}
"""


def main() -> None:
    """Write the page, or print it."""
    text = page()
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text)


def page() -> str:
    """Return the whole page."""
    flags = serve_flags()
    daemon = [
        (f"`{name}`", default, f"`KVIST_{name.upper()}`", f"`{flags[name]}`" if name in flags else "", meaning)
        for name, default, meaning in options(ServeConfig)
    ]
    return _TEXT.format(
        socket=default_socket_path(0).replace("0", "<uid>"),
        daemon=table(("key", "default", "in the environment", "flag", "meaning"), daemon),
        engine=table(("key", "default", "meaning"), [(f"`{name}`", *rest) for name, *rest in options(Options)]),
        request=table(("key", "default", "meaning"), [(f"`{name}`", *rest) for name, *rest in options(RequestOptions)]),
    )


def options(struct: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and meaning of each field.

    Raises:
        SystemExit: a field has no docstring.
    """
    meanings = field_docstrings(struct)
    for field in msgspec.structs.fields(struct):
        if field.name not in meanings:
            raise SystemExit(f"{struct.__name__}.{field.name} has no docstring; write one below the field")
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        yield field.name, default_text(field.name, default), meanings[field.name]


def field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the texts that stand below the fields of a class, each on one line and in Markdown."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
    return found


def default_text(name: str, default: object) -> str:
    """Return a default as a reader would write it."""
    match default:
        case bool():
            return str(default).lower()
        case int() if name in _SIZES and default:
            return format_nbytes(default)
        case tuple() if not default:
            return "none"
        case "":
            return "empty"
        case str():
            return f"`{default}`"
        case _:
            return str(default)


def serve_flags() -> dict[str, str]:
    """Return the flag of each key that ``kvist serve`` has one for."""
    parameters = get_command(app).commands["serve"].params
    return {parameter.name: parameter.opts[0] for parameter in parameters if parameter.name is not None}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


if __name__ == "__main__":
    main()
