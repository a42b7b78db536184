"""A Galera cluster of MariaDB that tests start for themselves: three servers on the loopback interface."""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pymysql

from example_app.demo.servers import ServerFailed
from flask_idempotency.testing.proxy import TcpProxy
from tests.lab.mariadb import MariaDbServer, require_mariadb
from tests.lab.postgres import START_SECONDS, launch, private_folder
from tests.lab.programs import missing
from tests.tooling.processes import eventually

NODES: Final = 3

LIBRARIES: Final = ("/usr/lib/galera", "/usr/lib64/galera-4", "/usr/lib/libgalera")
"""Where systems keep `libgalera_smm.so`: Debian, Fedora, Arch."""

PROVIDER: Final = {
    # Noticed soon, and not at each pause of a machine that many tests share.
    "evs.keepalive_period": "PT0.3S",
    "evs.inactive_check_period": "PT0.3S",
    "evs.suspect_timeout": "PT2S",
    "evs.inactive_timeout": "PT4S",
    "evs.install_timeout": "PT4S",
    "gcache.size": "64M",
    # A killed node must ask the others, and not go on as it was before.
    "pc.recovery": "false",
}

SYNCED: Final = "Synced"

_GROUP, _STATES, _SNAPSHOTS = 3_000, 5_000, 7_000
"""What is added to the port of a node for each of its others: the group, incremental states and snapshots. Below what systems
give to clients, which would take one while its node is down."""

_POSITION: Final = re.compile(r"Recovered position:\s*(\S+:-?\d+)")


def library() -> Path | None:
    """Return Galera's library on this machine."""
    found = (Path(folder) / "libgalera_smm.so" for folder in LIBRARIES)
    return next((path for path in found if path.exists()), None)


def require_galera() -> tuple[Path, Path]:
    """Return the program of MariaDB and Galera's library, or end the test."""
    program, found = require_mariadb(), library()
    if found is None or shutil.which("rsync") is None:
        missing("Galera", remedy="Install your system's packages of it, such as Debian's galera-4 and rsync.")
    return program, found


class GaleraNode(MariaDbServer):
    """One node, which is synced when the constructor returns. The first of a cluster founds it."""

    def __init__(
        self, program: Path, provider: Path, others: list[GaleraNode], *, source: Path | None, arguments: Sequence[str]
    ) -> None:
        self._library = ["--wsrep-on=ON", "--binlog-format=ROW", f"--wsrep-provider={provider}"]
        self._others = others
        self._source = source
        super().__init__(program, arguments=arguments)

    def status(self, name: str) -> str:
        """Return one of the `wsrep_…` states by which it describes itself. Empty: it does not answer."""
        try:
            connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root", read_timeout=5)
            with connection, connection.cursor() as cursor:
                cursor.execute(f"SHOW STATUS LIKE '{name}'")
                row = cursor.fetchone()
                return "" if row is None else str(row[1])
        except pymysql.Error:
            return ""

    @property
    def synced(self) -> bool:
        """Whether it is in the majority, and takes work."""
        return self.status("wsrep_local_state_comment") == SYNCED and self.status("wsrep_ready") == "ON"

    def waits(self) -> bool:
        """Whether a statement waits there for what other nodes have committed, or for a lock of all tables."""
        connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root")
        with connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM information_schema.processlist"
                " WHERE command = 'Query' AND info LIKE '%idempotency_records%' AND id <> connection_id()"
            )
            (count,) = cursor.fetchone() or (0,)
            return bool(count)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def isolate(self) -> None:
        """Cut it off from the other nodes, and return when it knows. Its clients still reach it."""
        self.execute("SET GLOBAL wsrep_provider_options = 'gmcast.isolate=1'")
        if not eventually(lambda: self.status("wsrep_ready") == "OFF"):
            raise ServerFailed("the node did not notice that it is alone")

    def rejoin(self) -> None:
        """Let it reach the others again."""
        self.execute("SET GLOBAL wsrep_provider_options = 'gmcast.isolate=0'")

    def halt(self) -> None:
        """End it as an operator does, so that it notes where it was."""
        self._end()

    def copied(self) -> Path:
        """Return a copy of its data, in a folder for another node. It must not run."""
        folder = private_folder()
        command = ["/bin/cp", "-r", "--sparse=always", str(self.folder / "data"), str(folder / "data")]
        if launch(command, folder=folder).wait(START_SECONDS) != 0:
            shutil.rmtree(folder, ignore_errors=True)
            raise ServerFailed("the data of a node could not be copied")
        return folder

    def _make_data(self) -> None:
        if self._source is None:
            super()._make_data()
            return
        shutil.rmtree(self.folder)
        self.folder = self._source

    def _start(self, port: int) -> None:
        others = [f"127.0.0.1:{node.port + _GROUP}" for node in self._others if node is not self and node.running]
        options = {**PROVIDER, "ist.recv_addr": f"127.0.0.1:{port + _STATES}"}
        options["gmcast.listen_addr"] = f"tcp://127.0.0.1:{port + _GROUP}"
        before = list(self._arguments)
        self._arguments += [
            *self._library,
            "--innodb-autoinc-lock-mode=2",
            f"--wsrep-provider-options={';'.join(f'{name}={value}' for name, value in options.items())}",
            "--wsrep-cluster-name=idempotency",
            f"--wsrep-cluster-address=gcomm://{','.join(others)}",
            f"--wsrep-node-address=127.0.0.1:{port + _GROUP}",
            f"--wsrep-sst-receive-address=127.0.0.1:{port + _SNAPSHOTS}",
            "--wsrep-sst-method=rsync",
            "--wsrep-slave-threads=2",
            *self._position(),
        ]
        try:
            super()._start(port)
        finally:
            self._arguments = before
        self.port = port
        if not eventually(lambda: self.synced):
            raise ServerFailed(f"this node did not join the cluster:\n{self.log[-4000:]}")

    def _position(self) -> list[str]:
        """Return where a killed node was, so that the others send it only what it has missed."""
        state = self.folder / "data" / "grastate.dat"
        if not state.exists() or "seqno:   -1" not in state.read_text():
            return []
        before = len(self.log)
        options = ["--no-defaults", f"--datadir={self.folder / 'data'}", "--wsrep-recover", "--skip-networking"]
        options += ["--wsrep-cluster-address=gcomm://127.0.0.1"]
        options += ["--socket=r", "--pid-file=recover", "--innodb-buffer-pool-size=64M"]
        process = launch(
            [str(self._program), *options, *self._library],
            folder=self.folder,
            environment=self._environment,
        )
        process.wait(START_SECONDS)
        found = _POSITION.search(self.log, before)
        return [] if found is None else [f"--wsrep-start-position={found[1]}"]


