"""What a response says about its key, against the problems that the service really sends."""

from __future__ import annotations

import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.wrappers import Response

from flask_idempotency.client.responses import BY_CODE, REPLAY_MARKS, Verdict, problem_code, read
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.problem_pages import as_page
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import Problem, render

DOCS = "https://docs.example/problems/"


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_each_problem_of_each_dialect_is_known(profile: object) -> None:
    for code in PROBLEMS:
        problem = Problem(code, status=None if PROBLEMS[code].status else 201)
        response = render(problem, profile=profile, docs_url=DOCS, response_class=Response)  # type: ignore[arg-type]

        found = problem_code(response.status_code, response.headers, response.get_data())  # type: ignore[arg-type]

        assert found == code


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_each_problem_is_known_as_a_page(profile: object) -> None:
    for code in PROBLEMS:
        problem = Problem(code, status=None if PROBLEMS[code].status else 201)
        document = render(problem, profile=profile, docs_url=DOCS, response_class=Response)  # type: ignore[arg-type]
        page = as_page(document, problem, Response, same_key=True)

        found = problem_code(page.status_code, page.headers, page.get_data())  # type: ignore[arg-type]

        assert found == code


def test_there_is_no_row_for_a_problem_that_no_service_sends() -> None:
    assert set(BY_CODE) == set(PROBLEMS)


def test_a_problem_is_retried_if_the_service_says_that_it_may_end_better() -> None:
    retried = {code: BY_CODE[code] in (Verdict.RETRY, Verdict.RETRY_UNDONE, Verdict.IN_FLIGHT) for code in PROBLEMS}

    assert retried == {code: rule.retry for code, rule in PROBLEMS.items()}


def test_the_marks_of_all_dialects_are_known() -> None:
    marks = {
        name for profile in PROFILES.values() for name, value in profile.values["replayed_header"] if value == "true"
    }

    assert marks == set(REPLAY_MARKS)


NOT_OURS = (
    b"",
    b"[]",
    b"{",
    b'"in-flight"',
    b'{"code": 3, "type": "x/3"}',
    b'{"code": "in-flight"}',
    b'{"code": "in-flight", "type": "https://docs.example/not-in-flight"}',
    b'{"code": "unheard-of", "type": "https://docs.example/unheard-of"}',
    b'{"error": "in_flight"}',
    b'{"error": {"code": "in_flight"}}',
    b'{"error": {"code": ["in_flight"], "doc_url": "x/in-flight"}}',
    b'{"error_code": "in_flight"}',
    b'{"error_code": {}}',
    b"\xff\xfe",
)


def test_what_is_no_problem_of_ours() -> None:
    for body in NOT_OURS:
        assert problem_code(409, {"Content-Type": "application/json"}, body) is None, body


def test_a_page_of_text_is_no_problem() -> None:
    body = b'{"code": "in-flight", "type": "https://docs.example/in-flight"}'

    page = {"Content-Type": "text/html; charset=utf-8", "Link": '<https://docs.example/in-flight>; rel="describedby"'}
    assert problem_code(409, {"Content-Type": "text/html"}, body) is None
    assert problem_code(200, page, b"<p>paid") is None
    assert problem_code(409, page | {"Link": '<https://docs.example/in-flight>; rel="next"'}, body) is None
    assert problem_code(409, {"Content-Type": "application/vnd.shop+json; charset=utf-8"}, body) == "in-flight"


def test_a_success_is_no_problem_whatever_its_body_says() -> None:
    body = b'{"code": "in-flight", "type": "https://docs.example/in-flight", "note": "not-kept"}'

    assert problem_code(201, {"Content-Type": "application/json"}, body) is None


@given(st.binary(), st.integers(100, 599), st.sampled_from(["application/json", "application/problem+json", "", "x"]))
def test_no_body_breaks_the_reading(body: bytes, status: int, kind: str) -> None:
    assert read(status, {"Content-Type": kind}, body).status == status


@given(st.text(st.characters(codec="latin-1")))
def test_no_field_breaks_the_reading(value: str) -> None:
    fields = {"Retry-After": value, "Date": value, "Link": value, "Stripe-Should-Retry": value}

    reading = read(503, fields, b"", url="https://shop.example/payments")

    assert reading.retry_after is None or reading.retry_after >= 0


@pytest.mark.parametrize("written", ("5", "-5", "5, 6", "soon", ""))
def test_a_conflict_with_a_time_to_wait_is_in_flight_whatever_the_time(written: str) -> None:
    """A name that it settled would get a new key while the first request runs."""
    assert read(409, {"Retry-After": written}, b"").verdict is Verdict.IN_FLIGHT
    assert read(409, {}, b"").verdict is Verdict.RETURN


def test_seconds_to_wait() -> None:
    seconds = {"0": 0.0, "2": 2.0, " 2 ": 2.0, "1.5": 1.5, "-1": None, "soon": None, "": None}
    # A service may say "never", and a float ends at 308 digits.
    seconds |= {"9" * 10: 9_999_999_999.0, "0" * 12 + "5": 5.0, "1" + "0" * 20 + ".5": 1e20, "9" * 5_000: math.inf}

    assert seconds == {written: read(503, {"Retry-After": written}, b"").retry_after for written in seconds}


def test_a_date_in_the_past_is_no_wait() -> None:
    fields = {"Retry-After": formatdate(1_000, usegmt=True), "Date": formatdate(2_000, usegmt=True)}

    assert read(503, fields, b"").retry_after == 0


@pytest.mark.parametrize(
    ("link", "url"),
    [
        ('</keys>; rel="status"', "https://shop.example/keys"),
        ("</keys>;rel=status", "https://shop.example/keys"),
        (
            '<https://docs.example/x>; rel="describedby", <keys>; title="a"; rel="status"',
            "https://shop.example/api/keys",
        ),
        ('<>; rel="status"', "https://shop.example/api/payments"),
        ('<https://docs.example/x>; rel="describedby"', None),
        ('<https://docs.example/x>; rel="status-page"', "https://docs.example/x"),
        ("", None),
    ],
)
def test_the_link_to_the_status_of_the_key(link: str, url: str | None) -> None:
    assert read(409, {"Link": link}, b"", url="https://shop.example/api/payments").status_url == url


def test_a_pause_sends_the_same_key_again() -> None:
    """The finished steps are remembered, also where the application wrote the response."""
    paused = {"Idempotency-Status": "paused"}
    statuses = (200, 307, 401, 402, 409, 422, 429, 501, 503)

    assert {read(status, paused, b"").verdict for status in statuses} == {Verdict.PAUSED}
    assert Verdict.RETURN == read(501, {}, b"").verdict
    assert Verdict.RETRY_UNDONE == read(429, {}, b"").verdict
