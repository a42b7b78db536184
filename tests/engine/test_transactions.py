"""Work whose rows are committed together with its record, on a transaction that does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Engine, Replay
from flask_idempotency.engine.errors import ConfigurationError, LeaseLost, NotCommitted, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, State, StoredPayload, StoredResponse, Unknown
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.store import Store, Writing
from tests.engine.conftest import House

PAID = StoredResponse(status=201, body=b"paid")


@dataclass
class Book:
    """`ports.Transactions`, and the only `ports.Transaction` that it ever hands out."""

    store: Store
    log: list[str] = field(default_factory=list)
    keys: tuple[StorageKey, ...] = ()
    token: bytes = b""
    on_early_commit: Callable[[], None] | None = None
    committed_early: bool = False
    refusal: Exception | None = None
    """What the database says to the commit. With `committed` it says so after it has done it."""
    committed: bool = False
    joinable: bool = True

    def begin(self) -> None:
        return

    def prepare(self) -> None:
        return

    def before_mark(self) -> None:
        self.log.append("before mark")

    def unsaved(self) -> bool:
        return False

    def join(
        self, keys: Sequence[StorageKey], token: bytes, *, operation: str, on_early_commit: Callable[[], None]
    ) -> Book:
        self.log.append("join")
        if not self.joinable:
            raise ConfigurationError("there is no session here")
        self.keys, self.token, self.on_early_commit = tuple(keys), token, on_early_commit
        return self

    def on_committed(self, callback: Callable[[StorageKey, Record], None]) -> None:
        return

    def flush(self, *, to_several: bool = False) -> None:
        return

    def commit(self, *, to_several: bool = False) -> None:
        self.log.append("commit")

    def has_written(self) -> bool:
        return True

    def roll_back(self) -> None:
        self.log.append("roll back")

    def leave(self) -> None:
        self.log.append("leave")

    def is_retryable(self, error: BaseException) -> bool:
        return isinstance(error, NotCommitted) and error.retryable

    def settle(
        self,
        writing: Writing,
        *,
        keep: float,
        otherwise: Callable[[StorageKey], None],
        remember: float | None = None,
    ) -> None:
        self.log.append("settle")
        if self.refusal is None or self.committed:
            writing(lambda payloads: self.complete(payloads, keep))
        if self.refusal is None:
            return
        if isinstance(self.refusal, LeaseLost):
            raise self.refusal
        for key in self.keys:
            try:
                otherwise(key)
            except LeaseLost:
                return
        raise self.refusal

    def complete(self, payloads: Sequence[StoredPayload], keep: float) -> None:
        for key, payload in zip(self.keys, payloads, strict=True):
            self.store.complete(key, self.token, payload, keep=keep)


@pytest.fixture
def book(house: House) -> Book:
    book = Book(house.store)
    house.policy = Policy(effects="transactional")
    house.around = replace(house.around, transactions=book)
    house.engine = Engine(house.around)
    return book


def state(house: House) -> State | None:
    record = house.store.read(house.key)
    return None if record is None else record.state


def test_rows_and_record_are_committed_in_one_step(house: House, book: Book) -> None:
    claim = house.won()
    house.store.calls.clear()
    book.store = house.store._store

    claim.complete(PAID)

    assert ["join", "settle", "leave"] == book.log
    assert [] == house.store.calls
    assert isinstance(house.claim(), Replay)


def test_other_effects_have_no_transaction(house: House, book: Book) -> None:
    claim = house.won(effects="plain")

    claim.complete(PAID)

    assert [] == book.log
    assert not claim.transactional


def test_every_key_of_a_rotation_is_in_the_transaction(house: House, book: Book) -> None:
    """A crash in between must not leave the older key to be taken over."""
    old = house.request(identity=1)
    claim = house.won(house.request(), old)

    claim.complete(PAID)

    assert (house.key, old.key) == book.keys
    assert State.COMPLETED is house.store.read(old.key).state


@pytest.mark.parametrize("end", ["release", "quarantine", "complete without rows"])
def test_rows_are_rolled_back_before_the_key_is_settled_otherwise(house: House, book: Book, end: str) -> None:
    claim = house.won()
    at_settlement: list[list[str]] = []
    for verb in ("release", "quarantine", "complete"):
        original = getattr(house.store._store, verb)

        def noted(*args: object, original: Callable[..., None] = original, **kwargs: object) -> None:
            at_settlement.append(list(book.log))
            original(*args, **kwargs)

        setattr(house.store._store, verb, noted)

    match end:
        case "release":
            claim.release("status-503")
        case "quarantine":
            claim.quarantine("view-crashed")
        case _:
            claim.complete(StoredResponse(status=402), with_rows=False)

    assert [["join", "roll back", "leave"]] == at_settlement


def test_a_refused_commit_frees_the_key(house: House, book: Book) -> None:
    """Nothing of the work is left, so the retry runs; the caller is told with an exception, never with the answer."""
    claim = house.won()
    book.refusal = NotCommitted("a deferred constraint", retryable=False)

    with pytest.raises(NotCommitted):
        claim.complete(PAID)

    assert state(house) is None
    assert ["ClaimGranted", "Released"] == house.told()
    assert isinstance(house.claim(), Claim)


def test_a_commit_that_was_done_after_all_is_done(house: House, book: Book) -> None:
    """The reply was lost: the record says that it is completed, by this very claim."""
    claim = house.won()
    book.refusal, book.committed = StoreUnavailable("the connection broke"), True

    claim.complete(PAID)

    assert State.COMPLETED is state(house)
    assert ["ClaimGranted", "Completed"] == house.told()


def test_a_commit_that_nobody_can_tell_of_is_decided_later(house: House, book: Book) -> None:
    claim = house.won()
    book.refusal = StoreUnavailable("nobody answers")
    house.store.down.add("release")

    with pytest.raises(StoreUnavailable):
        claim.complete(PAID)

    assert State.PROCESSING is state(house)
    assert ["ClaimGranted", "CompletionRetrying"] == house.told()

    house.store.down.clear()
    house.pass_time(1.0)

    assert state(house) is None


def test_what_was_committed_after_all_survives_the_later_decision(house: House, book: Book) -> None:
    """The background's release meets a completed record, and leaves it."""
    claim = house.won()
    book.refusal, book.committed = StoreUnavailable("nobody answers"), True
    house.store.down.add("release")

    with pytest.raises(StoreUnavailable):
        claim.complete(PAID)
    house.store.down.clear()
    house.pass_time(1.0)

    assert State.COMPLETED is state(house)


