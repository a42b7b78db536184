"""The names that applications, test suites and authors of stores may import: what `__all__` of these modules has.

A name outside of them is internal, also one without an underscore: it may change in any release.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Final

import janitor.tasks

MODULES: Final = (
    "flask_idempotency",
    "flask_idempotency.client",
    "flask_idempotency.client.httpx",
    "flask_idempotency.client.requests",
    "flask_idempotency.codec.key_services",
    "flask_idempotency.codec.key_sources",
    "flask_idempotency.codec.keyring",
    "flask_idempotency.console",
    "flask_idempotency.consumers",
    "flask_idempotency.consumers.celery",
    "flask_idempotency.consumers.kafka",
    "flask_idempotency.consumers.rabbit",
    "flask_idempotency.consumers.sqs",
    "flask_idempotency.engine.activity",
    "flask_idempotency.engine.audit",
    "flask_idempotency.engine.capabilities",
    "flask_idempotency.engine.errors",
    "flask_idempotency.engine.events",
    "flask_idempotency.engine.keys",
    "flask_idempotency.engine.model",
    "flask_idempotency.engine.observations",
    "flask_idempotency.engine.quota",
    "flask_idempotency.engine.store",
    "flask_idempotency.janitor.tasks",
    "flask_idempotency.metrics",
    "flask_idempotency.openapi",
    "flask_idempotency.openapi.apispec",
    "flask_idempotency.outbox",
    "flask_idempotency.signals",
    "flask_idempotency.sql",
    "flask_idempotency.steps.steps",
    "flask_idempotency.stores.memory",
    "flask_idempotency.testing",
    "flask_idempotency.testing.contract",
)

AT_MOST: Final = 400
"""How many names may be public: each one is a promise that a later version has to keep."""


def module(name: str) -> Any:
    """Import a module. A checkout has the janitor at its top."""
    return janitor.tasks if name == "flask_idempotency.janitor.tasks" else importlib.import_module(name)


def names() -> Iterator[tuple[str, str]]:
    """Yield every public name with its module. A few are in two modules, for one object."""
    for each in MODULES:
        for name in sorted(module(each).__all__):
            yield each, name


def page(notice: str) -> str:
    """Return the page with every public name, by module."""
    lines = [
        "# Public names",
        "",
        notice,
        f"You may rely on these {len(list(names()))} names, those in `__all__` of the modules below, on the attributes of "
        "their classes that have no leading underscore, and on the settings, problem codes, events and commands of the "
        "[reference](index.md).",
        "Everything else is internal and may change in any release. From 1.0 on, a public name is removed only in a new "
        "major version, after a `DeprecationWarning` in a minor one. The [API](api/index.md) describes each name; in a "
        "checkout, its docstring does.",
        "",
    ]
    for each in MODULES:
        lines += [f"## `{each}`", "", ", ".join(f"`{name}`" for where, name in names() if where == each), ""]
    return "\n".join(lines)
