"""What goes over the wire, as data: the dialects that clients speak, and the header fields that a replay may carry."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from flask_idempotency.engine.policy import Override, Policy, merge

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
"""Every profile decides all of these, and no others: what becomes of an abandoned claim is the application's word."""


IETF = "ietf"
STATUS_LISTS = ("keep_statuses", "release_statuses")
SERVER_ERRORS = frozenset(range(500, 600))
"""What `on_error` is about, besides exceptions."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One dialect: the policy values it brings, and how its problems look."""

    name: str
    values: Mapping[str, Any]
    """Policy values, one for each of `DIALECT_FIELDS`."""
    statuses: Mapping[str, int]
    """Problem code → status, where it is not the problem's own."""
    body: Literal["problem", "stripe", "playbook"]


def _profile(
    name: str,
    *,
    body: Literal["problem", "stripe", "playbook"] = "problem",
    statuses: Mapping[str, int] | None = None,
    **values: Any,
) -> Profile:
    plain = Policy()
    decided = {field: getattr(plain, field) for field in DIALECT_FIELDS}
    unknown = values.keys() - decided.keys()
    if unknown:
        raise TypeError(f"no profile decides {', '.join(sorted(unknown))}")
    return Profile(name, MappingProxyType({**decided, **values}), MappingProxyType(dict(statuses or {})), body)


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
                # Once the view began, whatever it said is the answer, a crash's 500 too: Stripe's published rule.
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
    """Lay what was written in each layer, outermost first, over the values of the innermost profile that any names.

    So every written value beats every profile's, whichever layer names the profile. A profile's statuses give way to
    written `keep_statuses`, `release_statuses` and `on_error` as well.
    """
    written = dict(ChainMap(*reversed([dict(layer) for layer in layers])))
    return merge(Policy(), {**_brought(written), **written})


def yielding(written: Override) -> tuple[str, ...]:
    """Name the written values to which this policy's profile has given up some of its statuses."""
    brought, own = _brought(written), PROFILES[written.get("profile", IETF)].values
    lists = [name for name in STATUS_LISTS if name not in written and brought[name] != own[name]]
    return tuple(name for name in (*STATUS_LISTS, "on_error") if lists and name in written)


def _brought(written: Override) -> Override:
    """The values that the profile brings, without the statuses that the application has settled in other words.

    The lease that it brings is no longer than a written `max_runtime`.
    """
    values = PROFILES[written.get("profile", IETF)].values
    settled = frozenset().union(*(written.get(name, ()) for name in STATUS_LISTS))
    if "on_error" in written:
        settled |= SERVER_ERRORS
    lease = min(values["lease"], written.get("max_runtime", values["lease"]))
    return {**values, **{name: values[name] - settled for name in STATUS_LISTS}, "lease": lease}


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
"""Header fields that belong to the answer itself. An allow-list: a field that nobody thought of is not replayed."""

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
    # The first caller's identity, which the second one must not be given: RFC 9110 section 11, RFC 6265, RFC 8053, DPoP
    # (RFC 9449), ACME's nonces (RFC 8555), and the names that applications give to tokens.
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
    # About the first exchange: false in the second one.
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
    """Whether this header field is never stored and never replayed, whatever a policy says."""
    lower = name.lower()
    return lower in NEVER_KEPT or lower.startswith(NEVER_KEPT_PREFIXES)


def faults_of_kept(names: Iterable[str]) -> list[str]:
    """One sentence for each name in `keep_headers` that is no field name, or never to be replayed."""
    faults = []
    for name in names:
        if not _TOKEN.fullmatch(name):
            faults.append(f"{name!r} is not the name of a header field.")
        elif refused(name):
            faults.append(
                f"{name} belongs to one caller or to one exchange and is never replayed. "
                "Set it in an after_request hook: those run afresh on every replay."
            )
    return faults


@lru_cache(maxsize=64)
def allowed_fields(keep_headers: frozenset[str]) -> frozenset[str]:
    """Lower-case names of the fields that are kept under a policy with these `keep_headers`."""
    return frozenset(name for name in KEPT_FIELDS | {name.lower() for name in keep_headers} if not refused(name))
