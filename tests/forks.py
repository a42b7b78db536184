"""Start programs from a process that has imported what they need: the imports cost one to five seconds of CPU each time.

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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Final

IMPORTED: Final = (
    "alembic.command",
    "alembic.context",
    "apiflask.commands",
    "flasgger.cli",
    "flask.cli",
    "flask_idempotency.cli",
    "flask_limiter.commands",
    "flask_migrate",
    "gunicorn.app.wsgiapp",
    "gunicorn.workers.gthread",
    "psycopg",
    "redis.asyncio",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite",
    "waitress",
    "tests.forks",
    "tests.e2e.shop",
    "tests.e2e.step_shop",
    "tests.maintenance.victim",
    "tests.stores.contenders",
)


def fork(
    listener: socket.socket, *, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ForkServerProcess:
    """Start a program that serves on this socket: `arguments` name it `{descriptor}`."""
    return _started(_serve, listener, module, list(arguments), dict(environment), str(log))


def run(module: str, *arguments: str, folder: Path, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a program in a folder, as `python -m module` does. Return its exit code, and what it printed."""
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    process = _started(_run, str(folder), module, list(arguments), dict(environment), str(log))
    process.join()
    return process.exitcode, log.read_text()


def forks() -> ForkServerContext:
    """Return the context of processes that have imported `IMPORTED` when they start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _started(target: Callable[..., None], *arguments: object) -> ForkServerProcess:
    process = forks().Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _serve(
    listener: socket.socket, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: str
) -> None:
    listener.set_inheritable(True)
    _become(module, [each.format(descriptor=listener.fileno()) for each in arguments], environment, log)


def _run(folder: str, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    _become(module, arguments, environment, log)


def _become(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    os.setsid()  # one process group, so that no worker is left behind
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
