"""One key: workers, janitors, a resolver and time, as they may meet in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Effects: TypeAlias = Literal["plain", "marked", "deduplicated", "transactional"]

RESOLVED = -1
"""The token, and the answer, of whoever settles a key in its owner's place."""


class Record(NamedTuple):
    """A key's record. Tokens and answers are numbers: a worker's own."""

    state: str
    token: int
    fence: int
    lapsed: bool
    takeover: bool
    answer: int | None = None


At: TypeAlias = Literal["new", "asked", "granted", "past", "worked", "end", "gone"]
"""Where a worker is. Each has one request, and the client's retries are other workers.

`asked`: its claim was sent, and the reply was lost. That happens once to each, or there would be no end to it.
"""


class World(NamedTuple):
    """Everything there is, at one instant."""

    record: Record | None
    workers: tuple[At, ...]
    janitor: Record | None = None
    """What a janitor has read, and will act on."""
    resolver: tuple[Record, str] | None = None
    """What the resolver was asked about, and what it said: `happened` or `never`."""
    fence: int = 0
    effects: int = 0
    delivered: frozenset[int] = frozenset()
    fault: str = ""
    """A step that no rule allows."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """The rules. `broken` names those that are left out, to see that they were needed."""

    effects: Effects = "plain"
    takeover: bool | None = None
    workers: int = 3
    wipes: bool = False
    """Whether the store may forget everything."""
    forced: bool = False
    """Whether a person may free a key whose owner may be alive."""
    broken: frozenset[str] = field(default_factory=frozenset)

    @property
    def start(self) -> World:
        new: At = "new"
        return World(None, (new,) * self.workers)

    @property
    def _takes_over(self) -> bool:
        return self.effects != "plain" if self.takeover is None else self.takeover

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        for number in range(self.workers):
            yield from self._of_worker(world, number)
        yield from self._of_time(world)
        yield from self._of_janitor(world)
        yield from self._of_resolver(world)
        yield from self._of_accidents(world)

    # Workers.

    def _of_worker(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        worker = world.workers[number]
        match worker:
            case "new" | "asked":
                yield from self._claim(world, number)
            case "granted":
                yield f"w{number} renews", self._renew(world, number)
                yield f"w{number} fails before its effect, and releases", self._release(world, number)
                if self.effects == "marked":
                    yield f"w{number} passes its point of no return", self._mark(world, number)
                else:
                    yield f"w{number} works", self._work(world, number)
            case "past":
                yield f"w{number} works", self._work(world, number)
            case "worked":
                yield f"w{number} renews", self._renew(world, number)
                yield from self._complete(world, number)
        if worker in ("granted", "past", "worked"):
            yield f"w{number} dies", _put(world, number, "gone")

    def _claim(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        token, record = self._token(number), world.record
        if record is not None and record.state == "C":
            answer = -2 if record.answer is None else record.answer
            yield f"w{number} is given the stored answer", _deliver(world, number, answer)
            return
        if record is not None and record.state == "P" and record.token == token and "own claim" not in self.broken:
            yield f"w{number} hears that it has the claim", _put(world, number, "granted")
            return
        free = record is None or (record.state == "P" and record.lapsed and record.takeover)
        if record is not None and record.state == "Q" and "claim takes quarantined" in self.broken:
            free = True
        if free:
            fence = (0 if "fence restarts" in self.broken and record is None else world.fence) + 1
            rises = fence > world.fence
            taken = Record("P", token, fence, lapsed=False, takeover=self._takes_over)
            after = world._replace(record=taken, fence=max(fence, world.fence))
            after = after if rises else after._replace(fault="a fence was given out again")
            yield f"w{number} claims", _put(after, number, "granted")
            if world.workers[number] == "new":
                yield f"w{number} claims, and the reply is lost", _put(after, number, "asked")
        elif record is not None and record.state == "P" and record.lapsed:
            yield f"w{number} finds it lapsed", world._replace(record=record._replace(state="Q"))
        elif record is not None and record.token == token and record.state == "P":
            yield (
                f"w{number} is refused by its own claim",
                world._replace(fault="a worker was refused by its own claim"),
            )

    def _renew(self, world: World, number: int) -> World:
        record = world.record
        if record is None or record.state != "P" or record.token != self._token(number):
            return world
        return world._replace(record=record._replace(lapsed=False))

    def _mark(self, world: World, number: int) -> World:
        record = world.record
        mine = record is not None and record.token == self._token(number) and record.state in "PQ"
        if record is None or not (mine or "mark without token" in self.broken):
            return _put(world, number, "end")
        if "mark is not stored" not in self.broken:
            world = world._replace(record=record._replace(takeover=False))
        return _put(world, number, "past")

    def _work(self, world: World, number: int) -> World:
        if self.effects == "transactional":
            # Nothing is there before the commit, which is one step with the record's completion.
            return _put(world, number, "worked")
        effects = 1 if self.effects == "deduplicated" else world.effects + 1
        return _put(world._replace(effects=effects), number, "worked")

    def _complete(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        record, token = world.record, self._token(number)
        mine = record is not None and (record.token == token or "complete without token" in self.broken)
        if record is not None and mine and (record.state in "PQ" or "complete overwrites" in self.broken):
            effects = world.effects + 1 if self.effects == "transactional" else world.effects
            # What is written once more after a lost reply may be another answer: a tombstone, say.
            answer = number + 100 if record.state == "C" else number
            kept = world._replace(record=record._replace(state="C", token=token, answer=answer), effects=effects)
            if record.state == "C" and record.answer != answer:
                kept = kept._replace(fault="a stored answer was changed")
            yield f"w{number} completes", _deliver(kept, number, number)
            yield f"w{number} completes, and the reply is lost", kept
        elif record is not None and record.state == "C" and (mine or "stale answer" in self.broken):
            yield f"w{number} has completed before", _deliver(world, number, number)
        elif record is not None and record.state == "C":
            answer = -2 if record.answer is None else record.answer
            yield f"w{number} has lost its claim, and gives the stored answer", _deliver(world, number, answer)
        elif "stale answer" in self.broken:
            yield f"w{number} has lost its claim, and gives its own answer", _deliver(world, number, number)
        else:
            yield f"w{number} has lost its claim, and says so", _put(world, number, "end")

    def _release(self, world: World, number: int) -> World:
        record = world.record
        mine = record is not None and (record.token == self._token(number) or "release without token" in self.broken)
        if record is not None and mine and record.state in "PQ" and record.answer is None:
            world = world._replace(record=None)
        return _put(world, number, "end")

    def _token(self, number: int) -> int:
        return 0 if "one token for all" in self.broken else number

    # Everybody else.

    def _of_time(self, world: World) -> Iterator[tuple[str, World]]:
        record = world.record
        if record is not None and record.state == "P" and not record.lapsed:
            yield "the lease ends", world._replace(record=record._replace(lapsed=True))
        over = record is not None and (record.state == "C" or "expiry takes all" in self.broken)
        # An answer's life is over when nobody retries any more; that one who does so later runs again is documented.
        if over and all(worker in ("end", "gone") for worker in world.workers):
            after = world._replace(record=None)
            if record is not None and record.state != "C":
                after = after._replace(fault="time has ended a record that is not completed")
            yield "the answer's life ends", after

    def _of_janitor(self, world: World) -> Iterator[tuple[str, World]]:
        record, seen = world.record, world.janitor
        if seen is None:
            if record is not None and record.state == "P" and (record.lapsed or "janitor takes all" in self.broken):
                yield "a janitor reads", world._replace(janitor=record)
            return
        world = world._replace(janitor=None)
        stands = record == seen or "janitor trusts its reading" in self.broken
        if record is None or not stands or (seen.takeover and "janitor ignores the rule" not in self.broken):
            yield "the janitor leaves it alone", world
            return
        after = world._replace(record=record._replace(state="Q"))
        if record.state != "P" or not record.lapsed or record.takeover:
            after = after._replace(fault="a janitor quarantined what had not lapsed, or was to be taken over")
        yield "the janitor quarantines", after

    def _of_resolver(self, world: World) -> Iterator[tuple[str, World]]:
        record = world.record
        if world.resolver is None:
            if record is not None and record.state == "Q" and record.answer is None:
                if world.effects:
                    yield "the resolver finds the effect", world._replace(resolver=(record, "happened"))
                elif self._nobody_is_at_it(world, record):
                    yield "the resolver finds nothing", world._replace(resolver=(record, "never"))
            return
        seen, said = world.resolver
        world = world._replace(resolver=None)
        if record is None or (record != seen and "resolver does not compare" not in self.broken):
            yield "somebody was faster than the resolver", world
        elif said == "happened":
            token = record.token if "resolver keeps the token" in self.broken else RESOLVED
            after = world._replace(record=record._replace(state="C", token=token, answer=RESOLVED))
            if record.state == "C" and record.answer != RESOLVED:
                after = after._replace(fault="a stored answer was changed")
            yield "the resolver settles it", after
        else:
            yield "the resolver frees it", world._replace(record=None)

    def _nobody_is_at_it(self, world: World, record: Record) -> bool:
        if "resolver is hasty" in self.broken or self.forced:
            return True
        return all(
            worker not in ("granted", "past", "worked") or self._token(number) != record.token
            for number, worker in enumerate(world.workers)
        )

    def _of_accidents(self, world: World) -> Iterator[tuple[str, World]]:
        if self.wipes and world.record is not None:
            yield "the store forgets everything", world._replace(record=None)

    # What must hold.

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
        return settled and all(worker in ("end", "gone") for worker in world.workers)


def _put(world: World, number: int, at: At) -> World:
    return world._replace(workers=(*world.workers[:number], at, *world.workers[number + 1 :]))


def _deliver(world: World, number: int, answer: int) -> World:
    return _put(world._replace(delivered=world.delivered | {answer}), number, "end")
