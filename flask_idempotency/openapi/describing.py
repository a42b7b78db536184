"""Add to an OpenAPI document what the extension does: the key's header, the problems, and the headers of replays.

What the document says already stays. Operations whose endpoint takes no keys stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from flask import Flask, Response

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import Policy
from flask_idempotency.openapi.operations import Application, Operation, shape
from flask_idempotency.openapi.policy_document import facts_of
from flask_idempotency.settings.profiles import PROFILES, Dialect, Profile
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import Problem, render

EXTENSION: Final = "x-idempotency"
STATUSES: Final = frozenset({400, 409, 413, 422, 429, 503})
"""The statuses that are described. The others mean a fault of the service, or that the caller lost a permission."""

_METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace", "query")
_VERSION: Final = re.compile(r"3\.[012](\.\d+)?([-+].*)?")
_BARE_KEY: Final = r"^[!#-+\-.-~]+$"
"""Visible ASCII without the quote and the comma. A key with one of those must be quoted."""

_CODES: Final = {
    "type": "string",
    "description": "The problem's code. Others may be added.",
    "x-extensible-enum": list(PROBLEMS),
}
_SCHEMAS: Final[Mapping[Dialect, tuple[str, dict[str, Any]]]] = {
    "problem": (
        "IdempotencyProblem",
        {
            "type": "object",
            "description": "A problem document (RFC 9457) about the idempotency key.",
            "required": ["type", "title", "status", "detail", "code"],
            "properties": {
                "type": {"type": "string", "description": "The page that explains this code."},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
                "code": _CODES,
            },
        },
    ),
    "stripe": (
        "IdempotencyStripeError",
        {
            "type": "object",
            "description": "An error about the idempotency key, in the form of Stripe's errors.",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["type", "message", "doc_url"],
                    "properties": {
                        "type": {"type": "string"},
                        "code": {"type": "string"},
                        "message": {"type": "string"},
                        "doc_url": {"type": "string", "description": "The page that explains this error."},
                    },
                }
            },
        },
    ),
    "playbook": (
        "IdempotencyPlaybookError",
        {
            "type": "object",
            "description": "An error about the idempotency key.",
            "required": ["error_code", "error_message"],
            "properties": {"error_code": {"type": "string"}, "error_message": {"type": "string"}},
        },
    ),
}
"""By dialect the name and the schema of a problem's body."""


def describe(
    document: dict[str, Any], app: Flask, *, header: Literal["enforced", "optional"] = "enforced"
) -> dict[str, Any]:
    """Return a copy of this OpenAPI document that describes the idempotency of the application's operations.

    `header="optional"` never marks the key's header as required: for generated clients whose transport sends it. Describe as
    late as you can, such as when a client asks for the document, because policies may change until the first request. You can
    describe a described document again. If `IDEMPOTENCY_ENABLED` is False, the copy is equal.

    Raises `ValueError` for a document that is not OpenAPI 3.0, 3.1 or 3.2, and `ConfigurationError` for an application
    without the extension.
    """
    if header not in ("enforced", "optional"):
        raise ValueError(f'header={header!r}: must be "enforced" or "optional".')
    version = document.get("openapi")
    if not isinstance(version, str) or _VERSION.fullmatch(version) is None:
        found = f"swagger: {document['swagger']!r}" if "swagger" in document else f"openapi: {version!r}"
        raise ValueError(f"This document has {found}. Only OpenAPI 3.0, 3.1 and 3.2 can be described.")
    state: Any = app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError(
            "describe(document, app): this application has no Idempotency extension. Call Idempotency(app) before."
        )
    described: dict[str, Any] = _copy(document)
    if state.settings.enabled:
        _Description(described, Application(app, state), enforced=header == "enforced").add()
    return described


