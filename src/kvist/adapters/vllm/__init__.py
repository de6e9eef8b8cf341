"""vLLM 0.24 to 0.33: ``kv_connector_module_path`` is this package, where it is given.

One connector, two roles: the scheduler's side decides, the worker's side sends. The contract that both keep is vLLM's
``vllm/distributed/kv_transfer/kv_connector/v1/base.py``; what differs between versions is in ``layout.py`` alone.

The law: importing this package loads neither vLLM nor torch. The connector is imported when it is asked for, because
each vLLM process imports ``plugin``, and so this package, long before it is known whether a connector is wanted.
"""

import importlib


def __getattr__(name: str) -> object:
    """Return the connector, which vLLM takes from here by its name."""
    if name == "KvistConnector":
        return importlib.import_module("kvist.adapters.vllm.connector").KvistConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
