"""The steps of one request: several attempts, one after the other or at once, and what the store lets each of them do.

A call is one move of its caller. It may be answered; be applied and its reply lost, so that it is made again; or stay on
its way as a copy that arrives at any later time. An attempt that is not at its end may die at any instant.
Steps of one attempt follow each other here: threads, `pure` values and calls that are given up are not in this model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

RESOLVED, PAUSED = -2, -3


class Step(NamedTuple):
    """What code asks for, and which effect it has on the world: two names may have the same."""

    name: str
    effects: str
    effect: int


class Entry(NamedTuple):
    name: str
    effects: str
    effect: int
    finished: bool
    fence: int
    value: int = -1


class Record(NamedTuple):
    token: int
    fence: int
    state: str = "P"
    lapsed: bool = False
    others: bool = True
    lapse: bool = False
    """Of a quarantine: the end of a lease is its only cause."""


class Call(NamedTuple):
    verb: str
    who: int
    fence: int = 0
    number: int = 0
    entry: Entry | None = None
    doubt: bool = False
    answer: tuple[int, ...] = ()


class Attempt(NamedTuple):
    at: str = "new"
    place: int = 0
    fence: int = 0
    number: int = 0
    known: tuple[Entry, ...] = ()
    told: tuple[int, ...] = ()
    losses: int = 1


class World(NamedTuple):
    attempts: tuple[Attempt, ...]
    record: Record | None = None
    journal: tuple[Entry, ...] = ()
    last: tuple[int, int] = (0, 0)
    fence: int = 0
    spent: frozenset[int] = frozenset()
    late: frozenset[Call] = frozenset()
    seen: tuple[Record, tuple[Entry, ...]] | None = None
    made: tuple[int, ...] = ()
    """The attempt that made each effect, in the order they were made, as effect * 10 + attempt."""
    answer: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Which code runs in each attempt, what may befall it, and which rules are left out."""

    codes: tuple[tuple[Step, ...], ...]
    attempts: int = 2
    one_endpoint: bool = True
    """Whether each attempt's endpoint declares the steps of every other."""
    any_order: bool = False
    fails: bool = False
    resolver: bool = False
    losses: int = 1
    deaths: bool = True
    broken: frozenset[str] = field(default_factory=frozenset)

    @property
    def start(self) -> World:
        return World((Attempt(losses=self.losses),) * self.attempts)

    def code(self, who: int) -> tuple[Step, ...]:
        return self.codes[min(who, len(self.codes) - 1)]

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        for who, attempt in enumerate(world.attempts):
            if attempt.at not in ("end", "dead"):
                yield from self._of(world, who, attempt)
                if self.deaths and attempt.at != "new":
                    yield f"{who} dies", self._put(world, who, attempt._replace(at="dead"))
        record = world.record
        if record is not None and record.state == "P" and not record.lapsed:
            yield "the lease ends", world._replace(record=record._replace(lapsed=True))
        if record is not None and record.state == "P" and record.lapsed and not record.others:
            yield "the janitor quarantines", world._replace(record=record._replace(state="Q", lapse=True))
        for call in world.late:
            yield f"late {call}", self._store(world._replace(late=world.late - {call}), call)[0]
        if self.resolver:
            yield from self._resolver(world)

    def _put(self, world: World, who: int, attempt: Attempt) -> World:
        return world._replace(attempts=(*world.attempts[:who], attempt, *world.attempts[who + 1 :]))

    # The store: each call is one atomic move.

    def _store(self, world: World, call: Call) -> tuple[World, str]:
        record = world.record
        if call.verb == "claim":
            return self._claim(world, call.who)
        if record is None or record.state == "C" or (record.token != call.who and not self._unchecked(call)):
            return world, "lost"
        if call.verb == "write":
            return self._write(world, call, record)
        if call.verb == "complete":
            completed = record._replace(state="C", lapsed=False)
            return world._replace(record=completed, journal=(), answer=call.answer), "done"
        if call.verb == "hold":
            return world._replace(record=record._replace(state="Q", lapse=False)), "done"
        spent = world.spent | {call.who}
        if not world.journal or "release deletes" in self.broken:
            return world._replace(record=None, journal=(), last=(0, 0), spent=spent), "done"
        if not record.others and "a doubt is paused" not in self.broken:
            return world._replace(record=record._replace(state="Q", lapse=False), spent=spent), "done"
        return world._replace(record=Record(PAUSED, record.fence, lapsed=True), spent=spent), "done"

    def _unchecked(self, call: Call) -> bool:
        assert call.verb != "claim"
        transactional = call.entry is not None and call.entry.effects == "transactional"
        rule = "commit without token" if transactional else "write without token"
        return call.verb == "write" and rule in self.broken

    def _claim(self, world: World, who: int) -> tuple[World, str]:
        record = world.record
        if record is not None and record.token == who and record.state == "P":
            return world, "granted"
        if who in world.spent or (record is not None and (record.state != "P" or not record.lapsed)):
            return world, "refused"
        if record is not None and not record.others:
            return world._replace(record=record._replace(state="Q", lapse=True)), "refused"
        journal = () if "a take-over drops the journal" in self.broken else world.journal
        fence = world.fence + 1
        return world._replace(record=Record(who, fence), fence=fence, journal=journal), "granted"

    def _write(self, world: World, call: Call, record: Record) -> tuple[World, str]:
        checked = not self._unchecked(call)
        if checked and record.fence != call.fence and "the fence is not compared" not in self.broken:
            return world, "lost"
        if checked and record.state == "Q" and not record.lapse:
            return world, "lost"
        if world.last[0] == call.fence and call.number <= world.last[1]:
            return world, "done"
        entry = call.entry
        assert entry is not None
        old = next((other for other in world.journal if other.name == entry.name), None)
        journal = world.journal
        if old is None or not old.finished:
            journal = tuple(sorted((*(other for other in journal if other is not old), entry)))
        others = not call.doubt or "a begun step lets others in" in self.broken
        state = "Q" if record.state == "Q" and call.doubt else "P"
        record = record._replace(state=state, lapsed=False, others=others, lapse=state == "Q")
        return world._replace(record=record, journal=journal, last=(call.fence, call.number)), "done"

    # One attempt.

    def _of(self, world: World, who: int, attempt: Attempt) -> Iterator[tuple[str, World]]:
        code = self.code(who)
        if attempt.at == "new" and "the journal is read before the claim" in self.broken:
            yield f"{who} reads", self._put(world, who, attempt._replace(at="claim", known=world.journal))
        elif attempt.at in ("new", "claim"):
            yield from self._call(world, who, Call("claim", who), attempt)
        elif attempt.at == "recall":
            yield f"{who} recalls", self._put(world, who, self._recalled(world, who, attempt))
        elif attempt.at in ("hold", "release"):
            yield from self._call(world, who, Call(attempt.at, who), attempt._replace(at="end"))
        elif attempt.at == "run":
            step = code[attempt.place]
            made = world._replace(made=(*world.made, step.effect * 10 + who))
            yield f"{who} does {step.name}", self._put(made, who, attempt._replace(at="finish"))
            if self.fails:
                yield f"{who} fails in {step.name}", self._put(world, who, attempt._replace(at="release"))
                yield f"{who} fails behind {step.name}", self._put(made, who, attempt._replace(at="release"))
        elif attempt.at == "finish":
            yield from self._enter(world, who, attempt, finished=True)
        elif attempt.place == len(code):
            ended = attempt._replace(at="end")
            yield from self._call(world, who, Call("complete", who, answer=attempt.told), ended)
        else:
            yield from self._next(world, who, attempt, code[attempt.place])
            if self.fails:
                yield f"{who}'s view fails", self._put(world, who, attempt._replace(at="release"))

    def _next(self, world: World, who: int, attempt: Attempt, step: Step) -> Iterator[tuple[str, World]]:
        found = next((entry for entry in attempt.known if entry.name == step.name and entry.finished), None)
        asked = {earlier.name for earlier in self.code(who)[: attempt.place]}
        unasked = any(entry.name not in asked for entry in attempt.known)
        if found is not None:
            passed = attempt._replace(place=attempt.place + 1, told=(*attempt.told, found.value))
            yield f"{who} is told of {step.name}", self._put(world, who, passed)
        elif (
            unasked
            and not self.any_order
            and not any(entry.name == step.name for entry in attempt.known)
            and "another way is noticed at the end" not in self.broken
        ):
            yield f"{who} goes another way", self._put(world, who, attempt._replace(at="hold"))
        elif step.effects == "transactional":
            yield from self._enter(world, who, attempt, finished=True)
        elif "no intent" in self.broken:
            yield f"{who} goes into {step.name}", self._put(world, who, attempt._replace(at="run"))
        else:
            yield from self._enter(world, who, attempt, finished=False)

    def _enter(self, world: World, who: int, attempt: Attempt, *, finished: bool) -> Iterator[tuple[str, World]]:
        step = self.code(who)[attempt.place]
        entry = Entry(*step, finished, attempt.fence, who if finished else -1)
        doubt = step.effects == "plain" and not finished
        call = Call("write", who, attempt.fence, attempt.number + 1, entry, doubt)
        after = attempt._replace(at="run", number=attempt.number + 1)
        if finished:
            after = after._replace(at="view", place=attempt.place + 1, told=(*attempt.told, who))
        if step.effects == "transactional":
            yield from self._commit(world, who, call, after)
        else:
            yield from self._call(world, who, call, after)

    def _commit(self, world: World, who: int, call: Call, after: Attempt) -> Iterator[tuple[str, World]]:
        stored, told = self._store(world, call)
        if told == "lost":
            yield f"{who}'s commit is refused", self._put(world, who, world.attempts[who]._replace(at="end"))
            return
        assert call.entry is not None
        stored = stored._replace(made=(*stored.made, call.entry.effect * 10 + who))
        yield f"{who} commits {call.entry.name}", self._put(stored, who, after)
        if after.losses and "a lost commit is made again" in self.broken:
            again = world.attempts[who]._replace(losses=after.losses - 1, number=after.number)
            yield f"{who}'s commit is made, and not answered", self._put(stored, who, again)

    def _call(self, world: World, who: int, call: Call, after: Attempt) -> Iterator[tuple[str, World]]:
        now = world.attempts[who]
        stored, told = self._store(world, call)
        if told == "granted":
            assert stored.record is not None
            early = "the journal is read before the claim" in self.broken
            after = after._replace(at="view" if early else "recall", fence=stored.record.fence)
        elif told != "done":
            after = now._replace(at="end")
        yield f"{who} {call.verb}: {told}", self._put(stored, who, after)
        if now.losses:
            less = now._replace(losses=now.losses - 1)
            yield f"{who} {call.verb}: its reply is lost", self._put(stored, who, less)
            yield f"{who} {call.verb}: a copy is late", self._put(world._replace(late=world.late | {call}), who, less)

    def _recalled(self, world: World, who: int, attempt: Attempt) -> Attempt:
        if world.record is None or (world.record.token, world.record.fence) != (who, attempt.fence):
            return attempt._replace(at="end")
        declared = {step.name for code in (self.codes if self.one_endpoint else (self.code(who),)) for step in code}
        unknown = any(entry.name not in declared for entry in world.journal)
        at = "hold" if unknown and "names are not compared" not in self.broken else "view"
        return attempt._replace(at=at, known=world.journal)

    # Whoever settles what is in doubt: shown it first, and acts on it later.

    def _resolver(self, world: World) -> Iterator[tuple[str, World]]:
        record = world.record
        if world.seen is None:
            if record is not None and record.state == "Q":
                yield "a resolver is asked", world._replace(seen=(record, world.journal))
            return
        compared = "the resolver does not compare" not in self.broken
        after = world._replace(seen=None)
        yield "the resolver gives up", after
        if record is None or record.state == "C" or (compared and (record, world.journal) != world.seen):
            return
        seen, journal = world.seen
        owner = seen.token >= 0 and world.attempts[seen.token].at not in ("end", "dead")
        settled: list[Entry] = []
        for entry in journal:
            by = [made % 10 for made in world.made if made // 10 == entry.effect]
            if entry.finished or by:
                settled.append(entry if entry.finished else entry._replace(finished=True, value=by[0]))
            elif compared and owner:
                return
        token = RESOLVED if compared else record.token
        paused = Record(token, record.fence, lapsed=True)
        yield "the resolver settles", after._replace(record=paused, journal=tuple(settled))

    # What must never be.

    def wrong(self, world: World) -> str:
        effects = {step.effect: step.effects for code in self.codes for step in code}
        once = [made for made in world.made if effects[made // 10] != "deduplicated"]
        if len({made // 10 for made in once}) < len(once):
            return "I1"
        by = {made // 10: made % 10 for made in once}
        for who, attempt in enumerate(world.attempts):
            for step, value in zip(self.code(who), attempt.told, strict=False):
                if step.effects != "deduplicated" and by.get(step.effect) != value:
                    return "I2"
        record = world.record
        if by and record is None:
            return "I3"
        finished = {entry.effect for entry in world.journal if entry.finished}
        if record is not None and record.state == "P" and record.others and by.keys() - finished:
            return "I4"
        if record is not None and record.state == "C":
            did = {made // 10 for made in world.made}
            asked = self.code(record.token)
            right = all(
                step.effect in did and by.get(step.effect, value) == value
                for step, value in zip(asked, world.answer or (), strict=False)
            )
            if not right or len(world.answer or ()) != len(asked):
                return "I5"
        quiet = all(attempt.at == "end" for attempt in world.attempts) and not world.late and not self.fails
        if quiet and record is not None and record.state == "Q" and record.lapse:
            return "I6"
        return ""
