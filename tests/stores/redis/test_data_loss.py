"""After data loss, the store refuses unknown keys until an operator acknowledges the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import ConfigurationError, LeaseLost, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.model import Grant, InFlight, Mismatched, OnExpiry, Record, State, Unknown
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from tests.lab.redis import connect
from tests.stores.forgetting import (
    ANOTHER,
    HOLD,
    RULES,
    SKEW,
    Loss,
    claim,
    emptying,
    handing_over,
    losing,
    ready_store,
    refused,
)
from tests.stores.owners import WRITES

__all__ = ["emptying", "handing_over", "losing", "ready_store"]

pytestmark = pytest.mark.usefixtures("few_partitions")


def test_the_first_check_sends_each_script_once(redis_server: RedisServer) -> None:
    """With each of the 1,024 partitions, the texts would be 20 MB, and time out on a slow connection."""
    with (
        pytest.MonkeyPatch.context() as changes,
        connect(redis_server.url) as client,
        closing(RedisStore(redis_server.url, rules=RULES)) as store,
    ):
        changes.setattr(layout, "PARTITIONS", 1024)
        client.script_flush()
        before = client.info("stats")["total_net_input_bytes"]

        store.data_loss.initialise()

        assert client.info("stats")["total_net_input_bytes"] - before < 2_000_000


def test_a_redis_that_was_never_initialised_grants_no_claim(redis_server: RedisServer, clock: FrozenClock) -> None:
    with closing(RedisStore(redis_server.url, clock=clock, rules=RULES)) as store:
        assert "missing" == refused(store).loss
        store.data_loss.initialise()

        granted(claim(store))


def test_a_loss_is_reported_once(store: RedisStore, lose: Loss) -> None:
    """For all partitions: keys of another one are not the first to notice a week later."""
    lose()

    assert [True, False, False] == [refused(store).noticed for _ in range(3)]


@pytest.mark.parametrize("standing", ("in flight", "completed", "quarantined", "lapsed, quarantine"))
def test_known_keys_are_replayed_after_a_loss(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, standing: Any
) -> None:
    key = a_key()
    stand(store, clock, key, standing)
    hand_over()

    kinds = {"in flight": InFlight, "completed": Record}
    assert isinstance(claim(store, key, fingerprint=OTHER_FINGERPRINT), Mismatched)
    assert isinstance(claim(store, key), kinds.get(standing, Unknown))


def test_owners_of_remaining_records_renew_and_complete(store: RedisStore, clock: FrozenClock, hand_over: Loss) -> None:
    key = a_key()
    token = stand(store, clock, key, "in flight")
    hand_over()
    store.renew(key, token, lease=LEASE)
    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert isinstance(claim(store, key), Record)


def test_an_unknown_key_is_refused_until_an_operator_acknowledges(
    store: RedisStore, clock: FrozenClock, lose: Loss
) -> None:
    key = a_key()
    lose()
    refused(store, key)
    clock.advance(86400 * 365)
    refused(store, key)
    store.data_loss.acknowledge()

    granted(claim(store, key))


def test_an_expired_response_counts_as_unknown(store: RedisStore, clock: FrozenClock, hand_over: Loss) -> None:
    key = a_key()
    stand(store, clock, key, "completed")
    hand_over()
    clock.advance(KEEP)

    assert "changed" == refused(store, key).loss


def test_after_the_hold_unknown_keys_run_if_configured(
    store: RedisStore, redis_server: RedisServer, clock: FrozenClock, hand_over: Loss
) -> None:
    rules = replace(RULES, after_loss="hold")
    with closing(RedisStore(redis_server.url, clock=clock, rules=rules)) as holding:
        hand_over()
        refused(holding)
        clock.advance(HOLD - 0.001)
        refused(holding)
        clock.advance(0.001)

        granted(claim(holding))


def test_the_hold_never_ends_for_an_emptied_store(
    store: RedisStore, redis_server: RedisServer, clock: FrozenClock, empty: Loss
) -> None:
    with closing(RedisStore(redis_server.url, clock=clock, rules=replace(RULES, after_loss="hold"))) as holding:
        empty()
        refused(holding)
        clock.advance(HOLD * 100)

        assert "missing" == refused(holding).loss


def test_after_loss_run_grants_unknown_keys(
    store: RedisStore, redis_server: RedisServer, clock: FrozenClock, lose: Loss
) -> None:
    with closing(RedisStore(redis_server.url, clock=clock, rules=replace(RULES, after_loss="run"))) as careless:
        lose()

        granted(claim(careless))


@pytest.mark.parametrize(
    ("after", "ahead", "runs"),
    (
        pytest.param(SKEW + 0.001, 0, True, id="made later"),
        pytest.param(SKEW, 0, False, id="made at the edge"),
        pytest.param(-1, 0, False, id="made before"),
        pytest.param(SKEW + 1, SKEW + 0.002, False, id="made in the future"),
        pytest.param(SKEW + 1, SKEW - 0.002, True, id="by a clock that is a little ahead"),
    ),
)
def test_a_key_created_after_the_loss_runs_at_once(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, after: float, ahead: float, runs: bool
) -> None:
    hand_over()
    refused(store)
    lost = clock.now
    clock.advance(after)
    born = lost + after + ahead

    if runs:
        granted(claim(store, key_timestamp=born))
    else:
        refused(store, key_timestamp=born)


def test_a_key_time_does_not_help_if_the_loss_time_is_unknown(
    store: RedisStore, clock: FrozenClock, empty: Loss
) -> None:
    empty()
    refused(store)
    clock.advance(3600)

    assert "missing" == refused(store, key_timestamp=clock.now).loss


def test_an_emptied_store_is_not_initialised_if_a_process_noticed(
    store: RedisStore, redis_server: RedisServer, clock: FrozenClock, empty: Loss
) -> None:
    key = a_key()
    granted(claim(store, key))
    empty()
    with closing(RedisStore(redis_server.url, clock=clock, rules=RULES)) as stranger:
        assert (True, False) == (refused(stranger, key).noticed, stranger.data_loss.status().emptied)
        assert not refused(store, key).noticed
        assert stranger.data_loss.status().emptied

        with pytest.raises(ConfigurationError, match=r"redis ack --reason.*second time"):
            stranger.data_loss.initialise()
        refused(stranger, key)
        stranger.data_loss.acknowledge(forced=True)

        assert not stranger.data_loss.status().emptied
        granted(claim(stranger, key))


def test_a_process_that_has_only_claimed_notices_an_emptied_store(
    store: RedisStore, redis_server: RedisServer, clock: FrozenClock, empty: Loss
) -> None:
    key = a_key()
    claiming, stranger = (RedisStore(redis_server.url, clock=clock, rules=RULES) for _ in range(2))
    with closing(claiming), closing(stranger):
        granted(claim(claiming, key))
        empty()
        refused(stranger, key)
        refused(claiming, key)

        assert stranger.data_loss.status().emptied


def test_a_process_notes_an_emptied_store_between_check_and_initialisation(
    store: RedisStore, redis_server: RedisServer, clock: FrozenClock, empty: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script decides, so an operator's process that has just read the status initialises no part."""
    empty()
    with closing(RedisStore(redis_server.url, clock=clock, rules=RULES)) as operator:
        before = operator.data_loss._parts()
        refused(store)
        monkeypatch.setattr(operator.data_loss, "_parts", lambda: before)

        with pytest.raises(ConfigurationError, match="redis ack --reason"):
            operator.data_loss.initialise()

    assert {"missing": layout.PARTITIONS} == store.data_loss.status().losses


