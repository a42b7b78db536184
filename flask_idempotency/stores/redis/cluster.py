"""A Cluster as its nodes describe it: which of them keeps which slot, and how a command gets to it."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import redis
from redis.crc import key_slot

from flask_idempotency.engine.forks import after_fork
from flask_idempotency.stores.redis.connection import (
    RETRIES,
    UNREACHABLE,
    Command,
    RetryBudget,
    Tries,
    demoted,
    exchange,
    key_of,
)
from flask_idempotency.stores.redis.urls import Address

SLOTS: Final = 16384

LOOK_SECONDS: Final = 1.5
"""Once a look at the Cluster has taken this long, nobody else is asked: time for one silent node and one that tells."""

LONG_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 1.0
"""A node that was waited for this long in vain is not waited for by others meanwhile: one at a time finds out whether it is
back, and all the others keep their threads for nodes that answer."""

FRESH_SECONDS: Final = 1.0
"""After one redirection there are many: a look less old than this is not repeated for them."""


class NoCluster(redis.exceptions.ClusterError):
    """Who was asked keeps no slots: it is a server of its own, and no part of a Cluster."""


class Node:
    """One server of a Cluster. `client` speaks to it alone, and goes nowhere else."""

    def __init__(self, address: Address, client: redis.Redis) -> None:
        self.address = address
        self.client = client
        self.name = f"{address.host}:{address.port}"

    @property
    def pool(self) -> Any:
        return self.client.connection_pool


class Cluster:
    """Knows which node keeps a slot. Nothing is asked before the first call, so it can be made while all of them are down.

    Everything raises what redis-py raises when no node tells anything. Those that must know at the same time share one
    look: of many threads one asks, and all have its answer, or its failure.
    """

    def __init__(self, seeds: Sequence[Address], make_client: Callable[[Address], redis.Redis]) -> None:
        self._seeds = tuple(seeds)
        self._make_client = make_client
        self._nodes: dict[Address, Node] = {}
        self._keepers: list[Address | None] = []
        self._others: tuple[Address, ...] = ()
        self._silent = set[Address]()
        self._refused_until: dict[Address, float] = {}
        self._looked_at = float("-inf")
        self.looks = 0
        """How many times it was looked at, in vain or not."""
        self._lock = threading.Lock()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        """In a child: the thread that was looking while its parent forked is not here to finish."""
        self._lock = threading.Lock()

    def keeper(self, key: bytes) -> Node:
        """The primary that keeps this key, as far as is known."""
        keepers = self._known()
        address = keepers[key_slot(key)]
        if address is None:
            raise redis.exceptions.ClusterDownError("CLUSTERDOWN no node keeps this slot")
        return self.node(address)

    def node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            # Of two that make one at once the second takes the first one's.
            node = self._nodes.setdefault(address, Node(address, self._make_client(address)))
        return node

    def moved(self, error: redis.exceptions.AskError, *, by: Node) -> Node:
        """Whom this redirection names. One for good is remembered, and makes the next look due."""
        node = self.node(Address(by.address.host if error.host in ("", "?") else error.host, error.port))
        if isinstance(error, redis.exceptions.MovedError) and self._keepers:
            self._keepers[error.slot_id] = node.address
            if time.monotonic() - self._looked_at > FRESH_SECONDS:
                self.look_if_possible(since=self.looks)
        return node

    def look(self, *, since: int, failed: Node | None = None) -> None:
        """Asks who keeps what, unless somebody has since that many looks. `failed` is asked last, now and later."""
        with self._lock:
            if self.looks == since:
                if failed is not None:
                    self._silent.add(failed.address)
                try:
                    self._look()
                finally:
                    self.looks += 1
                    self._looked_at = time.monotonic()
        if not self._keepers:
            raise redis.exceptions.ConnectionError("no node of the Cluster answers")

    def look_if_possible(self, *, since: int, failed: Node | None = None) -> None:
        """The same for whom what is known will do, if nobody tells anything."""
        with suppress(*UNREACHABLE, redis.exceptions.RedisError):
            self.look(since=since, failed=failed)

    def silent_for(self, seconds: float, node: Node) -> None:
        """This node has kept a call waiting for so long, in vain: for a moment nobody else is to wait for it."""
        if seconds >= LONG_SECONDS:
            self._refused_until[node.address] = time.monotonic() + REFUSED_SECONDS

    def refuse_silent(self, key: bytes) -> None:
        """Raises where whoever keeps this key is a node that somebody has just waited for in vain."""
        if not self._refused_until or not self._keepers:
            return
        address = self._keepers[key_slot(key)]
        if address is not None and self._refused_until.get(address, 0.0) > time.monotonic():
            raise redis.exceptions.ConnectionError("the node did not answer a moment ago")

    def get_primaries(self) -> list[Node]:
        """All that keep something. Named, like what follows, as redis-py's own client of a Cluster has it."""
        return [self.node(address) for address in sorted({each for each in self._known() if each is not None})]

    def pubsub(self) -> Any:
        """A subscriber at any node that is up, as far as is known: they tell each other what is published."""
        self._known()
        client: Any = self.node(self._to_ask()[0]).client
        return client.pubsub()

    def execute_command(self, *command: Any, target_nodes: Node, **options: Any) -> Any:
        """What this node answers, on one try."""
        client: Any = target_nodes.client
        return self._at(target_nodes, lambda: client.execute_command(*command, **options))

    def info(self, section: str | None = None, *, target_nodes: Node) -> Any:
        return self._at(target_nodes, lambda: target_nodes.client.info(section))

    def config_get(self, pattern: str, *, target_nodes: Node) -> Any:
        return self._at(target_nodes, lambda: target_nodes.client.config_get(pattern))

    @property
    def any_pool(self) -> Any:
        """Of any node: all are connected to in the same way."""
        return self.node(self._seeds[0]).pool

    @property
    def unknown(self) -> bool:
        """Whether nobody has told anything yet."""
        return not self._keepers

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.client.close()

    def _at(self, node: Node, ask: Callable[[], Any]) -> Any:
        looks = self.looks
        try:
            return ask()
        except UNREACHABLE:
            # It may have been replaced: whoever asks for all primaries once more must not get it again.
            self.look_if_possible(since=looks, failed=node)
            raise

    def _known(self) -> list[Address | None]:
        if not self._keepers:
            self.look(since=self.looks)
        return self._keepers

    def _look(self) -> None:
        until = time.monotonic() + LOOK_SECONDS
        error: Exception | None = None
        for address in self._to_ask():
            try:
                (told,) = exchange(self.node(address).pool, [("CLUSTER", "SLOTS")])
            except UNREACHABLE as lost:
                self._silent.add(address)
                error = lost
            else:
                self._silent.discard(address)
                if isinstance(told, Exception):
                    error = told
                elif told:
                    self._learn(told, by=address)
                    return
            if time.monotonic() > until:
                break
        if error is not None and "cluster support disabled" in str(error):
            raise NoCluster("not a Cluster") from error
        raise error or redis.exceptions.ClusterDownError("CLUSTERDOWN no node keeps any slot")

    def _to_ask(self) -> list[Address]:
        """Those that keep something first: they are the likeliest to be up, and to know."""
        keepers = list({address for address in self._keepers if address is not None})
        others = [*self._others, *self._seeds]
        random.shuffle(keepers)
        random.shuffle(others)
        return sorted(dict.fromkeys((*keepers, *others)), key=self._silent.__contains__)

    def _learn(self, told: Sequence[Any], *, by: Address) -> None:
        keepers: list[Address | None] = [None] * SLOTS
        others = set[Address]()
        for first, last, primary, *replicas in told:
            keeper = _named(primary, by)
            keepers[first : last + 1] = [keeper] * (last + 1 - first)
            others.update(_named(replica, by) for replica in replicas)
        self._keepers = keepers
        self._others = tuple(others)
        for address in set(self._nodes) - {*keepers, *others, *self._seeds}:
            if (gone := self._nodes.pop(address, None)) is not None:
                gone.pool.disconnect(inuse_connections=False)


