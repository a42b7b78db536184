"""`flask idempotency report`: what enforcing would have done, and what to set."""

from __future__ import annotations

import os
import re

import pytest
from click.testing import Result
from flask import Flask

from flask_idempotency import exempt, idempotent
from flask_idempotency.engine.activity import Counts, would
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import NAME, World, new_world, refusal, run, said, shop


def add(world: World, counts: Counts) -> None:
    world.store.activity.add(owner_mark(NAME), counts, token=os.urandom(16))


@pytest.fixture
def world() -> World:
    world = shop(mode="observe")

    @world.view("/safe")
    @idempotent(mode="enforce")
    def safe() -> str:
        return "paid"

    @world.view("/login")
    @exempt
    def login() -> str:
        return "in"

    add(
        world,
        {
            "pay": {
                would("new", "cookie"): 90,
                would("unkeyed", "cookie"): 10,
                would("new", "authorization"): 100,
                would("replayed", "cookie"): 5,
                would("conflict", "cookie"): 4,
                "apart:9": 4,
                "ran:12": 190,
            },
            "safe": {"new": 30, "replayed": 3},
            "gone": {"new": 1},
        },
    )
    return world


def cells(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [re.split(r"  +", line.strip()) for line in result.output.splitlines()]


def test_the_page_has_a_row_for_each_endpoint(world: World) -> None:
    _, head, pay, safe, gone, *_ = cells(run(world, "report", "--wide"))

    assert ["endpoint", "mode", "requests", "with key", "replays", "at once"] == head[:6]
    assert ["pay", "observe", "209", "199 (95 %)", "5", "4", "50 ms", "50 ms"] == pay[:8]
    assert ["safe", "enforce", "33", "33", "3", "0", "-", "-"] == safe[:8]
    assert ["gone", "-", "1"] == gone[:3]


def test_the_page_shows_callers_and_suggestions(world: World) -> None:
    output = run(world, "report").output

    assert "pay       cookie         109       99" in output
    assert "required            199 of 209 requests carried a key (99 of 109 by cookie" in output
    assert "Without one came: 10 by cookie. Let these clients send a key" in output
    assert "required=False" not in output
    assert 'in_flight="wait"' in output
    assert "safe:" not in output


def test_machines_get_the_same(world: World) -> None:
    found = said(run(world, "report", "--json"))["endpoints"]

    assert (209, 199, 5) == (found["pay"]["seen"], found["pay"]["keyed"], found["pay"]["counts"]["replayed"])
    assert ["required", "in_flight"] == [each["keyword"] for each in found["pay"]["suggestions"]]
    assert [] == found["gone"]["suggestions"]


def test_the_span_is_chosen(world: World) -> None:
    world.clock.advance(3 * 3600)
    assert "No request was counted in the last 1 h." in run(world, "report", "--since", "1h").output
    assert 3 <= len(cells(run(world, "report", "--since", "24h")))
    assert 2 == run(world, "report", "--since", "90d").exit_code
    assert 2 == run(world, "report", "--since", "soon").exit_code


def test_hostile_names_are_escaped(world: World) -> None:
    add(world, {"\x1b[31mred": {would("new", "cookie"): 30}})
    assert "\x1b" not in run(world, "report").output


def test_what_cannot_be_reported_is_refused_with_a_sentence() -> None:
    poor = new_world(Flask(NAME), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]
    assert "keeps no activity" in refusal(run(poor, "report"))
    assert "IDEMPOTENCY_ACTIVITY is False here" in run(shop(activity=False), "report").output


def test_the_policy_table_shows_who_only_observes(world: World) -> None:
    rows = {row[0]: row for row in cells(run(world, "policy"))}

    assert ["pay", "POST", "no", "plain", "-", "only observed (mode observe)"] == rows["pay"]
    assert ["safe", "POST", "no", "plain", "quarantined"] == rows["safe"]
    assert "exempt" == rows["login"][-1]
    assert (
        "pay POST: not protected, and under enforce; a vanished worker's key is" in run(world, "policy", "pay").output
    )


def test_doctor_names_the_endpoints_that_only_observe(world: World) -> None:
    found = {each["check"]: each for each in said(run(world, "doctor", "--json"))["findings"]}
    assert ("advice", "Endpoints that are only observed, so a retry runs again: pay.") == (
        found["mode"]["verdict"],
        found["mode"]["text"],
    )

    found = {each["check"]: each for each in said(run(shop(), "doctor", "--json"))["findings"]}
    assert "fine" == found["mode"]["verdict"]
