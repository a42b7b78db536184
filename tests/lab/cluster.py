"""A Cluster of real servers, to be killed, silenced, failed over and resharded; mended for the next test."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import redis
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from example_app.demo.servers import RedisServer, server_programs
from tests.lab.nodes import Node
from tests.lab.redis import RedisServers, connect
from tests.tooling.processes import eventually

SLOTS: Final = 16384

NODE_TIMEOUT_MS: Final = 1500
"""A failover takes this and a second more. Shorter, and a busy machine fails over what nobody has killed."""

ARGUMENTS: Final = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
    *("--cluster-require-full-coverage", "no"),  # the slots of the others are there while one primary is not
    *("--cluster-replica-validity-factor", "0"),  # a replica that has lagged for long is promoted all the same
    *("--cluster-migration-barrier", "9"),  # no replica changes its primary by itself
    *("--repl-diskless-sync-delay", "0"),
    *("--repl-diskless-sync", "yes"),
)

BATCH: Final = 100
MIGRATE_MS: Final = 5000
ALONE_SECONDS: Final = 60.0

View = frozenset[tuple[str, str | None, bool, tuple[tuple[int, int], ...]]]
"""What a server says of all: each one's id, whose replica it is, whether it counts as failed, and its slots."""


class ClusterRig:
    """Three primaries with a replica each, ready when the constructor returns.

    Servers are `Node`s. Their verbs return when the server has done it; what the others think of it comes later, and
    `settled` and `promoted` wait for that.
    """

    def __init__(self, program: Path, *, primaries: int = 3, replicas: int = 1, arguments: Sequence[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.whole = True
        """Until a node was forgotten: none of the others lets it in again for a minute."""
        self._ids: dict[str, Node] = {}
        try:
            for _ in range(primaries * (1 + replicas)):
                self.nodes.append(Node(RedisServer(program, arguments=[*ARGUMENTS, *arguments])))
            self._form(primaries)
        except BaseException:
            self.stop()
            raise

    def _form(self, primaries: int) -> None:
        self._ids = {node.told("CLUSTER MYID"): node for node in self.nodes}
        for number, node in enumerate(self.nodes[:primaries]):
            node.told("CLUSTER SET-CONFIG-EPOCH", number + 1)
            node.told("CLUSTER ADDSLOTS", *range(SLOTS * number // primaries, SLOTS * (number + 1) // primaries))
        for number, node in enumerate(self.nodes):
            for known in self.nodes[:number]:
                node.told("CLUSTER MEET", "127.0.0.1", known.port)
        assert eventually(lambda: all(self._knows_all(node) for node in self.nodes)), "they never met"
        for number, replica in enumerate(self.nodes[primaries:]):
            replica.told("CLUSTER REPLICATE", self.id_of(self.nodes[number % primaries]))
        self.settled()

    @property
    def url(self) -> str:
        """As the library takes it, with every address."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    @property
    def awake(self) -> list[Node]:
        return [node for node in self.nodes if node.awake]

    @property
    def primaries(self) -> list[Node]:
        """Those that have slots, in the order of their first."""
        owners = sorted((slots[0], node) for node, _, _, slots in self._view(self.awake[0]) if slots)
        return [self._ids[node] for _, node in owners]

    def id_of(self, node: Node) -> str:
        return next(name for name, known in self._ids.items() if known is node)

    def primary_of(self, where: str | bytes | int) -> Node:
        """Who answers for this key or slot."""
        slot = where if isinstance(where, int) else slot_of(where)
        for name, _, _, ranges in self._view(self.awake[0]):
            if any(first <= slot <= last for first, last in ranges):
                return self._ids[name]
        raise LookupError(f"nobody answers for slot {slot}")

    def replica_of(self, primary: Node) -> Node:
        """Its replica, the first one that answers."""
        wanted = self.id_of(primary)
        replicas = {name for name, copied, _, _ in self._view(self.awake[0]) if copied == wanted}
        return next(node for node in self.awake if self.id_of(node) in replicas)

    def client(self, **options: Any) -> redis.RedisCluster:
        """A client as applications have it, for the test's own looks. Close it."""
        nodes = [ClusterNode("127.0.0.1", node.port) for node in self.awake]  # type: ignore[no-untyped-call]
        return redis.RedisCluster(startup_nodes=nodes, socket_timeout=5, **options)

    def fail_over(self, replica: Node, *, force: bool = False) -> None:
        """Have this replica promoted, and wait for it. With force it is not even tried to hear the primary first."""
        replica.told("CLUSTER FAILOVER", *(["FORCE"] if force else []))
        self.promoted(replica)

    def promoted(self, replica: Node) -> None:
        """Wait until all that answer have this replica for a primary."""
        name = self.id_of(replica)

        def has_slots(node: Node) -> bool:
            return any(known == name and slots for known, _, _, slots in self._view(node))

        assert eventually(lambda: all(has_slots(node) for node in self.awake)), "it was never promoted"

    def counts_as_failed(self, node: Node) -> None:
        """Wait until the others have given this one up."""
        name = self.id_of(node)

        def given_up(by: Node) -> bool:
            return any(known == name and failed for known, _, failed, _ in self._view(by))

        others = [other for other in self.awake if other is not node]
        assert eventually(lambda: all(given_up(other) for other in others)), "they never gave it up"

    def settled(self) -> None:
        """Wait until all that answer think the same of all, serve, and have the replicas that they should have."""
        assert eventually(self._agreed), self._report()

    def forget(self, node: Node) -> None:
        """All others that answer strike it off. The rig is of no use for another test afterwards."""
        self.whole = False
        for other in self.awake:
            if other is not node:
                other.told("CLUSTER FORGET", self.id_of(node))

    def announce(self, node: Node, port: int) -> None:
        """Have clients sent to this port instead of its own, where a proxy may stand; 0 takes that back. Not on Redis 6."""
        node.client.config_set("cluster-announce-port", port)

        def told(by: Node) -> bool:
            return self._addresses(by)[self.id_of(node)] == (port or node.port)

        assert eventually(lambda: all(told(other) for other in self.awake)), "not all know of the new port"

    def mend(self) -> None:
        """All servers run, none lags or is half-way through a migration, and nothing is kept in any of them.

        Slots and roles stay as the last test has left them.
        """
        for node in self.nodes:
            if not node.server.running:
                node.restart()
            node.resume()
        for node in self.nodes:
            node.stop_lagging()
            node.client.config_set("cluster-announce-port", 0)
        self.settled()
        for node in self.primaries:
            self._stabilise(node)
            node.told("FLUSHALL")
            node.told("SCRIPT FLUSH")
        for node in self.nodes:
            if node not in self.primaries:
                node.has_all_of(self._ids[self._primary_id(node)])

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _stabilise(self, node: Node) -> None:
        for told in node.told("CLUSTER NODES").values():
            for migration in told["migrations"]:
                node.told("CLUSTER SETSLOT", migration["slot"], "STABLE")

    def _knows_all(self, node: Node) -> bool:
        told = node.told("CLUSTER NODES").values()
        return {entry["node_id"] for entry in told} == set(self._ids) and all(
            "handshake" not in entry["flags"] for entry in told
        )

    def _view(self, node: Node) -> View:
        told = node.told("CLUSTER NODES").values()
        return frozenset(
            (
                entry["node_id"],
                None if entry["master_id"] == "-" else entry["master_id"],
                "fail" in entry["flags"].split(","),
                tuple((int(slots[0]), int(slots[-1])) for slots in entry["slots"]),
            )
            for entry in told
        )

    def _addresses(self, node: Node) -> dict[str, int]:
        told = node.told("CLUSTER NODES").items()
        return {entry["node_id"]: int(address.rpartition(":")[2]) for address, entry in told}

    def _primary_id(self, replica: Node) -> str:
        name = self.id_of(replica)
        return next(copied for known, copied, _, _ in self._view(replica) if known == name and copied is not None)

    def _agreed(self) -> bool:
        try:
            views = [self._view(node) for node in self.awake]
            return (
                len(set(views)) == 1
                and all(failed == (not self._ids[name].awake) for name, _, failed, _ in views[0])
                and all(node.told("CLUSTER INFO")["cluster_state"] == "ok" for node in self.awake)
                and all(node.in_step() for node in self.awake if self._should_copy(node, views[0]))
            )
        except RedisError:  # one of them is still loading
            return False

    def _should_copy(self, node: Node, view: View) -> bool:
        name = self.id_of(node)
        copied = next(copied for known, copied, _, _ in view if known == name)
        return copied is not None and self._ids[copied].awake and not node.lagging

    def _report(self) -> str:
        return "\n".join(f"{node.port}: {sorted(self._view(node), key=str)}" for node in self.awake)


def slot_of(key: str | bytes) -> int:
    return int(key_slot(key.encode() if isinstance(key, str) else key))


class ClusterRigs:
    """The Clusters of this test process, by kind of server: started when first asked for, mended for each test."""

    def __init__(self, servers: RedisServers) -> None:
        self._servers = servers
        self._running: dict[str, ClusterRig] = {}

    def get(self, kind: str) -> ClusterRig:
        rig = self._running.get(kind)
        if rig is not None and rig.whole:
            rig.mend()
            return rig
        if rig is not None:
            rig.stop()
        self._running[kind] = ClusterRig(self._servers.program(kind))
        return self._running[kind]

    def stop(self) -> None:
        for rig in self._running.values():
            rig.stop()


class SlotMove:
    """One slot on its way: `begin`, `carry` as often as you like, `end`.

    After `begin` a key that is not at the source is asked for at the target (ASK), and a command on two keys of which
    one has gone is refused (TRYAGAIN: at the source, and before Redis 7 at the target that it is sent to). After `end`
    the target answers for the slot (MOVED).
    """

    def __init__(self, rig: ClusterRig, slot: int, *, to: Node) -> None:
        self.slot = slot
        self.source = rig.primary_of(slot)
        self.target = to
        self._rig = rig

    def begin(self) -> None:
        self._set(self.target, "IMPORTING", self.source)
        self._set(self.source, "MIGRATING", self.target)

    def carry(self, *keys: str | bytes, limit: int | None = None) -> int:
        """Take these keys over, or else all that are there, at most `limit` of them. How many went."""
        wanted = keys or tuple(self.keys(limit))
        for key in wanted:
            target = ("127.0.0.1", self.target.port)
            self.source.told("MIGRATE", *target, "", 0, MIGRATE_MS, "KEYS", key)
        return len(wanted)

    def keys(self, limit: int | None = None) -> list[str]:
        """Those that the source still has, or `limit` of them."""
        found: list[str] = self.source.told("CLUSTER GETKEYSINSLOT", self.slot, BATCH if limit is None else limit)
        return found

    def end(self) -> None:
        """The target has it, by the word of every primary. Until now nothing was decided."""
        # The target first: should the source forget it before the target knows, nobody would have the slot.
        others = [node for node in self._rig.primaries if node.awake and node not in (self.target, self.source)]
        for node in (self.target, self.source, *others):
            self._set(node, "NODE", self.target)

    def run(self) -> None:
        """All of it. While others write into the slot, what they make meanwhile is taken along."""
        self.begin()
        self.finish()

    def finish(self) -> None:
        """What is left of it."""
        while True:
            while self.carry():
                pass
            try:
                self.end()
            except ResponseError as error:
                # Between our last look and this a key was made at the source, which refuses to give it up.
                if "still" not in str(error):
                    raise
            else:
                return

    def _set(self, node: Node, state: str, other: Node) -> None:
        node.told("CLUSTER SETSLOT", self.slot, state, self._rig.id_of(other))


def occupied(node: Node) -> set[int]:
    """The slots that this server has keys in."""
    return {slot_of(key.encode(errors="surrogateescape")) for key in node.client.scan_iter(count=1000)}


def move(rig: ClusterRig, slots: Iterable[int], *, to: Node) -> None:
    """These slots, one after the other, with all that is in them; others may use them meanwhile.

    Those that the target has already stay. A hundred take a second, since Valkey has each step acknowledged by replicas.
    """
    for slot in slots:
        if rig.primary_of(slot) is not to:
            SlotMove(rig, slot, to=to).run()


class Clusters:
    """Clusters of one server, by kind. They refuse a script whose keys are not in one slot, as larger ones would."""

    def __init__(self) -> None:
        self._running: dict[str, RedisServer] = {}
        self._clients: dict[str, Any] = {}

    def client(self, kind: str) -> Any:
        """One for all tests: each would first have to ask which nodes there are."""
        if kind not in self._clients:
            self._clients[kind] = redis.RedisCluster.from_url(self.get(kind).url)
        return self._clients[kind]

    def get(self, kind: str) -> RedisServer:
        if kind not in self._running:
            server = self._running[kind] = RedisServer(server_programs()[kind], arguments=["--cluster-enabled", "yes"])
            with connect(server.url) as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(16384))
                deadline = time.monotonic() + ALONE_SECONDS
                while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    assert time.monotonic() < deadline, "the Cluster of one never said that it is ready"
        return self._running[kind]

    def stop(self) -> None:
        for client in self._clients.values():
            client.close()
        for server in self._running.values():
            server.stop()
