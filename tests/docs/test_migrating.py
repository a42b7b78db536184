"""Two schemes at a time, as the page on migrating shows: no key that either of them knows runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from docs.generate import HERE
from flask_idempotency import Decision, Idempotency
from flask_idempotency.settings.profiles import PROFILES, policy_of
from tests.decisions import decision_of
from tests.docs.test_pages import BLOCK, surroundings

PAGE = (HERE / "guides" / "migrating.md").read_text(encoding="utf-8")


class OldScheme:
    """A lock and a stored response for each key, which all workers share."""

    def __init__(self) -> None:
        self.done: dict[str, tuple[dict[str, str], int]] = {}
        self.locked: set[str] = set()
        self.runs = 0

    def __call__(self, key: str, run: Callable[[], tuple[dict[str, str], int]]) -> tuple[dict[str, str], int]:
        if key in self.locked:
            return {"status": "in progress"}, 423
        if key not in self.done:
            self.runs += 1
            self.done[key] = run()
        return self.done[key]


@pytest.fixture
def old() -> OldScheme:
    return OldScheme()


@pytest.fixture
def client(old: OldScheme) -> FlaskClient:
    """A worker of the release that wraps the old scheme."""
    names: dict[str, Any] = surroundings()
    app: Flask = names["app"]
    app.testing = True
    exec(compile(BLOCK.findall(PAGE)[0], "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    names["old_scheme"] = old
    Idempotency(app)
    return app.test_client()


def pay(client: FlaskClient, key: str) -> tuple[int, bool]:
    response = client.post("/payments", headers={"Idempotency-Key": key})
    return response.status_code, "Idempotency-Replayed" in response.headers


def test_a_key_of_the_old_scheme_replays_and_is_then_known_to_both(old: OldScheme, client: FlaskClient) -> None:
    old.done["k"] = ({"status": "paid"}, 201)

    assert [(201, False), (201, True)] == [pay(client, "k") for _ in range(2)]
    assert 0 == old.runs


def test_a_key_that_an_old_worker_runs_is_free_after_the_refusal(old: OldScheme, client: FlaskClient) -> None:
    old.locked.add("k")
    assert [(423, False)] * 2 == [pay(client, "k") for _ in range(2)]

    old.locked.remove("k")
    old.done["k"] = ({"status": "paid"}, 201)

    assert [(201, False), (201, True)] == [pay(client, "k") for _ in range(2)]
    assert 0 == old.runs


@pytest.mark.parametrize("profile", PROFILES)
def test_only_ietf_releases_what_says_in_progress(profile: str) -> None:
    """The page names 409, 425 and 429 as released there. Other profiles keep them, unless they are listed."""
    for status in (409, 425, 429):
        for written in ({}, {"release_statuses": frozenset({status})}):
            policy = policy_of({"profile": profile, **written})
            decision = decision_of(policy, status=status, error=None, past_point=False)
            assert (decision is Decision.RELEASE) is (profile == "ietf" or bool(written))


def test_a_new_key_is_in_both_schemes(old: OldScheme, client: FlaskClient) -> None:
    """So an old worker replays it, and the release without the old scheme too."""
    assert [(201, False), (201, True)] == [pay(client, "k") for _ in range(2)]

    assert ({"status": "paid"}, 201) == old("k", lambda: pytest.fail("it ran again"))
    assert 1 == old.runs
