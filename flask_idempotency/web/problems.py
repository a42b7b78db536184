"""Outcomes and errors → problem documents. No key, record, payload or principal appears in any, outside debug mode."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, assert_never

from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import (
    CorruptRecord,
    IdempotencyError,
    InvalidKey,
    MemoryLost,
    NotCommitted,
    StoreUnavailable,
)
from flask_idempotency.engine.escape import printable_lines
from flask_idempotency.engine.model import Erased, InFlight, Mismatched, OverQuota, Unknown
from flask_idempotency.engine.quota import LIMITS
from flask_idempotency.settings.profiles import Profile
from flask_idempotency.web.problem_types import PROBLEMS, ProblemType

RETRY_AFTER_CAP_SECONDS = 5
"""A lease is renewed while the work runs, so what is left of it says when the owner was last seen, not when it will be
done. Most work ends within a second; asking again every five costs one store call."""

STORE_RETRY_SECONDS = 2
"""Longer than a failover's reconnect, shorter than a caller's patience."""

LOSS_RETRY_SECONDS = 30
"""Owners have to put their claims back first, and perhaps a person has to look."""

CONFLICT_RETRY_SECONDS = 1
"""The least that the header can say: the other transaction is over, or it would not have won."""


QUOTA_RETRY_SECONDS = 60
"""Where the store cannot tell when something will be free: a caller that is over its quota is in no hurry."""

QUOTA_UNITS: Mapping[str, str] = MappingProxyType({"bytes": "content-bytes", "in-flight": "concurrent-requests"})
"""How `RateLimit-Policy` says what a limit counts, where that is not requests."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One occurrence. `code` is a key of `PROBLEMS`; a code whose row has no status needs one here."""

    code: str
    detail: str = ""
    """Added to the row's detail: what is wrong with the key, when it was first seen. Never a value the client sent."""
    status: int | None = None
    """A problem renderer always finds it set."""
    retry_after: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """What HTTP says about it besides, in fields of its own."""

    def __post_init__(self) -> None:
        if self.status is None and PROBLEMS[self.code].status is None:
            raise ValueError(f"{self.code} has no status of its own")

    @property
    def title(self) -> str:
        """A few words for people, the same for each occurrence."""
        return PROBLEMS[self.code].title

    @property
    def text(self) -> str:
        """Say to people what has happened, with the detail of this occurrence. In debug mode that may have several lines."""
        row = PROBLEMS[self.code]
        return printable_lines(f"{row.detail} {self.detail}") if self.detail else row.detail

    def status_in(self, profile: Profile) -> int:
        """Return the status in this profile's dialect."""
        return self.status or profile.statuses.get(self.code) or PROBLEMS[self.code].status or 500

    @property
    def http_headers(self) -> list[tuple[str, str]]:
        """Return what HTTP says about this occurrence in header fields, in each dialect and for each renderer."""
        headers = [("Cache-Control", "no-store")]
        if self.retry_after is not None:
            headers.append(("Retry-After", str(_whole_seconds(self.retry_after))))
        return [*headers, *self.headers]


class Renderer(Protocol):
    """Makes the response for a problem; an application may bring its own."""

    def __call__(
        self, problem: Problem, *, profile: Profile, docs_url: str, response_class: type[Response]
    ) -> Response: ...


def refusal(outcome: InFlight | Mismatched | Unknown | OverQuota | Erased) -> Problem:
    """The problem that tells a caller why its request is not run."""
    match outcome:
        case InFlight(retry_after):
            return Problem("in-flight", retry_after=min(retry_after, RETRY_AFTER_CAP_SECONDS))
        case Mismatched(first_seen):
            seen = datetime.fromtimestamp(int(first_seen), UTC)
            return Problem("key-reused", f"It was first seen at {seen:%Y-%m-%dT%H:%M:%SZ}.")
        case Unknown():
            return Problem("outcome-unknown")
        case OverQuota():
            return _over_quota(outcome)
        case Erased():
            return Problem("answer-erased")
        case unexpected:
            assert_never(unexpected)


def failure(error: IdempotencyError) -> Problem:
    """The problem for an error that the client is told of. Raises the error again if it is none of those."""
    match error:
        case InvalidKey():
            return Problem("invalid-key", str(error))
        case MemoryLost():
            return Problem("memory-lost", retry_after=LOSS_RETRY_SECONDS)
        case StoreUnavailable():
            return Problem("store-unavailable", retry_after=STORE_RETRY_SECONDS)
        case CorruptRecord():
            return Problem("record-corrupt")
        case NotCommitted(again=True):
            return Problem("transaction-conflict", retry_after=CONFLICT_RETRY_SECONDS)
        case NotCommitted():
            return Problem("not-committed")
        case _:
            raise error


def render(problem: Problem, *, profile: Profile, docs_url: str, response_class: type[Response]) -> Response:
    """The problem in the profile's dialect, with what HTTP itself says about it in headers. Never to be cached."""
    row = PROBLEMS[problem.code]
    page = docs_url + problem.code
    status, detail = problem.status_in(profile), problem.text
    headers = [
        ("Content-Type", "application/problem+json" if profile.body == "problem" else "application/json"),
        ("Link", f'<{page}>; rel="describedby"'),
        *problem.http_headers,
    ]
    document: dict[str, Any]
    match profile.body:
        case "problem":
            document = {"type": page, "title": row.title, "status": status, "detail": detail, "code": row.code}
        case "stripe":
            document = {"error": _stripe_error(row, detail, page)}
            # Its clients retry every 409 and 5xx unless told otherwise, and ignore Retry-After.
            headers.append(("Stripe-Should-Retry", "true" if row.retry else "false"))
        case "playbook":
            document = {"error_code": row.playbook_code or _underscored(row.code), "error_message": detail}
        case unexpected:
            assert_never(unexpected)
    response = response_class(json.dumps(document) + "\n", status=status)
    response.headers = Headers(headers)
    return response


def _stripe_error(row: ProblemType, detail: str, page: str) -> dict[str, str]:
    error = {"type": row.stripe_type, "message": detail, "doc_url": page}
    # A reused key is told by its type alone, there as here.
    if row.stripe_type != "idempotency_error":
        error["code"] = row.stripe_code or _underscored(row.code)
    return error


def _underscored(code: str) -> str:
    return code.replace("-", "_")


def _over_quota(outcome: OverQuota) -> Problem:
    """Fields as in draft-ietf-httpapi-ratelimit-headers: the one limit that is reached, and when to look again."""
    seconds = outcome.retry_after or QUOTA_RETRY_SECONDS
    if outcome.limit == "in-flight":
        # As for one key: a lease says when the owner was last seen, and most work ends long before.
        seconds = min(seconds, RETRY_AFTER_CAP_SECONDS)
    policy = f'"{outcome.limit}";q={outcome.allowed}'
    if outcome.limit in QUOTA_UNITS:
        policy += f';qu="{QUOTA_UNITS[outcome.limit]}"'
    if outcome.window is not None:
        policy += f";w={_whole_seconds(outcome.window)}"
    state = f'"{outcome.limit}";r=0;t={_whole_seconds(seconds)}'
    return Problem(
        "quota-exceeded",
        f"The limit is on {LIMITS[outcome.limit]}: {outcome.allowed}.",
        retry_after=seconds,
        headers=(("RateLimit-Policy", policy), ("RateLimit", state)),
    )


def _whole_seconds(seconds: float) -> int:
    # Zero would invite a client to ask again at once, for as long as the work runs.
    return max(1, math.ceil(seconds))
