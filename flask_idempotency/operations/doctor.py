"""Whether all is well: every check is made, whatever becomes of the others, and each says what to do."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple, Protocol

from flask_idempotency.engine.capabilities import (
    DataLossDetector,
    DataLossPolicy,
    DataLossStatus,
    Finding,
    Recovery,
    TaskLog,
    TaskReport,
    Verdict,
)
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.admin import KeysReport, memory_status
from flask_idempotency.operations.records import format_duration

# The checks of `doctor`. Each is a function that looks, changes nothing, and says what it found.
#
# A finding that is not fine names a command or a setting that mends it. None names a key, tenant, password or URL.


# Whether the clocks agree, and whether somebody has set one.

NOTICED_SECONDS: Final = 1.0
"""As far apart as hosts with NTP are not."""

FAR_SECONDS: Final = 30.0
"""A default lease: a clock that is set by this much ends all of them at once."""

_SYNC = "Keep all clocks in step with NTP (`timedatectl status` on both machines)."


def clock_skew(book: TaskLog, *, host_clock: Callable[[], float] = time.time) -> list[Finding]:
    """How far the store's clock is from this host's. However long the store takes to answer is no skew."""
    before = host_clock()
    store_now = book.now()
    after = host_clock()
    apart = max(store_now - after, before - store_now, 0.0)
    if apart <= NOTICED_SECONDS:
        return [Finding("clock-skew", Verdict.FINE, "The store's clock and this host's agree.")]
    verdict = Verdict.FAULT if apart > FAR_SECONDS else Verdict.ADVICE
    which = "ahead of" if store_now > after else "behind"
    text = (
        f"The store's clock is {apart:.1f} s {which} this host's. Leases and answers' lives go by the store's alone, so no "
        "work is repeated for this; but whoever sets that clock right by a jump ends or prolongs all of them."
    )
    return [Finding("clock-skew", verdict, text, _SYNC)]


def clock_step(book: TaskLog) -> list[Finding]:
    """Whether the last two heartbeats have seen the clocks move against each other."""
    stepped = _stepped_seconds(book.reports().get("heartbeat"))
    if stepped is None:
        return [Finding("clock-step", Verdict.FINE, "No heartbeat has compared the clocks yet.")]
    if abs(stepped) <= NOTICED_SECONDS:
        return [Finding("clock-step", Verdict.FINE, "By the last two heartbeats nobody has set a clock.")]
    verdict = Verdict.FAULT if abs(stepped) > FAR_SECONDS else Verdict.ADVICE
    text = (
        f"Between the last two heartbeats the store's clock moved by {stepped:+.1f} s against its janitor's: somebody has "
        "set one of them, or two janitors' hosts disagree. A store's clock that jumps forward ends leases and lives early."
    )
    remedy = f"{_SYNC} If leases have ended: `flask idempotency list --state quarantined`."
    return [Finding("clock-step", verdict, text, remedy)]


def _stepped_seconds(entry: TaskReport | None) -> float | None:
    stepped = None if entry is None else entry.whole("stepped_ms")
    return None if stepped is None else stepped / 1000


# Naming some of many.

NAMED: Final = 5
"""More than that nobody reads in a sentence."""


def some(names: Iterable[str]) -> str:
    """The first few of these names, each once, and how many there are besides."""
    every = sorted(set(names))
    more = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {more} more" if more > 0 else "")


# Whether a server or a proxy gives up before a payment does.

LEAST_LEASE_SECONDS: Final = 6.0
"""Renewed every two seconds: shorter ones are lost to a pause of a virtual machine or a slow minute of the store."""

_ONE_AT_A_TIME: Final = frozenset({"sync", "gunicorn.workers.sync.SyncWorker"})


class Endpoint(NamedTuple):
    """What is guarded, and how."""

    name: str
    policy: Policy


def gunicorn_timeout(command_line: str) -> float | None:
    """After how many seconds these arguments of gunicorn have a worker killed in the middle of a request.

    Infinite where it is never: only workers that do one thing at a time are silent while they do it. None: the arguments
    do not say, and a configuration file may.
    """
    said = dict(_options(command_line))
    worker = said.get("worker-class")
    if worker is not None and worker not in _ONE_AT_A_TIME:
        return inf
    if worker is None and said.get("threads", "1") != "1":
        return inf  # gunicorn takes threads for a wish to have gthread
    try:
        seconds = float(said["timeout"])
    except (KeyError, ValueError):
        return None
    return seconds or inf


_SHORT: Final = {"-t": "timeout", "-k": "worker-class"}


def _options(command_line: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(command_line)
    except ValueError:  # a quotation mark is missing: gunicorn will not start with it either
        return
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            yield name, value if separator else following
        elif word[:2] in _SHORT:
            yield _SHORT[word[:2]], word[2:].removeprefix("=") or following


def worker_timeout(endpoints: Iterable[Endpoint], *, seconds: float | None) -> list[Finding]:
    """Whether a worker is killed while a view may still run. `seconds` is None where nobody has said after which time."""
    if seconds is None:
        text = "Nobody has said after how many seconds a worker is killed that is still at work."
        remedy = (
            "Pass --worker-timeout, or set IDEMPOTENCY_WORKER_TIMEOUT, to gunicorn's --timeout or uWSGI's harakiri; to 0 if "
            "nothing kills them."
        )
        return [Finding("worker-timeout", Verdict.UNKNOWN, text, remedy)]
    cut = [each for each in endpoints if seconds < each.policy.max_runtime]
    if not cut:
        return [Finding("worker-timeout", Verdict.FINE, "No worker is killed while a view may still run.")]
    grave = [each for each in cut if each.policy.effects in ("plain", "marked")]
    longest = max(each.policy.max_runtime for each in cut)
    text = f"Workers are killed after {seconds:g} s, and views may run for {longest:g} s (max_runtime): "
    text += (
        f"what is killed in the middle leaves an outcome that nobody knows. So it is for {_named(grave)}."
        if grave
        else f"what is killed in the middle is begun anew by its retry. So it is for {_named(cut)}."
    )
    remedy = (
        "Give workers longer than max_runtime (gunicorn's --timeout), or lower IDEMPOTENCY_MAX_RUNTIME to what a view really "
        "takes, below that timeout."
    )
    return [Finding("worker-timeout", Verdict.FAULT if grave else Verdict.ADVICE, text, remedy)]


def proxy_timeout(endpoints: Iterable[Endpoint], *, seconds: float | None) -> list[Finding]:
    """Whether a proxy gives up on a duplicate that waits for the first one's answer."""
    waiting = [each for each in endpoints if each.policy.in_flight == "wait"]
    if not waiting:
        return [Finding("proxy-timeout", Verdict.FINE, "No duplicate waits for the first one's answer.")]
    if seconds is None:
        text = "Nobody has said after how many seconds a proxy gives up on a request."
        remedy = (
            "Pass --proxy-timeout, or set IDEMPOTENCY_PROXY_TIMEOUT, to nginx's proxy_read_timeout or its like; to 0 if "
            "nothing gives up."
        )
        return [Finding("proxy-timeout", Verdict.UNKNOWN, text, remedy)]
    late = [each for each in waiting if seconds <= each.policy.wait]
    if not late:
        return [Finding("proxy-timeout", Verdict.FINE, "Proxies wait for longer than duplicates do.")]
    text = (
        f"A proxy gives up after {seconds:g} s, and duplicates wait for up to {max(each.policy.wait for each in late):g} s: "
        f"their callers get a 504 of the proxy's, and not our answer. So it is for {_named(late)}."
    )
    remedy = "Lower IDEMPOTENCY_WAIT below the proxy's timeout, or raise that (nginx's proxy_read_timeout)."
    return [Finding("proxy-timeout", Verdict.ADVICE, text, remedy)]


