"""The policy document: what the expired draft-ietf-httpapi-idempotency-key-header-07 says that a resource must publish.

`facts_of` says what a policy means to a client, in the members of `policy-1.schema.json`. OpenAPI documents have the same
members under `x-idempotency`. `publish` serves the document for all operations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote

from flask import Flask, Response, request

from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, UUID_LENGTH, Decision, Policy
from flask_idempotency.openapi.operations import Application, Operation, Precedence
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.browser import public_response
from flask_idempotency.web.key_status import route_everywhere
from flask_idempotency.web.principals import may_have_httpauth
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import POLICY_PATH
from flask_idempotency.web.request_state import context

SPECIFICATION: Final = "https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07"
"""It names the version: -07 has expired, and a later one may ask for something else."""

SCHEMA_PATH: Final = f"{POLICY_PATH}/policy-1.schema.json"
ENDPOINT: Final = "idempotency_policy"
SCHEMA_ENDPOINT: Final = "idempotency_policy_schema"

KEY_CHARACTERS: Final = "[!-~]"
"""What each character of a key matches, whatever its format. A space, which an RFC 8941 string may hold, does not."""

NEVER_DESCRIBED: Final = frozenset({"misconfigured", "response-not-kept", "unknown-operation", "void-not-offered"})
"""Problem codes that no operation promises: a fault of the service, a body that is missing under the status of the first
response, and faults of a request about the status of a key."""


# What a policy means to a client.


_OCCURS_IF: Final[Mapping[str, Callable[[Policy, Any], bool]]] = {
    "missing-key": lambda policy, state: policy.required,
    "request-too-large": lambda policy, state: policy.max_request_body is not None,
    "memory-lost": lambda policy, state: state.built.data_loss is not None,
    "not-committed": lambda policy, state: policy.effects == "transactional",
    "commit-unknown": lambda policy, state: policy.effects == "transactional" and not policy.required,
    "transaction-conflict": lambda policy, state: policy.effects == "transactional",
    "request-paused": lambda policy, state: policy.effects == "steps",
    "key-voided": lambda policy, state: policy.void,
    "key-expired": lambda policy, state: policy.lifetime > policy.keep,
    "quota-exceeded": lambda policy, state: state.settings.quota is not None or state.loaders.quota is not None,
    "replay-forbidden": lambda policy, state: state.loaders.replay_guard is not None,
    "principal-required": lambda policy, state: state.settings.allow_anonymous is not True,
}
"""When a client can get these problem codes. It can always get the others that are not `NEVER_DESCRIBED`, also new ones."""


def facts_of(policy: Policy, application: Application, *, deferred: bool = False) -> dict[str, Any]:
    """Return what a client must know of this policy. It names no endpoint, lease, store or quota.

    `deferred`: the claim is made below the decorators of the view.
    """
    profile = PROFILES[policy.profile]
    statuses = {code: profile.statuses.get(code) or problem.status for code, problem in PROBLEMS.items()}
    if not application.names_callers and not (deferred and may_have_httpauth()):
        # The application cannot name the caller whose credentials the request has, so signing in does not help.
        statuses["principal-required"] = 500
    uuid = policy.key_format == "uuid"
    pattern = None if policy.key_format in ("any", "uuid") else ecma_pattern(policy.key_format)
    return {
        "header": policy.header[0],
        "aliases": list(policy.header[1:]),
        "form_field": policy.form_field,
        "required": policy.required,
        "key": {
            "format": policy.key_format if policy.key_format in ("any", "uuid") else "pattern",
            "pattern": pattern,
            "characters": KEY_CHARACTERS,
            "min_length": UUID_LENGTH if uuid else 1,
            "max_length": UUID_LENGTH if uuid else policy.max_key_length,
            "case_sensitive": True,
        },
        "void": policy.void,
        "unique_per": [*application.unique_per, *(["operation"] if policy.scope == "operation" else [])],
        "same_request": {
            "by": "meaning" if policy.fingerprint == "canonical" else "bytes",
            "headers": list(policy.fingerprint_headers),
            "ignored_fields": list(policy.ignore_fields),
        },
        "lifetime": _whole(policy.keep),
        **({"remembered": _whole(policy.lifetime)} if policy.lifetime > policy.keep else {}),
        "in_flight": policy.in_flight,
        "promise": promise_of(policy, forgets=application.forgets),
        "statuses": None if policy.decide is not None else statuses_of(policy),
        "replay_header": policy.replayed_header[0][0] if policy.replayed_header else None,
        "problems": {
            code: status
            for code, status in statuses.items()
            if code not in NEVER_DESCRIBED and (code not in _OCCURS_IF or _OCCURS_IF[code](policy, application.state))
        },
    }


def _whole(seconds: float) -> float:
    return int(seconds) if seconds == int(seconds) else seconds


def promise_of(policy: Policy, *, forgets: bool = False) -> str:
    """Return how often the effect of one key can happen: see docs/how-it-works/promises.md.

    `forgets`: the store may lose a key that has run, and let it run again.
    """
    if policy.on_store_down == "allow":
        return "at-least-once"
    if policy.effects == "marked":
        # Past the point of no return, no rule of the policy lets the view run again. Only a key that is lost does.
        return "at-least-once" if forgets else "at-most-once"
    again = forgets or policy.on_expiry is OnExpiry.TAKEOVER or _repeats(policy)
    if forgets and policy.has_plain_step:
        return "at-least-once"
    if policy.effects == "plain":
        return "at-least-once" if again else "at-most-once"
    return "effect-once" if again else "at-most-once"


def _repeats(policy: Policy) -> bool:
    """Return whether the key may run again after a view that may have had its effect.

    It has had none if it responded with a 4xx, because the application lists those, or with a status released by default.
    """
    if policy.decide is not None:
        return True
    statuses = {*range(100, 400), *range(500, 600)} - RELEASED_BY_DEFAULT
    decided = {_decided(policy, 500, Exception()), *(_decided(policy, status) for status in statuses)}
    return Decision.RELEASE in decided


_MEANS: Final[Mapping[Decision, str]] = {
    Decision.KEEP: "kept",
    Decision.RELEASE: "released",
    Decision.QUARANTINE: "unknown",
}


def statuses_of(policy: Policy) -> dict[str, Any]:
    """Return the statuses of responses that are kept, and of those after which the key may run again.

    A number is more specific than its class, such as "4xx". A status in neither list leaves the outcome unknown. What an
    unhandled exception does stands apart: `keep_statuses` does not keep its 500.
    """
    lists: dict[Decision, list[int | str]] = {Decision.KEEP: [], Decision.RELEASE: []}
    for first in range(200, 600, 100):
        decided: dict[Decision, list[int]] = {decision: [] for decision in Decision}
        for status in range(first, first + 100):
            decided[_decided(policy, status)].append(status)
        most = max(decided, key=lambda decision: len(decided[decision]))
        # Where some statuses are in neither list, a class in one of them would include them.
        whole = most if not decided[Decision.QUARANTINE] else None
        for decision, statuses in lists.items():
            statuses += [f"{first // 100}xx"] if decision is whole else decided[decision]
    return {
        "kept": lists[Decision.KEEP],
        "released": lists[Decision.RELEASE],
        "exception": _MEANS[_decided(policy, 500, Exception())],
    }


def _decided(policy: Policy, status: int, error: Exception | None = None) -> Decision:
    """Return what becomes of the key of a view that responds with this status, or raises."""
    return policy.settled_as(policy.stated(response=None, status=status, error=error), past_point=False)


_ECMA: Final = re.compile(
    r"""
    (?: (?P<class> \[ \^? (?: \\[dDwWsSbtnrfv\\/^$.*+?()\[\]{}|-] | \\x[0-9A-Fa-f]{2} | [^\\\[\]] )+ \] )
      | (?P<atom> \\[dDwWsSbBtnrfv\\/^$.*+?()\[\]{}|] | \\x[0-9A-Fa-f]{2} | [^\\\[\](){}*+?|] | \| )
      | (?P<open> \( (?: \?: | \?= | \?! | (?!\?) ) )
      | (?P<close> \) )
    )
    (?P<quantifier> (?: [*+?] | \{ \d+ (?: , \d* )? \} ) \?? (?! [*+?{] ) )?
    """,
    re.VERBOSE,
)


def ecma_pattern(pattern: str) -> str | None:
    """Return this regular expression for a whole key as ECMA-262 writes it. None: it may mean something else there.

    JSON Schema and OpenAPI search for a pattern, so it is anchored here. Python has inline flags, named groups, possessive
    quantifiers, `\\A`, `\\Z` and `{,n}`, which ECMA-262 reads otherwise or not at all.
    """
    if not pattern.isascii():
        return None
    position, opened = 0, [""]
    while position < len(pattern):
        token = _ECMA.match(pattern, position)
        if token is None:
            return None
        if token["open"]:
            opened.append(token["open"])
        asserted = token["atom"] in ("^", "$", r"\b", r"\B") or (token["close"] and opened.pop() in ("(?=", "(?!"))
        if asserted and token["quantifier"]:
            return None
        position = token.end()
    return f"^(?:{pattern})$"


# The document.


def policy_document(application: Application, domains: frozenset[str]) -> dict[str, Any]:
    """Return the policy document of an application for the hosts of these domains. Paths begin at its root."""
    settings = application.state.settings
    defaults = facts_of(settings.policy, application)
    status_url = application.status_url(domains)
    operations: list[dict[str, Any]] = []
    for path, method, facts in sorted(_listed(application, domains), key=lambda each: each[:2]):
        differs = {
            name: value
            for name, value in facts.items()
            if value != (status_url if name == "status_url" else defaults.get(name, []))
        }
        same = next(
            (each for each in operations if each == {"path": path, "methods": each["methods"], **differs}), None
        )
        if same is None:
            operations.append({"path": path, "methods": [method], **differs})
        elif method not in same["methods"]:
            same["methods"].append(method)
    return {
        "version": 1,
        "specification": SPECIFICATION,
        "documentation": settings.docs_url,
        "status_url": status_url,
        "defaults": defaults,
        "operations": operations,
    }


def _listed(application: Application, domains: frozenset[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and facts of each operation about which a path can say what holds.

    The facts have `except`: paths that fit and that another operation serves otherwise. An operation is left out if a client
    cannot see which values of its path reach it.
    """
    by_method: dict[str, list[tuple[Operation, dict[str, Any] | None]]] = {}
    for each in application.operations(domains):
        facts = None
        if each.guarded:
            facts = facts_of(each.resolved.policy, application, deferred=each.resolved.deferred)
            facts["status_url"] = application.status_url_of(each, domains)
        by_method.setdefault(each.method, []).append((each, facts))
    for operations in by_method.values():
        for operation, facts in operations:
            if facts is None or not operation.resolved.policy.published:
                continue
            others = [(other, operation.precedence(other)) for other, its in operations if its != facts]
            by_value = (Precedence.OPEN, Precedence.FIRST) if operation.limited else (Precedence.OPEN,)
            if any(precedence in by_value for _, precedence in others):
                continue
            exceptions = {
                other.path
                for other, precedence in others
                if precedence is Precedence.SECOND and other.resolved.policy.published
            }
            yield operation.path, operation.method, {"except": sorted(exceptions), **facts}


_MOST_DOCUMENTS: Final = 64
"""How many documents a process keeps. Clients choose the host, and an application with many hosts has one for each."""


def publish(app: Flask, state: Any) -> None:
    """Serve the policy document, and its JSON Schema. `state` is the entry in `app.extensions`."""
    schema = files(__package__).joinpath("policy-1.schema.json").read_bytes()
    application = Application(app, state)

    # At the first request everything is registered and configured, and it does not change any more.
    @lru_cache(_MOST_DOCUMENTS)
    def made(domains: frozenset[str]) -> dict[str, Any]:
        return policy_document(application, domains)

    def policy(**_: Any) -> Response:
        adapter = context.get().url_adapter
        document = made(application.domains_of(adapter.server_name if app.url_map.host_matching else adapter.subdomain))
        # Where the application is mounted, its clients see longer paths.
        document = _mounted(document, request.root_path) if request.root_path else document
        response = public_response((json.dumps(document, indent=2) + "\n").encode(), "application/json", max_age=3600)
        response.headers["Link"] = f'<{quote(request.root_path)}{SCHEMA_PATH}>; rel="describedby"'
        return response

    def policy_schema(**_: Any) -> Response:
        return public_response(schema, "application/schema+json", max_age=3600)

    route_everywhere(app, POLICY_PATH, ENDPOINT, policy)
    route_everywhere(app, SCHEMA_PATH, SCHEMA_ENDPOINT, policy_schema)


def _mounted(document: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return this document, or this operation of one, with paths that begin at the root of the host."""
    longer: dict[str, Any] = {name: root + document[name] for name in ("path", "status_url") if document.get(name)}
    if "except" in document:
        longer["except"] = [root + each for each in document["except"]]
    if "operations" in document:
        longer["operations"] = [_mounted(each, root) for each in document["operations"]]
    return {**document, **longer}
