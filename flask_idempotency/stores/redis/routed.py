"""Commands to whichever node of a Cluster keeps their keys, on a way that is found anew when it ends nowhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import redis

from flask_idempotency.stores.redis.lines import (
    RETRIES,
    UNREACHABLE,
    Command,
    Patience,
    Tries,
    demoted,
    exchange,
    key_of,
)
from flask_idempotency.stores.redis.topology import Cluster, Node

MOST_REDIRECTIONS: Final = 5
"""Two are ordinary while a slot moves. More come from nodes that do not agree, and sooner or later they do."""

_AWAY: Final = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)
"""MOVED is an ASK to redis-py. To nobody else: see `Cluster.moved`."""


class RoutedLine:
    """One round trip to one node for a command, or for all that one node keeps.

    Follows MOVED and ASK. A node that does not answer, or answers that it cannot, is asked again after a look at the
    Cluster, for as long and as often as a server of its own would be.
    """

    def __init__(self, cluster: Cluster, *, retries: int = RETRIES) -> None:
        self._cluster = cluster
        self._retries = retries

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        (told,) = self.in_a_row([command], tries=tries)
        if isinstance(told, Exception):
            raise told
        return told

    def in_a_row(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        key = key_of(commands[0])
        self._cluster.refuse_silent(key)
        patience = Patience(self._retries, tries)
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

    def together(self, commands: Sequence[Command]) -> list[Any]:
        told: dict[int, Any] = {}
        left = list(range(len(commands)))
        patience = Patience(self._retries)
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
                    told[at] = self.in_a_row([commands[at]])[0] if away else answer
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

    def _failed(self, patience: Patience, error: Exception, node: Node | None, looks: int) -> None:
        """Makes ready for another try, or raises."""
        try:
            patience.failed(error)
        except Exception:
            if node is not None:
                self._cluster.silent_for(patience.seconds, node)
            raise
        if not self._cluster.unknown:  # Else whoever needs a node looks for one.
            self._cluster.look_if_possible(since=looks, failed=node)
