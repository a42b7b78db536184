"""Every option once: its type, its limits, its default and the text that the reference shows.

To add an option, add one attribute to `Settings` (or, if an endpoint may set it, to `PolicyOptions` and `engine.policy.Policy`)
and read it where you need it. `loading` and `docs/generate.py` find it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.engine.policy import Override, Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.settings.reading import (
    NOT_NEGATIVE,
    NOT_TOO_SHORT,
    POSITIVE,
    UP_TO_90_DAYS,
    FormerIdentity,
    Option,
    anything,
    decision,
    documented,
    former_identity,
    header_names,
    header_pairs,
    kept_headers,
    limit,
    matches,
    methods,
    one_of,
    pattern,
    pointers,
    rate,
    seconds,
    statuses,
    step_names,
    steps,
    whole_number,
)

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs an optional package
    from flask_idempotency.engine.quota import Quota
    from flask_idempotency.engine.store import Store

MEMORY: Final = "memory://"
REDIS_SCHEMES: Final = ("redis:", "rediss:", "unix:", "redis+", "rediss+")
DOCS_URL: Final = "https://flask-idempotency.readthedocs.io/problems/"

MAX_REPLICAS: Final = 9
MAX_SHARDS: Final = 256
"""Tasks and commands visit all parts of a tenant, one after the other."""

T = TypeVar("T")


class PolicyOptions:
    """Every keyword that may differ from one endpoint to the next. Its defaults are those of `engine.policy.Policy`."""

    required: Option = documented(Option(bool), "Refuse a request without a key (400 `missing-key`).")
    mode: Option = documented(
        one_of("observe", "warn", "enforce"),
        "`enforce` protects the endpoint. `observe` counts what it would do with each request, and changes none; "
        "`warn` also says it in `Idempotency-Status`. See [a first week without risk](../guides/observe.md).",
    )
    profile: Option = documented(
        one_of(*PROFILES),
        "The dialect that clients speak; a bundle of the values below. You can still set each by itself.",
    )
    header: Option = documented(
        Option(header_names, (bool, "must name at least one header.")),
        "The request header that carries the key; a list adds aliases.",
    )
    replayed_header: Option = documented(
        Option(header_pairs), "The response header that marks a replay: a name, or a mapping of names to values."
    )
    methods: Option = documented(Option(methods), "The methods in scope.")
    max_key_length: Option = documented(whole_number(least=1, most=4096), "Longest key, in characters.")
    key_format: Option = documented(
        Option(pattern), "`any`, `uuid`, or a regular expression that the whole key must match."
    )
    keep: Option = documented(
        Option(seconds, *UP_TO_90_DAYS),
        "How long a response can be replayed. After it, the key is new.",
    )
    remember: Option = documented(
        Option(seconds, *UP_TO_90_DAYS, allow_none=True),
        "How long a key is known, if longer than `keep`. In between, a retry gets 410 `key-expired` and does not run.",
    )
    lease: Option = documented(
        Option(seconds, NOT_TOO_SHORT),
        "How long a worker may be silent before it counts as vanished.",
    )
    max_runtime: Option = documented(
        Option(seconds, POSITIVE), "How long the worker renews the lease of a running view."
    )
    in_flight: Option = documented(
        one_of("reject", "wait"),
        "How to treat a duplicate of a running request: `reject` sends 409 immediately; `wait` waits for the first "
        "response.",
    )
    wait: Option = documented(Option(seconds, NOT_NEGATIVE), "Longest time that such a duplicate waits.")
    effects: Option = documented(
        one_of("plain", "marked", "deduplicated", "transactional", "steps"),
        "What a second run of the view may repeat. Decides whether a retry runs after a worker vanished or a view "
        "failed.",
    )
    steps: Option = documented(
        Option(steps),
        'Every durable step that may be taken: decorated functions, `Step(…)` or names. Implies `effects="steps"`.',
    )
    dropped_steps: Option = documented(
        Option(step_names),
        "Names of steps that an earlier release had. A key that recorded one goes on without it.",
    )
    steps_in_any_order: Option = documented(
        Option(bool),
        "Let a new step begin although a recorded one has not been asked for: a retry may take another way.",
    )
    resume_within: Option = documented(
        Option(seconds, POSITIVE, allow_none=True),
        "How long a paused request may wait for its retry. Then the janitor quarantines it.",
    )
    finish: Option = documented(
        one_of("client", "janitor"),
        "Who finishes a request that stopped between two steps: its `client`, or the `janitor` as well. See "
        "[requests that no client retries](../guides/steps.md#requests-that-no-client-retries).",
    )
    finish_headers: Option = documented(
        Option(header_names), "Request headers that are kept for the janitor. Never one that carries credentials."
    )
    on_abandoned: Option = documented(
        one_of("takeover", "quarantine", allow_none=True),
        "Overrides the decision of `effects` about a vanished worker. `takeover` may run a plain effect twice.",
    )
    on_error: Option = documented(
        one_of("release", "keep", "quarantine", allow_none=True),
        "How to end the key after an unhandled exception or any 5xx. By `effects`: 501 and 503 release; the rest "
        "quarantines under `plain`, and releases under the others. Past the point of no return, the key is never released.",
    )
    on_store_down: Option = documented(
        one_of("refuse", "allow"),
        "Without a store: refuse keyed requests (503), or run them unprotected, visibly. Without the "
        "keys of encrypted responses they are refused in any case.",
    )
    keep_statuses: Option = documented(
        Option(statuses), 'Statuses stored in any case: numbers and classes such as "5xx".'
    )
    release_statuses: Option = documented(Option(statuses), "Statuses after which the key may run again.")
    decide: Option = documented(
        Option(decision, allow_none=True), '`(response, exception) -> "keep" | "release" | "quarantine" | None`.'
    )
    max_body: Option = documented(
        whole_number(), "Largest response body to keep, in bytes; a larger one leaves a tombstone."
    )
    max_request_body: Option = documented(
        whole_number(allow_none=True),
        "Largest body of a request with a key, in bytes; a larger one is refused before anything is claimed (413 "
        "`request-too-large`).",
    )
    keep_headers: Option = documented(
        Option(kept_headers),
        "Response headers to keep and replay, in addition to the allow-list. `X-Shop-*` names all that begin so. A "
        "replay uses the present list.",
    )
    fingerprint: Option = documented(one_of("canonical", "raw"), "Compare JSON and forms by meaning, or bytes only.")
    ignore_fields: Option = documented(
        Option(pointers),
        "JSON Pointers of members that may change between retries. `/page_token` also names the form field "
        "`page_token`; files always count.",
    )
    fingerprint_headers: Option = documented(Option(header_names), "Request headers that must be equal too.")
    form_field: Option = documented(
        Option(str, allow_none=True),
        "Hidden form field that may carry the key (`idempotency_field()` renders one). It goes before a header.",
    )
    scope: Option = documented(one_of("key", "operation"), "`operation` gives each endpoint its own key space.")
    published: Option = documented(
        Option(bool), "Whether the [policy document](../guides/policy-document.md) lists the operation."
    )
    void: Option = documented(
        Option(bool),
        "Whether clients may [void a key](../guides/status.md#void-a-key), so that no request runs under it for `keep`.",
    )


def _option(default: T, option: Option, doc: str, *, shown: object = None, repr: bool = True) -> T:
    """Declare an option that becomes this setting as it was loaded. The reference shows the default, or `shown`."""
    documented(option, doc, shown or ("none" if default in (None, ()) else default))
    return dataclasses.field(default=default, repr=repr, metadata={"": option})


def _interval(default: float, doc: str) -> float | None:
    """Declare the seconds between two runs of a task. None: the task does not run by itself."""
    return _option(default, Option(seconds, POSITIVE, allow_none=True), doc, shown=int(default))


def _timeout(doc: str) -> float | None:
    """Declare the seconds after which a server or proxy gives up. 0: never. None: the operator has not said."""
    return _option(None, Option(seconds, NOT_NEGATIVE, allow_none=True), doc, shown="not known")


@valueclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one application: frozen, and never shown whole, because they hold secrets.

    Each attribute declares its option. An attribute of another name or type than its option is computed by
    `loading.load_settings`; it names its options in its metadata.
    """

    store: str | Store | Callable[[], Store] = _option(
        MEMORY, Option(anything), 'A URL, a `Store` object, or `"package.module:factory"`.', repr=False
    )
    redis_url: str | None = _option(
        None,
        Option(str),
        "With a SQL store: a Redis or Valkey that serves replays in its place. You may empty it at any time, because "
        "only SQL grants claims.",
        repr=False,
    )
    claim_strategy: str | None = _option(
        None,
        one_of("insert", "row_lock", "advisory"),
        "How a SQL store claims a key. `advisory` is for PostgreSQL, `row_lock` also for MariaDB and MySQL.",
        shown="insert",
    )
    namespace: str = _option(
        "",
        Option(str, (lambda value: 1 <= len(value) <= LONGEST_NAME, f"must have 1 to {LONGEST_NAME} characters.")),
        "Keeps applications apart in one store. If you change it, every key is new.",
        shown="the application's name",
    )
    secrets: tuple[bytes, ...] = dataclasses.field(
        repr=False,
        metadata={
            "secret": documented(
                Option(anything),
                "Derives every storage key: a string, or a list of them, oldest last, during a rotation. At least "
                "16 random bytes, 32 with encryption `required`: "
                "`python -c 'import secrets; print(secrets.token_urlsafe(32))'`. In debug and testing any will do, "
                "unless encryption is `required`.",
                "derived from `SECRET_KEY`, with a warning",
            )
        },
    )
    """The newest first."""
    former_identity: FormerIdentity | None = _option(
        None,
        Option(former_identity),
        'For one `keep` or `remember` after a change of identity: the former values, such as `{"namespace": "old"}`. Keys '
        "are claimed under both names. See [a change of "
        "identity](../guides/identity.md#when-the-identity-of-keys-changes).",
    )
    encryption: Literal["off", "on", "required"] = _option(
        "off",
        one_of("off", "on", "required"),
        "Whether responses are encrypted in the store. `required` refuses to start if a part that encryption needs is "
        "missing, and opens no response that is not encrypted.",
    )
    key_ring: KeyProvider | None = _option(
        None,
        Option(anything, allow_none=True),
        "The keys that wrap the data keys of tenants, newest first: `env:NAME`, `file:/path`, "
        '`"package.module:factory"`, a mapping of ids to keys, the URL of a '
        "[key service](../guides/encryption.md#a-key-service), a `KeyProvider`, or a list of these. With encryption off it "
        "opens responses that were encrypted before.",
        repr=False,
    )
    compression: str | None = _option(
        "zlib",
        one_of("zlib", "zstd", "off"),
        "How responses above 1 KiB are compressed. `zstd` is faster, and every host needs the extra `zstd` first.",
        shown="`zlib`; `off` with encryption, because lengths reveal content",
    )
    """None: not at all."""
    hash_identities: bool = _option(
        False,
        Option(bool),
        "Whether a record names its tenant and principal by a keyed hash that cannot be reversed. A `replay_guard` gets the "
        "hash too.",
        shown="`False`; `True` when encryption is required",
    )
    allow_plaintext_transport: bool = _option(
        False,
        Option(bool),
        "Lets `required` start where the store is, or may be, reached over a network without TLS.",
    )
    docs_url: str = _option(DOCS_URL, Option(str), "The URL that the `type` of a problem begins with.")
    problem_pages: bool = _option(
        True,
        Option(bool),
        "Whether a form from a client that prefers `text/html`, such as a browser, gets a page in place of a problem "
        "document; and whether the application serves a page on each problem, below `/.well-known/idempotency/problems/`, "
        "to which `Link` leads. It does not if you set `IDEMPOTENCY_DOCS_URL`.",
    )
    publish: bool = _option(
        False,
        Option(bool),
        "Whether `GET /.well-known/idempotency` tells clients what your endpoints promise. See "
        "[the policy document](../guides/policy-document.md).",
    )
    status_url: str | None = _option(
        None,
        Option(str, matches(r"/(?!/)", 'must be a path such as "/idempotency/status".'), allow_none=True),
        "The path at which clients ask what became of a key. See [the status of a key](../guides/status.md).",
    )
    browser_module: str | None = _option(
        None,
        Option(str, matches(r"/(?!/)", 'must be a path such as "/idempotency.js".'), allow_none=True),
        "The path that serves the browser module, which `idempotency_script()` loads. See "
        "[calling from a browser](../guides/browser.md).",
    )
    allow_anonymous: bool | None = _option(
        None,
        Option(bool),
        "Whether requests whose caller has no name may use keys. They share one key space. Not set: only requests "
        "without credentials. `True`: those with credentials too. `False`: none. See [identity](../guides/identity.md).",
        shown="only without credentials",
    )
    credential_headers: tuple[str, ...] = _option(
        (),
        Option(header_names),
        "Request headers that count as credentials, in addition to "
        "[the built-in ones](../guides/identity.md#what-counts-as-credentials).",
    )
    quota: Quota | None = dataclasses.field(
        default=None,
        metadata={
            "quota_records": limit(
                "Most live records of one tenant: in progress, quarantined, and responses that have not expired."
            ),
            "quota_bytes": limit("Most bytes of stored responses of one tenant, as they were sent."),
            "quota_in_flight": limit("Most keyed requests of one tenant that run at the same time."),
            "quota_new_keys": documented(
                Option(rate, allow_none=True),
                "Most new keys of one tenant in each window: `(count, seconds)`.",
                "no limit",
            ),
        },
    )
    """The quota of a tenant that the loader gives none. None: the store counts nothing."""
    store_id: str | None = _option(
        None,
        Option(
            str,
            matches(r"[!-~]{1,64}\Z", "must be 1 to 64 visible ASCII characters."),
            (lambda value: value != "unnamed", "must not be `unnamed`, the name of a Redis without an id."),
        ),
        "The id that `flask idempotency redis init` gave this Redis. A Redis with another id is refused.",
        shown="any",
    )
    after_loss: Literal["refuse", "hold", "run"] = _option(
        "refuse",
        one_of("refuse", "hold", "run"),
        "How to treat keys that a Redis does not know after it lost data: `refuse`, `hold` or `run`. With `run`, a key that "
        "has run before runs again. See [the three](../how-it-works/data-loss.md#let-it-acknowledge-itself).",
        shown="`refuse`; `run` in debug and testing",
    )
    data_loss_grace: float = _option(
        60.0,
        Option(seconds, POSITIVE),
        "How long workers that survived a data loss have to put their claims back. Then unknown keys run again. At least the "
        "longest lease.",
        shown=60,
    )
    client_clock_skew: float | None = _option(
        5.0,
        Option(seconds, NOT_NEGATIVE, allow_none=True),
        "How far clients' clocks may be off. A key with a time (UUID version 7, ULID) that is later than a data loss by more "
        "than this runs immediately. None: times in keys are ignored; see [what may be lost](../how-it-works/data-loss.md).",
        shown=5,
    )
    replicas: int = _option(
        0,
        whole_number(least=0, most=MAX_REPLICAS),
        "How many replicas of a Redis must have each claim and each response before it counts: all that each primary "
        "has, or none. With fewer connected, first requests get 503. See "
        "[waiting for replicas](../how-it-works/data-loss.md#waiting-for-replicas).",
    )
    tenant_shards: int = _option(
        1,
        whole_number(least=1, most=MAX_SHARDS),
        "Over how many parts the keys of each tenant are spread, on Redis, so that no tenant has to fit into one "
        "node of a Cluster. Part of the format of keys: you cannot change it while the store has records. See "
        "[tenants that outgrow a node](../guides/redis.md#tenants-that-outgrow-a-node).",
    )
    max_waiters: int = _option(
        2, whole_number(), "Most duplicates that wait at the same time in one process. Aim at a quarter of its threads."
    )
    reap_interval: float | None = _interval(
        10.0, "Seconds between two runs of `reap`, which looks for expired leases. None: beat leaves it out."
    )
    finish_interval: float | None = _interval(
        15.0,
        'Seconds between two runs of `finish`, which finishes requests of endpoints with `finish="janitor"`. None: beat leaves '
        "it out.",
    )
    expire_interval: float | None = _interval(
        60.0, "Seconds between two runs of `expire`, which removes expired records. None: beat leaves it out."
    )
    rotate_interval: float | None = _interval(
        86400.0,
        "Seconds between two runs of `rotate`, which encrypts old responses under the newest key. None: never by itself.",
    )
    reconcile_interval: float | None = _interval(
        86400.0, "Seconds between two recounts of the tenants' quotas. None: never by itself."
    )
    heartbeat_interval: float | None = _interval(
        30.0,
        "Seconds between two heartbeats of the janitor. The application warns after two intervals without one. None: you run "
        "no janitor, and the application does not warn.",
    )
    relay_interval: float | None = _interval(
        5.0,
        "Seconds between two runs of `relay`, which sends the messages of an outbox. None: beat leaves it out, and only "
        "`flask idempotency relay` sends.",
    )
    worker_timeout: float | None = _timeout(
        "Seconds after which the server kills a worker that has not finished: gunicorn's `--timeout`. For `doctor` alone, "
        "which reads GUNICORN_CMD_ARGS as well. 0: never."
    )
    proxy_timeout: float | None = _timeout(
        "Seconds after which a proxy gives up on a request: nginx's `proxy_read_timeout`. For `doctor` alone. 0: never."
    )
    expire_rate: int = _option(
        10_000, whole_number(least=1), "Most records that one run of `expire` removes in a second."
    )
    broker_url: str | None = _option(
        None,
        Option(str, allow_none=True),
        "Where the janitor's Celery worker gets its tasks, if `flask_idempotency.janitor` makes the Celery app.",
        shown="the store's URL, where that is a Redis",
        repr=False,
    )
    metrics: bool = _option(False, Option(bool), "Whether events and store calls are counted for Prometheus.")
    opentelemetry: bool = _option(
        False,
        Option(bool),
        "Whether spans get the outcome, the attempt and the fence, replays and conflicts a link to the run that holds the "
        "key, and events and store calls are counted through OpenTelemetry. See [traces](../operate/opentelemetry.md).",
    )
    activity: bool | None = _option(
        None,
        Option(bool, allow_none=True),
        "Whether each process counts outcomes and times by endpoint, and adds them to the store every 10 s. See "
        "[activity](../operate/activity.md). `True` refuses a store that keeps none.",
        shown="on, unless the application is in testing or its store keeps no activity",
    )
    guard: Literal["all", "chosen"] = _option(
        "all",
        one_of("all", "chosen"),
        "Which endpoints are guarded. `all`: each that is not `@exempt`. `chosen`: those with `@idempotent` or "
        "`@claim_here`, and those of a configured blueprint. See [choose endpoints](../guides/endpoints.md#choose-endpoints).",
    )
    enabled: bool = _option(
        True,
        Option(bool),
        "False: no key is looked at, and the store is not called. Views run as if the extension were not there. "
        "It still commits the rows of transactional views, because they leave that to it.",
    )
    policy: Policy
    written: Override = dataclasses.field(default_factory=dict, repr=False)
    """The policy values that the application wrote. The others are defaults, or come from its profile."""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Where the application wrote each value of `written`, by name."""
    configured_data_loss: tuple[str, ...] = ()
    """The options about data loss that the application wrote."""
    warnings: tuple[str, ...] = ()
    """What is allowed and unwise, one sentence each. Log them when the application starts."""

    @property
    def of_application(self) -> bool:
        """Return whether the store is the database that Flask-SQLAlchemy keeps for the application."""
        return isinstance(self.store, str) and self.store.startswith("flask-sqlalchemy:")

    @property
    def serves_problem_pages(self) -> bool:
        """Return whether the application serves the pages that `Link` leads to, because no site is named that has them."""
        return self.enabled and self.problem_pages and self.docs_url == DOCS_URL

    @property
    def may_be_joint(self) -> bool:
        """Return whether the store may turn out to be in the database of the application's own session."""
        return not str(self.store).startswith((MEMORY, *REDIS_SCHEMES))


POLICY: Final[Mapping[str, Option]] = {name: vars(PolicyOptions)[name] for name in PolicyOptions.__annotations__}
DEPLOYMENT: Final[Mapping[str, Option]] = {
    **POLICY,
    **{name or each.name: option for each in dataclasses.fields(Settings) for name, option in each.metadata.items()},
}
"""Everything that configuration may contain: the policy keywords, and one option for each setting."""