def _named(told: Sequence[Any], by: Address) -> Address:
    """A node that does not know its own name is where it was asked."""
    host = told[0].decode() if told[0] else ""
    return Address(by.host if host in ("", "?") else host, told[1])


def primaries(client: Any) -> list[tuple[bytes, Any]]:
    """The primaries of a Cluster by their names, so that they are always in the same order; else one without either."""
    if not hasattr(client, "get_primaries"):
        return [(b"", None)]
    return sorted(((str(node.name).encode(), node) for node in client.get_primaries()), key=lambda named: named[0])


MOST_REDIRECTIONS: Final = 5
"""Two are ordinary while a slot moves. More come from nodes that do not agree, and sooner or later they do."""

_AWAY: Final = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)
"""MOVED is an ASK to redis-py. To nobody else: see `Cluster.moved`."""


class ClusterConnection:
    """One round trip to one node for a command, or for all that one node keeps.

    Follows MOVED and ASK. A node that does not answer, or answers that it cannot, is asked again after a look at the
    Cluster, for as long and as often as a server of its own would be.
    """

    def __init__(self, cluster: Cluster, *, retries: int = RETRIES) -> None:
        self._cluster = cluster
        self._retries = retries

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        (told,) = self.pipeline_one_node([command], tries=tries)
        if isinstance(told, Exception):
            raise told
        return told

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        key = key_of(commands[0])
        self._cluster.refuse_silent(key)
        patience = RetryBudget(self._retries, tries)
        redirections = 0
        asked: Node | None = None
        while True:
            looks, node = self._cluster.looks, asked
            try:
                node = asked or self._cluster.keeper(key)
                answers = exchange(node.pool, commands, asking=asked is not None)
            except (*UNREACHABLE, redis.exceptions.ClusterDownError) as error:
                asked = None
                self._failed(patience, error, node, looks)
                continue
            asked = None
            first = answers[0]
            if isinstance(first, redis.exceptions.AskError):
                redirections += 1
                if redirections > MOST_REDIRECTIONS:
                    raise first
                led_to = self._cluster.moved(first, by=node)
                asked = None if isinstance(first, redis.exceptions.MovedError) else led_to
            elif isinstance(first, _AWAY) or demoted(first):
                self._failed(patience, first, node, looks)
            else:
                return answers

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        told: dict[int, Any] = {}
        left = list(range(len(commands)))
        patience = RetryBudget(self._retries)
        while left:
            looks, lost = self._cluster.looks, list[tuple[Exception, Node | None]]()
            for node, some in self._by_node(commands, left, lost).items():
                try:
                    answers = exchange(node.pool, [commands[at] for at in some])
                except UNREACHABLE as error:
                    lost.append((error, node))
                    continue
                for at, answer in zip(some, answers, strict=True):
                    away = isinstance(answer, _AWAY) or demoted(answer)
                    told[at] = self.pipeline_one_node([commands[at]])[0] if away else answer
            left = [at for at in left if at not in told]
            if lost:
                self._failed(patience, *lost[0], looks)
        return [told[at] for at in range(len(commands))]

    def _by_node(
        self, commands: Sequence[Command], left: Sequence[int], lost: list[tuple[Exception, Node | None]]
    ) -> dict[Node, list[int]]:
        by_node = defaultdict[Node, list[int]](list)
        try:
            for at in left:
                by_node[self._cluster.keeper(key_of(commands[at]))].append(at)
        except (*UNREACHABLE, redis.exceptions.ClusterDownError) as error:
            lost.append((error, None))
            return {}
        return by_node

    def _failed(self, patience: RetryBudget, error: Exception, node: Node | None, looks: int) -> None:
        """Makes ready for another try, or raises."""
        try:
            patience.failed(error)
        except Exception:
            if node is not None:
                self._cluster.silent_for(patience.seconds, node)
            raise
        if not self._cluster.unknown:  # Else whoever needs a node looks for one.
            self._cluster.look_if_possible(since=looks, failed=node)
