"""Everything there is, at one instant: what the store keeps, and where everybody is."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

RESOLVED = -1
"""The token, and the answer, of whoever settles a key in its owner's place."""

UNREADABLE = -2


class Record(NamedTuple):
    """A key's record. Tokens and answers are numbers: a worker's own."""

    state: str
    token: int
    lapsed: bool
    takeover: bool
    answer: int | None = None
    age: int = 0
    """How many losses there had been when it was granted: what the time of its grant says."""


Server: TypeAlias = tuple[int, int]
"""Which process it is, and how often one was promoted. A process may be promoted again."""


class Memory(NamedTuple):
    """What the store knows of itself: whether it is the one that was set up, and who has kept it since."""

    canary: Literal["ours", "missing", "foreign"] = "ours"
    server: Server = (0, 0)
    lost: int = 0
    """How many losses there had been when somebody noticed that another server keeps it. 0: nobody has."""
    acknowledged: bool = True


class Kept(NamedTuple):
    """What the store has. All of it may be gone at once, or be as it once was."""

    record: Record | None = None
    fence: int = 0
    memory: Memory = Memory()
    ended: frozenset[int] = frozenset()
    """Tokens whose claims were released or freed a short while ago."""


At: TypeAlias = Literal["new", "asked", "granted", "past", "worked", "end"]
"""Where a worker is. Each has one request, and the client's retries are other workers.

`asked`: its claim was sent, and the reply was lost. That happens once to each, or there would be no end to it. `end`: it is
done with, or dead.
"""

Late: TypeAlias = Literal["claim", "restore"]


class World(NamedTuple):
    """The store, the workers, and what they have done. What only we can see is here too, to say what is wrong."""

    kept: Kept
    workers: tuple[At, ...]
    asked: tuple[int, ...]
    """How many losses there had been when each asked for its claim."""
    server: Server = (0, 0)
    replica: Kept | None = None
    """How far the copy has got from which the next server begins. None: it gets as far as it will later."""
    aside: Kept | None = None
    """What the right store keeps while another stands in its place."""
    old_files: bool = False
    """Whether this server began with files that are older than a restart takes. Its clock says so."""
    losses: int = 0
    janitor: Record | None = None
    """What a janitor has read, and will act on."""
    resolver: tuple[Record, str] | None = None
    """What the resolver was asked about, and what it said: `happened` or `never`."""
    late: frozenset[tuple[Late, int]] = frozenset()
    """What is still on its way to the store, of whom."""
    born: int | None = None
    """How many losses there had been when the client made its key, by what the key says."""
    highest: int = 0
    """The highest fence that was ever given out."""
    ended: frozenset[int] = frozenset()
    """Tokens whose claims were given back or freed since the last loss."""
    effects: int = 0
    by: int | None = None
    """Who did it first."""
    delivered: frozenset[int] = frozenset()
    fault: str = ""
    """A step that no rule allows."""

    @property
    def record(self) -> Record | None:
        return self.kept.record

    @property
    def memory(self) -> Memory:
        return self.kept.memory


AT_WORK = "granted", "past", "worked"


def put(world: World, number: int, at: At) -> World:
    workers = (*world.workers[:number], at, *world.workers[number + 1 :])
    if at != "end":
        return world._replace(workers=workers)
    # Nobody compares it any more: fewer states to look at.
    return world._replace(workers=workers, asked=(*world.asked[:number], 0, *world.asked[number + 1 :]))


def asking(world: World, number: int) -> World:
    return world._replace(asked=(*world.asked[:number], world.losses, *world.asked[number + 1 :]))


def deliver(world: World, number: int, answer: int | None) -> World:
    given = UNREADABLE if answer is None else answer
    return put(world._replace(delivered=world.delivered | {given}), number, "end")


def keep(world: World, record: Record | None) -> World:
    return world._replace(kept=world.kept._replace(record=record))
