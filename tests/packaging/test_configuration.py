"""The page of all options is the one that the code makes."""

import subprocess
import sys

import msgspec
import pytest

from kvist.adapters.vllm.options import Options, RequestOptions
from kvist.server.config import ServeConfig, process_environment
from tests.packaging.conftest import ROOT


def test_the_page_of_options_is_current():
    """``docs/configuration.md`` is what its tool makes from the classes that read the options."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "docs" / "configuration.py"), "--print"],
        capture_output=True, text=True, check=True, env=process_environment(),
    ).stdout  # fmt: skip
    assert (ROOT / "docs" / "configuration.md").read_text() == made, "it is made anew by: make docs"


@pytest.mark.parametrize("struct", [ServeConfig, Options, RequestOptions])
def test_every_option_is_on_the_page(struct: type[msgspec.Struct]):
    """No field is left out, whatever the tool does."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [name for name in struct.__struct_fields__ if f"\n| `{name}` |" not in page] == []
