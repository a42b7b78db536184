"""From what a person has in hand, a handle or a client's key, to the records that it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flask_idempotency.engine.capabilities import Found, Unsettled, every
from flask_idempotency.engine.keys import Identity, Scope, StorageKey
from flask_idempotency.engine.model import Record, State
from flask_idempotency.operations.records import Wanted, handle_of, key_of, listed
from flask_idempotency.operations.refusal import Refused

SHORT: Final = re.compile(r"[0-9a-z]{8,76}")
"""An id from a log line, which has 8 characters, or the beginning of a handle. It may be a client's key by
mistake, so nothing shows it."""

MOST_LOOKED_AT: Final = 100_000
"""Completed records. Some ten seconds on Redis, and fewer on a database."""

Read = Callable[[StorageKey], "Record | None"]


@dataclass(frozen=True, slots=True)
class Case:
    """One use of a key: its record, or its records, one for each secret while those are being rotated.

    The one under the oldest secret comes first. It is the one that claims ask and owners settle first, and so decides.
    """

    found: tuple[Found, ...]

    @property
    def first(self) -> Found:
        return self.found[0]

    @property
    def also(self) -> tuple[str, ...]:
        """The handles of the others."""
        return tuple(handle_of(each.key) for each in self.found[1:])


def by_key(read: Read, identities: Sequence[Identity], scopes: Iterable[Scope], client_key: str) -> list[Case]:
    """What this key of a client's has under each of these scopes, and under every secret in use (the newest comes first)."""
    cases = []
    for scope in scopes:
        keys = [who.storage_key(scope, client_key) for who in reversed(identities)]
        records = [(key, record) for key in keys if (record := read(key)) is not None]
        if records:
            cases.append(Case(tuple(Found(key, record) for key, record in records)))
    return cases


def by_handle(read: Read, handle: str) -> Case:
    """The one record that this handle names. Raises `Refused` when there is none."""
    key = key_of(handle)
    record = read(key)
    if record is None:
        raise Refused("There is no record under this handle: it was released, or its time is over.")
    return Case((Found(key, record),))


def by_short(unsettled: Unsettled, identities: Sequence[Identity], short: str, *, tids: Sequence[bytes | None]) -> str:
    """Return the handle of the one record that this id from a log, or this beginning of a handle, names.

    Looks at every record of these tenants, for an id leads back to none. Raises `Refused` when there is none, when there are
    several, and after `MOST_LOOKED_AT` completed records.
    """
    found: dict[StorageKey, str] = {}
    for state in (State.PROCESSING, State.QUARANTINED, State.COMPLETED):
        for number, each in enumerate(every(unsettled, state, tids=tids)):
            if state is State.COMPLETED and number >= MOST_LOOKED_AT:
                raise Refused(
                    f"This store has more than {MOST_LOOKED_AT:,} completed records, too many to look for an id from a log. "
                    "Say --tenant T or --no-tenant beside it, or name the record by its whole handle or by --key. Nothing was "
                    "changed."
                )
            labelled = any(who.label(each.key) == short for who in identities)
            if labelled or handle_of(each.key).startswith(short):
                found[each.key] = handle_of(each.key)
    if len(found) == 1:
        return found.popitem()[1]
    if found:
        raise Refused(
            f"{len(found)} records have this id. Name one by its whole handle: {', '.join(sorted(found.values()))}."
        )
    raise Refused(
        "There is no record with this id from a log, and no handle that begins so: it was released, or its time is over. A "
        "client's key is named by --key."
    )


def with_twins(case: Case, unsettled: Unsettled, read: Read, theirs: Sequence[Sequence[bytes]]) -> Case:
    """The same, with the records of the same use under other secrets.

    `theirs` are the ids of its tenant's parts under each secret, the newest first.

    Found by its token, among what is not completed: those of a completed one would have to be looked for among all. Raises
    `Refused` for a completed one, and where the tenant is not known.
    """
    first = case.first
    if len(theirs) == 1:
        return case
    # A use of a key is in one part under each secret, and not in the same.
    secret_of = {tid: number for number, parts in enumerate(theirs) for tid in parts}
    if first.record.state is State.COMPLETED or first.key.tid not in secret_of:
        raise Refused(
            "Several secrets are in use, so there may be a record of the same use under another, and they are settled "
            "together: name it by --key, or say --tenant T or --no-tenant beside the handle of one that is not completed."
        )
    met = {first.key: first}
    for state in (State.PROCESSING, State.QUARANTINED):
        for found in listed(unsettled, Wanted(state, tids=tuple(secret_of)), one_of_each=False):
            if found.record.token == first.record.token and (record := read(found.key)) is not None:
                met.setdefault(found.key, Found(found.key, record))
    return Case(tuple(sorted(met.values(), key=lambda found: -secret_of[found.key.tid])))
