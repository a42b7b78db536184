"""From what was written to `Settings`, with every fault at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from marshmallow import Schema, ValidationError

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, Override, Policy
from flask_idempotency.engine.quota import LIMITS, Quota
from flask_idempotency.engine.store import Store
from flask_idempotency.settings.options import DOCS_URL, MEMORY, DeploymentSchema, PolicySchema
from flask_idempotency.settings.profiles import STATUS_LISTS, policy_of
from flask_idempotency.settings.security import faults_of_encryption, load_ring

# The secrets that name records, newest first, and what is wrong with them.

LEAST_BYTES: Final = 16
LEAST_BYTES_REQUIRED: Final = 32
"""Under encryption `required`: as long as the HMAC that is keyed with it."""

LEAST_DIFFERENT_BYTES: Final = 6
"""Of 16 random bytes at least 12 differ, and of 32 random hexadecimal digits at least 8."""

MAKE_ONE: Final = "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"

_DERIVED: Final = b"derived from SECRET_KEY:"

_PUBLISHED: Final = frozenset(
    example.encode(encoding)
    for encoding in ("utf-8", "latin-1")
    for example in (
        "192b9bdd22ab9ed4d12e236c78afcb9a393ec15f71bbf5dc987d54727823bcbf",  # Flask
        '_5#y2L"F4Q8z\n\xec]/',  # Flask, as a string
        "A0Zr98j/3yX R~XHH!jmN]LWX/,?RT",  # Flask until 1.0
        "F12Zr47j\3yX R~X@H!jmM]Lwf/,?KT",  # copied from Flask's by many
        "09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",  # FastAPI
        "pf9Wkove4IKEAXvy-cQkeDPhv9Cb3Ag-wyJILbq_dFw",  # Flask-Security
        "146585145368132386173505678016728509634",  # Flask-Security, a salt
        "you-will-never-guess",  # the Flask Mega-Tutorial
        "hard to guess string",
        "correct horse battery staple",
    )
)
"""Examples that documentation has published."""

# A value that is made of these and digits is one that somebody was to replace.
_PLACEHOLDERS: Final = """
    a an and any app application at be bit bits byte bytes change changed changeit changeme default demo dev development do
    documented env environment example fill flask for foo bar baz generate get hard here hmac idempotency in insecure insert is
    it jwt key keep kept least length local long lorem me min must my need not of on only or out outside own pass passphrase
    passwd password placeholder please private prod production put random replace safe sample secret secure set should signing
    some something staging store string strong super supersecret test testing tests text that the this to todo token top unsafe
    use value very with xxx you your qwerty abc abcdef admin root letmein django database
"""
_WORDS: Final = tuple(_PLACEHOLDERS.split())
_BETWEEN: Final = re.compile(r"""[ \t.,:;!?'"_/+*#@=<>(){}\[\]-]+""")
_MOST_DIGITS: Final = 8


def derived_secret(secret_key: str | bytes) -> bytes:
    """The secret of an application that has only a `SECRET_KEY`: to be listed last while it gets one of its own."""
    return _DERIVED + octets(secret_key)


def load_secrets(
    chosen: Any, secret_key: Any, *, in_memory: bool, lenient: bool
) -> tuple[tuple[bytes, ...], list[str]]:
    """The secrets, none if they cannot be used, and what is unwise about them."""
    if chosen is not None:
        several = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str | bytes) else [chosen]
        return tuple(octets(secret) for secret in several) if all(map(_is_secret, several)) else (), []
    if in_memory:
        return (token_bytes(32),), []  # the records will not outlive this process, so their names need not either
    if _is_secret(secret_key):
        warning = (
            "IDEMPOTENCY_SECRET is not set, so it is derived from SECRET_KEY: rotating SECRET_KEY would make every "
            "idempotency key new and run retries again. Set IDEMPOTENCY_SECRET to [a value of its own, "
            "flask_idempotency.settings.derived_secret(SECRET_KEY)], and drop the second after one `keep`."
        )
        return (derived_secret(secret_key),), [] if lenient else [warning]
    return (), []


