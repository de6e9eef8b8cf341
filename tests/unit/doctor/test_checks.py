"""Each kind of finding, provoked by the facts that it is about, and by no others."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest

from kvist.adapters.vllm.options import Options
from kvist.doctor import catalogue as kinds
from kvist.doctor.examination import examine
from kvist.doctor.facts import Facts, Folder, Listener, Namespaces, NotConnected, NotKnown, NumaNode, Refusal, Silence
from kvist.doctor.findings import Kind, Level, is_clean
from kvist.units import GIB, MIB
from tests.support.healthy import (
    DAEMON,
    DAEMON_SIDE,
    DISK,
    ENGINE_SIDE,
    PATH,
    SOCKET,
    TIER,
    TRANSFER,
    UUID,
    with_config,
    with_disk,
    with_gpus,
    with_host,
    with_socket,
    with_status,
    with_transfer,
    with_vllm,
)

ABSENT = {"is_socket": None}
OFF = msgspec.structs.replace(TIER, off_reason="I/O error")
APART = Namespaces(("pid:[1]", "pid:[2]"), ("ipc:[1]", "ipc:[1]"))
TWO_NODES = (NumaNode(0, 64 * GIB, GIB), NumaNode(1, 64 * GIB, 2 * GIB))


def daemon(answer: object) -> Facts:
    return replace(ENGINE_SIDE, daemon=answer)


def lane(code: str, namespaces: Namespaces = DAEMON.namespaces, **options: str) -> Facts:
    facts = daemon(replace(DAEMON, lane=Refusal(code, "the daemon's words"), namespaces=namespaces))
    return replace(facts, vllm=replace(ENGINE_SIDE.vllm, options=Options(socket=PATH, **options)))


def on_daemon_side(**changes: object) -> Facts:
    return replace(DAEMON_SIDE, socket=replace(DAEMON_SIDE.socket, **changes))


CASES: list[tuple[Kind, Facts, str, str]] = [
    # The kind, what provokes it, and what is in its words and in its change.
    (kinds.SOCKET_MISSING, with_socket(**ABSENT, peer=NotConnected("ENOENT", "No such file")), "No such file", PATH),
    (kinds.SOCKET_DEAD, with_socket(peer=NotConnected("ECONNREFUSED", "refused")), "refused", "kvist serve"),
    (kinds.SOCKET_FORBIDDEN, with_socket(peer=NotConnected("EACCES", "denied")), "denied", "allow_uids"),
    (kinds.SOCKET_BLOCKED, with_socket(**ABSENT, peer=NotConnected("", "path too long")), "too long", "--socket"),
    (kinds.SOCKET_OTHER_FILE, on_daemon_side(is_socket=False), PATH, f"remove {PATH}"),
    (kinds.SOCKET_OPEN_FOLDER, with_socket(folder=Folder("/run/kvist", 0o777, 0)), "0777", "chmod go-w /run/kvist"),
    (kinds.SOCKET_FOREIGN_FOLDER, on_daemon_side(folder=Folder("/x", 0o755, 4711)), "user 4711", "--socket"),
    (kinds.SOCKET_FOREIGN, with_socket(peer=Listener(5, 4711, "thief")), "thief", f"this user ({os.getuid()})"),
    (kinds.SOCKET_IN_USE, on_daemon_side(peer=Listener(77, 0, "kvist serve")), "process 77 (kvist", "stop process 77"),
    (kinds.DAEMON_OTHER_PROGRAM, daemon(NotKnown("no valid reply")), "no valid reply", "stop process 77"),
    (kinds.DAEMON_VERSION, daemon(Refusal("version_mismatch", "speaks 9")), "speaks 9", "kvist version"),
    (kinds.DAEMON_REFUSES, daemon(Refusal("overloaded", "256 sessions")), "overloaded: 256", "sessions_max"),
    (kinds.DAEMON_SILENT, daemon(Silence(5.0)), "5 s", "process 77"),
    (kinds.SERVICE_DRAINING, with_status(is_draining=True), "77", "start it again"),
    (kinds.SERVICE_TIER_OFF, with_status(tiers=[OFF]), "I/O error", "disk verify"),
    (kinds.SERVICE_CORRUPT, with_status(counters={"chunks_corrupt": 3}), "3 chunks", "--isolate"),
    (kinds.SERVICE_OVERLOADED, with_status(counters={"refused_overloaded": 9}), "9 requests", "copies_max"),
    (kinds.SERVICE_REFUSED, with_status(counters={"refused_unknown_lease": 4}), "unknown_lease: 4", "wire-protocol"),
    (kinds.SERVICE_CHUNKS_REFUSED, with_status(counters={"chunks_refused": 40}), "40 of 80", "--pool`, now 8 GiB"),
    (kinds.SERVICE_NO_HITS, with_status(counters={"chunks_found": 0}), "100 asked for, 0 found", "one prompt twice"),
    (
        kinds.SERVICE_NOTHING_STORED, with_status(counters={"chunks_stored": 0, "chunks_evicted": 0}), "10 lookups",
        "chunk_tokens",
    ),
    (kinds.SERVICE_NO_ENGINE, with_status(num_sessions=1, num_registered=0), "0 other sessions", "KvistConnector"),
    (kinds.SERVICE_UNREGISTERED, with_status(num_registered=0), "2 other sessions", "WITHOUT a cache"),
    (kinds.SERVICE_DISK_BEHIND, with_status(counters={"demotions_dropped": 6}), "6 chunks", "second-use"),
    (
        kinds.SERVICE_POOL_SMALL, with_status(counters={"chunks_evicted": 30, "chunks_found": 9}), "30 of 40",
        "larger `--pool`",
    ),
    (kinds.SERVICE_LEASES_EXPIRED, with_status(counters={"leases_expired": 2}), "2 leases", "--lease-ttl-s"),
    (kinds.LANE_ISOLATED, lane("pool_kept", lane="engine"), "isolates", '"lane": "engine"'),
    (kinds.LANE_DAEMON_COPIES, lane("pool_kept"), "isolates", "--isolate"),
    (kinds.LANE_UNSEEN, lane("layout_refused", APART), "pid:[1] here, pid:[2] there", "--pid=host"),
    (kinds.LANE_REFUSED, lane("layout_refused"), "the daemon's words", '"lane": "daemon"'),
    (
        kinds.LANE_IPC, daemon(replace(DAEMON, namespaces=replace(APART, pid=("p", "p"), ipc=("ipc:[1]", "ipc:[2]")))),
        "ipc:[2] there", "--ipc=host",
    ),
    (kinds.HOST_KERNEL, with_host(kernel=(5, 13)), "5.13", "kernel"),
    (kinds.HOST_DESCRIPTORS, with_host(descriptors_max=1024), "1024", "ulimit -Hn"),
    (kinds.HOST_LOCKED, with_host(locked_nbytes_max=8 * MIB), "8 MiB, and a pool of 8 GiB", "ulimit -l"),
    (kinds.HOST_SHM, with_host(shm_nbytes=64 * MIB), "64 MiB", "--shm-size"),
    (kinds.HOST_HUGE_PAGES, with_host(shmem_huge="never"), "never", "shmem_enabled"),
    (kinds.HOST_NUMA, with_host(numa_nodes=TWO_NODES), "1: 2 GiB free", "numactl --cpunodebind=0"),
    (kinds.HOST_SLOW_COPIES, with_host(copy_rate=1.5e9), "1.50 GB/s", "bandwidth"),
    (kinds.SERVE_CONFIG, replace(DAEMON_SIDE, serve=NotKnown("unknown key 'pol'")), "'pol'", "what the message names"),
    (kinds.SERVE_POOL, with_config(pool=33 * GIB), "the limit leaves 32 GiB", "at most 32 GiB"),
    (kinds.SERVE_POOL_TIGHT, with_config(pool=30 * GIB), "a pool of 30 GiB", "--pool"),
    (
        kinds.DISK_MISSING, with_disk(is_there=False, has_parent=False, refusal="No such file"),
        "No such file", "mkdir -p /nvme/kvist",
    ),
    (kinds.DISK_NOT_WRITABLE, with_disk(refusal="Permission denied"), "Permission denied", "--disk /nvme/kvist"),
    (kinds.DISK_IN_USE, with_disk(user="78"), "process 78", "stop process 78"),
    (kinds.DISK_UNUSABLE, with_disk(unusable="has format version 9"), "version 9", "disk purge /nvme/kvist"),
    (kinds.DISK_IN_MEMORY, with_disk(filesystem="tmpfs"), "tmpfs", "--disk"),
    (kinds.DISK_OVERLAY, with_disk(filesystem="overlay"), "overlay", "--disk"),
    (kinds.DISK_NETWORK, with_disk(filesystem="fuse.sshfs"), "fuse.sshfs", "local drive"),
    (kinds.DISK_NOT_DIRECT, with_disk(is_direct=False), "ext4", "--disk"),
    (
        kinds.DISK_SPACE, replace(DAEMON_SIDE, disks=(replace(DISK, free_nbytes=100 * GIB, own_nbytes=50 * GIB),)),
        "room for 150 GiB, and its share is 200 GiB", "at most 150 GiB",
    ),
    (
        kinds.DISK_ONE_DRIVE, replace(ENGINE_SIDE, disks=(DISK, replace(DISK, path="/nvme/other"))), "/nvme/other",
        "one `--disk` for each drive",
    ),
    (kinds.DISK_SLOW, with_disk(read_rate=120e6), "reads 120 MB/s", "--disk"),
    (kinds.GPU_NONE, with_gpus(installed=(), visible=NotKnown("no CUDA driver")), "no CUDA driver", "--gpus all"),
    (kinds.GPU_BINDINGS, with_gpus(visible=NotKnown("none"), has_bindings=False), UUID, "kvist[cuda]"),
    (kinds.GPU_DRIVER, with_gpus(visible=NotKnown("cuInit returned 803")), "803", "driver"),
    (kinds.GPU_HIDDEN, with_gpus(installed=("a", UUID), visible_devices="1"), "is '1'", "CUDA_VISIBLE_DEVICES"),
    (kinds.GPU_SHARING, with_gpus(sharing=NotKnown("cuIpcOpenMemHandle returned 201")), "201", "--ipc=host"),
    (kinds.GPU_EXPANDABLE, with_gpus(allocator="expandable_segments:True"), "expandable", "PYTORCH_CUDA_ALLOC_CONF"),
    (kinds.VLLM_NO_CONNECTOR, with_vllm(transfer=None), "--kv-transfer-config", "KvistConnector"),
    (kinds.VLLM_JSON, with_vllm(transfer=NotKnown("truncated")), "truncated", "KvistConnector"),
    (kinds.VLLM_CONNECTOR, with_transfer(kv_connector="KvistConector"), "KvistConector", '"KvistConnector"'),
    (kinds.VLLM_MODULE_PATH, with_transfer(kv_connector_module_path="kvist"), "'kvist'", '"kvist.adapters.vllm"'),
    (kinds.VLLM_ROLE, with_transfer(kv_role="kv_producer"), "kv_producer", '"kv_both"'),
    (kinds.VLLM_FAILURE_POLICY, with_transfer(kv_load_failure_policy="fail"), "'fail'", '"recompute"'),
    (kinds.VLLM_OPTIONS, with_vllm(options=NotKnown("unknown field `sokcet`")), "sokcet", "kv_connector_extra_config"),
    (
        kinds.VLLM_CHUNK_TOKENS, with_vllm(options=Options(socket=PATH, chunk_tokens=100), block_tokens=16),
        "chunk_tokens is 100", "`chunk_tokens` to 112",
    ),
    (kinds.VLLM_SOCKET, with_vllm(options=Options(socket="/other")), "/other there", f'"socket": "{PATH}"'),
    (kinds.VLLM_PREFIX_CACHING, with_vllm(is_prefix_caching_off=True), "prefix", "--no-enable-prefix-caching"),
    (kinds.VLLM_HYBRID, with_vllm(is_hybrid_off=True), "hybrid", "--disable-hybrid-kv-cache-manager"),
    (kinds.VLLM_SLEEP_MODE, with_vllm(has_sleep_mode=True), "sleep", "--enable-sleep-mode"),
    (kinds.VLLM_KV_SCALES, with_vllm(has_computed_scales=True), "scales", "--calculate-kv-scales"),
    (kinds.VLLM_PREFILL_RANKS, with_vllm(num_prefill_ranks=2), "size 2", "--prefill-context-parallel-size"),
    (kinds.VLLM_VERSION, with_vllm(version="0.23.1"), "0.23.1", "0.24 to 0.33"),
    (kinds.VLLM_CONFIG_FILE, with_vllm(config_file="v.yaml"), "v.yaml", "--vllm"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "facts", "what", "change"), CASES, ids=[case[0].code for case in CASES])
def test_each_cause_is_found_alone(kind: Kind, facts: Facts, what: str, change: str):
    """One thing amiss makes one finding: its code, what was seen, why it matters, and what to change."""
    (found,) = [finding for finding in examine(facts) if finding.level is not Level.OK]
    assert (found.code, found.level, found.why) == (kind.code, kind.level, kind.why)
    assert what in found.what
    assert change in found.change
    assert is_clean([found]) is (kind.level is Level.NOTE)


def test_every_kind_is_provoked():
    """No finding is without a test, and no two kinds have one code."""
    assert sorted(case[0].code for case in CASES) == sorted(kind.code for kind in kinds.KINDS)
    assert len({kind.code for kind in kinds.KINDS}) == len(kinds.KINDS) >= 25


def test_nothing_amiss_is_fine():
    """On either side, a healthy setup makes findings that say so, one of each topic."""
    for facts, topics in (
        (ENGINE_SIDE, {"socket", "daemon", "service", "lane", "vllm", "host", "disk", "gpu"}),
        (DAEMON_SIDE, {"socket", "serve", "host", "disk", "gpu"}),
    ):
        findings = examine(facts)
        assert {finding.code for finding in findings} == {f"{topic}.ok" for topic in topics}
        assert is_clean(findings)


def test_what_is_not_known_is_not_amiss():
    """Where nothing could be seen, nothing is found."""
    unknown = NotKnown("not looked at")
    for facts in (
        with_host(shm_nbytes=unknown, shmem_huge=unknown, numa_nodes=unknown),
        with_disk(filesystem=unknown, is_direct=unknown, write_rate=unknown, read_rate=unknown, free_nbytes=unknown),
        with_gpus(installed=unknown),
        with_vllm(version=unknown),
    ):
        assert is_clean(examine(facts))
        assert all(finding.level is Level.OK for finding in examine(facts))


def test_the_living_daemons_own_directory_is_not_in_use():
    """The process at the socket may use the directory; from the daemon's side nobody may."""
    assert is_clean(examine(with_disk(user="77")))
    facts = replace(DAEMON_SIDE, disks=(replace(DISK, user="77"),))
    assert "disk.in-use" in [finding.code for finding in examine(facts)]


