"""Every kind of finding that is worse than fine, as ``docs/doctor.md`` lists it.

The law: a code is the name of one cause, and is not used again for another.
"""

from __future__ import annotations

from typing import Final

from kvist.doctor.findings import Kind, Level

_NOTE, _WARNING, _PROBLEM = Level.NOTE, Level.WARNING, Level.PROBLEM
_COMPUTES: Final = "Engines compute every prompt, as without a cache."
_NO_START: Final = "`kvist serve` does not start."

# The socket, and who listens there.
SOCKET_MISSING: Final = Kind(
    "socket.missing", _PROBLEM, "there is nothing at the socket's path",
    f"No daemon was started for this path, or it was started for another one. {_COMPUTES}",
    "start `kvist serve --socket {path}`, or give `--socket` the daemon's path",
)  # fmt: skip
SOCKET_DEAD: Final = Kind(
    "socket.dead", _PROBLEM, "the socket of a daemon that has ended", _COMPUTES,
    "start `kvist serve --socket {path}` again; it takes the path over",
)  # fmt: skip
SOCKET_FORBIDDEN: Final = Kind(
    "socket.forbidden", _PROBLEM, "this user may not reach the socket", _COMPUTES,
    "run engine and daemon as one user, or the daemon as root with `allow_uids = [{uid}]` in a directory that lets "
    "this user through",
)  # fmt: skip
SOCKET_BLOCKED: Final = Kind(
    "socket.blocked", _PROBLEM, "no connection can be made, for another reason", _COMPUTES,
    "see the reason; the path is what `--socket` says: {path}",
)  # fmt: skip
SOCKET_OTHER_FILE: Final = Kind(
    "socket.other-file", _PROBLEM, "a file of another kind is at the socket's path",
    "A daemon does not start there, since it removes nothing of others.",
    "remove {path}, or choose another `--socket`",
)  # fmt: skip
SOCKET_OPEN_FOLDER: Final = Kind(
    "socket.open-folder", _PROBLEM, "others may write to the socket's directory",
    "They could put a socket of their own in place of the daemon's, so a daemon does not start there.",
    "`chmod go-w {folder}`, or choose a `--socket` in a directory of your own",
)  # fmt: skip
SOCKET_FOREIGN_FOLDER: Final = Kind(
    "socket.foreign-folder", _PROBLEM, "the socket's directory belongs to another user", _NO_START,
    "choose a `--socket` in a directory of this user's own",
)  # fmt: skip
SOCKET_FOREIGN: Final = Kind(
    "socket.foreign", _PROBLEM, "who listens is neither of this user nor root",
    f"An engine does not hand its memory to another user's process. {_COMPUTES}",
    "run the daemon as this user ({uid}) or as root, and name its path with `--socket`",
)  # fmt: skip
SOCKET_IN_USE: Final = Kind(
    "socket.in-use", _PROBLEM, "somebody listens at the path already", _NO_START,
    "stop process {pid}, or choose another `--socket`",
)  # fmt: skip

# A daemon's greeting.
DAEMON_OTHER_PROGRAM: Final = Kind(
    "daemon.other-program", _PROBLEM, "who listens is no kvist daemon", _COMPUTES,
    "give `--socket` the path of a kvist daemon, or stop process {pid}",
)  # fmt: skip
DAEMON_VERSION: Final = Kind(
    "daemon.version", _PROBLEM, "the daemon speaks another version of the protocol", _COMPUTES,
    "install one version of kvist for both, `kvist version` shows it, and restart the older one",
)  # fmt: skip
DAEMON_REFUSES: Final = Kind(
    "daemon.refuses", _PROBLEM, "the daemon refuses the connection", _COMPUTES,
    "see the daemon's words; `allow_uids` says who may connect, `sessions_max` how many",
)  # fmt: skip
DAEMON_SILENT: Final = Kind(
    "daemon.silent", _PROBLEM, "the daemon has taken the connection and does not answer",
    "It is stopped, or its machine has stopped it. Each request waits for `deadline_s` before it is computed.",
    "look at the state of process {pid} (`ps -o stat= -p {pid}`), and restart it if it does not go on",
)  # fmt: skip

