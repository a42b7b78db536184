"""The operations that an application serves on one host, and which of them a path in a document speaks for.

A document knows a path as `/payments/{id}`, without the converter. So other rules may serve some of the paths that fit it,
and rules of other hosts never do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import zip_longest
from typing import Any, Final

from flask import Flask
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule

from flask_idempotency.assembly import is_process_local
from flask_idempotency.web.key_status import HOST_VARIABLE, SUBDOMAIN_VARIABLE, find_status_views
from flask_idempotency.web.policies import ResolvedPolicy
from flask_idempotency.web.principals import extensions_of, may_have_httpauth

# As Werkzeug reads a rule: `<name>`, `<converter:name>` or `<converter(arguments):name>`.
_VARIABLE: Final = re.compile(r"<(?:(?P<converter>[a-zA-Z_]\w*)(?P<arguments>\(.*?\))?:)?(?P<name>[a-zA-Z_]\w*)>")
_BRACES: Final = re.compile(r"\{[^{}]*\}")


def template(rule: Rule) -> str:
    """Return the path of a rule as OpenAPI writes it: `/payments/{id}`."""
    return _VARIABLE.sub(r"{\g<name>}", rule.rule)


def shape(path: str) -> str:
    """Return a path without the names of its parameters."""
    return _BRACES.sub("{}", path)


class Precedence(Enum):
    """Which of two rules serves a path that fits both of their templates."""

    NONE = "no path fits both"
    FIRST = "the first"
    SECOND = "the second"
    OPEN = "either, by the value or by the host"


@dataclass(frozen=True, slots=True)
class Operation:
    """One rule of the application under one method."""

    rule: Rule
    domain: str
    """The host or subdomain of the rule, as it is written there."""
    method: str
    resolved: ResolvedPolicy
    limited: bool
    """Whether its path takes only some values, such as numbers."""
    parts: tuple[tuple[int, str], ...]
    """For each part of the path how early Werkzeug tries it, and its text."""

    @property
    def path(self) -> str:
        """The path as a document has it."""
        return template(self.rule)

    @property
    def guarded(self) -> bool:
        """Whether it takes keys of clients and keeps its policy: not if it is only observed.

        A webhook takes the ids of its provider.
        """
        resolved = self.resolved
        kept = not resolved.exempt and not resolved.faults and not resolved.observed
        return kept and resolved.policy.principal is None

    def precedence(self, other: Operation) -> Precedence:
        """Return which of the two serves a path that fits both templates. This is the first.

        The braces of a template stand for one part of a path, also if the rule takes slashes there.
        """
        first, slashes = None, False
        for number, (own, its) in enumerate(zip_longest(self.parts, other.parts)):
            if own is None or its is None:
                return Precedence.NONE
            takes_rest = its[0] >= _REST
            if own != its:
                if own[0] == its[0] == _LITERAL or not (takes_rest or own[0] >= _REST or _overlap(own[1], its[1])):
                    return Precedence.NONE
                first = first or _first(own[0], its[0])
            elif first is None and own[0] == _TANGLED:
                first = Precedence.OPEN
            if takes_rest:
                slashes = its[0] == _TANGLED or number + 1 < len(self.parts)
                break
        if first is None or self.domain != other.domain or (slashes and first is Precedence.SECOND):
            return Precedence.OPEN
        return first


_LITERAL, _MIXED, _PURE, _REST, _TANGLED = 0, 1, 2, 1_000_000, 2_000_000
"""How early Werkzeug tries a part of a path. To `_PURE` comes the weight of the converter.

