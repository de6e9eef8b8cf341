"""vLLM 0.24 to 0.33: ``kv_connector_module_path`` is this package.

One connector, two roles: the scheduler's side decides, the worker's side sends. The contract that both keep is vLLM's
``vllm/distributed/kv_transfer/kv_connector/v1/base.py``; what differs between versions is in ``layout.py`` alone.
The connector is imported when it is asked for, so that its options can be read where there is no vLLM.
"""

import importlib

__all__ = ["KvistConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.connector"), name)
