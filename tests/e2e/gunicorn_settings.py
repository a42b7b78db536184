"""What every gunicorn of these tests is told: the names are gunicorn's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - heartbeats; a disk may stall them
graceful_timeout = 2
keepalive = 60
loglevel = "debug"
accesslog = "-"
control_socket_disable = True


def post_fork(arbiter: Any, worker: Any) -> None:
    """A worker ends with its arbiter, even one that is paused or that spins."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
