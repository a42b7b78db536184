"""Void keys while requests run, vanish, fail and come late: no effect follows a confirmed void, and none was before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.status import KeyStatus, void_key
from tests.backends import BACKENDS
from tests.engine.conftest import House, Unsteady, new_house
from tests.sql_backends import maria_database, sql_databases, sql_stores
from tests.stages import CORE

__all__ = ["maria_database", "sql_databases", "sql_stores"]

SCHEDULES = 150
POLICY = Policy(effects="marked", keep=3600.0)


@pytest.fixture(params=CORE)
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    house = new_house()
    with ExitStack() as ends:
        real: Any = BACKENDS[request.param](request, ends)(house.clock)
        store: Any = Unsteady(real)
        around = replace(house.around, store=store, void=store.void, recovery=real.recovery)
        yield replace(house, store=store, engine=Engine(around), around=around, policy=POLICY)


def test_no_schedule_has_an_effect_beside_a_void(house: House) -> None:
    for seed in range(SCHEDULES):
        Schedule(house, seed).run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_none_of_very_many_has(house: House) -> None:
    for seed in range(20_000):
        Schedule(house, seed).run()


def test_a_record_of_another_operation_is_not_given_up(house: House) -> None:
    """Another policy says what its effects are. The entry point says that the key is in use."""
    house.won(house.request("other"))
    house.clock.advance(POLICY.lease + 1)
    request = house.request("other")
    named = replace(request, info=replace(request.info, operation="book"))
    found = void_key(house.engine, [named], POLICY)

    assert isinstance(found, KeyStatus)
    assert "paused" == found.state
    found = void_key(house.engine, [request], POLICY)
    assert isinstance(found, KeyStatus)
    assert "voided" == found.state


def test_a_transactional_request_is_not_given_up(house: House) -> None:
    """Its rows were rolled back, and what it did outside the database was not."""
    house.won(house.request("rows"))
    house.clock.advance(POLICY.lease + 1)
    found = void_key(house.engine, [house.request("rows")], Policy(effects="transactional"))

    assert isinstance(found, KeyStatus)
    assert "paused" == found.state


class Schedule:
    """One key, and the calls of its workers and of a client that gives up, in a random order.

    A worker acts only after its point of no return, which is the promise of `marked`. Some hosts know one secret, and some
    both. Requests and replies of the store are lost at random.
    """

    def __init__(self, house: House, seed: int) -> None:
        self._house, self._seed, self._choose = house, seed, random.Random(seed)
        # Only what every host of a rotation may have: both secrets, or the older one.
        self._names = self._choose.choice(((0,), (0, 1)))
        self._key = f"key-{seed}-{id(house)}"
        self._claims: list[Claim] = []
        self._effects = 0
        self._confirmed = False

    def run(self) -> None:
        actions: tuple[Callable[[], None], ...] = (
            *(self._request,) * 3,
            *(self._act,) * 3,
            *(self._void,) * 3,
            partial(self._end, "complete"),
            partial(self._end, "release"),
            self._vanish,
        )
        for _ in range(self._choose.randrange(3, 12)):
            with self._losing(), suppress(StoreUnavailable):
                self._choose.choice(actions)()

    def _losing(self) -> ExitStack:
        """Lose the request or the reply of each call of one kind, in one action of six."""
        stack, store = ExitStack(), self._house.store
        if self._choose.random() < 1 / 6:
            lost = self._choose.choice((store.down, store.mute))
            verb = self._choose.choice(("claim", "void", "read", "complete", "release", "mark_point_of_no_return"))
            lost.add(verb)
            stack.callback(lost.clear)
        return stack

    def _request(self) -> None:
        first, *former = [self._house.request(self._key, identity=each) for each in self._names]
        outcome = self._house.engine.claim(first, POLICY, former=former)
        if isinstance(outcome, Claim):
            assert not self._confirmed, f"schedule {self._seed}: a request was granted after a void"
            self._claims.append(outcome)

    def _act(self) -> None:
        """Let a worker, also one that lost its lease, come to its effect."""
        if self._claims:
            claim = self._choose.choice(self._claims)
            if not claim.ended:
                with suppress(LeaseLost):
                    claim.point_of_no_return()
                    assert not self._confirmed, f"schedule {self._seed}: an effect followed a void"
                    self._effects += 1

    def _end(self, how: str) -> None:
        if self._claims and not (claim := self._choose.choice(self._claims)).ended:
            with suppress(LeaseLost):
                if how == "complete":
                    claim.complete(StoredResponse(201, body=b"paid"))
                elif not claim.past_point:
                    claim.release("status-503")

    def _vanish(self) -> None:
        self._house.clock.advance(POLICY.lease + 1)

    def _void(self) -> None:
        requests = [self._house.request(self._key, identity=each) for each in self._names]
        found = void_key(self._house.engine, requests, POLICY)
        assert isinstance(found, KeyStatus)
        if found.state == "voided":
            assert not self._effects, f"schedule {self._seed}: a void was confirmed after an effect"
            self._confirmed = True
