"""A claim's run through its steps: what passes, what runs, what is paused, and what is stopped before a second effect."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from itertools import count, permutations, product
from typing import Any

import pytest

from flask_idempotency.engine import events
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.ending import Running, settle
from flask_idempotency.engine.engine import Engine, Outcome
from flask_idempotency.engine.errors import CorruptRecord, DataKeyMissing, LeaseLost, StepsChanged, StoreUnavailable
from flask_idempotency.engine.journal import LARGEST_JOURNAL, LARGEST_RESULT, MOST_STEPS, STEPS_CHANGED, Entry
from flask_idempotency.engine.model import IN_DOUBT, State, StoredResponse, Unknown
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.engine.step_rules import Step, UndeclaredStep
from tests.engine.conftest import House, Unsteady, new_house

CREATED = StoredResponse(201, body=b"done")
SHOP = (Step("charge", harmless=(LookupError,)), Step("ship", effects="deduplicated"), Step("quote", effects="pure"))
MAIL = Step("mail", effects="deduplicated", intent=False)


@dataclass
class Shop:
    """An endpoint with steps, whose effects are counted outside of the store."""

    house: House
    journals: Unsteady
    steps: tuple[Step, ...] = SHOP
    ran: Counter[str] = field(default_factory=Counter)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        return Policy(effects="steps", steps=self.steps, **self.options)

    def claim(self, *, identities: tuple[int, ...] = (0,)) -> Outcome:
        requests = [self.house.request(identity=each, policy=self.policy) for each in identities]
        return self.house.engine.claim(requests[0], self.policy, former=requests[1:])

    def won(self, *, identities: tuple[int, ...] = (0,)) -> Claim:
        claim = self.claim(identities=identities)
        assert isinstance(claim, Claim)
        return claim

    def take(
        self, claim: Claim, name: str, item: bytes = b"", *, in_line: bool = True, digest: bytes = b""
    ) -> bytes | None:
        """Take this step as `call_step` does. Its function counts, and returns how often it has run."""
        assert claim.steps is not None
        run = claim.steps.enter(name, item, digest=digest, in_line=in_line)
        if run.recalled:
            return run.result
        self.ran[name + item.decode()] += 1
        result = str(self.ran[name + item.decode()]).encode()
        run.finish(result)
        return result

    def raises(self, claim: Claim, name: str, error: BaseException) -> None:
        assert claim.steps is not None
        run = claim.steps.enter(name)
        self.ran[name] += 1
        run.fail(error)

    def end(self, claim: Claim, decision: Decision, *, reason: str = "status-503") -> Decision:
        work = Running()
        work.claim, work.policy, work.operation = claim, self.policy, "pay"
        return settle(work, decision, CREATED, reason=reason)

    def dies(self) -> None:
        """The worker of the last claim vanishes, and its lease expires."""
        self.house.renewer._start_empty()
        self.house.clock.advance(self.policy.lease + 1)

    def held(self) -> str:
        outcome = self.claim()
        assert isinstance(outcome, Unknown)
        return outcome.reason

    def told(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.house.events if isinstance(event, kind)]


@pytest.fixture
def shop(house: House) -> Shop:
    return new_shop(house)


def new_shop(house: House) -> Shop:
    journals = Unsteady(house.store._store.journals)
    house.around = replace(house.around, journals=journals)
    house.engine = Engine(house.around)
    return Shop(house, journals)


def test_a_kept_answer_ends_the_steps(shop: Shop) -> None:
    claim = shop.won()
    for name in ("quote", "charge", "ship"):
        shop.take(claim, name)

    assert Decision.KEEP is shop.end(claim, Decision.KEEP)

    assert () == shop.house.store._store.journals.read(shop.house.key).entries
    assert not isinstance(shop.claim(), Claim)
    assert {"quote": 1, "charge": 1, "ship": 1} == shop.ran


def test_calls_of_a_request(shop: Shop) -> None:
    """Two for each effect, and none for a pure step: it travels with the next write."""
    claim = shop.won()
    calls = []
    for name in ("quote", "charge", "ship"):
        shop.take(claim, name)
        calls.append(len(shop.journals.calls))

    assert [0, 2, 4] == calls
    assert {"write"} == set(shop.journals.calls)


def test_a_step_without_intent_takes_one_call(shop: Shop) -> None:
    shop.steps = (*SHOP, MAIL)
    shop.take(shop.won(), "mail")

    assert ["write"] == shop.journals.calls


def test_a_failed_step_without_intent_keeps_the_pure_value(shop: Shop) -> None:
    """It may have had its effect with this value, so a retry must not compute another one."""
    shop.steps = (*SHOP, MAIL)
    claim = shop.won()
    assert b"1" == shop.take(claim, "quote")
    shop.raises(claim, "mail", TimeoutError())
    shop.end(claim, Decision.RELEASE)

    again = shop.won()
    assert (True, 2) == (claim.paused, again.attempt)
    assert b"1" == shop.take(again, "quote")


def test_a_step_in_doubt_keeps_everybody_out(shop: Shop) -> None:
    claim = shop.won()
    assert claim.steps is not None
    claim.steps.enter("charge")
    shop.dies()

    assert "lease-expired" == shop.held()
    assert 0 == shop.ran["charge"]


def test_three_attempts_die_after_one_step_each(shop: Shop) -> None:
    for number in (1, 2, 3):
        claim = shop.won()
        assert claim.steps is not None
        assert number == claim.steps.attempt
        for each in ("charge", "ship", "quote")[:number]:
            shop.take(claim, each)
        shop.dies()
    claim = shop.won()

    assert [b"1", b"1"] == [shop.take(claim, name) for name in ("charge", "ship")]
    assert claim.steps is not None
    assert (4, {"charge": 1, "ship": 1, "quote": 1}) == (claim.steps.attempt, shop.ran)
    assert Decision.KEEP is shop.end(claim, Decision.KEEP)


def test_a_worker_that_was_overtaken_begins_no_step(shop: Shop) -> None:
    late = shop.won()
    shop.take(late, "charge")
    shop.dies()
    successor = shop.won()
    assert b"1" == shop.take(successor, "charge")
    shop.end(successor, Decision.KEEP)

    for _ in range(2):
        with pytest.raises(LeaseLost):
            shop.take(late, "ship")

    assert 0 == shop.ran["ship"]


def test_a_failure_behind_an_effect_is_a_pause(shop: Shop) -> None:
    claim = shop.won()
    shop.take(claim, "charge")
    shop.raises(claim, "ship", OSError())
    assert Decision.RELEASE is shop.end(claim, Decision.RELEASE)

    assert claim.paused
    assert ["status-503"] == [event.reason for event in shop.told(events.Paused)]
    again = shop.won()
    assert b"1" == shop.take(again, "charge")
    shop.take(again, "ship")
    assert {"charge": 1, "ship": 2} == shop.ran


@pytest.mark.parametrize("error", (TimeoutError(), KeyboardInterrupt()), ids=("timeout", "interrupt"))
def test_a_plain_step_that_raises_is_in_doubt(shop: Shop, error: BaseException) -> None:
    claim = shop.won()
    shop.raises(claim, "charge", error)
    shop.end(claim, Decision.RELEASE)

    assert (IN_DOUBT, False) == (shop.held(), claim.paused)
    assert [IN_DOUBT] == [event.reason for event in shop.told(events.Quarantined)]
    assert ["charge"] == [event.step for event in shop.told(events.StepDoubtful)]


def test_a_step_that_did_nothing_leaves_nothing(shop: Shop) -> None:
    claim = shop.won()
    shop.take(claim, "quote")
    shop.raises(claim, "charge", LookupError())
    shop.end(claim, Decision.RELEASE)

    assert shop.house.store._store.read(shop.house.key) is None
    assert ["status-503"] == [event.reason for event in shop.told(events.Released)]
    again = shop.won()
    assert 1 == again.attempt
    shop.raises(again, "charge", LookupError())
    assert b"3" == shop.take(again, "charge")


@pytest.mark.parametrize("nth", (1, 2, 3, 4))
def test_a_lost_reply_runs_nothing_twice(shop: Shop, nth: int) -> None:
    claim = shop.won()
    done = 0
    paused = False
    for name in ("charge", "ship"):
        for part in ("begin", "finish"):
            done += 1
            shop.journals.mute = {"write"} if done == nth else set()
            assert claim.steps is not None
            if part == "begin":
                try:
                    run = claim.steps.enter(name)
                except StoreUnavailable:
                    paused = True
                    break
                shop.ran[name] += 1
            else:
                run.finish(b"1")
        if paused:
            break
    shop.journals.mute = set()
    shop.end(claim, Decision.RELEASE if paused else Decision.KEEP)

    if paused:
        again = shop.won()
        shop.take(again, "charge")
        shop.take(again, "ship")
        shop.end(again, Decision.KEEP)
    assert {"charge": 1, "ship": 1} == shop.ran
    record = shop.house.store._store.read(shop.house.key)
    assert record is not None
    assert State.COMPLETED is record.state


def test_an_untold_finish_goes_with_the_next_begin(shop: Shop) -> None:
    claim = shop.won()
    assert claim.steps is not None
    run = claim.steps.enter("charge")
    shop.ran["charge"] += 1
    shop.journals.down = {"write"}
    assert run.finish(b"1")
    with pytest.raises(StoreUnavailable):
        claim.steps.enter("ship")
    shop.journals.down = set()
    claim.steps.enter("ship")
    shop.dies()

    again = shop.won()
    assert b"1" == shop.take(again, "charge")
    assert 1 == shop.ran["charge"]


def test_a_death_before_the_finish_is_told_is_in_doubt(shop: Shop) -> None:
    claim = shop.won()
    assert claim.steps is not None
    run = claim.steps.enter("charge")
    shop.journals.down = {"write"}
    run.finish(b"1")
    shop.dies()
    shop.journals.down = set()

    assert "lease-expired" == shop.held()


def test_a_renamed_step_stops_the_request_before_its_view(shop: Shop) -> None:
    claim = shop.won()
    shop.take(claim, "charge")
    shop.dies()
    shop.steps = (Step("pay"), *SHOP[1:])

    assert [STEPS_CHANGED, STEPS_CHANGED] == [shop.held(), shop.held()]
    assert [("charge", "undeclared")] == [(event.step, event.why) for event in shop.told(events.StepsChangedHeld)]


def test_was_keeps_the_identity_of_a_renamed_step(shop: Shop) -> None:
    shop.take(shop.won(), "charge")
    shop.dies()
    shop.steps = (Step("pay", was="charge"), *SHOP[1:])

    assert b"1" == shop.take(shop.won(), "pay")


@pytest.mark.parametrize("dropped", (True, False))
def test_a_dropped_step(shop: Shop, dropped: bool) -> None:
    claim = shop.won()
    shop.take(claim, "quote")
    shop.take(claim, "charge")
    shop.dies()
    shop.steps = SHOP[:2]
    shop.options = {"dropped_steps": frozenset({"quote"})} if dropped else {}

    if not dropped:
        assert STEPS_CHANGED == shop.held()
        return
    again = shop.won()
    assert b"1" == shop.take(again, "charge")
    assert Decision.KEEP is shop.end(again, Decision.KEEP)


def test_a_journal_where_the_endpoint_has_no_steps(shop: Shop) -> None:
    shop.take(shop.won(), "charge")
    shop.dies()

    outcome = shop.house.claim()

    assert isinstance(outcome, Unknown)
    assert STEPS_CHANGED == outcome.reason


@pytest.mark.parametrize("any_order", (True, False))
def test_another_branch_stops_before_its_effect(shop: Shop, any_order: bool) -> None:
    shop.take(shop.won(), "charge")
    shop.dies()
    shop.steps = (*SHOP, Step("debit"))
    shop.options = {"steps_in_any_order": any_order}
    claim = shop.won()

    if any_order:
        shop.take(claim, "debit")
        return
    with pytest.raises(StepsChanged):
        shop.take(claim, "debit")
    with pytest.raises(StepsChanged):
        shop.take(claim, "charge")
    assert (1, 0) == (shop.ran["charge"], shop.ran["debit"])
    assert Decision.QUARANTINE is shop.end(claim, Decision.KEEP)
    assert STEPS_CHANGED == shop.held()


@pytest.mark.parametrize("decision", Decision)
def test_a_request_that_went_another_way_is_held_however_its_view_ends(shop: Shop, decision: Decision) -> None:
    """Paused, each retry would run into the same, and no operator would hear of it."""
    shop.take(shop.won(), "charge")
    shop.dies()
    claim = shop.won()
    with pytest.raises(StepsChanged):
        shop.take(claim, "ship")

    assert Decision.QUARANTINE is shop.end(claim, decision)
    assert STEPS_CHANGED == shop.held()


def test_an_answer_without_a_recorded_effect_is_not_kept(shop: Shop) -> None:
    shop.take(shop.won(), "charge")
    shop.dies()
    claim = shop.won()

    assert Decision.QUARANTINE is shop.end(claim, Decision.KEEP)
    assert STEPS_CHANGED == shop.held()


def test_other_arguments_are_noticed(shop: Shop) -> None:
    shop.take(shop.won(), "charge", digest=b"10 EUR")
    shop.dies()
    claim = shop.won()

    with pytest.raises(StepsChanged):
        shop.take(claim, "charge", digest=b"11 EUR")


def test_gathered_steps_resume_in_any_order() -> None:
    """Their order says nothing: see dbos-transact-py #688."""
    items = (b"a", b"b", b"c")
    for first, order in product(items, permutations(items)):
        shop = new_shop(new_house())
        shop.take(shop.won(), "charge", first, in_line=False)
        shop.dies()
        claim = shop.won()
        for item in order:
            shop.take(claim, "charge", item, in_line=False)

        assert Decision.KEEP is shop.end(claim, Decision.KEEP), (first, order)
        assert {"chargea": 1, "chargeb": 1, "chargec": 1} == shop.ran, (first, order)


