"""Owners, retries and janitors at the same few keys at once, and who remembers what each of them was told."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.events import Event, Reaped, Resolved
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, OnExpiry, Record, State, StoredResponse
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Happened, NeverHappened, Resolution, Settler, StillUnknown, UnknownOutcome
from flask_idempotency.maintenance.janitor import Batcher, expire
from flask_idempotency.maintenance.reap import ResolverContext, reap
from flask_idempotency.testing.contract.quota import PLENTY
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import ABOUT, KEEP, PAYLOAD, a_key, a_request, a_token

LEASE = 1.0
KEYS = 10
OWNER, RETRY, RESOLVER = 201, 202, 203
"""The status of an answer says whose it is."""

SCRIPTS = (
    ("complete",),
    ("renew", "complete"),
    ("renew", "renew", "complete"),
    ("mark_point_of_no_return", "complete"),
    ("quarantine",),
    ("quarantine", "complete"),
    ("release",),
    ("quarantine", "release"),
    ("mark_point_of_no_return",),
    (),
)
"""What owners do until they are done, or vanish."""
ANSWERS = (Happened(StoredResponse(RESOLVER, body=b"paid")), NeverHappened(), StillUnknown())


class Jittered:
    """Time that passes while others work, by a part of a lease or so, and now and then goes back a little."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_some(self, chance: random.Random) -> None:
        for _ in range(chance.choice((0, 0, 1, 20))):
            time.sleep(0)  # no time passes: somebody else has a turn, as they would while this one waits for an answer
        if chance.random() < 0.4:
            self.now += chance.uniform(-0.1, 0.7) * LEASE


@dataclass
class Diary:
    """What everybody was told about one key."""

    key: StorageKey
    on_expiry: OnExpiry
    granted: int = 0
    acknowledged: list[int] = field(default_factory=list)
    """Statuses of answers that somebody was told are stored."""
    released: int = 0
    last: Record | None = None

    @property
    def label(self) -> str:
        return label(self.key)


def label(key: StorageKey) -> str:
    return key.rid.hex()


class Round:
    """Some keys of one tenant, whose owners, retries and janitors run at once."""

    def __init__(self, store: Any, clock: Jittered, seed: int, events: list[Event]) -> None:
        self.store, self.clock, self.seed = store, clock, seed
        self.events = events
        """Of all rounds: janitors look at everything."""
        chance = random.Random(seed)
        self.tid = a_key().tid
        self.diaries = [Diary(a_key(tid=self.tid), chance.choice(list(OnExpiry))) for _ in range(KEYS)]

    def run(self) -> None:
        chance = random.Random(self.seed)
        owners = {diary.label: a_token() for diary in self.diaries}
        for diary in self.diaries:
            self.claim(diary, owners[diary.label], chance)
        half = KEYS // 2
        at_once(
            lambda: self.own(self.diaries[:half], owners, random.Random(self.seed + 1)),
            lambda: self.own(self.diaries[half:], owners, random.Random(self.seed + 2)),
            lambda: self.retry(random.Random(self.seed + 3)),
            lambda: self.look_after(random.Random(self.seed + 4)),
            lambda: self.look_after(random.Random(self.seed + 5)),
        )

    def own(self, diaries: list[Diary], owners: dict[str, bytes], chance: random.Random) -> None:
        """Do something about each of these keys, or nothing."""
        work = [(diary, list(chance.choice(SCRIPTS))) for diary in diaries]
        while work:
            diary, script = chance.choice(work)
            if not script or not self.settle(diary, owners[diary.label], script.pop(0), OWNER, chance):
                work.remove((diary, script))

    def retry(self, chance: random.Random) -> None:
        """Ask for every key again, and do the work of those that are granted."""
        for diary in chance.sample(self.diaries, KEYS) * 2:
            token = a_token()
            if self.claim(diary, token, chance) and chance.random() < 0.8:
                self.settle(diary, token, "complete", RETRY, chance)

    def look_after(self, chance: random.Random) -> None:
        for _ in range(2):
            self.janitor(chance)

    def janitor(self, chance: random.Random, *, drain: Batcher | None = None) -> None:
        self.clock.pass_some(chance)
        drain = drain or Batcher(chance.choice((1, 3, 1000)))
        observers = Observers([self.events.append])

        def resolver(unknown: UnknownOutcome) -> Resolution:
            self.clock.pass_some(chance)
            said: Resolution = chance.choice(ANSWERS)
            return said

        asking = ResolverContext(
            resolvers={ABOUT.operation: resolver},
            policy_of=lambda about: Policy(lease=LEASE, keep=KEEP),
            settler=Settler(self.store.recovery, EnvelopeCodec(), observers, label=label),
            downstream=lambda found, name: name,
        )
        reap(self.store.recovery, horizon=self.clock(), drain=drain, observers=observers, label=label, resolving=asking)
        self.clock.pass_some(chance)
        expire(self.store.expiry, horizon=self.clock(), drain=drain)

    def claim(self, diary: Diary, token: bytes, chance: random.Random) -> bool:
        self.clock.pass_some(chance)
        request = a_request(diary.key, on_expiry=diary.on_expiry)
        outcome = self.store.claim(request, token=token, lease=LEASE, quota=PLENTY)
        if not isinstance(outcome, Grant):
            return False
        with _diaries:
            diary.granted += 1
        return True

    def settle(self, diary: Diary, token: bytes, verb: str, status: int, chance: random.Random) -> bool:
        """One write of whoever has this token. False: it has lost its claim."""
        self.clock.pass_some(chance)
        store, key = self.store, diary.key
        try:
            match verb:
                case "complete":
                    store.complete(key, token, replace(PAYLOAD, status=status), keep=KEEP)
                    with _diaries:
                        diary.acknowledged.append(status)
                case "release":
                    store.release(key, token)
                    with _diaries:
                        diary.released += 1
                case "renew":
                    store.renew(key, token, lease=LEASE)
                case "mark_point_of_no_return":
                    store.mark_point_of_no_return(key, token)
                case _:
                    store.quarantine(key, token, "view-crashed")
        except LeaseLost:
            return False
        return True

    def wrong(self) -> list[str]:
        """Everything that must not be, once the last round is done."""
        told: dict[type[Event], Counter[tuple[str, str]]] = {Reaped: Counter(), Resolved: Counter()}
        for event in self.events:
            if type(event) in told:
                told[type(event)][event.record, getattr(event, "verb", "")] += 1
        faults = list[str]()
        for diary in self.diaries:
            diary.last = self.store.read(diary.key)
            reaped = told[Reaped][diary.label, ""]
            freed, settled = told[Resolved][diary.label, "released"], told[Resolved][diary.label, "completed"]
            faults += (f"seed {self.seed}: {fault}: {diary}" for fault in _faults(diary, reaped, freed, settled))
        return faults


