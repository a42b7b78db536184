"""Erase the responses of one tenant, and say what was erased, for the command `purge` and the console."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.events import TenantErased
from flask_idempotency.maintenance.janitor import Batcher, expire
from flask_idempotency.maintenance.rotate import still_open, wipe
from flask_idempotency.operations.admin import holds_sealed
from flask_idempotency.operations.admin import shred as shred_keys
from flask_idempotency.operations.records import AuditNote, Refused
from flask_idempotency.web.operator import built, check_layout, policy_for, pseudonym, publish, settings

BATCH: Final = 500
"""Responses in one step of a wipe."""

_STAYS: Final = "Its records stay: until they expire, a retry gets 410 and does not run again."
SHREDDED: Final = (
    f"Every encrypted response of this tenant becomes unreadable, for good. {_STAYS} No retry gets a plain response either. "
    "Plain responses stay readable in the store until they expire, or until `flask idempotency purge` without --shred or "
    "`flask idempotency rotate` wipes them."
)
WIPED: Final = (
    f"Every response of this tenant is erased, for good: encrypted ones become unreadable, and all of them are wiped from the "
    f"store, plain ones too. {_STAYS}"
)
_BACKUPS: Final = (
    "Backups made before hold the same data keys, wrapped by the ring: to make those unreadable too, rotate to a new key of "
    "the ring and destroy the old one. After restoring such a backup, purge again."
)
_PLAIN_BACKUPS: Final = (
    "Plain responses can be read in backups for as long as you keep those, and in the files of a database until it has removed "
    "the old versions of rows (VACUUM) and its logs."
)
_SECRETS: Final = (
    "Secrets searched: {secrets}. Keys that were claimed under another secret have other data keys, which are still there: if "
    "another secret was in use within the last `keep` or `remember`, list it in IDEMPOTENCY_SECRET here and purge again."
)
_NO_CACHE: Final = (
    "IDEMPOTENCY_REDIS_URL is not set here, so no cache was invalidated, and other hosts have one: purge again where it is "
    "set. Until then the cache replays encrypted responses for up to a minute, and plain ones until they expire."
)
_OPEN: Final = (
    "Uses of keys without a response so far: {still_open}. No retry gets a response that a late worker stores, but a plain one "
    "can be read in the store: purge again when these requests have ended."
)
_NOT_SEARCHED: Final = (
    "This store cannot be searched for unfinished records: it still holds responses that no worker could open, and plain ones "
    "that late workers store can be read in it. Purge again when all running requests have ended."
)
_NOT_FINISHED: Final = (
    "There was no time to wipe all of them: no retry gets any, and those that are left can be read in the store. Purge again "
    "to go on."
)


def cache_unknown() -> bool:
    """Return whether there may be a cache that this host cannot invalidate. True also if that is unknown."""
    parts = built()
    if parts.schema is None or settings().redis_url is not None:
        return False
    try:
        return parts.cache_marker is None or parts.cache_marker.has_cache()
    except IdempotencyError:  # the responses are erased by now, and the operator must see that
        return True


def check_purge(whom: Sequence[bytes], *, shred: bool) -> None:
    """Raise `Refused` if this application cannot erase the responses of this tenant."""
    check_layout()
    parts = built()
    if parts.data_keys is None:
        raise Refused("The store of this application keeps no data keys, so nothing in it can be erased.")
    if not shred and parts.responses is None:
        raise Refused("This store cannot list its responses, so they cannot be wiped. See --shred.")
    if shred and settings().key_ring is None and not holds_sealed(parts.data_keys, whom):
        raise Refused(
            "There is no key ring here and no data key of this tenant in the store, so none of its responses is encrypted: "
            "purge without --shred, which wipes plain responses; and set IDEMPOTENCY_ENCRYPTION to on for later responses."
        )


@dataclass(eq=False, repr=False)
class Purge:
    """One purge, and what it did, as a context: it publishes its audit event at the end, also when it is interrupted.

    Call `shred` first: from then on no retry gets a response of this tenant. Then `wipe` removes what can be read in the store.
    """

    tenant: str | None
    word: AuditNote
    data_keys: int = 0
    wiped: int = 0
    passed_over: int = 0
    condemned: int | None = None
    """None: not requested, or this store cannot do it or tell. So is `still_open`."""
    still_open: int | None = None
    finished: bool = True
    """False: the budget ended before every response was wiped."""

    def __enter__(self) -> Purge:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After Ctrl-C too: what was erased until then is gone.
        publish(
            TenantErased(
                record="",
                operation="",
                tenant=pseudonym(self.tenant),
                actor=self.word.actor,
                reason=self.word.reason,
                data_keys=self.data_keys,
                wiped=self.wiped,
                finished=kind is None,
            )
        )

    def shred(self, whom: Sequence[bytes]) -> None:
        """Destroy the data keys of this tenant, with all its ids."""
        parts = built()
        if parts.data_keys is not None:
            self.data_keys = shred_keys(parts.data_keys, whom, audit=parts.audit)

    def wipe(
        self,
        whom: Sequence[bytes],
        *,
        budget: float = inf,
        on_progress: Callable[[int], object] = lambda touched: None,
    ) -> None:
        """Wipe the responses of this tenant, for at most `budget` seconds. `on_progress` gets the number looked at so far."""
        parts = built()
        if parts.responses is None:
            return
        # Count first: a response that completes after this is erased already, and the scan meets it or it is among these.
        self.still_open = None if parts.recovery is None else still_open(parts.recovery, whom)
        drain = Batcher(batch=BATCH, budget=budget, on_progress=on_progress)
        report = wipe(
            parts.responses,
            whom,
            drain=drain,
            recovery=parts.recovery,
            keep_of=lambda about: policy_for(about).lifetime,
            journals=parts.journals,
            on_progress=self._count,
        )
        self.passed_over, self.finished = report.passed_over, report.finished
        if not self.finished:
            return
        if parts.recovery is not None:
            self.condemned = report.condemned
        if parts.expiry is not None:
            # Responses that have expired, and whose keys are remembered: the scan above passes them over.
            log = parts.task_log
            horizon = time.time() if log is None else min(log.now(), time.time())
            self.finished = expire(parts.expiry, horizon=horizon, drain=drain).finished

    def _count(self, wiped: int) -> None:
        self.wiped = wiped

    def so_far(self) -> str:
        """Return what was erased until now, in a sentence."""
        return f"Data keys destroyed: {self.data_keys:,}. Responses wiped: {self.wiped:,}."


def purge_text(erased: Purge, *, shred: bool, secrets: int, cache_unknown: bool) -> list[str]:
    """Return what a purge did, in sentences, and what it could not do."""
    said = [f"Data keys destroyed: {erased.data_keys}."]
    if not shred:
        said[0] += f" Responses wiped: {erased.wiped}."
    said += [SHREDDED if shred else WIPED, _SECRETS.format(secrets=secrets)]
    if not shred and not erased.finished:
        said.append(_NOT_FINISHED)
    elif not shred and erased.still_open is None:
        said.append(_NOT_SEARCHED)
    elif erased.still_open:
        said.append(_OPEN.format(still_open=erased.still_open))
    if cache_unknown:
        said.append(_NO_CACHE)
    return [*said, _BACKUPS, *([] if shred else [_PLAIN_BACKUPS])]
