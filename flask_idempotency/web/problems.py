"""Turn outcomes and errors into problem documents, from the table of all problems.

Outside debug mode, no problem shows a key, record, payload or principal.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, Protocol, assert_never

from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import (
    CorruptRecord,
    IdempotencyError,
    InvalidKey,
    KeyProviderUnavailable,
    NotCommitted,
    StoreDataLoss,
    StoreUnavailable,
)
from flask_idempotency.engine.escape import printable_lines
from flask_idempotency.engine.model import Erased, InFlight, Mismatched, OverQuota, Unknown
from flask_idempotency.engine.quota import LIMITS
from flask_idempotency.settings.profiles import Profile

INTERVAL_SECONDS: Final = 10
"""An outage lasts minutes: a line every ten seconds shows when it began and ended, and does not flood the log."""

# Servers begin an error with its code, as in `OOM command not allowed`. Anything else may be a name or an argument.
_CODE = re.compile(r"[A-Z]{2,20}(?= |$)")

_log = logging.getLogger("flask_idempotency")


class OutageLog:
    """Logs refusals of one application while the store does not answer, at most one line in ten seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._next = float("-inf")
        self._suppressed = 0

    def refused(self, operation: str, error: StoreUnavailable) -> None:
        """Log this refusal, or count it. Names no key and quotes no server text."""
        with self._lock:
            now = self._monotonic()
            if now < self._next:
                self._suppressed += 1
                return
            self._next = now + INTERVAL_SECONDS
            more, self._suppressed = self._suppressed, 0
        _log.warning(
            "%s was refused with 503: the %s is not available (%s)%s",
            operation,
            "key provider" if isinstance(error, KeyProviderUnavailable) else "store",
            # Its text is ours alone, and says what to do.
            error if isinstance(error, StoreDataLoss) else _named(error.__cause__ or error),
            f"; {more} more since the last such line" if more else "",
        )


def _named(error: BaseException) -> str:
    name = type(error).__name__
    # Compared by name, because this module does not know the store, or whether its client is installed.
    from_server = any(parent.__name__ == "ResponseError" for parent in type(error).__mro__)
    code = _CODE.match(str(error)) if from_server else None
    return name if code is None else f"{name}: {code[0]}"


# The table of all problems. docs/generate.py makes the pages under docs/problems from it.


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One row of the table: what all problems with this code share."""

    code: str
    status: int | None
    """None: the status of the first response."""
    title: str
    detail: str
    guide: str
    """For the problem's page: what happened, is it safe to retry, what to do."""
    retry: bool
    """Whether the same request under the same key, sent again by a machine, can end better."""
    stripe_type: str = "invalid_request_error"
    stripe_code: str | None = None
    playbook_code: str | None = None


