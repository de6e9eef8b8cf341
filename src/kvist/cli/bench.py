"""``kvist bench``: how fast a living daemon stores and loads, beside what one thread of this machine can copy.

The law: every byte that was loaded is compared with what was stored; a run with a wrong byte ends with 1.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from kvist.cli.asking import Daemon, Json, Socket, silenced, socket_path
from kvist.cli.board import duration_text
from kvist.cli.output import errors, output, print_error, print_json
from kvist.client.synthetic import Round, Shape, SyntheticEngine
from kvist.errors import KvistError, LayoutError
from kvist.units import format_nbytes
from kvist.wire import messages as wire

EPILOG = "Example: kvist bench --tokens 8192 --layers 32 --heads 8 --head-size 128"
_DTYPES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_NUM_WARM: Final = 1
"""Rounds that are not counted: the pool's slots and the engine's blocks are touched for the first time."""


class Result(msgspec.Struct, frozen=True):
    """What a run has measured: rates in bytes per second, times in seconds."""

    num_rounds: int
    nbytes: int
    """Of one store, and of one load."""
    memcpy_rate: float
    """The ceiling: one thread that copies the same blocks, in the same run."""
    store_rate: float
    load_rate: float
    store_p50_s: float
    store_p99_s: float
    load_p50_s: float
    load_p99_s: float
    lookup_p50_s: float
    lookup_p99_s: float


def bench(  # noqa: PLR0913 -- an argument is an option
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt; whole chunks of it are moved.")] = 4096,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_size: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help=", ".join(_DTYPES))] = "bfloat16",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 256,
    rounds: Annotated[int, typer.Option(help="Stores and loads to measure.", min=1, max=10_000)] = 20,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Store and load through the daemon that runs, as an engine in host memory does; every byte is verified.

    What was stored stays in the pool until it is evicted; no engine finds it.
    """
    try:
        if dtype not in _DTYPES:
            raise LayoutError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
        shape = Shape(tokens, layers, heads, head_size, _DTYPES[dtype], block_size, chunk)
    except LayoutError as error:
        print_error(error)
        raise typer.Exit(2) from None
    try:
        with silenced():
            result = measure(socket_path(socket), shape, rounds)
    except KvistError as error:
        print_error(error)
        raise typer.Exit(1) from None
    if json:
        print_json(result)
    else:
        output.print(result_table(result))


def measure(path: str, shape: Shape, num_rounds: int) -> Result:
    """Run so many rounds beside a progress bar.

    Raises:
        KvistError: the daemon is not there, refuses, or has served a wrong byte.
    """
    with contextlib.closing(Daemon(path)) as daemon:
        pool_nbytes = daemon.ask(wire.Status, wire.StatusReply).pool_nbytes
    if shape.nbytes > pool_nbytes:
        raise LayoutError(
            f"{format_nbytes(shape.nbytes)} do not fit into the pool of {format_nbytes(pool_nbytes)}; use fewer "
            f"--tokens"
        )
    with (
        contextlib.closing(SyntheticEngine(path, shape)) as engine,
        Progress(console=errors, transient=True) as progress,
    ):
        task = progress.add_task(f"{format_nbytes(shape.nbytes)} a round", total=num_rounds + _NUM_WARM)
        engine.register()
        taken = []
        for round_ in itertools.islice(engine.rounds(), num_rounds + _NUM_WARM):
            taken.append(round_)
            progress.advance(task)
    return summarise(taken[_NUM_WARM:], shape.nbytes)


def summarise(rounds: Sequence[Round], nbytes: int) -> Result:
    """Return the medians and the tails of some rounds that moved ``nbytes`` each way."""
    store_s, load_s, lookup_s, memcpy_s = (
        np.array([getattr(one, name) for one in rounds]) for name in ("store_s", "load_s", "lookup_s", "memcpy_s")
    )
    percentiles = {
        f"{name}_p{share}_s": float(np.percentile(seconds, share))
        for name, seconds in (("store", store_s), ("load", load_s), ("lookup", lookup_s))
        for share in (50, 99)
    }
    return Result(
        num_rounds=len(rounds),
        nbytes=nbytes,
        memcpy_rate=nbytes / float(np.median(memcpy_s)),
        store_rate=nbytes / float(np.median(store_s)),
        load_rate=nbytes / float(np.median(load_s)),
        **percentiles,
    )


def result_table(result: Result) -> Table:
    """Return a run's figures for people."""
    title = f"{format_nbytes(result.nbytes)} each way, {result.num_rounds} rounds, every byte verified"
    table = Table("", "rate", "of one thread's copy", "p50", "p99", title=title, title_justify="left")
    table.add_row("one thread copies", f"{result.memcpy_rate / 1e9:.2f} GB/s", "100 %", "", "")
    for name in ("store", "load"):
        rate = getattr(result, f"{name}_rate")
        table.add_row(
            name, f"{rate / 1e9:.2f} GB/s", f"{rate / result.memcpy_rate:.0%}",
            *(duration_text(getattr(result, f"{name}_p{share}_s")) for share in (50, 99)),
        )  # fmt: skip
    table.add_row(
        "lookup", "", "", duration_text(result.lookup_p50_s), duration_text(result.lookup_p99_s)
    )  # fmt: skip
    return table
