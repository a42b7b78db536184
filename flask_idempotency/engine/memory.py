"""What a store that can lose its memory says when it has, and what its owners and operators can do about it.

A key that such a store does not know may have been run before. Protocol: research/correctness.md, sections 1.1, 3 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, runtime_checkable

from flask_idempotency.engine.outcome import Grant
from flask_idempotency.engine.request import ClaimRequest

RISK: Final = (
    'run `flask idempotency redis ack --reason "…"` when you have found out why. It risks that requests whose records were '
    "lost run a second time if their clients retry them"
)
"""The one command that lets new keys run after a loss, and what it risks. People read it in every log line and report."""


class Loss(Enum):
    """What is wrong with a store's memory."""

    MISSING = "missing"
    """Nothing says that it was ever set up: it was emptied, or is new."""
    FOREIGN = "foreign"
    """It is another store than the application was told, or its keys are laid out for another one."""
    CHANGED = "changed"
    """Another process keeps it than the one that made its promises: a restart, a fail-over, an older copy."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How the parts of a store stand, and what to do about it."""

    store_id: str | None
    """None where nothing says so, or parts disagree."""
    parts: Mapping[str, int]
    """How many parts are `fine`, `acknowledged`, or suffer which `Loss`."""
    since: float | None
    """When the latest loss was noticed, in seconds since the epoch by the store's clock."""
    now: float
    """By the same clock."""
    may_be_acknowledged_at: float | None
    """When every owner that survived has had the time to put its claim back. None: nothing is lost."""
    notices_restarts: bool
    """False where the server does not tell scripts which process it is: then only an emptied store is noticed."""
    noticed: bool = False
    """Whether nobody had noticed one of its losses before."""
    losses_so_far: tuple[float | None, ...] = field(default=(), repr=False)
    """When each part was last lost: another one after each loss of any of them."""

    @property
    def losses(self) -> Mapping[str, int]:
        """How many parts suffer which loss."""
        return {name: count for name, count in self.parts.items() if name in {loss.value for loss in Loss} and count}

    @property
    def gravest(self) -> Loss | None:
        """Which of its losses to tell of first."""
        return next((loss for loss in (Loss.FOREIGN, *Loss) if loss.value in self.losses), None)

    def runs_unknown(self, after_loss: str) -> bool:
        """Whether keys run now that the store does not know, under this rule."""
        losses = set(self.losses)
        if Loss.FOREIGN.value in losses:
            return False
        if not losses or after_loss == "run":
            return True
        due = self.may_be_acknowledged_at
        return losses == {Loss.CHANGED.value} and after_loss == "hold" and due is not None and self.now >= due


class Rules(Protocol):
    """What a store was told to do about keys that it may have forgotten."""

    @property
    def store_id(self) -> str | None:
        """Which store it has to be. None: any will do."""
        ...

    @property
    def after_loss(self) -> str:
        """`refuse` until somebody has acknowledged, `hold` for a time, or `run`."""
        ...

    @property
    def hold(self) -> float:
        """For how many seconds owners that survived may put their claims back before anybody acknowledges."""
        ...


class Memory(Protocol):
    """Found as `memory`. Every method raises `StoreUnavailable` when the store cannot answer."""

    @property
    def rules(self) -> Rules: ...

    def restore(self, request: ClaimRequest, grant: Grant, *, lease: float, age: float) -> bool:
        """Put a claim back that the store has forgotten. True: it is this token's again, in progress.

        Only if the record is absent, and the store has lost its memory since the claim was granted, which was asked for
        `age` seconds ago.
        For claims alone that nobody may take over: who was taken over would call back to life what others have finished.
        """
        ...

    def initialise(self) -> str:
        """Make a new store ready, and return its id. Harmless when it is.

        Raises `ConfigurationError` for one that was made ready before and lacks something: that has lost its memory.
        """
        ...

    def acknowledge(self, *, forced: bool = False, seen: Standing | None = None) -> Standing:
        """From now on keys run that the store does not know, what it has forgotten among them. How it stood before.

        `seen` is how it stood when whoever acknowledges looked. Raises `ConfigurationError` where something was lost since
        then; before `may_be_acknowledged_at`, unless forced; and for a store that is foreign.
        """
        ...

    def standing(self) -> Standing:
        """How every part stands. Losses that nobody has noticed so far are, by this."""
        ...


@runtime_checkable
class MayForget(Protocol):
    """A store that can lose its memory, and says so."""

    @property
    def memory(self) -> Memory: ...
