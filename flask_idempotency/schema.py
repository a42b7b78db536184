"""Every word that configuration may contain: its type, its limits, and the text that the reference shows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from marshmallow import RAISE, Schema, ValidationError, fields, validate

from flask_idempotency.engine.fingerprint import check_pointer
from flask_idempotency.profiles import PROFILES, faults_of_kept

MEMORY = "memory://"
MIN_LEASE_SECONDS = 0.1
"""Renewed every third of it: shorter ones would be lost to a busy processor."""
MAX_KEEP_SECONDS = 90 * 24 * 3600.0
DOCS_URL = "https://flask-idempotency.readthedocs.io/problems/"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_STATUS_CLASS = re.compile(r"([1-5])xx", re.IGNORECASE)


class Seconds(fields.Field[float]):
    """A duration in seconds, written as a number or a `timedelta`."""

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> float:
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValidationError("must be a number of seconds or a timedelta.")
        return float(value)


class HeaderNames(fields.Field[tuple[str, ...]]):
    """One header name, or several: the first is the one in use, the rest are aliases."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> tuple[str, ...]:
        names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(name, str) and _TOKEN.fullmatch(name) for name in names):
            raise ValidationError("must be a header name such as Idempotency-Key, or a list of them.")
        return names


class KeptHeaders(fields.Field[frozenset[str]]):
    """Names of response headers to keep, in lower case. What belongs to one caller is refused, not ignored."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> frozenset[str]:
        names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
        if not all(isinstance(name, str) for name in names):
            raise ValidationError("must be a header name, or a list of them.")
        if faults := faults_of_kept(names):
            raise ValidationError(faults)
        return frozenset(name.lower() for name in names)


class HeaderPairs(fields.Field[tuple[tuple[str, str], ...]]):
    """The headers that mark a replay: one name (its value is then `true`), or a mapping of names to values."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> tuple[tuple[str, str], ...]:
        pairs = {value: "true"} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
        if pairs is None or not all(
            isinstance(name, str) and _TOKEN.fullmatch(name) and isinstance(text, str) and _is_header_text(text)
            for name, text in pairs.items()
        ):
            raise ValidationError("must be a header name, or a mapping of header names to values.")
        return tuple(pairs.items())


class Statuses(fields.Field[frozenset[int]]):
    """HTTP statuses: numbers, and classes such as "5xx"."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> frozenset[int]:
        if isinstance(value, str | int) or not isinstance(value, Iterable):
            value = (value,)
        return frozenset(status for item in value for status in _statuses(item))


class Methods(fields.Field[frozenset[str]]):
    """HTTP methods in scope. GET, HEAD and OPTIONS are safe to repeat by definition (RFC 9110) and never in scope."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> frozenset[str]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValidationError('must be a list of methods such as ["POST", "PATCH"].')
        methods = frozenset(str(method).upper() for method in value)
        if safe := methods & {"GET", "HEAD", "OPTIONS", "TRACE"}:
            raise ValidationError(
                f"must not contain {', '.join(sorted(safe))}: such requests are safe to repeat anyway."
            )
        return methods


class Pointers(fields.Field[tuple[str, ...]]):
    """JSON Pointers (RFC 6901) of members that may change from one retry to the next."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> tuple[str, ...]:
        pointers = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(pointer, str) for pointer in pointers):
            raise ValidationError('must be a JSON Pointer such as "/sent_at", or a list of them.')
        for pointer in pointers:
            try:
                check_pointer(pointer)
            except ValueError as error:
                raise ValidationError(str(error)) from error
        return pointers


class CallableField(fields.Field[Callable[..., Any]]):
    """A function."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> Callable[..., Any]:
        if not callable(value):
            raise ValidationError("must be a function.")
        return value  # type: ignore[no-any-return]


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValidationError(f"is not a regular expression: {error}.") from error


def _positive() -> validate.Range:
    return validate.Range(min=0, min_inclusive=False, error="must be more than 0.")


