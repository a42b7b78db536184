"""A record that an earlier release wrote, with the parameters of JSON in its fingerprint, is found during a deployment."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from flask import request
from werkzeug.test import TestResponse

from flask_idempotency.engine.activity import MISMATCH, REPLAYED
from flask_idempotency.engine.events import Observation
from flask_idempotency.web import requests
from tests.apps import KEY, World, is_replay, new_world

UTF_8, BARE = "application/json; charset=utf-8", "application/json"
LEASE = 30.0


class Shop:
    """An application whose workers are of the earlier release until `deployed`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        self.deployed = False
        self.within: Callable[[], None] = lambda: None
        """What else happens while the first view runs."""
        self.world: World = new_world(lease=LEASE, **policy)
        present = requests.fingerprints

        def fingerprints(*args: Any, **kwargs: Any) -> Any:
            prints, former = present(*args, **kwargs)
            return (prints, former) if self.deployed else (former or prints, [])

        monkeypatch.setattr(requests, "fingerprints", fingerprints)

        @self.world.app.post("/pay")
        def pay() -> Any:
            self.world.runs.append(request.get_data())
            within, self.within = self.within, lambda: None
            within()
            return {"paid": len(self.world.runs)}, 201

    def post(self, media_type: str = UTF_8, data: bytes = b'{"amount": 1}') -> TestResponse:
        headers = {"Idempotency-Key": KEY, "Content-Type": media_type}
        return self.world.app.test_client().post("/pay", data=data, headers=headers)


@pytest.mark.parametrize(
    "policy",
    [{}, {"encryption": "on", "key_ring": {"one": b64encode(b"k" * 32).decode()}}, {"secret": ("s" * 9, "t" * 9)}],
    ids=["plain", "encrypted", "rotating"],
)
def test_a_response_of_an_earlier_release_is_replayed(monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
    shop = Shop(monkeypatch, **policy)
    assert 201 == shop.post().status_code
    shop.deployed = True

    assert is_replay(shop.post())
    assert 422 == shop.post(data=b'{"amount": 2}').status_code
    assert 1 == len(shop.world.runs)


def test_both_spellings_are_one_request_of_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch)
    shop.deployed = True
    answers = [shop.post(media_type) for media_type in (UTF_8, BARE, "application/json;version=2")]

    assert [False, True, True] == [is_replay(answer) for answer in answers]
    assert 1 == len(shop.world.runs)


def test_a_request_that_runs_in_an_earlier_release_is_in_flight_and_then_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop, statuses = Shop(monkeypatch, effects="deduplicated"), []

    def within() -> None:
        shop.deployed = True
        statuses.append(shop.post().status_code)
        shop.world.clock.advance(LEASE + 1)
        statuses.append(shop.post().status_code)

    shop.within = within
    late = shop.post()

    assert [409, 201] == statuses
    assert ({"paid": 2}, True) == (late.json, is_replay(late))
    assert is_replay(shop.post())
    assert 2 == len(shop.world.runs)


@pytest.mark.parametrize("media_type", [UTF_8, BARE])
def test_observing_finds_what_an_earlier_release_observed(monkeypatch: pytest.MonkeyPatch, media_type: str) -> None:
    shop = Shop(monkeypatch, mode="observe")
    shop.post(media_type)
    shop.deployed = True
    shop.post(media_type)
    shop.post(media_type, b'{"amount": 2}')

    outcomes = [event.outcome for event in shop.world.events if isinstance(event, Observation)]
    assert [REPLAYED, MISMATCH] == [outcome for outcome in outcomes if outcome in (REPLAYED, MISMATCH)]
