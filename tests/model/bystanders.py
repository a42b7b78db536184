"""Everybody who is not the owner: time, a janitor, and a resolver or a person."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.memory import ended
from tests.model.rules import Rules
from tests.model.world import AT_WORK, RESOLVED, Record, World, keep


def of_time(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    record = world.record
    if record is not None and record.state == "P" and not record.lapsed:
        yield "the lease ends", keep(world, record._replace(lapsed=True))
    over = record is not None and (record.state == "C" or "expiry takes all" in rules.broken)
    # An answer's life is over when nobody retries any more; that one who does so later runs again is documented.
    if over and all(worker == "end" for worker in world.workers):
        after = keep(world, None)
        if record is not None and record.state != "C":
            after = after._replace(fault="time has ended a record that is not completed")
        yield "the answer's life ends", after


def of_janitor(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    record, seen = world.record, world.janitor
    if seen is None:
        if record is not None and record.state == "P" and (record.lapsed or "janitor takes all" in rules.broken):
            yield "a janitor reads", world._replace(janitor=record)
        return
    world = world._replace(janitor=None)
    stands = record == seen or "janitor trusts its reading" in rules.broken
    if record is None or not stands or (seen.takeover and "janitor ignores the rule" not in rules.broken):
        yield "the janitor leaves it alone", world
        return
    after = keep(world, record._replace(state="Q"))
    if record.state != "P" or not record.lapsed or record.takeover:
        after = after._replace(fault="a janitor quarantined what had not lapsed, or was to be taken over")
    yield "the janitor quarantines", after


def of_resolver(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    record = world.record
    if world.resolver is None:
        if record is not None and record.state == "Q" and record.answer is None:
            if world.effects:
                yield "the resolver finds the effect", world._replace(resolver=(record, "happened"))
            elif _nobody_is_at_it(rules, world, record):
                yield "the resolver finds nothing", world._replace(resolver=(record, "never"))
        return
    seen, said = world.resolver
    world = world._replace(resolver=None)
    if record is None or (record != seen and "resolver does not compare" not in rules.broken):
        yield "somebody was faster than the resolver", world
    elif said == "happened":
        token = record.token if "resolver keeps the token" in rules.broken else RESOLVED
        answer = _found(rules, world)
        after = keep(world, record._replace(state="C", token=token, answer=answer))
        if record.state == "C" and record.answer != answer:
            after = after._replace(fault="a stored answer was changed")
        yield "the resolver settles it", after
    else:
        yield "the resolver frees it", ended(rules, keep(world, None), record.token)


def _found(rules: Rules, world: World) -> int:
    """The answer that a resolver makes of what it has found."""
    if not rules.faithful:
        return RESOLVED
    return min(world.delivered, default=RESOLVED if world.by is None else world.by)


def _nobody_is_at_it(rules: Rules, world: World, record: Record) -> bool:
    if "resolver is hasty" in rules.broken or rules.forced:
        return True
    # So long after its lease nobody waits for a reply any more, and nothing is on its way. Where that makes no difference
    # it may be so all the same.
    may_forget = bool(rules.packets or rules.accidents)
    at_it = ("asked", *AT_WORK) if may_forget else AT_WORK
    return not any(rules.token(number) == record.token for _, number in world.late) and all(
        worker not in at_it or rules.token(number) != record.token for number, worker in enumerate(world.workers)
    )
