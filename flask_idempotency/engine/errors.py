"""What can go wrong, as exceptions: "we do not know" and "this is no longer yours"."""

from __future__ import annotations

from flask_idempotency.engine.escape import printable_lines


class IdempotencyError(Exception):
    """The root of everything this package raises on purpose. Its text may end on a terminal, and is escaped for that."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigurationError(IdempotencyError):
    """Something was set up in a way that cannot hold; the text names the remedy.

    All faults found in one place are reported in one error, one line each.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        if len(faults) == 1:
            super().__init__(faults[0])
        else:
            super().__init__("\n".join([f"{len(faults)} faults in the configuration:", *(f"  - {f}" for f in faults)]))


class InvalidKey(IdempotencyError):
    """The client sent an idempotency key that names nothing; the text says what is wrong, never the key."""


class StoreUnavailable(IdempotencyError):
    """The store did not answer, or answered that it cannot decide. Nobody knows what it did."""


class NotApplied(StoreUnavailable):
    """Something did not answer that had to be asked before anything was changed: so nothing was."""


class KeyProviderUnavailable(StoreUnavailable):
    """The store is there, and the keys that its answers are encrypted with are not: not even `on_store_down="allow"` runs
    anything without them, for the store goes on remembering who has run."""


class StoreDataLoss(StoreUnavailable):
    """The store does not know this key, and has forgotten keys that it should know: nobody can tell whether it was run.

    Nothing was granted or changed. Not even `on_store_down="allow"` runs it. `loss` is a `memory.Loss`' value; `noticed`:
    nobody had noticed it before.
    """

    def __init__(self, text: str, *, loss: str, noticed: bool = False) -> None:
        super().__init__(text)
        self.loss = loss
        self.noticed = noticed


class ResponseUnavailable(StoreUnavailable):
    """The work was done before, and its answer cannot be had for the moment: not even `on_store_down="allow"` runs it."""


class InheritedConnection(StoreUnavailable):
    """The application's session holds a connection that another process opened before this one was forked from it.

    Nothing was claimed or committed.
    """


class LeaseLost(IdempotencyError):
    """The token is no longer the record's: somebody else owns it, or has settled it. Nothing was changed."""


class CorruptRecord(IdempotencyError):
    """A stored record cannot be read. It is never to be taken for an absent one: that would run a payment again."""


class DataKeyMissing(IdempotencyError):
    """The store does not hold the data key that a payload is sealed with, so it has not stored the payload.

    `erased`: the tenant's answers were erased after this key was first used. Otherwise the store has lost its memory.
    """

    def __init__(self, text: str, *, erased: bool) -> None:
        super().__init__(text)
        self.erased = erased


class NotStorable(IdempotencyError):
    """A result cannot be kept in a form that could be replayed; the text says why."""


class NotCommitted(IdempotencyError):
    """The database refused to commit the work, and holds nothing of it. Its key is free again.

    `again`: the refusal was about other transactions and not about this one, so the same request may succeed.
    """

    def __init__(self, text: str, *, retryable: bool) -> None:
        super().__init__(text)
        self.retryable = retryable
