"""Every keyword of a policy."""

from __future__ import annotations

import re

from marshmallow import RAISE, Schema, ValidationError, fields, validate

from flask_idempotency.profiles import PROFILES
from flask_idempotency.schema.fields import (
    CallableField,
    HeaderNames,
    HeaderPairs,
    KeptHeaders,
    Methods,
    Pointers,
    Seconds,
    Statuses,
    count,
    positive,
)

MIN_LEASE_SECONDS = 0.1
"""Renewed every third of it: shorter ones would be lost to a busy processor."""
MAX_KEEP_SECONDS = 90 * 24 * 3600.0


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValidationError(f"is not a regular expression: {error}.") from error


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
        validate=[positive(), validate.Range(max=MAX_KEEP_SECONDS, error="must not be longer than 90 days.")],
        metadata={"doc": "How long an answer is replayable. After it, the key is new."},
    )
    lease = Seconds(
        validate=validate.Range(min=MIN_LEASE_SECONDS, error="must be at least a tenth of a second."),
        metadata={"doc": "How long a worker may be silent before it counts as vanished."},
    )
    max_runtime = Seconds(validate=positive(), metadata={"doc": "How long the lease of a running view is renewed."})
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
        allow_none=True,
        validate=validate.OneOf(["release", "keep", "quarantine"], error="must be one of: {choices}."),
        metadata={
            "doc": "What becomes of the key after an unhandled exception or any 5xx. By `effects`: 501 and 503 release; the "
            "rest quarantines under `plain`, and releases under the others. Past the point of no return nothing releases."
        },
    )
    on_store_down = fields.String(
        validate=validate.OneOf(["refuse", "allow"], error="must be one of: {choices}."),
        metadata={
            "doc": "Without a store: refuse keyed requests (503), or run them unprotected, visibly. Without the "
            "keys of encrypted answers they are refused in any case."
        },
    )
    keep_statuses = Statuses(metadata={"doc": 'Statuses stored in any case: numbers and classes such as "5xx".'})
    release_statuses = Statuses(metadata={"doc": "Statuses after which the key may run again."})
    decide = CallableField(
        allow_none=True, metadata={"doc": '`(response, exception) -> "keep" | "release" | "quarantine" | None`.'}
    )
    max_body = count(
        metadata={"doc": "Largest answer body that is kept, in bytes; a larger one leaves a tombstone."},
    )
    max_request_body = count(
        allow_none=True,
        metadata={
            "doc": "Largest body of a request with a key, in bytes; a larger one is refused before anything is claimed (413 "
            "`request-too-large`)."
        },
    )
    keep_headers = KeptHeaders(
        metadata={"doc": "Response headers kept and replayed besides the allow-list. A replay goes by the list of now."}
    )
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
