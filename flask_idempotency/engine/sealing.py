"""From what came of the work to what a store keeps of it, whatever becomes of the keys meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from flask_idempotency.engine.errors import DataKeyGone, NotStorable, StoreUnavailable
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.ports import Binding, Codec, Writing
from flask_idempotency.engine.record import ERASED, Payload
from flask_idempotency.engine.result import Result

TRIES: Final = 3
"""A store that has lost a data key twice in a row, while one answer was being stored, will not keep the third either."""


class Sealing:
    """One claim's result, sealed for each of its records when that is written, and once.

    A store that lacks the data key says so and stores nothing. Then the answer is sealed with a new key; or, if its tenant
    has been erased since the claim was made, nothing is kept but that the work was done.
    """

    def __init__(self, codec: Codec, bindings: Sequence[Binding], result: Result) -> None:
        self._codec = codec
        self._bindings = {binding.key: binding for binding in bindings}
        self._result = result
        self._sealed: dict[StorageKey, Payload] = {}

    @property
    def status(self) -> int:
        return self._result.status

    @property
    def kept(self) -> bool:
        """Whether there is anything to replay but that the work was done."""
        return self._result.kept and all(payload.sealed_by != ERASED for payload in self._sealed.values())

    @property
    def byte_size(self) -> int:
        """Of what the store was given for the newest key."""
        return len(self._sealed[next(iter(self._bindings))].data)

    def writing(self, store: Callable[[StorageKey, Payload], None]) -> Callable[[StorageKey], None]:
        """A write that stores this result under a key, as often as it is asked to."""

        def write(key: StorageKey) -> None:
            self._until_kept(lambda: store(key, self._payload(key)))

        return write

    def committing(self, commit: Callable[[Writing], None]) -> None:
        """Commit with the payloads of all records, in the order of their bindings."""

        def payloads() -> list[Payload]:
            return [self._payload(key) for key in self._bindings]

        # Seal before the commit begins: a codec that fails must leave it alone.
        payloads()
        commit(lambda write: self._until_kept(lambda: write(payloads())))

    def _until_kept(self, attempt: Callable[[], None]) -> None:
        for _ in range(TRIES):
            try:
                return attempt()
            except DataKeyGone as gone:
                for key in self._bindings:
                    self._lost(key, erased=gone.erased)
        raise StoreUnavailable("the store forgets its data keys as fast as it is given new ones")

    def _lost(self, key: StorageKey, *, erased: bool) -> None:
        payload = self._sealed.pop(key, None)
        self._codec.forget(key)
        if erased and payload is not None:
            self._sealed[key] = Payload(b"", payload.status, payload.success, 0, ERASED)

    def _payload(self, key: StorageKey) -> Payload:
        if key not in self._sealed:
            try:
                self._sealed[key] = self._codec.seal(self._result, self._bindings[key])
            except NotStorable:
                self._result = Result(status=self._result.status, kept=False)
                self._sealed[key] = self._codec.seal(self._result, self._bindings[key])
        return self._sealed[key]
