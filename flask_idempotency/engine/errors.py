"""The exceptions of this package. Each one tells its caller whether the store has changed anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flask_idempotency.engine.escape import printable_lines

__all__ = [
    "ConfigurationError",
    "CorruptRecord",
    "DataKeyMissing",
    "IdempotencyError",
    "InheritedConnection",
    "InvalidKey",
    "KeyProviderUnavailable",
    "LeaseLost",
    "NotApplied",
    "NotCommitted",
    "NotStorable",
    "ResponseUnavailable",
    "StepInDoubt",
    "StepsChanged",
    "StoreDataLoss",
    "StoreUnavailable",
]


class IdempotencyError(Exception):
    """The base class of all exceptions of this package. `str()` escapes the text for terminals and logs."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigurationError(IdempotencyError):
    """You configured something that cannot work. The text names the remedy.

    One error reports all faults that we find in one place, one line each (`faults`).
    """

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        if len(faults) == 1:
            super().__init__(faults[0])
        else:
            super().__init__("\n".join([f"{len(faults)} faults in the configuration:", *(f"  - {f}" for f in faults)]))


@contextmanager
def importing(*packages: str, otherwise: str) -> Iterator[None]:
    """Import modules that need optional packages. Raise `ConfigurationError` with this text if one is not installed.

    `{missing}` in the text is the name of the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise ConfigurationError(otherwise.format(missing=missing)) from error


class InvalidKey(IdempotencyError):
    """The client sent a malformed idempotency key. The text names the fault, and never shows the key."""


class StoreUnavailable(IdempotencyError):
    """The store did not respond, or cannot decide. It may or may not have applied the call."""


class NotApplied(StoreUnavailable):
    """A step that precedes every write failed, so the store has not applied the call."""


class KeyProviderUnavailable(StoreUnavailable):
    """The store works, but the provider of its encryption keys does not respond.

    Even under `on_store_down="allow"` the view does not run, because the store still has the record. `remedy` is what an
    operator may do, if the provider knows.
    """

    def __init__(self, *arguments: object, remedy: str = "") -> None:
        super().__init__(*arguments)
        self.remedy = remedy


class RingMismatch(KeyProviderUnavailable):
    """The key ring of this process does not open what the store has. The record may be sound, so never quarantine it for this.

    The text names the id of the key, and no secret: logs show it.
    """


class StoreDataLoss(StoreUnavailable):
    """The store does not know this key, and it has lost data: the request may have run before.

    The store granted and changed nothing. Even under `on_store_down="allow"` the view does not run. `loss` is the value of a
    `DataLoss`; `noticed`: this call is the first to detect it.
    """

    def __init__(self, text: str, *, loss: str, noticed: bool = False) -> None:
        super().__init__(text)
        self.loss = loss
        self.noticed = noticed


class ResponseUnavailable(StoreUnavailable):
    """The store cannot return the response of a completed request now, or the recorded steps of one that is resumed.

    Even under `on_store_down="allow"` the view does not run again.
    """


class ResultNotRebuilt(StoreUnavailable):
    """What rebuilds the result of a step failed, as a database does that is away for a moment. The result stays recorded.

    Let it end the view: the request is paused, and a retry asks again.
    """


class InheritedConnection(StoreUnavailable):
    """The application's session holds a connection that its parent process opened before the fork.

    The store has not claimed or committed anything.
    """


class LeaseLost(IdempotencyError):
    """The token lost the record: another worker owns it, or it is resolved. The store has changed nothing."""


class CorruptRecord(IdempotencyError):
    """A stored record cannot be read. Never treat it as absent: a payment would run again."""


class DataKeyMissing(IdempotencyError):
    """The store does not have the data key of this payload, so it has not stored the payload.

    `erased`: an operator erased the tenant's responses after this key was first used. Otherwise the store has lost data.
    """

    def __init__(self, text: str = "", *, erased: bool) -> None:
        why = "its tenant was erased since the first request" if erased else "its data key is missing or disabled"
        super().__init__(text or f"the payload was not stored, because {why}")
        self.erased = erased


class NotStorable(IdempotencyError):
    """A response, or the result of a step, cannot be stored in a form that a retry could get. The text gives the reason."""


class NotCommitted(IdempotencyError):
    """The database refused to commit, and has no row of this request, or of this step. A retry may run it again.

    `retryable`: the cause was a conflict with other transactions, so the same request may succeed.
    """

    def __init__(self, text: str, *, retryable: bool) -> None:
        super().__init__(text)
        self.retryable = retryable


class StepsChanged(IdempotencyError):
    """The recorded steps of this request do not fit the code that runs now. No further step of it begins.

    Let it end the view: the request is quarantined with the reason `steps-changed`.
    """


class StepInDoubt(IdempotencyError):
    """This step has begun before, and it is not known whether it happened. It does not run again.

    Let it end the view: the request is quarantined until a resolver or an operator settles the step.
    """
