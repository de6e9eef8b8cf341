"""The adapter for vLLM where there is no vLLM: its modules are imported over stand-ins, which vanish again.

What is kept of vLLM is what the adapter's classes are built on; anything else that an import asks for is a name without
meaning.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from prometheus_client import Counter, Histogram

_NAMES = ("torch", "vllm")
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"


class KVConnectorBase_V1:  # noqa: N801 -- vLLM's name
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...

    def bind_connector_metadata(self, connector_metadata: Any) -> None: ...

    def clear_connector_metadata(self) -> None: ...


class SupportsHMA: ...


class KVConnectorMetadata: ...


class KVConnectorWorkerMetadata: ...


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        self._counter_cls, self._histogram_cls = metric_types[Counter], metric_types[Histogram]


_KEPT = {
    _BASE: (
        KVConnectorBase_V1, SupportsHMA, KVConnectorMetadata, KVConnectorWorkerMetadata, KVConnectorTransferResults,
    ),
    _METRICS: (KVConnectorStats, KVConnectorPromMetrics),
}  # fmt: skip
"""By module."""


class _StandIn(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name.islower():
            raise AttributeError(name)  # Perhaps a module of its own.
        return type(name, (), {"SCHEDULER": "scheduler", "WORKER": "worker"})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname.partition(".")[0] in _NAMES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for kept in _KEPT.get(module.__name__, ()):
            setattr(module, kept.__name__, kept)


@contextmanager
def _stand_ins() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in _NAMES]:
            del sys.modules[name]


def adapter(name: str) -> Any:
    """Return a module of the adapter, such as ``scheduler``."""
    full_name = f"kvist.adapters.vllm.{name}"
    if full_name in sys.modules or importlib.util.find_spec("vllm") is not None:
        return importlib.import_module(full_name)
    with _stand_ins():
        return importlib.import_module(full_name)
