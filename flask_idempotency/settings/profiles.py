"""The profiles (dialects that clients speak), and the response headers that we keep and replay.

To keep one more response header, add it to `KEPT_FIELDS`.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from flask_idempotency.engine.model import LARGEST_KEPT
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
    statuses: Mapping[str, int] = MappingProxyType({}),
    **values: Any,
) -> Profile:
    plain = Policy()
    every = {field: getattr(plain, field) for field in DIALECT_FIELDS} | values
    # A renderer of problems gets the profile, which all applications share.
    return Profile(name, MappingProxyType(every), MappingProxyType(statuses), body)


PROFILES: Final[Mapping[str, Profile]] = {
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


def policy_of(*layers: Override) -> Policy:
    """Merge the written values of these layers, outermost first, over the values of the innermost profile.

    So every written value beats every profile, whichever layer names the profile. Written `keep_statuses`,
    `release_statuses` and `on_error` also take their statuses away from the profile's lists.
    """
    written = dict(ChainMap(*reversed([dict(layer) for layer in layers])))
    policy = merge(Policy(), {**_profile_values(written), **written})
    if policy.finish == "janitor" and policy.max_request_body is None:
        # The whole body is kept, so a request with a larger one is refused before anything is claimed.
        return replace(policy, max_request_body=LARGEST_KEPT)
    return policy


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
        # These decide what the page or the caller's library does next.
        "turbo-location",
        "x-inertia",
        "x-inertia-location",
        "refresh",
        "operation-location",
        "azure-asyncoperation",
        "odata-entityid",
        "preference-applied",
        "deprecation",
        "sunset",
        "x-total-count",
    }
)
"""Header fields that belong to the response itself. An allow-list: we do not replay an unknown field."""

KEPT_PREFIXES = ("hx-",)
"""The beginnings of names that belong to the response itself: htmx acts on each of its own."""

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
    "x-amzn-requestid",
    "traceparent",
    "tracestate",
    "traceresponse",
    "baggage",
    "b3",
    "sentry-trace",
    "x-trace-id",
    "x-amzn-trace-id",
    "x-cloud-trace-context",
    "server-timing",
    "ratelimit",
    "ratelimit-policy",
    # A proxy obeys these, and sends a file in the body's place.
    "x-sendfile",
    "x-lighttpd-send-file",
}
NEVER_KEPT_PREFIXES = ("access-control-", "ratelimit", "x-ratelimit", "x-rate-limit", "x-b3-", "x-accel-")

TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The name of a header field (RFC 9110)."""


@lru_cache(maxsize=1024)
def refused(name: str) -> bool:
    """Return whether we never store and never replay this header field, under any policy."""
    lower = name.lower()
    return lower in NEVER_KEPT or lower.startswith(NEVER_KEPT_PREFIXES)


def faults_of_kept(names: Iterable[str]) -> list[str]:
    """Return a sentence for each name in `keep_headers` that names no field, or one that we never replay.

    A `*` at the end makes it the beginning of names. Whatever the beginning, `is_kept` leaves out what we never replay.
    """
    faults = []
    for name in names:
        begins = name.removesuffix("*")
        if name == "*":
            faults.append(
                "'*' names every field, also those of one caller or of one exchange. Write the names, or how they begin: "
                "'X-Shop-*'."
            )
        elif not TOKEN.fullmatch(name):
            faults.append(f"{name!r} is not the name of a header field.")
        elif "*" in begins:
            faults.append(
                f"{name!r} is not the name of a header field, nor its beginning: '*' may be its last character."
            )
        elif refused(begins) or (begins != name and _is_family_of_refused(begins.lower())):
            whole = "" if begins == name else " If you mean others, write their whole names."
            faults.append(
                f"{name} belongs to one caller or to one exchange and is never replayed. "
                f"Set it in an after_request hook: those run on every replay too.{whole}"
            )
    return faults


def _is_family_of_refused(begins: str) -> bool:
    """Return whether this ends with a hyphen, and all the names we know that begin so are never kept: `set-`, `proxy-`."""
    never, kept = (*NEVER_KEPT, *NEVER_KEPT_PREFIXES), (*KEPT_FIELDS, *KEPT_PREFIXES)
    found = [name for name in (*never, *kept) if name.startswith(begins)]
    return begins.endswith("-") and bool(found) and not any(name in kept for name in found)


@lru_cache(maxsize=4096)
def is_kept(name: str, keep_headers: frozenset[str]) -> bool:
    """Return whether a policy with these `keep_headers` keeps the field of this lower-case name."""
    if refused(name):
        return False
    named = {each.lower() for each in keep_headers}
    begins = (*KEPT_PREFIXES, *(each[:-1] for each in named if each.endswith("*") and each != "*"))
    return name in KEPT_FIELDS or name in named or name.startswith(begins)


@lru_cache(maxsize=1024)
def lost_names(names: frozenset[str], keep_headers: frozenset[str]) -> frozenset[str]:
    """Return which of these lower-case names of fields a replay lacks, without a rule that says why."""
    return frozenset(name for name in names if not is_kept(name, keep_headers) and not refused(name))
