"""The profiles (dialects that clients speak), and the response headers that we keep and replay.

To keep one more response header, add it to `KEPT_FIELDS`.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from flask_idempotency.engine.policy import Override, Policy, merge
from flask_idempotency.engine.values import valueclass

DIALECT_FIELDS = (
    "header",
    "replayed_header",
    "max_key_length",
    "keep",
    "lease",
    "on_error",
    "keep_statuses",
    "release_statuses",
)
"""Every profile sets all of these, and no others. Only the application decides about an abandoned claim."""


IETF = "ietf"
STATUS_LISTS = ("keep_statuses", "release_statuses")
SERVER_ERRORS = frozenset(range(500, 600))
"""The statuses that `on_error` decides about, in addition to exceptions."""


Dialect: TypeAlias = Literal["problem", "stripe", "playbook"]
"""How the body of a problem is written."""


@valueclass(frozen=True, slots=True)
class Profile:
    """One dialect: its policy values, and the form of its problems."""

    name: str
    values: Mapping[str, Any]
    """Policy values, one for each of `DIALECT_FIELDS`."""
    statuses: Mapping[str, int]
    """Status by problem code, where it differs from the problem's own."""
    body: Dialect


def _profile(
    name: str,
    *,
    body: Dialect = "problem",
    statuses: Mapping[str, int] | None = None,
    **values: Any,
) -> Profile:
    plain = Policy()
    defaults = {field: getattr(plain, field) for field in DIALECT_FIELDS}
    return Profile(name, MappingProxyType({**defaults, **values}), MappingProxyType(dict(statuses or {})), body)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            _profile(IETF),
            _profile(
                "stripe",
                body="stripe",
                statuses={"key-reused": 400},
                replayed_header=(("Idempotent-Replayed", "true"),),
                # Stripe's published rule: after the view has begun, every response is kept, also the 500 of a crash.
                keep_statuses=frozenset(range(200, 600)),
                on_error="keep",
            ),
            _profile(
                "x-idempotency",
                header=("X-Idempotency-Key",),
                replayed_header=(("X-Idempotency-Replay", "true"),),
                max_key_length=128,
                lease=300.0,
                keep_statuses=frozenset(range(200, 600)),
                on_error="keep",
            ),
            _profile(
                "playbook",
                body="playbook",
                statuses={"key-reused": 409},
                replayed_header=(("X-Idempotency-Replayed", "true"), ("X-Cache-Lookup", "HIT")),
                keep=7 * 24 * 3600.0,
                keep_statuses=frozenset(range(200, 500)),
                on_error="release",
            ),
        )
    }
)


def policy_of(*layers: Override) -> Policy:
    """Merge the written values of these layers, outermost first, over the values of the innermost profile.

    So every written value beats every profile, whichever layer names the profile. Written `keep_statuses`,
    `release_statuses` and `on_error` also take their statuses away from the profile's lists.
    """
    written = dict(ChainMap(*reversed([dict(layer) for layer in layers])))
    return merge(Policy(), {**_profile_values(written), **written})


def yielding(written: Override) -> tuple[str, ...]:
    """Return the names of the written values that took statuses away from the profile."""
    given, own = _profile_values(written), PROFILES[written.get("profile", IETF)].values
    lists = [name for name in STATUS_LISTS if name not in written and given[name] != own[name]]
    return tuple(name for name in (*STATUS_LISTS, "on_error") if lists and name in written)


def _profile_values(written: Override) -> Override:
    """Return the profile's values, without the statuses that the application decides.

    The profile's lease is at most a written `max_runtime`.
    """
    values = PROFILES[written.get("profile", IETF)].values
    decided = frozenset().union(*(written.get(name, ()) for name in STATUS_LISTS))
    if "on_error" in written:
        decided |= SERVER_ERRORS
    lease = min(values["lease"], written.get("max_runtime", values["lease"]))
    return {**values, **{name: values[name] - decided for name in STATUS_LISTS}, "lease": lease}


