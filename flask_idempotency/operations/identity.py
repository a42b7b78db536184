"""Detect a change of what the names of keys are made of, by a history in the store.

A new or removed loader, another namespace or a replaced secret makes every key new, so that retries run again. The store
cannot see that in the keys. So each application records the shape of its identity: the kinds of loaders, a digest of the
namespace, and fingerprints of the secrets, but no name and no secret. It keeps a history with times, because two shapes
alternate during a rolling deployment.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, field, replace
from hashlib import sha256
from typing import Any, Final

from flask_idempotency.engine.keys import Identity, encode, owner_mark
from flask_idempotency.engine.tasks import TaskLog, TaskReport
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings.reading import EXTENSIONS

NOTED_EVERY_SECONDS: Final = 3600.0
"""How often an application records its shape. A report of a change may last this much too long."""

APART_SECONDS: Final = 2 * NOTED_EVERY_SECONDS
"""Two namespaces that are both in use for this long belong to two applications: a deployment is shorter."""

LOADER: Final = "loader"
FORMER_LOADER: Final = "function"
"""A function in IDEMPOTENCY_FORMER_IDENTITY. What it returns cannot be verified."""

NOT_SET_UP: Final = "not set up"
"""IDEMPOTENCY_FORMER_IDENTITY names an extension that the application no longer has."""

_HTTPAUTH: Final = EXTENSIONS[0]
_KINDS: Final = (LOADER, FORMER_LOADER, NOT_SET_UP, *EXTENSIONS)
_PAUSE_SECONDS: Final = 3 * NOTED_EVERY_SECONDS
_PREFIX: Final = "identity:"
_LOCK_SECONDS: Final = 10.0
_MOST: Final = 8
_LONGEST: Final = 4000
_LONGEST_KEEP: Final = 90 * 86400.0


@valueclass(frozen=True, slots=True)
class LoaderUse:
    """What the name of a key is made of, without the secret. Kinds only."""

    owner: str
    """The mark of the namespace, which tokens carry too."""
    tenant: tuple[str, ...] = ()
    """What names tenants: a loader, or empty."""
    principal: tuple[str, ...] = ()
    """What names principals: a loader, or extensions in their order, or empty. Without Flask-HTTPAuth: see
    `IdentityShape.httpauth`. A former use includes it if it was listed."""


@valueclass(frozen=True, slots=True)
class IdentityShape:
    """How one application makes the names of its keys."""

    application: str
    """A digest of its name, which identifies its history."""
    present: LoaderUse
    former: LoaderUse | None
    """IDEMPOTENCY_FORMER_IDENTITY: requests claim keys by it too."""
    secrets: tuple[str, ...]
    """Fingerprints, newest first."""
    keep: float
    """The longest of any endpoint."""
    httpauth: bool = field(default=False, compare=False)
    """Whether Flask-HTTPAuth has named a caller; for the shape of now, whether it may do so. An application does not show
    that it has it until a request comes."""


@valueclass(frozen=True, slots=True)
class SeenShape:
    """A shape in the history. Times are seconds since the epoch, by the store's clock."""

    shape: IdentityShape
    first: float
    since: float
    """The start of its use without a long pause."""
    last: float


@valueclass(frozen=True, slots=True)
class IdentityChange:
    """Keys that were used under another shape are new under the present one."""

    what: str
    remedy: str
    since: float
    """The first use of the present shape."""
    until: float
    """Until then a retry of such a key may come and run again."""
    certain: bool = True
    """False: it may be another application with the same secret, or concern only principals with two names."""

    @property
    def text(self) -> str:
        """Return one sentence for logs and for `doctor`."""
        from flask_idempotency.operations.times import moment  # for the applications whose identity has changed

        if self.what == _WRONG:
            return (
                f"{_WRONG}: no other release named keys like that. Keys that were used before may be new, and their retries "
                f"run again, until {moment(self.until)}."
            )
        whose = "" if self.certain else "Possibly: "
        return (
            f"{whose}the identity of keys has changed ({self.what}), first used {moment(self.since)}: keys that were used "
            f"before are new, and their retries run again, until {moment(self.until)}."
        )


