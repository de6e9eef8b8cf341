"""The page for people: what the daemon does, on a page that keeps itself up to date.

The laws: a page needs nothing but this process, and runs no script but its own files'. Whatever comes from an engine is
text, never markup. Looking asks the daemon nothing: what is shown are the watcher's samples.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from kvist.units import format_nbytes
from kvist.watching.differences import BEYOND, Durations
from kvist.watching.figures import notices, work_out
from kvist.watching.watcher import Watcher
from kvist.web.series import columns

PARTS: Final = ("overview", "notices", "flows", "fills", "sessions", "durations", "worries")
"""What of the page is replaced by itself, each a template ``parts/NAME.html``."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NOTHING: Final = "\N{EN DASH}"
"""What stands where there is no number."""
_FOLDER: Final = Path(__file__).parent
_DAY_S: Final = 86_400


def routes(watcher: Watcher) -> list[BaseRoute]:
    """Return the page, its parts, what its charts are drawn from, and its files. The watcher stays the caller's."""
    templates = _environment()

    def render(name: str, *, is_part: bool) -> HTMLResponse:
        figures = work_out(watcher.history)
        text = templates.get_template(name).render(
            figures=figures,
            notices=notices(figures, watcher.failure),
            is_part=is_part,
            parts=PARTS,
            socket_path=watcher.socket_path,
        )
        return HTMLResponse(text, headers=HEADERS)

    def page(_: Request) -> Response:
        return render("page.html", is_part=False)

    def part(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in PARTS:
            raise HTTPException(404)
        return render(f"parts/{name}.html", is_part=True)

    def history(_: Request) -> Response:
        text = msgspec.json.encode(columns(watcher.history))
        return Response(text, media_type="application/json", headers=HEADERS)

    return [
        Route("/", page),
        Route("/parts/{name}", part),
        Route("/history.json", history),
        Mount("/static", StaticFiles(directory=_FOLDER / "static")),
    ]


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clock": _clock, "count": _or_nothing(_count), "nbytes": _or_nothing(_nbytes), "share": _or_nothing(_share),
        "span": _span, "quantile": _quantile,
    }  # fmt: skip
    return environment


def _or_nothing(write: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: NOTHING if value is None else write(value)


def _count(value: float) -> str:
    """Write ``12,031`` or, of what is small and no whole number, ``0.25``."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _nbytes(value: float) -> str:
    return _together(format_nbytes(round(value)))


def _share(value: float) -> str:
    return _together(f"{100 * value:.1f} %")


def _together(text: str) -> str:
    """Keep a number and its unit on one line."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _quantile(taken: Durations, share: float) -> str:
    """Write the bound within which ``share`` of all stayed: ``≤ 2.5 ms``."""
    bound = taken.quantile(share)
    if bound is None:
        return NOTHING
    return _together(f"> {_duration(taken.bounds_s[-1])}" if bound == BEYOND else f"≤ {_duration(bound)}")


def _duration(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:g} {unit}"


def _span(seconds: float) -> str:
    """Write how long something lasts, to two places: ``3 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if seconds < _DAY_S:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440:,} d {minutes // 60 % 24} h"


def _clock(at: float) -> str:
    """Write a time of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
