"""Declare the steps of an endpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, is_dataclass
from typing import Any, Final, TypeAlias, get_args

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.journal import Effects

Returns: TypeAlias = type | tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""A dataclass or NamedTuple that a step returns; or two functions, to plain values and back from them."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SILENT: Final = (OSError, EOFError, BaseExceptionGroup)
"""Exceptions of Python's own that say nothing about an effect: the connection, or the reply, was lost."""
_SILENT_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "aiohttp": frozenset({"ClientError"}),
    "amqp": frozenset({"AMQPError"}),
    "billiard": frozenset({"SoftTimeLimitExceeded", "WorkerLostError"}),  # of a Celery task
    "botocore": frozenset({"HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseStreamingError"}),
    "celery": frozenset({"TimeoutError"}),
    "flask_idempotency": frozenset({"IdempotencyError", "Unsettled", "CarriedOut"}),
    "google": frozenset({"ServerError", "RetryError"}),
    "grpc": frozenset({"RpcError"}),
    "http": frozenset({"HTTPException"}),  # in http.client
    "httpcore": frozenset({"NetworkError", "TimeoutException", "ProtocolError", "ProxyError"}),
    "httpx": frozenset({"HTTPError", "StreamError"}),
    "json": frozenset({"JSONDecodeError"}),  # of a reply
    "kombu": frozenset({"OperationalError"}),
    "pika": frozenset({"AMQPError"}),
    "psycopg": frozenset({"OperationalError", "InterfaceError"}),
    "psycopg2": frozenset({"OperationalError", "InterfaceError"}),
    "pymongo": frozenset({"ConnectionFailure"}),
    "redis": frozenset({"RedisError"}),
    "requests": frozenset({"RequestException"}),
    "sqlalchemy": frozenset({"OperationalError", "InterfaceError", "TimeoutError"}),
    "simplejson": frozenset({"JSONDecodeError"}),
    "sqlite3": frozenset({"OperationalError"}),
    "stripe": frozenset({"APIConnectionError", "APIError", "IdempotencyError"}),
    "subprocess": frozenset({"SubprocessError"}),
    "urllib3": frozenset({"HTTPError"}),
    "valkey": frozenset({"ValkeyError"}),
    "xmlrpc": frozenset({"ProtocolError"}),
}
"""The same of other libraries: the other side may have acted before each. By a part of the module's name, because a library
need not be installed, and may be a copy within another. What inherits from one of them is as silent."""
_WIDE_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "botocore": frozenset({"BotoCoreError", "ClientError"}),
    "celery": frozenset({"CeleryError"}),
    "flask_idempotency": frozenset({"ClientError"}),
    "google": frozenset({"GoogleAPIError", "GoogleAPICallError"}),
    "psycopg": frozenset({"Error", "DatabaseError"}),
    "psycopg2": frozenset({"Error", "DatabaseError"}),
    "pymongo": frozenset({"PyMongoError"}),
    "sqlite3": frozenset({"Error", "DatabaseError"}),
    "sqlalchemy": frozenset({"SQLAlchemyError", "StatementError", "DBAPIError", "DatabaseError"}),
    "stripe": frozenset({"StripeError"}),
}
"""Exceptions that some of those inherit from. Others below them may be the answer of the other side."""


