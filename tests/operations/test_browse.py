"""Pages of records with bounded work, signed cursors, versions, and the life of a record."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.capabilities import RecordPage, SeenRecord
from flask_idempotency.engine.journal import EMPTY, Journal
from flask_idempotency.engine.keys import StorageKey, keyed_digest
from flask_idempotency.engine.model import OnExpiry, Record, RequestInfo, State, StoredPayload
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.browse import Browsing, Place, browse, cursor_of, place_of, timeline, version_of
from flask_idempotency.operations.records import Case, Condition, Refused

NOW = 1_000.0
DIGEST, OTHER = keyed_digest(b"k" * 32), keyed_digest(b"o" * 32)

RECORD = Record(
    state=State.PROCESSING,
    token=b"t" * 16,
    fence=7,
    attempt=1,
    fingerprint=b"f" * 32,
    on_expiry=OnExpiry.QUARANTINE,
    info=RequestInfo("acme", "alice", "POST", "pay"),
    requested_at=NOW - 100,
    deadline=NOW + 20,
    remaining=20.0,
)


def seen(number: int = 0, **changes: Any) -> SeenRecord:
    token = number.to_bytes(16, "big")
    return SeenRecord(StorageKey(number.to_bytes(32, "big"), bytes(16)), replace(RECORD, **{"token": token, **changes}))


class Scans:
    """A store whose index has these records by state, and counts what it is asked."""

    def __init__(self, **records: list[SeenRecord]) -> None:
        self.records = {State(name): found for name, found in records.items()}
        self.calls: list[tuple[State, bytes, bytes | None]] = []

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        self.calls.append((state, after, tid))
        begin = int(after or b"0")
        found = self.records.get(state, [])
        some = found[begin : begin + limit]
        end = begin + limit
        wanted = tuple(each for each in some if tid in (None, each.key.tid))
        return RecordPage(wanted, str(end).encode() if end < len(found) else None)


def every(store: Any, wanted: Browsing, **options: Any) -> tuple[list[SeenRecord], int]:
    """Return what all pages of a list show, and how many pages there are."""
    found, pages = list[SeenRecord](), 0
    place: Place | None = Place()
    while place is not None:
        page = browse(store, wanted, place, **options)
        found, place, pages = [*found, *page.found], page.next, pages + 1
        assert pages < 200
    return found, pages


def test_pages_show_every_record_once_and_the_quarantined_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flask_idempotency.operations.browse.ROWS", 20)
    store = Scans(
        processing=[seen(number) for number in range(70)],
        quarantined=[seen(number, state=State.QUARANTINED) for number in range(100, 130)],
        completed=[seen(number, state=State.COMPLETED) for number in range(200, 210)],
    )

    found, pages = every(store, Browsing())

    assert 100 == len(found) == len({each.key.rid for each in found})
    assert State.QUARANTINED is found[0].record.state
    # A page that is not full at the end of one scan goes on with the next.
    assert pages == 5


def test_a_page_shows_first_what_needs_a_person() -> None:
    lapsed, running = seen(1, remaining=-5.0, deadline=NOW - 5), seen(2)
    older = seen(3, requested_at=NOW - 500)
    store = Scans(processing=[running, older, lapsed])

    found = browse(store, Browsing(), Place()).found  # type: ignore[arg-type]

    assert [lapsed, older, running] == list(found)


def test_a_filter_that_matches_nothing_stops_after_so_many_records() -> None:
    store: Any = Scans(completed=[seen(number, state=State.COMPLETED) for number in range(5_000)])

    page = browse(store, Browsing(conditions={Condition.COMPLETED}, endpoint="nothing"), Place())

    assert (1_000, 20) == (page.looked_at, len(store.calls))
    assert page.next is not None
    assert not page.found


def test_a_filter_of_many_empty_parts_stops_after_so_many_calls() -> None:
    store: Any = Scans()

    page = browse(store, Browsing(tids=[number.to_bytes(16, "big") for number in range(500)]), Place())

    assert 40 == len(store.calls)
    assert page.next == Place(40, b"")


class Journalling:
    """Journals without entries, which count how often they are read."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, key: StorageKey) -> Journal:
        self.reads += 1
        return EMPTY


