"""An application for relays in processes of their own. What they send goes to a file, and a file can make one kill itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.engine.outbox import Message
from tests.outbox.conftest import SECRET, Base


class File:
    """An adapter that writes to a file, and then kills its process if the file `kill` is there."""

    batch = 1

    def __init__(self, folder: Path) -> None:
        self._sent, self._kill = folder / "sent", folder / "kill"

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        for message in messages:
            with self._sent.open("a", encoding="utf-8") as file:
                file.write(f"{message.message_id} {message.key} {message.body.decode()}\n")
        if self._kill.exists():
            self._kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [None for _ in messages]


def create_app() -> Flask:
    app = Flask("shop")
    app.testing = True
    app.config |= {"SQLALCHEMY_DATABASE_URI": os.environ["OUTBOX_URL"], "IDEMPOTENCY_SECRET": SECRET}
    app.config |= {"IDEMPOTENCY_STORE": "flask-sqlalchemy://", "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT": True}
    SQLAlchemy(app, model_class=Base)
    outbox = Idempotency(app).outbox()
    outbox.route("*", File(Path(os.environ["OUTBOX_FOLDER"])))
    return app
