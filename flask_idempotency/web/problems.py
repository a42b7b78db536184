"""Turn outcomes and errors into problem documents. `problem_types` has the table of all problems.

Outside debug mode, no problem shows a key, record, payload or principal.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, assert_never

from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import (
    CorruptRecord,
    IdempotencyError,
    InvalidKey,
    NotCommitted,
    ResponseUnavailable,
    StoreDataLoss,
    StoreUnavailable,
)
from flask_idempotency.engine.escape import printable_lines
from flask_idempotency.engine.model import Erased, Expired, InFlight, Mismatched, OverQuota, Unknown, Voided
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings.profiles import Dialect, Profile
from flask_idempotency.web.principals import AnonymousCaller
from flask_idempotency.web.request_body import BodyTooLarge, TruncatedBody

if TYPE_CHECKING:
    from flask_idempotency.web.problem_types import ProblemType

POLICY_PATH: Final = "/.well-known/idempotency"
"""Where IDEMPOTENCY_PUBLISH serves the policy document."""

PAGES_PATH: Final = "/.well-known/idempotency/problems/"
"""Where the application serves a page on each problem, unless IDEMPOTENCY_DOCS_URL names another place."""


_log = logging.getLogger("flask_idempotency")

RETRY_AFTER_CAP_SECONDS = 5
"""The worker renews its lease while the view runs, so the rest of it does not show when the view ends. Most views end within
a second, and a retry every five costs one store call."""

STORE_RETRY_SECONDS = 2
"""Longer than a reconnect after a fail-over, and short for a client that waits."""

LOSS_RETRY_SECONDS = 30
"""Workers must restore their claims first, and an operator may have to acknowledge the loss."""

CONFLICT_RETRY_SECONDS = 1
"""The least that the header can say: the other transaction has ended."""


QUOTA_RETRY_SECONDS = 60
"""Used if the store cannot tell when the quota allows a key again."""

QUOTA_UNITS: Mapping[str, str] = MappingProxyType({"bytes": "content-bytes", "in-flight": "concurrent-requests"})
"""The quota units of `RateLimit-Policy`, for limits that do not count requests."""


class _Rows(dict[str, "ProblemType"]):
    """The rows of `problem_types` by code. The table is long: an application that gets no requests does not load it."""

    def __missing__(self, code: str) -> ProblemType:
        from flask_idempotency.web.problem_types import PROBLEMS

        self.update(PROBLEMS)
        return PROBLEMS[code]


_ROWS: Final = _Rows()


@valueclass(frozen=True, slots=True)
class Problem:
    """One occurrence. `code` is one of `problem_types`; a code whose row has no status needs one here."""

    code: str
    detail: str = ""
    """Added to the row's detail: the fault of the key, or when it was first seen. Never a value that the client sent."""
    status: int | None = None
    """A problem renderer always finds it set."""
    retry_after: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Further header fields of this occurrence."""
    status_url: str = ""
    """Where the client can ask what became of its key, in `Link` with `rel="status"` (RFC 8631). Empty: nowhere."""
    policy_url: str = ""
    """Where the policies are published, in `Link` with `rel="service-meta"` (RFC 8631). Empty: nowhere."""

    def __post_init__(self) -> None:
        if self.status is None and _ROWS[self.code].status is None:
            raise ValueError(f"{self.code} has no status of its own")

    @property
    def title(self) -> str:
        """A short title, the same for each occurrence."""
        return _ROWS[self.code].title

    @property
    def text(self) -> str:
        """Explain to a reader what happened, with the detail of this occurrence. It may have several lines in debug mode."""
        row = _ROWS[self.code]
        return printable_lines(f"{row.detail} {self.detail}") if self.detail else row.detail

    def status_in(self, profile: Profile) -> int:
        """Return the status in this profile's dialect."""
        return self.status or profile.statuses.get(self.code) or _ROWS[self.code].status or 500

    @property
    def http_headers(self) -> list[tuple[str, str]]:
        """Return the header fields of this occurrence, for each dialect and each renderer."""
        headers = [("Cache-Control", "no-store")]
        if self.retry_after is not None:
            headers.append(("Retry-After", str(whole_seconds(self.retry_after))))
        return [*headers, *self.headers]

    @property
    def links(self) -> str:
        """Return the value of `Link` for `status_url` and `policy_url`. Empty: there is neither."""
        known = {"status": self.status_url, "service-meta": self.policy_url}
        return ", ".join(f'<{url}>; rel="{relation}"' for relation, url in known.items() if url)


def refusal(outcome: InFlight | Mismatched | Unknown | OverQuota | Erased | Expired | Voided) -> Problem:
    """Return the problem that tells a client why its request does not run."""
    match outcome:
        case InFlight(retry_after):
            return Problem("in-flight", retry_after=min(retry_after, RETRY_AFTER_CAP_SECONDS))
        case Mismatched(first_seen):
            return Problem("key-reused", f"It was first seen at {text_of(first_seen)}.")
        case Expired(first_seen):
            return Problem("key-expired", f"It was first seen at {text_of(first_seen)}.")
        case Unknown():
            return Problem("outcome-unknown")
        case OverQuota():
            return _over_quota(outcome)
        case Erased():
            return Problem("response-erased")
        case Voided(first_seen):
            return Problem("key-voided", f"It was voided at {text_of(first_seen)}.")
        case unexpected:
            assert_never(unexpected)