def lease(endpoints: Iterable[Endpoint]) -> list[Finding]:
    """Whether leases survive a bad moment."""
    short = [each for each in endpoints if each.policy.lease < LEAST_LEASE_SECONDS]
    if not short:
        return [Finding("lease", Verdict.FINE, "Leases are long enough to be renewed in time.")]
    least = min(each.policy.lease for each in short)
    text = (
        f"A lease of {least:g} s is renewed every {least / 3:.1f} s: one pause of the host or the store is enough to lose it "
        f"in the middle of the work. So it is for {_named(short)}."
    )
    return [Finding("lease", Verdict.ADVICE, text, "Set IDEMPOTENCY_LEASE to 30, or leave it away.")]


def _named(endpoints: Sequence[Endpoint]) -> str:
    return some([each.name for each in endpoints])


# Whether a store that can lose its memory has, and whether it would be noticed and survived if it did.

_GRANT = (
    "Let its user ask, with ACL SETUSER … +info, and then acknowledge the change with `flask idempotency redis ack`; where a "
    "service does not tell its scripts, set IDEMPOTENCY_STORE to a database."
)


def canary(memory: DataLossDetector) -> list[Finding]:
    """Whether new keys run, and whether a restart would be noticed."""
    status = memory_status(memory)
    if not status.new_keys_run:
        found = Finding("canary", Verdict.FAULT, f"New keys get 503: {_lowered(status.text)}", status.remedy)
    elif status.remedy:
        found = Finding("canary", Verdict.ADVICE, status.text, status.remedy)
    else:
        found = Finding("canary", Verdict.FINE, status.text)
    return [found, *_blind(status.standing)]


