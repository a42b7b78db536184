"""Steps beside faults: journals that fail at each call, commits of unknown outcome, threads that share a claim, and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier, Thread
from typing import Any, Literal

import pytest

from flask_idempotency.engine import events
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import (
    CorruptRecord,
    DataKeyMissing,
    LeaseLost,
    NotCommitted,
    StepInDoubt,
    StepsChanged,
    StoreUnavailable,
)
from flask_idempotency.engine.journal import STEPS_CHANGED, JournalWrite, StepState, StepWriting
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import IN_DOUBT, State
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Decision
from flask_idempotency.engine.step_rules import Step
from flask_idempotency.engine.steps import StepRun
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing.doubles import FaultyStore
from tests.engine.conftest import House, Unsteady
from tests.engine.test_steps import SHOP, Shop, new_shop

Fate = Literal["done", "refused", "unknown, done", "unknown, undone", "lost"]
SAVE = Step("save", effects="transactional")


@dataclass
class Rows:
    """The rows of the application's database, and the transactions of its steps. Implements `StepTransactions`."""

    store: MemoryStore
    fate: Fate = "done"
    durable: list[str] = field(default_factory=list)
    open: list[RowsOfStep] = field(default_factory=list)

    def prepare(self) -> None:
        """Be ready for a claim."""

    def join_step(self, keys: Sequence[StorageKey], token: bytes, **options: Any) -> RowsOfStep:
        transaction = RowsOfStep(self, tuple(keys), token, **options)
        self.open.append(transaction)
        return transaction


@dataclass
class RowsOfStep:
    """Implements `StepTransaction`."""

    rows: Rows
    keys: tuple[StorageKey, ...]
    token: bytes
    fences: Sequence[int]
    lease: float
    operation: str
    early: Callable[[], Sequence[JournalWrite]]
    on_early_commit: Callable[[], None]
    written: list[str] = field(default_factory=list)
    committed_early = False

    def _write(self, writes: Sequence[JournalWrite]) -> None:
        for key, fence, writing in zip(self.keys, self.fences, writes, strict=True):
            self.rows.store.journals.write(key, self.token, fence=fence, writing=writing, lease=self.lease)

    def _commit(self) -> None:
        self.rows.durable += self.written
        self.written.clear()

    def commit_by_itself(self) -> None:
        self._write(self.early())
        self._commit()
        self.committed_early = True
        self.on_early_commit()

    def commit_step(self, writing: StepWriting) -> None:
        fate = self.rows.fate
        if fate == "lost":
            raise LeaseLost("another attempt took over")
        if fate == "refused":
            raise NotCommitted("40001", retryable=True)
        if fate == "unknown, undone":
            raise StoreUnavailable("the commit may be done or not")
        writing(self._write)
        self._commit()
        if fate == "unknown, done":
            raise StoreUnavailable("the commit may be done or not")

    def roll_back(self) -> None:
        self.written.clear()

    def leave(self) -> None:
        if self in self.rows.open:
            self.rows.open.remove(self)


@pytest.fixture
def shop(house: House) -> Shop:
    shop = new_shop(house)
    rows(shop)
    return shop


def rows(shop: Shop) -> Rows:
    """Give the shop a database that commits together with its journals, and return it."""
    found = shop.house.around.step_transactions
    if not isinstance(found, Rows):
        found = Rows(shop.house.store._store)
        shop.house.around = replace(shop.house.around, step_transactions=found, transactions=found)  # type: ignore[arg-type]
        shop.house.engine = Engine(shop.house.around)
        shop.steps = (*SHOP, SAVE)
    return found


def begun(claim: Claim, name: str) -> StepRun:
    assert claim.steps is not None
    return claim.steps.enter(name)


def save(shop: Shop, claim: Claim) -> None:
    """Take the transactional step: one row, with the result in the journal."""
    run = begun(claim, "save")
    if run.recalled:
        return
    assert isinstance(run.transaction, RowsOfStep)
    shop.ran["save"] += 1
    run.transaction.written.append("order")
    run.finish(b"1")


def failing(shop: Shop, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, *, nth: int = 1) -> None:
    """Raise this error from the `nth` call of this method of the journals, before it acts."""
    journals = shop.house.store._store.journals
    real, left = getattr(journals, method), [nth]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(journals, method, call)


