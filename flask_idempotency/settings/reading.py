"""What options take, and how their values are read. A function that reads returns the loaded value, or raises `Refused`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.fingerprint import check_pointer
from flask_idempotency.engine.model import MAX_LIMIT
from flask_idempotency.engine.values import fits, valueclass
from flask_idempotency.settings.profiles import TOKEN, faults_of_kept

if TYPE_CHECKING:
    from flask_idempotency.engine.quota import NewKeys
    from flask_idempotency.engine.step_rules import Step

EXTENSIONS: Final = ("Flask-HTTPAuth", "Flask-JWT-Extended", "Flask-Login", "Flask-Principal")
"""The extensions that can name a caller, in the order in which we read them."""

MIN_LEASE_SECONDS: Final = 0.1
"""We renew a lease every third of it. A busy processor would lose a shorter one."""
MAX_KEEP_SECONDS: Final = 90 * 24 * 3600.0
MAX_WINDOW_SECONDS: Final = 366 * 24 * 3600.0
"""Every store can count so far: Redis counts in floating point, and a database stops at 2**63."""

Rule: TypeAlias = tuple[Callable[[Any], bool], str]
"""What must hold of a loaded value, and the sentence for one of which it does not."""

_STATUS_CLASS = re.compile(r"([1-5])xx", re.IGNORECASE)
_TOO_MUCH = (
    f"must not be more than 2**53 ({MAX_LIMIT}), the largest number that stores count to; for no limit, leave it out."
)


PLAIN: Final = (bool, str, int)
"""The types whose values an option takes as they are."""


class Refused(ValueError):
    """A value that an option does not take. Each argument is a sentence that says why; without one, `schema` converts it."""


class Option:
    """One option: how its value is read, what must hold of it, and its text for the reference.

    `kind` is the type of a value that is loaded as it is, or a function that returns the loaded value and raises `Refused`.
    """

    def __init__(self, kind: Callable[[Any], Any], *rules: Rule, allow_none: bool = False) -> None:
        self.kind = kind
        self.rules = rules
        self.allow_none = allow_none
        self.doc = ""
        self.default: object = None

    def load(self, value: Any) -> Any:
        """Load a value that needs no conversion, or raise `Refused`. Call it once: it may use up an iterator."""
        if value is None and self.allow_none:
            return None
        if value is None or (self.kind in PLAIN and type(value) is not self.kind):
            raise Refused
        loaded = self.kind(value)
        if broken := [sentence for holds, sentence in self.rules if not holds(loaded)]:
            raise Refused(*broken)
        return loaded


def seconds(value: Any) -> float:
    """Read a duration: a number of seconds, or a `timedelta`."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused("must be a number of seconds or a timedelta.")
    return float(value)


def _texts(value: Any, fault: str, fits: Callable[[str], object] = lambda text: True) -> tuple[str, ...]:
    """Read one text or several, all of which fit."""
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(text, str) and fits(text) for text in texts):
        raise Refused(fault)
    return texts


def header_names(value: Any) -> tuple[str, ...]:
    """Read one header name or several. Clients should use the first; the others are aliases."""
    return _texts(value, "must be a header name such as Idempotency-Key, or a list of them.", TOKEN.fullmatch)


def header_pairs(value: Any) -> tuple[tuple[str, str], ...]:
    """Read the headers that mark a replay: one name, with the value `true`, or a mapping of names to values."""
    pairs = {value: "true"} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
    if pairs is None or not all(
        isinstance(name, str)
        and TOKEN.fullmatch(name)
        and isinstance(text, str)
        and all(" " <= char <= "~" for char in text)
        for name, text in pairs.items()
    ):
        raise Refused("must be a header name, or a mapping of header names to values.")
    return tuple(pairs.items())


def kept_headers(value: Any) -> frozenset[str]:
    """Read names of response headers to keep, or their beginnings, in lower case. Refuse what belongs to one caller."""
    names = _texts(value, "must be a header name, or a list of them.")
    if faults := faults_of_kept(names):
        raise Refused(*faults)
    return frozenset(name.lower() for name in names)