def test_a_large_result_does_not_fail_the_request(shop: Shop) -> None:
    claim = shop.won()
    assert claim.steps is not None
    run = claim.steps.enter("charge")
    assert not run.finish(b"x" * (LARGEST_RESULT + 1))
    assert ["size"] == [event.why for event in shop.told(events.StepResultNotKept)]
    shop.dies()
    claim = shop.won()
    assert claim.steps is not None
    run = claim.steps.enter("charge")

    assert (True, None) == (run.recalled, run.result)
    assert isinstance(run.misfits(), StepsChanged)
    assert Decision.QUARANTINE is shop.end(claim, Decision.KEEP)


def test_all_results_of_a_request_have_a_limit(shop: Shop) -> None:
    claim = shop.won()
    assert claim.steps is not None
    kept = [
        claim.steps.enter("ship", str(number).encode()).finish(b"x" * LARGEST_RESULT)
        for number in range(LARGEST_JOURNAL // LARGEST_RESULT + 1)
    ]

    assert [True] * (len(kept) - 1) + [False] == kept
    assert ["total-size"] == [event.why for event in shop.told(events.StepResultNotKept)]


def test_a_request_has_at_most_200_steps(shop: Shop) -> None:
    claim = shop.won()
    for number in range(MOST_STEPS):
        shop.take(claim, "ship", str(number).encode())

    with pytest.raises(RuntimeError, match="200"):
        shop.take(claim, "ship", b"one more")
    assert MOST_STEPS == sum(shop.ran.values())


def test_misuse_runs_nothing(shop: Shop) -> None:
    claim = shop.won()
    assert claim.steps is not None
    shop.take(claim, "charge")
    with pytest.raises(RuntimeError, match="twice"):
        shop.take(claim, "charge")
    with pytest.raises(UndeclaredStep, match="refund"):
        shop.take(claim, "refund")
    claim.steps.enter("ship")
    with pytest.raises(RuntimeError, match="nest"):
        shop.take(claim, "quote")

    assert {"charge": 1} == shop.ran


@pytest.mark.parametrize("gone", (0, 1), ids=("newer", "older"))
def test_secrets_whose_journals_differ_after_a_crash(shop: Shop, gone: int) -> None:
    """Oldest first: a worker that dies between two writes leaves the newer journal behind."""
    claim = shop.won(identities=(0, 1))
    shop.take(claim, "ship", b"1")
    kept = shop.house.store._store._shared.journals
    del kept[shop.house.request(identity=gone).key]
    shop.dies()

    again = shop.won(identities=(0, 1))
    assert b"1" == shop.take(again, "ship", b"1")
    shop.take(again, "ship", b"2")
    shop.dies()

    assert {"ship1": 1, "ship2": 1} == shop.ran
    for identity in (0, 1):
        journal = shop.house.store._store.journals.read(shop.house.request(identity=identity).key)
        assert 2 == len(journal.entries)
    alone = shop.won(identities=(0,))
    assert [b"1", b"1"] == [shop.take(alone, "ship", item) for item in (b"1", b"2")]


def test_a_step_that_a_newer_journal_lacked_is_known_after_it_was_sent(shop: Shop) -> None:
    """Items have no order, so the write of another one may carry it before the view asks for it."""
    claim = shop.won(identities=(0, 1))
    shop.take(claim, "ship", b"2")
    del shop.house.store._store._shared.journals[shop.house.request(identity=0).key]
    shop.dies()

    again = shop.won(identities=(0, 1))
    assert [b"1", b"1"] == [shop.take(again, "ship", item) for item in (b"1", b"2")]
    assert {"ship1": 1, "ship2": 1} == shop.ran


@pytest.mark.parametrize("erased", (True, False))
def test_a_missing_data_key_is_replaced(shop: Shop, monkeypatch: pytest.MonkeyPatch, erased: bool) -> None:
    claim = shop.won()
    real, tries = shop.house.store._store.journals.write, count()

    def write(*args: Any, **kwargs: Any) -> None:
        if next(tries) == 1:
            raise DataKeyMissing("gone", erased=erased)
        real(*args, **kwargs)

    monkeypatch.setattr(shop.house.store._store.journals, "write", write)
    shop.take(claim, "charge")
    shop.dies()
    again = shop.won()

    if erased:
        with pytest.raises(StepsChanged):
            shop.take(again, "charge")
    else:
        assert b"1" == shop.take(again, "charge")
    assert 1 == shop.ran["charge"]


def test_a_corrupt_journal_is_quarantined(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.take(shop.won(), "charge")
    shop.dies()

    def recall(*args: Any, **kwargs: Any) -> None:
        raise CorruptRecord("damaged")

    monkeypatch.setattr(shop.house.store._store.journals, "recall", recall)
    for _ in range(2):
        with pytest.raises(CorruptRecord):
            shop.claim()


def test_no_step_begins_after_max_runtime(shop: Shop) -> None:
    claim = shop.won()
    shop.house.clock.advance(shop.policy.max_runtime + 1)

    with pytest.raises(LeaseLost):
        shop.take(claim, "quote")


def test_another_payload_changes_no_other_field_of_an_entry() -> None:
    values: dict[str, Any] = {each.name: f"a value of {each.name}" for each in fields(Entry)}
    payload: Any = "another payload"

    assert Entry(**values | {"payload": payload}) == Entry(**values).with_payload(payload)
