"""What a quota may say, how two are laid over each other, and where buckets end."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import MAX_LIMIT
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, window_of
from flask_idempotency.stores import BUCKETS_PER_LIFE, bucket_edge_ms, bucket_width_ms


def test_a_limit_is_a_number_that_every_store_can_count_to() -> None:
    for name, value in product(("records", "bytes", "in_flight"), (-1, 1.5, True, "7", MAX_LIMIT + 1)):
        with pytest.raises(ConfigurationError, match=name):
            Quota(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", (NewKeys(-1, 60), NewKeys(1, 0), NewKeys(1, float("inf")), NewKeys(1, float("nan"))))
def test_a_rate_has_a_count_and_a_time(rate: NewKeys) -> None:
    with pytest.raises(ConfigurationError, match="new_keys"):
        Quota(new_keys=rate)


def test_all_faults_of_a_quota_are_told_together() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Quota(records=-1, bytes=-1, in_flight=-1, new_keys=NewKeys(1, 0))

    assert 4 == len(refused.value.faults)


def test_what_the_upper_quota_names_is_taken_from_it() -> None:
    below, above = Quota(records=5, in_flight=2), Quota(records=0, new_keys=NewKeys(1, 60))

    assert Quota(records=0, in_flight=2, new_keys=NewKeys(1, 60)) == below.overlaid(above)
    assert below == below.overlaid(None)
    assert (True, False) == (Quota().unlimited, Quota(records=0).unlimited)


@given(now=st.integers(0, 2**52), keep=st.integers(1_000, 90 * 86_400_000_000))
def test_a_life_ends_at_an_edge_that_is_not_far(now: int, keep: int) -> None:
    width = bucket_width_ms(keep / 1_000_000)
    edge = bucket_edge_ms(now, keep, width_ms=width)

    assert 0 <= edge * 1000 - (now + keep) < max(keep / BUCKETS_PER_LIFE, 1000) + 1
    assert (0, 0) == (edge % width, width & width - 1)
    assert keep / 1000 / width < 2 * BUCKETS_PER_LIFE + 1


@given(now=st.integers(0, 2**52), seconds=st.floats(0.001, 1e6))
def test_a_window_is_open_until_it_closes(now: int, seconds: float) -> None:
    rate = NewKeys(1, seconds)
    number, left = window_of(now, rate)

    assert left > 0
    assert (number, number + 1) == (window_of(now + left - 1, rate)[0], window_of(now + left, rate)[0])


def test_drift_is_none_when_nothing_is_wrong() -> None:
    assert Drift(busy=3).none
    assert not Drift(bytes=-1).none