def attempt(shop: Shop, claim: Claim) -> None:
    """Do as a view that lets errors end it: pause then, else keep the answer."""
    try:
        for name in ("quote", "charge", "ship"):
            shop.take(claim, name)
        save(shop, claim)
    except (StoreUnavailable, CorruptRecord, KeyboardInterrupt):
        shop.end(claim, Decision.RELEASE)
    else:
        shop.end(claim, Decision.KEEP)


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize(
    ("error", "identities"),
    ((StoreUnavailable("down"), (0, 1)), (CorruptRecord("damaged"), (0,)), (KeyboardInterrupt(), (0,))),
    ids=("down", "corrupt", "interrupt"),
)
def test_a_write_that_fails_runs_nothing_twice(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, error: BaseException, nth: int, identities: tuple[int, ...]
) -> None:
    claim = shop.won(identities=identities)
    failing(shop, monkeypatch, "write", error, nth=nth)
    attempt(shop, claim)
    for _ in range(2):
        shop.house.pass_time(shop.policy.lease + 1)
        again = shop.claim(identities=identities)
        if isinstance(again, Claim):
            attempt(shop, again)

    assert (1, 1) == (shop.ran["charge"], shop.ran["ship"])
    assert ["order"] == rows(shop).durable
    assert State.COMPLETED is record(shop).state


def record(shop: Shop) -> Any:
    found = shop.house.store._store.read(shop.house.key)
    assert found is not None
    return found