def weak_secrets(secrets: Sequence[bytes], *, required: bool, lenient: bool) -> tuple[list[str], list[str]]:
    """What is wrong with these secrets, and what is only unwise: one sentence for each, with its length and the remedy.

    A former secret that is too weak may stay in the list for one `keep`, with a warning: without it, every key would be new.
    Under `required` it may not. In debug and testing (`lenient`) any secret will do, unless encryption is `required`.
    """
    faults, warnings = [], []
    if lenient and not required:
        return [], []
    least = LEAST_BYTES_REQUIRED if required else LEAST_BYTES
    for number, secret in enumerate(secrets):
        weakness = _weakness(secret.removeprefix(_DERIVED), least)
        if weakness is None:
            continue
        name = (
            "IDEMPOTENCY_SECRET" if len(secrets) == 1 else f"IDEMPOTENCY_SECRET, number {number + 1} of {len(secrets)}"
        )
        if secret.startswith(_DERIVED):
            name += ", which is derived from SECRET_KEY"
        if number == 0:
            rotate = (
                " If it has named records, set IDEMPOTENCY_SECRET to [the new one, the old one], and drop the second after one "
                "`keep`."
            )
            faults.append(f"{name}: {weakness} {MAKE_ONE}.{rotate}")
        elif required:
            faults.append(
                f"{name}: {weakness} IDEMPOTENCY_ENCRYPTION is required: drop it, or set that to on until one `keep` has "
                "passed since every process knows the first."
            )
        else:
            warnings.append(
                f"{name}: {weakness} Drop it when one `keep` has passed since every process knows the first."
            )
    return faults, warnings


def octets(value: str | bytes) -> bytes:
    """The bytes of a secret, however it is written."""
    return value.encode() if isinstance(value, str) else value


def _weakness(secret: bytes, least: int) -> str | None:
    if len(secret) < least:
        return f"it has {len(secret)} bytes, and must have at least {least}."
    if secret in _PUBLISHED:
        return f"it has {len(secret)} bytes, and is an example that documentation has published."
    if _made_of_words(secret):
        return f"it has {len(secret)} bytes, and is a placeholder that many use."
    if len(set(secret)) < LEAST_DIFFERENT_BYTES or _repeats(secret):
        return f"it has {len(secret)} bytes, and repeats itself."
    return None


def _repeats(secret: bytes) -> bool:
    """Whether it is a short text again and again, or counts up or down."""
    half = len(secret) // 2
    if any(secret == (secret[:size] * len(secret))[: len(secret)] for size in range(1, half + 1)):
        return True
    return len({(after - before) % 256 for before, after in pairwise(secret)} - {1}) < 2


def _made_of_words(secret: bytes) -> bool:
    """Whether placeholder words, a few digits and what stands between them are all that it consists of."""
    text = _BETWEEN.sub("", secret.decode("latin-1").lower())
    if not text or sum(map(str.isdecimal, text)) > _MOST_DIGITS:
        return False
    ends = {0}
    for at in range(len(text)):
        if at in ends:
            ends |= {at + len(word) for word in _WORDS if text.startswith(word, at)}
            ends |= {at + 1} if text[at].isdecimal() else set()
    return len(text) in ends


def _is_secret(value: Any) -> bool:
    return isinstance(value, str | bytes) and bool(value)


def is_same(secret: bytes, keys: Iterable[Any]) -> bool:
    """Whether this secret is one of these keys of the application, written as text or bytes."""
    return any(_is_secret(key) and secret == octets(key) for key in keys)


# Everything one application configured.

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs a package that is optional

REDIS_SCHEMES = ("redis:", "rediss:", "unix:", "redis+", "rediss+")

StoreChoice: TypeAlias = "str | Store | Callable[[], Store]"
Encryption: TypeAlias = Literal["off", "on", "required"]


