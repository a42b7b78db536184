"""The steps of one request: several attempts, one after the other or at once, and what the store lets each of them do.

A call is one move of its caller. It may be answered; be applied and its reply lost, so that it is made again; stay on its
way as a copy that arrives at any later time; or be given up, whether it was applied or not. An attempt that is not at its
end may die at any instant, and its lease may end and be renewed at any instant.

See `flask_idempotency/engine/steps.py`, which does the same. Writes of one attempt follow each other, and threads of an
attempt do everything else in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

RESOLVED, PAUSED = -2, -3
MOST_TRIES = 1
"""How often janitors may enter the view: one is enough to see what a second would need."""
FLUSH = -1
"""The place of a write that belongs to no step: what the store does not know yet, before a release."""


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

    @property
    def in_doubt(self) -> bool:
        return self.effects == "plain" and not self.finished


class Record(NamedTuple):
    token: int
    fence: int
    state: str = "P"
    lapsed: bool = False
    others: bool = True
    lapse: bool = False
    """Of a quarantine: the end of a lease is its only cause."""
    effects: int = 0
    """How many effects are recorded, as the last write has it."""


class Call(NamedTuple):
    verb: str
    who: int
    fence: int = 0
    number: int = 0
    enter: tuple[Entry, ...] = ()
    withdraw: tuple[str, ...] = ()
    effects: int = 0
    doubt: bool = False
    answer: tuple[int, ...] = ()
    keeps: bool = False
    """Whether the request goes with this write."""
    tries: int = 0
    """The number of the try that this write enters."""


class Attempt(NamedTuple):
    at: str = "new"
    fence: int = 0
    number: int = 0
    known: tuple[Entry, ...] = ()
    """The journal, as it is when the unsent entries have arrived."""
    unsent: tuple[Entry, ...] = ()
    withdrawn: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    """Of each step of the code: todo, run, finish or done."""
    told: tuple[int, ...] = ()
    sending: int | None = None
    """The place of the step whose write has no reply yet. No other thread writes before it has."""
    losses: int = 1
    again: int = 0
    """How often a step that did nothing may be asked for again."""

    @property
    def unknown(self) -> bool:
        """Whether the store has to be told something before a release."""
        return bool(self.withdrawn or (self.unsent and any(entry.effects != "pure" for entry in self.known)))


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
    used: tuple[tuple[int, int], ...] = ()
    """Each effect, and the pure value that it was first made with."""
    kept: bool = False
    """Whether the journal has the request, which a janitor needs to finish it."""
    tries: int = 0
    views: int = 0
    """How often janitors have entered the view."""
    fault: str = ""
    """What a janitor did that none may do."""
    answer: tuple[int, ...] | None = None


def entered(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    return tuple(sorted((*without(entries, entry.name), entry)))


def without(entries: tuple[Entry, ...], name: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if entry.name != name)


def named(entries: tuple[Entry, ...], name: str) -> Entry | None:
    return next((entry for entry in entries if entry.name == name), None)


@dataclass(frozen=True, slots=True)
class Steps:
    """Which code runs in each attempt, what may befall it, and which rules are left out."""

    codes: tuple[tuple[Step, ...], ...]
    attempts: int = 2
    one_endpoint: bool = True
    """Whether each attempt's endpoint declares the steps of every other."""
    threads: bool = False
    """Whether each step runs in its own thread."""
    intent: bool = True
    """Whether the store records that a deduplicated step begins."""
    any_order: bool = False
    fails: bool = False
    again: int = 0
    gives_up: bool = False
    resolver: bool = False
    janitors: int = 0
    """How many attempts, the last ones, are made by janitors: no client asks for them."""
    losses: int = 1
    deaths: bool = True
    broken: frozenset[str] = field(default_factory=frozenset)

    @property
    def start(self) -> World:
        return World((Attempt(losses=self.losses, again=self.again),) * self.attempts)

    def code(self, who: int) -> tuple[Step, ...]:
        return self.codes[min(who, len(self.codes) - 1)]

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        for who, attempt in enumerate(world.attempts):
            if attempt.at == "dead" or self._waits(world, who):
                continue
            yield from self._of(world, who, attempt)
            if self.deaths and attempt.at not in ("new", "end"):
                # What it knew is gone with it.
                yield f"{who} dies", self._put(world, who, Attempt("dead"))
        record = world.record
        if record is not None and record.state == "P":
            yield from self._lease(world, record)
        for call in world.late:
            yield f"late {call}", self._store(world._replace(late=world.late - {call}), call)[0]
        if self.resolver:
            yield from self._resolver(world)

    def _waits(self, world: World, who: int) -> bool:
        """Attempts that run the same code are alike: the one that comes first may as well have the lower number."""
        alike = len(self.codes) == 1 and who > 0 and self._is_janitor(who) == self._is_janitor(who - 1)
        return alike and world.attempts[who].at == "new" == world.attempts[who - 1].at

    def _lease(self, world: World, record: Record) -> Iterator[tuple[str, World]]:
        if not record.lapsed:
            yield "the lease ends", world._replace(record=record._replace(lapsed=True))
            return
        if record.token >= 0 and world.attempts[record.token].at not in ("end", "dead"):
            yield f"{record.token} renews", world._replace(record=record._replace(lapsed=False))
        if not record.others:
            yield "the janitor quarantines", world._replace(record=record._replace(state="Q", lapse=True))

    def _put(self, world: World, who: int, attempt: Attempt) -> World:
        if attempt.at == "end" and not {"run", "finish"} & set(attempt.steps):
            attempt = Attempt("end")
        return world._replace(attempts=(*world.attempts[:who], attempt, *world.attempts[who + 1 :]))

    # The store: each call is one atomic move.

    def _store(self, world: World, call: Call) -> tuple[World, str]:
        record = world.record
        if call.verb == "claim":
            return self._claim(world, call.who)
        spent = world._replace(spent=world.spent | {call.who}) if call.verb == "release" else world
        if record is None:
            return spent, "lost"
        if record.state == "C" or (record.token != call.who and not self._unchecked(call)):
            return world, "lost"
        if call.verb == "write":
            return self._write(world, call, record)
        if call.verb == "complete":
            completed = record._replace(state="C", lapsed=False)
            return self._without_journal(world)._replace(record=completed, answer=call.answer), "done"
        if call.verb == "hold":
            return world._replace(record=record._replace(state="Q", lapse=False)), "done"
        if not record.effects or "release deletes" in self.broken:
            return self._without_journal(spent)._replace(record=None, last=(0, 0)), "done"
        if not record.others and "a doubt is paused" not in self.broken:
            return spent._replace(record=record._replace(state="Q", lapse=False)), "done"
        return spent._replace(record=Record(PAUSED, record.fence, lapsed=True, effects=record.effects)), "done"

    def _without_journal(self, world: World) -> World:
        return world._replace(journal=(), kept=False, tries=0)

    def _unchecked(self, call: Call) -> bool:
        transactional = any(entry.effects == "transactional" for entry in call.enter)
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
        journal, effects = world.journal, 0 if record is None else record.effects
        if "a take-over drops the journal" in self.broken:
            journal, effects = (), 0
        fence = world.fence + 1
        return world._replace(record=Record(who, fence, effects=effects), fence=fence, journal=journal), "granted"

    def _write(self, world: World, call: Call, record: Record) -> tuple[World, str]:
        checked = not self._unchecked(call)
        if checked and record.fence != call.fence and "the fence is not compared" not in self.broken:
            return world, "lost"
        if checked and record.state == "Q" and not record.lapse:
            return world, "lost"
        if world.last[0] == call.fence and call.number <= world.last[1] and "writes have no number" not in self.broken:
            return world, "done"
        journal = world.journal
        for entry in call.enter:
            old = named(journal, entry.name)
            if old is None or not old.finished:
                journal = entered(journal, entry)
        for name in call.withdraw:
            old = named(journal, name)
            if old is not None and not old.finished and old.fence == call.fence:
                journal = without(journal, name)
        others = not call.doubt or "a begun step lets others in" in self.broken
        state = "Q" if record.state == "Q" and call.doubt else "P"
        record = record._replace(state=state, lapsed=False, others=others, lapse=state == "Q", effects=call.effects)
        kept, tries = world.kept or call.keeps, max(world.tries, call.tries)
        last = (call.fence, call.number)
        return world._replace(record=record, journal=journal, last=last, kept=kept, tries=tries), "done"

    # One attempt.

    def _is_janitor(self, who: int) -> bool:
        return who >= self.attempts - self.janitors

    def _janitor(self, world: World, who: int, attempt: Attempt) -> Iterator[tuple[str, World]]:
        """Look for a request to finish; claim it as any retry does; note the try; and let the application sign in."""
        record = world.record
        if attempt.at == "new":
            lapsed = record is not None and (record.state, record.lapsed, record.others) == ("P", True, True)
            effects = any(entry.effects != "pure" for entry in world.journal)
            if lapsed and effects and world.kept and world.tries < MOST_TRIES:
                yield f"janitor {who} looks", self._put(world, who, attempt._replace(at="claim"))
        elif attempt.at == "try" and attempt.sending in (None, FLUSH):
            # It knows them from the journal that it recalled, and not from its look.
            over = world.tries >= MOST_TRIES and "tries are counted by a look" not in self.broken
            free = not any(entry.effects != "pure" for entry in attempt.known)
            if over or (free and "a free key is begun" not in self.broken):
                # Another had the key since the look.
                yield f"janitor {who} lets go", self._put(world, who, attempt._replace(at="release"))
            elif "a try is not noted" in self.broken:
                yield f"janitor {who} does not note it", self._put(world, who, attempt._replace(at="hooks"))
            else:
                yield from self._tell(world, who, FLUSH, attempt, attempt._replace(at="hooks"), tries=world.tries + 1)
        elif attempt.at == "hooks":
            views, begins = world.views + 1, not any(entry.effects != "pure" for entry in attempt.known)
            entered = world._replace(views=views, fault=world.fault or ("I9" if begins else ""))
            entered = entered._replace(fault=entered.fault or ("I8" if views > MOST_TRIES else ""))
            yield f"janitor {who} comes in as its caller", self._put(entered, who, attempt._replace(at="view"))
            refused = self._put(world, who, attempt._replace(at="release"))
            yield f"janitor {who} is refused", refused
            if "the caller is not compared" in self.broken:
                other = entered._replace(fault="I10")
                yield f"janitor {who} comes in as another", self._put(other, who, attempt._replace(at="view"))

    def _of(self, world: World, who: int, attempt: Attempt) -> Iterator[tuple[str, World]]:
        if self._is_janitor(who) and attempt.at in ("new", "try", "hooks"):
            yield from self._janitor(world, who, attempt)
        elif attempt.at == "new" and "the journal is read before the claim" in self.broken:
            yield f"{who} reads", self._put(world, who, attempt._replace(at="claim", known=world.journal))
        elif attempt.at in ("new", "claim"):
            yield from self._call(world, who, Call("claim", who), attempt)
        elif attempt.at == "recall":
            yield f"{who} recalls", self._put(world, who, self._recalled(world, who, attempt))
        elif attempt.at == "view":
            yield from self._view(world, who, attempt)
        elif attempt.at == "flush" and attempt.sending in (None, FLUSH):
            yield from self._tell(world, who, FLUSH, attempt, attempt._replace(at="release"))
        elif attempt.at in ("hold", "release", "complete"):
            call = Call(attempt.at, who, answer=attempt.told if attempt.at == "complete" else ())
            yield from self._call(world, who, call, attempt._replace(at="end"))
        if attempt.at in ("flush", "release", "hold", "end"):
            # A view may end while its threads are in their steps.
            for place, state in enumerate(attempt.steps):
                if self.threads and state in ("run", "finish"):
                    yield from self._step(world, who, attempt, place)

    def _view(self, world: World, who: int, attempt: Attempt) -> Iterator[tuple[str, World]]:
        code = self.code(who)
        for place, state in enumerate(attempt.steps):
            if state != "done":
                yield from self._step(world, who, attempt, place)
                if not self.threads:
                    break
        if attempt.sending is not None:
            return
        if self.fails and (self.threads or "run" not in attempt.steps):
            yield f"{who}'s view fails", self._put(world, who, self._ended(attempt))
        if all(state == "done" for state in attempt.steps):
            asked = {step.name for step in code}
            unasked = any(entry.effects != "pure" and entry.name not in asked for entry in attempt.known)
            held = unasked and "an unasked step is not missed" not in self.broken
            yield f"{who}'s view ends", self._put(world, who, attempt._replace(at="hold" if held else "complete"))

    def _step(self, world: World, who: int, attempt: Attempt, place: int) -> Iterator[tuple[str, World]]:
        state, step = attempt.steps[place], self.code(who)[place]
        if state == "run":
            yield from self._run(world, who, attempt, place)
        elif attempt.sending not in (None, place):
            return
        elif state == "finish":
            entry = Entry(*step, True, attempt.fence, attempt.told[place])
            noted = self._noted(attempt, entry)
            yield from self._tell(world, who, place, noted, self._at(noted, place, "done"))
        else:
            yield from self._ask(world, who, attempt, place)

    def _ask(self, world: World, who: int, attempt: Attempt, place: int) -> Iterator[tuple[str, World]]:
        code = self.code(who)
        step, found = code[place], named(attempt.known, code[place].name)
        asked = {earlier.name for earlier in code[:place]}
        unasked = any(
            entry.fence != attempt.fence and entry.effects != "pure" and entry.name not in asked
            for entry in attempt.known
        )
        ordered = not self.threads and not self.any_order and "another way is noticed at the end" not in self.broken
        if found is not None and found.finished:
            passed = self._at(attempt, place, "done", found.value)
            yield f"{who} is told of {step.name}", self._put(world, who, passed)
        elif step.effects == "pure":
            value = self._at(attempt, place, "done", who)
            if "a pure value is not recorded" not in self.broken:
                value = self._noted(value, Entry(*step, True, attempt.fence, who))
            yield f"{who} computes {step.name}", self._put(world, who, value)
        elif ordered and unasked and found is None:
            yield f"{who} goes another way", self._put(world, who, attempt._replace(at="hold"))
        elif step.effects == "transactional":
            yield from self._commit(world, who, attempt, place)
        else:
            noted = attempt
            # A release forgets a pure value, unless the store knows of an effect that may depend on it.
            depends = any(entry.effects == "pure" for entry in attempt.known)
            intent = (
                step.effects == "plain" or self.intent or (depends and "a pure value is released" not in self.broken)
            )
            if found is None and intent and "no intent" not in self.broken:
                noted = self._noted(attempt, Entry(*step, False, attempt.fence))
            hasty = step.effects == "deduplicated" and "an effect overtakes a pure value" in self.broken
            noted = attempt if hasty else noted
            if (noted.unsent or noted.withdrawn) and not hasty:
                yield from self._tell(world, who, place, noted, self._at(noted, place, "run"))
            else:
                yield f"{who} goes into {step.name}", self._put(world, who, self._at(noted, place, "run"))

    def _run(self, world: World, who: int, attempt: Attempt, place: int) -> Iterator[tuple[str, World]]:
        step = self.code(who)[place]
        made = self._made(world, who, attempt, step)
        first = next(each % 10 for each in made.made if each // 10 == step.effect)
        value = first if step.effects == "deduplicated" else who
        yield f"{who} does {step.name}", self._put(made, who, self._at(attempt, place, "finish", value))
        if attempt.sending is not None or attempt.at != "view":
            return
        nothing = self._withdrawn(attempt, step.name)
        if attempt.again:
            again = self._at(nothing, place, "todo")._replace(again=attempt.again - 1)
            yield f"{step.name} of {who} did nothing, and is asked for again", self._put(world, who, again)
        if self.fails:
            failed = self._at(attempt, place, "done")
            yield f"{who} fails in {step.name}", self._put(world, who, self._ended(failed))
            yield f"{who} fails behind {step.name}", self._put(made, who, self._ended(failed))
            harmless = self._ended(self._at(nothing, place, "done"))
            yield f"{who} fails in {step.name}, which did nothing", self._put(world, who, harmless)

    def _commit(self, world: World, who: int, attempt: Attempt, place: int) -> Iterator[tuple[str, World]]:
        """Rows and entry in one transaction. After a lost reply the journal tells whether it was committed."""
        step = self.code(who)[place]
        noted = self._noted(attempt, Entry(*step, True, attempt.fence, who))
        stored, told = self._store(world, self._writing(who, noted))
        after = self._at(self._sent(noted), place, "done", who)
        if told == "lost":
            yield f"{who}'s commit is refused", self._put(world, who, attempt._replace(at="end"))
            return
        made = self._made(stored, who, attempt, step)
        yield f"{who} commits {step.name}", self._put(made, who, after)
        less = attempt.losses - 1
        if attempt.losses and "a lost commit is made again" in self.broken:
            again = attempt._replace(losses=less, number=after.number)
            yield f"{who}'s commit is made, and not answered", self._put(made, who, again)
        if attempt.losses and self.gives_up:
            # The journal does not answer either. Then only the store knows of this step.
            undecided = noted._replace(unsent=without(noted.unsent, step.name), number=after.number, losses=less)
            for name, then in (("made", made), ("not made", world)):
                lost = self._ended(self._at(undecided, place, "done"))
                yield f"{who}'s commit is {name}, and given up", self._put(then, who, lost)
        if self.fails:
            yield f"{who}'s transaction fails", self._put(world, who, self._ended(self._withdrawn(attempt, step.name)))

    def _made(self, world: World, who: int, attempt: Attempt, step: Step) -> World:
        values = [told for each, told in zip(self.code(who), attempt.told, strict=True) if each.effects == "pure"]
        used = world.used
        if values and step.effect not in dict(used):
            used = tuple(sorted((*used, (step.effect, values[0]))))
        return world._replace(made=(*world.made, step.effect * 10 + who), used=used)

    def _at(self, attempt: Attempt, place: int, state: str, value: int | None = None) -> Attempt:
        told = attempt.told
        if value is not None:
            told = (*told[:place], value, *told[place + 1 :])
        return attempt._replace(steps=(*attempt.steps[:place], state, *attempt.steps[place + 1 :]), told=told)

    def _noted(self, attempt: Attempt, entry: Entry) -> Attempt:
        withdrawn = tuple(name for name in attempt.withdrawn if name != entry.name)
        known, unsent = entered(attempt.known, entry), entered(attempt.unsent, entry)
        return attempt._replace(known=known, unsent=unsent, withdrawn=withdrawn)

    def _withdrawn(self, attempt: Attempt, name: str) -> Attempt:
        """Take out a step that did nothing, unless an earlier attempt has begun it."""
        entry = named(attempt.known, name)
        attempt = attempt._replace(unsent=without(attempt.unsent, name))
        if entry is None or entry.fence != attempt.fence:
            return attempt
        withdrawn = tuple(sorted({*attempt.withdrawn, name}))
        return attempt._replace(known=without(attempt.known, name), withdrawn=withdrawn)

    def _sent(self, attempt: Attempt) -> Attempt:
        return attempt._replace(number=attempt.number + 1, unsent=(), withdrawn=(), sending=None)

    def _ended(self, attempt: Attempt) -> Attempt:
        """The view has failed. Its threads may be in their steps."""
        return attempt._replace(at="flush" if attempt.unknown else "release")

    def _writing(self, who: int, attempt: Attempt) -> Call:
        effects = sum(entry.effects != "pure" for entry in attempt.known)
        doubt = any(entry.in_doubt for entry in attempt.known)
        if "a finish speaks for itself" in self.broken and any(entry.finished for entry in attempt.unsent):
            doubt = False
        number = attempt.number + 1
        keeps = bool(self.janitors and attempt.unsent)
        if "the request has a write of its own" in self.broken:
            keeps = keeps and attempt.number > 0
        return Call("write", who, attempt.fence, number, attempt.unsent, attempt.withdrawn, effects, doubt, keeps=keeps)

    def _tell(
        self, world: World, who: int, place: int, noted: Attempt, after: Attempt, *, tries: int = 0
    ) -> Iterator[tuple[str, World]]:
        """Write what the store does not know, and go on as `after`. `tries`: the number of the try that it enters."""
        now = world.attempts[who]
        call = self._writing(who, noted)._replace(tries=tries)
        stored, told = self._store(world, call)
        after = self._sent(after) if told == "done" else now._replace(at="end", sending=None)
        if told != "done" and place != FLUSH:
            after = self._at(after, place, "done")
        yield f"{who} writes {call.number}: {told}", self._put(stored, who, after)
        if not now.losses:
            return
        late = world._replace(late=world.late | {call})
        less = now._replace(losses=now.losses - 1, sending=place)
        yield f"{who} writes {call.number}: its reply is lost", self._put(stored, who, less)
        yield f"{who} writes {call.number}: a copy is late", self._put(late, who, less)
        if self.gives_up:
            given_up = self._unanswered(who, noted, place)
            given_up = given_up._replace(number=call.number, losses=now.losses - 1, sending=None)
            for name, then in (("applied", stored), ("late", late), ("lost", world)):
                yield f"{who} gives up write {call.number}, which is {name}", self._put(then, who, given_up)

    def _unanswered(self, who: int, noted: Attempt, place: int) -> Attempt:
        """Go on without a reply: the next write has a higher number, and carries what still matters."""
        if noted.at == "try":
            return noted._replace(at="release")
        if place == FLUSH:
            return noted
        if noted.steps[place] == "finish":
            if "a write that was given up is forgotten" in self.broken:
                noted = noted._replace(unsent=())
            return self._at(noted, place, "done")
        # Its function does not run.
        return self._ended(self._at(self._withdrawn(noted, self.code(who)[place].name), place, "done"))

    def _call(self, world: World, who: int, call: Call, after: Attempt) -> Iterator[tuple[str, World]]:
        now = world.attempts[who]
        stored, told = self._store(world, call)
        if told == "granted":
            assert stored.record is not None
            early = "the journal is read before the claim" in self.broken
            after = after._replace(at="view" if early else "recall", fence=stored.record.fence)
            after = after._replace(steps=("todo",) * len(self.code(who)), told=(-1,) * len(self.code(who)))
        elif told != "done":
            after = now._replace(at="end")
        yield f"{who} {call.verb}: {told}", self._put(stored, who, after)
        if now.losses:
            late = world._replace(late=world.late | {call})
            less = now._replace(losses=now.losses - 1)
            yield f"{who} {call.verb}: its reply is lost", self._put(stored, who, less)
            yield f"{who} {call.verb}: a copy is late", self._put(late, who, less)
            if self.gives_up and call.verb == "claim":
                given_up = less._replace(at="release")
                for name, then in (("applied", stored), ("late", late), ("lost", world)):
                    yield f"{who} gives up its claim, which is {name}", self._put(then, who, given_up)

    def _recalled(self, world: World, who: int, attempt: Attempt) -> Attempt:
        if world.record is None or (world.record.token, world.record.fence) != (who, attempt.fence):
            return attempt._replace(at="end")
        declared = {step.name for code in (self.codes if self.one_endpoint else (self.code(who),)) for step in code}
        unknown = any(entry.name not in declared for entry in world.journal)
        at = "hold" if unknown and "names are not compared" not in self.broken else "view"
        at = "try" if at == "view" and self._is_janitor(who) else at
        return attempt._replace(at=at, known=world.journal)

    # The resolver reads what is in doubt first, and acts on it later.

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
            if not entry.in_doubt:
                settled.append(entry)
            elif by:
                settled.append(entry._replace(finished=True, value=by[0]))
            elif compared and owner:
                return
        token = RESOLVED if compared else record.token
        effects = sum(entry.effects != "pure" for entry in settled)
        paused = Record(token, record.fence, lapsed=True, effects=effects)
        yield "the resolver settles", after._replace(record=paused, journal=tuple(settled))

    # What must never be.

    def wrong(self, world: World) -> str:
        effects = {step.effect: step.effects for code in self.codes for step in code}
        once = [made for made in world.made if effects[made // 10] != "deduplicated"]
        if len({made // 10 for made in once}) < len(once):
            return "I1"
        first = {made // 10: made % 10 for made in reversed(world.made)}
        by = {made // 10: made % 10 for made in once}
        used = dict(world.used)
        for who, attempt in enumerate(world.attempts):
            if attempt.at in ("view", "complete") and not self._agrees(who, attempt.told, attempt.steps, first, used):
                return "I2"
        record = world.record
        if by and record is None:
            return "I3"
        finished = {entry.effect for entry in world.journal if entry.finished}
        if record is not None and record.state == "P" and record.others and by.keys() - finished:
            return "I4"
        if record is not None and record.state == "C":
            asked, answer = self.code(record.token), world.answer or ()
            everything = ("done",) * len(asked)
            did = {step.effect for step in asked if step.effects != "pure"}
            if len(answer) != len(asked) or not by.keys() <= did <= first.keys():
                return "I5"
            if not self._agrees(record.token, answer, everything, first, used):
                return "I5"
        quiet = all(attempt.at == "end" for attempt in world.attempts) and not world.late and not self.fails
        if quiet and record is not None and record.state == "Q" and record.lapse:
            return "I6"
        recorded = record is not None and record.state != "C" and any(each.effects != "pure" for each in world.journal)
        if self.janitors and recorded and not world.kept:
            return "I7"
        return world.fault

    def _agrees(
        self, who: int, told: tuple[int, ...], states: tuple[str, ...], first: dict[int, int], used: dict[int, int]
    ) -> bool:
        """Whether an attempt was told what came of each effect, and goes by the pure value that it was made with."""
        values = [value for step, value in zip(self.code(who), told, strict=True) if step.effects == "pure"]
        used_here = values[0] if values else None
        return all(
            first.get(step.effect) == value and used.get(step.effect) == used_here
            for step, value, state in zip(self.code(who), told, states, strict=True)
            if state == "done" and step.effects != "pure"
        )