class UndeclaredStep(RuntimeError):
    """The endpoint does not list this step, so it has not run. The text names both remedies."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step that an endpoint may take: what happens to it after a crash.

    Raises `TypeError` for a wrong type, and `ConfigurationError` for values that cannot hold.
    """

    name: str
    """1 to 64 of `A-Za-z0-9._-`."""
    _: KW_ONLY
    effects: Effects = "plain"
    """`plain`: at most once. `deduplicated`: once by the other side's key. `transactional`: exactly once, in your own
    database. `pure`: a value without an effect, the same in all attempts."""
    harmless: tuple[type[Exception], ...] = ()
    """Exceptions of its function that prove that it had no effect. Such a step may run again."""
    returns: Returns | None = None
    """What rebuilds the result: a dataclass, a NamedTuple, or two functions, to plain values and back."""
    item: str | None = None
    """The parameter of a decorated function that tells several steps of this name apart."""
    compare: tuple[str, ...] | None = None
    """The parameters that must be the same in all attempts. None: all of them. Empty: none."""
    was: str | None = None
    """An earlier name of this step. It stays its identity, and that of its downstream keys, while you write it here."""
    intent: bool = True
    """False: do not record that a deduplicated step begins, which saves a call of the store."""

    def __post_init__(self) -> None:
        for name in (self.name, *(() if self.was is None else (self.was,))):
            if not isinstance(name, str):
                raise TypeError(f"the name of a step is text, not {type(name).__name__}")
            if not _NAME.fullmatch(name):
                raise ConfigurationError(f"the step name {name!r} must be 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'.")
        if self.was == self.name:
            raise ConfigurationError(f"step {self.name!r}: was= names the step itself. Leave it out.")
        if self.effects not in get_args(Effects):
            raise ConfigurationError(f"step {self.name!r}: effects must be one of {', '.join(get_args(Effects))}.")
        if not _all_in_tuple(self.harmless, lambda each: isinstance(each, type) and issubclass(each, Exception)):
            raise TypeError(
                f"step {self.name!r}: harmless is a tuple of subclasses of Exception. An interrupt proves nothing."
            )
        for error in self.harmless:
            if error is Exception or _says_nothing(error) or _is_named(error, _WIDE_NAMES):
                raise ConfigurationError(
                    f"step {self.name!r}: {error.__name__} in harmless= can follow an effect, as when only the reply was lost: "
                    "the step would run twice. Read the answer of the other side in the step's function, and raise an "
                    "exception of your own where it proves that nothing happened."
                )
        if self.compare is not None and not _all_in_tuple(self.compare, lambda each: isinstance(each, str)):
            raise TypeError(f"step {self.name!r}: compare is a tuple of parameter names")
        if self.item is not None and not isinstance(self.item, str):
            raise TypeError(f"step {self.name!r}: item is the name of a parameter")
        if self.returns is not None and not _rebuilds(self.returns):
            raise TypeError(f"step {self.name!r}: returns is a dataclass, a NamedTuple, or a pair of functions.")
        if not self.intent and self.effects != "deduplicated":
            raise ConfigurationError(
                f"step {self.name!r}: intent=False needs effects='deduplicated'. A {self.effects} step does not allow it."
            )

    @property
    def recorded_as(self) -> str:
        """The name in journals and downstream keys: the original one of a renamed step."""
        return self.was or self.name

    def is_harmless(self, error: BaseException) -> bool:
        """Return whether this error of its function proves that nothing happened.

        A lost reply may inherit from an exception that does.
        """
        return isinstance(error, self.harmless) and not _says_nothing(type(error))


def _all_in_tuple(values: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(values, tuple) and all(map(fits, values))


def _rebuilds(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(callable, value))
    return isinstance(value, type) and (is_dataclass(value) or (issubclass(value, tuple) and hasattr(value, "_fields")))


def _says_nothing(error: type[BaseException]) -> bool:
    """Return whether an exception of this class, or of one that it inherits from, can follow an effect."""
    return issubclass(error, _SILENT) or any(_is_named(each, _SILENT_NAMES) for each in error.__mro__)


def _is_named(error: type[Any], named: Mapping[str, frozenset[str]]) -> bool:
    return any(error.__name__ in named.get(part, ()) for part in str(error.__module__).split("."))


def step_faults(steps: Sequence[Step], dropped: frozenset[str], *, joint: bool) -> list[str]:
    """Return one sentence for each contradiction between these steps, with its remedy."""
    faults = []
    counted = Counter(step.name for step in steps)
    faults += [f"steps= lists {name!r} twice: each step has its own name." for name in counted if counted[name] > 1]
    names = set(counted)
    former = Counter(step.was for step in steps if step.was is not None)
    for name in former:
        if name in names or former[name] > 1:
            faults.append(f"was={name!r} is the name of another step too: no two steps may have one identity.")
    if both := sorted(dropped & (names | set(former))):
        faults.append(f"dropped_steps names {both[0]!r}, which steps= lists too. Leave it out of one of them.")
    if not joint and (step := next((step for step in steps if step.effects == "transactional"), None)):
        faults.append(
            f"step {step.name!r} is transactional, which needs a SQL store on the session's database: its rows could not be "
            "committed together with the journal. Set IDEMPOTENCY_STORE to flask-sqlalchemy://, or use another kind of step."
        )
    return faults
