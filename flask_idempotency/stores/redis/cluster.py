"""A client of Redis Cluster: which node owns each slot, and how a command reaches that node."""

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
    NoCluster,
    RetryBudget,
    Tries,
    demoted,
    exchange,
    key_of,
)
from flask_idempotency.stores.redis.urls import Address

SLOTS: Final = 16384

LOOK_SECONDS: Final = 1.5
"""After this time a look at the Cluster tries no further node. It suffices for one silent node and one that answers."""

LONG_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 1.0
"""If a node keeps a call waiting for `LONG_SECONDS`, other calls to it fail immediately for `REFUSED_SECONDS`.

So one call at a time finds out whether it is back, and the other threads stay free for nodes that answer.
"""

FRESH_SECONDS: Final = 1.0
"""Redirections come in numbers: they do not repeat a look that is younger than this."""


class Node:
    """One server of a Cluster. `client` connects to this server only."""

    def __init__(self, address: Address, client: redis.Redis) -> None:
        self.address = address
        self.client = client
        self.name: str = f"{address.host}:{address.port}"

    @property
    def pool(self) -> Any:
        return self.client.connection_pool


class Cluster:
    """Know which node owns each slot. The first call connects, so you can make a `Cluster` while all nodes are down.

    Every method raises redis-py's errors if no node answers. Threads that need the slots at the same time share one look:
    one thread sends it, and all get its result or its failure.
    """

    def __init__(self, seeds: Sequence[Address], make_client: Callable[[Address], redis.Redis]) -> None:
        self._seeds = tuple(seeds)
        self._make_client = make_client
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Address | None] = []
        self._others: tuple[Address, ...] = ()
        self._silent = set[Address]()
        self._refused_until: dict[Address, float] = {}
        self._looked_at = float("-inf")
        self.looks: int = 0
        """The number of looks so far, including failed ones."""
        self._lock = threading.Lock()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        """Replace the lock in a forked child: the thread that held it exists only in the parent."""
        self._lock = threading.Lock()

    def owner(self, key: bytes) -> Node:
        """Return the primary that owns this key's slot, by the last look."""
        address = self._known_owners()[key_slot(key)]
        if address is None:
            raise redis.exceptions.ClusterDownError("CLUSTERDOWN no node owns this slot")
        return self.node(address)

    def node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            # If two threads make one at the same time, both use the first.
            node = self._nodes.setdefault(address, Node(address, self._make_client(address)))
        return node

    def moved(self, error: redis.exceptions.AskError, *, by: Node) -> Node:
        """Return the node that this redirection names. Remember a MOVED, and look at the Cluster again."""
        node = self.node(Address(by.address.host if error.host in ("", "?") else error.host, error.port))
        if isinstance(error, redis.exceptions.MovedError) and self._owners:
            self._owners[error.slot_id] = node.address
            if time.monotonic() - self._looked_at > FRESH_SECONDS:
                self.look_if_possible(since=self.looks)
        return node

    def look(self, *, since: int, failed: Node | None = None) -> None:
        """Ask a node for all slots, unless another thread has looked after look number `since`.

        Try the node `failed` last, now and later. Raises redis-py's errors if no node has ever answered.
        """
        with self._lock:
            if self.looks == since:
                if failed is not None:
                    self._silent.add(failed.address)
                try:
                    self._look()
                finally:
                    self.looks += 1
                    self._looked_at = time.monotonic()
        if not self._owners:
            raise redis.exceptions.ConnectionError("no node of the Cluster answers")

    def look_if_possible(self, *, since: int, failed: Node | None = None) -> None:
        """Look again, but keep the known slots if no node answers. Before the first look, `owner` looks."""
        if not self._owners:
            return
        with suppress(*UNREACHABLE, redis.exceptions.RedisError):
            self.look(since=since, failed=failed)

    def silent_for(self, seconds: float, node: Node) -> None:
        """Record that a call waited this long for the node in vain. If it was long, `refuse_silent` refuses the node."""
        if seconds >= LONG_SECONDS:
            self._refused_until[node.address] = time.monotonic() + REFUSED_SECONDS

    def refuse_silent(self, key: bytes) -> None:
        """Raise `ConnectionError` if the owner of this key has just kept a call waiting in vain."""
        if not self._refused_until or not self._owners:
            return
        address = self._owners[key_slot(key)]
        if address is not None and self._refused_until.get(address, 0.0) > time.monotonic():
            raise redis.exceptions.ConnectionError("the node did not answer the previous call")

    def get_primaries(self) -> list[Node]:
        """Return all primaries that own slots. redis-py's Cluster client has the same method names from here on."""
        return [self.node(address) for address in sorted({each for each in self._known_owners() if each is not None})]

    def pubsub(self) -> Any:
        """Return a subscriber at any node that answers: the nodes forward messages to each other."""
        self._known_owners()
        client: Any = self.node(self._in_order()[0]).client
        return client.pubsub()

    def execute_command(self, *command: Any, target_nodes: Node, **options: Any) -> Any:
        """Send a command to this node once."""
        looks = self.looks
        client: Any = target_nodes.client
        try:
            return client.execute_command(*command, **options)
        except UNREACHABLE:
            # A replica may have replaced this node: the next `get_primaries` must not return it again.
            self.look_if_possible(since=looks, failed=target_nodes)
            raise

    def info(self, *, target_nodes: Node) -> Any:
        return self.execute_command("INFO", target_nodes=target_nodes)

    def config_get(self, pattern: str, *, target_nodes: Node) -> Any:
        return self.execute_command("CONFIG GET", pattern, target_nodes=target_nodes)

    @property
    def any_pool(self) -> Any:
        """The connection pool of one node: all nodes have the same options."""
        return self.node(self._seeds[0]).pool

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.client.close()

    def _known_owners(self) -> list[Address | None]:
        if not self._owners:
            self.look(since=self.looks)
        return self._owners

    def _look(self) -> None:
        until = time.monotonic() + LOOK_SECONDS
        error: Exception | None = None
        for address in self._in_order():
            try:
                (reply,) = exchange(self.node(address).pool, [("CLUSTER", "SLOTS")])
            except UNREACHABLE as failure:
                self._silent.add(address)
                error = failure
            else:
                self._silent.discard(address)
                if isinstance(reply, Exception):
                    error = reply
                elif reply:
                    self._update(reply, by=address)
                    return
            if time.monotonic() > until:
                break
        if error is not None and "cluster support disabled" in str(error):
            raise NoCluster("not a Cluster") from error
        raise error or redis.exceptions.ClusterDownError("CLUSTERDOWN no node owns any slot")

    def _in_order(self) -> list[Address]:
        """Return the addresses to try: owners of slots first, silent nodes last."""
        owners = list({address for address in self._owners if address is not None})
        others = [*self._others, *self._seeds]
        random.shuffle(owners)
        random.shuffle(others)
        return sorted(dict.fromkeys((*owners, *others)), key=self._silent.__contains__)

    def _update(self, reply: Sequence[Any], *, by: Address) -> None:
        owners: list[Address | None] = [None] * SLOTS
        others = set[Address]()
        for first, last, primary, *replicas in reply:
            owners[first : last + 1] = [_address_of(primary, by)] * (last + 1 - first)
            others.update(_address_of(replica, by) for replica in replicas)
        self._owners = owners
        self._others = tuple(others)
        for address in set(self._nodes) - {*owners, *others, *self._seeds}:
            if (gone := self._nodes.pop(address, None)) is not None:
                gone.pool.disconnect(inuse_connections=False)


