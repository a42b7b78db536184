"""Nothing readable is left of an erased tenant's answers."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.engine.capabilities import Page
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.model import ERASED, State, StoredPayload
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.rotate import WipeReport, still_open, wipe
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.maintenance.conftest import ANSWER, Office

TID, OTHER = bytes(16), b"o" * 16
FAST = Batcher(batch=2)


def plain(store: MemoryStore, tid: bytes = TID) -> Any:
    """A key whose answer is stored as it is."""
    key, token = a_key(tid=tid), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    return key


def running(store: MemoryStore, tid: bytes = TID) -> Any:
    key, token = a_key(tid=tid), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    return key, token


def wiped(payload: StoredPayload | None) -> bool:
    return payload is not None and (payload.data, payload.sealed_by) == (b"", ERASED)


def test_wipe_erases_plain_and_sealed_responses_of_one_tenant_only(office: Office) -> None:
    """Nothing is left but that the work was done, its status and its size; and each ends when it would have."""
    keys = [plain(office.store) for _ in range(3)]
    keys += [office.answer(ANSWER, key=a_key(tid=TID)) for _ in range(2)]
    before = [found(office.store, key) for key in keys]
    other = plain(office.store, OTHER)
    office.store.data_keys.shred(TID)

    assert WipeReport(wiped=5) == wipe(office.store.responses, [TID], drain=FAST)
    after = [found(office.store, key) for key in keys]
    assert all(wiped(record.payload) and record.erased for record in after)
    assert [(r.deadline, r.payload and r.payload.status) for r in before] == [
        (r.deadline, r.payload and r.payload.status) for r in after
    ]
    assert PAYLOAD == found(office.store, other).payload


def test_wipe_covers_all_ids_of_a_tenant(office: Office) -> None:
    """While secrets rotate that is more than one."""
    keys = [plain(office.store, tid) for tid in (TID, OTHER)]
    for tid in (TID, OTHER):
        office.store.data_keys.shred(tid)

    assert 2 == wipe(office.store.responses, [TID, OTHER], drain=FAST).wiped
    assert all(wiped(found(office.store, key).payload) for key in keys)


def test_the_budget_of_a_wipe_ends_it_between_two_ids(office: Office) -> None:
    """A tenant has an id for each of its parts, perhaps with one batch of records each."""
    keys = [plain(office.store, tid) for tid in (TID, OTHER)]
    for tid in (TID, OTHER):
        office.store.data_keys.shred(tid)
    store, drain = office.store, Batcher(batch=2, budget=0.0)

    report = wipe(store.responses, [TID, OTHER], drain=drain, recovery=store.recovery)
    assert WipeReport(wiped=1, finished=False) == report
    assert [True, False] == [wiped(found(store, key).payload) for key in keys]


def test_wipe_can_be_repeated(office: Office) -> None:
    plain(office.store)
    office.store.data_keys.shred(TID)

    assert [WipeReport(wiped=1), WipeReport(passed_over=1)] == [
        wipe(office.store.responses, [TID], drain=FAST) for _ in range(2)
    ]


def test_wipe_leaves_keys_alone_that_were_first_used_after_the_erasure(office: Office) -> None:
    """A tenant may come back at once."""
    office.store.data_keys.shred(TID)
    office.clock.advance(1)
    key = plain(office.store)

    assert WipeReport() == wipe(office.store.responses, [TID], drain=FAST)
    assert PAYLOAD == found(office.store, key).payload


def test_wipe_reports_what_it_did_before_a_store_failure(office: Office) -> None:
    for _ in range(5):
        plain(office.store)
    office.store.data_keys.shred(TID)
    walk, walks, told = office.store.responses.scan, list[bytes](), list[int]()

    class Failing:
        replace = office.store.responses.replace
        count = office.store.responses.count

        def scan(self, *, after: bytes = b"", **options: Any) -> Page:
            walks.append(after)
            if len(walks) > 2:
                raise StoreUnavailable("gone")
            return walk(after=after, **options)

    with pytest.raises(StoreUnavailable):
        wipe(Failing(), [TID], drain=FAST, on_progress=told.append)

    rest = wipe(office.store.responses, [TID], drain=FAST).wiped
    assert (5, 0) == (told[-1] + rest, wipe(office.store.responses, [TID], drain=FAST).wiped)
    assert 0 < rest < 5


def wipe_condemned(office: Office) -> int:
    store = office.store
    return wipe(store.responses, [TID], drain=FAST, recovery=store.recovery, keep_of=lambda about: 60.0).condemned


def test_a_quarantined_response_is_wiped_and_completed(office: Office) -> None:
    key = plain(office.store)
    payload = found(office.store, key).payload
    assert payload is not None
    office.store.mark_corrupt(key, payload)
    office.store.data_keys.shred(TID)

    assert 1 == wipe_condemned(office)
    after = found(office.store, key)
    assert (State.COMPLETED, True, 60.0) == (after.state, wiped(after.payload), after.remaining)
    assert 0 == wipe_condemned(office)


def test_wipe_completes_no_quarantined_key_without_a_response(office: Office) -> None:
    key, token = running(office.store)
    office.store.quarantine(key, token, "view-crashed")
    before = found(office.store, key)

    assert 0 == wipe_condemned(office)
    assert before == found(office.store, key)


def test_keys_without_a_response_are_counted(office: Office) -> None:
    """In progress or quarantined: a late owner may bring one, and a plain one would be readable."""
    running(office.store), running(office.store, OTHER), plain(office.store)
    key, token = running(office.store)
    office.store.quarantine(key, token, "view-crashed")

    assert (2, 1) == (still_open(office.store.recovery, [TID]), still_open(office.store.recovery, [OTHER]))


def test_a_late_plain_response_is_not_replayed_and_the_next_wipe_erases_it(office: Office) -> None:
    key, token = running(office.store)
    office.store.data_keys.shred(TID)
    assert WipeReport() == wipe(office.store.responses, [TID], drain=FAST)
    office.store.complete(key, token, PAYLOAD, keep=KEEP)

    assert found(office.store, key).erased
    assert 1 == wipe(office.store.responses, [TID], drain=FAST).wiped
    assert wiped(found(office.store, key).payload)
    with pytest.raises(LeaseLost):
        office.store.release(key, token)
