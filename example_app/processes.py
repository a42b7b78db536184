"""The processes of the demo: the service, and its janitor. Both end with the demo, whatever ends that."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from example_app.servers import DIE_WITH_PARENT

START_SECONDS = 30.0
STOP_SECONDS = 5.0


class CannotStart(Exception):
    """The demo cannot run here and now; the message says why."""


@contextmanager
def service(port: int, environment: Mapping[str, str], *, log: Path) -> Iterator[None]:
    """Two workers with eight threads each, answering when the body runs."""
    command = ["gunicorn", "example_app.app:create_app()", "--bind", f"127.0.0.1:{port}"]
    command += ["--worker-class", "gthread", "--workers", "2", "--threads", "8", "--graceful-timeout", "2"]
    command += ["--no-control-socket"]  # which would be in the home folder, and shared with every other gunicorn there
    process = start(command, environment, log=log)
    try:
        wait_until_it_answers(process, port, log)
        yield
    finally:
        end(process)


@contextmanager
def janitor(environment: Mapping[str, str], *, folder: Path) -> Iterator[None]:
    """A Celery worker and its beat. Nobody waits for them here: what they do is seen in the tour.

    Two processes, where `worker -B` would be one that starts the other: then a demo that is killed would leave that behind.
    """
    named = {**environment, "FLASK_APP": "example_app.app:create_app()"}
    celery = ["celery", "-A", "janitor"]
    # It talks with itself alone.
    alone = ["-P", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    worker = start([*celery, "worker", *alone, "--loglevel", "info"], named, log=folder / "worker.log")
    beat = start([*celery, "beat", "-s", str(folder / "beat"), "--pidfile="], named, log=folder / "beat.log")
    try:
        yield
    finally:
        end(beat)
        end(worker)


def start(command: list[str], environment: Mapping[str, str], *, log: Path) -> subprocess.Popen[bytes]:
    """This program of our Python's, in a session of its own: Ctrl-C is for us, and it ends after the last request."""
    launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), sys.executable, "-m"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*launcher, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if answers(port):
            return
        time.sleep(0.05)
    raise CannotStart("gunicorn did not start:\n" + log.read_text(errors="replace")[-4000:])


def answers(port: int) -> bool:
    """Whether a worker answers. Gunicorn listens before it has one, so a connection alone says nothing."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"GET /payments HTTP/1.0\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/")
    except OSError:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        # The whole session: workers outlive a master that is killed by about a second.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