# What a daemon that serves says of itself.
SERVICE_DRAINING: Final = Kind(
    "service.draining", _WARNING, "the daemon is stopping", "It takes no new work.",
    "start it again when it has ended",
)  # fmt: skip
SERVICE_TIER_OFF: Final = Kind(
    "service.tier-off", _PROBLEM, "a tier is off",
    "What is on it is not found, and nothing is written to it; serving goes on from the pool alone.",
    "mend what its reason says, then restart the daemon; `kvist disk verify` tells whether its chunks are sound",
)  # fmt: skip
SERVICE_CORRUPT: Final = Kind(
    "service.corrupt", _PROBLEM, "chunks did not match their checksums",
    "They were dropped and not served, but something writes into the pool, or memory is faulty.",
    "test this machine's memory, and use `kvist serve --isolate` to see whether an engine is the cause",
)  # fmt: skip
SERVICE_OVERLOADED: Final = Kind(
    "service.overloaded", _WARNING, "requests were refused as overloaded",
    "Copies are slower than the engines ask for them; what is refused is computed.",
    "raise `copy_threads` where the daemon copies, or `requests_max` and `copies_max` for short peaks",
)  # fmt: skip
SERVICE_REFUSED: Final = Kind(
    "service.refused", _NOTE, "requests were refused",
    "What is refused is computed. Each reason has a code of its own.",
    "look the code up in docs/wire-protocol.md, and the words in the daemon's log with `log_level = \"debug\"`",
)  # fmt: skip
SERVICE_CHUNKS_REFUSED: Final = Kind(
    "service.chunks-refused", _WARNING, "many of the offered chunks were not kept",
    "The pool is full of what is held at one time, or copies fail: later prompts do not find them.",
    "choose a larger `--pool`, now {pool}",
)  # fmt: skip
SERVICE_NO_HITS: Final = Kind(
    "service.no-hits", _WARNING, "chunks are stored and asked for, and none was ever found",
    "Either no prompt has come twice, or keys differ. Engines share only within one namespace: the same model, "
    "revision and weights, the same type and layout of KV, the same `chunk_tokens`, shards, adapter and `cache_salt`.",
    "send one prompt twice to one engine; if that is found, compare these settings between the engines",
)  # fmt: skip
SERVICE_NOTHING_STORED: Final = Kind(
    "service.nothing-stored", _WARNING, "prompts are looked up, and no chunk was ever stored",
    "Prompts are shorter than a chunk, requests say `write: false`, or the workers have no cache.",
    "look for `WITHOUT a cache` in the engine's log, and set `chunk_tokens` smaller than most prompts",
)  # fmt: skip
SERVICE_NO_ENGINE: Final = Kind(
    "service.no-engine", _NOTE, "no engine is connected",
    "An engine connects at its start, or with its next request.",
    "start the engine with {flag}",
)  # fmt: skip
SERVICE_UNREGISTERED: Final = Kind(
    "service.unregistered", _WARNING, "prompts are looked up, and nobody has registered KV memory",
    "The engine's workers could not hand their memory over, or are still starting; nothing is stored or loaded.",
    "look for `kvist:` in the engine's log: one line says why it runs WITHOUT a cache",
)  # fmt: skip
SERVICE_DISK_BEHIND: Final = Kind(
    "service.disk-behind", _NOTE, "chunks were dropped on their way to the disk",
    "The disk is slower than the engines store; what is dropped is not there after a restart.",
    "use `--disk-write second-use`, or a faster `--disk`",
)  # fmt: skip
SERVICE_POOL_SMALL: Final = Kind(
    "service.pool-small", _NOTE, "most of what is stored is evicted again, and little is found",
    "Prompts come back after their chunks have gone.",
    "choose a larger `--pool`, now {pool}, or add a `--disk`",
)  # fmt: skip
SERVICE_LEASES_EXPIRED: Final = Kind(
    "service.leases-expired", _NOTE, "prefixes were looked up and neither loaded nor given back",
    "What they held could not be evicted; engines that stand still, or end, leave leases behind.",
    "choose a shorter `--lease-ttl-s` if it grows steadily",
)  # fmt: skip

