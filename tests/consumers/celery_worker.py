"""A worker process with its broker, and what a test may do to its messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import redis
from celery import Celery, states
from celery.result import AsyncResult

from example_app.demo.servers import DIE_WITH_PARENT, RedisServer
from tests.e2e.ledger import Ledger
from tests.tooling.processes import DEADLINE_SECONDS, eventually

ROOT = Path(__file__).resolve().parents[2]
QUEUE = "shop"
STOP_SECONDS = 60.0
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def at(server: RedisServer, number: int) -> str:
    return f"{server.url.removesuffix('/0')}/{number}"


def setup_of(
    server: RedisServer,
    folder: Path,
    *,
    store: str,
    broker: str | None = None,
    database: str | None = None,
    **config: Any,
) -> dict[str, Any]:
    """What a worker finds in its environment. The broker, results, ledger and store have databases of one server."""
    return {
        "broker": broker or at(server, 0),
        "backend": at(server, 1),
        "ledger": at(server, 2),
        "store": store,
        "database": database or f"sqlite:///{folder / 'shop.sqlite'}",
        "config": config,
    }


class ShopLedger(Ledger):
    """The ledger with the plans of cases."""

    def plan(self, case: str, *steps: str) -> None:
        """Say what befalls the next runs of this case."""
        if steps:
            self._redis.rpush(f"plan:{case}", *steps)

    def step(self, case: str) -> str:
        return str(self._redis.lpop(f"plan:{case}") or "")

    def begin(self, case: str, attempt: int) -> int:
        """Note that a body has begun, and return how many have."""
        return int(self._redis.rpush(f"run:{case}", str(attempt)))


class Worker:
    """A `celery worker` with its pool, in a session of its own. It dies with the thread that started it."""

    def __init__(self, setup: Mapping[str, Any], log: Path, *arguments: str) -> None:
        self._log = log
        launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), sys.executable]
        command = [
            "-m",
            "celery",
            "-A",
            "tests.consumers.celery_shop:celery",
            "worker",
            *QUIET,
            "-l",
            "INFO",
            *arguments,
        ]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
                    "CELERY_SHOP": json.dumps(setup),
                },
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)


class Shop:
    """The sender's side of one broker: tasks, their results and their ledger."""

    def __init__(self, celery_app: Celery, ledger: ShopLedger, broker: redis.Redis | None) -> None:
        self.celery_app = celery_app
        self.ledger = ledger
        self._broker = broker
        self._held: str | None = None
        celery_app.conf.task_routes = (self._route,)

    def _route(self, *args: object, **options: object) -> dict[str, str] | None:
        return None if self._held is None else {"queue": self._held}

    def close(self) -> None:
        """Let go of the servers, before they end: a result that is collected later would look for them."""
        backend: Any = self.celery_app.backend
        backend.result_consumer.stop()
        backend.remove_pending_result = lambda result: result
        self.celery_app.close()
        self.ledger.close()

    def case(self, *steps: str) -> str:
        """A new case, with this plan."""
        case = uuid4().hex
        self.ledger.plan(case, *steps)
        return case

    def task(self, name: str) -> Any:
        return self.celery_app.tasks[name]

    def result(self, sent: AsyncResult[Any]) -> Any:
        """Wait for the result of this message, and return it. Raises what the task ended with."""
        return sent.get(timeout=DEADLINE_SECONDS)

    def failure(self, sent: AsyncResult[Any]) -> str:
        """Wait until this message has failed, and return the name of its exception."""
        sent.get(timeout=DEADLINE_SECONDS, propagate=False)
        assert sent.state == states.FAILURE, sent.state
        return type(sent.result).__name__

    def hold_back(self, signature: Any) -> tuple[AsyncResult[Any], list[str]]:
        """Send this signature where no worker looks. Returns its result to come, and its messages."""
        assert self._broker is not None
        queue = f"held-{uuid4().hex}"
        # By a route, which the rest of a chord or a chain does not inherit.
        self._held = queue
        try:
            result = signature.apply_async()
        finally:
            self._held = None
        messages: Any = self._broker.lrange(queue, 0, -1)
        self._broker.delete(queue)
        return result, [message.decode() for message in messages]

    def deliver(self, messages: Sequence[str], times: int = 1) -> None:
        """Give each of these messages to the workers so often, as a broker does that delivers again."""
        assert self._broker is not None
        for _ in range(times):
            for text in messages:
                message = json.loads(text)
                message["properties"]["delivery_tag"] = str(uuid4())
                message["properties"]["delivery_info"] = {"exchange": "", "routing_key": QUEUE}
                self._broker.lpush(QUEUE, json.dumps(message))

    def is_idle(self) -> bool:
        """Whether the broker has no message left, also none that a worker holds."""
        assert self._broker is not None
        return not self._broker.llen(QUEUE) and not self._broker.hlen("unacked")

    def await_idle(self) -> None:
        assert eventually(self.is_idle), "messages are left"

    def sent_again(self, log: Worker, task_id: str, times: int = 1) -> None:
        """Wait until a worker has sent this message again so often."""
        assert eventually(lambda: log.log.count(f"[{task_id}] ignored") >= times), log.log[-3000:]


def freeze(pid: int) -> None:
    """Stop this process, as a virtual machine that is moved does."""
    os.kill(pid, signal.SIGSTOP)
    while "T (" not in (Path("/proc") / str(pid) / "status").read_text():
        time.sleep(0)
