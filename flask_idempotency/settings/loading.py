"""From what was written to `Settings`, with every fault at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from marshmallow import Schema, ValidationError

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, Override, Policy
from flask_idempotency.engine.quota import Quota
from flask_idempotency.profiles import STATUS_LISTS, policy_of
from flask_idempotency.schema import MEMORY, DeploymentSchema, PolicySchema
from flask_idempotency.settings.encryption import faults_of_encryption, load_ring
from flask_idempotency.settings.secrets import MAKE_ONE, load_secrets, weak_secrets
from flask_idempotency.settings.settings import REDIS_SCHEMES, FormerIdentity, Settings

PREFIX: Final = "IDEMPOTENCY_"

_OF_SQL: Final = {
    "redis_url": ("a cache in front of the records", "Set IDEMPOTENCY_STORE to flask-sqlalchemy://, or remove this."),
    "claim_strategy": ("the way in which a claim is made", "Remove this."),
}
_OF_REDIS: Final = ("store_id", "loss_hold", "key_clock_skew")
_AS_THEY_ARE: Final = (
    "redis_url",
    "claim_strategy",
    "docs_url",
    "allow_anonymous",
    "credential_headers",
    "max_waiters",
    "store_id",
    "loss_hold",
    "key_clock_skew",
    "replicas",
    "tenant_shards",
    "encryption",
    "reap_every",
    "expire_every",
    "rotate_every",
    "reconcile_every",
    "heartbeat_every",
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
        hashed_names=loaded.get("audit_names", "hashed" if mode == "required" else "clear") == "hashed",
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
