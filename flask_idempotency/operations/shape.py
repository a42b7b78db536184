"""What the names of keys are made of, remembered in the store, so that a change of it is noticed.

Adding or removing a loader, changing the namespace, or replacing a secret makes every key new: retries run again. No store
can see that in the keys themselves. So each application notes the shape of its identity there: whether it has loaders, and
keyed digests of the rest. It notes no name and no secret. A history with times is kept, not one value: during a rolling
deployment two shapes alternate.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final

from flask_idempotency.engine.chores import ChoreBook, Entry
from flask_idempotency.engine.key import Identity, owner_mark
from flask_idempotency.operations.spelling import moment

NOTED_EVERY_SECONDS: Final = 3600.0
"""How often a shape in use is noted. A change is reported for up to this much longer than it has to be."""

APART_SECONDS: Final = 2 * NOTED_EVERY_SECONDS
"""Two namespaces that are both in use for this long belong to two applications: deployments are over sooner."""

_PAUSE_SECONDS: Final = 3 * NOTED_EVERY_SECONDS
_PREFIX: Final = "identity:"
_LOCK_SECONDS: Final = 10.0
_MOST: Final = 8
_LONGEST: Final = 4000
_LONGEST_KEEP: Final = 90 * 86400.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How one application derives the names of its keys."""

    application: str
    """A digest of its name: which history is its own."""
    owner: str
    """Of the namespace: the mark that tokens carry as well."""
    tenant: bool
    principal: bool
    """Whether there is a loader."""
    secrets: tuple[str, ...]
    """Fingerprints, newest first."""
    names: tuple[str, ...]
    """One digest for each name under which a key is claimed: two shapes that share one find each other's keys."""
    keep: float
    """The longest of any endpoint."""
    former: int = 0
    """How many of `names`, at their end, are there only because of IDEMPOTENCY_FORMER_IDENTITY."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A shape in the history. Times are seconds since the epoch, by the store's clock."""

    shape: Shape
    first: float
    since: float
    """Since when it has been in use without a long pause."""
    last: float


@dataclass(frozen=True, slots=True)
class Change:
    """Keys that were used under another shape, and are new under the present one."""

    what: str
    remedy: str
    since: float
    """When the present shape was first used."""
    until: float
    """Until then a retry of such a key may come, and runs again."""
    certain: bool = True
    """False: it may be another application that uses the same secret."""

    @property
    def text(self) -> str:
        """One sentence for logs and for `doctor`."""
        whose = "" if self.certain else "Possibly: "
        return (
            f"{whose}the identity of keys has changed ({self.what}), first used {moment(self.since)}: keys that were used "
            f"before are new, and their retries run again, until {moment(self.until)}."
        )


@dataclass(frozen=True, slots=True)
class History:
    """What the store says of this application's identity."""

    now: float
    changes: tuple[Change, ...]
    former_until: float | None = None
    """Until when a key may come that was used under former names only. None: no more, as far as is noted."""
    noted: bool = True
    """False: it was not noted, because another process was at it. Look again soon."""


def shape_of(
    application: str,
    namespace: str,
    identities: Iterable[Identity],
    *,
    tenant: bool,
    principal: bool,
    keep: float,
    former: tuple[str, bool, bool] | None = None,
) -> Shape:
    """The shape of an application. `former`: the namespace of before, and whether it had a tenant_loader and a
    principal_loader then."""
    every = tuple(identities)
    present = [_digest(who, namespace, tenant, principal) for who in every]
    before = [] if former is None else [_digest(who, *former) for who in every]
    added = [name for name in before if name not in present]
    return Shape(
        application=sha256(b"flask_idempotency/1/application" + _bytes(application)).hexdigest()[:12],
        owner=owner_mark(namespace).hex(),
        tenant=tenant,
        principal=principal,
        secrets=tuple(who.fingerprint(b"identity of keys: secret")[:6].hex() for who in every),
        names=(*present, *added),
        keep=keep,
        former=len(added),
    )


def look(book: ChoreBook, shape: Shape, *, note: bool) -> History:
    """Compare this shape with what the store remembers. `note`: and remember this one, unless that was done lately.

    Raises `StoreUnavailable` when the store does not answer. Of several that note at once one does, and the others do
    the next time.
    """
    noted = book.last()
    now, seen = _read(noted.get(_PREFIX + shape.application)) or (book.now(), ())
    mine = next((each for each in seen if each.shape == shape), None)
    done = not note or (mine is not None and now - mine.last < NOTED_EVERY_SECONDS) or _note(book, shape)
    mine = mine or Seen(shape, now, now, now)
    changes = [change for each in seen if (change := _change(mine, each, now)) is not None]
    changes += _renamed(mine, noted, now)
    present = set(shape.names[: len(shape.names) - shape.former])
    bridged = [
        each.last + each.shape.keep
        for each in seen
        if present.isdisjoint(each.shape.names) and not set(shape.names).isdisjoint(each.shape.names)
    ]
    # Keys of a release that noted nothing may be there as well: it ended when this one began.
    until = max([mine.first + shape.keep, *bridged])
    return History(now, tuple(changes), until if until > now else None, done)