# Who may copy.
LANE_ISOLATED: Final = Kind(
    "lane.isolated", _PROBLEM, "the engine is to copy for itself, and the daemon gives its pool to nobody",
    "The registration is refused, and the engine runs without a cache.",
    'remove `"lane": "engine"` from kv_connector_extra_config, or `--isolate` from `kvist serve`',
)  # fmt: skip
LANE_DAEMON_COPIES: Final = Kind(
    "lane.daemon-copies", _NOTE, "the daemon gives its pool to nobody (`--isolate`)",
    "It copies GPUs' blocks itself, which slows decoding more than copies in the engine do.",
    "remove `--isolate` from `kvist serve` if all its engines may see each other's KV",
)  # fmt: skip
LANE_UNSEEN: Final = Kind(
    "lane.unseen", _WARNING, "the daemon cannot see this process: they are in different PID namespaces",
    "It cannot know when a killed engine's copies have ended, so it does not let it copy for itself: a GPU's engine "
    "that is not told otherwise runs without a cache.",
    "run both in one PID namespace (`--pid=host`, `shareProcessNamespace`), or set `\"lane\": \"daemon\"`",
)  # fmt: skip
LANE_REFUSED: Final = Kind(
    "lane.refused", _WARNING, "the daemon does not let engines copy for themselves, for another reason",
    "A GPU's engine that is not told otherwise runs without a cache.",
    "see the daemon's words; `\"lane\": \"daemon\"` lets the daemon copy",
)  # fmt: skip
LANE_IPC: Final = Kind(
    "lane.ipc-namespace", _NOTE, "daemon and engine are in different IPC namespaces",
    "Where the daemon copies a GPU's blocks, CUDA's events cannot be shared: copies wait longer, or are refused.",
    "run both with `--ipc=host` if the daemon is to copy",
)  # fmt: skip

# The machine.
HOST_KERNEL: Final = Kind(
    "host.kernel", _PROBLEM, "the kernel is older than Linux 5.14", "The pool cannot be made present.",
    "update the kernel",
)  # fmt: skip
HOST_DESCRIPTORS: Final = Kind(
    "host.descriptors", _WARNING, "the hard limit of open files is low",
    "An engine hands over a descriptor for each segment of 20 MiB where the daemon copies, and each connection takes "
    "one; whoever finds no room loses its connection.",
    "raise it: `LimitNOFILE=` of systemd, `--ulimit nofile=` of docker, `ulimit -Hn`",
)  # fmt: skip
HOST_LOCKED: Final = Kind(
    "host.memlock", _NOTE, "the limit of locked memory is lower than a pool",
    "kvist locks nothing itself, but drivers may count what they pin against it: registering the pool can then fail.",
    "raise it if pinning fails: `LimitMEMLOCK=infinity` of systemd, `--ulimit memlock=-1` of docker, `ulimit -l`",
)  # fmt: skip
HOST_SHM: Final = Kind(
    "host.shm", _NOTE, "`/dev/shm` is small",
    "kvist needs no space there, but vLLM with several workers does.",
    "give the container more, if vLLM asks for it: `--shm-size=8g`, or `--ipc=host`",
)  # fmt: skip
HOST_HUGE_PAGES: Final = Kind(
    "host.huge-pages", _NOTE, "shared memory has no huge pages",
    "The start takes longer, about a second per GiB on a busy machine; copies are as fast.",
    "`echo always > /sys/kernel/mm/transparent_hugepage/shmem_enabled` before the daemon starts",
)  # fmt: skip
HOST_NUMA: Final = Kind(
    "host.numa", _NOTE, "there are several NUMA nodes",
    "Copies between nodes are slower, and the pool lies where its pages were made present.",
    "start the daemon on the engine's node: `numactl --cpunodebind={node} --preferred={node} kvist serve ...`",
)  # fmt: skip
HOST_SLOW_COPIES: Final = Kind(
    "host.slow-copies", _NOTE, "one thread copies slowly",
    "A load waits for its copies; loads of short prompts may take as long as computing them.",
    "leave cores and memory bandwidth free: look at what else runs here",
)  # fmt: skip

# A daemon that is still to be started.
SERVE_CONFIG: Final = Kind(
    "serve.config", _PROBLEM, "the configuration cannot be run", _NO_START,
    "change what the message names",
)  # fmt: skip
SERVE_POOL: Final = Kind(
    "serve.pool", _PROBLEM, "the pool is larger than the memory that is left", _NO_START,
    "choose a smaller `--pool`, at most {left}",
)  # fmt: skip
SERVE_POOL_TIGHT: Final = Kind(
    "serve.pool-tight", _WARNING, "the pool takes most of the memory that is left",
    "What an engine needs besides may be missing: the kernel then ends processes.",
    "choose a smaller `--pool` unless everything else runs already; {left} are left now",
)  # fmt: skip