class PolicySchema(Schema):
    """Every keyword that may differ from one endpoint to the next, with the text that the reference shows."""

    class Meta:
        unknown = RAISE

    required = fields.Boolean(metadata={"doc": "Refuse a request without a key (400 `missing-key`)."})
    profile = fields.String(
        validate=validate.OneOf(PROFILES, error="must be one of: {choices}."),
        metadata={
            "doc": "The dialect that clients speak; a bundle of the values below. Each can still be set by itself."
        },
    )
    header = HeaderNames(
        validate=validate.Length(min=1, error="must name at least one header."),
        metadata={"doc": "The request header that carries the key; a list adds aliases."},
    )
    replayed_header = HeaderPairs(
        metadata={"doc": "What marks a replay: a header name, or a mapping of names to values."}
    )
    methods = Methods(metadata={"doc": "The methods in scope."})
    max_key_length = fields.Integer(
        strict=True,
        validate=validate.Range(1, 4096, error="must be from 1 to 4096."),
        metadata={"doc": "Longest key, in characters."},
    )
    key_format = fields.String(
        validate=_compiles,
        metadata={"doc": "`any`, `uuid`, or a regular expression that the whole key must match."},
    )
    keep = Seconds(
        validate=[_positive(), validate.Range(max=MAX_KEEP_SECONDS, error="must not be longer than 90 days.")],
        metadata={"doc": "How long an answer is replayable. After it, the key is new."},
    )
    lease = Seconds(
        validate=validate.Range(min=MIN_LEASE_SECONDS, error="must be at least a tenth of a second."),
        metadata={"doc": "How long a worker may be silent before it counts as vanished."},
    )
    max_runtime = Seconds(validate=_positive(), metadata={"doc": "How long the lease of a running view is renewed."})
    in_flight = fields.String(
        validate=validate.OneOf(["reject", "wait"], error="must be one of: {choices}."),
        metadata={"doc": "What a duplicate of a running request gets: 409 at once, or a seat to wait for the answer."},
    )
    wait = Seconds(
        validate=validate.Range(min=0, error="must not be negative."),
        metadata={"doc": "How long such a duplicate waits at most."},
    )
    effects = fields.String(
        validate=validate.OneOf(
            ["plain", "marked", "deduplicated", "transactional"], error="must be one of: {choices}."
        ),
        metadata={"doc": "What the view does to the world; decides what a vanished worker leaves behind."},
    )
    on_abandoned = fields.String(
        allow_none=True,
        validate=validate.OneOf(["takeover", "quarantine"], error="must be one of: {choices}."),
        metadata={"doc": "Overrides what `effects` says of a vanished worker. Take-over may run a plain effect twice."},
    )
    on_error = fields.String(
        validate=validate.OneOf(["release", "keep", "quarantine"], error="must be one of: {choices}."),
        metadata={"doc": "What becomes of the key after an unhandled exception or a 5xx."},
    )
    on_store_down = fields.String(
        validate=validate.OneOf(["refuse", "allow"], error="must be one of: {choices}."),
        metadata={"doc": "Without a store: refuse keyed requests (503), or run them unprotected, visibly."},
    )
    keep_statuses = Statuses(metadata={"doc": 'Statuses stored in any case: numbers and classes such as "5xx".'})
    release_statuses = Statuses(metadata={"doc": "Statuses after which the key may run again."})
    decide = CallableField(
        allow_none=True, metadata={"doc": '`(response, exception) -> "keep" | "release" | "quarantine" | None`.'}
    )
    max_body = fields.Integer(
        strict=True,
        validate=validate.Range(min=0, error="must not be negative."),
        metadata={"doc": "Largest answer body that is kept, in bytes; a larger one leaves a tombstone."},
    )
    keep_headers = KeptHeaders(metadata={"doc": "Response headers kept besides the allow-list."})
    fingerprint = fields.String(
        validate=validate.OneOf(["canonical", "raw"], error="must be one of: {choices}."),
        metadata={"doc": "Compare JSON and forms by meaning, or bytes only."},
    )
    ignore_fields = Pointers(metadata={"doc": "JSON Pointers of members that may change between retries."})
    fingerprint_headers = HeaderNames(metadata={"doc": "Request headers that are part of the request's identity."})
    form_field = fields.String(
        allow_none=True,
        metadata={"doc": "Hidden form field that may carry the key (`idempotency_field()` renders one)."},
    )
    scope = fields.String(
        validate=validate.OneOf(["key", "operation"], error="must be one of: {choices}."),
        metadata={"doc": "`operation` makes each endpoint a key space of its own."},
    )


class DeploymentSchema(PolicySchema):
    """What changes with the deployment, not with the endpoint: configuration only."""

    store = fields.Raw(
        metadata={"doc": 'A URL, a `Store` object, or `"package.module:factory"`.', "default": "memory://"}
    )
    redis_url = fields.String(
        metadata={
            "doc": "With a SQL store: a Redis or Valkey that answers replays in its place. It may lose everything at any "
            "time; SQL alone grants.",
            "default": "none",
        }
    )
    claim_strategy = fields.String(
        validate=validate.OneOf(["insert", "row_lock", "advisory"], error="must be one of: {choices}."),
        metadata={
            "doc": "How a SQL store claims a key. `row_lock` and `advisory` are for PostgreSQL.",
            "default": "insert",
        },
    )
    namespace = fields.String(
        validate=validate.Length(min=1, error="must not be empty."),
        metadata={
            "doc": "Keeps applications apart in one store. Changing it makes every key new.",
            "default": "the application's name",
        },
    )
    secret = fields.Raw(
        metadata={
            "doc": "Derives every storage key: a string, or a list of them, oldest last, during a rotation.",
            "default": "derived from `SECRET_KEY`, with a warning",
        }
    )
    docs_url = fields.String(metadata={"doc": "Where the `type` of a problem points to.", "default": DOCS_URL})
    allow_anonymous = fields.Boolean(
        metadata={"doc": "Whether requests that nobody signed in for may use keys.", "default": True}
    )
    max_waiters = fields.Integer(
        strict=True,
        validate=validate.Range(min=0, error="must not be negative."),
        metadata={
            "doc": "Most duplicates that wait at once in one process. Aim at a quarter of its threads.",
            "default": 2,
        },
    )
    enabled = fields.Boolean(
        metadata={"doc": "False leaves the application exactly as if the extension were not there.", "default": True}
    )


NOT_YET: Mapping[str, str] = {
    "encryption": "encryption at rest",
    "key_ring": "encryption at rest",
    "quota_records": "quotas",
    "quota_bytes": "quotas",
    "quota_in_flight": "quotas",
    "quota_new_keys": "quotas",
}
"""Settings of the contract that this release does not carry out. Silence would pass for a promise, so each is refused."""


def _is_header_text(text: str) -> bool:
    return all(" " <= char <= "~" for char in text)


def _statuses(item: Any) -> Iterable[int]:
    if isinstance(item, str) and (match := _STATUS_CLASS.fullmatch(item)):
        return range(int(match[1]) * 100, int(match[1]) * 100 + 100)
    if isinstance(item, int) and not isinstance(item, bool) and 100 <= item <= 599:
        return (item,)
    raise ValidationError('must contain statuses from 100 to 599, or classes such as "5xx".')
