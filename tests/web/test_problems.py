from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import stripe
from flask import Flask, request
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidKey,
    NotStorable,
    StoreUnavailable,
)
from flask_idempotency.engine.model import InFlight, Mismatched, Unknown
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import Problem, failure, refusal, render

CODES = tuple(PROBLEMS)


def problem(code: str, detail: str = "") -> Problem:
    return Problem(code, detail, status=201 if PROBLEMS[code].status is None else None)


def rendered(what: Problem, profile: str = "ietf", *, docs_url: str = DOCS_URL) -> Response:
    return render(what, profile=PROFILES[profile], docs_url=docs_url, response_class=Response)


def test_the_table_is_that_of_the_specification() -> None:
    specified = {
        "missing-key": 400,
        "invalid-key": 400,
        "truncated-body": 400,
        "in-flight": 409,
        "key-reused": 422,
        "outcome-unknown": 409,
        "store-unavailable": 503,
        "response-not-kept": None,
        "replay-forbidden": 403,
        "principal-required": 403,
        "record-corrupt": 500,
    }

    assert specified == {code: PROBLEMS[code].status for code in specified}


def test_every_problem_says_what_happened_and_what_to_do() -> None:
    for code, row in PROBLEMS.items():
        assert all(
            text == text.strip() and len(text) > 15 for text in (row.title, row.detail, row.happened, row.remedy)
        )
        assert all(text.endswith(".") for text in (row.detail, row.happened, row.remedy)), code


@pytest.mark.parametrize("profile", ("ietf", "x-idempotency"))
def test_a_problem_is_a_problem_document(profile: str) -> None:
    for code in CODES:
        response = rendered(problem(code, "Specifics."), profile)

        assert {
            "type": DOCS_URL + code,
            "title": PROBLEMS[code].title,
            "status": response.status_code,
            "detail": f"{PROBLEMS[code].detail} Specifics.",
            "code": code,
        } == json.loads(response.get_data())
        assert "application/problem+json" == response.headers["Content-Type"]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_dialect_points_to_the_page_and_is_not_cached(profile: str) -> None:
    for code in CODES:
        response = rendered(problem(code), profile, docs_url="https://pay.example/errors#")

        assert f'<https://pay.example/errors#{code}>; rel="describedby"' == response.headers["Link"]
        assert "no-store" == response.headers["Cache-Control"]
        assert "Retry-After" not in response.headers, "no time was known"
        assert isinstance(json.loads(response.get_data()), dict)


@pytest.mark.parametrize(
    ("profile", "statuses"), (("ietf", {}), ("stripe", {"key-reused": 400}), ("playbook", {"key-reused": 409}))
)
def test_only_the_mismatch_has_another_status_in_another_dialect(profile: str, statuses: dict[str, int]) -> None:
    expected = {code: statuses.get(code) or PROBLEMS[code].status or 201 for code in CODES}

    assert expected == {code: rendered(problem(code), profile).status_code for code in CODES}


def test_a_problem_with_the_first_responses_status_needs_one() -> None:
    with pytest.raises(ValueError, match="no status"):
        Problem("response-not-kept")


def test_an_unknown_code_raises() -> None:
    with pytest.raises(KeyError):
        Problem("no-such-problem")


@pytest.mark.parametrize("profile", PROFILES)
def test_retry_after_is_whole_seconds_from_one_up_to_the_cap(profile: str) -> None:
    told = {-3.0: "1", 0.0: "1", 0.2: "1", 1.0: "1", 1.01: "2", 4.2: "5", 299.0: "5"}

    assert told == {each: rendered(refusal(InFlight(each)), profile).headers["Retry-After"] for each in told}


def test_a_mismatch_has_the_time_of_the_first_request() -> None:
    assert "It was first seen at 2023-11-14T22:13:20Z." == refusal(Mismatched(1_700_000_000.9)).detail


def test_an_unknown_outcome_has_neither_a_reason_nor_a_retry_after() -> None:
    """The reason is for operators. The extension cannot promise a time."""
    response = rendered(refusal(Unknown("lease-expired on worker-7")))

    assert "worker-7" not in response.get_data(as_text=True)
    assert "Retry-After" not in response.headers


def test_the_detail_names_what_is_wrong_with_a_key() -> None:
    assert Problem("invalid-key", "Longer than 255 characters.") == failure(InvalidKey("longer than 255 characters"))


@pytest.mark.parametrize(
    ("error", "code"),
    ((StoreUnavailable("redis://secret@host"), "store-unavailable"), (CorruptRecord("rid"), "record-corrupt")),
)
def test_the_detail_hides_internal_errors(error: StoreUnavailable | CorruptRecord, code: str) -> None:
    assert (code, "") == (failure(error).code, failure(error).detail)


def test_a_store_that_is_down_has_a_retry_after() -> None:
    assert "2" == rendered(failure(StoreUnavailable("down"))).headers["Retry-After"]


