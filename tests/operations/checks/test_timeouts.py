"""Servers and proxies that give up before a payment does."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.doctor import Endpoint, gunicorn_timeout, lease, proxy_timeout, worker_timeout
from tests.operations.checks.judging import worst


def endpoint(name: str = "pay", **policy: Any) -> Endpoint:
    return Endpoint(name, Policy(**policy))


@pytest.mark.parametrize(
    ("command_line", "seconds"),
    (
        ("", None),
        ("--bind 0.0.0.0:80", None),
        ("--timeout 45", 45.0),
        ("--timeout=45 --workers 2", 45.0),
        ("-w 2 -t 45", 45.0),
        ("-t45", 45.0),
        ("-t 0", inf),
        ("-t 45 -k sync", 45.0),
        ("-t 45 --threads 1", 45.0),
        ("-t 45 --threads 8", inf),
        ("-t 45 -k gthread", inf),
        ("--worker-class=gevent -t 45", inf),
        ("-t soon", None),
        ("-t", None),
        ("--timeout '45", None),
    ),
)
def test_what_gunicorns_arguments_say(command_line: str, seconds: float | None) -> None:
    """Only a worker that does one thing at a time is taken for dead while it does it; 0 is never."""
    assert seconds == gunicorn_timeout(command_line)


@pytest.mark.parametrize("effects", ("plain", "marked"))
def test_workers_that_are_killed_before_a_view_must_end_leave_unknown_outcomes(effects: str) -> None:
    found = worker_timeout([endpoint(effects=effects, max_runtime=60.0)], seconds=30.0)

    assert Verdict.FAULT is worst(found)
    assert ("30 s" in found[0].text, "60 s" in found[0].text, "pay" in found[0].text) == (True, True, True)


@pytest.mark.parametrize("effects", ("deduplicated", "transactional"))
def test_where_a_retry_may_begin_anew_it_is_advice(effects: str) -> None:
    assert Verdict.ADVICE is worst(worker_timeout([endpoint(effects=effects)], seconds=30.0))


@pytest.mark.parametrize("seconds", (60.0, 61.0, inf))
def test_workers_that_outlive_their_views_are_fine(seconds: float) -> None:
    assert Verdict.FINE is worst(worker_timeout([endpoint(max_runtime=60.0)], seconds=seconds))


def test_a_timeout_that_nobody_has_said_is_unknown_and_says_how_to_say_it() -> None:
    assert Verdict.UNKNOWN is worst(worker_timeout([endpoint()], seconds=None))
    assert Verdict.UNKNOWN is worst(proxy_timeout([endpoint(in_flight="wait")], seconds=None))


def test_of_many_endpoints_some_are_named() -> None:
    every = [endpoint(f"pay{number}") for number in range(8)]

    assert "pay0, pay1, pay2, pay3, pay4 and 3 more." in worker_timeout(every, seconds=1.0)[0].text


@pytest.mark.parametrize(
    ("seconds", "verdict"), ((9.0, Verdict.ADVICE), (10.0, Verdict.ADVICE), (10.1, Verdict.FINE), (inf, Verdict.FINE))
)
def test_a_proxy_must_outwait_a_duplicate(seconds: float, verdict: Verdict) -> None:
    """Else its caller gets a 504 of the proxy's, and not our answer."""
    assert verdict is worst(proxy_timeout([endpoint(in_flight="wait", wait=10.0)], seconds=seconds))


@pytest.mark.parametrize("seconds", (1.0, None))
def test_where_nobody_waits_a_proxy_may_be_as_it_likes(seconds: float | None) -> None:
    """Known or not."""
    assert Verdict.FINE is worst(proxy_timeout([endpoint(wait=10.0)], seconds=seconds))


@pytest.mark.parametrize(("seconds", "verdict"), ((5.9, Verdict.ADVICE), (6.0, Verdict.FINE), (30.0, Verdict.FINE)))
def test_a_lease_that_one_pause_ends_is_too_short(seconds: float, verdict: Verdict) -> None:
    assert verdict is worst(lease([endpoint(lease=seconds)]))
