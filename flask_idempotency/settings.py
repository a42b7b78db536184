"""Configuration: read once, checked whole, frozen. The only reader of configuration in the house.

One schema describes every policy keyword. `Idempotency(…)`, `configure(…)`, `@idempotent(…)` and `IDEMPOTENCY_*` all go
through it, so that a value means the same wherever it is written, and `docs/` renders its reference from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from secrets import token_bytes
from typing import Any, TypeAlias

from marshmallow import Schema, ValidationError

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, Override, Policy, merge
from flask_idempotency.engine.ports import Store
from flask_idempotency.engine.quota import Quota
from flask_idempotency.profiles import spelled_out
from flask_idempotency.schema import DOCS_URL, MEMORY, NOT_YET, DeploymentSchema, PolicySchema

PREFIX = "IDEMPOTENCY_"
REDIS_SCHEMES = ("redis:", "rediss:", "unix:", "redis+")

_OF_SQL = {
    "redis_url": ("a cache in front of the records", "Set IDEMPOTENCY_STORE to flask-sqlalchemy://, or remove this."),
    "claim_strategy": ("the way in which a claim is made", "Remove this."),
}

StoreChoice: TypeAlias = "str | Store | Callable[[], Store]"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything one application configured. `secrets` holds the newest first."""

    store: StoreChoice = field(repr=False)
    namespace: str
    secrets: tuple[bytes, ...] = field(repr=False)
    policy: Policy
    redis_url: str | None = field(default=None, repr=False)
    claim_strategy: str | None = None
    docs_url: str = DOCS_URL
    allow_anonymous: bool = True
    max_waiters: int = 2
    quota: Quota | None = None
    """What each tenant may have, unless something says otherwise of one. None: nothing is counted."""
    enabled: bool = True
    warnings: tuple[str, ...] = ()
    """What is allowed and unwise, one sentence each, for whoever starts the application to log."""

    @property
    def may_be_joint(self) -> bool:
        """Whether the store may turn out to be in the database of the application's own session."""
        return not str(self.store).startswith((MEMORY, *REDIS_SCHEMES))


def load_override(values: Mapping[str, Any], *, where: str) -> Override:
    """These policy keywords, checked and typed. A profile brings its own values, below the ones named beside it.

    Raises `ConfigurationError` with every fault; `where` says in its text which call they were written in.
    """
    loaded, faults = _load(PolicySchema(), values, spell=lambda name: f"{where}: {name}")
    if faults:
        raise ConfigurationError(*faults)
    return spelled_out(loaded)


def load_settings(
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    app_name: str,
    lenient: bool,
) -> Settings:
    """The application's settings: `IDEMPOTENCY_*` configuration, overlaid by what was passed to `Idempotency(…)`.

    `lenient` is for debug and testing: a derived secret and the memory store need no warning there.
    Raises `ConfigurationError` with every fault of both.
    """
    configured = {name[len(PREFIX) :].lower(): value for name, value in config.items() if name.startswith(PREFIX)}
    later = [
        f"{PREFIX}{name.upper()}: {NOT_YET[name]} is not in this release; remove the setting."
        for name, value in configured.items()
        if name in NOT_YET and not (name == "encryption" and value == "off")
    ]
    schema = DeploymentSchema()
    of_config, faults = _load(
        schema, {n: v for n, v in configured.items() if n not in NOT_YET}, spell=lambda name: PREFIX + name.upper()
    )
    of_call, more_faults = _load(schema, arguments, spell=lambda name: f"Idempotency({name}=…)")
    loaded = {**of_config, **of_call}
    store = str(loaded.setdefault("store", MEMORY))
    in_memory = store.startswith("memory:")
    secrets, warnings = _secrets(loaded.get("secret"), config.get("SECRET_KEY"), in_memory=in_memory, lenient=lenient)
    if in_memory and not lenient:
        warnings.append(
            "IDEMPOTENCY_STORE is memory://: keys are forgotten at every restart and unknown to every other process. "
            "Set it to flask-sqlalchemy:// or a redis:// URL before this application moves money."
        )
    faults = [*faults, *more_faults, *later]
    if not secrets:
        faults.append(
            "IDEMPOTENCY_SECRET: must be a non-empty string or a list of them. "
            "Set it (or SECRET_KEY) to a long random value that is kept outside the store."
        )
    policy = merge(Policy(), spelled_out({name: value for name, value in loaded.items() if name in POLICY_FIELDS}))
    elsewhere = in_memory or store.startswith(REDIS_SCHEMES)
    faults += policy.faults(joint=not elsewhere)
    if elsewhere:
        faults += [
            f"IDEMPOTENCY_{name.upper()}: {of_sql} is a matter of SQL stores, and IDEMPOTENCY_STORE is none. {remedy}"
            for name, (of_sql, remedy) in _OF_SQL.items()
            if name in loaded
        ]
    if faults:
        raise ConfigurationError(*faults)
    deployment = {
        name: loaded[name]
        for name in ("redis_url", "claim_strategy", "docs_url", "allow_anonymous", "max_waiters", "enabled")
        if name in loaded
    }
    return Settings(
        store=loaded["store"],
        namespace=loaded.get("namespace", app_name),
        secrets=secrets,
        policy=policy,
        quota=_quota(loaded),
        warnings=tuple(warnings),
        **deployment,
    )


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
    close = difflib.get_close_matches(name, [*schema.fields, *NOT_YET], n=1, cutoff=0.6)
    hint = f" Did you mean {spell(close[0])}?" if close else ""
    return f"{spell(name)}: there is no such setting.{hint}"


def _flat(messages: Any) -> list[str]:
    if isinstance(messages, Mapping):
        return [text for value in messages.values() for text in _flat(value)]
    return [str(message) for message in messages] if isinstance(messages, list) else [str(messages)]


def derived_secret(secret_key: str | bytes) -> bytes:
    """The secret of an application that has only a `SECRET_KEY`: to be listed last while it gets one of its own."""
    return b"derived from SECRET_KEY:" + _octets(secret_key)


def _secrets(chosen: Any, secret_key: Any, *, in_memory: bool, lenient: bool) -> tuple[tuple[bytes, ...], list[str]]:
    if chosen is not None:
        several = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str | bytes) else [chosen]
        return tuple(_octets(secret) for secret in several) if all(map(_is_secret, several)) else (), []
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


def _is_secret(value: Any) -> bool:
    return isinstance(value, str | bytes) and bool(value)


def _octets(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