# Disks.
DISK_MISSING: Final = Kind(
    "disk.missing", _PROBLEM, "neither the directory nor its parent is there", _NO_START,
    "`mkdir -p {path}`, after its drive is mounted",
)  # fmt: skip
DISK_NOT_WRITABLE: Final = Kind(
    "disk.not-writable", _PROBLEM, "nothing can be written to the directory",
    "The daemon does not start, or turns the disk off.",
    "give this user (`chown`) the directory of `--disk {path}`, on a file system that is writable and not full",
)  # fmt: skip
DISK_IN_USE: Final = Kind(
    "disk.in-use", _PROBLEM, "another process uses the directory", "A directory has one user at a time.",
    "stop process {pid}, or give `--disk` another directory than {path}",
)  # fmt: skip
DISK_UNUSABLE: Final = Kind(
    "disk.unusable", _PROBLEM, "what is in the directory cannot be used by this version", _NO_START,
    "install the version that wrote it, or give its chunks up with `kvist disk purge {path}`",
)  # fmt: skip
DISK_IN_MEMORY: Final = Kind(
    "disk.in-memory", _WARNING, "the directory is in memory",
    "It takes the memory that the pool could have, and is empty after the machine's restart.",
    "give `--disk` a directory on a drive, or raise `--pool` instead",
)  # fmt: skip
DISK_OVERLAY: Final = Kind(
    "disk.overlay", _WARNING, "the directory is in a container's own layer",
    "It is gone with the container, and slower than a mounted directory.",
    "mount a directory of the host into the container, and give that to `--disk`",
)  # fmt: skip
DISK_NETWORK: Final = Kind(
    "disk.network", _WARNING, "the directory is on a network file system",
    "Locks and durability depend on the server, and loads on the network.",
    "give `--disk` a directory on a local drive",
)  # fmt: skip
DISK_NOT_DIRECT: Final = Kind(
    "disk.not-direct", _NOTE, "the file system offers no direct I/O",
    "What is read and written passes through the page cache, and takes memory and time.",
    "give `--disk` a directory on ext4 or xfs",
)  # fmt: skip
DISK_SPACE: Final = Kind(
    "disk.space", _PROBLEM, "less is free than the directory's share of --disk-size",
    "The daemon allocates all of it at its start, and does not start without.",
    "choose a `--disk-size` of at most {nbytes}, or free some space",
)  # fmt: skip
DISK_ONE_DRIVE: Final = Kind(
    "disk.one-drive", _NOTE, "several directories are on one file system",
    "They share its speed, and fail together.", "name one `--disk` for each drive",
)  # fmt: skip
DISK_SLOW: Final = Kind(
    "disk.slow", _NOTE, "the disk reads slowly",
    "Engines compute what would take longer to read, so much of what is there will not be used.",
    "give `--disk` a faster drive",
)  # fmt: skip

# GPUs.
GPU_NONE: Final = Kind(
    "gpu.none", _NOTE, "no GPU", "Engines on a CPU need none.",
    "if there is one, start the container with it: `--gpus all`",
)  # fmt: skip
GPU_BINDINGS: Final = Kind(
    "gpu.bindings", _PROBLEM, "there are GPUs, and no cuda-bindings",
    "kvist cannot copy between GPUs and the pool: engines on them run without a cache.",
    "`pip install 'kvist[cuda]'` in this environment",
)  # fmt: skip
GPU_DRIVER: Final = Kind(
    "gpu.driver", _PROBLEM, "there are GPUs, and CUDA cannot be used",
    "kvist cannot copy between GPUs and the pool: engines on them run without a cache.",
    "mend what CUDA says: a driver that fits, the devices in the container (`--gpus all`)",
)  # fmt: skip
GPU_HIDDEN: Final = Kind(
    "gpu.hidden", _NOTE, "CUDA shows fewer GPUs than there are",
    "A daemon that copies must see every GPU of its engines; an engine must see its own.",
    "unset `CUDA_VISIBLE_DEVICES` for the daemon, or start its container with `--gpus all`",
)  # fmt: skip
GPU_SHARING: Final = Kind(
    "gpu.sharing", _WARNING, "another process cannot open a GPU's memory",
    "A daemon cannot copy for the engines. Engines that copy for themselves are not concerned.",
    'leave `lane` at its default in kv_connector_extra_config, or run both with `--ipc=host --pid=host`',
)  # fmt: skip
GPU_EXPANDABLE: Final = Kind(
    "gpu.expandable", _PROBLEM, "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments",
    "vLLM does not start with any KV connector then.",
    "remove `expandable_segments:True` from `PYTORCH_CUDA_ALLOC_CONF`",
)  # fmt: skip