def text_of(time: float) -> str:
    """Return this moment as documents show it, in UTC."""
    return f"{datetime.fromtimestamp(int(time), UTC):%Y-%m-%dT%H:%M:%SZ}"


def failure(error: IdempotencyError) -> Problem:
    """Return the problem for an error that the client gets. Raises any other error again."""
    match error:
        case InvalidKey():
            why = str(error)
            return Problem("invalid-key", f"{why[:1].upper()}{why[1:].rstrip('.')}.")
        case AnonymousCaller():
            return Problem("principal-required")
        case TruncatedBody():
            return Problem("truncated-body")
        case BodyTooLarge():
            return Problem("request-too-large")
        case StoreDataLoss():
            return Problem("memory-lost", retry_after=LOSS_RETRY_SECONDS)
        case StoreUnavailable():
            return Problem("store-unavailable", retry_after=STORE_RETRY_SECONDS)
        case CorruptRecord():
            return Problem("record-corrupt")
        case NotCommitted(retryable=True):
            return Problem("transaction-conflict", retry_after=CONFLICT_RETRY_SECONDS)
        case NotCommitted():
            return Problem("not-committed")
        case _:
            raise error


def step_problem(error: IdempotencyError) -> Problem:
    """Return the problem for an error that a step raised, which the view let through."""
    if isinstance(error, StoreUnavailable | NotCommitted) and not isinstance(error, ResponseUnavailable):
        return Problem("request-paused", retry_after=STORE_RETRY_SECONDS)
    return Problem("outcome-unknown")


def render(
    problem: Problem, *, profile: Profile, docs_url: str, response_class: type[Response], pages_url: str = ""
) -> Response:
    """Render the problem in the profile's dialect, with its header fields. Caches must not store it.

    `Link` leads to the page at `pages_url`, if there is one, and else to that at `docs_url`.
    """
    status = problem.status_in(profile)
    content, (media_type, (link, described), *rest) = _document(
        problem.code, problem.text, status, profile.body, docs_url
    )
    if pages_url:
        described = f'<{pages_url}{problem.code}>; rel="describedby"'
    if problem.status_url or problem.policy_url:
        # One line: many clients show only the first of several.
        described += f", {problem.links}"
    return build(response_class, content, status, [media_type, (link, described), *problem.http_headers, *rest])


def build(response_class: type[Response], content: bytes, status: int | str, fields: list[tuple[str, str]]) -> Response:
    """Return a response with this content and exactly these header fields."""
    response = response_class([content], status=status, headers=Headers(fields))
    if list(response.headers) != fields:
        # The constructor added some: Werkzeug a missing Content-Type, or a class of the application its own.
        response.headers = Headers(fields)
    return response


@lru_cache(maxsize=256)
def _document(
    code: str, detail: str, status: int, dialect: Dialect, docs_url: str
) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return the document of a problem, and the header fields that its dialect gives it."""
    row, page = _ROWS[code], docs_url + code
    document: dict[str, Any]
    fields = [
        ("Content-Type", "application/problem+json" if dialect == "problem" else "application/json"),
        ("Link", f'<{page}>; rel="describedby"'),
    ]
    match dialect:
        case "problem":
            document = {"type": page, "title": row.title, "status": status, "detail": detail, "code": row.code}
        case "stripe":
            error = {"type": row.stripe_type, "message": detail, "doc_url": page}
            # As at Stripe, only the type shows a reused key.
            if row.stripe_type != "idempotency_error":
                error["code"] = row.stripe_code or _underscored(row.code)
            document = {"error": error}
            # Stripe's clients retry every 409 and 5xx unless this field forbids it, and ignore Retry-After.
            fields.append(("Stripe-Should-Retry", "true" if row.retry else "false"))
        case "playbook":
            document = {"error_code": row.playbook_code or _underscored(row.code), "error_message": detail}
        case unexpected:
            assert_never(unexpected)
    return (json.dumps(document) + "\n").encode(), tuple(fields)


def _underscored(code: str) -> str:
    return code.replace("-", "_")


def _over_quota(outcome: OverQuota) -> Problem:
    """Return the problem of a used-up quota, with the fields of draft-ietf-httpapi-ratelimit-headers for its limit."""
    from flask_idempotency.engine.quota import LIMITS

    seconds = outcome.retry_after or QUOTA_RETRY_SECONDS
    if outcome.limit == "in-flight":
        # As for one key: most views end long before their lease.
        seconds = min(seconds, RETRY_AFTER_CAP_SECONDS)
    policy = f'"{outcome.limit}";q={outcome.allowed}'
    if outcome.limit in QUOTA_UNITS:
        policy += f';qu="{QUOTA_UNITS[outcome.limit]}"'
    if outcome.window is not None:
        policy += f";w={whole_seconds(outcome.window)}"
    state = f'"{outcome.limit}";r=0;t={whole_seconds(seconds)}'
    return Problem(
        "quota-exceeded",
        f"The limit is on {LIMITS[outcome.limit]}: {outcome.allowed}.",
        retry_after=seconds,
        headers=(("RateLimit-Policy", policy), ("RateLimit", state)),
    )


def whole_seconds(seconds: float) -> int:
    """Return these seconds rounded up, and at least 1."""
    # With 0 a client would retry without a pause for as long as the view runs.
    return max(1, math.ceil(seconds))