class GaleraCluster:
    """Three nodes, each synced when the constructor returns."""

    def __init__(self, *, arguments: Sequence[str] = ()) -> None:
        program, provider = require_galera()
        self.nodes: list[GaleraNode] = []
        try:
            first = GaleraNode(program, provider, self.nodes, source=None, arguments=arguments)
            self.nodes.append(first)
            # The others begin as copies of it, so that none needs a snapshot. Then it founds the cluster a second time.
            first.halt()
            copies = [first.copied() for _ in range(NODES - 1)]
            first.restart()
            for copy in copies:
                self.nodes.append(GaleraNode(program, provider, self.nodes, source=copy, arguments=arguments))
        except BaseException:
            self.stop()
            raise

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Yield the name of an empty database, and drop it at the end."""
        name = f"test_{uuid.uuid4().hex}"
        self.nodes[0].create_database(name)
        yield name
        self.mend()
        self.nodes[0].execute(f"DROP DATABASE {name}")

    @property
    def whole(self) -> bool:
        """Whether all nodes are synced, and know each other."""
        return all(node.synced and node.status("wsrep_cluster_size") == str(NODES) for node in self.nodes)

    def mend(self) -> None:
        """Bring back each node that is not synced. At least two must be."""
        for node in self.nodes:
            if not node.running:
                node.restart()
            elif not node.synced:
                node.rejoin()
        if not eventually(lambda: self.whole):
            raise ServerFailed("the cluster did not become whole")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Balancer(TcpProxy):
    """Leads new connections to the node that it was turned to last, as a balancer does. Old ones stay where they are."""

    def __init__(self, nodes: Sequence[GaleraNode]) -> None:
        # Records and the sessions of an application both send it.
        super().__init__(nodes[0].port, marker=b"\3COMMIT")

    def lose_nothing(self) -> list[str]:
        """Forget the losses that have met no request, and return them."""
        left: list[str] = list(self._losses)
        self._losses.clear()
        return left

    def turn_to(self, node: GaleraNode) -> None:
        self._upstream = ("127.0.0.1", node.port)

    def url(self, database: str) -> str:  # type: ignore[override]
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/{database}"