# What vLLM is told.
VLLM_NO_CONNECTOR: Final = Kind(
    "vllm.no-connector", _PROBLEM, "there is no --kv-transfer-config", "vLLM does not know of kvist.", "add {flag}",
)  # fmt: skip
VLLM_JSON: Final = Kind(
    "vllm.json", _PROBLEM, "--kv-transfer-config cannot be read", "vLLM does not start.", "write {flag}",
)  # fmt: skip
VLLM_CONNECTOR: Final = Kind(
    "vllm.connector", _PROBLEM, "the connector is not kvist's", "vLLM uses another cache, or does not start.",
    'write `"kv_connector": "KvistConnector"`',
)  # fmt: skip
VLLM_MODULE_PATH: Final = Kind(
    "vllm.module-path", _PROBLEM, "kv_connector_module_path is not kvist's", "vLLM does not start.",
    'leave it out, or write `"kv_connector_module_path": "kvist.adapters.vllm"`',
)  # fmt: skip
VLLM_ROLE: Final = Kind(
    "vllm.role", _PROBLEM, "kv_role is not kv_both",
    "An engine stores and loads. Without a role vLLM does not start.", 'write `"kv_role": "kv_both"`',
)  # fmt: skip
VLLM_FAILURE_POLICY: Final = Kind(
    "vllm.failure-policy", _PROBLEM, "kv_load_failure_policy is `fail`, which is vLLM's default",
    "A request whose cached KV cannot be loaded ends with an error instead of being computed.",
    'write `"kv_load_failure_policy": "recompute"`',
)  # fmt: skip
VLLM_OPTIONS: Final = Kind(
    "vllm.options", _PROBLEM, "an option in kv_connector_extra_config is unknown, or does not fit",
    "The engine runs without a cache.", "change the option that the message names in kv_connector_extra_config",
)  # fmt: skip
VLLM_CHUNK_TOKENS: Final = Kind(
    "vllm.chunk-tokens", _PROBLEM, "chunk_tokens is no multiple of --block-size",
    "A chunk consists of whole blocks: the engine runs without a cache.", "set `chunk_tokens` to {tokens}",
)  # fmt: skip
VLLM_SOCKET: Final = Kind(
    "vllm.socket", _PROBLEM, "the engine's socket is not the daemon's", _COMPUTES,
    'write `"socket": "{path}"` in kv_connector_extra_config',
)  # fmt: skip
VLLM_PREFIX_CACHING: Final = Kind(
    "vllm.prefix-caching", _WARNING, "vLLM's own prefix caching is off",
    "What the engine has in its memory already is copied from the pool again, for each request.",
    "remove `--no-enable-prefix-caching`",
)  # fmt: skip
VLLM_HYBRID: Final = Kind(
    "vllm.hybrid", _WARNING, "vLLM's hybrid KV cache manager is off",
    "Layers with a window take as much memory as the others, in the engine and in the pool. kvist does not need that.",
    "remove `--disable-hybrid-kv-cache-manager`",
)  # fmt: skip
VLLM_SLEEP_MODE: Final = Kind(
    "vllm.sleep-mode", _PROBLEM, "vLLM's sleep mode is on",
    "It takes KV memory away, so the engine runs without a cache.", "remove `--enable-sleep-mode`",
)  # fmt: skip
VLLM_KV_SCALES: Final = Kind(
    "vllm.kv-scales", _PROBLEM, "vLLM computes the scales of KV at each start",
    "What one start has stored means something else after the next, so the engine runs without a cache.",
    "remove `--calculate-kv-scales`",
)  # fmt: skip
VLLM_PREFILL_RANKS: Final = Kind(
    "vllm.prefill-ranks", _PROBLEM, "prefills are cut over several ranks",
    "Which rank holds a token is not known: the engine runs without a cache.",
    "remove `--prefill-context-parallel-size`",
)  # fmt: skip
VLLM_VERSION: Final = Kind(
    "vllm.version", _WARNING, "this version of vLLM is not one that kvist was made for",
    "Its memory may lie otherwise; what is not understood is refused, and the engine then runs without a cache.",
    "install vLLM 0.24 to 0.33",
)  # fmt: skip
VLLM_CONFIG_FILE: Final = Kind(
    "vllm.config-file", _NOTE, "some of vLLM's arguments are in a file, which was not read",
    "What it says is missing here.", "put its lines into `--vllm` as flags",
)  # fmt: skip

KINDS: Final = tuple(value for value in tuple(globals().values()) if isinstance(value, Kind))
"""All of them, in the order of the page."""