@valueclass(frozen=True, slots=True)
class IdentityHistory:
    """What the store knows of this application's identity."""

    changes: tuple[IdentityChange, ...]
    former_until: float | None = None
    """Until then a key may come that was used under former names only. None: no such key is known."""
    noted: bool = True
    """False: another process was writing, so this shape was not recorded. Look again soon."""
    wrong: bool = False
    """Whether IDEMPOTENCY_FORMER_IDENTITY contradicts the history in the store."""


def shape_of(
    application: str,
    namespace: str,
    identities: Iterable[Identity],
    *,
    tenant: tuple[str, ...] = (),
    principal: tuple[str, ...] = (),
    httpauth: bool = False,
    keep: float,
    former: tuple[str, tuple[str, ...], tuple[str, ...]] | None = None,
) -> IdentityShape:
    """Return the shape of an application. `former` is the former namespace, and the former kinds of tenants and principals."""
    return IdentityShape(
        application=sha256(
            b"flask_idempotency/1/application" + application.encode("utf-8", "surrogatepass")
        ).hexdigest()[:12],
        present=LoaderUse(owner_mark(namespace).hex(), tenant, principal),
        former=None if former is None else LoaderUse(owner_mark(former[0]).hex(), *former[1:]),
        secrets=tuple(who.fingerprint(encode(b"identity of keys: secret"))[:6].hex() for who in identities),
        keep=keep,
        httpauth=httpauth,
    )


def look(task_log: TaskLog, shape: IdentityShape, *, note: bool, httpauth: bool = False) -> IdentityHistory:
    """Compare this shape with the history in the store. `note`: also record it, unless that happened lately.

    `httpauth`: Flask-HTTPAuth has named a principal in this process. If several processes record together, one succeeds and
    the others try next time. Raises `StoreUnavailable` if the store does not answer.
    """
    noted = task_log.reports()
    now, seen = _read(noted.get(_PREFIX + shape.application)) or (task_log.now(), ())
    mine = next((each for each in seen if each.shape == shape), None)
    lately = mine is not None and now - mine.last < NOTED_EVERY_SECONDS and mine.shape.httpauth >= httpauth
    done = not note or lately or _note(task_log, replace(shape, httpauth=httpauth))
    mine = SeenShape(shape, now, now, now) if mine is None else replace(mine, shape=shape)
    others = [each for each in seen if each.shape != shape]
    # Whether IDEMPOTENCY_FORMER_IDENTITY matches no release in the history.
    former, known = shape.former, [use for each in others for use in _loader_uses(each.shape)]
    recent = any(_ends(mine, each) > now and not _is_apart(mine, each) for each in others)
    wrong = former is not None and recent and not any(_alike(former, each) for each in known)
    changes = [change for each in others if (change := _change(mine, each, now, wrong=wrong)) is not None]
    changes += _renamed(mine, noted, now)
    if wrong and not any(change.certain for change in changes):
        remedy = "Correct it or remove it: as far as is noted, keys have always had their present names."
        until = max(_ends(mine, each) for each in others if not _is_apart(mine, each))
        changes.append(IdentityChange(_WRONG, remedy, mine.first, until))
    bridged = [
        each.last + each.shape.keep
        for each in others
        if shape.former is not None
        and _meets(mine, each)
        and not _meets(replace(mine, shape=replace(shape, former=None)), each)
    ]
    # There may be keys of a release that recorded no shape. It ended when this shape began.
    until = max([mine.first + shape.keep, *bridged])
    return IdentityHistory(tuple(changes), until if until > now else None, done, wrong)


_WRONG: Final = "IDEMPOTENCY_FORMER_IDENTITY does not match the history in the store"


def _is_apart(mine: SeenShape, other: SeenShape) -> bool:
    """Return whether the other shape is that of another application with the same name and another namespace."""
    both = min(other.last, mine.last) - max(other.since, mine.since)
    return mine.shape.present.owner != other.shape.present.owner and both >= APART_SECONDS


def _loader_uses(shape: IdentityShape) -> list[LoaderUse]:
    """Return the present and former use of this shape, with Flask-HTTPAuth if that may name callers."""
    present = shape.present
    if shape.httpauth and LOADER not in present.principal:
        present = replace(present, principal=(_HTTPAUTH, *present.principal))
    return [present] if shape.former is None else [present, shape.former]


