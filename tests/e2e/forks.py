"""Start the victim's servers from a process that has imported what they need: an import costs a second of CPU each time.

That process has made no application, connection or thread, so what it forks is as good as a program started by itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

IMPORTED: Final = (
    "gunicorn.app.wsgiapp",
    "gunicorn.workers.gthread",
    "psycopg",
    "redis.asyncio",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite",
    "waitress",
    "tests.e2e.forks",
    "tests.e2e.shop",
    "tests.e2e.step_shop",
)


def fork(
    listener: socket.socket, *, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ForkServerProcess:
    """Start a program that serves on this socket: `arguments` name it `{descriptor}`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(
        target=_become, args=(listener, module, list(arguments), dict(environment), str(log)), daemon=True
    )
    process.start()
    return process


def _become(
    listener: socket.socket, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: str
) -> None:
    os.setsid()  # one process group, so that no worker is left behind
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    listener.set_inheritable(True)
    sys.argv = [module, *(each.format(descriptor=listener.fileno()) for each in arguments)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
