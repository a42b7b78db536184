"""Write every event as one structured line to the logger `flask_idempotency.events`.

The sentence of an event never varies; its facts are fields of the log record, which a JSON formatter writes and other
formatters show behind the sentence. Handlers and levels are the application's: this module sets up none. It escapes
what a line quotes, whatever formatter writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from textwrap import indent
from typing import Final

from flask_idempotency.engine.escape import printable, printable_lines, printable_values
from flask_idempotency.engine.events import Event, facts_of, kinds, name_of
from flask_idempotency.engine.observers import Observer

LOGGER: Final = "flask_idempotency.events"

_log = logging.getLogger(LOGGER)

# A handler would overwrite these attributes of a log record, or `Logger.makeRecord` refuses them.
_RESERVED = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "event", "app"})


def log_of(app_name: str) -> Observer:
    """Return an observer that logs each event under this application's name. It is cheap if the level is off."""

    def write(event: Event) -> None:
        kind = type(event)
        # The highest level first: this one check is all that a request pays for an event that no handler wants.
        if not _log.isEnabledFor(kind.LEVELS[-1]) or not _log.isEnabledFor(level := event.level()):
            return
        fields = {"record": event.record, "operation": printable(event.operation)}
        fields |= {field: printable_values(getattr(event, fact)) for fact, field in _FIELDS[kind]}
        _log.log(
            level,
            template_of(kind),
            _Fields(fields),
            extra={"event": name_of(kind), "app": printable(app_name), **fields},
        )

    return write


def template_of(kind: type[Event]) -> str:
    """Return the format string by which a log groups lines: the sentence, and a place for the facts."""
    return f"{kind.SENTENCE} %s"


def fields_of(kind: type[Event]) -> Mapping[str, str]:
    """Map each fact of this event to its field in a log record: the same name, unless `logging` reserves it."""
    return {fact: f"event_{fact}" if fact in _RESERVED else fact for fact in facts_of(kind)}


_FIELDS = {kind: tuple(fields_of(kind).items()) for kind in kinds()}


class _Fields:
    """Fields as a plain line shows them. Formatted only if a formatter reads them."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._fields.items() if value != "")


class Escaping(logging.Filter):
    """Escape what a line quotes, and every line of a traceback. Drop no line.

    This is a filter of the loggers, because handlers and formatters are the application's.
    """

    _formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str):
            record.msg = printable_lines(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(
                printable(str(arg)) if isinstance(arg, str | BaseException) else arg for arg in record.args
            )
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            # Formatters use this as the text of the exception. It is indented, because an exception may quote lines
            # that look like entries.
            text = printable_lines(self._formatter.formatException(record.exc_info))
            record.exc_text = indent(text, "  ", lambda _: True)
        return True


# Python applies a logger's filter only to its own lines, not to those of its children.
for _name in (LOGGER.partition(".")[0], LOGGER):
    logging.getLogger(_name).addFilter(Escaping())
