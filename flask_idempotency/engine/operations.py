"""The catalogue of an application's inboxes and tasks, and the policy of any record, by its operation.

Endpoints have their policies in `web.policies`. Inboxes and tasks add theirs here. Janitor, commands and doctor ask here first.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, Final

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import RequestInfo, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.registrations import is_same
from flask_idempotency.engine.values import valueclass

MESSAGE: Final = "message"
"""The method in the records of messages. HTTP methods of a policy are in upper case, so no request has this one."""

CONSUMERS: Final = ("inbox:", "task:")
"""How the operations of inboxes and tasks begin."""

UNKNOWN_RUNTIME_SECONDS: Final = 366 * 24 * 3600.0
"""How long a worker counts as alive if this process does not know its operation: it frees no such key."""

_UNKNOWN: Final = Policy(max_runtime=UNKNOWN_RUNTIME_SECONDS, keep=90 * 24 * 3600.0)


@valueclass(frozen=True, slots=True)
class Operation:
    """One inbox or task: its policy, and how a value becomes what its records hold."""

    name: str
    """As records show it, such as `inbox:billing`."""
    policy: Policy
    stored: Callable[[Any], StoredResponse]
    """Raises `TypeError` or `ValueError` for a value that replays cannot return."""
    owner: str = ""
    """The task that has this name for itself. Empty: the name was given, and several may share it."""


class Operations:
    """The inboxes and tasks that this process knows, by name. Consumers add them; resolvers and commands ask."""

    def __init__(self) -> None:
        self._known: dict[str, Operation] = {}
        self._finders: list[Callable[[], object]] = []
        self._lock = Lock()

    def add(self, operation: Operation) -> None:
        """Add an operation. The same one twice changes nothing.

        Raises `ConfigurationError` for two policies of one name, and for two tasks whose functions happen to have one name.
        """
        with self._lock:
            known = self._known.setdefault(operation.name, operation)
        if known.owner != operation.owner:
            tasks = " and ".join(sorted(filter(None, (known.owner, operation.owner))))
            raise ConfigurationError(
                f"{operation.name}: {tasks} would share their keys, because that is the name of their function. Give each task "
                "its own scope, or one scope to both: @idempotent_task(name=…)."
            )
        if known.policy == operation.policy:
            return
        if is_same(known.policy, operation.policy):
            # A factory made it for its next application, with functions of its own.
            self._known[operation.name] = operation
        else:
            raise ConfigurationError(
                f"{operation.name}: this application has one of this name already, with another policy. Make it once and "
                "import it, or give this one another name."
            )

    def discover(self, find: Callable[[], object]) -> None:
        """Call this once, when an operation is looked for, to add operations that are defined elsewhere."""
        self._finders.append(find)

    def get(self, name: str) -> Operation | None:
        """Return the operation of this name. None: this process does not know it."""
        if name not in self._known:
            self._discover()
        return self._known.get(name)

    def policy_of(self, about: RequestInfo, endpoints: Callable[[str, str], Policy]) -> Policy:
        """Return the policy of the operation of this record. `endpoints` returns that of an endpoint and method.

        For an inbox or a task that this process does not know: one whose worker counts as alive for a year.
        """
        if about.method != MESSAGE:
            return endpoints(about.operation, about.method)
        known = self.get(about.operation)
        return _UNKNOWN if known is None else known.policy

    def names(self) -> list[str]:
        """Return the names of all operations, sorted."""
        self._discover()
        return sorted(self._known)

    def _discover(self) -> None:
        while self._finders:
            self._finders.pop(0)()
