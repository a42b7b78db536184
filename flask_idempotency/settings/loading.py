"""Turn configuration and arguments into `Settings`, and report every fault together.

Nothing else reads configuration. `init_app` calls `load_settings`, the decorators and `configure` call `load_override`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final
from urllib.parse import urlsplit

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, Override, Policy
from flask_idempotency.settings.options import DEPLOYMENT, MEMORY, POLICY, REDIS_SCHEMES, Settings
from flask_idempotency.settings.profiles import STATUS_LISTS, policy_of
from flask_idempotency.settings.reading import Option, Refused, imply_steps
from flask_idempotency.settings.security import load_secrets

PREFIX: Final = "IDEMPOTENCY_"

_SQL_ONLY: Final = {
    "redis_url": "Set IDEMPOTENCY_STORE to flask-sqlalchemy://, or remove this.",
    "claim_strategy": "Remove this.",
}
_REDIS_ONLY: Final = ("store_id", "data_loss_grace", "client_clock_skew")


def load_override(values: Mapping[str, Any], *, where: str) -> Override:
    """Check and convert these policy keywords, without the values of a profile.

    `where` names the call in which you wrote them, for error texts. Raises `ConfigurationError` with every fault.
    """
    loaded, faults = load_values(POLICY, values, name_of=lambda name: f"{where}: {name}")
    imply_steps(loaded)
    lists = Policy(**{name: loaded[name] for name in STATUS_LISTS if name in loaded})
    # No other layer can correct these, so refuse them here.
    faults += [f"{where}: {fault}" for fault in lists.faults(joint=True)]
    if faults:
        raise ConfigurationError(*faults)
    return loaded


def load_settings(
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    app_name: str,
    lenient: bool,
    has_principal: bool = True,
) -> Settings:
    """Load the application's settings: `IDEMPOTENCY_*` configuration, overlaid by the arguments of `Idempotency(…)`.

    `lenient` is for debug and testing: a derived secret and the memory store cause no warning. `has_principal`: the
    application can name its callers. Raises `ConfigurationError` with every fault.
    """
    configured = {name[len(PREFIX) :].lower(): value for name, value in config.items() if name.startswith(PREFIX)}
    from_config, faults = load_values(DEPLOYMENT, configured, name_of=lambda name: PREFIX + name.upper())
    from_call, call_faults = load_values(DEPLOYMENT, arguments, name_of=lambda name: f"Idempotency({name}=…)")
    loaded = {**from_config, **from_call}
    imply_steps(loaded)
    loaded.setdefault("store", MEMORY)
    in_memory = str(loaded["store"]).startswith("memory:")
    mode = loaded.get("encryption", "off")
    secrets, weak, warnings = load_secrets(loaded, config.get("SECRET_KEY"), in_memory=in_memory, lenient=lenient)
    if in_memory and not lenient:
        warnings.append(
            "IDEMPOTENCY_STORE is memory://: keys are forgotten at every restart and unknown to every other process. "
            "Set it to flask-sqlalchemy:// or a redis:// URL before this application moves money."
        )
    if not loaded.get("enabled", True) and loaded.get("mode", "enforce") != "enforce":
        warnings.append(
            f"IDEMPOTENCY_MODE is {loaded['mode']}, and IDEMPOTENCY_ENABLED is False: no key is looked at, so no request is "
            "observed."
        )
    key_ring, lacking = None, list[str]()
    if mode != "off" or loaded.get("key_ring") is not None:
        from flask_idempotency.settings.encryption import load_encryption  # for the applications that encrypt

        key_ring, lacking = load_encryption(loaded, config, has_principal=has_principal)
    shards = loaded.get("tenant_shards", 1)
    written = {name: value for name, value in loaded.items() if name in POLICY_FIELDS}
    policy = policy_of(written)
    faults = [
        *faults,
        *call_faults,
        *weak,
        *lacking,
        *_store_faults(loaded, policy, in_memory=in_memory),
    ]
    quota = None
    names = "records", "bytes", "in_flight", "new_keys"
    limits = {name: limit for name in names if (limit := loaded.get(f"quota_{name}")) is not None}
    if limits:
        from flask_idempotency.engine.quota import Quota  # for the applications that have quotas

        quota = Quota(**limits)
        faults += [
            f"IDEMPOTENCY_QUOTA_{name.upper()}: {limit} cannot be divided over IDEMPOTENCY_TENANT_SHARDS ({shards}). Raise it "
            f"to {shards} or more, or leave it out; fewer shards are for a store that has no records yet."
            for name, limit in quota.less_than(shards).items()
        ]
    if faults:
        raise ConfigurationError(*faults)
    # The length of a compressed response tells what its parts have in common, and encryption does not hide a length.
    compression = loaded.get("compression", "zlib" if mode == "off" else "off")
    origins = {name: f"configuration {PREFIX}{name.upper()}" for name in from_config if name in written}
    origins |= {name: f"Idempotency({name}=…)" for name in from_call if name in written}
    computed = {
        "namespace": loaded.get("namespace", app_name),
        "secrets": secrets,
        "policy": policy,
        "written": written,
        "quota": quota,
        "key_ring": key_ring,
        "compression": None if compression == "off" else compression,
        "hash_identities": loaded.get("hash_identities", mode == "required"),
        # A developer restarts and empties Redis.
        "after_loss": loaded.get("after_loss", "run" if lenient else "refuse"),
        "configured_data_loss": tuple(name for name in ("after_loss", *_REDIS_ONLY) if name in loaded),
        "origins": origins,
        "warnings": tuple(warnings),
    }
    as_loaded = {each.name: loaded[each.name] for each in fields(Settings) if each.name in loaded}
    return Settings(**{**as_loaded, **computed})


def summary(settings: Settings, *, quota_loader: bool) -> str:
    """Describe what is on in one line for the log: store, encryption, names, quotas, compression.

    It shows no secret, and of a URL only the scheme: a URL may hold a password.
    """
    if not settings.enabled:
        return "switched off by IDEMPOTENCY_ENABLED"
    choice = settings.store
    store = urlsplit(choice).scheme or "made by a function" if isinstance(choice, str) else type(choice).__name__
    if settings.redis_url is not None:
        store += f" behind {urlsplit(settings.redis_url).scheme}"
    if settings.tenant_shards != 1:
        store += f" with each tenant in {settings.tenant_shards} parts"
    encryption = "encryption off"
    if settings.key_ring is not None:
        try:
            newest, count = settings.key_ring.newest, len(settings.key_ring.kids())
            encryption = f"encryption {settings.encryption}, newest key {newest}, {count} in the ring"
        except Exception as error:  # noqa: BLE001 - a key service of another vendor: requests report it if it stays down
            encryption = f"encryption {settings.encryption}, the key ring does not respond ({type(error).__name__})"
        if settings.encryption == "required" and settings.allow_plaintext_transport:
            encryption += ", plaintext transport allowed"
    quotas = []
    if (quota := settings.quota) is not None:
        from flask_idempotency.engine.quota import LIMITS

        limits = zip(LIMITS, (quota.records, quota.bytes, quota.in_flight), strict=False)
        quotas = [f"{name} {number}" for name, number in limits if number is not None]
        if quota.new_keys is not None:
            quotas.append(f"new-keys {quota.new_keys.count} in {quota.new_keys.seconds:g} s")
    if quota_loader:
        quotas.append("by a loader")
    parts = [
        f"store {store}",
        encryption,
        f"names of tenants and principals {'hashed' if settings.hash_identities else 'in clear'}",
        f"quotas {', '.join(quotas) or 'off'}",
        f"compression {settings.compression or 'off'}",
    ]
    if settings.guard == "chosen":
        parts.append("chosen endpoints only")
    if settings.policy.mode != "enforce":
        parts.append(f"mode {settings.policy.mode}: endpoints that do not say otherwise are not protected")
    return "; ".join(parts)


def _store_faults(loaded: Mapping[str, Any], policy: Policy, *, in_memory: bool) -> list[str]:
    """Return a sentence for each option that the chosen store cannot follow."""
    store = loaded["store"]
    in_redis = str(store).startswith(REDIS_SCHEMES)
    faults = policy.faults(joint=not in_memory and not in_redis)
    if in_memory or in_redis:
        faults += [
            f"IDEMPOTENCY_{name.upper()}: only SQL stores have this option, and IDEMPOTENCY_STORE is none. {remedy}"
            for name, remedy in _SQL_ONLY.items()
            if name in loaded
        ]
    if not in_redis and isinstance(store, str) and "://" in store:
        if loaded.get("replicas"):
            faults.append(
                "IDEMPOTENCY_REPLICAS: a database waits for its own replicas, and IDEMPOTENCY_STORE is no Redis. Remove this."
            )
        faults += [
            f"IDEMPOTENCY_{name.upper()}: only Redis stores have this option, and IDEMPOTENCY_STORE is none. Remove this."
            for name in _REDIS_ONLY
            if name in loaded
        ]
    return faults


def load_values(
    options: Mapping[str, Option], values: Mapping[str, Any], *, name_of: Callable[[str], str]
) -> tuple[dict[str, Any], list[str]]:
    """Return what these options load from these values, and one sentence for each value that they refuse."""
    loaded, others, faults = dict[str, Any](), dict[str, Any](), list[str]()
    for name, value in values.items():
        if name in options:
            try:
                loaded[name] = options[name].load(value)
            except Refused as refused:
                if refused.args:
                    faults.append(f"{name_of(name)}: {' '.join(refused.args)}")
                else:
                    others[name] = value
        else:
            close = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
            hint = f" Did you mean {name_of(close[0])}?" if close else ""
            faults.append(f"{name_of(name)}: there is no such setting.{hint}")
    if others:
        # marshmallow takes as long to import as the rest of the settings: it is for values to convert.
        from flask_idempotency.settings import schema

        converted, found = schema.load(options, others)
        loaded |= converted
        faults += [f"{name_of(name)}: {' '.join(texts)}" for name, texts in found.items()]
    return loaded, faults