def test_another_store_is_foreign(redis_server: RedisServer, clock: FrozenClock) -> None:
    with closing(RedisStore(redis_server.url, clock=clock, rules=replace(RULES, store_id="theirs"))) as theirs:
        assert "theirs" == theirs.data_loss.initialise()
    for rules in (replace(RULES, store_id="ours"), replace(RULES, store_id="theirs", shards=2)):
        with closing(RedisStore(redis_server.url, clock=clock, rules=rules)) as store:
            assert "foreign" == refused(store).loss
            assert {"foreign": layout.PARTITIONS} == store.data_loss.status().losses
            for verb in (store.data_loss.initialise, lambda memory=store.data_loss: memory.acknowledge(forced=True)):
                with pytest.raises(ConfigurationError, match="other settings"):
                    verb()


def test_a_claim_from_before_a_loss_is_never_taken_over(store: RedisStore, clock: FrozenClock, hand_over: Loss) -> None:
    old, older, new = a_key(), a_key(), a_key()
    stand(store, clock, old, "lapsed, takeover")
    stand(store, clock, older, "lapsed, takeover")
    hand_over()
    assert isinstance(claim(store, old), Unknown)
    store.data_loss.acknowledge(forced=True)
    assert isinstance(claim(store, older), Unknown)
    clock.advance(0.001)
    stand(store, clock, new, "lapsed, takeover")

    assert 2 == granted(claim(store, new)).attempt


