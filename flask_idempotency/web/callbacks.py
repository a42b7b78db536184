"""The functions that an application registers on the extension, and what they return for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from flask import Flask, Request

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import Identity, Scope, key_timestamp
from flask_idempotency.engine.model import VOIDED, Callers, ClaimRequest, Record
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.registrations import Kept, Registrations, is_same
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings import Settings
from flask_idempotency.settings.reading import FormerIdentity
from flask_idempotency.web.principals import Loader, checked, principal_by

if TYPE_CHECKING:
    from flask_idempotency.engine.operations import Operations
    from flask_idempotency.engine.quota import Quota
    from flask_idempotency.engine.recovery import Resolution, UnknownOutcome


Names = tuple[str | None, str | None]
"""A tenant and a principal."""


@valueclass(frozen=True, slots=True)
class ActFor:
    """What lets the janitor act for the caller of a request."""

    function: Callable[[str | None, str | None], Any]
    """Takes the principal and the tenant of the record."""
    instead_of: tuple[Any, ...] = ()
    """The `before_request` hooks that it replaces: the functions, or their names."""


@dataclass(eq=False)
class Callbacks:
    """The functions and inboxes that an application registered. It sets them before they are used; then we only read them."""

    principal: Loader | None = None
    tenant: Loader | None = None
    quota: Callable[[str | None], Quota | None] | None = None
    replay_guard: Callable[[Record], bool] | None = None
    problem_renderer: Callable[[Any], Any] | None = None
    act_for: ActFor | None = None
    resolvers: dict[str, Callable[[UnknownOutcome], Resolution]] = field(default_factory=dict)
    """By the endpoint, inbox or task whose keys they resolve."""
    shared: dict[str, Operations] = field(default_factory=dict)
    """Has the `operations` from their first use on. The applications of one extension object share it."""
    kept: Kept = field(default_factory=Kept)

    @property
    def operations(self) -> Operations:
        """The inboxes and tasks that this process knows."""
        from flask_idempotency.engine.operations import Operations  # for consumers, janitors and commands

        # Two threads get the same object.
        return self.shared.setdefault("operations", Operations())

    def names(self) -> list[str]:
        """Return the name of each function: that of its loader, or "resolver:" and the operation."""
        loaders = [name for name in _LOADERS if getattr(self, name) is not None]
        return [*loaders, *(RESOLVER + operation for operation in self.resolvers)]

    def get(self, name: str) -> Any:
        """Return the function of this name, or None."""
        return getattr(self, name) if name in _LOADERS else self.resolvers.get(name.removeprefix(RESOLVER))

    def put(self, name: str, function: Any) -> None:
        """Set the function of this name."""
        if name in _LOADERS:
            setattr(self, name, function)
        else:
            self.resolvers[name.removeprefix(RESOLVER)] = function


_LOADERS: Final = ("principal", "tenant", "quota", "replay_guard", "problem_renderer", "act_for")
RESOLVER: Final = "resolver:"
"""The beginning of the name of a resolver. The endpoint, inbox or task follows."""


class SharedCallbacks:
    """The functions that are registered on one `Idempotency`, and what each of its applications uses of them.

    A factory registers its closures for each application that it makes. Each application keeps its own: see
    `engine.registrations`.
    """

    def __init__(self, newest: Callbacks) -> None:
        self.newest = newest
        self._registrations = Registrations()
        self._used: WeakSet[Callbacks] = WeakSet()

    def set_up(self) -> Callbacks:
        """Return the functions of the next application. Later registrations reach it."""
        made = Callbacks()
        made.shared = self.newest.shared
        made.kept = self._registrations.set_up(self.newest.names())
        self._used.add(made)
        self._give()
        return made

    def put(self, name: str, function: Any) -> None:
        """Register a function. Raises `ConfigurationError` for a second resolver of one operation from another place."""
        former, first = self.newest.get(name), self._registrations.note(name)
        if former is not None and former is not function:
            if is_same(former, function) and (first or name in _LOADERS):
                self._registrations.replace(name, former)
            elif name in _LOADERS:
                self._registrations.forget(name)
            else:
                raise ConfigurationError(
                    f"resolver({name.removeprefix(RESOLVER)!r}): this endpoint has one already. Remove one of the two."
                )
        self.newest.put(name, function)
        self._give()

    def _give(self) -> None:
        for each in list(self._used):
            for name in self.newest.names():
                each.put(name, each.kept.values.get(name, self.newest.get(name)))


def load_tenant(loaders: Callbacks, app: Flask) -> str | None:
    """Return the tenant for which this request acts, or None."""
    return None if loaders.tenant is None else checked(app.ensure_sync(loaders.tenant)(), "tenant_loader")


def former_names(
    former: FormerIdentity, tenant: str | None, principal: str | None, request: Request, app: Flask, *, in_view: bool
) -> Names:
    """Return the tenant and the principal that this request had before the identity of keys was changed."""
    if former.tenant is not None:
        tenant = None if former.tenant is False else checked(app.ensure_sync(former.tenant)(), "former tenant_loader")
    match former.principal:
        case None:
            pass
        case False:
            principal = None
        case tuple(extensions):
            principal = principal_by(extensions, request, app, in_view=in_view)
        case loader:
            principal = checked(app.ensure_sync(loader)(), "former principal_loader")
    return tenant, principal


def callers_of(
    former: FormerIdentity, names: Names, before: Names, identities: Sequence[Identity]
) -> tuple[Callers | None, Callers | None]:
    """Return whose records count under the names of today, and under the former ones.

    A record of the former release shows its caller if it names what this caller is called today or was called then. One
    without a tenant or a principal, where this caller has one today, may be anyone's.
    """
    if not former.coarse:
        return None, None
    shown, every = list[set[str]](), list[set[str]]()
    for today, then in zip(names, before, strict=True):
        known = [name for name in (today, then) if name is not None]
        spelled = {*known, *(identity.pseudonym(name) for identity in identities for name in known)}
        shown.append(spelled if today is not None else spelled | {""})
        every.append(spelled if None not in (today, then) else spelled | {""})
    certain = frozenset(product(shown[0], shown[1]))
    unnamed = frozenset(product(every[0], every[1])) - certain
    return Callers(certain, unnamed), Callers(certain, unnamed, former=True)


def with_former(
    former: FormerIdentity,
    before: Names,
    scope: Scope,
    client_key: str,
    requests: Sequence[ClaimRequest],
    identities: Sequence[Identity],
) -> list[ClaimRequest]:
    """Add to these requests, one under each secret, the same ones under the former names."""
    today, then = callers_of(former, (scope.tenant, scope.principal), before, identities)
    own = [replace(each, callers=today) for each in requests]
    tenant, principal = before
    formerly = replace(scope, namespace=former.namespace or scope.namespace, tenant=tenant, principal=principal)
    if formerly == scope:
        return own
    return own + [
        replace(
            each,
            # The token says whose claim it is: this application's, under whatever name it was made.
            key=replace(identity.storage_key(formerly, client_key), mark=each.key.mark),
            # Others of today may have that tenant's name as well, and would be counted there together. Under
            # the same tenant and namespace it is the same ledger, and the key is counted there already.
            in_quota=formerly.tenant == scope.tenant and formerly.namespace != scope.namespace,
            callers=then,
        )
        for identity, each in zip(identities, requests, strict=True)
    ]


def named_requests(
    scope: Scope,
    client_key: str,
    identities: Sequence[Identity],
    settings: Settings,
    policy: Policy,
    *,
    method: str,
    operation: str,
    before: Callable[[FormerIdentity], Names],
) -> list[ClaimRequest]:
    """Name a key under every secret in use, and under its former names, as the guard claims it: to read it, or to void it.

    `before` returns the tenant and the principal that the caller had then.
    """
    requests = policy.claim_requests(
        scope,
        client_key,
        identities,
        [VOIDED] * len(identities),
        method=method,
        operation=operation,
        hashed=settings.hash_identities,
        timestamp=key_timestamp(client_key),
    )
    former = settings.former_identity
    return requests if former is None else with_former(former, before(former), scope, client_key, requests, identities)


def load_quota(loaders: Callbacks, settings: Settings, tenant: str | None, app: Flask) -> Quota | None:
    """Return the quota of one part of this tenant: that of the settings, overlaid by the loader's. None: none is counted."""
    quota = settings.quota
    if loaders.quota is not None:
        from flask_idempotency.engine.quota import Quota  # for the applications that have quotas

        own = app.ensure_sync(loaders.quota)(tenant)
        if own is not None and not isinstance(own, Quota):
            raise ConfigurationError(
                f"The quota_loader returned a {type(own).__name__}. It must return a Quota, or None for the default."
            )
        quota = (quota or Quota()).overlaid(own)
    return quota if quota is None or settings.tenant_shards == 1 else quota.divided(settings.tenant_shards)


def check_counted(loaders: Callbacks, default: Quota | None, *, counts: bool) -> None:
    """Raise `ConfigurationError` if there are quotas and the store cannot count."""
    if not counts and (default is not None or loaders.quota is not None):
        named = "A quota_loader is registered" if default is None else "IDEMPOTENCY_QUOTA_* is set"
        raise ConfigurationError(
            f"{named}, and the store cannot count what each tenant has: it has no `ledger`. Remove the quotas, or use a "
            "memory, Redis or SQL store of this package."
        )
