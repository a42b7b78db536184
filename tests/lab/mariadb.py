"""A MariaDB that tests start for themselves, on the loopback interface, in a folder that goes with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import pymysql

from example_app.demo.servers import ServerFailed
from tests.lab.postgres import START_SECONDS, STOP_SECONDS, launch, on_some_port, private_folder, wait_until
from tests.lab.programs import missing

SETTINGS: Final = (
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=32M",
    "--max-connections=300",
    "--character-set-server=latin1",
    "--performance-schema=off",
)
"""With the default of old servers for text, so that a table or a connection that names none shows."""

DRIVER: Final = os.environ.get("MARIADB_DRIVER", "mysql+pymysql")
"""Set it to hold another driver to the same tests. PyPI has no wheel of mysqlclient for Linux; Debian has python3-mysqldb."""

READY: Final = "ready for connections"


def installation() -> Path | None:
    """Return the program of the server on this machine. Debian keeps it where only root looks."""
    found = shutil.which("mariadbd", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    return None if found is None or shutil.which("mariadb-install-db") is None else Path(found)


def require_mariadb() -> Path:
    """Return that program, or end the test."""
    found = installation()
    if found is None:
        missing("MariaDB", remedy="Install your system's package of the server, such as Debian's mariadb-server.")
    return found


class MariaDbServer:
    """A server that is ready when the constructor returns. It keeps every commit through `kill`."""

    def __init__(self, program: Path, *, arguments: Sequence[str] = ()) -> None:
        self._program = program
        self._arguments = list(arguments)
        self.folder = private_folder()
        self.port = 0
        try:
            self._make_data()
            self.port = on_some_port(self._start, folder=self.folder)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else "gone"

    @property
    def _environment(self) -> dict[str, str]:
        # It runs as another user, who may not write into ours.
        return {"TMPDIR": str(self.folder)}

    def url(self, database: str) -> str:
        return f"{DRIVER}://root@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> None:
        self.execute(f"CREATE DATABASE {name}")

    def execute(self, statement: str) -> None:
        connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True)
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Yield the name of an empty database, and drop it at the end."""
        name = f"test_{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield name
        finally:
            self.execute(f"DROP DATABASE IF EXISTS {name}")

    def kill(self) -> None:
        """End it as a crash of the machine does; `restart` brings it back."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Leave it silent: it accepts connections and answers none of them."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Come back at the same address with all that was committed."""
        self._end()
        self._start(self.port)

    def stop(self) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _make_data(self) -> None:
        install = shutil.which("mariadb-install-db")
        assert install is not None
        options = [
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]
        process = launch([install, *options], folder=self.folder, environment=self._environment)
        if process.wait(START_SECONDS) != 0:
            raise ServerFailed(f"mariadb-install-db failed:\n{self.log}")

    def _start(self, port: int) -> None:
        before = self.log.count(READY)
        data = self.folder / "data"
        # A name that is relative to the data: a socket's path may be no longer than 107 bytes.
        options = ["--no-defaults", f"--datadir={data}", "--socket=s", f"--port={port}", "--pid-file=pid", *SETTINGS]
        self._process = launch(
            [str(self._program), *options, *self._arguments], folder=self.folder, environment=self._environment
        )
        try:
            wait_until(lambda: self.log.count(READY) > before, self._process, folder=self.folder)
        except BaseException:
            self.kill()
            raise

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class StartMariaDb(Protocol):
    def __call__(self, *arguments: str) -> MariaDbServer: ...