def test_no_claim_is_taken_over_in_a_store_without_id(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    redis_client.delete(layout.facts_in(layout.number(key.tid)))

    assert "missing" == refused(store, key).loss
    assert State.PROCESSING is found(store, key).state
    store.data_loss.acknowledge(forced=True)
    assert isinstance(claim(store, key), Unknown)


@pytest.mark.parametrize("verb", ("renew", "mark_point_of_no_return", "complete", "release", "quarantine"))
def test_an_owner_whose_take_over_may_be_lost_has_lost_its_claim(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, verb: str
) -> None:
    """Its successor may have finished. The record stays as it is, for whoever can find out."""
    key = a_key()
    token = a_token()
    granted(claim(store, key, token=token, on_expiry=OnExpiry.TAKEOVER))
    hand_over()
    before = store.read(key)
    with pytest.raises(LeaseLost):
        WRITES[verb](store, key, token)
    store.data_loss.acknowledge(forced=True)
    with pytest.raises(LeaseLost):
        WRITES[verb](store, key, token)

    assert before == store.read(key)


def test_a_completion_from_before_a_loss_may_be_repeated(
    store: RedisStore, clock: FrozenClock, hand_over: Loss
) -> None:
    key, token = a_key(), a_token()
    granted(claim(store, key, token=token, on_expiry=OnExpiry.TAKEOVER))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    hand_over()

    store.complete(key, token, PAYLOAD, keep=KEEP)


def test_no_point_of_no_return_if_a_successor_may_be_lost(
    store: RedisStore, clock: FrozenClock, hand_over: Loss
) -> None:
    key, later = a_key(), a_key()
    token = a_token()
    granted(claim(store, key, token=token, on_expiry=OnExpiry.TAKEOVER))
    hand_over()
    for _ in range(2):
        with pytest.raises(LeaseLost):
            store.mark_point_of_no_return(key, token)
        store.data_loss.acknowledge(forced=True)
    clock.advance(0.001)
    granted(claim(store, later, token=token, on_expiry=OnExpiry.TAKEOVER))
    store.mark_point_of_no_return(later, token)

    assert OnExpiry.QUARANTINE is found(store, later).on_expiry


def test_an_acknowledgement_waits_for_owners(store: RedisStore, clock: FrozenClock, lose: Loss) -> None:
    lose()
    refused(store)
    clock.advance(HOLD - 10)
    with pytest.raises(ConfigurationError, match="10 more seconds"):
        store.data_loss.acknowledge()
    before = store.data_loss.acknowledge(forced=True)

    assert layout.PARTITIONS == sum(before.losses.values())
    assert {"acknowledged": layout.PARTITIONS} == store.data_loss.status().parts
    granted(claim(store))


def test_a_loss_after_an_acknowledgement_is_a_new_loss(store: RedisStore, clock: FrozenClock, hand_over: Loss) -> None:
    hand_over()
    refused(store)
    store.data_loss.acknowledge(forced=True)
    clock.advance(-86400)
    hand_over()

    assert ("changed", True) == ((lost := refused(store)).loss, lost.noticed)
    refused(store)


def test_a_store_without_one_partition_is_not_initialised_again(store: RedisStore, redis_client: redis.Redis) -> None:
    redis_client.delete(layout.facts_in(7))

    with pytest.raises(ConfigurationError, match="has lost data"):
        store.data_loss.initialise()
    assert {"missing": 1} == store.data_loss.status().losses


def test_a_loss_without_a_status_check_is_not_acknowledged(
    store: RedisStore, clock: FrozenClock, hand_over: Loss
) -> None:
    hand_over()
    seen = store.data_loss.status()
    clock.advance(HOLD)
    hand_over()
    clock.advance(HOLD)
    with pytest.raises(ConfigurationError, match="lost data again"):
        store.data_loss.acknowledge(seen=seen)

    refused(store)
    store.data_loss.acknowledge(seen=store.data_loss.status(), forced=True)
    granted(claim(store))


def test_a_late_acknowledgement_covers_only_the_loss_it_saw(
    store: RedisStore, hand_over: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over()
    seen = store.data_loss._parts()
    hand_over()
    store.data_loss.status()
    monkeypatch.setattr(store.data_loss, "_parts", lambda: seen)
    with pytest.raises(ConfigurationError, match="changed during the acknowledgement"):
        store.data_loss.acknowledge(forced=True)

    refused(store)


def test_an_unreachable_partition_makes_no_loss_an_outage(
    store: RedisStore, hand_over: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise StoreUnavailable("one of its nodes is down")

    hand_over()
    monkeypatch.setattr(store.data_loss, "_parts", away)

    assert ("changed", True) == ((lost := refused(store)).loss, lost.noticed)


def test_a_partition_used_before_initialisation_takes_the_store_id(
    redis_server: RedisServer, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    rules = replace(RULES, store_id="prod")
    with (
        closing(RedisStore(redis_server.url, clock=clock, rules=rules)) as store,
        closing(RedisStore(redis_server.url, clock=clock, rules=replace(RULES, after_loss="run"))) as hasty,
    ):
        granted(claim(hasty, key := a_key()))
        assert "missing" == refused(store, a_key(tid=key.tid)).loss
        store.data_loss.acknowledge(forced=True)
        granted(claim(store, a_key(tid=key.tid)))

        assert "prod" == store.data_loss.status().store_id


def test_a_loss_is_never_earlier_than_a_claim(store: RedisStore, clock: FrozenClock, hand_over: Loss) -> None:
    """A machine may come back with a clock that is behind: keys made in between are not later than the loss."""
    clock.advance(3600)
    granted(claim(store, key := a_key()))
    clock.advance(-600)
    hand_over()
    other = a_key(tid=key.tid)
    refused(store, other)
    clock.advance(60)

    refused(store, other, key_timestamp=clock.now)


def test_no_key_time_is_trusted_if_configured(
    store: RedisStore, redis_server: RedisServer, clock: FrozenClock, hand_over: Loss
) -> None:
    """A primary that was cut off may have gone on, and answered keys that were made after the fail-over."""
    rules = replace(RULES, clock_skew=None)
    with closing(RedisStore(redis_server.url, clock=clock, rules=rules)) as wary:
        hand_over()
        refused(wary)
        clock.advance(3600)

        refused(wary, key_timestamp=clock.now)


def test_an_older_loss_of_a_partition_is_not_acknowledged_unseen(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, hand_over: Loss
) -> None:
    """The nodes of a Cluster have clocks of their own."""
    hand_over()
    refused(store)
    seen = store.data_loss.status()
    clock.advance(-5)
    redis_client.hset(layout.facts_in(7), mapping=ANOTHER)  # type: ignore[arg-type]
    redis_client.hset(layout.facts_in(8), "lost_at", round((clock.now - 60) * 1000))
    store.data_loss.status()

    with pytest.raises(ConfigurationError, match="lost data again"):
        store.data_loss.acknowledge(forced=True, seen=seen)


def test_parts_of_two_stores_are_not_acknowledged(
    store: RedisStore, redis_client: redis.Redis, hand_over: Loss
) -> None:
    hand_over()
    refused(store)
    redis_client.hset(layout.facts_in(7), "store_id", "another")
    redis_client.delete(layout.facts_in(8))
    with pytest.raises(ConfigurationError, match="different stores"):
        store.data_loss.acknowledge(forced=True)

    assert not redis_client.hexists(layout.facts_in(8), "store_id")


def test_a_second_initialisation_changes_no_data(store: RedisStore) -> None:
    first = store.data_loss.status()

    assert first.store_id == store.data_loss.initialise()
    assert first.parts == store.data_loss.status().parts


def test_concurrent_initialisations_give_one_store_id(redis_server: RedisServer, clock: FrozenClock) -> None:
    with ExitStack() as ends:
        stores = [ends.enter_context(closing(RedisStore(redis_server.url, clock=clock, rules=RULES))) for _ in range(4)]

        def initialise(each: RedisStore) -> None:
            # Who comes while another is at it may be told to look again.
            with suppress(ConfigurationError):
                each.data_loss.initialise()

        at_once(*(partial(initialise, each) for each in stores))

        assert stores[0].data_loss.initialise() == stores[0].data_loss.status().store_id


def test_concurrent_acknowledgements_give_one_store_id(
    store: RedisStore, redis_client: redis.Redis, empty: Loss, redis_server: RedisServer, clock: FrozenClock
) -> None:
    empty()
    refused(store)
    with ExitStack() as ends:
        stores = [ends.enter_context(closing(RedisStore(redis_server.url, clock=clock, rules=RULES))) for _ in range(4)]

        def acknowledge(each: RedisStore) -> None:
            # Whoever comes second may be told to look again.
            with suppress(ConfigurationError):
                each.data_loss.acknowledge(forced=True)

        at_once(*(partial(acknowledge, each) for each in stores))

        assert store.data_loss.status().store_id is not None
    store.data_loss.acknowledge(forced=True)
    granted(claim(store))


@pytest.fixture
def fill(redis_client: Any) -> Iterator[Any]:
    yield lambda: redis_client.config_set("maxmemory", 1)
    redis_client.config_set("maxmemory", 0)


def test_a_full_server_refuses_an_unknown_key_after_a_loss(store: RedisStore, hand_over: Loss, fill: Any) -> None:
    hand_over()
    fill()

    assert ["changed"] * 2 == [refused(store).loss for _ in range(2)]


def test_a_full_server_replays_a_known_key_after_a_loss(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, fill: Any
) -> None:
    lapsed, done = a_key(), a_key()
    stand(store, clock, done, "completed")
    stand(store, clock, lapsed, "lapsed, quarantine")
    hand_over()
    fill()

    assert [Unknown, Record] == [type(claim(store, key)) for key in (lapsed, done)]


def test_a_full_server_lets_owners_restore_and_complete(
    store: RedisStore, clock: FrozenClock, redis_client: Any, fill: Any
) -> None:
    request, token = a_request(a_key()), a_token()
    grant = granted(store.claim(request, token=token, lease=LEASE))
    redis_client.flushall()
    clock.advance(1)
    fill()

    assert store.data_loss.restore_claim(request, grant, lease=LEASE, age=1.0)
    store.complete(request.key, token, PAYLOAD, keep=KEEP)
    assert isinstance(claim(store, request.key), Record)


def test_a_full_server_lets_an_operator_acknowledge(
    store: RedisStore, redis_server: RedisServer, redis_client: Any, hand_over: Loss, fill: Any
) -> None:
    hand_over()
    fill()
    assert {"changed": layout.PARTITIONS} == store.data_loss.status().losses
    store.data_loss.acknowledge(forced=True)
    redis_client.config_set("maxmemory", 0)

    assert isinstance(claim(store), Grant)


def test_a_full_server_allows_no_take_over_after_a_loss(
    store: RedisStore, clock: FrozenClock, hand_over: Loss, fill: Any
) -> None:
    key = a_key()
    granted(claim(store, key, on_expiry=OnExpiry.TAKEOVER))
    clock.advance(LEASE + 1)
    hand_over()
    fill()

    assert isinstance(claim(store, key), Unknown)


def test_a_claim_restored_to_an_emptied_store_is_not_taken_over(
    store: RedisStore, clock: FrozenClock, redis_server: RedisServer, redis_client: Any
) -> None:
    """A copy from before it was made ready holds claims, and says nothing of itself."""
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    kept = redis_client.dump(layout.keys(key)[0])
    redis_client.flushall()
    redis_client.restore(layout.keys(key)[0], 0, kept)
    with closing(RedisStore(redis_server.url, clock=clock, rules=RULES)) as another, pytest.raises(StoreDataLoss):
        claim(another, key)
    store.data_loss.acknowledge(forced=True)

    assert isinstance(claim(store, key), Unknown)