def test_a_search_for_paused_records_stops_after_so_many_journals() -> None:
    """Each is a call of the store, and only a journal tells a paused record from one whose lease expired."""
    lapsed = [seen(number, on_expiry=OnExpiry.TAKEOVER, remaining=-1.0) for number in range(900)]
    store: Any = Scans(processing=lapsed)
    journals: Any = Journalling()

    page = browse(store, Browsing({Condition.PAUSED}), Place(), journals=journals)

    assert (200, 200) == (journals.reads, page.looked_at)
    assert page.next is not None
    assert ([], 5) == every(store, Browsing({Condition.PAUSED}), journals=journals)


def test_no_tenant_means_no_scan() -> None:
    store: Any = Scans(quarantined=[seen(1, state=State.QUARANTINED)])

    assert (browse(store, Browsing(tids=()), Place()).found, store.calls) == ((), [])


def test_a_use_with_records_under_two_secrets_is_one_row() -> None:
    twins = [seen(1, state=State.QUARANTINED), SeenRecord(StorageKey(b"x" * 32, b"y" * 16), seen(1).record)]
    store: Any = Scans(quarantined=[twins[0], replace(twins[1], record=twins[0].record)])

    assert 1 == len(browse(store, Browsing(), Place()).found)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    (
        ({Condition.LEASE_EXPIRED}, {1}),
        ({Condition.IN_FLIGHT}, {2}),
        ({Condition.LEASE_EXPIRED, Condition.IN_FLIGHT}, {1, 2}),
        ({Condition.QUARANTINED}, {3}),
        ({Condition.PAUSED}, set()),
    ),
)
def test_a_condition_is_finer_than_a_state(conditions: set[Condition], expected: set[int]) -> None:
    store: Any = Scans(
        processing=[seen(1, remaining=-5.0, deadline=NOW - 5), seen(2)],
        quarantined=[seen(3, state=State.QUARANTINED, remaining=-5.0, deadline=NOW - 5)],
    )

    found, _ = every(store, Browsing(conditions=conditions))

    assert expected == {int.from_bytes(each.key.rid, "big") for each in found}


# Cursors.

FILTERS = (
    Browsing(),
    Browsing(conditions={Condition.COMPLETED}),
    Browsing(tids=(b"a" * 16,)),
    Browsing(tids=(b"a" * 16, b"b" * 16)),
    Browsing(tids=(b"", b"a" * 16)),
    Browsing(endpoint="pay"),
    Browsing(endpoint=""),
    Browsing(endpoint="-"),
    Browsing(older_than=60.0),
    Browsing(beginning="abcd"),
)


def test_a_cursor_leads_back_to_its_place() -> None:
    for place in (Place(1, b""), Place(1, b"\0"), Place(1, b"x" * 300)):
        assert place == place_of(cursor_of(place, Browsing(), DIGEST), Browsing(), [OTHER, DIGEST])


def test_a_cursor_is_good_for_its_filter_only() -> None:
    for made_for, wanted in product(FILTERS, FILTERS):
        cursor = cursor_of(Place(0, b"here"), made_for, DIGEST)
        if made_for is wanted:
            assert Place(0, b"here") == place_of(cursor, wanted, [DIGEST])
        else:
            with pytest.raises(Refused, match="belongs to another filter"):
                place_of(cursor, wanted, [DIGEST])


def test_a_changed_cursor_is_refused() -> None:
    cursor = cursor_of(Place(0, b"a place of the store"), Browsing(), DIGEST)
    for place in range(len(cursor) - 1):
        changed = cursor[:place] + ("A" if cursor[place] != "A" else "B") + cursor[place + 1 :]
        with pytest.raises(Refused):
            place_of(changed, Browsing(), [DIGEST])


def test_a_cursor_of_another_secret_is_refused() -> None:
    with pytest.raises(Refused):
        place_of(cursor_of(Place(), Browsing(), OTHER), Browsing(), [DIGEST])


def test_a_cursor_past_the_last_scan_is_refused() -> None:
    """Such as one of a filter that had more tenants under an earlier release."""
    with pytest.raises(Refused):
        place_of(cursor_of(Place(9, b""), Browsing(), DIGEST), Browsing(), [DIGEST])


# Versions.


