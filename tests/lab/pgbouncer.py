"""A PgBouncer in front of a PostgreSQL of ours, so that SQL is tested where a session is not one server connection."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

from tests.lab.postgres import PostgresServer, launch, on_some_port, private_folder, wait_until
from tests.lab.programs import missing

PoolMode: TypeAlias = Literal["session", "transaction", "statement"]

# Debian's, which is on the PATH of root alone. Another release: PGBOUNCER=/its/path.
PROGRAM = Path(os.environ.get("PGBOUNCER", "/usr/sbin/pgbouncer"))

SETTINGS = """\
[databases]
* = host=127.0.0.1 port={upstream_port} user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
default_pool_size = {pool_size}
max_client_conn = 1000
; the default keeps everybody out for fifteen seconds after a server came back
server_login_retry = 0.1
ignore_startup_parameters = {ignored}
"""


def require_pgbouncer() -> None:
    if not PROGRAM.exists():
        missing("PgBouncer", remedy="Run `sudo apt install pgbouncer`, or your system's way to put it at that path.")


class PgBouncer:
    """A pooler for every database of a server, ready when the constructor returns.

    With transaction pooling a client has a server connection only until it
    commits, so nothing that belongs to a session may be relied on. It dies with
    the thread that started it.
    """

    def __init__(
        self, server: PostgresServer, *, pool_size: int = 4, pool_mode: PoolMode = "transaction", ignored: str = ""
    ) -> None:
        self.port = 0
        self.folder = private_folder()
        settings = {"upstream_port": server.port, "pool_size": pool_size, "pool_mode": pool_mode}
        self._settings = {**settings, "ignored": ignored}
        try:
            self.port = on_some_port(self._start, folder=self.folder)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def conninfo(self, database: str) -> str:
        """The same address for psycopg itself."""
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={database}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def carries_statements(self) -> bool:
        """Whether what a client has prepared is known on each server connection: by default from 1.24 on."""
        said = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"(\d+)\.(\d+)", said)
        assert found is not None
        return (int(found[1]), int(found[2])) >= (1, 24)

    @property
    def log(self) -> str:
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else "gone"

    def stop(self) -> None:
        """Ends it and removes its folder; harmless when it is gone already."""
        # It has nothing to put away, and newer ones take SIGTERM for "when the last client has left".
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, port: int) -> None:
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(SETTINGS.format(port=port, **self._settings))
        self._process = launch([str(PROGRAM), settings.name], folder=self.folder)
        try:
            wait_until(lambda: "process up" in self.log, self._process, folder=self.folder)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise


class StartPgBouncer(Protocol):
    def __call__(
        self, server: PostgresServer, *, pool_size: int = ..., pool_mode: PoolMode = ..., ignored: str = ...
    ) -> PgBouncer: ...
