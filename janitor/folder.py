"""A folder as a broker: kombu's, made safe for two who look at it at the same moment."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final
from uuid import uuid4

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps

SCHEME: Final = "idempotency-folder"

_UNWRITTEN: Final = ".unwritten"


class Channel(filesystem.Channel):
    """kombu's opens a file, and then writes it. Whoever looked in between found it empty, and a worker ended of that."""

    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]
        name = f"{round(monotonic() * 1000)}_{uuid4()}.{queue}.msg"
        unwritten = Path(self.data_folder_out, name + _UNWRITTEN)
        unwritten.write_text(dumps(payload), encoding="utf-8")
        os.replace(unwritten, Path(self.data_folder_out, name))

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        # One that was written by a kombu without us, and was not whole. Beat sends the next.
        while True:
            with suppress(ValueError):
                return super()._get(queue)

    def get_table(self, exchange: str) -> Any:
        try:
            return super().get_table(exchange)
        except ValueError:  # somebody is about to write it
            return []


class Transport(filesystem.Transport):
    """As kombu's, by the scheme `idempotency-folder://`."""

    Channel = Channel


TRANSPORT_ALIASES[SCHEME] = f"{__name__}:{Transport.__name__}"
