"""What befalls a Cluster, one thing at a time, while lines to it are cut at any moment."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

from redis.exceptions import RedisError

from tests.lab.cluster import ClusterRig, SlotMove, slot_of
from tests.lab.nodes import Node

USER: Final = "shop"
"""Whose lines are cut, and nobody else's."""

GUST_SECONDS: Final = 0.4


class Weather:
    """`blow` does one thing, and returns when all is well again: until the next one nothing is broken.

    Whatever a replica has not got then, it has when `blow` returns. In a `with` statement the lines are cut as well.
    """

    def __init__(self, rig: ClusterRig, odds: Mapping[str, int]) -> None:
        self._rig = rig
        self._odds = odds
        self._verbs: dict[str, Callable[[Node], None]] = {
            "dies": self._dies,
            "dies while its replica lags": self._dies_while_its_replica_lags,
            "hands over": self._hands_over,
            "is silent until replaced": self._is_silent_until_replaced,
            "is silent for a moment": self._is_silent_for_a_moment,
            "its replica is silent": self._its_replica_is_silent,
            "its replica restarts": self._its_replica_restarts,
            "slots move": self._slots_move,
        }
        self.seen = Counter[str]()
        self._ended = threading.Event()
        self._gusts = threading.Thread(target=self._cut_lines, daemon=True)
        for node in rig.nodes:
            self._admit(node)

    @property
    def url(self) -> str:
        """The way for those whose lines are cut."""
        return f"{self._rig.url.replace('://', f'://{USER}:any@')}/?socket_timeout=0.5"

    def blow(self, what: str = "") -> None:
        """Do this, or what chance has it."""
        what = what or random.choices(list(self._odds), list(self._odds.values()))[0]
        self.seen[what] += 1
        self._verbs[what](random.choice(self._rig.primaries))
        self._settle()

    def _dies(self, primary: Node) -> None:
        heir = self._rig.replica_of(primary)
        primary.kill()
        self._rig.promoted(heir)
        self._restart(primary)

    def _dies_while_its_replica_lags(self, primary: Node) -> None:
        heir = self._rig.replica_of(primary)
        heir.lag()
        self._pass(1.0)
        primary.kill()
        self._rig.fail_over(heir, force=True)
        heir.stop_lagging()
        self._restart(primary)

    def _hands_over(self, primary: Node) -> None:
        self._rig.fail_over(self._rig.replica_of(primary))

    def _is_silent_until_replaced(self, primary: Node) -> None:
        heir = self._rig.replica_of(primary)
        primary.pause()
        self._rig.promoted(heir)
        primary.resume()

    def _is_silent_for_a_moment(self, primary: Node) -> None:
        primary.pause()
        self._pass(0.6)  # well within what the others wait before they replace it
        primary.resume()

    def _its_replica_is_silent(self, primary: Node) -> None:
        replica = self._rig.replica_of(primary)
        replica.pause()
        self._pass(1.0)
        replica.resume()

    def _its_replica_restarts(self, primary: Node) -> None:
        replica = self._rig.replica_of(primary)
        replica.kill()
        self._pass(0.5)
        self._restart(replica)

    def _slots_move(self, _: Node) -> None:
        with self._rig.client() as client:
            slots = {slot_of(record) for record in client.scan_iter(match="*:r:*")}
        for slot in random.sample(sorted(slots), k=min(2, len(slots))):
            source = self._rig.primary_of(slot)
            SlotMove(
                self._rig, slot, to=random.choice([node for node in self._rig.primaries if node is not source])
            ).run()

    def _restart(self, node: Node) -> None:
        node.restart()
        self._admit(node)

    def _admit(self, node: Node) -> None:
        node.told("ACL", "SETUSER", USER, "on", "nopass", "~*", "&*", "+@all")

    def _settle(self) -> None:
        self._rig.settled()
        for primary in self._rig.primaries:
            self._rig.replica_of(primary).has_all_of(primary)

    def _pass(self, at_most: float) -> None:
        self._ended.wait(random.uniform(0.1, at_most))

    def _cut_lines(self) -> None:
        while not self._ended.wait(random.uniform(0, 2 * GUST_SECONDS)):
            node = random.choice(self._rig.nodes)
            try:
                if node.awake:
                    self.seen["lines cut"] += int(node.told("CLIENT", "KILL", "USER", USER))
            except RedisError:
                continue  # it was about to die

    def __enter__(self) -> Self:
        self._gusts.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._gusts.join()