_diaries = threading.Lock()


def _faults(diary: Diary, reaped: int, freed: int, settled: int) -> list[str]:
    record, answers = diary.last, {*diary.acknowledged, *([RESOLVER] * (settled > 0))}
    answer = None if record is None or record.payload is None else record.payload.status
    state = None if record is None else record.state
    found = {
        "two answers were acknowledged": len(answers) > 1,
        "one key was settled by two resolvers": settled > 1,
        "an acknowledged answer is not there": bool(answers) and ({answer} != answers or state is not State.COMPLETED),
        "an answer is there that nobody was told of": answer is not None and not answers,
        "an answer is quarantined": answer is not None and state is not State.COMPLETED,
        "a record has vanished": record is None and diary.released + freed == 0,
        "a lapse was told twice": reaped > diary.granted,
        "it ran again": diary.on_expiry is OnExpiry.QUARANTINE and diary.granted > 1 + diary.released + freed,
    }
    return [fault for fault, there in found.items() if there]


def faults_of_lives(rounds: list[Round], clock: Jittered) -> list[str]:
    """What must not be in the lives of the answers of these rounds: those end when they should, and nothing else does."""
    store, faults = rounds[0].store, list[str]()
    diaries = [diary for each in rounds for diary in each.diaries]
    answered = [diary for diary in diaries if diary.last is not None and diary.last.state is State.COMPLETED]
    others = [diary for diary in diaries if diary.last is not None and diary.last.state is not State.COMPLETED]
    drain = Batcher(1000)
    if answered:
        clock.now = min(diary.last.deadline for diary in answered if diary.last) - 0.01
        expire(store.expiry, horizon=clock() + 400 * 86400, drain=drain)
        for diary in answered:
            outcome = store.claim(a_request(diary.key), token=a_token(), lease=LEASE, quota=PLENTY)
            if not isinstance(outcome, Record):
                faults.append(f"an answer was not replayed to its end: {diary}")
    clock.now += 400 * 86400
    expire(store.expiry, horizon=clock(), drain=drain)
    faults += (f"an answer has outlived itself: {diary}" for diary in answered if store.read(diary.key) is not None)
    for diary in others:
        record = store.read(diary.key)
        if record is None or diary.last is None or replace(record, remaining=0) != replace(diary.last, remaining=0):
            faults.append(f"what nobody has settled was ended: {diary}")
    return faults
