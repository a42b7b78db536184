"""What people are told of a store that may have forgotten keys, and what they may do about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flask_idempotency.engine.capabilities import UnfinishedCounts as Records
from flask_idempotency.engine.model import DataLossStatus
from flask_idempotency.operations.admin import (
    DataLossReport,
    acknowledge,
    check_acknowledgeable,
    initialise,
    memory_status,
)
from flask_idempotency.operations.records import Refused
from flask_idempotency.stores.memory import MemoryStore
from tests.operations.memories import PARTS, Kept, Told, standing

FINE = standing()
MISSING = standing(missing=PARTS, store_id=None)
CHANGED = standing(changed=2)
FOREIGN = standing(foreign=PARTS, store_id="theirs")
HELD_LONG_ENOUGH = standing(changed=2, hold=10.0)


def status(how: DataLossStatus, **rules: Any) -> DataLossReport:
    return memory_status(Kept(how, Told(**rules)))


NEW_KEYS_RUN = (
    (FINE, "refuse", True),
    (standing(acknowledged=3), "refuse", True),
    (MISSING, "refuse", False),
    (CHANGED, "refuse", False),
    (HELD_LONG_ENOUGH, "refuse", False),
    (CHANGED, "hold", False),
    (HELD_LONG_ENOUGH, "hold", True),
    (standing(missing=1, hold=10.0), "hold", False),
    (standing(changed=1, missing=1, hold=10.0), "hold", False),
    (MISSING, "run", True),
    (CHANGED, "run", True),
    (FOREIGN, "run", False),
    (FOREIGN, "hold", False),
)


def test_it_says_whether_new_keys_run() -> None:
    for how, after_loss, run in NEW_KEYS_RUN:
        assert run is status(how, after_loss=after_loss).new_keys_run, (how, after_loss)


@pytest.mark.parametrize(
    ("how", "rules", "says", "remedies"),
    (
        pytest.param(FINE, {}, "It has lost no data.", (), id="fine"),
        pytest.param(standing(acknowledged=1), {}, "was acknowledged", (), id="acknowledged"),
        pytest.param(
            MISSING, {}, "emptied, or it was never initialised", ("redis ack", "redis init"), id="all missing"
        ),
        pytest.param(
            replace(MISSING, emptied=True), {}, "held keys before", ("redis ack", "list --state"), id="emptied"
        ),
        pytest.param(standing(missing=3), {}, "3 of its 8 parts", ("redis ack", "list --state"), id="some missing"),
        pytest.param(CHANGED, {}, "1 min ago", ("redis ack", "list --state"), id="changed"),
        pytest.param(CHANGED, {"after_loss": "hold"}, "1 min ago", ("New keys run again when",), id="changed, held"),
        pytest.param(HELD_LONG_ENOUGH, {"after_loss": "hold"}, "run again since", ("redis ack",), id="held"),
        pytest.param(FOREIGN, {}, "theirs, and IDEMPOTENCY_STORE_ID names shop", ("nothing to ack",), id="another"),
        pytest.param(
            replace(FOREIGN, store_id=None), {}, "of several stores", ("IDEMPOTENCY_STORE ",), id="put together"
        ),
        pytest.param(
            replace(FOREIGN, store_id="shop"), {}, "TENANT_SHARDS", ("IDEMPOTENCY_TENANT_SHARDS",), id="another layout"
        ),
        pytest.param(FOREIGN, {"store_id": None}, "TENANT_SHARDS", ("IDEMPOTENCY_TENANT_SHARDS",), id="unnamed"),
        pytest.param(MISSING, {"after_loss": "run"}, "IDEMPOTENCY_AFTER_LOSS is run", (), id="whatever it is"),
    ),
)
def test_it_says_what_happened_and_what_to_do(
    how: DataLossStatus, rules: dict[str, Any], says: str, remedies: tuple[str, ...]
) -> None:
    told = status(how, **rules)

    assert says in told.text
    assert [] == [remedy for remedy in remedies if remedy not in told.remedy]
    assert bool(remedies) is bool(told.remedy)


def test_a_part_that_is_gone_is_never_made_ready_as_if_it_were_new() -> None:
    assert "redis init" not in status(standing(missing=3)).remedy
    assert "redis init" not in status(replace(MISSING, emptied=True)).remedy


@pytest.mark.parametrize(
    ("how", "wait"),
    ((FINE, None), (FOREIGN, None), (CHANGED, 40.0), (MISSING, 40.0), (HELD_LONG_ENOUGH, 0.0)),
)
def test_it_says_how_long_to_wait(how: DataLossStatus, wait: float | None) -> None:
    assert wait == status(how).wait


@pytest.mark.parametrize(
    ("how", "forced", "refused"),
    (
        (CHANGED, False, "40 s left"),
        (CHANGED, True, None),
        (HELD_LONG_ENOUGH, False, None),
        (FOREIGN, False, "nothing to acknowledge"),
        (FOREIGN, True, "nothing to acknowledge"),
    ),
)
def test_survivors_are_waited_for_and_another_store_is_never_acknowledged(
    how: DataLossStatus, forced: bool, refused: str | None
) -> None:
    if refused is None:
        check_acknowledgeable(status(how), forced=forced)
        return
    with pytest.raises(Refused, match=refused) as raised:
        check_acknowledgeable(status(how), forced=forced)
    assert str(raised.value).endswith("Nothing was changed.")


def test_what_the_store_refuses_is_refused_in_its_words() -> None:
    kept = Kept(CHANGED, refusal="It changed hands.")

    with pytest.raises(Refused, match="It changed hands"):
        acknowledge(kept, seen=CHANGED, forced=True)
    with pytest.raises(Refused, match="It changed hands"):
        initialise(kept, None)


@pytest.mark.parametrize("forced", (False, True))
def test_only_who_means_to_go_before_the_time_does(forced: bool) -> None:
    kept = Kept(HELD_LONG_ENOUGH)

    acknowledge(kept, seen=HELD_LONG_ENOUGH, forced=forced)

    assert [("acknowledge", forced)] == kept.asked


@pytest.mark.parametrize(("how", "created"), ((MISSING, True), (FINE, False)))
def test_a_store_is_made_ready_once(how: DataLossStatus, created: bool) -> None:
    assert created is initialise(Kept(how), MemoryStore().recovery)[1]


@pytest.mark.parametrize("records", (Records(in_flight=1), Records(lapsed=1), Records(quarantined=1)))
def test_a_store_with_claims_in_it_is_not_new(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that survived have put them back: it was emptied. One that is ready may have as many as it likes."""
    store = MemoryStore()
    monkeypatch.setattr(store.recovery, "counts", lambda: records)
    emptied = Kept(MISSING)

    with pytest.raises(Refused, match=r"not new.*redis ack"):
        initialise(emptied, store.recovery)

    assert [] == emptied.asked
    assert not initialise(Kept(FINE), store.recovery)[1]
