"""Many engine processes at once on a pool that is far too small: no wrong byte, and nothing is left."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.worker import NUM_CHUNKS

ROOT = Path(__file__).parents[2]
NUM_WORKERS = 8
NUM_REQUESTS = 10_000
SLOT_NBYTES = 4096


def test_eight_engines_on_a_tenth_of_their_chunks(tmp_path: Path):
    """In 10 000 requests every loaded byte is the one that its name says, and the daemon ends as it began.

    Leases are forgotten, claimed twice and left behind by engines that end; chunks are evicted all the time.
    """
    pool_nbytes = NUM_CHUNKS // 10 * SLOT_NBYTES // (8 * SLOT_NBYTES) * (8 * SLOT_NBYTES)
    with Daemon(tmp_path, pool=str(pool_nbytes), arguments=["--lease-ttl-s", "2"]) as daemon:
        assert daemon.status().num_sessions == 1
        before = daemon.num_fds()
        command = [sys.executable, "-m", "tests.support.worker", daemon.path]
        workers = [
            subprocess.Popen([*command, str(seed), str(NUM_REQUESTS // NUM_WORKERS)], cwd=ROOT, stdout=subprocess.PIPE)
            for seed in range(NUM_WORKERS)
        ]
        seen: Counter[str] = Counter()
        for worker in workers:
            output, _ = worker.communicate(timeout=100)
            assert worker.returncode == 0
            seen.update(json.loads(output))
        assert seen["requests"] >= NUM_REQUESTS
        assert seen["failed"] == daemon.count("chunks_corrupt") == 0
        assert seen["loaded"] == daemon.count("chunks_loaded") > 1000
        assert seen["stored"] == daemon.count("chunks_stored") > 1000
        assert daemon.count("chunks_evicted") > 1000
        daemon.check_quiet(num_fds=before)
        status = daemon.status()
        assert status.pool_used_nbytes == status.num_sealed * SLOT_NBYTES <= pool_nbytes
        assert 10 * pool_nbytes <= NUM_CHUNKS * SLOT_NBYTES