@dataclass(frozen=True, slots=True)
class FormerIdentity:
    """What was otherwise in the identity of keys, until a change. None: it was as it is now."""

    namespace: str | None = None
    tenant: Literal[False] | Callable[[], str | None] | None = None
    """False: there was no loader. Else the loader that there was."""
    principal: Literal[False] | tuple[str, ...] | Callable[[], str | None] | None = None
    """As `tenant`; or the extensions that named callers."""

    @property
    def coarse(self) -> bool:
        """Whether the former names may stand for several callers of today."""
        return self.tenant is not None or self.principal is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """Frozen, and never shown whole: it holds secrets. `secrets` has the newest first."""

    store: StoreChoice = field(repr=False)
    namespace: str
    secrets: tuple[bytes, ...] = field(repr=False)
    policy: Policy
    redis_url: str | None = field(default=None, repr=False)
    claim_strategy: str | None = None
    docs_url: str = DOCS_URL
    former_identity: FormerIdentity | None = None
    """Under which names keys are claimed besides, for one `keep` after a change."""
    allow_anonymous: bool | None = None
    """None: requests without credentials only."""
    credential_headers: tuple[str, ...] = ()
    """What counts as credentials besides `web.principals`."""
    max_waiters: int = 2
    quota: Quota | None = None
    """What each tenant may have, unless something says otherwise of one. None: nothing is counted."""
    store_id: str | None = None
    after_loss: Literal["refuse", "hold", "run"] = "refuse"
    data_loss_grace: float = 60.0
    client_clock_skew: float | None = 5.0
    """What becomes of keys that a Redis does not know after it has lost its memory: see `stores.redis.memory`."""
    of_memory: tuple[str, ...] = ()
    """Those of these that were configured."""
    replicas: int = 0
    """How many replicas of a Redis must have each claim and each answer before it counts."""
    tenant_shards: int = 1
    """Over how many parts the keys of each tenant are spread."""
    encryption: Encryption = "off"
    key_ring: KeyProvider | None = field(default=None, repr=False)
    """Also without encryption it may be there: what was sealed before still opens."""
    compression: str | None = "zlib"
    hashed_names: bool = False
    """Whether records name tenants and principals by what leads back to nobody."""
    plaintext_transport: bool = False
    """Whether `required` leaves it to others how the store is reached."""
    reap_interval: float | None = 10.0
    expire_interval: float | None = 60.0
    rotate_interval: float | None = 86400.0
    reconcile_interval: float | None = 86400.0
    heartbeat_interval: float | None = 30.0
    """Of chores that are done by themselves, in seconds. None: this one is not."""
    expire_rate: int = 10_000
    worker_timeout: float | None = None
    proxy_timeout: float | None = None
    """When servers and proxies give up, in seconds. None: nobody has said."""
    broker_url: str | None = field(default=None, repr=False)
    metrics: bool = False
    guard: Literal["all", "chosen"] = "all"
    enabled: bool = True
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Where each value of `written` was written, by its name."""
    written: Override = field(default_factory=dict, repr=False)
    """What the application wrote of `policy`: the rest are defaults, and what its profile brings."""
    warnings: tuple[str, ...] = ()
    """What is allowed and unwise, one sentence each, for whoever starts the application to log."""

    @property
    def of_application(self) -> bool:
        """Whether the store is the database that Flask-SQLAlchemy keeps for the application."""
        return isinstance(self.store, str) and self.store.startswith("flask-sqlalchemy:")

    @property
    def may_be_joint(self) -> bool:
        """Whether the store may turn out to be in the database of the application's own session."""
        return not str(self.store).startswith((MEMORY, *REDIS_SCHEMES))


PREFIX: Final = "IDEMPOTENCY_"

_OF_SQL: Final = {
    "redis_url": ("a cache in front of the records", "Set IDEMPOTENCY_STORE to flask-sqlalchemy://, or remove this."),
    "claim_strategy": ("the way in which a claim is made", "Remove this."),
}
_OF_REDIS: Final = ("store_id", "data_loss_grace", "client_clock_skew")
_AS_THEY_ARE: Final = (
    "redis_url",
    "claim_strategy",
    "docs_url",
    "allow_anonymous",
    "credential_headers",
    "max_waiters",
    "store_id",
    "data_loss_grace",
    "client_clock_skew",
    "replicas",
    "tenant_shards",
    "encryption",
    "reap_interval",
    "expire_interval",
    "rotate_interval",
    "reconcile_interval",
    "heartbeat_interval",
    "expire_rate",
    "worker_timeout",
    "proxy_timeout",
    "broker_url",
    "metrics",
    "guard",
    "enabled",
)
"""Settings whose default is that of `Settings`."""


def load_override(values: Mapping[str, Any], *, where: str) -> Override:
    """These policy keywords, checked and typed: what was written, without what a profile brings.

    Raises `ConfigurationError` with every fault; `where` says in its text which call they were written in.
    """
    loaded, faults = _load(PolicySchema(), values, spell=lambda name: f"{where}: {name}")
    both = Policy(**{name: loaded[name] for name in STATUS_LISTS if name in loaded})
    # No other layer can mend this, so it is refused here and now.
    faults += [f"{where}: {fault}" for fault in both.faults(joint=True)]
    if faults:
        raise ConfigurationError(*faults)
    return loaded


