"""vLLM 0.24 to 0.33: ``kv_connector_module_path`` is this package.

One connector, two roles: the scheduler's side decides, the worker's side sends. The contract that both keep is vLLM's
``vllm/distributed/kv_transfer/kv_connector/v1/base.py``; what differs between versions is in ``layout.py`` alone.
"""

from kvist.adapters.vllm.connector import KvistConnector

__all__ = ["KvistConnector"]