@pytest.mark.parametrize(
    "changes",
    (
        {"state": State.QUARANTINED},
        {"token": b"u" * 16},
        {"fence": 8},
        {"attempt": 2},
        {"deadline": NOW + 20.000001},
    ),
)
def test_a_change_of_the_record_changes_its_version(changes: dict[str, Any]) -> None:
    before, after = (
        Case((SeenRecord(StorageKey(bytes(32), bytes(16)), each),)) for each in (RECORD, replace(RECORD, **changes))
    )

    assert version_of(before, DIGEST) == version_of(before, DIGEST)
    assert version_of(before, DIGEST) != version_of(after, DIGEST)


def test_the_passing_of_time_changes_no_version() -> None:
    later = replace(RECORD, remaining=1.0)
    cases = [Case((SeenRecord(StorageKey(bytes(32), bytes(16)), each),)) for each in (RECORD, later)]

    assert version_of(cases[0], DIGEST) == version_of(cases[1], DIGEST)


def test_a_version_is_of_all_records_of_the_use() -> None:
    one, two = seen(1), seen(2)

    assert version_of(Case((one,)), DIGEST) != version_of(Case((one, two)), DIGEST)
    assert version_of(Case((one,)), DIGEST) != version_of(Case((one,)), OTHER)


# The life of a record.


def life(record: Record | None, *, policy: Policy = Policy(), audit: Any = ()) -> list[str]:  # noqa: B008 - it is frozen
    return [each.what for each in timeline(record, policy, journal=EMPTY, steps=(), audit=audit)]


def test_a_running_request() -> None:
    assert ["First used", "Claimed or renewed last", "Lease ends"] == life(RECORD)


def test_a_first_claim_that_was_not_renewed() -> None:
    assert ["First used", "Lease ends"] == life(replace(RECORD, requested_at=NOW - 10))


def test_a_request_that_was_taken_over() -> None:
    episodes = timeline(replace(RECORD, attempt=3), Policy(), journal=EMPTY, steps=(), audit=())

    assert ["First used", "Taken over"] == [each.what for each in episodes[:2]]
    assert None is episodes[1].at
    assert "Attempt 3" in episodes[1].detail


def test_a_request_past_its_point() -> None:
    """The claim allows take-over under this policy, and the record does not any more."""
    marked = Policy(effects="marked")

    assert "Past its point of no return" in life(RECORD, policy=marked)
    assert "Past its point of no return" not in life(replace(RECORD, on_expiry=OnExpiry.TAKEOVER), policy=marked)
    assert "Past its point of no return" not in life(RECORD)


def test_a_quarantined_request_whose_lease_ended() -> None:
    record = replace(RECORD, state=State.QUARANTINED, reason="lease-expired", deadline=NOW - 60, remaining=-60.0)

    assert ["First used", "Claimed or renewed last", "Lease ended", "Quarantined"] == life(record)


def test_a_completed_request() -> None:
    payload = StoredPayload(b"", 201, success=True, byte_size=12)
    record = replace(
        RECORD, state=State.COMPLETED, completed_at=NOW - 50, payload=payload, deadline=NOW + 100, remaining=100.0
    )
    episodes = timeline(record, Policy(), journal=EMPTY, steps=(), audit=())

    assert ["First used", "Completed", "Expires"] == [each.what for each in episodes]
    assert "Status 201, 12 bytes." == episodes[1].detail
    assert [False, False, True] == [each.ahead for each in episodes]


def test_what_operators_did_stands_in_its_place() -> None:
    audit = [
        AuditEntry("resumed", "quarantined", "ann", "fixed", at=NOW - 90),
        AuditEntry("completed", "quarantined", "resolver", "found at the bank", at=NOW - 1),
        AuditEntry("released", "quarantined", "bob", "x", forced=True, certain=False, at=NOW),
        AuditEntry("never-happened", "quarantined", "eve", "y", step="charge", at=NOW + 1),
    ]

    episodes = timeline(None, Policy(), journal=EMPTY, steps=(), audit=audit)

    assert [
        "Operator ann resumed it",
        "A resolver completed it",
        "Operator bob released it",
        "Operator eve settled step charge as never-happened",
    ] == [each.what for each in episodes]
    assert "may not have happened" in episodes[2].detail
    assert "overruled" in episodes[2].detail