def _blind(standing: DataLossStatus) -> list[Finding]:
    if standing.notices_restarts:
        return []
    text = (
        "Scripts are not told which process runs them, so restarts and fail-overs are not noticed, and what they forget runs "
        "again."
    )
    return [Finding("canary", Verdict.UNKNOWN, text, _GRANT)]


def after_loss(memory: DataLossDetector, endpoints: Iterable[Endpoint], *, lenient: bool) -> list[Finding]:
    """Whether the right store would be told from another, and whether owners had the time to put their claims back."""
    rules = memory.rules
    if rules.after_loss == "run":
        if lenient:
            return [Finding("after-loss", Verdict.FINE, "What is forgotten runs again, as it may in debug mode.")]
        text = "What this store forgets, by a restart or when it is emptied, runs again: IDEMPOTENCY_AFTER_LOSS is run."
        remedy = "Set IDEMPOTENCY_AFTER_LOSS to refuse, or leave it away, before this application moves money."
        return [Finding("after-loss", Verdict.ADVICE, text, remedy)]
    findings = [*_unnamed(memory, rules), *_hasty(rules, endpoints)]
    return findings or [Finding("after-loss", Verdict.FINE, "Another store, and an emptied one, would be refused.")]


def _unnamed(memory: DataLossDetector, rules: DataLossPolicy) -> list[Finding]:
    if rules.store_id is not None:
        return []
    store_id = memory.status().store_id
    text = "Any store would do: that of another environment knows none of the keys, and would run all of them again."
    remedy = (
        f"Set IDEMPOTENCY_STORE_ID to {store_id}."
        if store_id is not None
        else "Set IDEMPOTENCY_STORE_ID to what `flask idempotency redis status` says when it is ready."
    )
    return [Finding("after-loss", Verdict.ADVICE, text, remedy)]


def _hasty(rules: DataLossPolicy, endpoints: Iterable[Endpoint]) -> list[Finding]:
    late = [each for each in endpoints if each.policy.lease > rules.grace]
    if not late:
        return []
    lease = max(each.policy.lease for each in late)
    text = (
        f"After a loss new keys may run again within {rules.grace:g} s, and owners that survived have until the end of their "
        f"leases to put their claims back, up to {lease:g} s. So it is for {some(each.name for each in late)}."
    )
    # Where a person says when, they can be told to wait for longer.
    verdict = Verdict.FAULT if rules.after_loss == "hold" else Verdict.ADVICE
    return [Finding("after-loss", verdict, text, f"Set IDEMPOTENCY_DATA_LOSS_GRACE to {lease:g} or more.")]


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


# Whether what is encrypted can be opened, and what is to be encrypted will be.

_PROBE: Final = bytes(range(32))
_CONTEXT: Final = b"flask-idempotency doctor"


class Wrapping(Protocol):
    """As much of a key provider as it takes to try its newest key."""

    @property
    def newest(self) -> str: ...

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes: ...

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes: ...


