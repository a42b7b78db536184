"""A tenant's parts: which key is in which, and what names them."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.engine.keys import Identity, Scope
from flask_idempotency.engine.model import MAX_LIMIT
from flask_idempotency.engine.quota import NewKeys, Quota, Usage
from flask_idempotency.stores.redis import layout
from tests.engine.test_key import HOSTILE

GOLDEN = {
    Scope("shop", "acme", "alice"): (
        "2c26115ddcdc98f60e0240841adc34b777a3c1e9660975868b946536bacb13d8",
        "0a69f8344b162dd7ed22eacb274336c8",
    ),
    Scope("shop", None, None): (
        "b833bd5b587b3ab8c76d160e650fd2f33c3ae5fc23fdc159f333a3303d9637b1",
        "e0d42c9e33c0b7e4de2fef98f2aaaff9",
    ),
    Scope("shop", "", None, "pay"): (
        "b10f1c08b0fad47d10b4fd1652ef16f24433eb2e03703193a61afdfd7813502a",
        "a38ba8a624b5058dbb6a99d45ffa6dea",
    ),
}
"""Of the key `k`, as they were before there were parts: stores are full of such."""

OWNERS = st.tuples(HOSTILE, st.none() | HOSTILE, st.integers(1, 256))


@pytest.mark.parametrize(("scope", "names"), GOLDEN.items(), ids=("tenant", "nobody's", "endpoint's"))
def test_in_one_part_not_a_byte_has_changed(scope: Scope, names: tuple[str, str]) -> None:
    """Else every key that is remembered would run again after an upgrade."""
    key = Identity(b"golden").storage_key(scope, "k")

    assert names == (key.rid.hex(), key.tid.hex())
    assert key == Identity(b"golden", tenant_shards=1).storage_key(scope, "k")
    assert (key.tid,) == Identity(b"golden").tenant_ids(scope.namespace, scope.tenant)
    assert key.tid == Identity(b"golden").tenant_id(scope.namespace, scope.tenant)


def test_in_several_parts_they_stay_where_they_are() -> None:
    identity = Identity(b"golden", tenant_shards=16)
    keys = [identity.storage_key(scope, "k") for scope in GOLDEN]

    assert [rid for rid, _ in GOLDEN.values()] == [key.rid.hex() for key in keys]
    assert [
        "2d7e050922e26f64c094420f73e2417a",
        "99865d38ed89cc2af8dc4e3b51cfe8b5",
        "1d8e82dab64b8263ba97acd6b7c1e136",
    ] == [key.tid.hex() for key in keys]


@given(HOSTILE, st.none() | HOSTILE, st.none() | HOSTILE, HOSTILE, st.integers(1, 256))
def test_every_key_is_in_one_of_its_tenants_parts(
    namespace: str, tenant: str | None, principal: str | None, client_key: str, shards: int
) -> None:
    whole, parted = Identity(b"s"), Identity(b"s", tenant_shards=shards)
    scope = Scope(namespace, tenant, principal)
    key, before = parted.storage_key(scope, client_key), whole.storage_key(scope, client_key)

    assert key.tid in parted.tenant_ids(namespace, tenant)
    assert (before.rid, before.label, before.mark) == (key.rid, key.label, key.mark)
    assert whole.downstream_key(before, "charge") == parted.downstream_key(key, "charge")


@given(OWNERS, OWNERS)
def test_no_part_is_another_tenants_nor_another_part(
    left: tuple[str, str | None, int], right: tuple[str, str | None, int]
) -> None:
    """Injective, also where one application is in parts and another is not: purging one must not reach the other."""
    parts = [Identity(b"s", tenant_shards=each[2]).tenant_ids(each[0], each[1]) for each in (left, right)]

    assert [left[2], right[2]] == [len(set(each)) for each in parts]
    if left[:2] != right[:2] or (left[2] == 1) != (right[2] == 1):
        assert not set(parts[0]) & set(parts[1])


def test_what_stands_for_all_of_a_tenant_is_not_one_id() -> None:
    with pytest.raises(ValueError, match="too many"):
        Identity(b"s", tenant_shards=2).tenant_id("shop", "acme")


def test_keys_are_spread_evenly() -> None:
    """
    Over the parts of one tenant, and these over the partitions. (8,000 keys: 500 each, give or take four deviations.)
    """
    identity, scope = Identity(b"secret", tenant_shards=16), Scope("shop", "acme", None)
    parts = Counter(identity.storage_key(scope, str(number)).tid for number in range(8_000))

    assert set(identity.tenant_ids("shop", "acme")) == parts.keys()
    assert 413 <= min(parts.values()) <= max(parts.values()) <= 587
    assert 16 == len({layout.number(tid) for tid in parts})


@pytest.mark.parametrize(("limit", "shards", "reached"), ((1000, 4, 0.89), (10_000, 4, 0.95), (10_000, 16, 0.9)))
def test_most_of_a_limit_is_reached_before_a_part_of_it_is_full(limit: int, shards: int, reached: float) -> None:
    """As `docs/guides/tenants.md` says. Nothing is refused wrongly before that."""
    identity, scope = Identity(b"secret", tenant_shards=shards), Scope("shop", "acme", None)
    share, granted = Quota(records=limit).divided(shards).records, Counter[bytes]()

    for number in count():
        part = identity.storage_key(scope, str(number)).tid
        if granted[part] == share:
            break
        granted[part] += 1

    assert granted.total() >= reached * limit


LIMIT = st.none() | st.integers(0, MAX_LIMIT)


@given(LIMIT, LIMIT, LIMIT, LIMIT, st.integers(1, 256))
def test_parts_together_have_less_than_one_each_above_the_limit(
    records: int | None, size: int | None, in_flight: int | None, keys: int | None, shards: int
) -> None:
    whole = Quota(records, size, in_flight, None if keys is None else NewKeys(keys, 60.0))
    part = whole.divided(shards)

    def limits(quota: Quota) -> list[int | None]:
        return [quota.records, quota.bytes, quota.in_flight, None if quota.new_keys is None else quota.new_keys.count]

    for limit, share in zip(limits(whole), limits(part), strict=True):
        assert (limit is None) == (share is None)
        assert limit is None or share is None or limit <= share * shards < limit + shards
    assert part == part.multiplied(shards).divided(shards)
    assert whole == whole.divided(1).multiplied(1)
    if whole.new_keys is not None:
        assert part.new_keys is not None
        assert whole.new_keys.seconds == part.new_keys.seconds


def test_what_cannot_be_divided_is_named() -> None:
    """Of 3 over 4 parts each would have 1, and so all of them 4. Nothing is divisible by any number."""
    quota = Quota(records=3, bytes=4, in_flight=0, new_keys=NewKeys(1, 60))

    assert {"records": 3, "new_keys": 1} == quota.less_than(4)
    assert {} == quota.less_than(1)


def test_what_parts_have_is_added_up() -> None:
    assert Usage(11, 22, 33, 44) == Usage.together([Usage(1, 2, 3, 4), Usage(10, 20, 30, 40)])
