"""Read what a response says about its key: return it, wait, send again, or stop, and why.

The codes are those of the problems that `flask_idempotency` sends, in each of its dialects, and Stripe's own. This module
reads status, header fields and body; it knows no HTTP library.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, Final, TypeAlias
from urllib.parse import urljoin, urlsplit

__all__ = ["Fields", "Reading", "Verdict", "read"]


class Verdict(Enum):
    """What a response asks of the caller."""

    RETURN = "return"
    """An ordinary response."""
    IN_FLIGHT = "in flight"
    """An earlier attempt runs. Ask again."""
    RETRY = "retry"
    """Send again. This attempt may have been carried out."""
    RETRY_UNDONE = "retry, undone"
    """Send again. This attempt was not carried out."""
    PAUSED = "paused"
    """Send again. Finished steps are remembered, and the service goes on behind them only under the same key."""
    REFUSED = "refused"
    KEY_REUSED = "key reused"
    OUTCOME_UNKNOWN = "outcome unknown"
    NOT_KEPT = "not kept"
    ERASED = "erased"
    VOIDED = "voided"
    """No request ran under the key, and none will."""
    EXPIRED = "expired"


BY_CODE: Final[Mapping[str, Verdict]] = {
    "missing-key": Verdict.REFUSED,
    "invalid-key": Verdict.REFUSED,
    "request-too-large": Verdict.REFUSED,
    "principal-required": Verdict.REFUSED,
    "misconfigured": Verdict.REFUSED,
    "truncated-body": Verdict.RETRY_UNDONE,
    "quota-exceeded": Verdict.RETRY_UNDONE,
    "in-flight": Verdict.IN_FLIGHT,
    "key-reused": Verdict.KEY_REUSED,
    "outcome-unknown": Verdict.OUTCOME_UNKNOWN,
    "record-corrupt": Verdict.OUTCOME_UNKNOWN,
    "commit-unknown": Verdict.OUTCOME_UNKNOWN,
    "store-unavailable": Verdict.RETRY,
    "memory-lost": Verdict.RETRY,
    "not-committed": Verdict.RETRY,
    "transaction-conflict": Verdict.RETRY,
    "request-paused": Verdict.RETRY,
    "response-not-kept": Verdict.NOT_KEPT,
    "replay-forbidden": Verdict.NOT_KEPT,
    "response-erased": Verdict.ERASED,
    "key-voided": Verdict.VOIDED,
    "key-expired": Verdict.EXPIRED,
    # Of the status view. No request with a key gets them.
    "unknown-operation": Verdict.RETURN,
    "void-not-offered": Verdict.RETURN,
}
"""One row for each problem code of the service."""

STRIPE: Final[Mapping[str, str]] = {"idempotency_key_in_use": "in-flight", "rate_limit": "quota-exceeded"}
PLAYBOOK: Final[Mapping[str, str]] = {
    "request_in_progress": "in-flight",
    "idempotency_payload_mismatch": "key-reused",
}
"""Codes that a dialect writes otherwise than with underscores for hyphens. They count without a documentation link."""

REPLAY_MARKS: Final = ("Idempotency-Replayed", "Idempotent-Replayed", "X-Idempotency-Replay", "X-Idempotency-Replayed")

# The service did not carry out a request that it answered so, and keeps no such response under a key. A mark of a replay says
# that it did keep one: some profiles keep every status.
UNDONE: Final = frozenset({307, 308, 401, 403, 407, 408, 419, 421, 425, 429})
# These may lead to the result, or to a page for signing in. A mark of a replay says which.
UNCLEAR: Final = frozenset({301, 302})
FINAL_SERVER_ERRORS: Final = frozenset({501, 505})

Fields: TypeAlias = Mapping[str, str]
"""Header fields. The mapping ignores the case of their names, as those of httpx and requests do."""

_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_LARGEST_PROBLEM_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Reading:
    """What one response says."""

    verdict: Verdict
    status: int
    code: str | None
    retry_after: float | None
    """Seconds, at least 0."""
    replayed: bool
    """Whether the service marked it as the stored response of an earlier attempt."""
    status_url: str | None

    @property
    def kept(self) -> bool:
        """Whether this response ends the request, so that the same key gets it again."""
        if self.replayed and 400 <= self.status < 500:
            return True
        return self.status not in UNDONE and (self.status not in UNCLEAR or self.replayed) and self.status < 500


def read(status: int, fields: Fields, body: bytes, *, url: str = "") -> Reading:
    """Return what this response says about its key. `body` is decoded; `url` is where the request went."""
    code = problem_code(status, fields, body)
    retry_after = _retry_after(fields)
    replayed = any((fields.get(name) or "").lower() == "true" for name in REPLAY_MARKS)
    link = _link(fields, "status")
    return Reading(
        verdict=_verdict(status, fields, code, replayed=replayed),
        status=status,
        code=code,
        retry_after=retry_after,
        replayed=replayed,
        status_url=None if link is None else _joined(url, link),
    )


def _link(fields: Fields, relation: str) -> str | None:
    """Return where the link of this relation leads, if there is one."""
    found = re.search(rf'<([^<>]*)>\s*;[^<>]*?\brel\s*=\s*"?{relation}\b', fields.get("Link") or "")
    return None if found is None else found[1]


def _joined(url: str, target: str) -> str | None:
    """Return the link's address, without a name and password of the request's."""
    try:
        base = urlsplit(url)
        return urljoin(base._replace(netloc=base.netloc.rpartition("@")[2]).geturl(), target)
    except ValueError:
        return None


def _verdict(status: int, fields: Fields, code: str | None, *, replayed: bool) -> Verdict:
    if fields.get("Idempotency-Status") == "paused" and code != "request-paused":
        return Verdict.PAUSED
    if code is not None and (not replayed or BY_CODE[code] in (Verdict.NOT_KEPT, Verdict.ERASED, Verdict.EXPIRED)):
        return BY_CODE[code]
    if replayed:
        return Verdict.RETURN
    should_retry = (fields.get("Stripe-Should-Retry") or "").lower()
    if should_retry == "false":
        return Verdict.RETURN
    if status in (425, 429):
        return Verdict.RETRY_UNDONE
    # Also if it cannot be read.
    if status == 409 and (fields.get("Retry-After") is not None or should_retry == "true"):
        return Verdict.IN_FLIGHT
    if status >= 500 and status not in FINAL_SERVER_ERRORS:
        return Verdict.RETRY
    # Stripe's clients take the field's word for any status.
    return Verdict.RETRY if should_retry == "true" and status >= 400 else Verdict.RETURN


def problem_code(status: int, fields: Fields, body: bytes) -> str | None:
    """Return the code of the problem in this body, in our spelling, or None if it is none of ours.

    A code counts only if the address of its page ends in it. The application's own errors may have the same words.
    """
    content_type = (fields.get("Content-Type") or "").partition(";")[0].strip().lower()
    if content_type == "text/html":
        # The page that a form gets, if its sender prefers HTML. It has the header fields of the document.
        return _ours(status, _named_by(_link(fields, "describedby")))
    if not (content_type == "application/json" or content_type.endswith("+json")) or len(body) > _LARGEST_PROBLEM_BYTES:
        return None
    if status < 400 and b"not-kept" not in body and b"not_kept" not in body:
        # Of our problems, only `response-not-kept` has the status of a success. This spares parsing every other one.
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    return _ours(status, _code_in(document, fields))


def _ours(status: int, code: str | None) -> str | None:
    return code if code in BY_CODE and (status >= 400 or code == "response-not-kept") else None


def _code_in(document: dict[str, Any], fields: Fields) -> str | None:
    error = document.get("error")
    if isinstance(error, dict):
        written = error.get("code")
        if error.get("type") == "idempotency_error":
            # A 409 of Stripe has this type too while the first request runs.
            return STRIPE.get(written, "key-reused") if isinstance(written, str) else "key-reused"
        return _spelled(written, error.get("doc_url"), STRIPE)
    if "error_code" in document:
        return _spelled(document["error_code"], _link(fields, "describedby"), PLAYBOOK)
    code = _named_by(document.get("type"))
    return code if document.get("code") == code else None


def _spelled(written: Any, page: Any, dialect: Mapping[str, str]) -> str | None:
    if not isinstance(written, str):
        return None
    if written in dialect:
        return dialect[written]
    code = written.replace("_", "-")
    return code if _named_by(page) == code else None


def _named_by(page: Any) -> str | None:
    return re.split(r"[/:#]", page)[-1] if isinstance(page, str) else None


def _retry_after(fields: Fields) -> float | None:
    """Return the seconds of `Retry-After`. A date counts from the response's own `Date`: clocks differ.

    It is infinity for a number that no float can hold.
    """
    written = (fields.get("Retry-After") or "").strip()
    if _SECONDS.fullmatch(written):
        return float(written)
    then = _moment(written)
    if then is None:
        return None
    now = _moment((fields.get("Date") or "").strip())
    return max(0.0, then - (time.time() if now is None else now))


def _moment(written: str) -> float | None:
    try:
        moment = parsedate_to_datetime(written)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # A date with the zone "-0000" has no time zone, and is in UTC (RFC 5322).
    return (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).timestamp()
