"""Check what a store holds and how it is configured, for `flask idempotency doctor`.

To add a check, write a function with `@check(...)` here, or in `web/doctor.py` if it looks at the application, and
describe it in docs/operate/doctor.md.
"""

from __future__ import annotations

import shlex
import time
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from flask_idempotency.engine.capabilities import (
    DataKeys,
    DataLossDetector,
    Finding,
    Health,
    Recovery,
    Responses,
    Verdict,
)
from flask_idempotency.engine.errors import KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.journal import Journals
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.tasks import MISSED, TaskLog, late_tasks, silence_of
from flask_idempotency.operations.admin import SAMPLE, keys_status, memory_status
from flask_idempotency.operations.examination import Endpoint, Found, check, some
from flask_idempotency.operations.records import MOST_PAUSED, expired_leases, is_paused_in
from flask_idempotency.operations.times import format_duration

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs a package that is optional


def _named(endpoints: Iterable[Endpoint]) -> str:
    return some(each.name for each in endpoints)


@check("health", asks_store=True, expected=True)
def health(health: Health) -> Sequence[Finding]:
    """Return what the store finds in its server, its tables and its persistence, under names of its own."""
    return health.findings()


# The clocks of the store and of this host.

NOTICED_SECONDS: Final = 1.0
"""Hosts with NTP are closer together than this."""

FAR_SECONDS: Final = 30.0
"""The default lease: a clock that jumps this far ends every lease."""

_SYNC = "Keep all clocks in step with NTP (`timedatectl status` on both machines)."


@check("clock-skew", asks_store=True, expected=True, fine="The store's clock and this host's agree.")
def clock_skew(task_log: TaskLog, *, host_clock: Callable[[], float] = time.time) -> Iterator[Found]:
    """Compare the store's clock with this host's. The time that the store takes to answer is no skew."""
    before = host_clock()
    store_now = task_log.now()
    after = host_clock()
    apart = max(store_now - after, before - store_now, 0.0)
    if apart > NOTICED_SECONDS:
        which = "ahead of" if store_now > after else "behind"
        yield (
            Verdict.FAULT if apart > FAR_SECONDS else Verdict.ADVICE,
            f"The store's clock is {apart:.1f} s {which} this host's. Leases and stored responses go by the store's clock "
            "alone, so no request runs twice because of this. A jump that corrects that clock ends or prolongs all of them.",
            _SYNC,
        )


@check("clock-step", asks_store=True, expected=True, fine="No clock jumped between the last two heartbeats.")
def clock_step(task_log: TaskLog) -> Iterator[Found]:
    """Report whether the clocks moved against each other between the last two heartbeats."""
    entry = task_log.reports().get("heartbeat")
    stepped_ms = None if entry is None else entry.whole("stepped_ms")
    if stepped_ms is None:
        yield Verdict.FINE, "No heartbeat has compared the clocks yet.", ""
    elif (stepped := abs(stepped_ms) / 1000) > NOTICED_SECONDS:
        yield (
            Verdict.FAULT if stepped > FAR_SECONDS else Verdict.ADVICE,
            f"Between the last two heartbeats the store's clock moved by {stepped_ms / 1000:+.1f} s against its janitor's: one "
            "of them was set, or the hosts of two janitors disagree. A store's clock that jumps forward ends leases and "
            "stored responses early. Retries of the latter run again.",
            f"{_SYNC} If leases have ended: `flask idempotency list --state quarantined`.",
        )


# Timeouts of servers and proxies, and leases.

LEAST_LEASE_SECONDS: Final = 6.0
"""A worker renews it every two seconds. A pause of a virtual machine or a slow store ends a shorter one."""

_ONE_AT_A_TIME: Final = frozenset({"sync", "gunicorn.workers.sync.SyncWorker"})


