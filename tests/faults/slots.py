"""Slots that change their primary, step by step, so that a test can stand between two of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from redis.exceptions import ResponseError

from tests.faults.cluster import ClusterRig, slot_of
from tests.faults.nodes import Node

BATCH: Final = 100
MIGRATE_MS: Final = 5000


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
