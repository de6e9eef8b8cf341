"""The page in a real browser, over a real daemon that serves a real client. Screenshots lie in the tests' folders."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.applications import Starlette

from kvist.client.client import About
from kvist.watching.watcher import Watcher
from kvist.web.dashboard import PARTS, routes
from kvist.wire import messages as wire
from kvist.wire.describing import describe_namespace
from tests.support.daemon import Daemon
from tests.support.engine import NAMESPACE, FakeEngine
from tests.support.waiting import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
PATIENCE_MS = 20_000
MODEL = "<script>document.title = 'taken'</script>"
TEXT = "group 0: full, 2 layers, 512 B a token"
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (one) => {
    const colour = rgb(getComputedStyle(one).backgroundColor);
    return colour.length === 4 && colour[3] === 0 ? ground(one.parentElement) : colour;
  };
  const ratios = [...document.body.querySelectorAll("*")]
    .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((one) => [light(rgb(getComputedStyle(one).color)), light(ground(one))].sort((a, b) => b - a))
    .map(([high, low]) => (high + 0.05) / (low + 0.05));
  return Math.min(...ratios);
}"""


class SayingEngine(FakeEngine):
    """An engine that says what it serves and how its memory is laid out."""

    def __init__(self, path: str) -> None:
        serves = msgspec.structs.replace(describe_namespace(NAMESPACE), model=MODEL)
        super().__init__(path, engine_id="vllm-7", name="worker 0", about=About(serves))

    def _registration(self, request_id: int) -> tuple[wire.Register, list[int]]:
        message, fds = super()._registration(request_id)
        return msgspec.structs.replace(message, texts=[TEXT]), fds


@contextmanager
def served(watcher: Watcher) -> Iterator[str]:
    """Serve the page on a port of its own, and yield its address."""
    config = uvicorn.Config(Starlette(routes=routes(watcher)), port=0, lifespan="off", log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="kvist-page")
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watcher(daemon: Daemon) -> Iterator[Watcher]:
    """Return one that takes each sample a second after the one before, by its own clock."""
    seconds = itertools.count(1_800_000_000.0)
    watcher = Watcher(daemon.path, clock=lambda: next(seconds))
    yield watcher
    watcher.close()


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[SayingEngine]:
    with SayingEngine(daemon.path) as engine:
        engine.client.register()
        yield engine


@pytest.fixture
def address(watcher: Watcher) -> Iterator[str]:
    with served(watcher) as address:
        yield address


