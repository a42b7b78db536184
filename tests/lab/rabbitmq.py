"""A RabbitMQ of one's own: on nobody's port, with its own name service, gone with its owner."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.postgres import launch, private_folder, wait_until
from tests.lab.programs import missing
from tests.tooling.processes import reserved_port

# Debian's. The one on the PATH runs as a user of its own, in that user's folders, and as nobody else.
PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
EPMD = Path("/usr/bin/epmd")

ATTEMPTS = 3
HELLO = b"AMQP\x00\x00\x09\x01"

SETTINGS = """\
disk_free_limit.absolute = 1MB
vm_memory_high_watermark.absolute = 256MB
"""

# One scheduler that does not wait busily: two cores are shared by many tests.
ARGUMENTS = "+S 1:1 +SDcpu 1:1 +SDio 1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}"


def require_rabbitmq() -> None:
    if not PROGRAM.exists() or not EPMD.exists():
        missing(
            "RabbitMQ", remedy="Run `sudo apt install rabbitmq-server`, or your system's way to put it at that path."
        )


class RabbitServer:
    """A broker on the loopback interface, ready when the constructor returns. It dies with the thread that started it."""

    def __init__(self) -> None:
        self.folder = private_folder()
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            for attempt in range(ATTEMPTS):
                try:
                    self._start()
                    break
                except Exception:
                    # Somebody may take one of the ports between our look and its bind.
                    self._end()
                    if attempt == ATTEMPTS - 1:
                        raise
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    @property
    def log(self) -> str:
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else "gone"

    def stop(self) -> None:
        """Ends it and removes its folder; harmless when it is gone already."""
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        with ExitStack() as held:
            self._start_on(*(held.enter_context(reserved_port()).getsockname()[1] for _ in range(3)))

    def _start_on(self, port: int, distribution: int, names: int) -> None:
        self.port = port
        (self.folder / "rabbitmq.conf").write_text(SETTINGS)
        environment = {
            "HOME": self.folder,  # where its cookie is
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "plugins",
            "RABBITMQ_LOG_BASE": self.folder,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_PID_FILE": self.folder / "pid",
            "RABBITMQ_NODENAME": f"idempotency_{os.getpid()}_{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": distribution,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ARGUMENTS,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": names,
            # Then the shell becomes the server, and there is one process to end.
            "RUNNING_UNDER_SYSTEMD": "1",
        }
        assignments = [f"{name}={value}" for name, value in environment.items()]
        # Started by us, or it would start one by itself, which nobody ends.
        self._launch([str(EPMD), "-port", str(names), "-address", "127.0.0.1"])
        wait_until(lambda: _answers(names, b"\x00\x01n"), self._running[-1], folder=self.folder)
        self._launch(["/usr/bin/env", *assignments, str(PROGRAM)])
        wait_until(lambda: _answers(self.port, HELLO), self._running[-1], folder=self.folder)

    def _launch(self, command: list[str]) -> None:
        self._running.append(launch(command, folder=self.folder))

    def _end(self) -> None:
        # The broker first. It has nothing to put away that anybody needs.
        while self._running:
            process = self._running.pop()
            process.kill()
            process.wait()
        shutil.rmtree(self.folder / "data", ignore_errors=True)


def _answers(port: int, question: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(question)
            return bool(connection.recv(8))
    except OSError:
        return False
