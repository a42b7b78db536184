"""Each test runs at some stage, and every store is held to the contract on every push."""

from __future__ import annotations

import pytest

from tests.backends import BACKENDS, REACHED, STORES
from tests.lab.programs import REDIS_KINDS
from tests.stages import CORE, is_further


def test_the_core_stores_exist() -> None:
    assert set(CORE) <= set(STORES)


def test_the_contract_runs_on_every_store() -> None:
    assert set(BACKENDS) == {*STORES, *REACHED}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_store_that_is_not_of_the_core_is_of_the_matrix(name: str) -> None:
    assert is_further(name) == (name not in CORE)


def test_the_first_server_and_strategy_stand_for_the_others() -> None:
    assert not is_further(REDIS_KINDS[0])
    assert not is_further(("postgresql", "insert"))
    assert is_further(("postgresql", "advisory"))


def test_a_test_is_of_the_core_only_if_it_is_of_no_other_stage(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        further = {"slow", "matrix", "soak"} & {mark.name for mark in item.iter_markers()}
        assert bool(further) != (item.get_closest_marker("core") is not None)