def load_settings(
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    app_name: str,
    lenient: bool,
    identified: bool = True,
) -> Settings:
    """The application's settings: `IDEMPOTENCY_*` configuration, overlaid by what was passed to `Idempotency(…)`.

    `lenient` is for debug and testing: a derived secret and the memory store need no warning there. `identified`: whether
    something says who a caller is. Raises `ConfigurationError` with every fault of all of it.
    """
    configured = {name[len(PREFIX) :].lower(): value for name, value in config.items() if name.startswith(PREFIX)}
    schema = DeploymentSchema()
    of_config, faults = _load(schema, configured, spell=lambda name: PREFIX + name.upper())
    of_call, more_faults = _load(schema, arguments, spell=lambda name: f"Idempotency({name}=…)")
    loaded = {**of_config, **of_call}
    loaded.setdefault("store", MEMORY)
    in_memory = str(loaded["store"]).startswith("memory:")
    secrets, warnings = load_secrets(
        loaded.get("secret"), config.get("SECRET_KEY"), in_memory=in_memory, lenient=lenient
    )
    if in_memory and not lenient:
        warnings.append(
            "IDEMPOTENCY_STORE is memory://: keys are forgotten at every restart and unknown to every other process. "
            "Set it to flask-sqlalchemy:// or a redis:// URL before this application moves money."
        )
    weak, unwise = _weak_secrets(loaded, secrets, lenient=lenient)
    warnings += unwise
    key_ring, faults_of_ring = load_ring(loaded.get("key_ring"))
    written = {name: value for name, value in loaded.items() if name in POLICY_FIELDS}
    policy = policy_of(written)
    faults = [
        *faults,
        *more_faults,
        *_faults_of_secret(loaded, secrets),
        *weak,
        *faults_of_ring,
        *faults_of_encryption(loaded, config, identified=identified),
        *_faults_of_place(loaded, policy, in_memory=in_memory),
        *_faults_of_shards(loaded),
    ]
    if faults:
        raise ConfigurationError(*faults)
    mode = loaded.get("encryption", "off")
    # The length of a compressed answer tells what its parts have in common, and encryption does not hide a length.
    compression = loaded.get("compression", "zlib" if mode == "off" else "off")
    return Settings(
        store=loaded["store"],
        namespace=loaded.get("namespace", app_name),
        secrets=secrets,
        policy=policy,
        written=written,
        quota=_quota(loaded),
        key_ring=key_ring,
        compression=None if compression == "off" else compression,
        hashed_names=loaded.get("hash_identities", mode == "required"),
        of_memory=tuple(name for name in ("after_loss", *_OF_REDIS) if name in loaded),
        # On a developer's machine a Redis comes and goes.
        after_loss=loaded.get("after_loss", "run" if lenient else "refuse"),
        plaintext_transport=loaded.get("allow_plaintext_transport", False),
        origins=_origins(of_config, of_call),
        warnings=tuple(warnings),
        **{name: loaded[name] for name in _AS_THEY_ARE if name in loaded},
        former_identity=FormerIdentity(**former) if (former := loaded.get("former_identity")) else None,
    )


def _origins(of_config: Mapping[str, Any], of_call: Mapping[str, Any]) -> dict[str, str]:
    written = {name: f"configuration {PREFIX}{name.upper()}" for name in of_config}
    written |= {name: f"Idempotency({name}=…)" for name in of_call}
    return {name: where for name, where in written.items() if name in POLICY_FIELDS}


def _faults_of_secret(loaded: Mapping[str, Any], secrets: tuple[bytes, ...]) -> list[str]:
    if secrets or (loaded.get("encryption") == "required" and loaded.get("secret") is None):
        return []
    return [
        "IDEMPOTENCY_SECRET: must be a non-empty string or a list of them. "
        f"Set it (or SECRET_KEY) to a long random value that is kept outside the store. {MAKE_ONE}."
    ]


def _weak_secrets(
    loaded: Mapping[str, Any], secrets: tuple[bytes, ...], *, lenient: bool
) -> tuple[list[str], list[str]]:
    required = loaded.get("encryption") == "required"
    # One that is missing under `required` is a fault already, and one that names nothing is none.
    if not loaded.get("enabled", True) or (required and loaded.get("secret") is None):
        return [], []
    return weak_secrets(secrets, required=required, lenient=lenient)


def _faults_of_place(loaded: Mapping[str, Any], policy: Policy, *, in_memory: bool) -> list[str]:
    """What only records in SQL can have, or only those in Redis."""
    in_redis = str(loaded["store"]).startswith(REDIS_SCHEMES)
    elsewhere = in_memory or in_redis
    faults = policy.faults(joint=not elsewhere)
    if elsewhere:
        faults += [
            f"IDEMPOTENCY_{name.upper()}: {of_sql} is a matter of SQL stores, and IDEMPOTENCY_STORE is none. {remedy}"
            for name, (of_sql, remedy) in _OF_SQL.items()
            if name in loaded
        ]
    if not in_redis and isinstance(loaded["store"], str) and "://" in loaded["store"]:
        if loaded.get("replicas"):
            faults.append(
                "IDEMPOTENCY_REPLICAS: a database waits for its own replicas, and IDEMPOTENCY_STORE is no Redis. Remove this."
            )
        faults += [
            f"IDEMPOTENCY_{name.upper()}: it is about what a Redis may forget, and IDEMPOTENCY_STORE is no Redis. Remove this."
            for name in _OF_REDIS
            if name in loaded
        ]
    return faults