def newest_key(ring: Wrapping) -> list[Finding]:
    """Whether the key that wraps from now on wraps, and opens what it has wrapped."""
    try:
        kid = ring.newest
        opened = ring.unwrap(kid, ring.wrap(kid, _PROBE, context=_CONTEXT), context=_CONTEXT)
    except StoreUnavailable:
        text = "The key provider does not answer: new tenants' requests get 503, and soon everybody's."
        return [Finding("newest-key", Verdict.FAULT, text, "See that what IDEMPOTENCY_KEY_RING names can be reached.")]
    except Exception as error:  # noqa: BLE001 - somebody else's key service
        text = f"The newest key of the ring cannot be used ({type(error).__name__})."
        return [Finding("newest-key", Verdict.FAULT, text, _LOOK)]
    if opened != _PROBE:
        return [
            Finding("newest-key", Verdict.FAULT, "The newest key of the ring does not open what it has wrapped.", _LOOK)
        ]
    return [Finding("newest-key", Verdict.FINE, "The newest key of the ring wraps and opens.")]


_LOOK = "Look at IDEMPOTENCY_KEY_RING, and at what `flask idempotency keys status` says; put a key that works first."


def keys(report: KeysReport, *, required: bool) -> list[Finding]:
    """Whether everything that is sealed can be opened. `required`: whether plain answers are refused."""
    findings = []
    missing = [key.kid for key in report.keys if not key.known and key.records]
    old = [key.kid for key in report.keys if key.known and not key.newest and (key.records or key.data_keys)]
    if missing:
        text = f"Answers are sealed under keys that are not in the ring ({_names(missing)}): nobody can open them."
        remedy = "Put them back into IDEMPOTENCY_KEY_RING, after the newest, and see `flask idempotency keys status`."
        findings.append(Finding("keys", Verdict.FAULT, text, remedy))
    if required and report.plain_records:
        text = (
            f"{report.plain_records} stored answers are not encrypted, and IDEMPOTENCY_ENCRYPTION is required: they are never "
            "replayed, and their retries get 500. Anyone who can write to the store may have planted them."
        )
        remedy = (
            "Find out who stored them. If your application did before you switched encryption on: wait until they expire, or "
            "set IDEMPOTENCY_ENCRYPTION to on, run `flask idempotency seal`, and set it to required again. If you do not "
            "know: seal nothing, let them expire, and see who can write to the store."
        )
        findings.append(Finding("keys", Verdict.FAULT, text, remedy))
    elif report.plain_records:
        text = f"{report.plain_records} stored answers are not encrypted. They are replayed as they are."
        remedy = (
            "Wait until they expire. Or run `flask idempotency seal`, if your application stored them before you switched "
            "encryption on and no other party could write to the store."
        )
        findings.append(Finding("keys", Verdict.ADVICE, text, remedy))
    if old:
        text = f"A rotation of the ring is not at its end: answers are still sealed under old keys ({_names(old)})."
        findings.append(
            Finding("keys", Verdict.ADVICE, text, "Run `flask idempotency rotate`, and again after five minutes.")
        )
    return findings or [Finding("keys", Verdict.FINE, "The ring opens everything that is sealed.")]


def _names(kids: Sequence[str]) -> str:
    return ", ".join(kids)


# Whether the janitor comes, does everything, and keeps up.

MISSED: Final = 3
"""So many intervals of a chore pass without it before that is worth a word: one may be late, and one unlucky."""

SOON_SECONDS: Final = 600.0
"""A chore that is due less often than this may not have had its turn since the janitor was first started."""

_START = (
    "Start a janitor (`celery -A flask_idempotency.janitor worker -B`), or have cron run `flask idempotency reap` and "
    "`flask idempotency expire`. If there is to be none, set IDEMPOTENCY_HEARTBEAT_INTERVAL to None."
)


def janitor(last: Mapping[str, TaskReport], *, heartbeat_interval: float | None) -> list[Finding]:
    """Whether anybody has swept lately. Any chore counts, whoever did it: cron has no heartbeat."""
    if heartbeat_interval is None:
        return [Finding("janitor", Verdict.FINE, "No janitor is expected: IDEMPOTENCY_HEARTBEAT_INTERVAL is None.")]
    silence = min((entry.ago for entry in last.values()), default=None)
    if silence is None:
        return [Finding("janitor", Verdict.FAULT, "No janitor has ever reported to this store.", _START)]
    if silence > 2 * heartbeat_interval:
        text = (
            f"No janitor has reported for {format_duration(silence)}, and one is expected every "
            f"{format_duration(heartbeat_interval)}."
        )
        return [Finding("janitor", Verdict.FAULT, text, _START)]
    return [Finding("janitor", Verdict.FINE, f"A janitor reported {format_duration(silence)} ago.")]


