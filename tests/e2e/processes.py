"""Servers of the victim: started when a test asks, kept for the next one that asks for the same, ended with the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from example_app.demo.servers import DIE_WITH_PARENT
from tests.e2e.wire import ask, message
from tests.forks import fork

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60.0
"""Of failure only."""

Kind: TypeAlias = Literal["sync", "gthread", "gevent", "waitress"]
KINDS: tuple[Kind, ...] = ("sync", "gthread", "gevent", "waitress")


@dataclass(frozen=True)
class Plan:
    """Which server to start. Equal plans are served by one server."""

    store: str
    kind: Kind = "gthread"
    workers: int = 1
    threads: int = 8
    lease: float = 30.0
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    app: str = "tests.e2e.service:from_environment()"
    """What gunicorn serves; waitress has the victim only."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to ours."""
    name: str = ""
    """Tells two servers with otherwise equal plans apart."""

    @property
    def identity(self) -> str:
        return repr(self)

    @property
    def forked(self) -> bool:
        """Whether it may begin as a fork. gevent patches modules before they are imported, and a preloaded library comes
        with a new program only."""
        return self.kind != "gevent" and "LD_PRELOAD" not in self.environment

    @property
    def command(self) -> list[str]:
        """The module to run and its arguments, to serve on the open socket `{descriptor}`."""
        if self.kind == "waitress":
            return ["tests.e2e.waitress_main", "{descriptor}", str(self.threads)]
        gunicorn = ["gunicorn", "--config", "python:tests.e2e.gunicorn_settings", "--bind", "fd://{descriptor}"]
        gunicorn += ["--worker-class", self.kind, "--workers", str(self.workers)]
        if self.kind == "gthread":
            gunicorn += ["--threads", str(self.threads)]
        # Longer than any test: a worker that a test pauses must not be killed by its arbiter.
        return [*gunicorn, "--timeout", "300", *self.arguments, self.app]


class Server:
    """One running server, ready when the constructor returns. It dies with the thread that started it."""

    def __init__(self, plan: Plan, *, ledger: str) -> None:
        self.plan = plan
        self._folder = Path(tempfile.mkdtemp(prefix="idempotency-e2e-"))
        config = {"IDEMPOTENCY_LEASE": plan.lease, **plan.config}
        environment = {
            "E2E_STORE": plan.store,
            "E2E_LEDGER": ledger,
            "E2E_CONFIG": json.dumps(config),
            **plan.environment,
        }
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            self.port: int = listener.getsockname()[1]
            self._process = self._forked(listener, environment) if plan.forked else self._started(listener, environment)
        try:
            # The socket listens already: the first request waits in it until somebody serves, or is reset with it.
            assert ask(self.port, message("GET", "/free")).status == 200
        except BaseException as error:
            said = self.log
            self.stop()
            raise AssertionError(f"{plan} did not start:\n{said[-4000:]}") from error

    def _forked(self, listener: socket.socket, environment: Mapping[str, str]) -> ForkServerProcess:
        module, *arguments = self.plan.command
        return fork(listener, module=module, arguments=arguments, environment=environment, log=self._log_path)

    def _started(self, listener: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), sys.executable, "-m"]
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                [*launcher, *(each.format(descriptor=listener.fileno()) for each in self.plan.command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # one process group, so that no worker is left behind
            )

    @property
    def log(self) -> str:
        """What it has said so far; nothing any more once it was stopped."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    @property
    def pid(self) -> int:
        """Of its first process, which forks the workers."""
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def running(self) -> bool:
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll() is None
        return self._process.is_alive()

    @property
    def workers(self) -> list[int]:
        """Those of gunicorn that are there at this moment."""
        children = Path("/proc") / str(self.pid) / "task" / str(self.pid) / "children"
        return [int(pid) for pid in children.read_text().split()]

    def end(self) -> None:
        """End it as a deployment does: its process finishes what it has begun."""
        os.kill(self.pid, signal.SIGTERM)
        self._wait()

    def _wait(self) -> None:
        if isinstance(self._process, subprocess.Popen):
            self._process.wait(STOP_SECONDS)
        else:
            self._process.join(STOP_SECONDS)
            assert not self.running

    def stop(self) -> None:
        """End it with all its workers, paused ones included."""
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)
            self._wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _log_path(self) -> Path:
        return self._folder / "log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Fleet:
    """The servers of a test run."""

    def __init__(self, ledger: str) -> None:
        self._ledger = ledger
        self._servers: dict[str, Server] = {}

    def get(self, plan: Plan) -> Server:
        """A server that follows this plan. Others use it after you."""
        server = self._servers.get(plan.identity)
        if server is None or not server.running:
            server = self._servers[plan.identity] = Server(plan, ledger=self._ledger)
        return server

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()


def kill(pid: int) -> None:
    """End a worker as the kernel does when memory runs out."""
    os.kill(pid, signal.SIGKILL)


def pause(pid: int) -> None:
    """Stop a worker, all of its threads, wherever it is."""
    os.kill(pid, signal.SIGSTOP)


def is_paused(pid: int) -> bool:
    """Whether each of its threads has stopped, which is a moment after `pause`."""
    tasks = (Path("/proc") / str(pid) / "task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
