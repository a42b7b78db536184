"""Find the uses of a client's key: for the commands and the console, which get the key as a person typed it.

No text quotes the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from flask import current_app

from flask_idempotency.assembly import identities
from flask_idempotency.engine.errors import InvalidKey
from flask_idempotency.engine.keys import BrokerId, Scope, message_key, parse_key
from flask_idempotency.engine.model import RequestInfo
from flask_idempotency.operations import records
from flask_idempotency.operations.records import Case, Refused
from flask_idempotency.web import operator
from flask_idempotency.web.webhooks import PRINCIPAL

LONGEST_KEY: Final = 4096
"""Characters. No policy allows more."""
UNKNOWN_ENDPOINT: Final = (
    "This application has no such endpoint, inbox or task: `flask idempotency policy` names them all. For a message, let --app "
    "name the module that makes its inbox or calls serve(), or use the id that `list` shows."
)


def parsed_key(typed: str) -> str:
    """Return the key that was typed. Raises `Refused` for one that no request could have."""
    try:
        return parse_key(typed, max_length=LONGEST_KEY)
    except InvalidKey as error:
        raise Refused(f"This is not a valid key: {error}.") from None  # the original exception quotes the key


def uses_of(typed: str, *, tenant: str | None, principal: str | None, endpoint: str | None) -> list[Case]:
    """Return the uses of this key by this caller, of one endpoint or of all.

    Raises `Refused` for an endpoint that the application lacks, and for a key that no request could have.
    """
    found: list[Case] = []
    of_messages = endpoint is not None and operator.state().loaders.operations.get(endpoint) is not None
    of_views = endpoint is None or endpoint in current_app.view_functions
    if not of_messages and not of_views:
        raise Refused(UNKNOWN_ENDPOINT)
    former, namespace = operator.settings().former_identity, operator.settings().namespace
    before = None if former is None else former.namespace
    if of_messages:
        # An inbox or a task: the key is the id of a message, which may be any text.
        scopes = [Scope(namespace, tenant=tenant, principal=None, operation=endpoint)]
        if before is not None:
            scopes.append(replace(scopes[0], namespace=before))
        for key in (message_key(typed), message_key(BrokerId(typed))):
            found += _under_both(scopes, key, lambda about: True)
    if not of_views:
        return found
    key = parsed_key(typed)
    if endpoint is None:
        rules = operator.policies()
        spaces = {name for name, method in rules.pairs() if rules.resolve(name, method).policy.scope == "operation"}
    else:
        spaces = {endpoint}
    # A loader may call a caller what we call a provider. Only the endpoint tells the two apart.
    callers = (False, True) if (principal or "").startswith(PRINCIPAL) else (False,)

    def may_be(about: RequestInfo) -> bool:
        # A record without names may belong to any caller.
        return operator.is_spelled(about.tenant, tenant) and operator.is_spelled(about.principal, principal)

    # The key space of all endpoints, and those of single endpoints.
    for operation, of_package in product((None, *sorted(spaces)), callers):
        scopes = [Scope(namespace, tenant, principal, operation, of_package)]
        if former is not None:
            # A removed loader needs a request, and there is none here: name its records by their handles.
            named = None if former.tenant is False else tenant
            who = None if former.principal is False and not of_package else principal
            scopes.append(Scope(before or namespace, named, who, operation, of_package))
        found += _under_both(scopes, key, may_be)
    return found


def _under_both(scopes: Sequence[Scope], key: str, may_be: Callable[[RequestInfo], bool]) -> Iterator[Case]:
    """Yield the use of this key in the first scope together with the same use in the second, its former name.

    `may_be` tells whether a record that only the former name has may be one of the caller's.
    """
    cases = records.by_key(operator.read, identities(operator.settings()), scopes[:1], key)
    before = [
        each
        for case in records.by_key(operator.read, identities(operator.settings()), scopes[1:], key)
        for each in case.found
    ]
    own = cases[0].found if cases else ()
    # Resolve one use under both names together, as under several secrets. Others may have the former name too.
    tokens = {each.record.token for each in own}
    twins = [each for each in before if (each.record.token in tokens if own else may_be(each.record.info))]
    found = {each.key: each for each in (*twins, *own)}
    if found:
        yield Case(tuple(found.values()))