_ROWS = (
    ProblemType(
        code="missing-key",
        status=400,
        title="Idempotency key missing",
        detail="This operation needs an idempotency key and the request carries none. Nothing was done.",
        guide=(
            "The operation only accepts requests that carry an idempotency key, and this one had none. Nothing was "
            "done. Draw one fresh key (a random UUID is good) for each thing that you want to happen once, store it "
            "before you send, and send the same key with every attempt."
        ),
        retry=False,
    ),
    ProblemType(
        code="invalid-key",
        status=400,
        title="Idempotency key not valid",
        detail="The request's idempotency key cannot be used. Nothing was done.",
        guide=(
            "The key was empty, too long, sent twice, or not in the format that this operation asks for; `detail` says "
            "which. Nothing was done. Retrying the same request cannot help: send a valid key. One header line, "
            "visible ASCII characters, at most the length that the API documents."
        ),
        retry=False,
    ),
    ProblemType(
        code="truncated-body",
        status=400,
        title="Request body incomplete",
        detail="The body ended before the announced Content-Length. Nothing was done; send the request again.",
        guide=(
            "Fewer bytes arrived than the Content-Length announced, so the connection was cut on the way. Nothing was "
            "done and the key was not used. Send the whole request again with the same key. If it happens every time, "
            "the client or a proxy computes Content-Length wrongly."
        ),
        retry=True,
    ),
    ProblemType(
        code="request-too-large",
        status=413,
        title="Request body too large",
        detail="The body is larger than this operation accepts with an idempotency key. Nothing was done.",
        guide=(
            "The request's body is longer than the operation allows for requests that carry an idempotency key. It was not "
            "read to its end, nothing was done and the key was not used. Retrying the same request cannot help: send less, "
            "or in several requests, each with a key of its own."
        ),
        retry=False,
    ),
    ProblemType(
        code="in-flight",
        status=409,
        title="The first request is still running",
        detail="A request with this idempotency key is being worked on. Ask again with the same key to get its answer.",
        guide=(
            "An earlier attempt with this key has not finished. This attempt did nothing. Wait for as long as "
            "Retry-After says and send the same request with the same key: it is answered with the first attempt's "
            "answer once that exists. Never switch to a new key while you wait: that would start a second run."
        ),
        retry=True,
        stripe_code="idempotency_key_in_use",
        playbook_code="request_in_progress",
    ),
    ProblemType(
        code="key-reused",
        status=422,
        title="Idempotency key used for another request",
        detail=(
            "This idempotency key belongs to a request with another method, path, query or payload. Nothing was done."
        ),
        guide=(
            "The key was first used with a different method, path, query or payload. This request was not carried out, "
            "and the first one is untouched. Retrying cannot help. If you meant to repeat the first request, send "
            "exactly what was sent then; if this is a new one, give it a key of its own."
        ),
        retry=False,
        stripe_type="idempotency_error",
        playbook_code="idempotency_payload_mismatch",
    ),
    ProblemType(
        code="outcome-unknown",
        status=409,
        title="It is unknown whether the first request was carried out",
        detail=(
            "The first request with this idempotency key failed or was interrupted, and how far it came is not known. The "
            "request will not run again until that is settled."
        ),
        guide=(
            "The first attempt failed or was interrupted, and it may or may not have had its effect. It is not run again, "
            "because that could do it twice. Automatic retries will get this same answer until the service has found "
            "out. Do not send the request under a new key; look up whether it took effect, or ask the service's "
            "operator, who can look at what happened. Once that is settled, the same key gets the real answer, or runs if "
            "nothing was done."
        ),
        retry=False,
        stripe_type="api_error",
    ),
    ProblemType(
        code="store-unavailable",
        status=503,
        title="Idempotency records cannot be reached",
        detail=(
            "It cannot be told whether this request has been carried out. Send it again with the same key: it is not "
            "carried out twice."
        ),
        guide=(
            "The service could not reach the place where it remembers idempotency keys, or the keys that answers are "
            "encrypted with. Most such requests were not begun; where records and changes are kept together, one may have "
            "been, and then either both were kept or neither. It is safe to retry with the same key, and only with the "
            "same key, after Retry-After."
        ),
        retry=True,
        stripe_type="api_error",
    ),
    ProblemType(
        code="memory-lost",
        status=503,
        title="Idempotency records may have been forgotten",
        detail=(
            "The service cannot tell whether this request was carried out before, because it has lost some of its records. "
            "Nothing was done now. Send it again later with the same key. The operator of the service lets it run with "
            "`flask idempotency redis ack`, at the risk that requests whose records were lost run a second time."
        ),
        guide=(
            "The service does not know this key, and has lost keys that it should know: its store was restarted, failed over "
            "or emptied. So the request may have been carried out by an earlier attempt. It was not run now. If you know that "
            "this was the first attempt, it has not been carried out. Send it again with the same key after Retry-After; it "
            "runs, or gets the first attempt's answer, once the operator has looked. Keys that carry the time at which they "
            "were made (UUID version 7, ULID) run at once if that is later than the loss. Do not send a request under a new "
            "key that you may have sent before: look up first whether it took effect."
        ),
        retry=True,
        stripe_type="api_error",
    ),
    ProblemType(
        code="not-committed",
        status=500,
        title="The request's changes were rolled back",
        detail="Nothing of this request was kept: its changes were rolled back, and its idempotency key is free again.",
        guide=(
            "The request was carried out up to the point where its changes were to be made permanent. Then the database "
            "refused that, or the service's rules did not let the response stand. Nothing of it remains, and the key is free: "
            "sending the request again with the same key is safe and runs it again. If it ends the same way again, the request "
            "contradicts what is stored, or those rules are wrong; the service's log says which."
        ),
        retry=True,
        stripe_type="api_error",
    ),
    ProblemType(
        code="commit-unknown",
        status=500,
        title="It is unknown whether the request's changes were kept",
        detail="The database did not say whether it has kept this request's changes, and the request carries no key.",
        guide=(
            "The request was carried out, and when its changes were to be made permanent the database did not answer any "
            "more. They may be there or not. Without an idempotency key a repetition cannot be recognised, and may do "
            "them again: look up first whether they are there. Requests that carry a key never get this answer."
        ),
        retry=False,
        stripe_type="api_error",
    ),
    ProblemType(
        code="transaction-conflict",
        status=503,
        title="Another request changed the same data at the same moment",
        detail="Nothing of this request was kept: its changes were rolled back. Send it again with the same key.",
        guide=(
            "The database ended this request's transaction to let another one finish: a serialization failure, a "
            "deadlock, or a lock that was not to be had in time. Nothing of it remains and its key is free. It is "
            "safe to retry with the same key after Retry-After, and will usually succeed."
        ),
        retry=True,
        stripe_type="api_error",
    ),
    ProblemType(
        code="response-not-kept",
        status=None,
        title="Done before; the answer's body was not kept",
        detail=(
            "This request was carried out when it was first sent, with this status. Its answer was too large or could "
            "not be stored, so the body cannot be given again."
        ),
        guide=(
            "The request was carried out once, and this attempt did nothing. The status and some of the headers are those "
            "of the first answer; its body was too large to keep, or was cut off on the way. Retrying gets this same "
            "answer. Read the resource's present state with a GET, at Location if there is one."
        ),
        retry=False,
        stripe_type="api_error",
    ),
    ProblemType(
        code="response-erased",
        status=410,
        title="Done before; the answer was erased",
        detail=(
            "This request was carried out when it was first sent, and its answer has been erased since. It is not run "
            "again."
        ),
        guide=(
            "The request was carried out once, and this attempt did nothing. Its response was destroyed "
            "together with all other responses of its tenant, and cannot be read any more. Retrying gets this same "
            "problem for as long as the key is remembered. Read the resource's present state with a GET."
        ),
        retry=False,
    ),
    ProblemType(
        code="quota-exceeded",
        status=429,
        title="No more new idempotency keys for now",
        detail="The tenant has as much as it may, so no new idempotency key is accepted for now. Nothing was done.",
        guide=(
            "The tenant of this request has reached a limit on idempotency keys: on live records, on stored bytes, on "
            "requests in flight or on new keys in a while; `detail` and the `RateLimit` field say which. Nothing was done "
            "and the key was not used. Keys that were used before still work: retries are always answered. Send the same "
            "request with the same key again after Retry-After."
        ),
        retry=True,
        stripe_type="rate_limit_error",
        stripe_code="rate_limit",
    ),
    ProblemType(
        code="replay-forbidden",
        status=403,
        title="The stored answer may not be shown",
        detail=(
            "This request was handled before, and its answer may no longer be given to this caller. Nothing was done."
        ),
        guide=(
            "An answer is stored for this key, but the caller has since lost the permission to see it. The request was "
            "not run again and the answer stays stored. Retrying helps only after the permission has been restored."
        ),
        retry=False,
    ),
    ProblemType(
        code="principal-required",
        status=403,
        title="The caller is unknown",
        detail="Idempotency keys are accepted from identified callers only. Nothing was done.",
        guide=(
            "Keys belong to callers, and the service cannot tell who is calling. Nothing was done and the key was not used. "
            "With status 403: authenticate, then send the request again; the same key may be used. With status 500 the "
            "service lacks a setting, and retrying cannot help: its operator finds in the log what to add (see `identity.md`)."
        ),
        retry=False,
    ),
    ProblemType(
        code="misconfigured",
        status=500,
        title="The operation is not set up correctly",
        detail="The idempotency settings of this operation cannot hold, so it does not run. Nothing was done.",
        guide=(
            "The service cannot protect this operation from running twice, because its settings contradict each other or a "
            "part of it was never set up. So it does not run at all; other operations do. Nothing was done and the key was "
            "not used. Retrying cannot help until the service's operator has changed the settings: its log says what is wrong "
            "and what to do."
        ),
        retry=False,
        stripe_type="api_error",
    ),
    ProblemType(
        code="record-corrupt",
        status=500,
        title="The stored answer cannot be read",
        detail=(
            "This request was handled before, and the record of its answer is damaged. It was not run again; the "
            "service's operator has to look at it."
        ),
        guide=(
            "The record of this key exists but cannot be read: it was damaged or changed, or the key that sealed it is "
            "gone. The request was not run again, because it has been carried out before. Automatic retries get this "
            "same answer. Do not send the request under a new key; look up whether it took effect, or ask the "
            "operator."
        ),
        retry=False,
        stripe_type="api_error",
    ),
)

