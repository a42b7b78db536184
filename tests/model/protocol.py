"""One key: workers, janitors, a resolver, time and a store that may forget, as they may meet in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.bystanders import of_janitor, of_resolver, of_time
from tests.model.memory import accidents, acknowledgements
from tests.model.rules import Rules
from tests.model.workers import late_packets, of_worker
from tests.model.world import At, Kept, World


@dataclass(frozen=True, slots=True)
class Protocol(Rules):
    """Who may do what, and what must never be."""

    @property
    def start(self) -> World:
        new: At = "new"
        return World(Kept(), (new,) * self.workers, (0,) * self.workers)

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        for number in range(self.workers):
            yield from of_worker(self, world, number)
        yield from of_time(self, world)
        if self.attended:
            yield from of_janitor(self, world)
            yield from of_resolver(self, world)
        yield from late_packets(self, world)
        yield from accidents(self, world)
        yield from acknowledgements(self, world)

    def wrong(self, world: World) -> str:
        if world.fault:
            return world.fault
        if world.effects > 1:
            return "the effect happened twice"
        if len(world.delivered) > 1:
            return "two different answers were given"
        if world.delivered and not world.effects:
            return "an answer was given to what was not done"
        return ""

    def ends(self, world: World) -> bool:
        """Whether every worker is done with, and the key waits for nobody; or for a retry, which will take it over."""
        record = world.record
        settled = record is None or record.state == "C" or (record.state == "P" and record.lapsed and record.takeover)
        return settled and all(worker == "end" for worker in world.workers)
