"""Structured logs: every event as one line on the logger `flask_idempotency.events`, for whoever sets it up to listen.

The sentence of an event is always the same; what differs is in the fields of the record, which a formatter for JSON
writes, and behind the sentence for everybody else. Nothing here sets up a handler or drops a line: that is the
application's. What lines quote is escaped here, whatever formatter writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import indent
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from flask_idempotency.engine import events
from flask_idempotency.engine.escape import printable, printable_lines, printable_values
from flask_idempotency.engine.events import Event, Observer, facts_of, name_of

LOGGER: Final = "flask_idempotency.events"

Level: TypeAlias = "int | Callable[[Any], int]"


@dataclass(frozen=True, slots=True)
class Line:
    """How an event is logged: at which level, or at which by what it says, and in which words."""

    level: Level
    sentence: str
    levels: tuple[int, ...] = ()
    """Those that `level` chooses from, if it does."""

    @property
    def template(self) -> str:
        """What the log groups lines by: the sentence, and a place for the facts behind it."""
        return f"{self.sentence} %s"


def _by_error(event: events.RenewalFailed) -> int:
    # A store that is away is told of once for all; anything else is a surprise.
    return logging.INFO if event.error == "StoreUnavailable" else logging.WARNING


def _by_protection(event: events.StoreFailed) -> int:
    # Refusals are told of at a pace that drowns nothing: see web/outages.py.
    return logging.WARNING if event.unprotected else logging.INFO


def _by_attempt(event: events.ClaimGranted) -> int:
    return logging.INFO if event.attempt > 1 else logging.DEBUG


def _by_work(event: events.TaskRun) -> int:
    if event.error:
        return logging.WARNING
    return logging.INFO if any(event.counts.values()) or not event.finished else logging.DEBUG


LINES: Mapping[type[Event], Line] = MappingProxyType(
    {
        events.ClaimGranted: Line(_by_attempt, "A request won its key.", (logging.DEBUG, logging.INFO)),
        events.ReplayServed: Line(logging.INFO, "A stored answer was given again."),
        events.ConflictRefused: Line(logging.INFO, "A retry was refused: the first request is still running."),
        events.MismatchRefused: Line(logging.INFO, "A request was refused: its key was used for another."),
        events.UnknownRefused: Line(
            logging.INFO, "A retry was refused: nobody knows what became of the first request."
        ),
        events.QuotaRefused: Line(logging.INFO, "A request was refused: its tenant has as much as it may."),
        events.ErasedRefused: Line(logging.INFO, "A retry was refused: the answer was erased."),
        events.RefusedAfterDataLoss: Line(logging.INFO, "A request was refused: the store may have forgotten its key."),
        events.DataLossDetected: Line(
            logging.ERROR,
            "The store may have lost records, and new keys get 503. Find out why (`flask idempotency redis status`), then run "
            "`flask idempotency redis ack`: requests whose records were lost may run a second time.",
        ),
        events.ClaimRestored: Line(logging.WARNING, "A claim was put back that the store had forgotten."),
        events.Completed: Line(logging.INFO, "A result is durable."),
        events.Released: Line(logging.INFO, "A key was released, and may run again."),
        events.Quarantined: Line(logging.WARNING, "A key is quarantined: nobody knows what became of its work."),
        events.CommittedEarly: Line(logging.WARNING, "A transactional view has committed before its answer was known."),
        events.LeaseExpired: Line(logging.WARNING, "A claim was lost before its work ended."),
        events.RenewalFailed: Line(
            _by_error, "A lease could not be renewed this time.", (logging.INFO, logging.WARNING)
        ),
        events.MaxRuntimeExceeded: Line(logging.WARNING, "A view runs for too long: its lease is renewed no more."),
        events.CompletionRetrying: Line(logging.WARNING, "The store did not take a result: it is tried again."),
        events.CompletionFailed: Line(logging.ERROR, "A result was given up: the store did not take it in time."),
        events.StoreFailed: Line(
            _by_protection, "The store could not decide a claim.", (logging.INFO, logging.WARNING)
        ),
        events.RecordCorrupt: Line(logging.ERROR, "A stored record cannot be read."),
        events.ReplayForbidden: Line(logging.INFO, "A replay was refused by the application's guard."),
        events.Reaped: Line(logging.WARNING, "A claim was quarantined: its owner has vanished."),
        events.Resolved: Line(
            logging.WARNING, "A key was settled in its owner's place; or may have been, if not `certain`."
        ),
        events.ResolverAsked: Line(logging.INFO, "A resolver did not settle a key."),
        events.TenantErased: Line(logging.WARNING, "The answers of a tenant were erased by hand."),
        events.ResponsesSealed: Line(logging.WARNING, "Plain answers were sealed by hand."),
        events.QuotaSet: Line(logging.WARNING, "The limits of a tenant were set by hand."),
        events.StoreInitialised: Line(logging.WARNING, "A store was made ready by hand."),
        events.DataLossAcknowledged: Line(
            logging.WARNING, "Keys that the store may have forgotten run again, by hand; or may, if not `finished`."
        ),
        events.TaskRun: Line(_by_work, "A chore has run.", (logging.DEBUG, logging.INFO, logging.WARNING)),
        events.JanitorMissing: Line(
            logging.WARNING,
            "No janitor has reported for two intervals: run `celery -A flask_idempotency.janitor worker -B`, or have cron call "
            "`flask idempotency reap` and `expire` and set IDEMPOTENCY_HEARTBEAT_EVERY to how often, or to None for none.",
        ),
    }
)
"""Every event and its line."""

_TRACEBACKS: Final = logging.Formatter()

_log = logging.getLogger(LOGGER)

# What a handler would overwrite, or `Logger.makeRecord` refuse.
_TAKEN = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "event", "app"})


def fields_of(kind: type[Event]) -> Mapping[str, str]:
    """Under which name each fact of this event is found in a log record: its own, unless that has a meaning there."""
    return {fact: f"event_{fact}" if fact in _TAKEN else fact for fact in facts_of(kind)}


_FIELDS = {kind: tuple(fields_of(kind).items()) for kind in LINES}


class _Said:
    """Fields as a line shows them where no formatter does. Spelled out when somebody reads it, and not before."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._fields.items() if value != "")


class Escaping(logging.Filter):
    """Escapes what a line quotes, and every line of a traceback. It drops no line.

    A filter of the loggers, because handlers and formatters are the application's.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str):
            record.msg = printable_lines(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_quoted, record.args))
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            # Formatters take this for the text of the exception if it is there. Indented: what the exception quotes may have
            # lines that look like entries.
            record.exc_text = indent(
                printable_lines(_TRACEBACKS.formatException(record.exc_info)), "  ", lambda _: True
            )
        return True


def _quoted(argument: object) -> object:
    return printable(str(argument)) if isinstance(argument, str | BaseException) else argument


def log_of(app_name: str) -> Observer:
    """An observer that logs each event, in this application's name. Costs next to nothing where nobody listens."""

    def tell(event: Event) -> None:
        kind = type(event)
        line = LINES[kind]
        level = line.level if isinstance(line.level, int) else line.level(event)
        if not _log.isEnabledFor(level):
            return
        fields = {"record": event.record, "operation": printable(event.operation)}
        fields |= {field: printable_values(getattr(event, fact)) for fact, field in _FIELDS[kind]}
        _log.log(
            level, line.template, _Said(fields), extra={"event": name_of(kind), "app": printable(app_name), **fields}
        )

    return tell


# A filter of a logger is not asked about the lines of its children.
for _name in (LOGGER.partition(".")[0], LOGGER):
    logging.getLogger(_name).addFilter(Escaping())
