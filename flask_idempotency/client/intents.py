"""An intent: one thing that you want to happen once. It owns the key that every attempt sends.

The current intent is a context variable. Tasks and `asyncio.to_thread` inherit it, the threads of a pool do not.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import replace
from typing import Any, Final, Literal, Self, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from flask_idempotency.client import errors
from flask_idempotency.client.ledger import Begun, Entry, Ledger, State
from flask_idempotency.client.responses import Reading, read

__all__ = ["Intent", "Intents", "current_intent", "new_key"]

_UNLESS: Final = {
    "void-not-offered": " Its operation does not let clients void keys, so asking again does not help.",
    "unknown-operation": " Name in `method` and `path` an operation of the service that takes keys.",
    "principal-required": " Authenticate as for the request.",
}
"""What to do about a refusal to void, by its code."""

R = TypeVar("R")

_RANDOM_BITS: Final = 80

_log = logging.getLogger("flask_idempotency.client")
_current: ContextVar[Intent | None] = ContextVar("flask_idempotency.client.intent", default=None)


_taken: WeakValueDictionary[str, Intent] = WeakValueDictionary()


def taken_intent(key: str | None) -> Intent | None:
    """Return the intent whose `take()` returned this key in this process, or None."""
    return None if key is None else _taken.get(key)


def new_key() -> str:
    """Return a new key: a UUID of version 7 (RFC 9562).

    It states when it was made. A service that has lost its records accepts keys that are newer than the loss.
    """
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def current_intent() -> Intent | None:
    """Return the intent whose block this code runs in, or None."""
    return _current.get()


class Intents:
    """Makes intents, and remembers the key of each name.

    With a `Ledger` on disk a name outlives the process. Without one it lasts as long as this object.
    """

    def __init__(self, ledger: Ledger | None = None, *, make_key: Callable[[], str] = new_key) -> None:
        self.ledger: Ledger = Ledger() if ledger is None else ledger
        self._make_key = make_key
        self._unnamed = Ledger()
        self._unnamed.restarts = True

    def __call__(self, name: str | None = None, *, key: str | None = None, compare: bool = True) -> Intent:
        """Return an intent to use in a `with` block.

        `name` identifies what shall happen once, such as "pay invoice 17". The same name has the same key, also in another
        run of the program, until the service has refused it. Without a name, the key is this intent's alone.
        `key` is a key that you already have. `compare=False` lets the content of the request change between attempts; the
        service compares it in any case.
        """
        for given in (name, key):
            if given is not None and not isinstance(given, str):
                raise TypeError(f"An intent's name and key are text, not {type(given).__name__}.")
            if given is not None and not given.isascii() and any("\ud800" <= each <= "\udfff" for each in given):
                raise ValueError("An intent's name and key are text that UTF-8 can write.")
        if name == "" or key == "":
            raise ValueError(
                "An intent's name and key must not be empty. Leave them out, or name what shall happen once."
            )
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("An intent's key must have visible ASCII characters only, because it goes into a header.")
        ledger = self._unnamed if name is None else self.ledger
        return Intent(ledger, name, key or self._make_key(), compare=compare, given=key is not None)


class Intent:
    """One request that shall be carried out once. Use it in a `with` block; requests inside carry its key.

    `async with` does the same, and does not block the loop while the ledger writes. An intent is used once.

    Entering the block raises `KeyExpired` or `IntentOver` if the name was used longer ago than the service keeps keys,
    `KeyVoided` if it was voided, and `LedgerError` if the ledger cannot be used. A block of a named intent that ends normally,
    and sent no request under it, warns with `RuntimeWarning`: a request that bypassed the transport has another key, or none.
    """

    def __init__(self, ledger: Ledger, name: str | None, key: str, *, compare: bool, given: bool) -> None:
        self.name = name
        """The name, or None."""
        self.status: int | None = None
        """The status of the response that settled it, or of the last one."""
        self.replayed: bool = False
        """Whether the last response was the stored one of an earlier attempt."""
        self.compare = compare
        """Whether a second request with other content is refused before it is sent."""
        self._ledger = ledger
        # The row of an intent without a name has its key, and goes with the block.
        self._row = key if name is None else name
        self._key = key
        self._given = given
        self._entry: Entry | None = None
        self._opened = False
        self._token: Token[Intent | None] | None = None
        self._began = False
        self._taken: Begun | None = None
        self._sent_by_transport = False
        self._said: State | None = None

    @property
    def key(self) -> str:
        """The key that the next attempt sends."""
        return self._key

    @property
    def in_doubt(self) -> bool:
        """Whether the request may have been carried out and no response has settled it.

        A response that you got may leave the doubt: a 402 after a lost reply settles only if it is marked as a replay. Then
        send the same request again under this name, and do not treat it as refused.
        """
        return self._entry is not None and self._entry.state == "sent" and self._entry.doubt

    @property
    def on_disk(self) -> bool:
        """Whether sending writes to a file."""
        return self._ledger.on_disk

    def take(self) -> str:
        """Return the key, for a client that sends it by itself, such as Stripe's. The ledger notes that it is sent.

        If the block ends normally, the intent is done. If it ends with an exception, it is unsettled: the next run sends the
        same key. Call `refused()` if the service said finally that nothing was done. Once you took a key, no call says that
        nothing was done. The intent does not see what you send, so it does not compare it with an earlier request.
        """
        if self._taken is None:
            self._taken = self.begin(None)
            _taken[self._key] = self
        return self._key

    def settled(self, status: int | None = None) -> None:
        """Note that the request was carried out."""
        self._finish("done", status)

    def refused(self, status: int | None = None) -> None:
        """Note that the service refused the request finally. The next intent of this name gets a new key."""
        self._finish("refused", status)

    def void(
        self, client: Any, url: str, *, path: str, method: str = "POST", header: str = "Idempotency-Key", **options: Any
    ) -> Literal["voided", "done"]:
        """Void the key, so that the service does not carry out its request while it knows the key. Return `voided`, or `done`
        if that is too late.

        `client` is an `httpx.Client` or a `requests.Session`, `url` the status view of the service, and `method` and `path`
        those of the request; `options` go to `client.request`. After `voided` the name is over: nothing was done under its
        key, and an intent of this name raises `KeyVoided`. After `done`, send the request again to get its response, or
        `AnswerExpired` if the service keeps it no longer.

        Raises `InFlight` while the request runs, and `OutcomeUnknown` for any other response: the key may be voided or not,
        so call this again. Raises `KeyExpired`, `KeyVoided` and `IntentOver` as sending does, and what `client` raises.
        """
        begun = self.begin(None)
        if begun.before.state == "done":
            return "done"
        with self._voiding(begun):
            response = client.request("DELETE", **self._asked(begun, url, path, method, header, options))
        return self._voided(begun, response, url)

    async def void_async(
        self, client: Any, url: str, *, path: str, method: str = "POST", header: str = "Idempotency-Key", **options: Any
    ) -> Literal["voided", "done"]:
        """Do as `void`, with an `httpx.AsyncClient`."""
        begun = await in_thread(lambda: self.begin(None), on_disk=self.on_disk)
        if begun.before.state == "done":
            return "done"
        with self._voiding(begun):
            response = await client.request("DELETE", **self._asked(begun, url, path, method, header, options))
        return await in_thread(lambda: self._voided(begun, response, url), on_disk=self.on_disk, shield=True)

    def __enter__(self) -> Self:
        self.open()
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            _reset(self._token)
        self.leave(normally=kind is None)
        if kind is None:
            self._warn_if_unused()

    async def __aenter__(self) -> Self:
        await in_thread(self.open, on_disk=self.on_disk)
        self._token = _current.set(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            _reset(self._token)
        await in_thread(lambda: self.leave(normally=kind is None), on_disk=self.on_disk)
        if kind is None:
            self._warn_if_unused()

    # What the block and the transports call.

    def open(self) -> None:
        """Read the entry of this name. `with` calls it. Nothing is written before the key is sent."""
        if self._opened:
            raise RuntimeError("An intent is used once. Make another one with the same name.")
        self._opened = True
        entry = self._ledger.find(self._row)
        if entry is not None and entry.state != "refused":
            self._adopt(entry)
            self._refuse_expired(entry)

    def content(self, method: str, media_type: str, body: bytes | None) -> bytes | None:
        """Return what `begin` compares of a request, or None if its body is not at hand.

        JSON is compared by meaning, because libraries change their white space. Multipart bodies are not compared, because
        they have random boundaries.
        """
        if body is None or not self.compare:
            return None
        kind = media_type.partition(";")[0].strip().lower()
        if kind.startswith("multipart/"):
            body = b""
        elif kind == "application/json" or kind.endswith("+json"):
            # A body that is no JSON is compared by its bytes.
            with suppress(ValueError, RecursionError):
                body = json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode()
        return f"{method.upper()}\n{kind}\n".encode() + body

    def begin(self, content: bytes | None) -> Begun:
        """Note that the key is about to be sent. When this returns, the ledger has it on disk.

        Raises `KeyReused` if the intent sent other content before, `KeyExpired` and `IntentOver`.
        """
        self._began = True
        begun = self._ledger.begin(self._row, self._key, content)
        self._adopt(begun.entry)
        self._refuse_expired(begun.before)
        if begun.differs:
            raise errors.KeyReused(
                "This intent sent a request with another method, media type or body.", key=self._key, intent=self.name
            )
        return begun

    def end(self, begun: Begun, state: State | None, last: Reading | None, *, attempts: int) -> bool:
        """Note how a delivery ended, and return whether that stands. A transport calls it once for each `begin`.

        `last` is the response of the last attempt, if there is one.
        """
        self._sent_by_transport = True
        self.status, self.replayed = (None, False) if last is None else (last.status, last.replayed)
        return self._settle(begun.entry, state, self.status, attempts, certain=self.replayed)

    def leave(self, *, normally: bool) -> None:
        """Settle what was taken by hand. `with` calls it at the end of the block."""
        if self._taken is not None and self._said is None and not self._sent_by_transport and normally:
            self._finish("done", self.status)
        if self.name is None:
            self._ledger.forget(self._row)

    @contextmanager
    def _voiding(self, begun: Begun) -> Iterator[None]:
        """Keep a transport from taking the DELETE for the request of the intent, and its errors for those of the request."""
        self._said = "sent"
        taken, token = _taken.pop(begun.entry.key, None), _current.set(None)
        try:
            yield
        except (errors.InFlight, errors.OutcomeUnknown):
            raise
        except errors.ClientError as error:
            # Such as `NotSent`: the DELETE was not sent, and the request may have been.
            facts = {"key": begun.entry.key, "intent": self.name, "code": error.code, "response": error.response}
            raise errors.OutcomeUnknown("The key was not voided.", **facts) from error
        finally:
            _reset(token)
            if taken is not None:
                _taken[begun.entry.key] = taken

    def _asked(
        self, begun: Begun, url: str, path: str, method: str, header: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        # A link of a problem names the operation already.
        named = {} if "path=" in urlsplit(url).query else {"method": method, "path": path}
        fields = {**dict(options.get("headers") or {}), header: begun.entry.key}
        params = {**dict(options.get("params") or {}), **named} or None
        return {**options, "url": url, "params": params, "headers": fields}

    def _voided(self, begun: Begun, response: Any, url: str) -> Literal["voided", "done"]:
        reading = read(response.status_code, response.headers, response.content, url=url)
        state: object = None
        if reading.status == 200:
            with suppress(ValueError, AttributeError):
                state = response.json().get("state")
        reason = f"The service did not void the key: it answered {reading.status}{f' {reading.code}' if reading.code else ''}."
        reason += _UNLESS.get(reading.code or "", "")
        if state == "expired":
            state = "done"  # its response is no longer kept
        for ending in ("voided", "done"):
            if state == ending:
                self._said = ending
                stands = self._settle(begun.entry, ending, reading.status, 1, certain=True)
                if stands or ending == "done":
                    return ending
                reason = "The key was voided, and the ledger has another one under this name."
        raise (errors.InFlight if reading.code == "in-flight" else errors.OutcomeUnknown)(
            reason,
            key=begun.entry.key,
            intent=self.name,
            attempts=1,
            code=reading.code,
            response=response,
            retry_after=reading.retry_after,
        )

    def _warn_if_unused(self) -> None:
        if self.name is None or self._began or self._said is not None:
            return
        # An exception would lose the response of a request that was carried out. The name is left out: Python keeps one
        # entry for each text of a warning. The level is that of the `with` line.
        warnings.warn(
            "No request was sent under this named intent. If you sent one in its block, it had another key or none, and the "
            "next run would send it a second time. Send it through a client whose idempotent transport covers its URL, in "
            'this thread or a task of it, or pass headers={"Idempotency-Key": intent.take()}.',
            RuntimeWarning,
            stacklevel=3,
        )

    def _finish(self, state: State, status: int | None) -> None:
        self._said = state
        self.status = self.status if status is None else status
        if self._entry is None:
            # You looked it up, and send nothing.
            self.take()
        entry = self._taken.entry if self._taken is not None else self._entry
        if entry is not None:
            self._settle(entry, state, self.status, 0, certain=True)

    def _settle(self, entry: Entry, state: State | None, status: int | None, attempts: int, *, certain: bool) -> bool:
        try:
            stands = self._ledger.settle(entry, state, status=status, attempts=attempts, certain=certain)
        except errors.LedgerError as error:
            # The response is here and must not get lost. The entry stays unsettled, so the same key is sent again.
            reason = str(error).replace(" Nothing was sent.", "")
            _log.warning(
                "The ledger did not note how an intent ended. The next run must send its key again. %s", reason
            )
            return False
        if stands and state is not None:
            self._entry = replace(entry, state=state, doubt=False)
        return stands

    def _adopt(self, entry: Entry) -> None:
        if self._given and entry.key != self._key:
            raise errors.KeyReused("This name has another key in the ledger.", key=self._key, intent=self.name)
        self._entry, self._key = entry, entry.key

    def _refuse_expired(self, entry: Entry) -> None:
        if entry.state == "voided":
            raise errors.KeyVoided("The intent was voided.", key=entry.key, intent=self.name)
        if not self._ledger.expired(entry):
            return
        if entry.state == "done":
            raise errors.IntentOver(
                "The intent ended longer ago than the service keeps keys.", key=entry.key, intent=self.name
            )
        raise errors.KeyExpired(
            "The intent was sent longer ago than the service keeps keys, and never settled.",
            key=entry.key,
            intent=self.name,
        )


def _reset(token: Token[Intent | None]) -> None:
    # Frameworks may leave a block in another context than the one that entered it. That context has ended.
    with suppress(ValueError):
        _current.reset(token)


async def in_thread(call: Callable[[], R], *, on_disk: bool, shield: bool = False) -> R:
    """Call this in a thread if it writes to a file. `shield`: also if the task was cancelled."""
    if not on_disk:
        return call()
    import anyio
    import anyio.to_thread

    with anyio.CancelScope(shield=shield):
        returned = await anyio.to_thread.run_sync(call)
    return returned  # noqa: RET504 - for all that mypy knows, a scope may swallow an exception