`_REST` is a variable that takes slashes and ends the path. `_TANGLED` takes slashes and more follows: Werkzeug tries all of it
as one part, whose place among others depends on what it has.
"""


def _first(own: int, its: int) -> Precedence:
    """Return which rule Werkzeug tries first, by the first parts of their paths that differ."""
    if own == _LITERAL:
        return Precedence.FIRST
    if its == _LITERAL:
        return Precedence.SECOND
    if _TANGLED in (own, its) or own == its:
        return Precedence.OPEN
    if own < its:
        return Precedence.FIRST
    # If both parts are variables, no document shows which values reach which rule.
    return Precedence.SECOND if its < _PURE else Precedence.OPEN


def _overlap(own: str, its: str) -> bool:
    """Return whether one text can fit both parts of a path. Of two with variables it is assumed."""
    variable = [_VARIABLE.search(each) is not None for each in (own, its)]
    if all(variable):
        return True
    pattern, text = (own, its) if variable[0] else (its, own)
    literals = [re.escape(each) for each in _VARIABLE.sub("\0", pattern).split("\0")]
    return re.fullmatch(".*".join(literals), text) is not None


class Application:
    """The parts of an application that decide what its policies mean."""

    def __init__(self, app: Flask, state: Any) -> None:
        """Take an application, and its entry in `app.extensions`, which a higher layer defines."""
        self.app = app
        self.state = state
        self._domains: dict[str, Map] = {}

    @property
    def forgets(self) -> bool:
        """Whether keys that the store has lost run again although no operator has said that they may."""
        detector = self.state.built.data_loss
        if detector is not None:
            return bool(detector.rules.after_loss != "refuse")
        return is_process_local(self.state.settings)

    @property
    def unique_per(self) -> list[str]:
        """The parts of a caller that separate keys."""
        loaders = self.state.loaders
        known = {"tenant": loaders.tenant is not None, "principal": self.names_callers or may_have_httpauth()}
        return [name for name, separates in known.items() if separates]

    @property
    def names_callers(self) -> bool:
        """Whether a loader or an extension that is set up here names callers before the view."""
        return self.state.loaders.principal is not None or bool(extensions_of(self.app))

    # -- hosts

    @cached_property
    def domains(self) -> frozenset[str]:
        """The hosts or subdomains of all rules, as they are written there."""
        return frozenset(self._domain_of(rule) for rule in self.app.url_map.iter_rules())

    def domains_of(self, name: str) -> frozenset[str]:
        """Return which of them this host or subdomain fits."""
        return frozenset(each for each in self.domains if self._fits(each, name))

    def serves(self, name: str) -> bool:
        """Return whether a rule of the application itself is for this host or subdomain."""
        own = self.domains - {f"<{each}>" for each in (HOST_VARIABLE, SUBDOMAIN_VARIABLE)}
        return bool(self.domains_of(name) & own)

    def _domain_of(self, rule: Rule) -> str:
        return (rule.host if self.app.url_map.host_matching else rule.subdomain) or ""

    def _fits(self, domain: str, name: str) -> bool:
        if "<" not in domain:
            return domain == name
        hosts = self.app.url_map.host_matching
        alone = self._domains.get(domain)
        if alone is None:
            # A map of this domain only: a map of all would find the most specific one.
            rule = Rule("/", host=domain, endpoint="x") if hosts else Rule("/", subdomain=domain, endpoint="x")
            alone = Map([rule], host_matching=hosts, converters=self.app.url_map.converters)
            self._domains[domain] = alone
        try:
            return (alone.bind(name) if hosts else alone.bind("localhost", subdomain=name)).test("/", method="GET")
        except HTTPException:
            return False  # no host has such a name

    # -- operations

    def operations(self, domains: frozenset[str] | None = None) -> list[Operation]:
        """Return each operation of these domains that can be reached, in the order of registration. None: of all domains."""
        found: dict[tuple[str, str, str], Operation] = {}
        for rule in self.app.url_map.iter_rules():
            domain = self._domain_of(rule)
            if rule.build_only or rule.websocket or (domains is not None and domain not in domains):
                continue
            parts = tuple(self._parts(rule))
            limited = any(
                each["arguments"] or each["converter"] not in (None, "default", "string", "path")
                for each in _VARIABLE.finditer(rule.rule)
            )
            for method in rule.methods or ():
                # The first of two equal rules serves the path.
                if (domain, rule.rule, method) not in found:
                    resolved = self.state.policies.look(rule.endpoint, method)
                    found[domain, rule.rule, method] = Operation(rule, domain, method, resolved, limited, parts)
        operations = [each for each in found.values() if each.rule.redirect_to is None]
        if domains is None:
            return operations
        # Of two equal rules, the one of a written host precedes the one of any host.
        written = {(each.rule.rule, each.method) for each in operations if "<" not in each.domain}
        return [each for each in operations if "<" not in each.domain or (each.rule.rule, each.method) not in written]

    def _parts(self, rule: Rule) -> Iterator[tuple[int, str]]:
        """Yield for each part of a path how early Werkzeug tries it, and its text."""
        text, converters = rule.rule, self.app.url_map.converters
        # A slash at the end is added by a redirect, or is optional.
        parts = _VARIABLE.sub(lambda found: found[0].replace("/", "\1"), text).strip("/").split("/")
        for number, part in enumerate(parts, 1):
            variables = list(_VARIABLE.finditer(part))
            classes = [converters.get(each["converter"] or "default") for each in variables]
            pure = len(variables) == 1 and variables[0][0] == part
            if not variables:
                yield _LITERAL, part
            elif not all(getattr(each, "part_isolating", True) for each in classes):
                yield _REST if pure and number == len(parts) and not text.endswith("/") else _TANGLED, _unnamed(part)
            elif pure:
                yield _PURE + int(getattr(classes[0], "weight", 100)), _unnamed(part)
            else:
                yield _MIXED, _unnamed(part)

    # -- the status of keys

    @cached_property
    def _status_views(self) -> dict[str, str]:
        return find_status_views(self.app)

    def status_url(self, domains: frozenset[str]) -> str | None:
        """Return where clients ask about keys of any operation, or None."""
        configured: str | None = self.state.settings.status_url
        return configured or self._status_path(self._status_views.get(""), domains, variables=frozenset())

    def status_url_of(self, operation: Operation, domains: frozenset[str]) -> str | None:
        """Return where clients ask about keys of this operation: the view that its refusals link to, or None."""
        name = operation.rule.endpoint.rpartition(".")[0]
        while name:
            if name in self._status_views and name in self.app.blueprints:
                variables = frozenset(each["name"] for each in _VARIABLE.finditer(operation.rule.rule))
                return self._status_path(self._status_views[name], domains, variables=variables)
            name = name.rpartition(".")[0]
        return self.status_url(domains)

    def _status_path(self, endpoint: str | None, domains: frozenset[str], *, variables: frozenset[str]) -> str | None:
        """Return the path of this status view, or None if it has parameters that the operation does not have."""
        for rule in self.app.url_map.iter_rules(endpoint) if endpoint is not None else ():
            own = {each["name"] for each in _VARIABLE.finditer(rule.rule)}
            if "GET" in (rule.methods or ()) and self._domain_of(rule) in domains and own <= variables:
                return template(rule)
        return None


def _unnamed(part: str) -> str:
    """Return a part of a rule in which all variables with the same converter have the same name."""
    return _VARIABLE.sub(lambda found: f"<{found['converter'] or 'default'}{found['arguments'] or ''}:x>", part)
