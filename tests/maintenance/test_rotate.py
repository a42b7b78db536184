"""Answers are sealed anew under the newest key of the ring, while everybody goes on."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.claim import SealedResponse
from flask_idempotency.engine.errors import ConfigurationError, DataKeyMissing, KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.keys import OWNER_BYTES
from flask_idempotency.engine.model import ERASED, SealContext, StoredPayload, StoredResponse
from flask_idempotency.engine.quota import Drift, Quota
from flask_idempotency.engine.store import Codec
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.rotate import GRACE_SECONDS, MOST_BLOCKED, RotateReport, SealReport
from flask_idempotency.testing.contract.support import KEEP, a_key, found
from tests.maintenance.conftest import ANSWER, Office


def test_every_response_is_sealed_under_the_newest_key_and_reads_as_before(office: Office) -> None:
    """Of several tenants, in pages of two; the old key is not needed any more afterwards."""
    keys = [office.answer(replace(ANSWER, body=b"%d" % number)) for number in range(5)]
    office.turn(("2026", "2025"))
    report = office.rotate()

    assert (5, 5, 0, 0) == (report.resealed, report.closed, report.passed_over, report.unreadable)
    assert {"2026": 5} == office.store.responses.count()
    office.turn(("2026",))
    assert [b"%d" % number for number in range(5)] == [office.opened(key).body for key in keys]


def test_rotation_changes_only_the_seal(office: Office) -> None:
    key = office.answer(quota=Quota())
    before, usage = found(office.store, key), office.store.ledger.usage(key.tid)
    office.turn(("2026", "2025"))
    office.rotate()
    after = found(office.store, key)

    assert after.payload is not None
    assert before.payload is not None
    assert before == replace(after, payload=before.payload)
    assert replace(after.payload, data=before.payload.data, sealed_by=before.payload.sealed_by) == before.payload
    assert (usage, Drift()) == (office.store.ledger.usage(key.tid), office.store.ledger.reconcile(key.tid))


def test_a_second_rotation_has_no_work(office: Office) -> None:
    office.answer()
    office.turn(("2026", "2025"))

    assert [False, True, True] == [office.rotate(grace=60).done for _ in range(3)]
    assert RotateReport() == office.rotate(grace=60)


def test_rotation_leaves_plain_responses_alone(office: Office) -> None:
    """Anyone who can write to the store may have planted them: a janitor must not make them genuine."""
    office.turn(None)
    key = office.answer()
    before = found(office.store, key)
    office.turn(("2025",))
    sealed = office.answer()
    office.turn(("2026", "2025"))
    report = office.rotate()

    assert (1, 1, 0) == (report.resealed, report.plain, report.unreadable)
    assert before == found(office.store, key)
    assert "2026" == office.kid(sealed)
    assert (True, 1) == ((again := office.rotate()).done, again.plain)


def test_only_seal_plain_seals_plain_responses(office: Office) -> None:
    """The answers that you stored before you switched encryption on. Answers under an old key stay as they are."""
    office.turn(None)
    plain = [office.answer() for _ in range(3)]
    office.turn(("2025",))
    old = office.answer()
    office.turn(("2026", "2025"))
    before = found(office.store, old)
    counted: list[int] = []
    report = office.seal_plain(drain=Batcher(2), on_progress=counted.append)

    assert SealReport(sealed=3) == report
    assert [1, 2, 3] == counted
    assert [("2026", ANSWER)] * 3 == [(office.kid(key), office.opened(key)) for key in plain]
    assert before == found(office.store, old)
    assert SealReport() == office.seal_plain(drain=Batcher(2))


def test_seal_plain_leaves_erased_damaged_and_foreign_responses_alone(office: Office) -> None:
    office.turn(None)
    ours, damaged, erased, theirs = (office.answer() for _ in range(4))
    office.damage(damaged)
    office.store.data_keys.shred(erased.tid)
    office.turn(("2025",))
    owner = found(office.store, ours).token[:OWNER_BYTES]
    untouched = [found(office.store, key) for key in (damaged, erased, theirs)]
    for key in (damaged, erased):
        assert owner != found(office.store, key).token[:OWNER_BYTES]
    reports = [
        office.seal_plain(owner=owner),
        office.seal_plain(),
    ]

    assert [SealReport(sealed=1), SealReport(sealed=1, passed_over=1, unreadable=1)] == reports
    assert untouched[:2] == [found(office.store, key) for key in (damaged, erased)]


def test_seal_plain_seals_no_response_if_encryption_is_required(office: Office) -> None:
    office.turn(None)
    key = office.answer()
    before = found(office.store, key)
    office.turn(("2025",), required=True)
    report = office.seal_plain()

    assert (SealReport(unreadable=1), before) == (report, found(office.store, key))


def test_old_data_keys_are_deleted_only_after_the_grace_period(office: Office) -> None:
    key = office.answer()
    office.turn(("2026", "2025"))
    assert (1, 0) == (office.rotate(grace=GRACE_SECONDS).closed, office.rotate(grace=GRACE_SECONDS).retired)
    office.clock.advance(GRACE_SECONDS - 1)
    assert (0, 2) == (office.rotate(grace=GRACE_SECONDS).retired, len(office.store.data_keys.read_keys(key.tid).keys))
    office.clock.advance(1)
    assert 1 == office.rotate(grace=GRACE_SECONDS).retired
    assert {"2026": 1} == office.store.data_keys.count()


def test_a_data_key_stays_while_a_response_under_it_cannot_be_sealed_again(office: Office) -> None:
    """Whoever can mend the answer will need it. The answer is left as it is: a task quarantines nothing."""
    key = office.answer()
    damaged = office.damage(key)
    office.turn(("2026", "2025"))
    reports = [office.rotate() for _ in range(3)]

    assert [(0, 1, 0)] * 3 == [(each.resealed, each.unreadable, each.retired) for each in reports]
    assert damaged == found(office.store, key)


def test_a_worker_that_seals_under_the_old_key_during_a_rotation_seals_again(office: Office) -> None:
    """It has that key in mind, and runs a release that still has the old ring: it is refused, and makes a new one."""
    old = Office(office.store, office.clock, ("2025",))
    key, token, binding = old.claim()
    payload = old.codec.seal(ANSWER, binding)
    office.turn(("2026", "2025"))
    office.rotate()
    with pytest.raises(DataKeyMissing):
        old.store.complete(key, token, payload, keep=KEEP)
    sealing = SealedResponse(old.codec, [binding], ANSWER)
    sealing.write(lambda each: old.store.complete(key, token, *each, keep=KEEP))

    assert ANSWER == office.opened(key)
    assert 1 == office.rotate().resealed
    assert ("2026", ANSWER) == (office.kid(key), office.opened(key))


def test_a_response_that_another_process_changes_is_passed_over(office: Office) -> None:
    gone, anew = office.answer(), office.answer(key=a_key())
    office.turn(("2026", "2025"))

    class Slow:
        """Between the look and the write, the rest of the world goes on."""

        prepare, forget, seal = office.codec.prepare, office.codec.forget, office.codec.seal
        steps = office.codec.steps

        def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
            result = office.codec.open(payload, binding)
            if binding.key == gone:
                office.store.data_keys.shred(gone.tid)
            elif payload.sealed_by is not None and payload.sealed_by.kid == "2025":
                again = office.codec.seal(replace(result, body=b"newer"), binding)
                office.store.responses.replace(anew, payload, again)
            return result

    slow: Codec = Slow()
    report = office.rotate(codec=slow)

    assert (0, 2) == (report.resealed, report.passed_over)
    assert (True, b"newer") == (found(office.store, gone).erased, office.opened(anew).body)


@pytest.mark.parametrize("kids", (("2025",), None), ids=("sealed", "plain"))
def test_rotation_wipes_erased_responses(office: Office, kids: tuple[str, ...] | None) -> None:
    office.turn(kids)
    key = office.answer(quota=Quota())
    before = office.store.ledger.usage(key.tid)
    office.store.data_keys.shred(key.tid)
    office.turn(("2026", "2025"))
    reports = [office.rotate() for _ in range(2)]
    after = found(office.store, key)

    assert [(0, 1, 0, 0), (0, 0, 1, 0)] == [(r.resealed, r.wiped, r.passed_over, r.unreadable) for r in reports]
    assert after.payload is not None
    assert (b"", ERASED, True) == (after.payload.data, after.payload.sealed_by, after.erased)
    assert (before, {}) == (office.store.ledger.usage(key.tid), dict(office.store.responses.count()))


def test_damaged_data_keys_of_a_tenant_do_not_block_other_tenants(office: Office) -> None:
    damaged, fine = office.answer(), [office.answer() for _ in range(3)]
    office.turn(("2026", "2025"))
    shelf = office.store.data_keys.read_keys(damaged.tid)
    broken = DataKey(shelf.last + 1, "2026", b"damaged")
    office.store.data_keys.add(damaged.tid, broken, store=shelf.store, after=shelf.last)
    report = office.rotate()

    assert (3, 1, 0) == (report.resealed, report.blocked, report.unreadable)
    assert ["2026"] * 3 == [office.kid(key) for key in fine]
    assert ("2025", ANSWER) == (office.kid(damaged), office.opened(damaged))


def test_a_key_service_that_is_away_ends_the_rotation(office: Office) -> None:
    for _ in range(MOST_BLOCKED + 5):
        office.answer()
    office.turn(("2026", "2025"))
    asked: list[int] = []

    class Away:
        """Opens nothing and seals nothing."""

        prepare, forget, steps = office.codec.prepare, office.codec.forget, office.codec.steps

        def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
            asked.append(1)
            raise KeyProviderUnavailable("away")

        def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
            raise KeyProviderUnavailable("away")

    with pytest.raises(KeyProviderUnavailable, match="away"):
        office.rotate(codec=Away(), drain=Batcher())
    assert MOST_BLOCKED == len(asked)


def test_rotation_never_stores_a_sealed_response_in_clear(office: Office) -> None:
    key = office.answer()
    before = found(office.store, key)
    office.turn(None)
    office.ring = KeyRing({"2026": bytes(range(32))})
    with pytest.raises(ConfigurationError):
        office.rotate()

    assert before == found(office.store, key)


def test_two_rotations_at_once_seal_each_response_once(office: Office) -> None:
    keys = [office.answer() for _ in range(30)]
    office.turn(("2026", "2025"))
    reports: list[RotateReport] = []
    threads = [threading.Thread(target=lambda: reports.append(office.rotate(batch=3))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 30 == sum(report.resealed for report in reports)
    assert {ANSWER.body} == {office.opened(key).body for key in keys}


def test_the_next_rotation_finishes_a_killed_one(office: Office) -> None:
    keys = [office.answer() for _ in range(6)]
    office.turn(("2026", "2025"))

    def killed(touched: int) -> None:
        raise StoreUnavailable("killed here")

    with pytest.raises(StoreUnavailable):
        office.rotate(drain=Batcher(batch=2, on_progress=killed))
    assert {"2025": 4, "2026": 2} == office.store.responses.count()
    assert [ANSWER] * 6 == [office.opened(key) for key in keys]

    assert 4 == office.rotate().resealed


def test_responses_of_another_application_are_left_alone(office: Office) -> None:
    """It may have no ring, and would never open them again."""
    ours, theirs = office.answer(), office.answer()
    owner = found(office.store, ours).token[:OWNER_BYTES]
    before = found(office.store, theirs)
    office.turn(("2026", "2025"))

    report = office.rotate(owner=owner)
    assert (1, 0, 0) == (report.resealed, report.unreadable, report.retired)
    assert before == found(office.store, theirs)
    assert office.opened(ours) == ANSWER


def test_a_data_key_of_a_foreign_ring_is_deleted_once_unused(office: Office) -> None:
    """Its ring key was destroyed, as after a purge: `keys status` is not to speak of it for ever."""
    key = office.answer()
    office.turn(("2026",))

    assert 1 == office.rotate().unreadable
    assert {"2025": 1} == office.store.data_keys.count()
    office.clock.advance(KEEP)
    runs = [office.rotate() for _ in range(2)]
    assert [(1, 0), (0, 1)] == [(run.closed, run.retired) for run in runs]
    assert (None, {}) == (office.store.read(key), office.store.data_keys.count())


def test_the_data_key_of_a_quarantined_response_stays(office: Office) -> None:
    """Its ring key may be put back, and then it can be reopened."""
    key = office.answer()
    office.turn(("2026",))
    payload = found(office.store, key).payload
    assert payload is not None
    office.store.mark_corrupt(key, payload)

    for _ in range(3):
        report = office.rotate(recovery=office.store.recovery)
        assert (0, 0) == (report.closed, report.retired)
    office.turn(("2026", "2025"))
    assert office.opened(key) == ANSWER