def statuses(value: Any) -> frozenset[int]:
    """Read HTTP statuses: numbers, and classes such as "5xx"."""
    found: set[int] = set()
    for item in (value,) if isinstance(value, str | int) or not isinstance(value, Iterable) else value:
        if isinstance(item, str) and (match := _STATUS_CLASS.fullmatch(item)):
            found.update(range(int(match[1]) * 100, int(match[1]) * 100 + 100))
        elif isinstance(item, int) and not isinstance(item, bool) and 100 <= item <= 599:
            found.add(item)
        else:
            raise Refused('must contain statuses from 100 to 599, or classes such as "5xx".')
    return frozenset(found)


def methods(value: Any) -> frozenset[str]:
    """Read HTTP methods. Refuse those that are safe to repeat by definition (RFC 9110, section 9.2.1)."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise Refused('must be a list of methods such as ["POST", "PATCH"].')
    names = frozenset(str(method).upper() for method in value)
    if safe := names & {"GET", "HEAD", "OPTIONS", "TRACE"}:
        raise Refused(f"must not contain {', '.join(sorted(safe))}: such requests are safe to repeat anyway.")
    return names


def pointers(value: Any) -> tuple[str, ...]:
    """Read JSON Pointers (RFC 6901)."""
    found = _texts(value, 'must be a JSON Pointer such as "/sent_at", or a list of them.')
    for pointer in found:
        try:
            check_pointer(pointer)
        except ValueError as error:
            raise Refused(str(error)) from error
    return found


def decision(value: Any) -> Callable[..., Any]:
    """Read a function that is called with what the work returned and the exception that it raised."""
    if not callable(value):
        raise Refused("must be a function.")
    if not fits(value, None, None):
        raise Refused("must be a function of two arguments: what the work returned, and its exception or None.")
    return value  # type: ignore[no-any-return]


def steps(value: Any) -> tuple[Step, ...]:
    """Read the steps of an endpoint: decorated functions, `Step` objects, and names of plain steps."""
    from flask_idempotency.engine.step_rules import Step  # for the endpoints that have steps

    listed = value if isinstance(value, list | tuple) else (value,)
    found = []
    for each in listed:
        step = each if isinstance(each, Step) else getattr(each, "step", None)
        if isinstance(step, Step):
            found.append(step)
        elif isinstance(each, str):
            try:
                found.append(Step(each))
            except ConfigurationError as error:
                raise Refused(str(error)) from error
        else:
            named = getattr(each, "__qualname__", type(each).__name__)
            raise Refused(
                f"must list decorated functions, Step(…) or names, and {named} is none of them. Put "
                "@durable_step(…) on the function, outermost."
            )
    return tuple(found)


def step_names(value: Any) -> frozenset[str]:
    """Read names of steps."""
    return frozenset(_texts(value, "must be the name of a step, or a list of them."))


def imply_steps(loaded: dict[str, Any]) -> None:
    """Set what `steps` implies: an endpoint that lists its steps need not write `effects="steps"` too."""
    if loaded.get("steps"):
        loaded.setdefault("effects", "steps")


def rate(value: Any) -> NewKeys:
    """Read a pair: a number of keys, and the duration of the window in which they are counted."""
    from flask_idempotency.engine.quota import NewKeys  # for the applications that have quotas

    if isinstance(value, NewKeys):
        value = (value.count, value.seconds)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
        raise Refused("must be a pair: how many keys, and in each how many seconds, such as (1000, 3600).")
    number, length = value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise Refused("must begin with a whole number of keys, from 0 up.")
    if number > MAX_LIMIT:
        raise Refused(_TOO_MUCH)
    window = seconds(length)
    if not 0 < window <= MAX_WINDOW_SECONDS:
        raise Refused("must end with a window of more than 0 seconds and not more than a year.")
    return NewKeys(number, window)


@valueclass(frozen=True, slots=True)
class FormerIdentity:
    """The parts of a key's identity that were different until a change. None: this part has not changed."""

    namespace: str | None = None
    tenant: Literal[False] | Callable[[], str | None] | None = None
    """False: there was no loader. Otherwise the former loader."""
    principal: Literal[False] | tuple[str, ...] | Callable[[], str | None] | None = None
    """As `tenant`; or the extensions that named callers."""

    @property
    def coarse(self) -> bool:
        """Return whether the former names may stand for several callers of today."""
        return self.tenant is not None or self.principal is not None


