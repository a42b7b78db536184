"""What a deployment sets, and no endpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from marshmallow import RAISE, Schema, ValidationError, fields, validate

from flask_idempotency.engine.fingerprint import check_pointer
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.engine.quota import MAX_LIMIT, NewKeys
from flask_idempotency.settings.profiles import PROFILES, faults_of_kept

# The types of values in configuration: what each accepts, and what becomes of it.

if TYPE_CHECKING:
    Field = fields.Field
else:

    class Field(fields.Field):
        """A field of marshmallow 3 or 4. Only 4 knows what a field loads."""

        def __class_getitem__(cls, loaded: Any) -> Any:
            return cls


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_STATUS_CLASS = re.compile(r"([1-5])xx", re.IGNORECASE)

MAX_WINDOW_SECONDS = 366 * 24 * 3600.0
"""What every store can count to: Redis counts in floating point, and a database stops at 2**63."""

_TOO_MUCH = f"must not be more than 2**53 ({MAX_LIMIT}), which is what stores can count to; for no limit, leave it out."


def count(*, least: int = 0, most: int | None = None, **options: Any) -> fields.Integer:
    """A whole number, from this one up. True is none."""
    error = "must not be negative." if least == 0 else f"must be at least {least}."
    if most is not None:
        error = f"must be from {least} to {most}."
    return fields.Integer(strict=True, validate=validate.Range(min=least, max=most, error=error), **options)


def limit(**options: Any) -> fields.Integer:
    """What a tenant may have of something. None is no limit."""
    field = count(allow_none=True, **options)
    field.validators.append(validate.Range(max=MAX_LIMIT, error=_TOO_MUCH))
    return field


def interval(default: int, doc: str) -> Seconds:
    """Seconds between two times that something is done by itself. None: it is not."""
    return Seconds(allow_none=True, validate=positive(), metadata={"doc": doc, "default": default})


def patience(doc: str) -> Seconds:
    """Seconds after which somebody else gives up. 0 is never; None: nobody has said."""
    error = "must not be negative."
    return Seconds(
        allow_none=True, validate=validate.Range(min=0, error=error), metadata={"doc": doc, "default": "not known"}
    )


def positive() -> validate.Range:
    """For durations that must not be 0."""
    return validate.Range(min=0, min_inclusive=False, error="must be more than 0.")


class Seconds(Field[float]):
    """A duration in seconds, written as a number or a `timedelta`."""

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> float:
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValidationError("must be a number of seconds or a timedelta.")
        return float(value)


class HeaderNames(Field[tuple[str, ...]]):
    """One header name, or several: the first is the one in use, the rest are aliases."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> tuple[str, ...]:
        names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(name, str) and _TOKEN.fullmatch(name) for name in names):
            raise ValidationError("must be a header name such as Idempotency-Key, or a list of them.")
        return names


EXTENSIONS: Final = ("Flask-HTTPAuth", "Flask-JWT-Extended", "Flask-Login", "Flask-Principal")
"""Those that name callers, in the order in which they are asked."""


class FormerIdentityField(Field[dict[str, Any]]):
    """What was otherwise in the identity of keys: a mapping with `namespace`, `tenant` and `principal`, or some of them.

    Extensions that named callers become a tuple.
    """

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> dict[str, Any]:
        names = ("namespace", "tenant", "principal")
        if not isinstance(value, Mapping) or not value or not set(value) <= set(names):
            raise ValidationError(
                'must be a mapping of what was otherwise, such as {"tenant": False}, {"principal": False}, '
                '{"principal": "Flask-Login"} or {"namespace": "old"}.'
            )
        faults = []
        if "namespace" in value and not (isinstance(value["namespace"], str) and value["namespace"]):
            faults.append("namespace must be the former namespace, a non-empty string.")
        loaded = dict(value)
        named = value.get("principal")
        listed = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, list | tuple) else ()
        if listed and all(each in EXTENSIONS for each in listed):
            loaded["principal"] = tuple(each for each in EXTENSIONS if each in listed)
        elif "principal" in value and named is not False and not callable(named):
            faults.append(
                "principal must be False if callers had no name; the function that was the principal_loader; or the "
                f"extensions that named callers: one of {', '.join(EXTENSIONS)}, or a list of them."
            )
        if "tenant" in value and value["tenant"] is not False and not callable(value["tenant"]):
            faults.append(
                "tenant must be False if there was no tenant_loader, or else the function that was the loader."
            )
        if faults:
            raise ValidationError(faults)
        return loaded


class KeptHeaders(Field[frozenset[str]]):
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


class HeaderPairs(Field[tuple[tuple[str, str], ...]]):
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


class Statuses(Field[frozenset[int]]):
    """HTTP statuses: numbers, and classes such as "5xx"."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> frozenset[int]:
        if isinstance(value, str | int) or not isinstance(value, Iterable):
            value = (value,)
        return frozenset(status for item in value for status in _statuses(item))


class Methods(Field[frozenset[str]]):
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


class Pointers(Field[tuple[str, ...]]):
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


class CallableField(Field[Callable[..., Any]]):
    """A function."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> Callable[..., Any]:
        if not callable(value):
            raise ValidationError("must be a function.")
        return value  # type: ignore[no-any-return]


