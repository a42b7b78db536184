"""Tenants in several parts, as they are configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fakeredis
import pytest
from flask import Flask

from flask_idempotency import ConfigurationError, Idempotency
from flask_idempotency.assembly import identities
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.settings import summary
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from tests.settings.test_encryption import faults, load


@pytest.mark.parametrize(("settings", "shards"), (({}, 1), ({"tenant_shards": 1}, 1), ({"tenant_shards": 256}, 256)))
def test_a_tenant_has_one_part_unless_somebody_says_otherwise(settings: dict[str, Any], shards: int) -> None:
    loaded = load(secret="s-9f2c47d1e8b35a60", **settings)

    assert shards == loaded.tenant_shards
    assert [shards] == [len(identity.tenant_ids("shop", "acme")) for identity in identities(loaded)]
    assert (shards > 1) == ("with each tenant in 256 parts" in summary(loaded, quota_loader=False))


@pytest.mark.parametrize("value", (0, -1, 257, 1.5, "4", True))
def test_what_is_no_number_of_parts_is_refused(value: Any) -> None:
    (told,) = faults(secret="s-9f2c47d1e8b35a60", tenant_shards=value)

    assert told.startswith("IDEMPOTENCY_TENANT_SHARDS: ")


@pytest.mark.parametrize(
    "store", ("memory://", "sqlite:///{}/records.db", MemoryStore()), ids=("memory", "sql", "object")
)
def test_a_store_without_partitions_has_none_to_outgrow(store: Any, tmp_path: Path) -> None:
    """There nothing would notice when the number is changed, and every key would run again."""
    store = store.format(tmp_path) if isinstance(store, str) else store

    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_TENANT_SHARDS: .*has no partitions"):
        Idempotency(Flask("shop"), store=store, secret="s-9f2c47d1e8b35a60", tenant_shards=2)
    Idempotency(Flask("shop"), store=store, secret="s-9f2c47d1e8b35a60", tenant_shards=1)


def test_a_redis_may_have_several() -> None:
    """One that was made elsewhere must have been made for as many: it is what refuses another number later."""
    client = fakeredis.FakeRedis()
    two = RedisStore(client, rules=RedisDataLossPolicy(shards=2, after_loss="run"))

    Idempotency(Flask("shop"), store=client, secret="s-9f2c47d1e8b35a60", tenant_shards=2, after_loss="run")
    Idempotency(Flask("shop"), store=two, secret="s-9f2c47d1e8b35a60", tenant_shards=2)
    for shards in (1, 3):
        with pytest.raises(ConfigurationError, match=rf"is {shards}, and the store was made for 2"):
            Idempotency(Flask("shop"), store=two, secret="s-9f2c47d1e8b35a60", tenant_shards=shards)


def test_a_quota_that_cannot_be_divided_is_refused_at_start() -> None:
    """Each by a sentence that begins with its setting, and says what to do."""
    told = faults(
        secret="s-9f2c47d1e8b35a60",
        tenant_shards=16,
        quota_records=15,
        quota_new_keys=(3, 60),
        quota_in_flight=0,
    )

    assert ["IDEMPOTENCY_QUOTA_RECORDS: 15", "IDEMPOTENCY_QUOTA_NEW_KEYS: 3"] == [
        each.split(" cannot")[0] for each in told
    ]
    assert all("Raise it to 16 or more" in each for each in told)


def test_a_quota_that_can_be_is_not() -> None:
    """The settings say what a tenant may have, and not what a part of it may."""
    quota = load(
        secret="s-9f2c47d1e8b35a60",
        tenant_shards=16,
        quota_records=16,
        quota_new_keys=(17, 60),
        quota_in_flight=0,
    ).quota

    assert Quota(records=16, in_flight=0, new_keys=NewKeys(17, 60.0)) == quota
