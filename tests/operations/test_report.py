"""The report of observed and enforced requests, and what it suggests."""

from __future__ import annotations

import json
import os
from math import inf
from typing import Any

import pytest

from flask_idempotency.engine.activity import would
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.step_rules import Step
from flask_idempotency.operations.report import EndpointReport, as_object, report, suggestions
from flask_idempotency.operations.times import format_edge
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock

OWNER = b"abc"


def counted(counts: dict[str, int]) -> EndpointReport:
    """Return the report of one endpoint with these counters."""
    store = MemoryStore(clock=FrozenClock())
    store.activity.add(OWNER, {"pay": counts}, token=os.urandom(16))
    return report(store.activity, OWNER, seconds=60).endpoints["pay"]


def said(counts: dict[str, int], *, joint: bool = False, **policy: Any) -> dict[str, tuple[str, str]]:
    """Return the suggestions for these counters: by keyword the value and the reason."""
    found = suggestions(counted(counts), Policy(**policy), joint=joint)
    return {each.keyword or each.value: (each.value, each.reason) for each in found}


NEW = would("new", "cookie")
KEYED = {NEW: 100}


def test_observed_and_enforced_requests_are_one_row() -> None:
    observed = {NEW: 3, would("new", "anonymous"): 2, would("replayed", "cookie"): 1}
    found = counted({**observed, "new": 5, "replayed": 2, "t:new:3": 5})

    assert (10, 3, 13, 13) == (found.of("new"), found.of("replayed"), found.seen, found.keyed)
    assert {"cookie": {"new": 3, "replayed": 1}, "anonymous": {"new": 2}} == found.callers
    assert {3: 5} == found.ran


def test_the_end_of_a_request_is_not_counted_as_a_request() -> None:
    found = counted({NEW: 1, would("completed", "cookie"): 1, would("not-kept", "cookie"): 1, "ran:4": 1})

    assert (1, 1, 1) == (found.seen, found.of("completed"), found.of("not-kept"))
    assert {4: 1} == found.ran


def test_an_unknown_counter_is_left_out() -> None:
    found = counted({NEW: 1, "something-new": 7, "t:replayed:3": 2})

    assert (1, {"new": 1}) == (found.seen, dict(found.counts))


def test_the_busiest_endpoint_is_first() -> None:
    store = MemoryStore(clock=FrozenClock())
    store.activity.add(OWNER, {"a": {NEW: 1}, "b": {NEW: 9}, "c": {NEW: 1}}, token=os.urandom(16))

    assert ["b", "a", "c"] == list(report(store.activity, OWNER, seconds=60).endpoints)


def test_few_requests_suggest_nothing() -> None:
    assert {"": ("", "Only 19 requests came: wait for more before you decide anything.")} == said({NEW: 19})
    assert {"": ("", "Only 1 request came: wait for more before you decide anything.")} == said({NEW: 1})


def test_keys_on_all_requests_suggest_that_they_are_required() -> None:
    assert {
        "required": (
            "True",
            "100 of 100 requests carried a key (100 of 100 by cookie). So requiring one refuses none of these.",
        )
    } == said(KEYED)
    assert {} == said(KEYED, required=True)


def test_clients_without_a_key_are_named_by_what_they_carry() -> None:
    counts = {NEW: 30, would("unkeyed", "cookie"): 10, would("new", "authorization"): 60}

    assert said(counts)["required"] == (
        "",
        "90 of 100 requests carried a key (30 of 40 by cookie; 60 of 60 by authorization). Without one came: 10 by cookie. "
        "Let these clients send a key, and then set required=True.",
    )
    assert "Until clients send keys, nothing is protected." in said({would("unkeyed", "cookie"): 50})["required"][1]


@pytest.mark.parametrize(
    ("counts", "named"),
    (
        ({NEW: 90, would("missing-key", "cookie"): 10}, " (90 of 100 by cookie). Without one came: 10 by cookie."),
        ({"new": 90, "missing-key": 10, "missing-key@api-key": 10}, ". Without one came: 10 by api-key."),
        (
            {NEW: 50, "new": 40, "missing-key": 10, "missing-key@other": 10},
            " (50 of 50 by cookie). Without one came: 10 by other.",
        ),
        ({"new": 90, "missing-key": 10}, "."),  # counted by an earlier release
    ),
)
def test_a_required_key_stays_required(counts: dict[str, int], named: str) -> None:
    """A client that forgets its key must not be a reason to protect none."""
    told = said(counts, required=True)
    assert told == {
        "required": (
            "",
            f"90 of 100 requests carried a key{named} They get 400 and run nothing. Let these clients send a key.",
        )
    }


def test_an_enforced_endpoint_without_a_required_key_suggests_nothing_about_it() -> None:
    assert {} == said({"new": 100, "completed": 100})


