"""What the pages tell people to type is accepted."""

import json
import re
from pathlib import Path

import pytest

from tests.packaging.command_lines import check_command, check_flag, commands_of_line, commands_of_page
from tests.packaging.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_accepted(page: Path):
    """Programs, options, targets, extras and engine options that a page's commands name are there."""
    for words in commands_of_page(page):
        check_command(words)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "--kv-transfer-config '" in page.read_text()], ids=lambda page: page.stem
)
def test_the_flag_is_one_everywhere(page: Path):
    """Wherever a page gives vLLM's flag, in a block of whatever kind, it is the same one, with options that exist."""
    flags = re.findall(r"--kv-transfer-config '(\{[^']*\})'", page.read_text())
    assert flags
    for flag in flags:
        check_flag(json.loads(flag))


def test_commands_are_found():
    """The pages have commands of each kind, so that the test above looks at something."""
    found = [check_command(words) for page in PAGES for words in commands_of_page(page)]
    assert {name: found.count(name) > 1 for name in ("kvist", "vllm", "pip", "make")} == dict.fromkeys(
        ("kvist", "vllm", "pip", "make"), True
    )


FLAG = '"kv_connector":"KvistConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kvist serve --pol 8GiB", "No such option"),
        ("kvist serve --pool 8GiB --disk", "requires an argument"),
        ("until kvist statu; do true; done", "No such command"),
        ("kvist disk verify", "Missing parameter"),
        ("KVIST_POL=1GiB kvist serve", "KVIST_POL is no option"),
        ("pip install 'kvist[serve]'", "the extras are"),
        ("pip install kvisst", "kvisst is not kvist"),
        ("make tests", "no such target"),
        ('vllm serve m --kv-transfer-config \'{"kv_connector":"KvistConnector"}\'', "not what the README gives"),
        (f'vllm serve m --kv-transfer-config \'{{{FLAG},"kv_connector_extra_config":{{"sockt":1}}}}\'', "sockt"),
    ],
)
def test_a_wrong_command_is_noticed(line: str, said: str):
    """A command that the programs would refuse, or that names what is not there, fails the check."""
    (wrong,) = (words for words in commands_of_line(line) if words not in (["true"], ["done"]))
    with pytest.raises(Exception, match=said):
        check_command(wrong)