EXPOSED: Final = (
    "Idempotency-Status",
    "Retry-After",
    "Location",
    "Link",
    "Preference-Applied",
    "RateLimit",
    "RateLimit-Policy",
)
"""The response headers that a client acts on. Browsers hide all of them from scripts of another origin."""


def cors_headers(*allow: str) -> dict[str, Any]:
    """Return the header names of every dialect for Flask-CORS: `CORS(app, origins=[…], **cors_headers("Content-Type"))`.

    `allow` are the request headers that your API takes besides. Pass `Content-Type` for JSON, and `Authorization` if your
    callers send it. It says nothing about origins, methods or credentials. Raises `TypeError` if you pass a list.
    """
    for name in allow:
        if not isinstance(name, str):
            raise TypeError(
                f'Pass the names of header fields, not a {type(name).__name__}: cors_headers("Content-Type", "Authorization").'
            )
    keys = [name for profile in PROFILES.values() for name in profile.values["header"]]
    marks = [name for profile in PROFILES.values() for name, _ in profile.values["replayed_header"]]
    return {
        "allow_headers": list(dict.fromkeys((*keys, "Prefer", *allow))),
        "expose_headers": list(dict.fromkeys((*marks, *EXPOSED))),
    }


KEPT_FIELDS = frozenset(
    {
        "content-type",
        "content-language",
        "content-disposition",
        "content-encoding",
        "location",
        "content-location",
        "etag",
        "last-modified",
        "link",
        "vary",
        "cache-control",
        "retry-after",
    }
)
"""Header fields that describe the response itself. An allow-list: we do not replay an unknown field."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "http2-settings",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

NEVER_KEPT = HOP_BY_HOP | {
    # The identity of the first caller, which a second one must not get: RFC 9110 section 11, RFC 6265, RFC 8053, DPoP
    # (RFC 9449), ACME's nonces (RFC 8555), and common names of tokens.
    "set-cookie",
    "set-cookie2",
    "cookie",
    "cookie2",
    "www-authenticate",
    "proxy-authenticate",
    "optional-www-authenticate",
    "authentication-control",
    "authentication-info",
    "proxy-authentication-info",
    "authorization",
    "proxy-authorization",
    "dpop",
    "dpop-nonce",
    "replay-nonce",
    "api-key",
    "x-api-key",
    "x-access-token",
    "x-auth-token",
    "x-refresh-token",
    "x-session-token",
    "x-amz-security-token",
    "x-csrf-token",
    "x-csrftoken",
    "x-xsrf-token",
    "clear-site-data",
    # Signs the first exchange, its date included (RFC 9421).
    "signature",
    "signature-input",
    # These describe the first exchange, and are wrong in a replay.
    "date",
    "server",
    "age",
    "via",
    "alt-svc",
    "content-length",
    "request-id",
    "x-request-id",
    "x-correlation-id",
    "traceparent",
    "tracestate",
    "server-timing",
    "ratelimit",
    "ratelimit-policy",
}
NEVER_KEPT_PREFIXES = ("access-control-", "ratelimit-", "x-ratelimit-", "x-rate-limit-")

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def refused(name: str) -> bool:
    """Return whether we never store and never replay this header field, under any policy."""
    lower = name.lower()
    return lower in NEVER_KEPT or lower.startswith(NEVER_KEPT_PREFIXES)


def faults_of_kept(names: Iterable[str]) -> list[str]:
    """Return a sentence for each name in `keep_headers` that is no field name, or that we never replay."""
    faults = []
    for name in names:
        if not _TOKEN.fullmatch(name):
            faults.append(f"{name!r} is not the name of a header field.")
        elif refused(name):
            faults.append(
                f"{name} belongs to one caller or to one exchange and is never replayed. "
                "Set it in an after_request hook: those run on every replay too."
            )
    return faults


@lru_cache(maxsize=64)
def allowed_fields(keep_headers: frozenset[str]) -> frozenset[str]:
    """Return the lower-case names of the fields that a policy with these `keep_headers` keeps."""
    return frozenset(name for name in KEPT_FIELDS | {name.lower() for name in keep_headers} if not refused(name))
