"""What is on, in one line for the log of whoever starts the application. No secret, and no URL: one may hold a password."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from flask_idempotency.engine.quota import LIMITS, Quota
from flask_idempotency.settings.settings import Settings


def in_one_line(settings: Settings, *, quota_loader: bool) -> str:
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
