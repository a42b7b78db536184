"""A store that may forget: how it notices, what it refuses then, and how it comes to be trusted again."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.rules import Rules
from tests.model.world import AT_WORK, Kept, Memory, Record, World, keep


def looked_at(rules: Rules, memory: Memory, world: World) -> Memory:
    """What a script makes of it: a change of server is noted when it is noticed."""
    by_process = "only the process is compared" in rules.broken
    same = memory.server[0] == world.server[0] if by_process else memory.server == world.server
    if same or memory.canary != "ours" or "no server is compared" in rules.broken:
        return memory
    if rules.lossless and restarted_whole(rules, world):
        return memory._replace(server=world.server)
    return Memory("ours", world.server, lost=world.losses, acknowledged=False)


def restarted_whole(rules: Rules, world: World) -> bool:
    """Whether what a server tells of itself proves that it goes on with all that the one before had.

    A process that was promoted tells so. One that started with older files tells when it started.
    """
    promoted = world.server[1] != world.memory.server[1] and "a promotion passes for a restart" not in rules.broken
    older = world.old_files and not rules.quick and "the age of the files is not compared" not in rules.broken
    return not (promoted or older)


def refuses(rules: Rules, world: World) -> tuple[bool, World]:
    """Whether a key that is unknown here is refused, and what is noted by the way."""
    memory = looked_at(rules, world.memory, world)
    noted = world._replace(kept=world.kept._replace(memory=memory))
    if rules.unknown == "run":
        return False, noted
    if memory.canary == "missing" and "no canary" not in rules.broken:
        return True, noted
    if memory.canary == "foreign" and "another store is taken for ours" not in rules.broken:
        return True, noted
    young = world.born is not None and world.born >= memory.lost
    if "once young, always young" in rules.broken:
        young = world.born is not None and world.born > 0
    return not (memory.acknowledged or young), noted


def forgot(rules: Rules, world: World, since: int) -> bool:
    """Whether the store may have forgotten what was granted then."""
    memory = looked_at(rules, world.memory, world)
    return memory.canary == "missing" or memory.lost > since


def owns(rules: Rules, world: World, number: int, verb: str) -> bool:
    """Whether the record is this worker's to write to.

    One that may be taken over is nobody's after a loss: somebody may have, and the store has forgotten it.
    """
    record = world.record
    if record is None or (record.token != rules.token(number) and f"{verb} without token" not in rules.broken):
        return False
    may_be_anothers = record.takeover and record.state != "C" and forgot(rules, world, record.age)
    return not may_be_anothers or f"{verb} after a loss" in rules.broken


def may_put_back(rules: Rules, world: World, number: int) -> bool:
    """Whether an owner whose record is absent may put it back: only if it was the store that lost it, and nobody else
    can have had the key since."""
    alone = not rules.takes_over or "what may be taken over is put back" in rules.broken
    lost = forgot(rules, world, world.asked[number]) or "everything absent is put back" in rules.broken
    over = rules.token(number) in world.kept.ended
    return alone and lost and not over and world.record is None


def put_back(rules: Rules, world: World, number: int) -> World:
    """The record as it was granted. Whoever calls this has asked whether it may."""
    token = rules.token(number)
    after = keep(world, Record("P", token, lapsed=False, takeover=rules.takes_over, age=world.asked[number]))
    return after._replace(fault="a claim that was ended is there again") if token in world.ended else after


def ended(rules: Rules, world: World, token: int, *, abandoned: bool = False) -> World:
    """Nothing of this claim may come back, whatever of it is still on its way. The store remembers that for a while."""
    if not (rules.packets or rules.accidents):
        # It makes no difference, and there are fewer states to look at.
        return world
    left_out = {"what is ended is forgotten", *(() if abandoned else ("only what is abandoned is remembered",))}
    kept = world.kept if left_out & rules.broken else world.kept._replace(ended=world.kept.ended | {token})
    return world._replace(kept=kept, ended=world.ended | {token})


def accidents(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    if world.aside is not None:
        yield "the right store is asked again", world._replace(kept=world.aside, aside=None)
        return
    if world.losses >= len(rules.accidents):
        return
    after = world._replace(losses=world.losses + 1, ended=frozenset())
    match rules.accidents[world.losses]:
        case "wiped":
            yield "the store forgets everything", after._replace(kept=Kept(memory=Memory("missing")))
        case "mistaken":
            foreign = Kept(memory=Memory("foreign"))
            yield "another store is asked", after._replace(kept=foreign, aside=world.kept, ended=world.ended)
        case "restarted":
            # What was not noticed before is not noticed for this.
            server = world.server[0] + 2, world.server[1]
            noticed = world.memory.server == world.server
            yield (
                "the store restarts, and keeps everything",
                world._replace(losses=after.losses, server=server, old_files=world.old_files and not noticed),
            )
        case "older files":
            if world.replica is None:
                yield "its files are copied", world._replace(replica=world.kept)
                return
            server = world.server[0] + 2, world.server[1]
            yield (
                "the store restarts with the copy",
                after._replace(kept=world.replica, replica=None, server=server, old_files=True),
            )
        case "set back":
            if world.replica is None:
                yield "a copy gets no further than this", world._replace(replica=world.kept)
                return
            # There are two processes, and each goes on where the other has left off.
            server = 1 - world.server[0], world.server[1] + 1
            yield (
                "another server goes on with the copy",
                after._replace(kept=world.replica, replica=None, server=server),
            )


def acknowledgements(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    """By an operator, or by time."""
    memory = looked_at(rules, world.memory, world)
    if rules.unattended:
        return
    if (memory.acknowledged and memory.canary == "ours") or memory.canary == "foreign" or world.late:
        return
    # A resolver that has said that nothing happened did not know of an owner who was forgotten.
    if not rules.hasty and (world.resolver is not None or not _owners_are_on_record(rules, world)):
        return
    if rules.unknown == "hold" and memory.canary == "ours":
        yield "the hold is over", _trusted(world, memory._replace(acknowledged=True))
    if not rules.careless and forgotten(world) and any(worker in ("new", "asked") for worker in world.workers):
        return
    canary = memory.canary if "the canary is not made anew" in rules.broken else "ours"
    told = Memory(canary, world.server, lost=world.losses, acknowledged=True)
    yield "an operator acknowledges", _trusted(world, told)


def forgotten(world: World) -> bool:
    """Whether it was done, and the store knows nothing of it."""
    return bool(world.effects) and world.record is None


def _owners_are_on_record(rules: Rules, world: World) -> bool:
    """Whoever is at work has its record, or has put it back. One that was refused is at work until it is gone."""
    record = world.record
    return all(
        worker not in AT_WORK or (record is not None and record.token == rules.token(number))
        for number, worker in enumerate(world.workers)
    )


def _trusted(world: World, memory: Memory) -> World:
    return world._replace(kept=world.kept._replace(memory=memory))