def _change(mine: Seen, other: Seen, now: float, *, certain: bool = True) -> Change | None:
    if not set(other.shape.names).isdisjoint(mine.shape.names):
        return None
    both = min(other.last, mine.last) - max(other.since, mine.since)
    # It was noted every so often, so it was in use for a while after the last time.
    until = other.last + min(max(mine.first - other.last, 0.0), NOTED_EVERY_SECONDS) + other.shape.keep
    if until <= now or (other.shape.owner != mine.shape.owner and both >= APART_SECONDS):
        return None
    what, remedy = _difference(mine.shape, other.shape, certain=certain)
    return Change(what, remedy, max(mine.first, other.first), until, certain)


def _renamed(mine: Seen, noted: Mapping[str, Entry], now: float) -> Iterator[Change]:
    """Applications of other names with the same secret that went out of use when this one came into use: the name of a
    Flask application is its namespace, unless that is written, and changes when a module is moved."""
    for name, entry in noted.items():
        if not name.startswith(_PREFIX) or name == _PREFIX + mine.shape.application:
            continue
        for other in (_read(entry) or (0.0, ()))[1]:
            same = not set(other.shape.secrets).isdisjoint(mine.shape.secrets)
            if same and other.first < mine.first and other.last <= mine.first + NOTED_EVERY_SECONDS:
                change = _change(mine, other, now, certain=False)
                if change is not None:
                    yield change


def _difference(shape: Shape, other: Shape, *, certain: bool) -> tuple[str, str]:
    whats, former = [], []
    if set(shape.secrets).isdisjoint(other.secrets):
        whats.append("IDEMPOTENCY_SECRET was replaced, and the former one is not listed")
    if shape.owner != other.owner:
        whats.append("another namespace")
        former.append('"namespace": the former one')
    for name in ("tenant", "principal"):
        has, had = getattr(shape, name), getattr(other, name)
        if has != had:
            whats.append(f"a {name}_loader was {'added' if has else 'removed'}")
            former.append(f'"{name}": ' + ("False" if has else "the former loader"))
    if not whats:
        whats.append("a former name was dropped before one `keep` had passed")
    steps = []
    if former:
        steps.append(f"set IDEMPOTENCY_FORMER_IDENTITY to {{{', '.join(former)}}}")
    if set(shape.secrets).isdisjoint(other.secrets):
        steps.append("list the former secret last in IDEMPOTENCY_SECRET")
    if not steps:
        steps.append("put back what was dropped from IDEMPOTENCY_SECRET or IDEMPOTENCY_FORMER_IDENTITY")
    remedy = f"Undo the change, or {' and '.join(steps)}, until then."
    if shape.owner != other.owner:
        remedy += " If that is another application in the same store, nothing has to be done"
        remedy += "; give each Flask application a name of its own to tell them apart." if certain else "."
    return "; ".join(whats), remedy


def _note(book: ChoreBook, shape: Shape) -> bool:
    """Add this shape to the history, or note that it is still in use. False: another process is at it."""
    name, token = _PREFIX + shape.application, secrets.token_bytes(16)
    if not book.take(name, token, lease=_LOCK_SECONDS):
        return False
    try:
        now, seen = _read(book.last().get(name)) or (book.now(), ())
        kept = [
            each for each in seen if each.shape != shape and each.last + each.shape.keep > now - NOTED_EVERY_SECONDS
        ]
        mine = next((each for each in seen if each.shape == shape), Seen(shape, now, now, now))
        since = now if now - mine.last > _PAUSE_SECONDS else mine.since
        kept = sorted(kept, key=lambda each: each.last)[1 - _MOST :]
        book.note(name, _written(now, [*kept, Seen(shape, mine.first, since, now)]))
    finally:
        book.give_back(name, token)
    return True


def _written(now: float, seen: list[Seen]) -> str:
    def spelt(seen: list[Seen]) -> str:
        return json.dumps({"at": now, "seen": [asdict(each) for each in seen]}, separators=(",", ":"))

    while len(text := spelt(seen)) > _LONGEST and len(seen) > 1:
        seen = seen[1:]
    return text


def _read(entry: Entry | None) -> tuple[float, tuple[Seen, ...]] | None:
    """The time, and the history. None: there is none, or it cannot be read. It comes from a store, so it is distrusted."""
    if entry is None or len(entry.report) > _LONGEST:
        return None
    try:
        told = json.loads(entry.report)
        now = _time(told["at"]) + entry.ago
        return now, tuple(_seen(each, now) for each in told["seen"][:_MOST])
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        # Python's JSON knows infinity, and whole numbers that no float holds.
        return None


def _seen(told: Mapping[str, Any], now: float) -> Seen:
    shape = told["shape"]
    return Seen(
        Shape(
            application=str(shape["application"]),
            owner=str(shape["owner"]),
            tenant=shape["tenant"] is True,
            principal=shape["principal"] is True,
            secrets=tuple(map(str, shape["secrets"])),
            names=tuple(map(str, shape["names"])),
            keep=min(_time(shape["keep"]), _LONGEST_KEEP),
            former=int(shape["former"]),
        ),
        *(min(_time(told[name]), now) for name in ("first", "since", "last")),
    )


def _time(told: Any) -> float:
    seconds = float(told)
    if not 0 <= seconds < 1e11:
        raise ValueError("no time")
    return seconds


def _digest(who: Identity, namespace: str, tenant: bool, principal: bool) -> str:
    parts = (b"identity of keys: name", _bytes(namespace), b"t" if tenant else b"-", b"p" if principal else b"-")
    return who.fingerprint(*parts)[:6].hex()


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