def _meets(mine: SeenShape, other: SeenShape) -> bool:
    """Return whether this shape finds every key that was used under the other."""
    if set(mine.shape.secrets).isdisjoint(other.shape.secrets):
        return False
    return any(
        _alike(one, its)
        for one in _loader_uses(mine.shape)
        for its in _loader_uses(other.shape)
        # A former loader names what was in use before it.
        if not (_is_believed(one) and mine.first < other.first) and not (_is_believed(its) and other.first < mine.first)
    )


def _is_believed(use: LoaderUse) -> bool:
    return FORMER_LOADER in (*use.tenant, *use.principal)


def _alike(mine: LoaderUse, other: LoaderUse) -> bool:
    return (
        mine.owner == other.owner
        and _reproduces(mine.tenant, other.tenant)
        and _reproduces(mine.principal, other.principal)
    )


def _reproduces(mine: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether these kinds may give the same names as the others."""
    if FORMER_LOADER in mine or FORMER_LOADER in other:
        return True
    # Flask-HTTPAuth may be set up without having named a caller yet.
    return set(mine) - {_HTTPAUTH} == set(other) - {_HTTPAUTH} and (_HTTPAUTH in mine or _HTTPAUTH not in other)


def _ends(mine: SeenShape, other: SeenShape) -> float:
    """Return the time until which clients may retry keys of the other shape."""
    # A process records its shape once an hour, so it was in use for a while after the last entry.
    return other.last + min(max(mine.first - other.last, 0.0), NOTED_EVERY_SECONDS) + other.shape.keep


def _change(
    mine: SeenShape, other: SeenShape, now: float, *, certain: bool = True, wrong: bool = False
) -> IdentityChange | None:
    until = _ends(mine, other)
    if _meets(mine, other) or until <= now or _is_apart(mine, other):
        return None
    what, remedy = _difference(mine.shape, other.shape, certain=certain)
    if wrong:
        what = f"{what}; {_WRONG}"
    # An extension that only joined others leaves the names of the callers that it does not name.
    now_used, before = _loader_uses(mine.shape)[0], _loader_uses(other.shape)[0]
    alike = _alike(replace(now_used, principal=()), replace(before, principal=()))
    same = alike and not set(mine.shape.secrets).isdisjoint(other.shape.secrets)
    only_added = same and bool(before.principal) and set(before.principal) <= set(now_used.principal)
    certain = certain and (wrong or not only_added)
    return IdentityChange(what, remedy, max(mine.first, other.first), until, certain)


def _renamed(mine: SeenShape, noted: Mapping[str, TaskReport], now: float) -> Iterator[IdentityChange]:
    """Yield the changes from applications with the same secret and another name that ended when this one began.

    The name of a Flask application is its namespace by default, and changes when you move its module.
    """
    for name, entry in noted.items():
        if not name.startswith(_PREFIX) or name == _PREFIX + mine.shape.application:
            continue
        for other in (_read(entry) or (0.0, ()))[1]:
            same = not set(other.shape.secrets).isdisjoint(mine.shape.secrets)
            if same and other.first < mine.first and other.last <= mine.first + NOTED_EVERY_SECONDS:
                change = _change(mine, other, now, certain=False)
                if change is not None:
                    yield change


def _difference(shape: IdentityShape, other: IdentityShape, *, certain: bool) -> tuple[str, str]:
    """Return what differs, and the remedy. Neither is empty: call it only for shapes that do not meet (`_meets`)."""
    whats, former, kept = [], [], ""
    now, before = _loader_uses(shape)[0], _loader_uses(other)[0]
    if set(shape.secrets).isdisjoint(other.secrets):
        whats.append("IDEMPOTENCY_SECRET was replaced, and the former one is not listed")
    if now.owner != before.owner:
        whats.append("another namespace")
        former.append('"namespace": the former one')
    if now.tenant != before.tenant:
        whats.append(f"a tenant_loader was {'added' if now.tenant else 'removed'}")
        former.append(f'"tenant": {_setting(before.tenant)}')
    if not _reproduces(now.principal, before.principal):
        # Leave Flask-HTTPAuth out: only its past is known.
        whats.append(_renaming(shape.present.principal, before.principal))
        former.append(f'"principal": {_setting(before.principal)}')
        extensions = [kind for kind in before.principal if kind in EXTENSIONS]
        kept = f" Keep {' and '.join(extensions)} set up until then." if extensions else ""
    steps = []
    if former:
        steps.append(f"set IDEMPOTENCY_FORMER_IDENTITY to {{{', '.join(former)}}}")
    if set(shape.secrets).isdisjoint(other.secrets):
        steps.append("list the former secret last in IDEMPOTENCY_SECRET")
    remedy = f"Undo the change, or {' and '.join(steps)}, until then.{kept}"
    if now.owner != before.owner:
        remedy += " If that is another application in the same store, you need not act"
        apart = "; set IDEMPOTENCY_NAMESPACE of each to what it has now, and give each Flask application another name."
        remedy += apart if certain else "."
    return "; ".join(whats), remedy


def _renaming(now: tuple[str, ...], before: tuple[str, ...]) -> str:
    then = f"callers were named by {' and '.join(before)}" if before else "callers had no name"
    if LOADER in now:
        return f"a principal_loader was added; before, {then}"
    names = f"now they are named by {' and '.join(now)}" if now else "now they have no name"
    if LOADER in before:
        return f"a principal_loader was removed; {names}"
    return f"{then}; {names}"


def _setting(before: tuple[str, ...]) -> str:
    """Return the value to write for the former tenant or principal."""
    if not before:
        return "False"
    if LOADER in before:
        return "the former loader"
    return json.dumps(list(before) if len(before) > 1 else before[0])


def _note(task_log: TaskLog, shape: IdentityShape) -> bool:
    """Record this shape in the history, or that it is still in use. False: another process is writing."""
    name, token = _PREFIX + shape.application, secrets.token_bytes(16)
    if not task_log.lock(name, token, lease=_LOCK_SECONDS):
        return False
    try:
        now, seen = _read(task_log.reports().get(name)) or (task_log.now(), ())
        kept = [
            each for each in seen if each.shape != shape and each.last + each.shape.keep > now - NOTED_EVERY_SECONDS
        ]
        mine = next((each for each in seen if each.shape == shape), SeenShape(shape, now, now, now))
        since = now if now - mine.last > _PAUSE_SECONDS else mine.since
        shape = replace(shape, httpauth=shape.httpauth or mine.shape.httpauth)
        kept = sorted(kept, key=lambda each: each.last)[1 - _MOST :]
        task_log.report(name, _written(now, [*kept, SeenShape(shape, mine.first, since, now)]))
    finally:
        task_log.unlock(name, token)
    return True


def _written(now: float, seen: list[SeenShape]) -> str:
    """Return the history as text, without its oldest shapes if they make it too long."""
    text = json.dumps({"at": now, "seen": list(map(asdict, seen))}, separators=(",", ":"))
    return text if len(text) <= _LONGEST or len(seen) <= 1 else _written(now, seen[1:])


def _read(entry: TaskReport | None) -> tuple[float, tuple[SeenShape, ...]] | None:
    """Return the time and the history. None: it is missing or unreadable. A store may hold anything, so verify it."""
    if entry is None or len(entry.report) > _LONGEST:
        return None
    try:
        fields = json.loads(entry.report)
        now = _time(fields["at"]) + entry.ago
        return now, tuple(_seen(each, now) for each in fields["seen"][:_MOST])
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        # Python's JSON knows infinity, and whole numbers that no float holds.
        return None


def _seen(fields: Mapping[str, Any], now: float) -> SeenShape:
    shape = fields["shape"]
    present = _loader_use(shape["present"])
    if _is_believed(present):
        raise ValueError("only a former use is that of a function")
    return SeenShape(
        IdentityShape(
            application=str(shape["application"]),
            present=present,
            former=None if shape["former"] is None else _loader_use(shape["former"]),
            secrets=tuple(map(str, shape["secrets"])),
            keep=min(_time(shape["keep"]), _LONGEST_KEEP),
            httpauth=shape["httpauth"] is True,
        ),
        *(min(_time(fields[name]), now) for name in ("first", "since", "last")),
    )


def _loader_use(fields: Mapping[str, Any]) -> LoaderUse:
    tenant, principal = (tuple(kind for kind in _KINDS if kind in fields[name]) for name in ("tenant", "principal"))
    return LoaderUse(str(fields["owner"]), tenant, principal)


def _time(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < 1e11:
        raise ValueError("no time")
    return seconds
