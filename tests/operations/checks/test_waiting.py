"""Keys that wait for somebody."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.capabilities import Finding, RecordPage, Verdict
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.operations.doctor import LOOKED_AT, PATIENCE_SECONDS, RETRIED_SECONDS, lapsed, quarantined
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token
from tests.operations.checks.judging import worst


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
def store(clock: FrozenClock) -> MemoryStore:
    return MemoryStore(clock=clock)


def claim(store: MemoryStore, on_lapse: OnExpiry = OnExpiry.QUARANTINE) -> None:
    store.claim(a_request(a_key(), on_lapse=on_lapse), token=a_token(), lease=LEASE)


def test_a_quarantined_key_waits_for_a_person(store: MemoryStore, clock: FrozenClock) -> None:
    """How many, and since when."""
    key, token = a_key(), a_token()
    store.claim(a_request(key), token=token, lease=LEASE)
    store.quarantine(key, token, "test")
    clock.advance(LEASE + 7200)

    found = quarantined(store.recovery)

    assert Verdict.ADVICE is worst(found)
    assert "1 key is quarantined, the first for 2 h" in found[0].text


def test_where_nothing_is_quarantined_nobody_waits(store: MemoryStore, clock: FrozenClock) -> None:
    """Not for one that is at work, nor for one that has lapsed."""
    claim(store)
    before = quarantined(store.recovery)
    clock.advance(LEASE + 1)

    assert [Verdict.FINE, Verdict.FINE] == [worst(before), worst(quarantined(store.recovery))]


def looked(store: MemoryStore, clock: FrozenClock) -> list[Finding]:
    return lapsed(store.recovery, now=clock.now)


@pytest.mark.parametrize(
    ("on_lapse", "since", "verdict"),
    (
        pytest.param(OnExpiry.QUARANTINE, -1, Verdict.FINE, id="at work"),
        pytest.param(OnExpiry.QUARANTINE, PATIENCE_SECONDS - 1, Verdict.FINE, id="the janitor's turn is to come"),
        pytest.param(OnExpiry.QUARANTINE, PATIENCE_SECONDS + 1, Verdict.FAULT, id="no janitor came"),
        pytest.param(OnExpiry.TAKEOVER, RETRIED_SECONDS - 1, Verdict.FINE, id="a retry may come"),
        pytest.param(OnExpiry.TAKEOVER, RETRIED_SECONDS + 1, Verdict.ADVICE, id="no retry came"),
    ),
)
def test_a_vanished_owner_is_somebodys_to_notice(
    on_lapse: OnExpiry, since: float, verdict: Verdict, store: MemoryStore, clock: FrozenClock
) -> None:
    """A janitor's, by its rule, or the next retry's."""
    claim(store, on_lapse)
    clock.advance(LEASE + since)

    assert verdict is worst(looked(store, clock))


def test_both_kinds_are_told(store: MemoryStore, clock: FrozenClock) -> None:
    claim(store, OnExpiry.QUARANTINE)
    claim(store, OnExpiry.TAKEOVER)
    claim(store, OnExpiry.TAKEOVER)
    clock.advance(LEASE + RETRIED_SECONDS + 1)

    found = looked(store, clock)

    assert [(Verdict.FAULT, "1 key is"), (Verdict.ADVICE, "2 keys are")] == [
        (finding.verdict, finding.text[: finding.text.index(" w")]) for finding in found
    ]


def test_a_store_of_many_sheets_is_looked_through_for_a_moment_only(
    store: MemoryStore, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sheets are not the last ones, and a million records are no reason to wait for a minute."""
    sheets: list[int] = []

    def stale(*, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        sheets.append(limit)
        return RecordPage((), after=b"more")

    monkeypatch.setattr(store.recovery, "expired_leases", stale)

    assert Verdict.FINE is worst(looked(store, clock))
    assert LOOKED_AT == sum(sheets)