PROBLEMS: Mapping[str, ProblemType] = MappingProxyType({row.code: row for row in _ROWS})
"""The rows by code."""


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


@dataclass(frozen=True, slots=True)
class Problem:
    """One occurrence. `code` is a key of `PROBLEMS`; a code whose row has no status needs one here."""

    code: str
    detail: str = ""
    """Added to the row's detail: the fault of the key, or when it was first seen. Never a value that the client sent."""
    status: int | None = None
    """A problem renderer always finds it set."""
    retry_after: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Further header fields of this occurrence."""

    def __post_init__(self) -> None:
        if self.status is None and PROBLEMS[self.code].status is None:
            raise ValueError(f"{self.code} has no status of its own")

    @property
    def title(self) -> str:
        """A short title, the same for each occurrence."""
        return PROBLEMS[self.code].title

    @property
    def text(self) -> str:
        """Explain to a reader what happened, with the detail of this occurrence. It may have several lines in debug mode."""
        row = PROBLEMS[self.code]
        return printable_lines(f"{row.detail} {self.detail}") if self.detail else row.detail

    def status_in(self, profile: Profile) -> int:
        """Return the status in this profile's dialect."""
        return self.status or profile.statuses.get(self.code) or PROBLEMS[self.code].status or 500

    @property
    def http_headers(self) -> list[tuple[str, str]]:
        """Return the header fields of this occurrence, for each dialect and each renderer."""
        headers = [("Cache-Control", "no-store")]
        if self.retry_after is not None:
            headers.append(("Retry-After", str(_whole_seconds(self.retry_after))))
        return [*headers, *self.headers]


