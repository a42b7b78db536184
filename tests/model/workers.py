"""What a worker does with its one request, and what the store says to it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.memory import ended, forgot, forgotten, may_put_back, owns, put_back, refuses
from tests.model.rules import Rules
from tests.model.world import AT_WORK, Record, World, asking, deliver, keep, put


def of_worker(rules: Rules, world: World, number: int) -> Iterator[tuple[str, World]]:
    worker = world.workers[number]
    match worker:
        case "new" if number == 0 or world.workers[number - 1] != "new":
            # They are all alike until they ask: which of them is the first makes no difference.
            yield from _asks(rules, world, number)
        case "asked":
            yield from _claim(rules, world, number)
            yield f"w{number} gives up, and abandons its claim", _release(rules, world, number)
        case "granted":
            yield from _renew(rules, world, number)
            yield f"w{number} fails before its effect, and releases", _release(rules, world, number)
            if rules.effects == "marked":
                yield f"w{number} passes its point of no return", _mark(rules, world, number)
            else:
                yield f"w{number} works", _work(rules, world, number)
        case "past":
            yield f"w{number} works", _work(rules, world, number)
        case "worked":
            yield from _renew(rules, world, number)
            yield from _complete(rules, world, number)
    if worker in AT_WORK:
        yield f"w{number} dies", put(world, number, "end")


def late_packets(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    """What was sent long ago arrives. Nobody hears what comes of it."""
    for kind, number in world.late:
        arrived = world._replace(late=world.late - {(kind, number)})
        if kind == "claim":
            yield f"a late claim of w{number} arrives", _granted(rules, arrived, number)[1]
        elif may_put_back(rules, arrived, number):
            yield f"w{number} puts its record back, late", put_back(rules, arrived, number)
        else:
            yield f"w{number} is too late to put its record back", arrived


def _asks(rules: Rules, world: World, number: int) -> Iterator[tuple[str, World]]:
    if rules.timed != "no" and world.born is None:
        world = world._replace(born=world.losses + (rules.timed == "fast"))
    world = asking(world, number)
    for move, after in _claim(rules, world, number):
        if after.workers[number] == "new":
            # It asks again later, as if it never had.
            yield move, after._replace(asked=(*world.asked[:number], 0, *world.asked[number + 1 :]))
            continue
        yield move, after
        if rules.packets and after.workers[number] != "end":
            yield f"{move}, and a packet is late", after._replace(late=after.late | {("claim", number)})
    if rules.packets:
        yield f"w{number} claims, too late", put(world, number, "asked")._replace(late=world.late | {("claim", number)})
    if forgotten(world):
        yield f"w{number} asks no more", put(world, number, "end")


def _claim(rules: Rules, world: World, number: int) -> Iterator[tuple[str, World]]:
    said, after = _granted(rules, world, number)
    match said:
        case "granted":
            yield f"w{number} claims", put(after, number, "granted")
            if world.workers[number] == "new":
                yield f"w{number} claims, and the reply is lost", put(after, number, "asked")
        case "answer" if world.record is not None:
            yield f"w{number} is given the stored answer", deliver(world, number, world.record.answer)
        case "own":
            yield f"w{number} hears that it has the claim", put(after, number, "granted")
        case "refused by its own":
            yield (
                f"w{number} is refused by its own claim",
                after._replace(fault="a worker was refused by its own claim"),
            )
        case _:
            yield f"w{number} is refused: {said}", after


def _granted(rules: Rules, world: World, number: int) -> tuple[str, World]:
    """What the store says to a claim, and what it makes of the key."""
    token, record = rules.token(number), world.record
    if record is not None and record.state == "C":
        return "answer", world
    if record is not None and record.state == "Q" and "claim takes quarantined" not in rules.broken:
        return "quarantined", world
    if record is not None and record.state == "P" and record.token == token:
        return ("refused by its own" if "own claim" in rules.broken else "own"), world
    if record is not None and record.state == "P" and not record.lapsed:
        return "in flight", world
    if token in world.kept.ended:
        return "it was ended", world
    if record is not None and record.state == "P" and not record.takeover:
        return "lapsed", keep(world, record._replace(state="Q"))
    refused, world = refuses(rules, world)
    if record is not None and "taken over from before a loss" in rules.broken:
        return "granted", _grant(rules, world, number)
    if refused:
        return "its memory is lost", world
    if record is not None and forgot(rules, world, record.age) and "taken over when acknowledged" not in rules.broken:
        # Its owner may have gone further than it says, and so may one that took it over.
        return "lapsed", keep(world, record._replace(state="Q"))
    return "granted", _grant(rules, world, number)


def _grant(rules: Rules, world: World, number: int) -> World:
    token = rules.token(number)
    floor = 0 if "fence restarts" in rules.broken and world.record is None else world.kept.fence
    by_clock = 0 if {"fence restarts", "fence from the floor alone"} & rules.broken else world.highest + 1
    fence = max(floor + 1, by_clock)
    taken = Record("P", token, lapsed=False, takeover=rules.takes_over, age=world.losses)
    after = world._replace(kept=world.kept._replace(record=taken, fence=fence), highest=max(fence, world.highest))
    if fence <= world.highest:
        return after._replace(fault="a fence was given out again")
    if token not in world.ended:
        return after
    if world.workers[number] == "end":
        return after._replace(fault="a claim that was ended is there again")
    return after._replace(ended=world.ended - {token})


def _renew(rules: Rules, world: World, number: int) -> Iterator[tuple[str, World]]:
    record = world.record
    if record is not None and record.state == "P" and owns(rules, world, number, "renew"):
        yield f"w{number} renews", keep(world, record._replace(lapsed=False))
    if may_put_back(rules, world, number):
        yield f"w{number} puts its record back", put_back(rules, world, number)
        if rules.packets:
            yield f"w{number} sends its record", world._replace(late=world.late | {("restore", number)})


def _mark(rules: Rules, world: World, number: int) -> World:
    record = world.record
    if record is None or record.state not in "PQ" or not owns(rules, world, number, "mark"):
        return put(world, number, "end")
    if "mark is not stored" not in rules.broken:
        world = keep(world, record._replace(takeover=False))
    return put(world, number, "past")


def _work(rules: Rules, world: World, number: int) -> World:
    if rules.effects == "transactional":
        # Nothing is there before the commit, which is one step with the record's completion.
        return put(world, number, "worked")
    effects = 1 if rules.effects == "deduplicated" else world.effects + 1
    by = number if rules.faithful and world.by is None else world.by
    return put(world._replace(effects=effects, by=by), number, "worked")


def _complete(rules: Rules, world: World, number: int) -> Iterator[tuple[str, World]]:
    token = rules.token(number)
    if may_put_back(rules, world, number):
        world = put_back(rules, world, number)
    record = world.record
    mine = owns(rules, world, number, "complete")
    if record is not None and mine and (record.state in "PQ" or "complete overwrites" in rules.broken):
        effects = world.effects + 1 if rules.effects == "transactional" else world.effects
        # What is written once more after a lost reply may be another answer: a tombstone, say.
        answer = number + 100 if record.state == "C" else number
        kept = keep(world, record._replace(state="C", token=token, answer=answer))._replace(effects=effects)
        if record.state == "C" and record.answer != answer:
            kept = kept._replace(fault="a stored answer was changed")
        yield f"w{number} completes", deliver(kept, number, number)
        yield f"w{number} completes, and the reply is lost", kept
    elif record is not None and record.state == "C" and (mine or "stale answer" in rules.broken):
        yield f"w{number} has completed before", deliver(world, number, number)
    elif record is not None and record.state == "C":
        yield f"w{number} has lost its claim, and gives the stored answer", deliver(world, number, record.answer)
    elif "stale answer" in rules.broken:
        yield f"w{number} has lost its claim, and gives its own answer", deliver(world, number, number)
    else:
        yield f"w{number} has lost its claim, and says so", put(world, number, "end")


def _release(rules: Rules, world: World, number: int) -> World:
    record, token = world.record, rules.token(number)
    mine = owns(rules, world, number, "release")
    if record is not None and mine and record.state in "PQ" and record.answer is None:
        world = keep(world, None)
    return put(ended(rules, world, token, abandoned=world.workers[number] == "asked"), number, "end")
