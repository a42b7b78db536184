"""Leaving nothing readable of a tenant's answers, once they are erased."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flask_idempotency.engine.capabilities import Answers, Unsettled, every
from flask_idempotency.engine.keys import successor
from flask_idempotency.engine.model import ERASED, About, Payload, State
from flask_idempotency.maintenance.drain import Did, Drain


@dataclass(frozen=True, slots=True)
class Wiping:
    """What one run has done. It may be run again: what is wiped is passed over."""

    wiped: int = 0
    """There is nothing left of these but that the work was done."""
    passed_over: int = 0
    """Changed or removed by somebody else meanwhile, or wiped already."""
    shrunk: int = 0
    finished: bool = True


def wiped(payload: Payload) -> Payload:
    """What is left of an answer that is wiped: its status and its size."""
    return replace(payload, data=b"", sealed_by=ERASED)


def wipe(
    answers: Answers, tids: Sequence[bytes], *, drain: Drain, told: Callable[[int], object] = lambda wiped: None
) -> Wiping:
    """Wipe every answer of this tenant that is erased, sealed or plain; `tids` are all that stands for it.

    What was first used after the tenant was erased is left alone. `told` hears how many are wiped so far, for what was done
    until an error stays done. Raises `StoreUnavailable` when the store does not answer.
    """
    counts: Counter[str] = Counter()
    tenants, cursor = list(tids), b""

    def step(limit: int) -> Did:
        nonlocal cursor
        page = answers.walk(after=cursor, limit=limit, tid=tenants[0])
        for answer in page.answers:
            payload = answer.record.payload
            if payload is None or not answer.record.erased:
                continue
            done = payload.sealed_by != ERASED and answers.replace(answer.key, payload, wiped(payload))
            counts["wiped" if done else "passed_over"] += 1
            told(counts["wiped"])
        cursor = page.after or b""
        if page.after is None:
            tenants.pop(0)
        return Did(len(page.answers), more=bool(tenants))

    drained = drain.run(step)
    return Wiping(**counts, shrunk=drained.shrunk, finished=drained.finished)


def wipe_condemned(unsettled: Unsettled, tids: Sequence[bytes], *, keep_of: Callable[[About], float]) -> int:
    """Wipe this tenant's answers that nobody could open, and that are quarantined for it. Returns how many.

    Their work was done, so each is completed again, without an answer, and ends after its endpoint's `keep`.
    """
    count = 0
    for found in every(unsettled, State.QUARANTINED, tids=tids):
        payload = found.record.payload
        if payload is not None:
            keep = keep_of(found.record.about)
            count += unsettled.settle(found, token=successor(found.record.token), payload=wiped(payload), keep=keep)
    return count


def still_open(unsettled: Unsettled, tids: Sequence[bytes]) -> int:
    """Uses of keys that have no answer yet, and may be given one by an owner that is late."""
    tokens = {
        found.record.token
        for state in (State.PROCESSING, State.QUARANTINED)
        for found in every(unsettled, state, tids=tids)
        if found.record.payload is None
    }
    return len(tokens)
