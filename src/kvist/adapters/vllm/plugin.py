"""Entry point ``vllm.general_plugins``: lets vLLM find the connector by its name, as children of MultiConnector need.

Imported in every vLLM process, so nothing here may import vLLM or torch before ``register`` runs.
"""

from __future__ import annotations

import contextlib
import importlib


def register() -> None:
    """Make ``KvistConnector`` known by name. Twice is harmless."""
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    with contextlib.suppress(ValueError):  # Registered before, by another plugin load in this process.
        factory.register_connector("KvistConnector", "kvist.adapters.vllm.connector", "KvistConnector")
