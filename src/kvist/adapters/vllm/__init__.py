"""vLLM 0.24 to 0.33: ``kv_connector_module_path`` is this package, where it is given.

One connector, two roles: the scheduler's side decides, the worker's side sends. The contract that both keep is vLLM's
``vllm/distributed/kv_transfer/kv_connector/v1/base.py``; what differs between versions is in ``layout.py`` alone.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import the connector when it is asked for: every vLLM process imports this package, for the plugin in it.

    Raises:
        AttributeError: the name is another one.
    """
    if name != "KvistConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("kvist.adapters.vllm.connector").KvistConnector
