"""A primary, its two replicas, and three Sentinels that watch them: to be broken, and mended for the next test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from example_app.demo.servers import RedisServer
from tests.lab.nodes import Node
from tests.lab.redis import RedisServers
from tests.tooling.processes import eventually

NAME: Final = "payments"
QUORUM: Final = 2

DOWN_AFTER_MS: Final = 2000
"""They ask once a second. With less than two of them, a new primary counts as down before it was asked at all, and another
failover takes its place."""

FAILOVER_TIMEOUT_MS: Final = 3000
"""They start no second failover by themselves for twice as long."""

ARGUMENTS: Final = ("--repl-diskless-sync-delay", "0", "--repl-diskless-sync", "yes")


class SentinelServer(RedisServer):
    """A Sentinel that watches nothing yet."""

    def options(self, port: int) -> list[str]:
        # It keeps what it knows there, and refuses to start without one.
        config = self.folder / "sentinel.conf"
        config.touch()
        return [str(config), "--sentinel", *super().options(port)]


class SentinelRig:
    """Three servers and three Sentinels, ready when the constructor returns.

    Servers and Sentinels are `Node`s. Of the replicas that answer, the first in `nodes` is the heir.
    """

    def __init__(self, program: Path, *, arguments: Sequence[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.sentinels: list[Node] = []
        try:
            for number in range(3):
                # By priority, which goes before what they have: a replica that lags is promoted as well.
                priority = ("--replica-priority", str(number + 1))
                self.nodes.append(Node(RedisServer(program, arguments=[*ARGUMENTS, *priority, *arguments])))
            for _ in range(3):
                self.sentinels.append(Node(SentinelServer(program)))
            self._form()
        except BaseException:
            self.stop()
            raise

    def _form(self) -> None:
        primary, *replicas = self.nodes
        self._copy(primary, replicas)
        self._watch(primary)
        self.settled()

    def _watch(self, primary: Node) -> None:
        for sentinel in self.sentinels:
            sentinel.told("SENTINEL MONITOR", NAME, "127.0.0.1", primary.port, QUORUM)
            sentinel.told("SENTINEL SET", NAME, "down-after-milliseconds", DOWN_AFTER_MS)
            sentinel.told("SENTINEL SET", NAME, "failover-timeout", FAILOVER_TIMEOUT_MS)
            sentinel.told("SENTINEL SET", NAME, "parallel-syncs", 2)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of all Sentinels, whether they answer or not."""
        return [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]

    @property
    def url(self) -> str:
        """As the library takes it."""
        return f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in self.addresses)}/{NAME}/0"

    @property
    def primary(self) -> Node:
        """By the word of the first Sentinel that answers."""
        return self._primary_of(next(sentinel for sentinel in self.sentinels if sentinel.awake))

    @property
    def replicas(self) -> list[Node]:
        """The other servers that answer, the heir first."""
        primary = self.primary
        return [node for node in self.nodes if node is not primary and node.awake]

    def client(self, **options: Any) -> redis.Redis:
        """A client as applications have it, for the test's own looks. Close it."""
        # A silent one would be asked eleven times before the next.
        asking = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 1}
        sentinels: Any = Sentinel(self.addresses, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        client: redis.Redis = sentinels.master_for(NAME, socket_timeout=5, **options)
        return client

    def fail_over(self) -> Node:
        """Have the heir promoted, whether the primary lives or not, and wait for it. The new primary.

        The second time in a test it may take ten seconds until the Sentinels know of the next heir.
        """
        heir = self.replicas[0]
        sentinel = next(sentinel for sentinel in self.sentinels if sentinel.awake)
        assert eventually(lambda: self._sees(sentinel, heir)), "the heir is not known"
        sentinel.told("SENTINEL FAILOVER", NAME)
        self.promoted(heir)
        return heir

    def promoted(self, replica: Node) -> None:
        """Wait until all Sentinels that answer have this replica for the primary, and are done with it.

        Whoever leads a failover names both until its end: the new one to who asks for the address, and the old one to
        who asks for everything, as redis-py does.
        """

        def done() -> bool:
            awake = [sentinel for sentinel in self.sentinels if sentinel.awake]
            seen = {int(self._told(sentinel)["port"]) for sentinel in awake}
            return seen == {replica.port} and replica.replication["role"] == "master"

        assert eventually(done), "it was never promoted"

    def counts_as_down(self, node: Node) -> None:
        """Wait until all Sentinels that answer have no word from the primary, which this one is or was."""

        def given_up(sentinel: Node) -> bool:
            told = self._told(sentinel)
            return int(told["port"]) != node.port or "s_down" in told["flags"].split(",")

        assert eventually(lambda: all(given_up(one) for one in self.sentinels if one.awake)), "they never noticed"

    def settled(self) -> None:
        """Wait until all that answer agree, and every server that answers is the primary or has all that it has."""
        assert eventually(self._agreed), str([self._told(sentinel) for sentinel in self.sentinels if sentinel.awake])

    def mend(self) -> None:
        """All run, two replicas copy one primary, the Sentinels know it, and nothing is kept anywhere.

        Who is the primary stays as the last test has left it.
        """
        for sentinel in self.sentinels:
            self._wake(sentinel)
        for node in self.nodes:
            if not node.server.running:
                node.restart()
            node.resume()
            node.stop_lagging()
        assert eventually(self._has_primary), "the Sentinels agree on none"
        primary = self.primary
        replicas = [node for node in self.nodes if node is not primary]
        self._copy(primary, replicas)
        if not all(self._sees(sentinel, replica) for sentinel in self.sentinels for replica in replicas):
            # They ask a replica every ten seconds, and whom they asked while it was a primary they know nothing of.
            for sentinel in self.sentinels:
                sentinel.told("SENTINEL REMOVE", NAME)
            self._watch(primary)
        self.settled()
        primary.told("FLUSHALL")
        primary.told("SCRIPT FLUSH")
        for replica in self.replicas:
            replica.has_all_of(primary)

    def stop(self) -> None:
        # The Sentinels first: they would fail over what we stop.
        for node in [*self.sentinels, *self.nodes]:
            node.stop()

    def _copy(self, primary: Node, replicas: Sequence[Node]) -> None:
        for replica in replicas:
            if int(replica.replication.get("master_port", 0)) != primary.port:
                replica.told("REPLICAOF", "127.0.0.1", primary.port)
        for replica in replicas:
            assert eventually(replica.in_step), "it never came into step"

    def _wake(self, sentinel: Node) -> None:
        # One that was silent, or thinks so of its machine, trusts itself for half a minute no more than a new one.
        if not sentinel.awake or sentinel.client.info("sentinel")["sentinel_tilt"]:
            sentinel.restart()

    def _told(self, sentinel: Node) -> dict[str, Any]:
        told = sentinel.client.execute_command("SENTINEL", "MASTER", NAME)
        return told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))

    def _primary_of(self, sentinel: Node) -> Node:
        port = int(sentinel.told("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1])
        return next(node for node in self.nodes if node.port == port)

    def _has_primary(self) -> bool:
        seen = {self._primary_of(sentinel) for sentinel in self.sentinels}
        return len(seen) == 1 and seen.pop().replication["role"] == "master"

    def _agreed(self) -> bool:
        try:
            awake = [sentinel for sentinel in self.sentinels if sentinel.awake]
            primary = self.primary
            others = [node for node in self.nodes if node is not primary]
            return (
                all(self._primary_of(sentinel) is primary for sentinel in awake)
                and all(self._told(sentinel)["flags"] == "master" for sentinel in awake)
                and all(int(self._told(sentinel)["num-other-sentinels"]) == 2 for sentinel in awake)
                and all(self._sees(sentinel, node) == node.awake for sentinel in awake for node in others)
                and all(node.in_step() for node in others if node.awake and not node.lagging)
            )
        except RedisError:  # one of them is still loading
            return False

    def _sees(self, sentinel: Node, replica: Node) -> bool:
        told = sentinel.client.execute_command("SENTINEL", "REPLICAS", NAME)
        listed = [one if isinstance(one, dict) else dict(zip(one[::2], one[1::2], strict=True)) for one in told]
        # Each new entry has a priority of its own until the replica was asked for its.
        priority = self.nodes.index(replica) + 1
        return any(
            (int(one["port"]), one["flags"], int(one["slave-priority"])) == (replica.port, "slave", priority)
            for one in listed
        )


class SentinelRigs:
    """Those of this test process, by kind of server: started when first asked for, mended for each test."""

    def __init__(self, servers: RedisServers) -> None:
        self._servers = servers
        self._running: dict[str, SentinelRig] = {}

    def get(self, kind: str) -> SentinelRig:
        if kind in self._running:
            self._running[kind].mend()
        else:
            self._running[kind] = SentinelRig(self._servers.program(kind))
        return self._running[kind]

    def stop(self) -> None:
        for rig in self._running.values():
            rig.stop()
