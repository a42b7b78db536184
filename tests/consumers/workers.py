"""Consumers in processes of their own, to be killed and stopped: `python -m tests.consumers.workers` starts them by fork.

Each message writes a row of an order and a line of a file. The rows are committed with the inbox. The file shows how often the
handler ran.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.consumers import Inbox, kafka, rabbit, sqs

ROOT: Final = Path(__file__).parents[2]
LEASE_SECONDS: Final = 2


def shop(folder: Path) -> tuple[Flask, Inbox, Any]:
    """Build an application whose orders and records are in one database in this folder."""
    app = Flask("shop", root_path=str(folder))
    app.config.update(
        SQLALCHEMY_DATABASE_URI=f"sqlite:///{folder}/shop.db",
        SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"timeout": 60}},
        IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60c1d47be2a5583f09",
        IDEMPOTENCY_STORE="flask-sqlalchemy://",
        TESTING=True,
    )
    db = SQLAlchemy(app)
    db.Table("orders", db.metadata, db.Column("number", db.Integer, primary_key=True), db.Column("message", db.String))
    idempotency = Idempotency(app)
    # More attempts than there are kills.
    inbox = idempotency.inbox("billing", effects="transactional", lease=LEASE_SECONDS, max_attempts=10_000)
    return app, inbox, db


def consume(kind: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Consume until this process is killed."""
    app, inbox, db = shop(folder)
    orders = db.metadata.tables["orders"]

    def book(text: str) -> None:
        db.session.execute(orders.insert().values(message=text))
        with (folder / "runs").open("a") as runs:
            runs.write(f"{text}\n")

    with app.app_context():
        match kind:
            case "rabbit":
                import pika  # type: ignore[import-untyped]

                with closing(pika.BlockingConnection(pika.URLParameters(options["url"]))) as connection:
                    channel = connection.channel()
                    rabbit.consume(channel, options["queue"], inbox, lambda message: book(message.body.decode()))
            case "kafka":
                from confluent_kafka import Consumer

                consumer = Consumer(options["settings"])
                kafka.consume(consumer, options["topic"], inbox, lambda message: book(message.value().decode()))
            case "sqs":
                import boto3  # type: ignore[import-untyped]

                client = boto3.client("sqs", endpoint_url=options["endpoint"], region_name="eu-central-1")
                sqs.receive(
                    client, options["queue"], inbox, lambda message: book(message["Body"]), visibility=2, wait=1
                )


class Host:
    """Forks consumers, and kills, stops and continues them."""

    def __init__(self, kind: str, folder: Path, options: Mapping[str, Any]) -> None:
        app, _, db = shop(folder)
        assert app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code == 0
        with app.app_context():
            db.create_all()
            db.engine.dispose()
        self._folder = folder
        (folder / "runs").touch()
        command = [sys.executable, "-m", "tests.consumers.workers", kind, str(folder), json.dumps(options)]
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
        with (folder / "log").open("ab") as log:
            self._host = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment
            )

    def start(self) -> int:
        """Start a consumer, and return its process id."""
        return int(self._ask("start"))

    def signal(self, pid: int, number: signal.Signals) -> None:
        self._ask(f"{int(number)} {pid}")

    def runs(self) -> list[str]:
        """Return a line for each time that a handler ran, also if its rows were rolled back."""
        return (self._folder / "runs").read_text().splitlines()

    def orders(self) -> list[str]:
        """Return the message of each row."""
        with closing(sqlite3.connect(self._folder / "shop.db", timeout=60)) as database:
            return [str(message) for (message,) in database.execute("SELECT message FROM orders")]

    def _ask(self, line: str) -> str:
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        self._host.stdin.write(f"{line}\n")
        self._host.stdin.flush()
        answer = self._host.stdout.readline().strip()
        assert answer, (self._folder / "log").read_text()[-4000:]
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        # At the end of its input it kills what it has started.
        self._host.stdin.close()
        self._host.wait()
        self._host.stdout.close()


def answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(kind: str, folder: Path, options: Mapping[str, Any]) -> None:
    children: set[int] = set()
    for line in sys.stdin:
        word, _, pid = line.strip().partition(" ")
        if word != "start":
            os.kill(int(pid), int(word))
            if int(word) == signal.SIGKILL:
                os.waitpid(int(pid), 0)
                children.discard(int(pid))
            answer("done")
            continue
        child = os.fork()
        if child == 0:
            try:
                consume(kind, folder, options)
            finally:
                os._exit(1)
        children.add(child)
        answer(str(child))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
