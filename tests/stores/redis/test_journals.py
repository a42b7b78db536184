"""Journals in Redis: lost replies, late copies, damage, data loss, a full server, data keys and quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis

from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.errors import CorruptRecord, DataKeyMissing, LeaseLost, StoreDataLoss
from flask_idempotency.engine.journal import EMPTY, MEMORY_LOST, Entry, JournalWrite, StepState
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Grant, OnExpiry, OverQuota, SealedBy, State, StoredPayload, Unknown
from flask_idempotency.engine.quota import Drift, Quota
from flask_idempotency.engine.store import Store
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.replication import is_promise
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
)
from tests.forgiving import redis_store
from tests.stores.forgetting import RULES, emptying, handing_over
from tests.stores.redis.test_cancelled_claims import arrive
from tests.stores.unsettled import seen

__all__ = ["emptying", "handing_over"]

ITEM = StoredPayload(b"item", 0, True, 4)
RESULT = StoredPayload(b"item, result", 0, True, 40)
BEGUN = Entry(b"c" * 12, "charge", "plain", StepState.BEGUN, True, b"d" * 16, ITEM)
FINISHED = replace(BEGUN, state=StepState.FINISHED, payload=RESULT, took=1.5)
BEGIN = JournalWrite(1, (BEGUN,), steps=1, in_doubt=True)
FINISH = JournalWrite(2, (FINISHED,), steps=1)


@pytest.fixture(name="claimed")
def a_claim_of_an_endpoint_with_steps(store: RedisStore) -> tuple[StorageKey, Grant]:
    return claim(store)


@pytest.fixture
def far(store: RedisStore, proxy: TcpProxy, clock: FrozenClock) -> Iterator[RedisStore]:
    """The same records, through the proxy."""
    with closing(redis_store(proxy.url, clock=clock)) as far:
        yield far


@pytest.fixture(name="strict")
def store_that_refuses_after_a_loss(store: RedisStore, clock: FrozenClock) -> Iterator[RedisStore]:
    with closing(RedisStore(store._client, clock=clock, rules=RULES)) as strict:
        strict.data_loss.initialise()
        clock.advance(1)
        yield strict


def claim(store: Store, key: StorageKey | None = None, *, quota: Quota | None = None) -> tuple[StorageKey, Grant]:
    key = key or a_key()
    request = a_request(key, on_expiry=OnExpiry.TAKEOVER)
    return key, granted(store.claim(request, token=a_token(), lease=LEASE, quota=quota))


def write(store: RedisStore, claimed: tuple[StorageKey, Grant], *writes: JournalWrite) -> None:
    key, grant = claimed
    for each in writes:
        store.journals.write(key, grant.token, fence=grant.fence, writing=each, lease=LEASE)


def content(client: redis.Redis, key: StorageKey) -> tuple[object, object]:
    """Every byte of the record and its journal."""
    return client.get(layout.keys(key)[0]), client.hgetall(layout.journal(key))


def test_an_entry_comes_back_as_it_was_written(
    store: RedisStore, claimed: tuple[StorageKey, Grant], clock: FrozenClock
) -> None:
    key, grant = claimed
    began = clock()
    write(store, claimed, BEGIN)
    assert found(store, key).on_expiry is OnExpiry.QUARANTINE
    clock.advance(1.5)
    pure = Entry(b"p" * 12, "price", "pure", StepState.FINISHED, False, payload=None, kept=False, took=2.5)
    write(store, claimed, replace(FINISH, enter=(FINISHED, pure)))

    journal = store.journals.recall(key, grant.token, fence=grant.fence)

    assert journal.entries == (
        replace(pure, fence=grant.fence, began_at=began - 1, finished_at=began + 1.5),
        replace(FINISHED, fence=grant.fence, began_at=began, finished_at=began + 1.5),
    )
    assert (journal.fence, journal.write, journal.complete, journal.erased) == (grant.fence, 2, True, False)
    assert found(store, key).on_expiry is OnExpiry.TAKEOVER


def begin(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    write(store, claimed, JournalWrite(3, (replace(BEGUN, id=b"2" * 12),), (), 2, True))


def finish(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    write(store, claimed, JournalWrite(3, (replace(FINISHED, id=b"2" * 12),), (), 2))


def pause(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> State | None:
    return store.release(claimed[0], claimed[1].token)


def complete(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    store.journals.complete(claimed[0], claimed[1].token, PAYLOAD, keep=KEEP)


CALLS: dict[str, Callable[[RedisStore, tuple[StorageKey, Grant]], object]] = {
    "begin": begin,
    "finish": finish,
    "pause": pause,
    "complete": complete,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_whose_reply_is_lost_is_repeated_without_harm(
    store: RedisStore, far: RedisStore, proxy: TcpProxy, redis_client: redis.Redis, call: str
) -> None:
    """Case 23: the client sends it again, and the record is as after one call."""
    once, twice = claim(store), claim(store)
    for each in (once, twice):
        write(store, each, BEGIN, FINISH)
    expected = CALLS[call](store, once)
    far.journals.read(twice[0])  # Redis knows the scripts, so the next request is the call.
    proxy.lose_reply()

    assert CALLS[call](far, twice) == expected
    after, alone = found(store, twice[0]), found(store, once[0])
    assert (after.state, after.deadline, after.on_expiry) == (alone.state, alone.deadline, alone.on_expiry)
    names = [[entry.id for entry in store.journals.read(key).entries] for key, _ in (once, twice)]
    assert names[0] == names[1]


def test_a_begin_that_arrives_late_changes_no_byte(
    store: RedisStore, redis_client: redis.Redis, claimed: tuple[StorageKey, Grant], clock: FrozenClock
) -> None:
    """Case 27: the finish has come before it."""
    write(store, claimed, FINISH)
    before = content(redis_client, claimed[0])
    clock.advance(10)

    write(store, claimed, BEGIN)

    assert content(redis_client, claimed[0]) == before


def test_a_frozen_begin_leaves_nothing_in_doubt(
    store: RedisStore,
    far: RedisStore,
    proxy: TcpProxy,
    redis_client: redis.Redis,
    claimed: tuple[StorageKey, Grant],
) -> None:
    """Case 31: the worker gave the begin up and did not run the step. The begin arrives before or after its withdrawal."""
    key, grant = claimed
    write(store, claimed, JournalWrite(1, (replace(FINISHED, id=b"1" * 12),), steps=1))
    far.journals.read(key)
    withdrawal = JournalWrite(3, (), (BEGUN.id,), steps=1)
    proxy.delay_request()
    write(far, claimed, JournalWrite(2, (BEGUN,), steps=2, in_doubt=True))
    write(store, claimed, withdrawal)
    before = content(redis_client, key)

    arrive(proxy, redis_client)

    assert content(redis_client, key) == before
    assert store.release(key, grant.token) is State.PROCESSING


def test_a_copy_of_a_claim_writes_nothing_under_the_old_fence(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """The same token may be granted again, later: only the fence tells the two grants apart."""
    key, first = claim(store)
    clock.advance(LEASE)
    _, second = claim(store, key)
    store.release(key, second.token)
    clock.advance(120)
    # Redis has forgotten by now that it was cancelled.
    redis_client.delete(layout.cancelled(layout.keys(key), first.token))
    again = granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=first.token, lease=LEASE))
    before = content(redis_client, key)

    with pytest.raises(LeaseLost):
        write(store, (key, first), BEGIN)
    with pytest.raises(LeaseLost):
        store.journals.recall(key, first.token, fence=first.fence)

    assert content(redis_client, key) == before
    assert store.journals.recall(key, again.token, fence=again.fence) == EMPTY


def test_a_full_redis_takes_the_finish_and_the_pause(
    store: RedisStore, redis_client: redis.Redis, claimed: tuple[StorageKey, Grant]
) -> None:
    write(store, claimed, BEGIN)
    redis_client.config_set("maxmemory", 1)
    try:
        write(store, claimed, FINISH)

        assert store.release(claimed[0], claimed[1].token) is State.PROCESSING
    finally:
        redis_client.config_set("maxmemory", 0)


def test_a_worker_whose_redis_was_emptied_goes_no_further(strict: RedisStore, empty: Callable[[], None]) -> None:
    """Case 57."""
    claimed = claim(strict)
    write(strict, claimed, BEGIN, FINISH)

    empty()

    with pytest.raises(LeaseLost):
        write(strict, claimed, replace(BEGIN, number=3))
    with pytest.raises(StoreDataLoss):
        claim(strict, claimed[0])
    assert strict.journals.read(claimed[0]) == EMPTY


@pytest.mark.parametrize(("steps", "reason"), ((True, MEMORY_LOST), (False, "lease-expired")))
def test_a_paused_request_from_before_a_loss_is_never_resumed(
    strict: RedisStore, hand_over: Callable[[], None], clock: FrozenClock, steps: bool, reason: str
) -> None:
    """Case 57: its journal may lack a step, so no one step of it can be settled. Without a journal it is as ever."""
    claimed = key, _ = claim(strict)
    if steps:
        write(strict, claimed, BEGIN, FINISH)
    clock.advance(LEASE)

    hand_over()

    outcome = strict.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)
    assert outcome == Unknown(reason)
    journal = strict.journals.read(key)
    assert not journal.complete
    assert not strict.journals.resume(
        seen(strict, key), replace(journal, complete=True), token=a_token(), writing=replace(FINISH, enter=())
    )


def test_a_step_that_finishes_after_a_loss_lets_no_other_attempt_go_on(
    strict: RedisStore, hand_over: Callable[[], None]
) -> None:
    """Its worker goes on. But what was written before the loss may be missing."""
    claimed = key, grant = claim(strict)
    write(strict, claimed, BEGIN)

    hand_over()
    write(strict, claimed, FINISH)

    assert found(strict, key).on_expiry is OnExpiry.QUARANTINE
    assert strict.release(key, grant.token) is State.QUARANTINED
    assert found(strict, key).reason == MEMORY_LOST


def test_every_flipped_bit_of_a_journal_is_found(
    store: RedisStore, redis_client: redis.Redis, claimed: tuple[StorageKey, Grant]
) -> None:
    """A journal that is taken for empty would run the charge again."""
    key, grant = claimed
    write(store, claimed, BEGIN, FINISH)
    name = layout.journal(key)
    for field in (b"", FINISHED.id):
        stored = redis_client.hget(name, field)
        assert isinstance(stored, bytes)
        for bit in range(8 * len(stored)):
            flipped = bytearray(stored)
            flipped[bit // 8] ^= 1 << bit % 8
            redis_client.hset(name, field, bytes(flipped))
            with pytest.raises(CorruptRecord):
                store.journals.recall(key, grant.token, fence=grant.fence)
        redis_client.hset(name, field, stored)
    assert store.journals.recall(key, grant.token, fence=grant.fence).entries


def without_a_step(client: redis.Redis, name: bytes) -> None:
    client.hdel(name, FINISHED.id)


def without_its_own_field(client: redis.Redis, name: bytes) -> None:
    client.hdel(name, b"")


def under_another_id(client: redis.Redis, name: bytes) -> None:
    stored = client.hget(name, FINISHED.id)
    client.hdel(name, FINISHED.id)
    client.hset(name, b"C" * 12, stored)


def of_another_type(client: redis.Redis, name: bytes) -> None:
    client.delete(name)
    client.lpush(name, "not ours")


@pytest.mark.parametrize("damage", (without_a_step, without_its_own_field, under_another_id, of_another_type))
def test_a_damaged_journal_is_corrupt_and_never_absent(
    store: RedisStore,
    redis_client: redis.Redis,
    claimed: tuple[StorageKey, Grant],
    damage: Callable[[redis.Redis, bytes], None],
) -> None:
    key, grant = claimed
    write(store, claimed, BEGIN, FINISH)
    damage(redis_client, layout.journal(key))
    before = redis_client.get(layout.keys(key)[0])

    with pytest.raises(CorruptRecord):
        store.journals.recall(key, grant.token, fence=grant.fence)
    with pytest.raises(CorruptRecord):
        store.journals.read(key)
    if damage not in (without_a_step, under_another_id):
        with pytest.raises(CorruptRecord):
            store.release(key, grant.token)
        with pytest.raises(CorruptRecord):
            write(store, claimed, replace(BEGIN, number=3))
    assert redis_client.get(layout.keys(key)[0]) == before
    assert store.recovery.force_release(seen(store, key))
    assert not redis_client.exists(layout.journal(key))


def nothing(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    """Leave it in flight, with a step that has finished."""


def held(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    store.quarantine(claimed[0], claimed[1].token, "steps-changed")


def lapsed(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    begin(store, claimed)
    key, _ = claimed
    assert isinstance(store._server._clock, FrozenClock)
    store._server._clock.advance(LEASE)
    record = seen(store, key)
    assert store.recovery.quarantine_expired(record, horizon=record.record.deadline)


def late_finish(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    write(store, claimed, JournalWrite(4, (replace(FINISHED, id=b"2" * 12),), (), 2))


def resume(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    record, journal = seen(store, claimed[0]), store.journals.read(claimed[0])
    assert store.journals.resume(record, journal, token=a_token(), writing=JournalWrite(0, steps=1))


def give_up(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    record = seen(store, claimed[0])
    assert store.journals.give_up(record, horizon=record.record.deadline)


def everything(client: redis.Redis) -> dict[bytes, bytes | None]:
    return {name: client.dump(name) for name in client.scan_iter()}


@pytest.mark.parametrize("which", (1, 2, 4), ids=("in flight", "quarantined", "unfinished"))
@pytest.mark.parametrize(
    ("before", "call"),
    (
        (nothing, begin),
        (nothing, finish),
        (nothing, pause),
        (nothing, complete),
        (held, pause),
        (held, resume),
        (held, complete),
        (begin, pause),
        (lapsed, late_finish),
        (pause, give_up),
    ),
)
def test_an_index_of_another_type_stops_before_the_first_write(
    store: RedisStore,
    redis_client: redis.Redis,
    clock: FrozenClock,
    before: Callable[[RedisStore, tuple[StorageKey, Grant]], object],
    call: Callable[[RedisStore, tuple[StorageKey, Grant]], object],
    which: int,
) -> None:
    """A script that stopped half-way would leave a record in no index, and no janitor would find it."""
    claimed = key, _ = claim(store, quota=Quota(records=5))
    write(store, claimed, BEGIN, FINISH)
    clock.advance(LEASE)
    before(store, claimed)
    clock.advance(1)
    index = layout.keys(key)[which]
    redis_client.delete(index)
    redis_client.lpush(index, "not ours")
    stored = everything(redis_client)

    try:
        call(store, claimed)
    except CorruptRecord:
        assert everything(redis_client) == stored
    else:
        # The call has no use for this index.
        assert redis_client.type(index) == b"list"


@for_each(
    ("before", "call"),
    (
        (begin, late_finish),
        (nothing, pause),
        (nothing, complete),
        (held, pause),
        (held, resume),
        (begin, pause),
        (lapsed, late_finish),
        (pause, give_up),
    ),
)
def test_a_full_redis_takes_every_other_end(
    store: RedisStore,
    redis_client: redis.Redis,
    clock: FrozenClock,
    before: Callable[[RedisStore, tuple[StorageKey, Grant]], object],
    call: Callable[[RedisStore, tuple[StorageKey, Grant]], object],
) -> None:
    claimed = claim(store, quota=Quota(records=5))
    write(store, claimed, BEGIN, FINISH)
    before(store, claimed)
    clock.advance(1)
    redis_client.config_set("maxmemory", 1)
    try:
        call(store, claimed)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert store.ledger.reconcile(claimed[0].tid) == Drift()


def test_a_result_needs_its_data_key(store: RedisStore, claimed: tuple[StorageKey, Grant], clock: FrozenClock) -> None:
    key, _grant = claimed
    kept = store.data_keys.read_keys(key.tid)
    sealed = replace(FINISHED, payload=replace(RESULT, sealed_by=SealedBy("kek", 1)))
    write(store, claimed, BEGIN)
    with pytest.raises(DataKeyMissing) as missing:
        write(store, claimed, replace(FINISH, enter=(sealed,)))
    assert not missing.value.erased
    assert found(store, key).on_expiry is OnExpiry.QUARANTINE

    assert store.data_keys.add(key.tid, DataKey(1, "kek", b"wrapped", None), store=kept.store, after=kept.last)
    write(store, claimed, replace(FINISH, enter=(sealed,)))
    assert not store.journals.read(key).erased
    clock.advance(1)
    store.data_keys.shred(key.tid)

    assert store.journals.read(key).erased
    other = replace(sealed, id=b"o" * 12)
    with pytest.raises(DataKeyMissing) as missing:
        write(store, claimed, JournalWrite(3, (other,), steps=2))
    assert missing.value.erased
    write(store, claimed, JournalWrite(3, (replace(other, payload=replace(RESULT, sealed_by=ERASED)),), steps=2))


def test_the_bytes_of_a_journal_count_until_it_is_gone(store: RedisStore) -> None:
    quota = Quota(bytes=40)
    claimed = key, grant = claim(store, quota=quota)
    write(store, claimed, BEGIN)
    assert store.ledger.usage(key.tid).bytes == ITEM.byte_size
    write(store, claimed, FINISH)
    assert store.ledger.usage(key.tid).bytes == RESULT.byte_size

    refused = store.claim(a_request(a_key(tid=key.tid)), token=a_token(), lease=LEASE, quota=quota)
    assert isinstance(refused, OverQuota)
    assert refused.limit == "bytes"
    assert store.ledger.reconcile(key.tid) == Drift()
    store.journals.complete(key, grant.token, PAYLOAD, keep=KEEP)

    assert store.ledger.usage(key.tid).bytes == PAYLOAD.byte_size
    assert store.ledger.reconcile(key.tid) == Drift()


def test_a_recount_corrects_the_bytes_of_journals(store: RedisStore, redis_client: redis.Redis) -> None:
    claimed = key, _ = claim(store, quota=Quota(records=5))
    write(store, claimed, BEGIN, FINISH)
    redis_client.hset(layout.tenant_quota(key.tid), "j", "100")

    assert store.ledger.reconcile(key.tid).bytes == 100 - RESULT.byte_size

    assert store.ledger.usage(key.tid).bytes == RESULT.byte_size
    assert store.ledger.reconcile(key.tid) == Drift()


def test_a_recount_leaves_the_bytes_of_journals_alone_while_they_change(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = key, _ = claim(store, quota=Quota(records=5))
    run = store._server.run

    def run_late(script: scripts.Script, *arguments: Any) -> Any:
        if script is scripts.QUOTA_REPAIR_JOURNALS:
            write(store, claimed, BEGIN, FINISH)
        return run(script, *arguments)

    monkeypatch.setattr(store._server, "run", run_late)
    drift = store.ledger.reconcile(key.tid)

    assert (drift.none, drift.busy) == (True, 1)
    assert store.ledger.usage(key.tid).bytes == RESULT.byte_size


def test_a_sweep_removes_what_another_completion_has_left(store: RedisStore, redis_client: redis.Redis) -> None:
    left, kept = claim(store), claim(store)
    for each in (left, kept):
        write(store, each, BEGIN, FINISH)
    store.complete(left[0], left[1].token, PAYLOAD, keep=KEEP)
    assert store.journals.read(left[0]) == EMPTY

    assert store.journals.sweep(limit=500).removed == 1

    assert [redis_client.exists(layout.journal(key)) for key, _ in (left, kept)] == [0, 1]


def test_a_result_is_replaced_only_as_it_was_read(store: RedisStore, claimed: tuple[StorageKey, Grant]) -> None:
    key, _ = claimed
    write(store, claimed, BEGIN, FINISH)
    other = StoredPayload(b"again", 0, True, 40, SealedBy("other", 0))

    assert not store.journals.replace(key, FINISHED.id, ITEM, other)
    assert store.journals.replace(key, FINISHED.id, RESULT, other)

    assert [entry.payload for entry in store.journals.read(key).entries] == [other]
    assert dict(store.journals.count()) == {"other": 1}
    assert [answer.entry.id for answer in store.journals.walk(limit=500, other_than="kek").answers] == [FINISHED.id]
    assert store.journals.walk(limit=500, other_than="other").answers == ()


@pytest.mark.parametrize("result", (b"DONE", b"PAUSED", b"HELD"))
def test_replicas_must_have_what_a_release_promises(result: bytes) -> None:
    assert is_promise(result)
    assert not is_promise(b"LOST")


def test_replicas_must_have_a_step_before_its_function_runs() -> None:
    assert scripts.WRITE_STEPS.durable
    assert scripts.RESUME_STEPS.durable