def chores(last: Mapping[str, TaskReport], *, every: Mapping[str, float], patience: float) -> list[Finding]:
    """Whether each chore that is done by itself has had its turns. `every` has their intervals in seconds.

    None is late before the janitor itself would be missed, which is after `patience` seconds: cron comes once a minute.
    """
    found = []
    for chore, seconds in every.items():
        entry = last.get(chore)
        remedy = (
            f"See why in the janitor's log, or run `flask idempotency {chore}` by hand. If it is meant to be done less often, "
            f"set IDEMPOTENCY_{chore.upper()}_INTERVAL to that."
        )
        if entry is None:
            if seconds <= SOON_SECONDS and last:
                text = f"The chore {chore} is due every {format_duration(seconds)}, and was never done."
                found.append(Finding("chores", Verdict.ADVICE, text, remedy))
        elif entry.ago > max(MISSED * seconds, patience):
            text = (
                f"The chore {chore} is due every {format_duration(seconds)}, and was last done "
                f"{format_duration(entry.ago)} ago."
            )
            found.append(Finding("chores", Verdict.FAULT, text, remedy))
    return found or [Finding("chores", Verdict.FINE, "Every chore that was done once has had its turns since.")]


def backlog(last: Mapping[str, TaskReport]) -> list[Finding]:
    """Whether a chore was cut short by its budget the last time."""
    cut = sorted(chore for chore, entry in last.items() if entry.facts().get("finished") is False)
    if not cut:
        return [Finding("backlog", Verdict.FINE, "Every chore came to its end the last time.")]
    text = f"The last run of {', '.join(cut)} had to end before its work did: there is more to do than its interval allows."
    remedy = (
        f"Run `flask idempotency {cut[0]}` once. If it happens again, run it more often (IDEMPOTENCY_{cut[0].upper()}_INTERVAL)"
        + (", or let it remove more in a second (IDEMPOTENCY_EXPIRE_RATE)." if "expire" in cut else ".")
    )
    return [Finding("backlog", Verdict.ADVICE, text, remedy)]


# Keys that wait: for a person, for a janitor, or for a retry.

PATIENCE_SECONDS: Final = 60.0
"""Six turns of a janitor with its default settings."""

RETRIED_SECONDS: Final = 3600.0
"""A client that retries does so within minutes; one that has not for an hour has given up."""

LOOKED_AT: Final = 2000
"""As many as a moment allows. More are not counted: some are enough to act."""

_SHEET: Final = 200


def quarantined(unsettled: Recovery) -> list[Finding]:
    """Whether somebody's outcome is unknown, and since when."""
    standing = unsettled.counts()
    if not standing.quarantined:
        return [Finding("quarantined", Verdict.FINE, "No key is quarantined.")]
    text = (
        f"{_keys(standing.quarantined)} quarantined, the first for "
        f"{format_duration(standing.quarantined_for or 0.0)}: nobody knows what "
        "became of the work, and retries are refused until a resolver or a person settles it."
    )
    remedy = (
        "Look with `flask idempotency list --state quarantined`, ask the other side, and say what happened with "
        "`flask idempotency resolve`."
    )
    return [Finding("quarantined", Verdict.ADVICE, text, remedy)]