@pytest.mark.parametrize("error", (CorruptRecord("damaged"), KeyboardInterrupt()), ids=("corrupt", "interrupt"))
def test_a_step_that_could_not_begin_is_not_in_doubt(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    claim = shop.won()
    failing(shop, monkeypatch, "write", error)

    with pytest.raises(type(error)):
        shop.take(claim, "charge")

    assert claim.steps is not None
    assert not claim.steps.in_doubt
    shop.end(claim, Decision.RELEASE)
    assert shop.house.store._store.read(shop.house.key) is None
    assert 0 == shop.ran["charge"]


@pytest.mark.parametrize("when", ("down", "mute"))
@pytest.mark.parametrize("verb", ("release", "complete"))
def test_an_end_that_fails_is_repeated(shop: Shop, verb: str, when: str) -> None:
    claim = shop.won()
    shop.take(claim, "charge")
    store = shop.journals if verb == "complete" else shop.house.store
    setattr(store, when, {verb})
    shop.end(claim, Decision.KEEP if verb == "complete" else Decision.RELEASE)
    setattr(store, when, set())
    shop.house.pass_time(5)

    if verb == "complete":
        assert State.COMPLETED is record(shop).state
    else:
        assert b"1" == shop.take(shop.won(), "charge")
    assert 1 == shop.ran["charge"]


def test_a_journal_that_cannot_be_recalled_begins_no_view(shop: Shop) -> None:
    claim = shop.won()
    shop.take(claim, "charge")
    shop.end(claim, Decision.RELEASE)
    for when in ("down", "mute"):
        setattr(shop.journals, when, {"recall"})
        with pytest.raises(StoreUnavailable):
            shop.claim()
        setattr(shop.journals, when, set())
        shop.house.clock.advance(shop.policy.lease + 1)

    assert b"1" == shop.take(shop.won(), "charge")
    assert 1 == shop.ran["charge"]


def test_a_claim_that_is_overtaken_before_its_recall_begins_no_view(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = shop.won()
    shop.take(claim, "charge")
    shop.end(claim, Decision.RELEASE)
    failing(shop, monkeypatch, "recall", LeaseLost("overtaken"))

    with pytest.raises(StoreUnavailable, match="took over"):
        shop.claim()


def test_a_claim_that_is_overtaken_before_it_is_held_says_so(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = shop.won()
    shop.take(claim, "charge")
    shop.end(claim, Decision.RELEASE)
    shop.steps = (Step("pay"),)

    def quarantine(*args: Any) -> None:
        raise LeaseLost("overtaken")

    monkeypatch.setattr(shop.house.store._store, "quarantine", quarantine)

    assert STEPS_CHANGED == shop.held()


def test_a_lost_lease_at_a_finish_stops_every_step(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = shop.won()
    failing(shop, monkeypatch, "write", LeaseLost("overtaken"), nth=4)
    shop.take(claim, "charge")
    with pytest.raises(LeaseLost):
        shop.take(claim, "ship")
    for name in ("quote", "charge", "ship"):
        with pytest.raises(LeaseLost):
            begun(claim, name)
    with pytest.raises(LeaseLost):
        shop.end(claim, Decision.RELEASE)


@pytest.mark.parametrize("nth", (1, 2))
def test_a_data_key_that_is_lost_three_times_is_an_outage(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    claim = shop.won()
    journals, calls = shop.house.store._store.journals, [0]
    real = journals.write

    def write(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if nth <= calls[0] < nth + 3:
            raise DataKeyMissing("gone", erased=False)
        real(*args, **kwargs)

    monkeypatch.setattr(journals, "write", write)
    if nth == 1:
        with pytest.raises(StoreUnavailable, match="three times"):
            shop.take(claim, "charge")
    else:
        shop.take(claim, "charge")
    shop.end(claim, Decision.RELEASE)

    assert (nth == 2) == claim.paused
    shop.take(shop.won(), "charge")
    assert 1 == shop.ran["charge"]


def test_results_of_an_erased_tenant_are_not_shown(shop: Shop) -> None:
    """Also where the payload itself can still be opened: it is plain, or its data key is cached."""
    claim = shop.won()
    shop.take(claim, "charge")
    shop.end(claim, Decision.RELEASE)
    shop.house.store._store.data_keys.shred(shop.house.key.tid)
    again = shop.won()

    with pytest.raises(StepsChanged, match="erased"):
        shop.take(again, "charge")
    shop.end(again, Decision.RELEASE)
    assert (STEPS_CHANGED, 1) == (shop.held(), shop.ran["charge"])


def test_a_step_that_began_as_another_kind_is_in_doubt(shop: Shop) -> None:
    """A key of the other side protected the first run. The code that runs now does not count on it."""
    claim = shop.won()
    shop.raises(claim, "ship", OSError())
    shop.end(claim, Decision.RELEASE)
    shop.steps = (Step("charge"), Step("ship"))
    again = shop.won()

    with pytest.raises(StepInDoubt):
        shop.take(again, "ship")
    shop.end(again, Decision.RELEASE)
    assert (IN_DOUBT, 1) == (shop.held(), shop.ran["ship"])


def test_a_name_from_before_its_was_stops_the_request(shop: Shop) -> None:
    """Recorded as `pay` before `was` was written: its identity is another, so it would run twice."""
    shop.steps = (Step("pay"),)
    claim = shop.won()
    shop.take(claim, "pay", in_line=False)
    shop.end(claim, Decision.RELEASE)
    shop.steps = (Step("pay", was="charge"),)

    assert (STEPS_CHANGED, 1) == (shop.held(), shop.ran["pay"])


@pytest.mark.parametrize("first", ("finish", "fail", "withdraw"))
def test_a_step_that_has_ended_cannot_finish_again(shop: Shop, first: str) -> None:
    claim = shop.won()
    run = begun(claim, "charge")
    shop.journals.down = {"write"}
    if first == "finish":
        run.finish(b"1")
    elif first == "fail":
        run.fail(OSError())
    else:
        run.withdraw()
    shop.journals.down = set()

    with pytest.raises(RuntimeError, match="has ended"):
        run.finish(b"2")

    shop.end(claim, Decision.RELEASE)
    if first == "fail":
        assert IN_DOUBT == shop.held()
    else:
        assert b"1" == shop.take(shop.won(), "charge")


@pytest.mark.parametrize("fate", ("done", "refused", "unknown, done", "unknown, undone"))
@pytest.mark.parametrize(
    ("told", "identities"), ((True, (0,)), (False, (0, 1))), ids=("one secret", "two secrets, pure value untold")
)
def test_a_transactional_step_is_committed_once(
    shop: Shop, fate: Fate, told: bool, identities: tuple[int, ...]
) -> None:
    rows(shop).fate = fate
    claim = shop.won(identities=identities)
    if not told:
        shop.take(claim, "quote")
    try:
        save(shop, claim)
    except (NotCommitted, StoreUnavailable):
        assert fate != "done"
    shop.end(claim, Decision.RELEASE)
    rows(shop).fate = "done"
    again = shop.won(identities=identities)
    save(shop, again)
    shop.end(again, Decision.KEEP)

    assert ["order"] == rows(shop).durable
    assert (1 if fate.endswith("done") and fate != "unknown, undone" else 2) == shop.ran["save"]
    assert [] == rows(shop).open


def test_no_event_says_that_a_step_has_finished_which_was_rolled_back(shop: Shop) -> None:
    """Neither if its result cannot be kept."""
    claim, database = shop.won(), rows(shop)
    database.fate = "refused"
    with pytest.raises(NotCommitted):
        begun(claim, "save").finish(None)
    assert [] == shop.told(events.StepFinished) + shop.told(events.StepResultNotKept)

    shop.dies()
    database.fate = "done"
    assert not begun(shop.won(), "save").finish(None)
    assert ["type"] == [event.why for event in shop.told(events.StepResultNotKept)]


def test_a_transactional_step_of_a_lost_claim_is_rolled_back(shop: Shop) -> None:
    rows(shop).fate = "lost"
    claim = shop.won()

    with pytest.raises(LeaseLost):
        save(shop, claim)
    with pytest.raises(LeaseLost):
        shop.take(claim, "charge")

    assert ([], [], 0) == (rows(shop).durable, rows(shop).open, shop.ran["charge"])


def test_a_transactional_step_that_raises_is_rolled_back(shop: Shop) -> None:
    claim = shop.won()
    run = begun(claim, "save")
    assert isinstance(run.transaction, RowsOfStep)
    run.transaction.written.append("order")
    run.fail(ValueError())
    shop.end(claim, Decision.RELEASE)

    assert ([], []) == (rows(shop).durable, rows(shop).open)
    assert shop.house.store._store.read(shop.house.key) is None


@pytest.mark.parametrize("end", ("raises", "refused", "unknown, undone"))
def test_a_step_that_committed_a_part_by_itself_is_in_doubt(shop: Shop, end: str) -> None:
    claim = shop.won()
    run = begun(claim, "save")
    assert isinstance(run.transaction, RowsOfStep)
    run.transaction.written.append("order")
    run.transaction.commit_by_itself()
    run.transaction.written.append("line")
    if end == "raises":
        run.fail(ValueError())
    else:
        rows(shop).fate = "refused" if end == "refused" else "unknown, undone"
        with pytest.raises((NotCommitted, StoreUnavailable)):
            run.finish(b"1")
    shop.end(claim, Decision.RELEASE)

    assert (["order"], IN_DOUBT) == (rows(shop).durable, shop.held())
    assert 1 == len(shop.told(events.CommittedEarly))


def test_a_step_that_committed_by_itself_and_finished_is_done(shop: Shop) -> None:
    claim = shop.won()
    run = begun(claim, "save")
    assert isinstance(run.transaction, RowsOfStep)
    run.transaction.written.append("order")
    run.transaction.commit_by_itself()
    run.finish(b"1")
    shop.end(claim, Decision.RELEASE)

    assert b"1" == shop.take(shop.won(), "save")
    assert ["order"] == rows(shop).durable


def test_threads_share_the_steps_of_a_claim(shop: Shop) -> None:
    """All are between begin and finish at one time, and finish together: no write may speak for itself alone."""
    count = 8
    claim, inside, told = shop.won(), Barrier(count), Barrier(count)

    def work(number: int) -> StepState:
        assert claim.steps is not None
        run = claim.steps.enter("charge", str(number).encode(), in_line=False)
        inside.wait(60)
        shop.ran[str(number)] += 1
        if number:
            run.finish(b"%d" % number)
        told.wait(60)
        held = record(shop).on_expiry.value
        assert "quarantine" == held
        told.wait(60)
        if not number:
            run.finish(b"0")
        return StepState.FINISHED

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))

    assert "takeover" == record(shop).on_expiry.value
    shop.dies()
    again = shop.won()
    for number in range(count):
        assert b"%d" % number == shop.take(again, "charge", b"%d" % number, in_line=False)
    assert {1} == set(shop.ran.values())


def test_a_thread_that_finishes_behind_a_release_changes_nothing(shop: Shop) -> None:
    claim = shop.won()
    assert claim.steps is not None
    run = claim.steps.enter("charge", in_line=False)
    shop.end(claim, Decision.RELEASE)

    with pytest.raises(LeaseLost):
        run.finish(b"1")

    assert IN_DOUBT == shop.held()


def test_one_step_runs_in_one_of_many_threads(shop: Shop) -> None:
    claim, start = shop.won(), Barrier(8)

    def work(_: int) -> bool:
        start.wait(60)
        try:
            shop.take(claim, "charge", in_line=False)
        except RuntimeError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert 1 == sum(pool.map(work, range(8)))
    assert 1 == shop.ran["charge"]


@pytest.mark.parametrize(
    "told",
    (
        events.StepFinished,
        events.StepRecalled,
        events.StepFailed,
        events.StepDoubtful,
        events.StepsChangedHeld,
        events.CompletionRetrying,
    ),
)
def test_an_observer_holds_no_other_step_up(shop: Shop, told: type[events.Event]) -> None:
    """It may be slow, or wait for what another thread does: no lock is held while it runs."""
    claim = shop.won()
    shop.take(claim, "ship")
    shop.end(claim, Decision.RELEASE)
    claim, free = shop.won(), list[bool]()
    assert claim.steps is not None

    def observe(event: events.Event) -> None:
        if isinstance(event, told):
            # Another step of this claim, which needs the lock.
            asked = Thread(target=lambda: claim.steps.in_doubt)  # type: ignore[union-attr]
            asked.start()
            asked.join(60)
            free.append(not asked.is_alive())

    claim.steps.observers = Observers((observe,))
    if told is events.StepsChangedHeld:
        with pytest.raises(StepsChanged):
            shop.take(claim, "charge")
    elif told is events.CompletionRetrying:
        run = claim.steps.enter("charge", in_line=False)
        shop.journals.down.add("write")
        run.finish(b"1")
    else:
        shop.take(claim, "ship")
        shop.raises(claim, "charge", LookupError())
        shop.raises(claim, "charge", OSError())
        shop.take(claim, "quote")

    assert [True] == free


def test_gathered_tasks_share_the_steps_of_a_claim(shop: Shop) -> None:
    async def step(claim: Claim, item: bytes, turn: asyncio.Barrier) -> bytes | None:
        assert claim.steps is not None
        run = claim.steps.enter("ship", item, in_line=False)
        await turn.wait()
        if run.recalled:
            return run.result
        shop.ran[item.decode()] += 1
        if item == b"b" and shop.ran["b"] == 1:
            run.fail(OSError())
            raise OSError
        run.finish(item)
        return item

    async def view(claim: Claim, items: Sequence[bytes]) -> list[Any]:
        turn = asyncio.Barrier(len(items))
        return await asyncio.gather(*(step(claim, item, turn) for item in items), return_exceptions=True)

    claim = shop.won()
    assert [OSError] == [
        type(each) for each in asyncio.run(view(claim, [b"a", b"b", b"c"])) if not isinstance(each, bytes)
    ]
    shop.end(claim, Decision.RELEASE)
    again = shop.won()

    assert [b"c", b"b", b"a"] == asyncio.run(view(again, [b"c", b"b", b"a"]))
    assert Decision.KEEP is shop.end(again, Decision.KEEP)
    assert {"a": 1, "b": 2, "c": 1} == shop.ran


@pytest.mark.parametrize("lost", ("request", "reply"))
def test_a_faulty_store_loses_calls_of_its_journals(house: House, lost: str) -> None:
    faulty, reached = FaultyStore(house.store._store), list[str]()
    house.around = replace(house.around, journals=faulty.journals)
    house.engine = Engine(house.around)
    shop = Shop(house, Unsteady(house.store._store.journals))
    faulty.points.at("after write", lambda: reached.append("written"), nth=1)
    claim = shop.won()
    getattr(faulty, f"lose_{lost}")("write", nth=2)
    shop.take(claim, "charge")
    shop.take(claim, "ship")
    shop.end(claim, Decision.RELEASE)
    again = shop.won()
    assert b"1" == shop.take(again, "charge")
    assert b"1" == shop.take(again, "ship")
    shop.end(again, Decision.KEEP)

    assert ["write"] * 4 + ["recall", "complete"] == faulty.verbs()
    assert (["written"], {"charge": 1, "ship": 1}) == (reached, shop.ran)
    assert not hasattr(FaultyStore(object()), "journals")  # type: ignore[arg-type]
