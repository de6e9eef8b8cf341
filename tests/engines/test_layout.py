"""What vLLM can choose as the layout of its KV memory is described rightly, or refused by name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import PYTHON

PAGE_NBYTES = 2 * 4 * 8 * 2


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    script = Path(__file__).with_name("describe.py")
    done = subprocess.run([str(PYTHON), str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ["LBNHC", "LBHNC", "padded", "0.24 NHD", "0.24 HND", "0.26 NHD", "MLA"])
def test_a_page_a_layer(cases: dict[str, Any], case: str) -> None:
    """Where a block of one layer is one stretch of memory, in whatever inner order, each layer is a plane of pages."""
    assert cases[case]["planes"] == 3
    assert cases[case]["is_right"]


@pytest.mark.parametrize("case", ["BLNHC", "BLHNC"])
def test_a_block_in_one_piece(cases: dict[str, Any], case: str) -> None:
    """Where the layers of a block follow each other, they are one plane with one page a block."""
    assert cases[case] == {"planes": 1, "is_right": True, "page": 3 * PAGE_NBYTES}


@pytest.mark.parametrize("case", ["LHBNC", "BHLNC", "0.22 K and V apart"])
def test_pages_in_pieces_are_refused(cases: dict[str, Any], case: str) -> None:
    """Where a block of one layer lies in several pieces, the layer and its strides are named."""
    assert "layer.0" in cases[case]["refused"]
