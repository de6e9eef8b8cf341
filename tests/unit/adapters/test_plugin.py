"""vLLM finds the connector by the name that its users give."""

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvist.adapters.vllm.plugin import register
from tests.support.fake_vllm import adapter

ROOT = Path(__file__).resolve().parents[3]


class Factory:
    """vLLM's, as far as the plugin goes."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.known:
            raise ValueError(name)
        self.known[name] = module_path, class_name


def test_the_flag_names_what_the_plugin_registers(monkeypatch: pytest.MonkeyPatch):
    """The name in the flag is known once vLLM has loaded its plugins, any number of times, and names our class."""
    factory, connector = Factory(), adapter("connector")
    names = ["vllm", "distributed", "kv_transfer", "kv_connector", "factory"]
    for end in range(1, len(names) + 1):
        module = SimpleNamespace(__path__=[], KVConnectorFactory=factory)
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), module)
    register()
    register()
    option, _, value = connector.FLAG.partition(" ")
    name = json.loads(value.strip("'"))["kv_connector"]
    assert option == "--kv-transfer-config"
    assert factory.known == {name: ("kvist.adapters.vllm.connector", name)}
    assert connector.__dict__[name].__name__ == name
    (found,) = entry_points(group="vllm.general_plugins", name="kvist")
    assert found.load() is register


def test_the_readme_gives_the_flag():
    """What the log tells users to start vLLM with is what the README tells them."""
    assert adapter("connector").FLAG in (ROOT / "README.md").read_text()
