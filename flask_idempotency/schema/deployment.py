"""What a deployment sets, and no endpoint."""

from __future__ import annotations

from marshmallow import fields, validate

from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.schema.fields import (
    Former,
    HeaderNames,
    Rate,
    Seconds,
    count,
    interval,
    limit,
    patience,
    positive,
)
from flask_idempotency.schema.policy import PolicySchema

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
    former_identity = Former(
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
    audit_names = fields.String(
        validate=validate.OneOf(["clear", "hashed"], error="must be one of: {choices}."),
        metadata={
            "doc": "How a record names its tenant and principal. `hashed`: by a keyed hash that leads back to nobody; a "
            "`replay_guard` is shown that as well.",
            "default": "`clear`; `hashed` when encryption is required",
        },
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
            "`flask idempotency redis ack`. `hold`: 503 for `loss_hold` after a restart or a fail-over, and until then after "
            "it was emptied. `run`: they run, those among them that have run before.",
            "default": "`refuse`; `run` in debug and testing",
        },
    )
    loss_hold = Seconds(
        validate=positive(),
        metadata={
            "doc": "For how long owners that survived a loss may put their claims back before keys that are not known run "
            "again. At least the longest lease.",
            "default": 60,
        },
    )
    key_clock_skew = Seconds(
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
    reap_every = interval(
        10,
        "Seconds between two looks of the janitor at claims whose owners have vanished. None: beat leaves it out.",
    )
    expire_every = interval(60, "Seconds between two times that what is over is removed. None: beat leaves it out.")
    rotate_every = interval(
        86400,
        "Seconds between two times that old answers are sealed anew, where encryption is on. None: never by itself.",
    )
    reconcile_every = interval(
        86400, "Seconds between two recounts of the tenants' ledgers, where there are quotas. None: never by itself."
    )
    heartbeat_every = interval(
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