class Rate(Field[NewKeys]):
    """So many in each so long: a pair of a whole number and a duration."""

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> NewKeys:
        if isinstance(value, NewKeys):
            value = (value.count, value.seconds)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
            raise ValidationError("must be a pair: how many keys, and in each how many seconds, such as (1000, 3600).")
        number, length = value
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValidationError("must begin with a whole number of keys, from 0 up.")
        if number > MAX_LIMIT:
            raise ValidationError(_TOO_MUCH)
        seconds = Seconds().deserialize(length) or 0.0
        if not 0 < seconds <= MAX_WINDOW_SECONDS:
            raise ValidationError("must end with a window of more than 0 seconds and not more than a year.")
        return NewKeys(number, seconds)


def _is_header_text(text: str) -> bool:
    return all(" " <= char <= "~" for char in text)


def _statuses(item: Any) -> Iterable[int]:
    if isinstance(item, str) and (match := _STATUS_CLASS.fullmatch(item)):
        return range(int(match[1]) * 100, int(match[1]) * 100 + 100)
    if isinstance(item, int) and not isinstance(item, bool) and 100 <= item <= 599:
        return (item,)
    raise ValidationError('must contain statuses from 100 to 599, or classes such as "5xx".')


# Every keyword of a policy.

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


MEMORY = "memory://"
MOST_REPLICAS = 9
MOST_SHARDS = 256
"""Chores and commands go through all parts of a tenant, one after the other."""
DOCS_URL = "https://flask-idempotency.readthedocs.io/problems/"


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
        validate=validate.Length(min=1, max=LONGEST_NAME, error=f"must have 1 to {LONGEST_NAME} characters."),
        metadata={
            "doc": "Keeps applications apart in one store. Changing it makes every key new.",
            "default": "the application's name",
        },
    )
    secret = fields.Raw(
        metadata={
            "doc": "Derives every storage key: a string, or a list of them, oldest last, during a rotation. At least 16 random "
            "bytes, 32 with encryption `required`: `python -c 'import secrets; print(secrets.token_urlsafe(32))'`. In debug "
            "and testing any will do, unless encryption is `required`.",
            "default": "derived from `SECRET_KEY`, with a warning",
        }
    )
    former_identity = FormerIdentityField(
        metadata={
            "doc": 'For one `keep` after a change of identity: what was otherwise. `{"tenant": False}` if there was no '
            '`tenant_loader`, `{"principal": False}`, `{"principal": "Flask-Login"}` if that named the callers, '
            '`{"namespace": "old"}`, or several. Keys are claimed under both '
            "names. See [a change of identity](identity.md#when-the-identity-of-keys-changes).",
            "default": "none",
        }
    )
    encryption = fields.String(
        validate=validate.OneOf(["off", "on", "required"], error="must be one of: {choices}."),
        metadata={
            "doc": "Whether answers are encrypted in the store. `required` refuses to start with anything missing that "
            "this takes, and opens no answer that is not encrypted.",
            "default": "off",
        },
    )
    key_ring = fields.Raw(
        allow_none=True,
        metadata={
            "doc": "The keys that wrap the data keys of tenants, newest first: `env:NAME`, `file:/path`, "
            '`"package.module:factory"`, a mapping of ids to keys, or a `KeyProvider`. With encryption off it opens what '
            "was encrypted before.",
            "default": "none",
        },
    )
    compression = fields.String(
        validate=validate.OneOf(["zlib", "off"], error="must be one of: {choices}."),
        metadata={
            "doc": "How answers above 1 KiB are made smaller.",
            "default": "`zlib`; `off` with encryption, because lengths tell something",
        },
    )
    hash_identities = fields.Boolean(
        metadata={
            "doc": "Whether a record names its tenant and principal by a keyed hash, which does not lead back to them. "
            "A `replay_guard` sees the hash too.",
            "default": "`False`; `True` when encryption is required",
        }
    )
    allow_plaintext_transport = fields.Boolean(
        metadata={
            "doc": "Lets `required` start where the store is, or may be, reached over a network without TLS.",
            "default": False,
        }
    )
    docs_url = fields.String(metadata={"doc": "Where the `type` of a problem points to.", "default": DOCS_URL})
    allow_anonymous = fields.Boolean(
        metadata={
            "doc": "Whether requests whose caller has no name may use keys. They share one key space. Not set: only requests "
            "without credentials. `True`: those with credentials too. `False`: none. See [identity](identity.md).",
            "default": "only without credentials",
        }
    )
    credential_headers = HeaderNames(
        metadata={
            "doc": "Request headers that count as credentials besides "
            "[those that do anyway](identity.md#what-counts-as-credentials).",
            "default": "none",
        }
    )
    quota_records = limit(
        metadata={
            "doc": "Most live records of one tenant: in progress, quarantined, and answers whose life has not ended.",
            "default": "no limit",
        },
    )
    quota_bytes = limit(
        metadata={"doc": "Most bytes of stored answers of one tenant, as they were sent.", "default": "no limit"},
    )
    quota_in_flight = limit(
        metadata={"doc": "Most requests of one tenant that run at once under keys.", "default": "no limit"},
    )
    quota_new_keys = Rate(
        allow_none=True,
        metadata={
            "doc": "Most new keys of one tenant in each window: `(count, seconds)`.",
            "default": "no limit",
        },
    )
    store_id = fields.String(
        validate=[
            validate.Regexp(r"[!-~]{1,64}\Z", error="must be 1 to 64 visible ASCII characters."),
            validate.NoneOf(
                ["unnamed"], error="must not be `unnamed`, which is what a Redis without a name is called."
            ),
        ],
        metadata={
            "doc": "Which Redis this is, as `flask idempotency redis init` has said: another environment's is refused.",
            "default": "any will do",
        },
    )
    after_loss = fields.String(
        validate=validate.OneOf(["refuse", "hold", "run"], error="must be one of: {choices}."),
        metadata={
            "doc": "What becomes of keys that a Redis does not know once it has lost its memory. `refuse`: 503 until "
            "`flask idempotency redis ack`. `hold`: 503 for `data_loss_grace` after a restart or a fail-over, and until "
            "then after it was emptied. `run`: they run, those among them that have run before.",
            "default": "`refuse`; `run` in debug and testing",
        },
    )
    data_loss_grace = Seconds(
        validate=positive(),
        metadata={
            "doc": "For how long owners that survived a loss may put their claims back before keys that are not known run "
            "again. At least the longest lease.",
            "default": 60,
        },
    )
    client_clock_skew = Seconds(
        allow_none=True,
        validate=validate.Range(min=0, error="must not be negative."),
        metadata={
            "doc": "How far clients' clocks may be off. A UUID of version 7 or a ULID that was made later than a loss by more "
            "than this runs at once. None: no key is believed; see [what may be lost](redis-memory.md).",
            "default": 5,
        },
    )
    replicas = count(
        least=0,
        most=MOST_REPLICAS,
        metadata={
            "doc": "How many replicas of a Redis must have each claim and each answer before it counts: all that each primary "
            "has, or none. With fewer at hand first requests get 503. See "
            "[waiting for replicas](redis-memory.md#waiting-for-replicas).",
            "default": 0,
        },
    )
    tenant_shards = count(
        least=1,
        most=MOST_SHARDS,
        metadata={
            "doc": "Over how many parts the keys of each tenant are spread, on Redis, so that no tenant has to fit into one "
            "node of a Cluster. Part of the format of keys: it cannot be changed while any are remembered. See "
            "[tenants that outgrow a node](redis.md#tenants-that-outgrow-a-node).",
            "default": 1,
        },
    )
    max_waiters = count(
        metadata={
            "doc": "Most duplicates that wait at once in one process. Aim at a quarter of its threads.",
            "default": 2,
        },
    )
    reap_interval = interval(
        10,
        "Seconds between two looks of the janitor at claims whose owners have vanished. None: beat leaves it out.",
    )
    expire_interval = interval(60, "Seconds between two times that what is over is removed. None: beat leaves it out.")
    rotate_interval = interval(
        86400,
        "Seconds between two times that old answers are sealed anew, where encryption is on. None: never by itself.",
    )
    reconcile_interval = interval(
        86400, "Seconds between two recounts of the tenants' ledgers, where there are quotas. None: never by itself."
    )
    heartbeat_interval = interval(
        30,
        "Seconds between two signs of life of the janitor. The application warns when none came for two such times. None: "
        "no janitor is expected, and nobody warns.",
    )
    worker_timeout = patience(
        "Seconds after which a worker is killed that is still at work: gunicorn's `--timeout`. For `doctor` alone, which "
        "reads GUNICORN_CMD_ARGS as well. 0: never."
    )
    proxy_timeout = patience(
        "Seconds after which a proxy gives up on a request: nginx's `proxy_read_timeout`. For `doctor` alone. 0: never."
    )
    expire_rate = count(
        least=1,
        metadata={"doc": "Most records that one run of `expire` removes in a second.", "default": 10_000},
    )
    broker_url = fields.String(
        allow_none=True,
        metadata={
            "doc": "Where the janitor's Celery worker gets its tasks, if `flask_idempotency.janitor` makes the Celery app.",
            "default": "the store's URL, where that is a Redis",
        },
    )
    metrics = fields.Boolean(
        metadata={"doc": "Whether events and store calls are counted for Prometheus.", "default": False}
    )
    guard = fields.String(
        validate=validate.OneOf(["all", "chosen"], error="must be one of: {choices}."),
        metadata={
            "doc": "Which endpoints are guarded. `all`: each that is not `@exempt`. `chosen`: those with `@idempotent` or "
            "`@claim_here`, and those of a configured blueprint. See [choosing endpoints](endpoints.md#choose-endpoints).",
            "default": "all",
        },
    )
    enabled = fields.Boolean(
        metadata={
            "doc": "False: no key is looked at, and the store is not called. Views run as if the extension were not there. "
            "It still commits the rows of transactional views, because they leave that to it.",
            "default": True,
        }
    )


# Every word that configuration may contain: its type, its limits, and the text that the reference shows.