def test_concurrent_duplicates_suggest_to_wait_if_views_are_quick() -> None:
    counts = KEYED | {would("conflict", "cookie"): 8, "apart:9": 8, "ran:12": 100}

    value, reason = said(counts, required=True)["in_flight"]
    assert '"wait"' == value
    assert "8 duplicates came while the first request ran, half of them within 50 ms" in reason
    assert "99 % of the views took at most 150 ms" in reason
    assert "in_flight" not in said(counts, in_flight="wait")


def test_concurrent_duplicates_of_slow_views_suggest_to_refuse() -> None:
    counts = KEYED | {would("wait", "cookie"): 1, "apart:9": 1, "ran:28": 100}

    value, reason = said(counts)["in_flight"]
    assert '"reject"' == value
    assert "1 duplicate came" in reason
    assert "some views took over 60 s" in reason
    assert "in_flight" not in said(KEYED | {would("conflict", "cookie"): 1})  # no view has ended yet


@pytest.mark.parametrize(
    ("joint", "expected"),
    ((True, '"transactional" if all its effects are rows'), (False, "is not possible: the store")),
)
def test_quarantines_say_why_and_what_else_there_is(joint: bool, expected: str) -> None:
    counts = KEYED | {would("quarantined", "cookie"): 3, would("unknown", "cookie"): 1}

    value, reason = said(counts, joint=joint)["effects"]
    assert "" == value
    assert reason.startswith(
        "3 keys ended in quarantine (an exception, a 5xx or a worker that vanished), and 1 retry met"
    )
    assert expected in reason
    assert "effects" not in said(KEYED)


def test_an_endpoint_with_durable_steps_keeps_them_and_hears_which_one_was_in_doubt() -> None:
    counts = {"new": 100, "quarantined": 3, "in-doubt:charge": 2, "in-doubt:ship": 1}

    value, reason = said(
        counts, effects="steps", steps=(Step("charge", effects="plain"), Step("ship", effects="plain"))
    )["steps"]
    assert not value
    assert "Steps left in doubt: charge, 2 times; ship, 1 times." in reason
    assert not any(kind in reason for kind in ("transactional", "deduplicated", "marked", "effects="))
    # The worker vanished, and no one counted which step it left.
    assert (
        "in doubt:"
        not in said({"new": 100, "unknown": 1}, effects="steps", steps=(Step("charge", effects="plain"),))["steps"][1]
    )


@pytest.mark.parametrize(
    ("effects", "weaker"),
    (
        ("marked", ('"marked"',)),
        ("deduplicated", ("declare", '"marked"')),
        ("transactional", ("declare", '"marked"', '"deduplicated"')),
    ),
)
def test_no_kind_of_effects_is_advised_that_promises_less(effects: Any, weaker: tuple[str, ...]) -> None:
    _, reason = said({"new": 100, "quarantined": 3}, joint=True, effects=effects)["effects"]

    told = reason.replace(f'Under effects="{effects}" ', "")
    assert not [each for each in weaker if each in told]


def test_mismatches_are_not_explained_by_more_than_is_known() -> None:
    _, reason = said(KEYED | {would("mismatch", "cookie"): 2})["ignore_fields"]

    assert (
        "2 requests had the key of another request: another payload, path or query. The counts do not tell which."
        in reason
    )
    assert "one key for several endpoints, which they must not" in reason  # another scope would rename every key
    assert "several endpoints" not in said(KEYED | {"mismatch": 2}, scope="operation")["ignore_fields"][1]


def test_other_findings_have_their_sentence() -> None:
    counts = KEYED | {would(each, "cookie"): 2 for each in ("not-kept", "sets-cookie", "bad-request", "failed")}
    found = [each.reason for each in suggestions(counted(counts), Policy(required=True), joint=False)]

    assert ["2 responses could", "2 responses set a", "2 requests had a ", "2 requests could "] == [
        each[:17] for each in found
    ]
    assert "max_body (262,144 bytes)" in found[0]


def test_json_has_every_number_and_no_infinity() -> None:
    store = MemoryStore(clock=FrozenClock())
    store.activity.add(OWNER, {"pay": KEYED | {"apart:28": 2, "ran:0": 1}}, token=os.urandom(16))
    found = report(store.activity, OWNER, seconds=60)
    suggested = {name: suggestions(each, Policy(), joint=False) for name, each in found.endpoints.items()}

    pay = json.loads(json.dumps(as_object(found, suggested), allow_nan=False))["endpoints"]["pay"]
    assert (100, 100, 100) == (pay["seen"], pay["keyed"], pay["counts"]["new"])
    assert {"count": 2, "p50": 60.0, "p99": 60.0} == pay["apart"]
    assert {"count": 1, "p50": 0.001, "p99": 0.001} == pay["ran"]
    assert {"cookie": {"new": 100}} == pay["callers"]
    assert ["required"] == [each["keyword"] for each in pay["suggestions"]]


@pytest.mark.parametrize(("seconds", "shown"), ((0.0075, "7.5 ms"), (1.5, "1.5 s"), (inf, "60 s")))
def test_a_time_is_shown_in_its_unit(seconds: float, shown: str) -> None:
    assert shown == format_edge(seconds)