@dataclass
class _Description:
    """Describes one document in place. No two parts of it may be one object."""

    document: dict[str, Any]
    application: Application
    enforced: bool

    def __post_init__(self) -> None:
        self._by_domain: dict[str | None, dict[tuple[str, str], list[Operation]]] = {}

    def add(self) -> None:
        """Describe each operation that takes keys."""
        paths = self.document.get("paths") or {}
        for path, item in list(paths.items()):
            if not isinstance(item, dict) or not str(path).startswith("/"):
                continue
            # Other paths may refer to the same item, and have other policies.
            whole = self._resolved(item) if "$ref" in item else item
            found = False
            for method, operation in _operations(whole):
                promised = self._promised(path, method, whole, operation)
                if promised is not None:
                    self._describe(operation, whole, *promised)
                    found = True
            if found:
                paths[path] = whole

    def _promised(
        self, path: str, method: str, item: Mapping[str, Any], operation: Mapping[str, Any]
    ) -> tuple[Policy, dict[str, Any]] | None:
        """Return the policy of the rules that this path means, and its facts.

        None: one of them takes no keys, they do not have the same policy, or none is of this application.
        """
        servers: dict[str | None, list[str]] = {}
        for url in self._servers(item, operation):
            prefixes = servers.setdefault(self._domain(url), [])
            if prefix := url.path.strip("/"):
                prefixes.append(f"/{prefix}")
        found: list[Operation] = []
        for domain, prefixes in (servers or {None: []}).items():
            # As the specification has it; or the application is mounted there; or the document has whole paths.
            candidates = [*(prefix + path for prefix in prefixes), path]
            candidates += [path.removeprefix(prefix) for prefix in prefixes if path.startswith(f"{prefix}/")]
            served = self._served(domain)
            found += next((here for each in candidates if (here := served.get((shape(each), method)))), [])
        if not found or not all(each.guarded for each in found):
            return None
        facts = [facts_of(each.resolved.policy, self.application, deferred=each.resolved.deferred) for each in found]
        return (found[0].resolved.policy, facts[0]) if all(each == facts[0] for each in facts) else None

    def _served(self, domain: str | None) -> dict[tuple[str, str], list[Operation]]:
        """Return by shape and method the operations of this host or subdomain. None: of all."""
        served = self._by_domain.get(domain)
        if served is None:
            domains = None if domain is None else self.application.domains_of(domain)
            served = self._by_domain[domain] = {}
            for each in self.application.operations(domains):
                # A document by hand may name the parameters of a path otherwise than its rule.
                served.setdefault((shape(each.path), each.method), []).append(each)
        return served

    def _domain(self, url: SplitResult) -> str | None:
        """Return the host or subdomain by which the application routes requests to this server. None: it is not known."""
        app = self.application.app
        if app.url_map.host_matching:
            name = url.netloc.rpartition("@")[2].lower()
            known = name.removesuffix(":443" if url.scheme == "https" else ":80")
        elif not app.subdomain_matching:
            return app.url_map.default_subdomain
        else:
            own = f".{app.config['SERVER_NAME']}"
            if app.config["SERVER_NAME"] is None or not f".{url.netloc.lower()}".endswith(own):
                return None
            known = f".{url.netloc.lower()}".removesuffix(own).removeprefix(".")
        # A proxy may serve it under a name that the application does not know.
        return known if self.application.serves(known) else None

    def _servers(self, item: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[SplitResult]:
        """Yield the addresses of the servers: those of the operation, else of the path, else of the document."""
        for server in operation.get("servers") or item.get("servers") or self.document.get("servers") or ():
            if not isinstance(server, dict):
                continue
            url = str(server.get("url", ""))
            for name, variable in (server.get("variables") or {}).items():
                default = variable.get("default", "") if isinstance(variable, dict) else ""
                url = url.replace(f"{{{name}}}", str(default))
            with suppress(ValueError):  # it is no address yet
                yield urlsplit(url)

    def _describe(
        self, operation: dict[str, Any], item: Mapping[str, Any], policy: Policy, facts: Mapping[str, Any]
    ) -> None:
        self._add_parameter(operation, item, facts)
        responses = operation["responses"] = operation.get("responses") or {}
        # In YAML, a response that is still to be written is null.
        responses |= {status: {"description": ""} for status, response in responses.items() if response is None}
        for status, response in responses.items():
            if re.fullmatch(r"[23](\d\d|XX)", str(status)) and policy.replayed_header:
                responses[status] = whole = self._resolved(response)
                for name, value in policy.replayed_header:
                    about = "Present if this is the stored response of an earlier request with the same key."
                    _add_field(whole, name, {"description": about, "schema": {"type": "string", "enum": [value]}})
        self._add_problems(responses, PROFILES[policy.profile], facts["problems"])
        own = operation.get(EXTENSION)
        if own is None or isinstance(own, dict):
            operation[EXTENSION] = {**facts, **(own or {})}

    # -- the request

    def _add_parameter(self, operation: dict[str, Any], item: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Add the header of the key, or what the operation leaves out of it."""
        name = facts["header"]
        parameters = operation["parameters"] = operation.get("parameters") or []
        mine = next((number for number, each in enumerate(parameters) if self._is_header(each, name)), len(parameters))
        if mine == len(parameters):
            # One of the path is for all its operations. The operation gets its copy, which precedes it.
            shared: Any = next((each for each in item.get("parameters") or () if self._is_header(each, name)), {})
            parameters.append(_copy(shared))
        parameter = parameters[mine] = self._resolved(parameters[mine])
        parameter.setdefault("name", name)
        parameter.setdefault("in", "header")
        form = facts["form_field"] and f" A form may carry it in the field `{facts['form_field']}`, which then counts."
        about = (
            "A key that you choose for this request, such as a random UUID. Send the same key with each retry: a retry gets "
            f"the stored response for {facts['lifetime']} seconds. Do not use the key for another request.{form or ''}"
        )
        parameter.setdefault("description", about)
        # A form may carry the key instead.
        if facts["required"] and facts["form_field"] is None and self.enforced:
            parameter["required"] = True
        else:
            parameter.setdefault("required", False)
        schema = parameter.setdefault("schema", {}) if "content" not in parameter else None
        if isinstance(schema, dict) and "$ref" not in schema:
            for keyword, value in _schema_of_key(facts["key"]).items():
                schema.setdefault(keyword, value)

    def _is_header(self, parameter: Any, name: str) -> bool:
        found = self._resolved(parameter) or {}
        return found.get("in") == "header" and str(found.get("name")).lower() == name.lower()

    # -- the responses

    def _add_problems(self, responses: dict[Any, Any], profile: Profile, problems: Mapping[str, int]) -> None:
        for status in sorted(STATUSES & set(problems.values())):
            codes = [code for code, each in problems.items() if each == status]
            # In YAML, a status without quotes is a number.
            name = next((each for each in responses if str(each) == str(status)), None)
            if name is None:
                name = str(status)
                about = " ".join(f"`{code}`: {PROBLEMS[code].title}." for code in codes)
                # A range or the default stood for this status until now.
                general: Any = next(
                    (responses[each] for each in (f"{status // 100}XX", "default") if each in responses), {}
                )
                general = self._resolved(general)
                responses[name] = {**({} if "$ref" in general else _copy(general)), "description": about}
            response = responses[name] = self._resolved(responses[name])
            if "$ref" not in response:
                self._add_problem(response, profile, codes)

    def _add_problem(self, response: dict[str, Any], profile: Profile, codes: list[str]) -> None:
        """Add what the problems with these codes look like, which have the status of this response."""
        if any("Retry-After" in PROBLEMS[code].again for code in codes):
            about = "Seconds to wait before you send the same request with the same key again."
            _add_field(response, "Retry-After", {"description": about, "schema": {"type": "integer", "minimum": 1}})
        state = self.application.state
        if state.loaders.problem_renderer is not None:
            return  # the application alone knows how its problems look
        shown = {
            code: render(Problem(code), profile=profile, docs_url=state.settings.docs_url, response_class=Response)
            for code in codes
        }
        media_type = str(shown[codes[0]].mimetype)
        content = response["content"] = response.get("content") or {}
        name = next((each for each in content if each.partition(";")[0].strip().lower() == media_type), None)
        ours = self._component(*_SCHEMAS[profile.body])
        if name is None:
            media = content[media_type] = {"schema": ours}
        else:
            media = content[name] = content[name] if isinstance(content[name], dict) else {"schema": ours}
            theirs = {} if media.get("schema") is None else media["schema"]
            choices = theirs["anyOf"] if isinstance(theirs, dict) and theirs.keys() == {"anyOf"} else [theirs]
            if ours not in choices:
                # Ours first: it asks for more members, and a generated client takes the first that fits.
                media["schema"] = {"anyOf": [ours, *choices]}
        if "example" not in media:
            examples = {code: {"value": json.loads(each.get_data())} for code, each in shown.items()}
            media["examples"] = {**examples, **(media.get("examples") or {})}

    # -- the components

    def _component(self, name: str, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a reference to this schema. Take another name if the application has a schema of this one."""
        components = self.document["components"] = self.document.get("components") or {}
        schemas = components["schemas"] = components.get("schemas") or {}
        number, free = 1, name
        while schemas.get(free, schema) != schema:
            number += 1
            free = f"{name}{number}"
        schemas.setdefault(free, _copy(schema))
        return {"$ref": f"#/components/schemas/{free}"}

    def _resolved(self, value: Any) -> Any:
        """Return a copy of what this refers to. Return the value itself if it is no reference in this document."""
        target, followed = value, 0
        while isinstance(target, dict) and isinstance(reference := target.get("$ref"), str) and followed < 10:
            found: Any = self.document if reference.startswith("#/") else None
            for part in reference[2:].split("/"):
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and part.isdecimal():
                    found = dict(enumerate(found)).get(int(part))
                else:
                    found = found.get(part) if isinstance(found, dict) else None
            if not isinstance(found, dict):
                return value
            # What stands beside a reference precedes what it refers to.
            target = {**found, **{name: each for name, each in target.items() if name != "$ref"}}
            followed += 1
        return value if target is value or "$ref" in target else _copy(target)


def _copy(value: Any) -> Any:
    """Return a copy of this document in which no object occurs twice, unlike in one of `copy.deepcopy`."""
    if isinstance(value, Mapping):
        return {name: _copy(each) for name, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list | tuple) else value


def _operations(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each method of a path item, in upper case, with its operation."""
    named = [*((method, item.get(method)) for method in _METHODS), *(item.get("additionalOperations") or {}).items()]
    for method, operation in named:
        if isinstance(operation, dict):
            yield method.upper(), operation


def _add_field(response: dict[str, Any], name: str, header: dict[str, Any]) -> None:
    """Add a header field to this response, unless it has one of this name."""
    if "$ref" not in response:
        fields = response["headers"] = response.get("headers") or {}
        if name.lower() not in map(str.lower, fields):
            fields[name] = header


def _schema_of_key(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a key as a header carries it without quotes."""
    schema = {"type": "string", "minLength": key["min_length"], "maxLength": key["max_length"]}
    if key["format"] == "uuid":
        return {**schema, "format": "uuid"}
    pattern = _BARE_KEY if key["format"] == "any" else key["pattern"]
    return schema if pattern is None else {**schema, "pattern": pattern}