def lapsed(unsettled: Recovery, *, now: float) -> list[Finding]:
    """Whether claims of vanished owners are left where they are. `now` is the store's."""
    overdue, forgotten, looked, after = 0, 0, 0, b""
    while looked < LOOKED_AT:
        sheet = unsettled.expired_leases(horizon=now - PATIENCE_SECONDS, after=after, limit=_SHEET)
        for found in sheet.found:
            if found.record.on_expiry is OnExpiry.QUARANTINE:
                overdue += 1
            elif found.record.remaining < -RETRIED_SECONDS:
                forgotten += 1
        looked += _SHEET
        if sheet.after is None:
            break
        after = sheet.after
    findings = []
    if overdue:
        text = (
            f"{_keys(overdue)} without an owner for more than {format_duration(PATIENCE_SECONDS)}, and no "
            "janitor has quarantined them: "
            "no resolver is asked, and nobody is told, until a retry comes."
        )
        remedy = "Run `flask idempotency reap`, and see that a janitor does so from now on."
        findings.append(Finding("lapsed", Verdict.FAULT, text, remedy))
    if forgotten:
        text = (
            f"{_keys(forgotten)} waiting to be taken over by a retry that has not come for more than "
            f"{format_duration(RETRIED_SECONDS)}: nobody can tell whether the work was done, and nothing but a retry ends this."
        )
        remedy = (
            "Look with `flask idempotency list --state processing`, and free what nobody will retry with "
            "`flask idempotency release`."
        )
        findings.append(Finding("lapsed", Verdict.ADVICE, text, remedy))
    return findings or [Finding("lapsed", Verdict.FINE, "No claim of a vanished owner is left where it should not be.")]


def _keys(number: int) -> str:
    return f"{number} key is" if number == 1 else f"{number} keys are"


REACHABLE: Final = "store"
"""The check that comes first: where the store does not answer, nothing else is asked of it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at. `look` says what it found, also when all is fine; an exception says that it cannot tell."""

    name: str
    look: Callable[[], Iterable[Finding]]
    asks_store: bool = False


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What all checks have found, the worst first."""

    findings: tuple[Finding, ...]
    complete: bool
    """False: the store did not answer, or a check failed, so that nobody can tell whether all is well."""

    @property
    def in_order(self) -> bool:
        """Whether no fault was found. Advice is none, and neither is what cannot be looked at from here."""
        return all(finding.verdict is not Verdict.FAULT for finding in self.findings)


_WORST_FIRST: Final = (Verdict.FAULT, Verdict.UNKNOWN, Verdict.ADVICE, Verdict.FINE)


def examine(checks: Sequence[Check], *, reach: Callable[[], object]) -> DoctorReport:
    """Make every check. `reach` asks the store for something small, and raises `StoreUnavailable` when it is away."""
    store = _reached(reach)
    away = store.verdict is not Verdict.FINE
    findings, complete = [store], not away
    for check in checks:
        if away and check.asks_store:
            findings.append(Finding(check.name, Verdict.UNKNOWN, "Not looked at: the store does not answer.", _AGAIN))
            continue
        try:
            findings += check.look()
        except ConfigurationError as error:
            # Ours, and says what to do: tables that are missing, for one.
            findings += [Finding(check.name, Verdict.FAULT, fault, _AS_SAID) for fault in error.faults]
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are worth having
            findings.append(_failed(check.name, error))
            complete = False
    findings.sort(key=lambda finding: _WORST_FIRST.index(finding.verdict))
    return DoctorReport(tuple(findings), complete)


_AS_SAID = "Do what this says, and run `flask idempotency doctor` again."
_AGAIN = "Run `flask idempotency doctor` again when the store answers."


def _reached(reach: Callable[[], object]) -> Finding:
    try:
        reach()
    except StoreUnavailable as error:
        # Its text is ours, and names no server.
        why = str(error).rstrip(".")
        return Finding(REACHABLE, Verdict.FAULT, f"The store does not answer: {why}.", _REACH)
    except Exception as error:  # noqa: BLE001 - a store of somebody's own may raise anything
        return Finding(REACHABLE, Verdict.FAULT, f"The store cannot be asked ({type(error).__name__}).", _REACH)
    return Finding(REACHABLE, Verdict.FINE, "The store answers.")


_REACH = "Check IDEMPOTENCY_STORE, and that its server runs and lets this host in: keyed requests get 503 meanwhile."


def _failed(name: str, error: Exception) -> Finding:
    # Not its text: an exception of somebody else's may quote what nobody should read.
    why = "the store did not answer" if isinstance(error, StoreUnavailable) else f"it failed ({type(error).__name__})"
    remedy = (
        _AGAIN if isinstance(error, StoreUnavailable) else "Report it: a check of `flask idempotency doctor` must not."
    )
    return Finding(name, Verdict.UNKNOWN, f"This check could not be made: {why}.", remedy)