def test_work_that_committed_early_is_never_released(house: House, book: Book) -> None:
    """Something of it is in the database for good: without its answer nobody may run it again."""
    claim = house.won()
    assert book.on_early_commit is not None
    book.committed_early = True
    book.on_early_commit()
    book.refusal = NotCommitted("refused", retryable=True)

    with pytest.raises(NotCommitted):
        claim.complete(PAID)

    assert claim.past_point
    assert Unknown("not-committed") == house.claim()
    assert ["ClaimGranted", "CommittedEarly", "Quarantined", "UnknownRefused"] == house.told()


def test_a_superseded_claim_commits_nothing(house: House, book: Book) -> None:
    claim = house.won()
    book.refusal = LeaseLost("taken over")

    with pytest.raises(LeaseLost):
        claim.complete(PAID)

    assert ["join", "settle", "roll back", "leave"] == book.log
    assert ["ClaimGranted", "LeaseExpired"] == house.told()


def test_a_claim_known_to_be_lost_does_not_even_try(house: House, book: Book) -> None:
    claim = house.won(lease=30.0)
    house.clock.advance(31)
    house.won(lease=30.0)
    house.renewer.tick()
    book.log.clear()

    with pytest.raises(LeaseLost):
        claim.complete(PAID)

    assert ["roll back", "leave"] == book.log


def test_a_policy_that_needs_the_sessions_database_is_refused_without_it(house: House) -> None:
    with pytest.raises(ConfigurationError, match="needs a SQL store"):
        house.claim(effects="transactional")

    assert [] == house.store.calls


def test_a_session_that_cannot_be_joined_costs_nobody_the_key(house: House, book: Book) -> None:
    book.joinable = False

    with pytest.raises(ConfigurationError):
        house.claim()

    assert state(house) is None


def test_only_a_transactional_claim_is_asked_whether_to_try_again(house: House, book: Book) -> None:
    conflict = NotCommitted("deadlock", retryable=True)
    joined: Claim = house.won()
    plain: Claim = house.won(house.request("other"), effects="plain")

    assert [True, False, False] == [
        joined.is_retryable(conflict),
        joined.is_retryable(None),
        plain.is_retryable(conflict),
    ]
