"""Waiting for effects on other processes, with a deadline that means failure."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

# Of failure only: what a machine takes that many others use.
DEADLINE_SECONDS = 60.0


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold before the deadline; looks again at once, so a passing test waits for nothing else."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def reserved_port() -> socket.socket:
    """Bind a free port, and keep it until the socket is closed: no other process gets it by asking for a free one.

    A server with SO_REUSEADDR can listen on it, because this socket does not.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def gone(pid: int) -> bool:
    """Whether the process ends. One that only waits for its parent to notice counts as ended."""
    return eventually(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # The second when it ends between our opening of the file and our reading of it.
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