def test_an_isolated_daemon_and_an_engine_that_copies_contradict():
    """Also before the daemon was started."""
    facts = replace(with_config(isolate=True), vllm=replace(ENGINE_SIDE.vllm, options=Options(PATH, lane="engine")))
    assert [finding.code for finding in examine(facts) if finding.level is Level.PROBLEM] == ["lane.isolated"]


def test_a_hidden_gpu_is_no_broken_driver():
    """CUDA says the same where CUDA_VISIBLE_DEVICES hides all of them; the variable tells them apart."""
    facts = with_gpus(visible=NotKnown("cuInit returned 100"), visible_devices="")
    assert [finding.code for finding in examine(facts) if finding.level is not Level.OK] == ["gpu.hidden"]


def test_a_connector_that_vllm_finds_by_name_needs_no_path():
    """Our entry point has made it known; the module inside the package is as good as the package."""
    assert TRANSFER.kv_connector_module_path == "kvist.adapters.vllm"
    for path in (None, "kvist.adapters.vllm.connector"):
        assert is_clean(examine(with_transfer(kv_connector_module_path=path)))


def test_a_process_that_cannot_be_seen_is_named_so():
    """The kernel gives a process of another PID namespace no number."""
    facts = replace(ENGINE_SIDE, socket=replace(SOCKET, peer=Listener(0, 0, NotKnown("process 0"))))
    assert "a process that cannot be seen from here" in examine(facts)[0].what
