"""``KvistConnector``: vLLM's calls, each handed to one side of ours, none of which may harm the engine.

The laws: what can fail is guarded: its first exception in each place is logged, and the engine gets what it would get
without a cache. What is not guarded only hands values on. Every load that the engine was promised is reported, whatever
fails on the way. A method that only some vLLM versions call is here for all of them.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvist.adapters.vllm import layout
from kvist.adapters.vllm.groups import EngineFacts, EngineGroup, choose_chunk_tokens, engine_groups
from kvist.adapters.vllm.handover import HandedOver, Way, keep_memory, share_memory
from kvist.adapters.vllm.layout import WorkerMemory
from kvist.adapters.vllm.metadata import KvistMetadata, KvistWorkerMetadata, StoreJob
from kvist.adapters.vllm.namespace import describe_engine, describe_namespace
from kvist.adapters.vllm.options import FLAG, Options, parse_options
from kvist.adapters.vllm.plugin import register
from kvist.adapters.vllm.scheduler import SchedulerSide
from kvist.adapters.vllm.shards import Cut, choose_shardings
from kvist.adapters.vllm.sharing import share_storages
from kvist.adapters.vllm.stats import KvistPromMetrics, KvistStats, Tally
from kvist.adapters.vllm.worker import Results, WorkerSide
from kvist.client.client import About, Client
from kvist.client.lane import EngineLane
from kvist.errors import (
    ConfigError,
    DeviceError,
    FenceError,
    FenceRefused,
    KeyInvalid,
    LayoutError,
    PoolKept,
    ProtocolError,
    Refused,
    Unreachable,
)
from kvist.model.handles import HOST, MemoryHandle
from kvist.model.keys import Namespace
from kvist.model.layout import GroupKind
from kvist.transfer.governor import Governor
from kvist.wire import messages as wire

logger = logging.getLogger(__name__)

_HELD_FOR_DAEMON: Final = 0.25
_HELD_FOR_WORKER: Final = 0.75
"""Part of the engine's blocks that unfinished stores may hold."""
_REGISTRATION_S: Final = 30.0
"""A GPU's first view of a large pool takes seconds."""

_TransferResults: Final[Any] = getattr(base, "KVConnectorTransferResults", None)
"""How vLLM from 0.30 on is told of requests whose load has failed; None before."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def guarded(otherwise: Any) -> Callable[[_Method], _Method]:
    """Make a method return ``otherwise`` instead of raising. The engine's outermost seam."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: KvistConnector, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception:  # noqa: BLE001 -- the seam: a cache's fault must never become the engine's
                self._note_fault(method.__name__)
                return otherwise

        return call  # type: ignore[return-value]

    return decorate


class KvistConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One engine's connector, in its scheduler or in one of its workers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._faults: set[str] = set()
        self._scheduler: SchedulerSide | None = None
        self._tally = Tally()
        self._worker = WorkerSide() if role == KVConnectorRole.WORKER else None
        self._undone: dict[str, tuple[int, ...]] = {}
        self._meta: KvistMetadata | None = None
        self._failed_blocks: set[int] = set()
        self._tells_blocks = True
        """A failed load is reported by its blocks: the engine keeps what comes before them."""
        self._refusal = ""
        """Why this engine has no cache; empty if it has one."""
        self._config = vllm_config
        self._cache_config = kv_cache_config
        self._options = Options()
        self._cut: Cut | None = None
        """What both sides have worked out alike; None if that could not be done."""
        self._about = About()
        self._start(role)

    @guarded(None)
    def _start(self, role: Any) -> None:
        """Set this side up; with anything wrong, the engine runs without a cache and the log says why."""
        _join_logging()
        transfer = self._config.kv_transfer_config
        try:
            self._options = parse_options(transfer.kv_connector_extra_config)
            layout.check_served(self._config)
            self._cut = self._choose_cut()
            groups = self._cut.groups
            self._tells_blocks = [group.kind for group in groups] == [GroupKind.FULL]
            if not self._tells_blocks:
                _check_failures_can_be_told(groups)
                _check_states_are_offered(self._cache_config)
            if self._worker is not None:
                self._worker = WorkerSide(
                    deadline_s=self._options.deadline_s, governor=Governor(self._options.decode_slowdown_max),
                    tally=self._tally,
                )  # fmt: skip
            namespace = describe_namespace(
                self._config, self._cache_config, self._cut, version=self._options.weights_version
            )
            self._about = describe_engine(self._config, namespace, self._cut)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = self._make_scheduler(self._cut, namespace)
        except (ConfigError, KeyInvalid, LayoutError) as error:
            self._disable(str(error))
            return
        if role == KVConnectorRole.SCHEDULER and getattr(transfer, "kv_load_failure_policy", "fail") == "fail":
            logger.warning(
                "kvist: kv_load_failure_policy is 'fail': a request whose cached KV cannot be loaded ends with an "
                "error instead of being computed. Start vLLM with %s", FLAG,
            )  # fmt: skip

    def _choose_cut(self) -> Cut:
        """Work out from the configuration what both sides must agree on."""
        is_opaque = self._options.pages == "opaque"
        chunk_tokens = choose_chunk_tokens(self._options, self._config, self._cache_config)
        groups = engine_groups(self._config, self._cache_config, chunk_tokens)
        shardings = choose_shardings(
            self._config, self._cache_config, groups, head_shards=self._options.head_shards, is_opaque=is_opaque
        )
        return Cut(groups, shardings, chunk_tokens, is_opaque)

    def _make_scheduler(self, cut: Cut, namespace: Namespace) -> SchedulerSide:
        facts = EngineFacts(
            groups=cut.groups,
            needs=cut.needs,
            num_workers=self._config.parallel_config.world_size,
            num_blocks=int(self._cache_config.num_blocks),
            # What a daemon reads is held for as long as it takes, even if that is for ever; what this process reads is
            # let go of in time.
            held_share_max=_HELD_FOR_DAEMON if self._is_copied_by_daemon else _HELD_FOR_WORKER,
            has_prefix_cache=bool(self._config.cache_config.enable_prefix_caching),
            is_copied_by_worker=not self._is_copied_by_daemon,
        )
        return SchedulerSide(self._client("scheduler"), self._options, namespace, facts, tally=self._tally)

    def _client(self, side: str, registrar: Any = None) -> Client:
        engine_id = str(self._config.kv_transfer_config.engine_id)
        return Client(
            self._options.socket_path, engine_id=engine_id, name=f"vllm {side}", about=self._about,
            deadline_s=self._options.deadline_s, registrar=registrar,
        )  # fmt: skip

    def _disable(self, reason: str) -> None:
        """Serve nothing any more. What was promised before is still reported, as failed."""
        if not self._refusal:
            self._refusal = reason
            logger.error("kvist: this engine runs WITHOUT a cache: %s", reason)

    def _note_fault(self, place: str) -> None:
        if place not in self._faults:
            self._faults.add(place)
            logger.error("kvist: fault in %s; the engine goes on without it", place, exc_info=True)  # noqa: LOG014 -- called by the handler

    # ── worker ──────────────────────────────────────────────────────────────────────────────────────────────────

    @guarded(None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cut = self._cut
        if self._refusal or self._worker is None or cut is None:
            return
        try:
            found = layout.describe_memory(self._config, kv_caches, self._cache_config, cut)
            if self._is_copied_by_daemon:
                self._hand_to_daemon(found, cut, self._worker)
                return
            try:
                self._register(found, cut, self._worker, Way.ENGINE)
            except PoolKept as error:
                if self._options.lane:
                    raise
                logger.info("kvist: %s: the daemon copies", error)
                self._worker.close()
                self._hand_to_daemon(found, cut, self._worker)
        except (Refused, LayoutError, DeviceError) as error:
            self._disable(str(error))

    def _hand_to_daemon(self, found: WorkerMemory, cut: Cut, worker: WorkerSide) -> None:
        try:
            self._register(found, cut, worker, Way.DAEMON)
        except (FenceError, FenceRefused) as error:
            logger.warning(
                "kvist: %s: this worker waits for its own work before it asks (share the IPC namespace)", error
            )
            worker.close()
            self._register(found, cut, worker, Way.DAEMON_WITHOUT_EVENTS)

    def _register(self, found: WorkerMemory, cut: Cut, worker: WorkerSide, way: Way) -> None:
        """Hand the memory over to whoever copies, and say so.

        Raises:
            Refused: the daemon will not have it.
            LayoutError: it cannot be handed over, or copied.
            DeviceError: the device cannot be used.
        """
        memory = self._hand_over(found, way)

        def registrar(request_id: int) -> tuple[wire.Register, tuple[int, ...]]:
            return memory.registration(request_id, chunk_tokens=cut.chunk_tokens, texts=found.texts), memory.fds

        client = self._client(f"worker {self._config.parallel_config.rank}", registrar)
        requests = memory.requests(client, worker.governor)
        worker.connect(requests, memory.fence, found.rows_of_group(cut.groups))
        if isinstance(requests, EngineLane):
            worker.copy_itself(requests, [held.row.shard for held in found.rows])
        try:
            registered = requests.register(_REGISTRATION_S)
        except (ProtocolError, Unreachable) as error:
            logger.warning("kvist: %s; will try again when there is something to keep", error)
        else:
            logger.info(
                "kvist: KV memory shared lane=%s chunk_tokens=%d chunk=%d B rows=%d",
                "engine" if memory.bases else "daemon", cut.chunk_tokens, sum(registered.chunk_nbytes), len(found.rows),
            )  # fmt: skip
            for text in found.texts:
                logger.info("kvist: %s", text)

    @property
    def _is_copied_by_daemon(self) -> bool:
        return layout.device_type(self._config) != "cuda" or self._options.lane == "daemon"

    def _hand_over(self, found: WorkerMemory, way: Way) -> HandedOver:
        """Make a worker's memory reachable for whoever copies."""
        rows, storages = found.rows, found.storages
        if layout.device_type(self._config) != "cuda":
            handles = tuple(MemoryHandle(HOST, storage.nbytes()) for storage in storages)
            return HandedOver(rows, handles, fds=tuple(share_storages(storages)))
        if way is Way.ENGINE:
            return keep_memory(rows, storages)
        return share_memory(rows, storages, waits_itself=way is Way.DAEMON_WITHOUT_EVENTS)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._meta = connector_metadata if isinstance(connector_metadata, KvistMetadata) else None

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._meta = None

    @guarded(None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and self._meta is not None:
            self._worker.begin(self._meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded by layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved by layers."""

    @guarded(None)
    def wait_for_save(self) -> None:
        if self._worker is not None and self._meta is not None:
            self._worker.store(self._meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report what has ended: to vLLM before 0.30, and where failed loads are reported by their blocks."""
        return None, self._take_results().finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Report what has ended (vLLM 0.30 and later)."""
        results = self._take_results()
        failed = set() if self._tells_blocks else results.failed
        return _TransferResults(finished_recving=results.finished, failed_recving=failed)

    def _take_results(self) -> Results:
        results = self._collect() or self._give_up() or Results()
        if self._tells_blocks:
            self._failed_blocks |= results.failed_blocks
        return results

    @guarded(None)
    def _collect(self) -> Results | None:
        return self._worker.collect() if self._worker is not None else None

    @guarded(None)
    def _give_up(self) -> Results | None:
        return self._worker.give_up() if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @guarded(None)
    def build_connector_worker_meta(self) -> KvistWorkerMetadata | None:
        settled = self._worker.take_settled() if self._worker is not None else Counter()
        failed = self._worker.take_failed() if self._worker is not None else frozenset()
        is_needed = settled or failed or self._refusal
        return KvistWorkerMetadata(settled, self._refusal, failed) if is_needed else None

    # ── scheduler ───────────────────────────────────────────────────────────────────────────────────────────────

    @guarded(None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @guarded(None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None and not self._refusal:
            self._scheduler.begin(request)
        else:
            self._tally.add("requests_not_cached")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._count_hit(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    @guarded(0)
    def _count_hit(self, request: Any, num_computed_tokens: int) -> int | None:
        if self._scheduler is None or self._refusal:
            return 0
        return self._scheduler.count_hit(request, num_computed_tokens)

    @guarded(())
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._scheduler.loaded_groups(request) if self._scheduler is not None else ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not self._allocated(request, blocks, num_external_tokens) and num_external_tokens > 0:
            # The engine waits for a load now, so one must be reported: as failed, with every block that it meant.
            meant: tuple[int, ...] = ()
            if self._tells_blocks and self._cut is not None:
                num_blocks = num_external_tokens // self._cut.groups[0].block_tokens
                meant = tuple(blocks.get_block_ids()[0][-num_blocks:])
            self._undone[request.request_id] = meant
            self._tally.add("loads_failed")
            self._note_failed({request.request_id})

    @guarded(None)
    def _note_failed(self, request_ids: set[str]) -> None:
        if self._scheduler is not None:
            self._scheduler.note_failed(request_ids)

    @guarded(otherwise=False)
    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> bool:
        return self._scheduler is not None and self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvistMetadata:
        loads = self._scheduler.take_loads() if self._scheduler is not None else []
        stores = self._begin_stores(scheduler_output)
        undone, self._undone = self._undone, {}
        num_tokens = scheduler_output.num_scheduled_tokens
        num_decoding = len(num_tokens) if all(number == 1 for number in num_tokens.values()) else 0
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        return KvistMetadata(loads, stores, undone, is_idle=is_idle, num_decoding=num_decoding)

    @guarded([])
    def _begin_stores(self, scheduler_output: Any) -> list[StoreJob]:
        if self._scheduler is None or self._refusal:
            return []
        return self._scheduler.begin_stores(scheduler_output)

    @guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        self._note_failed(getattr(connector_output, "failed_recving", None) or set())
        if self._scheduler is not None and isinstance(metadata, KvistWorkerMetadata):
            self._scheduler.take_reports(metadata.settled, metadata.failed)
            if metadata.refusal:
                self._disable(f"a worker's memory was refused: {metadata.refusal}")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._end(request, (block_ids,))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._end(request, block_ids)
        return False, None

    @guarded(None)
    def _end(self, request: Any, block_ids: tuple[list[int], ...]) -> None:
        if self._scheduler is not None:
            self._scheduler.end(request, block_ids)

    @guarded(otherwise=False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.must_keep_stepping()

    @guarded(otherwise=False)
    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.change_weights()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what it could not keep is no loss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for blocks in one piece on a GPU: they are copied without a kernel. vLLM keeps its own where it must."""
        is_gpu = layout.device_type(vllm_config) == "cuda"
        return "BLNHC" if is_gpu and layout.knows_block_outermost() else None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any = None) -> bool:
        """Memory that sleeps would vanish from under the daemon."""
        return False

    @guarded(None)
    def get_kv_connector_stats(self) -> KvistStats | None:
        """Return what this side has counted since the last call; None if nothing has happened."""
        data = self._tally.take()
        return KvistStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvistStats:
        return KvistStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvistPromMetrics:
        register()  # MultiConnector looks its children's figures up by name, also where VLLM_PLUGINS leaves us out.
        return KvistPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(())
    def take_events(self) -> Iterable[Any]:
        return ()

    @guarded(None)
    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _check_failures_can_be_told(groups: tuple[EngineGroup, ...]) -> None:
    """Refuse groups whose failed loads this vLLM cannot be told of.

    Raises:
        LayoutError: always before vLLM 0.30, which knows failed blocks alone and computes from the first of them on:
            where blocks before it are gone, or belong to another group, it would compute from what is not there.
    """
    if _TransferResults is None:
        kinds = [group.kind.value for group in groups]
        raise LayoutError(
            f"KV cache groups {kinds} need vLLM 0.30 or later, which can compute a request from its start if its load "
            f"fails"
        )


def _check_states_are_offered(kv_cache_config: Any) -> None:
    """Refuse states of which vLLM does not say when a block holds which.

    Raises:
        LayoutError: names the group and its mode.
    """
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        mode = getattr(group.kv_cache_spec, "mamba_cache_mode", "align")
        if mode != "align":
            raise LayoutError(
                f"KV cache group {number} has the Mamba cache mode {mode!r}, in which vLLM does not tell which block "
                f"holds the state at a boundary; start with --mamba-cache-mode align"
            )


def _join_logging() -> None:
    """Let our log go where vLLM's goes; a library in somebody else's process configures nothing else."""
    ours, theirs = logging.getLogger("kvist"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.getEffectiveLevel())
