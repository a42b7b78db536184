"""A server that keeps our connection and says nothing, for which libpq would wait for ever."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Final

ANSWER_SECONDS: Final = 5.0
"""Longer than our patience with a lock, and than any statement of ours takes. What became of it nobody knows."""

_UNANSWERED: Final = "the server did not answer in time"


def give_up_on_silence(connection: Any) -> None:
    """From now on this connection of psycopg's raises when an answer takes too long, and is closed then."""
    wait = connection.wait

    def wait_in_moderation(generator: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        return wait(_bounded(generator, connection), *arguments, **options)

    connection.wait = wait_in_moderation


def unanswered(error: BaseException | None) -> bool:
    """Whether this is what `give_up_on_silence` makes a connection raise: asking once more would take as long again."""
    return _UNANSWERED in getattr(error, "args", ())


def _bounded(generator: Generator[Any, Any, Any], connection: Any) -> Generator[Any, Any, Any]:
    """The same generator, as long as it is answered. psycopg resumes it with 0, several times a second, when not."""
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        wanted = next(generator)
        while True:
            ready = yield wanted
            if ready == 0 and time.monotonic() >= deadline:
                raise _silenced(connection)
            wanted = generator.send(ready)
    except StopIteration as done:
        return done.value


def _silenced(connection: Any) -> Exception:
    from psycopg import OperationalError

    # Its answer may still come, and would be taken for that to the next question.
    connection.close()
    return OperationalError(_UNANSWERED)
