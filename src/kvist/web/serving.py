"""This process's life: it begins with a socket that listens already, and ends with the process that has started it.

The laws: the daemon is asked once a period, whoever looks, so that health is known without waiting; where that has a
fault, the process ends, and is started again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from typing import Final

import uvicorn

from kvist.watching.watcher import PERIOD_S, Watcher
from kvist.web.app import make_app

CONNECTIONS_MAX: Final = 128
"""Whoever comes when so many are open is told to come later."""
_KEEP_ALIVE_S: Final = 15
"""An idle connection's; scrapers come again every 10 to 60 s."""
_GRACE_S: Final = 1
"""How long answers that are on their way hold the end up."""
_HEAD_NBYTES_MAX: Final = 1 << 14
_LINE_NBYTES_MAX: Final = 1 << 13


def run(socket_path: str, listener_fd: int, parent_fd: int) -> None:
    """Answer at a listening socket for the daemon at ``socket_path``, until SIGTERM or the end of ``parent_fd``.

    ``parent_fd`` is a pipe whose first line is the token, and which ends with the parent.
    """
    token = _read_line(parent_fd)
    listener = socket.socket(fileno=listener_fd)
    is_loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    watcher = Watcher(socket_path)
    config = uvicorn.Config(
        make_app(watcher, token=token, is_loopback=is_loopback),
        loop="asyncio", http="h11", ws="none", lifespan="off", interface="asgi3", log_config=None, log_level="error",
        access_log=False, proxy_headers=False, server_header=False, limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_HEAD_NBYTES_MAX,
    )  # fmt: skip
    try:
        asyncio.run(_serve(uvicorn.Server(config), listener, watcher, parent_fd))
    finally:
        watcher.close()


async def _serve(server: uvicorn.Server, listener: socket.socket, watcher: Watcher, parent_fd: int) -> None:
    loop = asyncio.get_running_loop()

    def on_parent() -> None:
        if not os.read(parent_fd, _LINE_NBYTES_MAX):
            loop.remove_reader(parent_fd)
            server.should_exit = server.force_exit = True

    loop.add_reader(parent_fd, on_parent)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(watcher))
        await server.serve(sockets=[listener])
        watching.cancel()


async def _watch(watcher: Watcher) -> None:
    while True:
        await asyncio.to_thread(watcher.sample)
        await asyncio.sleep(PERIOD_S)


def _read_line(fd: int) -> str:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_NBYTES_MAX and (byte := os.read(fd, 1)):
        line += byte
    return line.decode("ascii").strip()
