"""What the daemon starts to answer HTTP: ``python -m kvist.web SOCKET LISTENER_FD``, with a pipe as its input."""

import sys

from kvist.web.serving import run

run(sys.argv[1], int(sys.argv[2]), sys.stdin.fileno())