def _faults_of_shards(loaded: Mapping[str, Any]) -> list[str]:
    """What is too little to be divided over all parts of a tenant."""
    shards = loaded.get("tenant_shards", 1)
    return [
        f"IDEMPOTENCY_QUOTA_{name.upper()}: {limit} cannot be divided over IDEMPOTENCY_TENANT_SHARDS ({shards}). Raise it to "
        f"{shards} or more, or leave it out; fewer shards are for a store that remembers no key yet."
        for name, limit in (_quota(loaded) or Quota()).less_than(shards).items()
    ]


def _quota(loaded: Mapping[str, Any]) -> Quota | None:
    limits = {limit.name: loaded.get(f"quota_{limit.name}") for limit in fields(Quota)}
    quota = Quota(**limits)
    return None if quota.unlimited else quota


def _load(
    schema: Schema, values: Mapping[str, Any], *, spell: Callable[[str], str]
) -> tuple[dict[str, Any], list[str]]:
    """What the schema makes of these values, and one sentence for each that it refuses."""
    known = {name: value for name, value in values.items() if name in schema.fields}
    faults = [_unknown(name, schema, spell) for name in values if name not in schema.fields]
    try:
        loaded: dict[str, Any] = schema.load(known)
    except ValidationError as error:
        messages = error.messages if isinstance(error.messages, dict) else {}
        faults += [f"{spell(name)}: {' '.join(_flat(found))}" for name, found in messages.items()]
        loaded = dict(error.valid_data) if isinstance(error.valid_data, dict) else {}
    return loaded, faults


def _unknown(name: str, schema: Schema, spell: Callable[[str], str]) -> str:
    close = difflib.get_close_matches(name, list(schema.fields), n=1, cutoff=0.6)
    hint = f" Did you mean {spell(close[0])}?" if close else ""
    return f"{spell(name)}: there is no such setting.{hint}"


def _flat(messages: Any) -> list[str]:
    if isinstance(messages, Mapping):
        return [text for value in messages.values() for text in _flat(value)]
    return [str(message) for message in messages] if isinstance(messages, list) else [str(messages)]


# What is on, in one line for the log of whoever starts the application. No secret, and no URL: one may hold a password.


def summary(settings: Settings, *, quota_loader: bool) -> str:
    """Which store, what is encrypted under which key, how people are named, and what is limited and compressed."""
    if not settings.enabled:
        return "switched off by IDEMPOTENCY_ENABLED"
    return "; ".join(
        (
            _store(settings),
            _encryption(settings),
            f"names of tenants and principals {'hashed' if settings.hashed_names else 'in clear'}",
            "quotas " + (", ".join(_quotas(settings.quota, loader=quota_loader)) or "off"),
            f"compression {settings.compression or 'off'}",
            *(["chosen endpoints only"] if settings.guard == "chosen" else []),
        )
    )


def _store(settings: Settings) -> str:
    choice = settings.store
    kind = urlsplit(choice).scheme or "made by a function" if isinstance(choice, str) else type(choice).__name__
    cache = "" if settings.redis_url is None else f" behind {urlsplit(settings.redis_url).scheme}"
    shards = "" if settings.tenant_shards == 1 else f" with each tenant in {settings.tenant_shards} parts"
    return f"store {kind}{cache}{shards}"


def _encryption(settings: Settings) -> str:
    ring = settings.key_ring
    if ring is None:
        return "encryption off"
    try:
        kids = ring.kids()
        keys = f"newest key {ring.newest}, {len(kids)} in the ring"
    except Exception as error:  # noqa: BLE001 - somebody else's key service: requests will say so when it stays away
        keys = f"the key ring does not answer ({type(error).__name__})"
    waived = (
        ", plaintext transport allowed" if settings.encryption == "required" and settings.plaintext_transport else ""
    )
    return f"encryption {settings.encryption}, {keys}{waived}"


def _quotas(quota: Quota | None, *, loader: bool) -> Iterator[str]:
    if quota is not None:
        for name, number in zip(LIMITS, (quota.records, quota.bytes, quota.in_flight), strict=False):
            if number is not None:
                yield f"{name} {number}"
        if quota.new_keys is not None:
            yield f"new-keys {quota.new_keys.count} in {quota.new_keys.seconds:g} s"
    if loader:
        yield "by a loader"