def former_identity(value: Any) -> FormerIdentity:
    """Read a mapping with one or more of `namespace`, `tenant` and `principal`."""
    if not isinstance(value, Mapping) or not value or not set(value) <= {"namespace", "tenant", "principal"}:
        raise Refused(
            'must be a mapping of what was otherwise, such as {"tenant": False}, {"principal": False}, '
            '{"principal": "Flask-Login"} or {"namespace": "old"}.'
        )
    faults = []
    named, tenant = value.get("principal", False), value.get("tenant", False)
    if not (isinstance(namespace := value.get("namespace", "as it is"), str) and namespace):
        faults.append("namespace must be the former namespace, a non-empty string.")
    listed = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, list | tuple) else ()
    loaded = dict(value)
    if listed and all(each in EXTENSIONS for each in listed):
        loaded["principal"] = tuple(each for each in EXTENSIONS if each in listed)
    elif named is not False and not callable(named):
        faults.append(
            "principal must be False if callers had no name; the function that was the principal_loader; or the "
            f"extensions that named callers: one of {', '.join(EXTENSIONS)}, or a list of them."
        )
    if tenant is not False and not callable(tenant):
        faults.append("tenant must be False if there was no tenant_loader, or else the function that was the loader.")
    if faults:
        raise Refused(*faults)
    return FormerIdentity(**loaded)


def anything(value: Any) -> Any:
    """Read any value as it is."""
    return value


def pattern(value: Any) -> str:
    """Read a regular expression."""
    if not isinstance(value, str):
        raise Refused("Not a valid string.")
    try:
        re.compile(value)
    except re.error as error:
        raise Refused(f"is not a regular expression: {error}.") from error
    return value


def one_of(*words: str, allow_none: bool = False) -> Option:
    return Option(str, (words.__contains__, f"must be one of: {', '.join(words)}."), allow_none=allow_none)


def whole_number(*, least: int = 0, most: int | None = None, allow_none: bool = False) -> Option:
    """A whole number from `least` up. True is not one."""
    error = "must not be negative." if least == 0 else f"must be at least {least}."
    if most is not None:
        error = f"must be from {least} to {most}."
    return Option(
        int, (lambda value: least <= value <= (math.inf if most is None else most), error), allow_none=allow_none
    )


def limit(doc: str) -> Option:
    """How much one tenant may have. None is no limit."""
    too_much = (lambda value: value <= MAX_LIMIT, _TOO_MUCH)
    return documented(Option(int, NOT_NEGATIVE, too_much, allow_none=True), doc, "no limit")


POSITIVE: Final[Rule] = (lambda value: value > 0, "must be more than 0.")
NOT_TOO_SHORT: Final[Rule] = (lambda value: value >= MIN_LEASE_SECONDS, "must be at least a tenth of a second.")
UP_TO_90_DAYS: Final[tuple[Rule, ...]] = (
    POSITIVE,
    (lambda value: value <= MAX_KEEP_SECONDS, "must not be longer than 90 days."),
)
NOT_NEGATIVE: Final[Rule] = (lambda value: value >= 0, "must not be negative.")


def matches(expression: str, error: str) -> Rule:
    return lambda value: re.match(expression, value) is not None, error


def documented(option: Option, doc: str, default: object = None) -> Option:
    """Return this option with its sentence for the reference, and the default that it shows."""
    option.doc, option.default = doc, default
    return option
