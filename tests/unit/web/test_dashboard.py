"""The page as text: what is said, what is escaped, what a browser is allowed to do."""

import hashlib
import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

import kvist.web
from kvist.web.dashboard import PARTS, routes
from kvist.wire import messages as wire
from tests.support.samples import MODEL, Watched, histogram, sample, session

FOLDER = Path(kvist.web.__file__).parent
SCRIPT = "<script>alert(1)</script>"
COUNTED = {
    "tokens_asked": 20_000, "tokens_found": 15_000, "tokens_loading": 1000, "tokens_missed": 4000,
    "bytes_loaded": 3 * 2**20, "saved_us": 11_100_000_000,
}  # fmt: skip
BEGUN = sample(0, histograms={"load": histogram(0, 0, 0, 0)})
BUSY = sample(
    4, COUNTED, histograms={"load": histogram(90, 9, 0, 1)},
    sessions=[session(1, engine_id="vllm-1", serves=MODEL, lane="engine", memory="host", texts=["group 0: full"])],
)  # fmt: skip


def client_of(watched: Watched) -> TestClient:
    return TestClient(Starlette(routes=routes(watched.watcher)))


def text_of(html: str) -> str:
    """Return what a reader sees, with single spaces."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace("\N{NO-BREAK SPACE}", " ").replace("&nbsp;", " ").split())


def test_the_page_says_what_the_samples_say():
    """Hit rates, tokens, bytes, saved time and durations are those of the samples, in units for people."""
    html = client_of(Watched(BEGUN, BUSY)).get("/").text
    text = text_of(html)
    assert "<title>80.0\N{NO-BREAK SPACE}% hits · kvist</title>" in html
    for said in (
        "Tokens asked for, last 4 s 20,000 pool 15,000 tier 1,000 missed 4,000", "Computing saved 3 h 5 min",
        "768 KiB/s", "3 MiB since the start", "95 % of loads ≤ 10 ms 50 % ≤ 1 ms", "load 100 ≤ 1 ms ≤ 10 ms ≤ 10 ms",
        "250 B of 1000 B", "vllm-1 model bfloat16 16 engine host", "group 0: full", "pid 77", "/run/kvist.sock",
    ):  # fmt: skip
        assert said in text


def test_a_part_is_what_the_page_has_in_its_place():
    """Each part, fetched alone, is the markup inside its element of the page; one of them brings the title."""
    client = client_of(Watched(BEGUN, BUSY))
    page = client.get("/").text
    for name in PARTS:
        part = client.get(f"/parts/{name}").text
        assert f'hx-get="parts/{name}" hx-trigger="every 2s"' in page
        assert re.sub(r"<title>.*</title>\n", "", part).strip() in page
    assert "<title>80.0" in client.get("/parts/overview").text


def test_a_part_that_is_not_there_is_not_found():
    """Names are looked up in a list, not in a folder."""
    client = client_of(Watched(BUSY))
    assert [client.get(f"/parts/{name}").status_code for name in ("other", "..%2Fpage", "overview.html")] == [404] * 3


def test_figures_follow_new_samples():
    """What is asked for again is worked out again."""
    watched = Watched(BEGUN)
    client = client_of(watched)
    assert "15,000" not in client.get("/parts/overview").text
    watched.see(BUSY)
    assert "15,000" in client.get("/parts/overview").text


def test_looking_asks_the_daemon_nothing():
    """However many people look, the daemon hears of none."""
    watched = Watched(BUSY)
    num_asked = watched.daemon.num_asked
    client = client_of(watched)
    for path in ("/", "/history.json", *(f"/parts/{name}" for name in PARTS)):
        assert client.get(path).status_code == 200
    assert watched.daemon.num_asked == num_asked


def test_what_engines_say_is_text():
    """Markup in any name, model or text that comes from an engine or a tier is shown, not run."""
    row = wire.SessionRow(0, 0, SCRIPT, 16, None, 2, 64, 4096)
    evil = wire.NamespaceSpec(SCRIPT, SCRIPT, SCRIPT, SCRIPT, SCRIPT, 16)
    said = {
        "name": SCRIPT,
        "lane": SCRIPT,
        "memory": SCRIPT,
        "texts": [SCRIPT],
        "rows": [row],
        "facts": {SCRIPT: SCRIPT},
    }
    tier = wire.TierStatus(SCRIPT, 1, 0, 0, 0, 0, 0, 0, off_reason=SCRIPT)
    sessions = [session(1, engine_id=SCRIPT, serves=evil, **said), session(2, engine_id="x", name=SCRIPT)]
    client = client_of(Watched(sample(1, sessions=sessions, tiers=[tier], version=SCRIPT)))
    page = client.get("/").text
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 11
    assert "<script>" not in page
    assert "<script>" not in "".join(client.get(f"/parts/{name}").text for name in PARTS)


def test_without_a_daemon_the_page_says_so():
    """Before the first sample there is a reason in place of figures; after one is lost, its time as well."""
    watched = Watched()
    watched.lose()
    client = client_of(watched)
    assert "The daemon does not answer: nobody is at home" in client.get("/").text
    assert all(client.get(f"/parts/{name}").status_code == 200 for name in PARTS)
    watched.see(BEGUN, BUSY)
    assert "does not answer" not in client.get("/parts/notices").text
    watched.lose()
    text = text_of(client.get("/parts/notices").text)
    assert text == "The daemon does not answer: nobody is at home The figures are those of 08:00:04 UTC."
    assert "15,000" in client.get("/parts/overview").text


def test_the_browser_may_load_and_run_our_files_alone():
    """The policy names this origin only, nothing is cached, and no markup has script or style of its own."""
    client = client_of(Watched(BEGUN, BUSY))
    for path in ("/", "/history.json", "/parts/flows"):
        headers = client.get(path).headers
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'self'"
        assert set(policy.values()) == {"'self'", "'none'"}
        assert headers["cache-control"] == "no-store"
    page = client.get("/").text
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?://|<script(?! src=)", page)
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(sources) == 6
    for source in sources:
        assert client.get(f"/{source}").status_code == 200


def test_history_is_json_with_columns():
    """The charts' data has the times and a value for each."""
    history = client_of(Watched(BEGUN, BUSY)).get("/history.json").json()
    assert (len(history["at"]), history["unit"], history["pool"]) == (1, "tokens", [3750.0])
    assert (history["hit_rate"], history["fills"]) == ([0.8], {"pool": [0.25]})


@pytest.mark.parametrize("name", ["htmx.min.js", "LICENSE.htmx", "uplot.min.js", "uplot.min.css", "LICENSE.uplot"])
def test_vendored_files_are_the_ones_named(name: str):
    """Files of others are what VENDORED.md says, byte for byte, and all of them are named there."""
    vendor = FOLDER / "static" / "vendor"
    table = (vendor / "VENDORED.md").read_text()
    line = next(line for line in table.splitlines() if line.startswith(f"| `{name}`"))
    assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() in line
    assert {path.name for path in vendor.iterdir()} - {"VENDORED.md"} == set(re.findall(r"(?m)^\| `(.+?)`", table))