@pytest.mark.parametrize("error", (ConfigurationError("x"), NotStorable("x")))
def test_an_error_that_does_not_concern_the_client_propagates(error: ConfigurationError | NotStorable) -> None:
    with pytest.raises(type(error)):
        failure(error)


@pytest.mark.parametrize(
    ("code", "error_code"),
    (
        ("key-reused", "idempotency_payload_mismatch"),
        ("in-flight", "request_in_progress"),
        ("store-unavailable", "store_unavailable"),
    ),
)
def test_playbook_has_its_own_words(code: str, error_code: str) -> None:
    document = json.loads(rendered(problem(code), "playbook").get_data())

    assert {"error_code": error_code, "error_message": PROBLEMS[code].detail} == document


class StripeLike:
    """A server that returns `answer` to every request, and the real client pointed at it."""

    def __init__(self) -> None:
        self.answer = Problem("in-flight")
        self.keys: list[str | None] = []
        app = Flask(__name__)

        @app.post("/v1/charges")
        def charge() -> Response:
            self.keys.append(request.headers.get("Idempotency-Key"))
            return rendered(self.answer, "stripe")

        self.server = make_server("127.0.0.1", 0, app, threaded=True)

    def charge(self, *, retries: int = 0) -> Any:
        client = stripe.StripeClient(
            "sk_test",
            base_addresses={"api": f"http://127.0.0.1:{self.server.server_port}"},
            max_network_retries=retries,
        )
        return client.v1.charges.create({"amount": 100, "currency": "eur"})


@pytest.fixture(scope="module")
def listening() -> Iterator[StripeLike]:
    service = StripeLike()
    thread = threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


@pytest.fixture
def service(listening: StripeLike, monkeypatch: pytest.MonkeyPatch) -> StripeLike:
    monkeypatch.setattr("stripe._http_client.HTTPClient._sleep_time_seconds", lambda *args, **kwargs: 0)
    listening.keys.clear()
    return listening


@pytest.mark.parametrize(
    ("code", "error", "error_code"),
    (
        ("missing-key", stripe.InvalidRequestError, "missing_key"),
        ("invalid-key", stripe.InvalidRequestError, "invalid_key"),
        ("truncated-body", stripe.InvalidRequestError, "truncated_body"),
        ("in-flight", stripe.APIError, "idempotency_key_in_use"),
        ("key-reused", stripe.IdempotencyError, None),
        ("outcome-unknown", stripe.APIError, "outcome_unknown"),
        ("store-unavailable", stripe.APIError, "store_unavailable"),
        ("replay-forbidden", stripe.PermissionError, "replay_forbidden"),
        ("principal-required", stripe.PermissionError, "principal_required"),
        ("record-corrupt", stripe.APIError, "record_corrupt"),
    ),
)
def test_the_stripe_client_raises_the_right_error(
    service: StripeLike, code: str, error: type[stripe.StripeError], error_code: str | None
) -> None:
    service.answer = Problem(code)

    with pytest.raises(stripe.StripeError) as caught:
        service.charge()

    assert (error, error_code, PROBLEMS[code].detail) == (
        type(caught.value),
        caught.value.error.code if caught.value.error else "none",
        caught.value.user_message,
    )


@pytest.mark.parametrize(("status", "error"), ((404, stripe.InvalidRequestError), (500, stripe.APIError)))
def test_the_stripe_client_reads_a_tombstone_of_a_failure(
    service: StripeLike, status: int, error: type[stripe.StripeError]
) -> None:
    service.answer = Problem("response-not-kept", status=status)

    with pytest.raises(error):
        service.charge()


def test_the_stripe_client_takes_a_tombstone_of_a_success_for_one(service: StripeLike) -> None:
    """The charge was made; an exception would invite its caller to charge again."""
    service.answer = Problem("response-not-kept", status=200)

    assert "response_not_kept" == service.charge().error.code


def test_the_stripe_client_repeats_what_may_end_better_and_nothing_else(service: StripeLike) -> None:
    for code in CODES:
        service.keys.clear()
        service.answer = Problem(code, status=500 if PROBLEMS[code].status is None else None)

        with pytest.raises(stripe.StripeError):
            service.charge(retries=2)

        assert (3 if PROBLEMS[code].retry else 1) == len(service.keys), code
        assert 1 == len(set(service.keys))


def test_a_client_may_repeat_these_problems_only() -> None:
    repeatable = {
        "in-flight",
        "memory-lost",
        "not-committed",
        "quota-exceeded",
        "request-paused",
        "store-unavailable",
        "transaction-conflict",
        "truncated-body",
    }

    assert repeatable == {code for code in CODES if PROBLEMS[code].retry}


def test_no_guide_names_a_command() -> None:
    """API clients read guides, and have no shell. The one problem that only an operator ends has its command and risk."""
    assert ["memory-lost"] == [
        row.code for row in PROBLEMS.values() if "`flask " in row.happened + row.remedy + row.detail
    ]
    assert "`flask idempotency redis ack`" in PROBLEMS["memory-lost"].detail
    assert "run a second time" in PROBLEMS["memory-lost"].detail