class Renderer(Protocol):
    """Makes the response for a problem. Your application may set its own renderer."""

    def __call__(
        self, problem: Problem, *, profile: Profile, docs_url: str, response_class: type[Response]
    ) -> Response: ...


def refusal(outcome: InFlight | Mismatched | Unknown | OverQuota | Erased) -> Problem:
    """Return the problem that tells a client why its request does not run."""
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
            return Problem("response-erased")
        case unexpected:
            assert_never(unexpected)


def failure(error: IdempotencyError) -> Problem:
    """Return the problem for an error that the client gets. Raises any other error again."""
    match error:
        case InvalidKey():
            return Problem("invalid-key", str(error))
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


def render(problem: Problem, *, profile: Profile, docs_url: str, response_class: type[Response]) -> Response:
    """Render the problem in the profile's dialect, with its header fields. Caches must not store it."""
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
            # Stripe's clients retry every 409 and 5xx unless this field forbids it, and ignore Retry-After.
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
    # As at Stripe, only the type shows a reused key.
    if row.stripe_type != "idempotency_error":
        error["code"] = row.stripe_code or _underscored(row.code)
    return error


def _underscored(code: str) -> str:
    return code.replace("-", "_")


def _over_quota(outcome: OverQuota) -> Problem:
    """Return the problem of a used-up quota, with the fields of draft-ietf-httpapi-ratelimit-headers for its limit."""
    seconds = outcome.retry_after or QUOTA_RETRY_SECONDS
    if outcome.limit == "in-flight":
        # As for one key: most views end long before their lease.
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
    # With 0 a client would retry without a pause for as long as the view runs.
    return max(1, math.ceil(seconds))