def gunicorn_timeout(command_line: str) -> float | None:
    """Return after how many seconds gunicorn with these arguments kills a worker in the middle of a request.

    Infinite for never: gunicorn kills only sync workers, which send no sign of life during a request. None: the arguments
    do not say it, and a configuration file may.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in (("--timeout", "-t"), ("--worker-class", "-k"), ("--threads",)):
        parser.add_argument(*names)
    try:
        options, _ = parser.parse_known_args(shlex.split(command_line))
        worker = options.worker_class
        # With threads, gunicorn uses gthread workers.
        if worker not in (None, *_ONE_AT_A_TIME) or (worker is None and options.threads not in (None, "1")):
            return inf
        return None if options.timeout is None else float(options.timeout.removeprefix("=")) or inf
    except (ArgumentError, ValueError):  # gunicorn does not start with it
        return None


@check("worker-timeout", fine="No worker is killed while a view may still run.")
def worker_timeout(
    endpoints: Iterable[Endpoint], ran: Mapping[str, float], *, worker_timeout: float | None = None
) -> Iterator[Found]:
    """Report whether a server kills workers while a view may still run.

    It is a fault if a view is known to run for so long: by what was counted, or by a `max_runtime` that someone has set.
    """
    seconds = worker_timeout
    if seconds is None:
        yield (
            Verdict.UNKNOWN,
            "It is not known after how many seconds the server kills a worker that is still at work.",
            "Pass --worker-timeout, or set IDEMPOTENCY_WORKER_TIMEOUT, to gunicorn's --timeout or uWSGI's harakiri; to 0 if "
            "nothing kills them.",
        )
        return
    cut = [each for each in endpoints if seconds < each.policy.max_runtime]
    if not cut:
        return
    grave = [each for each in cut if each.policy.effects in ("plain", "marked") or each.policy.has_plain_step]
    known = [
        each for each in grave if ran.get(each.name, 0.0) >= seconds or each.policy.max_runtime != Policy().max_runtime
    ]
    longest = max(each.policy.max_runtime for each in cut)
    what = (
        "a request that is killed leaves an unknown outcome"
        if grave
        else "the retry of a request that is killed runs it again"
    )
    more = "" if known or not grave else " None is known to run for so long."
    yield (
        Verdict.FAULT if known else Verdict.ADVICE,
        f"Workers are killed after {seconds:g} s, and views may run for {longest:g} s (max_runtime): {what}.{more} This "
        f"concerns {_named(known or grave or cut)}.",
        "Give workers longer than max_runtime (gunicorn's --timeout), or lower IDEMPOTENCY_MAX_RUNTIME to what a view really "
        "takes, below that timeout.",
    )


@check("proxy-timeout", fine="Proxies wait longer than duplicates do.")
def proxy_timeout(endpoints: Iterable[Endpoint], *, proxy_timeout: float | None = None) -> Iterator[Found]:
    """Report whether a proxy gives up on a duplicate that waits for the response of the first request."""
    seconds = proxy_timeout
    waiting = [each for each in endpoints if each.policy.in_flight == "wait"]
    late = [each for each in waiting if seconds is not None and seconds <= each.policy.wait]
    if not waiting:
        yield Verdict.FINE, "No duplicate waits for the first request.", ""
    elif seconds is None:
        yield (
            Verdict.UNKNOWN,
            "It is not known after how many seconds a proxy gives up on a request.",
            "Pass --proxy-timeout, or set IDEMPOTENCY_PROXY_TIMEOUT, to nginx's proxy_read_timeout or its like; to 0 if "
            "nothing gives up.",
        )
    elif late:
        yield (
            Verdict.ADVICE,
            f"A proxy gives up after {seconds:g} s, and duplicates wait for up to {max(each.policy.wait for each in late):g} "
            f"s: their clients get a 504 from the proxy, and not the stored response. This concerns {_named(late)}.",
            "Lower IDEMPOTENCY_WAIT below the proxy's timeout, or raise that (nginx's proxy_read_timeout).",
        )


@check("lease", fine="Leases are long enough to be renewed in time.")
def lease(endpoints: Iterable[Endpoint]) -> Iterator[Found]:
    """Report leases that one pause of the host or the store ends."""
    short = [each for each in endpoints if each.policy.lease < LEAST_LEASE_SECONDS]
    if short:
        least = min(each.policy.lease for each in short)
        yield (
            Verdict.ADVICE,
            f"A worker renews a lease of {least:g} s every {least / 3:.1f} s: one pause of the host or the store ends it in "
            f"the middle of the work. This concerns {_named(short)}.",
            "Set IDEMPOTENCY_LEASE to 30, or remove it.",
        )


# Data loss: whether it happened, and whether the settings detect and survive it.

_GRANT = (
    "Let its user run INFO (ACL SETUSER … +info), then acknowledge the change with `flask idempotency redis ack`. If a "
    "service forbids INFO in scripts, start new applications with a database: another store would know none of these keys."
)


@check("canary", asks_store=True)
def canary(data_loss: DataLossDetector) -> Iterator[Found]:
    """Report whether new keys run, and whether the store detects a restart."""
    status = memory_status(data_loss)
    if status.new_keys_run:
        yield Verdict.ADVICE if status.remedy else Verdict.FINE, status.text, status.remedy
    else:
        yield Verdict.FAULT, f"New keys get 503: {status.text[:1].lower()}{status.text[1:]}", status.remedy
    if not status.standing.notices_restarts:
        text = "Scripts cannot read which process runs them, so the store detects no restart: lost keys run again."
        yield Verdict.UNKNOWN, text, _GRANT


@check("after-loss", asks_store=True, fine="The application refuses another store, and a flushed one.")
def after_loss(data_loss: DataLossDetector, endpoints: Iterable[Endpoint], *, lenient: bool) -> Iterator[Found]:
    """Report whether the store can be distinguished from another, and whether workers have time to restore their claims."""
    rules = data_loss.rules
    if rules.after_loss == "run":
        text = "Keys that this store loses, by a restart or a flush, run again: IDEMPOTENCY_AFTER_LOSS is run."
        remedy = "Set IDEMPOTENCY_AFTER_LOSS to refuse, or remove it, before this application moves money."
        debug = Verdict.FINE, "Lost keys run again, as they may in debug mode.", ""
        yield debug if lenient else (Verdict.ADVICE, text, remedy)
        return
    if rules.store_id is None:
        store_id = data_loss.status().store_id
        shown = "the store id that `flask idempotency redis status` shows once it is ready"
        yield (
            Verdict.ADVICE,
            "Any store would do: that of another environment knows none of the keys, and would run all of them again.",
            f"Set IDEMPOTENCY_STORE_ID to {shown if store_id is None else store_id}.",
        )
    late = [each for each in endpoints if each.policy.lease > rules.grace]
    if late:
        lease = max(each.policy.lease for each in late)
        yield (
            # With "refuse" an operator decides when, and can wait longer.
            Verdict.FAULT if rules.after_loss == "hold" else Verdict.ADVICE,
            f"After a data loss new keys may run again within {rules.grace:g} s, but surviving workers have up to {lease:g} s "
            f"to restore their claims, until their leases end. This concerns {_named(late)}.",
            f"Set IDEMPOTENCY_DATA_LOSS_GRACE to {lease:g} or more.",
        )


# Encryption: whether stored responses can be opened, and new ones sealed.

_PROBE: Final = bytes(range(32))
_CONTEXT: Final = b"flask-idempotency doctor"
_REACH: Final = "Make sure that this host reaches what IDEMPOTENCY_KEY_RING names."
_LOOK = "Look at IDEMPOTENCY_KEY_RING and at `flask idempotency keys status`; put a key that works first."


@check("newest-key", fine="The newest key of the ring wraps and unwraps.")
def newest_key(key_ring: KeyProvider, responses: Responses, data_keys: DataKeys) -> Iterator[Found]:
    """Report whether the newest key wraps, and unwraps its own result. Only for a store that keeps data keys."""
    try:
        kid = key_ring.newest
        opened = key_ring.unwrap(kid, key_ring.wrap(kid, _PROBE, context=_CONTEXT), context=_CONTEXT)
    except KeyProviderUnavailable as error:
        text = f"The newest key of the ring cannot be used: {error}. Requests of new tenants get 503, and soon all requests."
        yield Verdict.FAULT, text, error.remedy or _REACH
    except StoreUnavailable:
        text = "The key provider does not answer: requests of new tenants get 503, and soon all requests."
        yield Verdict.FAULT, text, _REACH
    except Exception as error:  # noqa: BLE001 - a key service may raise anything
        yield Verdict.FAULT, f"The newest key of the ring cannot be used ({type(error).__name__}).", _LOOK
    else:
        if opened != _PROBE:
            yield Verdict.FAULT, "The newest key of the ring does not unwrap what it has wrapped.", _LOOK


@check("keys", asks_store=True, fine="The ring opens every sealed response.")
def keys(
    key_ring: KeyProvider,
    responses: Responses,
    data_keys: DataKeys,
    *,
    encryption: str,
    journals: Journals | None = None,
) -> Iterator[Found]:
    """Report keys that are missing in the ring, plain responses, and a rotation that has not finished."""
    report = keys_status(key_ring, responses, data_keys, journals)
    missing = [key.kid for key in report.keys if not key.known and key.records]
    old = [key.kid for key in report.keys if key.known and not key.newest and (key.records or key.data_keys)]
    if missing:
        yield (
            Verdict.FAULT,
            f"Responses are sealed under keys that are not in the ring ({', '.join(missing)}), so they cannot be opened.",
            "Put those keys back into IDEMPOTENCY_KEY_RING, after the newest, and run `flask idempotency keys status`.",
        )
    if wrong := [key for key in report.keys if key.unopened]:
        yield (
            Verdict.FAULT,
            "The ring does not open data keys of the store that name its key: "
            f"{', '.join(f'{key.unopened} of {min(key.data_keys, SAMPLE)} under {key.kid}' for key in wrong)}. Two keys have "
            "this id, or the store was damaged. New requests and retries of these tenants get 503, and no record is harmed.",
            "Put the ring into IDEMPOTENCY_KEY_RING that sealed them: compare it with that of other hosts, and with the one "
            "before the last change. Then run `flask idempotency keys status`.",
        )
    if encryption == "required" and report.plain_records:
        yield (
            Verdict.FAULT,
            f"{report.plain_records} stored responses are not encrypted, and IDEMPOTENCY_ENCRYPTION is required: they are "
            "never replayed, and their retries get 500. Anyone who can write to the store may have planted them.",
            "Find out who stored them. If your application did before you switched encryption on: wait until they expire, or "
            "set IDEMPOTENCY_ENCRYPTION to on, run `flask idempotency seal`, and set it to required again. If you do not "
            "know: seal nothing, let them expire, and see who can write to the store.",
        )
    elif report.plain_records:
        yield (
            Verdict.ADVICE,
            f"{report.plain_records} stored responses are not encrypted. They are replayed as they are.",
            "Wait until they expire. Or run `flask idempotency seal`, if your application stored them before you switched "
            "encryption on and no other party could write to the store.",
        )
    if old:
        text = f"A rotation of the ring has not finished: responses are still sealed under old keys ({', '.join(old)})."
        yield Verdict.ADVICE, text, "Run `flask idempotency rotate`, and again after five minutes."


# The janitor: whether it runs, runs every task, and keeps up.

_START = (
    "Start a janitor (`celery -A flask_idempotency.janitor worker -B`; with a SQL store set IDEMPOTENCY_BROKER_URL first), or "
    "have cron run `flask idempotency reap` and `flask idempotency expire`."
)


@check("janitor", asks_store=True, expected=True)
def janitor(
    task_log: TaskLog, *, heartbeat_interval: float | None = None, process_local: bool = False
) -> Iterator[Found]:
    """Report whether a janitor has run lately. Any task but `relay` counts: cron has no heartbeat. `tasks` looks at each.

    Without a `heartbeat_interval` none is expected. `process_local` only gives the reason.
    """
    if heartbeat_interval is None:
        why = "no other process sees these records" if process_local else "IDEMPOTENCY_HEARTBEAT_INTERVAL is None"
        yield Verdict.FINE, f"No janitor is expected: {why}.", ""
        return
    silence = silence_of(task_log.reports())
    if silence is None:
        yield Verdict.FAULT, "No janitor has ever reported to this store.", _START
    elif silence > 2 * heartbeat_interval:
        every = format_duration(heartbeat_interval)
        text = f"No janitor has reported for {format_duration(silence)}; a report is due every {every}."
        yield Verdict.FAULT, text, _START
    else:
        yield Verdict.FINE, f"A janitor reported {format_duration(silence)} ago.", ""


@check("tasks", asks_store=True, expected=True)
def tasks(
    task_log: TaskLog, intervals: Mapping[str, float], *, heartbeat_interval: float | None = None
) -> Iterator[Found]:
    """Report each scheduled task that did not run, by its own last run. `intervals` are seconds."""
    if heartbeat_interval is None:
        return
    last = task_log.reports()
    if silence_of(last) is None:
        # `janitor` reports that, and a relay needs none.
        intervals = {task: seconds for task, seconds in intervals.items() if task == "relay"}
    late = [
        each for each in late_tasks(last, intervals, heartbeat_interval=heartbeat_interval) if each.task != "finish"
    ]
    for task, every, ago in late:
        ran = "never ran" if ago is None else f"last ran {format_duration(ago)} ago"
        command = "relay --once" if task == "relay" else task
        yield (
            Verdict.FAULT,
            f"The task {task} is due every {format_duration(every)}, and {ran}.",
            f"See why in the janitor's log, and run `flask idempotency {command}` by hand or by cron. If it should run less "
            f"often, set IDEMPOTENCY_{task.upper()}_INTERVAL to that.",
        )
    if not late:
        yield Verdict.FINE, "Every task has run on time.", ""


@check("finish", asks_store=True, fine="No endpoint waits for a janitor that does not finish its requests.")
def finish(
    task_log: TaskLog,
    endpoints: Iterable[Endpoint],
    intervals: Mapping[str, float],
    *,
    heartbeat_interval: float | None = None,
    process_local: bool = False,
) -> Iterator[Found]:
    """Report endpoints with `finish="janitor"` while the task `finish` does not run."""
    waiting = [each for each in endpoints if each.policy.finish == "janitor"]
    if not waiting or process_local:
        return
    entry = task_log.reports().get("finish")
    if entry is None:
        ran = "never ran"
    elif entry.ago > max(MISSED * intervals.get("finish", 0.0), 2 * (heartbeat_interval or 0.0), PATIENCE_SECONDS):
        ran = f"last ran {format_duration(entry.ago)} ago"
    else:
        return
    yield (
        Verdict.FAULT,
        f'The task finish {ran}, and finish="janitor" needs it: {_named(waiting)}. A request that stops between two steps '
        "waits for its client.",
        "Let a janitor of this release run it: restart it, register its tasks, or have cron run `flask idempotency finish`.",
    )


@check("backlog", asks_store=True, expected=True)
def backlog(task_log: TaskLog, *, heartbeat_interval: float | None = None) -> Iterator[Found]:
    """Report tasks whose budget ended before their work in the last run."""
    if heartbeat_interval is None:
        return
    cut = sorted(task for task, entry in task_log.reports().items() if entry.facts().get("finished") is False)
    if not cut:
        yield Verdict.FINE, "Every task finished its last run.", ""
        return
    more = ", or let it remove more in a second (IDEMPOTENCY_EXPIRE_RATE)" if "expire" in cut else ""
    yield (
        Verdict.ADVICE,
        f"The last run of {', '.join(cut)} stopped before its work was done: there is more work than its interval allows.",
        f"Run `flask idempotency {cut[0]}` once by hand. If that does not help, run it more often "
        f"(IDEMPOTENCY_{cut[0].upper()}_INTERVAL){more}.",
    )


# Keys that wait for an operator, for the janitor, or for a retry.

PATIENCE_SECONDS: Final = 60.0
"""Six runs of a janitor with its default settings."""

RETRIED_SECONDS: Final = 3600.0
"""A client that retries does so within minutes; one that has not for an hour has given up."""


@check("quarantined", asks_store=True, expected=True, fine="No key is quarantined.")
def quarantined(recovery: Recovery) -> Iterator[Found]:
    """Report how many keys are quarantined, and since when."""
    counts = recovery.counts()
    if counts.quarantined:
        yield (
            Verdict.ADVICE,
            f"{_keys(counts.quarantined)} quarantined, the first for {format_duration(counts.quarantined_for or 0.0)}: the "
            "outcome of the request is unknown, and retries are refused until a resolver or an operator resolves it.",
            "List the keys with `flask idempotency list --state quarantined`, find out what happened, and resolve each with "
            "`flask idempotency resolve`.",
        )


@check("lapsed", asks_store=True, expected=True, fine="No claim with an expired lease waits for too long.")
def lapsed(recovery: Recovery, task_log: TaskLog, *, journals: Journals | None = None) -> Iterator[Found]:
    """Report claims with expired leases that no janitor quarantined, and that no retry took over; paused ones too."""
    horizon = task_log.now() - PATIENCE_SECONDS
    overdue, forgotten, paused = 0, 0, 0
    for found in expired_leases(recovery, horizon=horizon, most=MOST_PAUSED):
        if found.record.on_expiry is OnExpiry.QUARANTINE:
            overdue += 1
        elif found.record.remaining < -RETRIED_SECONDS:
            is_paused = journals is not None and is_paused_in(found, journals)
            paused, forgotten = paused + is_paused, forgotten + (not is_paused)
    if overdue:
        yield (
            Verdict.FAULT,
            f"{_keys(overdue)} without a worker for more than {format_duration(PATIENCE_SECONDS)}, and no janitor has "
            "quarantined them: no resolver runs and no event is sent until a retry comes.",
            "Run `flask idempotency reap`, and make sure that a janitor does so from now on.",
        )
    if paused:
        yield (
            Verdict.ADVICE,
            f"{_keys(paused)} paused for more than {format_duration(RETRIED_SECONDS)}: some of their steps were done, and only "
            "a retry does the rest.",
            "List the keys with `flask idempotency list --state paused`, and let the clients send these requests again. The "
            "janitor quarantines each as `never-resumed` after its `resume_within`.",
        )
    if forgotten:
        yield (
            Verdict.ADVICE,
            f"{_keys(forgotten)} waiting for more than {format_duration(RETRIED_SECONDS)} for a retry that takes over: only a "
            "retry ends this, and until then it is unknown whether the work was done.",
            "List the keys with `flask idempotency list --state lease-expired`, and run `flask idempotency release` for those "
            "that no client retries.",
        )


def _keys(number: int) -> str:
    return f"{number} key is" if number == 1 else f"{number} keys are"