@contextmanager
def opened(browser: Browser, address: str, **more) -> Iterator[Page]:
    """Open the page, and assert in the end that nothing has failed and that nobody else was asked for anything."""
    with browser.new_context(**more) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        troubles: list[str] = []
        page.on("console", lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("requestfailed", lambda request: troubles.append(request.url))
        page.on("request", lambda asked: troubles.append(asked.url) if not asked.url.startswith(address) else None)
        page.on("response", lambda reply: troubles.append(reply.url) if reply.status >= 400 else None)
        page.goto(address)
        yield page
        assert troubles == []
        page.close()


def use(engine: FakeEngine, watcher: Watcher, prompt: list[int], *, num_loads: int) -> None:
    """Miss a prompt, store it, find and load it so often; let the watcher see the daemon before and after."""
    assert watcher.sample() is not None, watcher.failure
    assert engine.num_found(prompt) == 0
    engine.store(prompt)
    for _ in range(num_loads):
        assert engine.load(prompt, engine.look_up(prompt)) == []
    assert watcher.sample() is not None, watcher.failure


def hit_rate_of(status: wire.StatusReply) -> str:
    counters = status.counters
    return f"{100 * counters['tokens_found'] / counters['tokens_asked']:.1f}\N{NO-BREAK SPACE}%"


def wait_drawn(page: Page) -> None:
    """Wait until all charts are there."""
    for name in ("hits", "flows", "fills"):
        expect(page.locator(f"#{name}-chart canvas")).to_be_visible(timeout=PATIENCE_MS)


def test_the_page_shows_the_daemons_numbers(
    daemon: Daemon, engine: SayingEngine, watcher: Watcher, address: str, browser: Browser, prompt: list[int],
    tmp_path: Path,
):  # fmt: skip
    """Hit rate, tokens, bytes, fill, durations and sessions are those of the daemon's status; markup stays text."""
    use(engine, watcher, prompt, num_loads=3)
    status = daemon.status()
    with opened(browser, address, viewport={"width": 1280, "height": 900}) as page:
        wait_drawn(page)
        assert page.title() == f"{hit_rate_of(status)} hits · kvist"
        assert page.inner_text("#hit-rate") == page.inner_text("#hit-rate-total") == hit_rate_of(status) == "75.0\xa0%"
        assert page.inner_text("#asked") == str(status.counters["tokens_asked"]) == "160"
        pool = page.locator("#fills tbody tr").first.inner_text().replace("\xa0", " ")
        assert pool.split("\t")[-2] == str(status.num_sealed)
        assert f"{status.pool_used_nbytes // 1024} KiB" in pool
        loads = page.locator("#flows tbody tr").first.inner_text().replace("\xa0", " ")
        assert f"{status.counters['bytes_loaded'] // 1024} KiB" in loads
        counted = page.locator("#durations table").first.locator("tbody tr")
        assert [row.split("\t")[1] for row in counted.all_inner_texts()] == ["4", "3", "1"]
        sessions = page.inner_text("#sessions")
        for said in ("vllm-7", MODEL, TEXT, f"worker 0, pid {engine_pid(watcher)}", "kvist web"):
            assert said in sessions
        cells = page.locator("#sessions tbody tr").first.locator("td").all_inner_texts()
        assert [cells[1], *cells[3:]] == ["8", "4", "75.0\xa0%", "15", "5"]
        page.screenshot(path=tmp_path / "light.png", full_page=True)


def engine_pid(watcher: Watcher) -> int:
    assert watcher.latest is not None
    return next(one.pid for one in watcher.latest.sessions if one.engine_id == "vllm-7")


def test_the_page_follows_the_daemon_without_a_reload(
    daemon: Daemon, engine: SayingEngine, watcher: Watcher, address: str, browser: Browser, prompt: list[int]
):
    """Numbers, title and charts change while the page stays; its headings and elements are not replaced."""
    use(engine, watcher, prompt, num_loads=1)
    with opened(browser, address) as page:
        wait_drawn(page)
        page.evaluate("document.querySelector('#hit-rate').mark = 'kept'")
        num_points = len(page.evaluate("fetch('history.json').then((reply) => reply.json())")["at"])
        use(engine, watcher, [token + 500 for token in prompt], num_loads=5)
        rate = hit_rate_of(daemon.status())
        expect(page.locator("#hit-rate")).to_have_text(rate, timeout=PATIENCE_MS)
        expect(page).to_have_title(f"{rate} hits · kvist", timeout=PATIENCE_MS)
        wait_until(lambda: page.evaluate("charts[0].data[0].length") == num_points + 2)
        assert page.evaluate("document.querySelector('#hit-rate').mark") == "kept"


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 360), ("dark", 1280), ("light", 800)])
def test_the_page_fits_and_can_be_read(
    scheme: str, width: int, engine: SayingEngine, watcher: Watcher, address: str, browser: Browser,
    prompt: list[int], tmp_path: Path,
):  # fmt: skip
    """On a phone and on a desk, light and dark, nothing is wider than the window, and text stands out by 4.5 to 1."""
    use(engine, watcher, prompt, num_loads=1)
    view = {"width": width, "height": 740}
    with opened(browser, address, viewport=view, color_scheme=scheme, reduced_motion="reduce") as page:
        wait_drawn(page)
        page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CONTRAST) >= 4.5
        red = int(page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
        assert (red < 60) is (scheme == "dark")
        assert page.evaluate("document.getAnimations().length") == 0


def test_the_page_has_names_for_all_that_it_shows(
    engine: SayingEngine, watcher: Watcher, address: str, browser: Browser, prompt: list[int]
):
    """Each section and chart has a name, each table headers with a scope, and each part a place."""
    use(engine, watcher, prompt, num_loads=1)
    with opened(browser, address) as page:
        wait_drawn(page)
        assert page.locator("main section").count() == page.get_by_role("region").count() == 6
        assert page.locator("figure:not([aria-label])").count() == 0
        assert page.locator("table:not(.u-legend) th:not([scope])").count() == 0
        assert page.locator("table:not(.u-legend):not(:has(thead th))").count() == 0
        assert [page.locator(f"#{name}").count() for name in PARTS] == [1] * len(PARTS)
        assert page.locator("h1").count() == 1


def test_a_stopped_daemon_is_told(
    daemon: Daemon, engine: SayingEngine, watcher: Watcher, address: str, browser: Browser, prompt: list[int]
):
    """When the daemon is gone the page says so and keeps its last figures; when it is back, so are new ones."""
    use(engine, watcher, prompt, num_loads=1)
    with opened(browser, address) as page:
        expect(page.locator("#notices .notice")).to_have_count(0)
        daemon.stop()
        assert watcher.sample() is None
        expect(page.locator("#notices .notice")).to_contain_text("The daemon does not answer", timeout=PATIENCE_MS)
        assert page.inner_text("#asked") == "80"
        daemon.start()
        wait_until(lambda: watcher.sample() is not None, what=watcher.failure)
        expect(page.locator("#notices .notice")).to_have_count(0, timeout=PATIENCE_MS)
        expect(page.locator("#hit-rate-total")).to_have_text("\N{EN DASH}", timeout=PATIENCE_MS)


def test_a_page_that_lost_its_server_says_so(watcher: Watcher, browser: Browser):
    """When nobody answers the page itself, it says that it is old."""
    assert watcher.sample() is not None
    with browser.new_context() as context:
        page = context.new_page()
        with served(watcher) as address:
            page.goto(address)
            expect(page.locator("#lost")).to_be_hidden()
        expect(page.locator("#lost")).to_be_visible(timeout=PATIENCE_MS)