def _address_of(node: Sequence[Any], by: Address) -> Address:
    """Return the address of a node in a reply. A node that does not know its own host is the node that replied."""
    host = node[0].decode() if node[0] else ""
    return Address(by.host if host in ("", "?") else host, node[1])


MOST_REDIRECTIONS: Final = 5
"""Two are usual while a slot moves. More come from nodes that do not yet agree on an owner."""

_AWAY: Final = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)
"""In redis-py, `MovedError` is a subclass of `AskError`; `Cluster.moved` tells them apart."""


class ClusterConnection:
    """Send commands to the nodes that own their keys, in one round trip to each node.

    Follow MOVED and ASK. If a node does not answer or has lost its slots, look at the Cluster and try again. The retries
    and the time are those of a single server.
    """

    def __init__(self, cluster: Cluster, *, retries: int = RETRIES) -> None:
        self._cluster = cluster
        self._retries = retries

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        (reply,) = self.pipeline_one_node([command], tries=tries)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        key = key_of(commands[0])
        self._cluster.refuse_silent(key)
        budget = RetryBudget(self._retries, tries)
        redirections = 0
        importing: Node | None = None
        """The node that an ASK named."""
        while True:
            looks, node = self._cluster.looks, importing
            try:
                node = importing or self._cluster.owner(key)
                replies = exchange(node.pool, commands, asking=importing is not None)
            except (*UNREACHABLE, redis.exceptions.ClusterDownError) as error:
                importing = None
                self._failed(budget, error, node, looks)
                continue
            importing = None
            first = replies[0]
            if isinstance(first, redis.exceptions.AskError):
                redirections += 1
                if redirections > MOST_REDIRECTIONS:
                    raise first
                target = self._cluster.moved(first, by=node)
                importing = None if isinstance(first, redis.exceptions.MovedError) else target
            elif isinstance(first, _AWAY) or demoted(first):
                self._failed(budget, first, node, looks)
            else:
                return replies

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        replies: dict[int, Any] = {}
        left = list(range(len(commands)))
        budget = RetryBudget(self._retries)
        while left:
            looks, failures = self._cluster.looks, list[tuple[Exception, Node | None]]()
            by_node = defaultdict[Node, list[int]](list)
            try:
                for at in left:
                    by_node[self._cluster.owner(key_of(commands[at]))].append(at)
            except (*UNREACHABLE, redis.exceptions.ClusterDownError) as error:
                failures.append((error, None))
                by_node.clear()
            for node, some in by_node.items():
                try:
                    of_node = exchange(node.pool, [commands[at] for at in some])
                except UNREACHABLE as error:
                    failures.append((error, node))
                    continue
                for at, reply in zip(some, of_node, strict=True):
                    away = isinstance(reply, _AWAY) or demoted(reply)
                    replies[at] = self.pipeline_one_node([commands[at]])[0] if away else reply
            left = [at for at in left if at not in replies]
            if failures:
                self._failed(budget, *failures[0], looks)
        return [replies[at] for at in range(len(commands))]

    def _failed(self, budget: RetryBudget, error: Exception, node: Node | None, looks: int) -> None:
        """Prepare another try, or raise `error` when the budget is spent."""
        try:
            budget.failed(error)
        except Exception:
            if node is not None:
                self._cluster.silent_for(budget.seconds, node)
            raise
        self._cluster.look_if_possible(since=looks, failed=node)
