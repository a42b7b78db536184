"""The ways in which a Redis loses its memory, each done to real servers, and the person who sees to it afterwards."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from example_app.demo.servers import RedisServer
from tests.e2e.ledger import PATIENCE_SECONDS
from tests.e2e.service import create_app
from tests.e2e.wire import Answer, ask
from tests.lab.cluster import ClusterRig
from tests.lab.nodes import Node
from tests.lab.redis import connect
from tests.lab.sentinel import SentinelRig

LEASE = 1.0
RULES = {"IDEMPOTENCY_DATA_LOSS_GRACE": LEASE, "IDEMPOTENCY_CLIENT_CLOCK_SKEW": 0, "IDEMPOTENCY_TENANT_SHARDS": 1}
"""All run on one clock here: a key may be as young as the loss."""

PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Scene:
    """Redis, and how it comes to forget. Of a Cluster this concerns one node, which has the first record of all."""

    url: str
    secure: Callable[[], None]
    """What was written until now survives, if anything does."""
    lose: Callable[[], None]
    """What was written since then is forgotten. Returns when there is a Redis again."""


def emptied(server: RedisServer) -> Scene:
    def lose() -> None:
        with connect(server.url) as client:
            client.flushall()

    return Scene(server.url, _nothing, lose)


def restarted_empty(server: RedisServer) -> Scene:
    def lose() -> None:
        server.kill()
        server.restart()

    return Scene(server.url, _nothing, lose)


def set_back(server: RedisServer) -> Scene:
    """A snapshot is put aside, and brought back when more has happened."""
    file, aside = server.folder / "dump.rdb", server.folder / "aside"

    def secure() -> None:
        with connect(server.url) as client:
            client.save()
        file.rename(aside)

    def lose() -> None:
        server.kill()
        shutil.copy(aside, file)
        server.restart()
        file.unlink()

    return Scene(server.url, secure, lose)


def failed_over(rig: SentinelRig) -> Scene:
    """The heir hears nothing more of its primary, and is promoted."""

    def secure() -> None:
        rig.replicas[0].has_all_of(rig.primary)
        rig.replicas[0].lag()

    def lose() -> None:
        rig.primary.kill()
        rig.fail_over()

    return Scene(rig.url, secure, lose)


def failed_over_in_part(rig: ClusterRig) -> Scene:
    """The same to one primary of a Cluster."""
    concerned = list[Node]()

    def secure() -> None:
        with rig.client() as client:
            primary = rig.primary_of(next(client.scan_iter(match="*:r:*")))
        concerned.extend((primary, rig.replica_of(primary)))
        concerned[1].has_all_of(primary)
        concerned[1].lag()

    def lose() -> None:
        concerned[0].kill()
        rig.fail_over(concerned[1], force=True)

    return Scene(rig.url, secure, lose)


def _nothing() -> None:
    """There is nothing that would survive."""


class Operator:
    """Whoever is called when new keys are refused, and has the command line."""

    def __init__(self, url: str, *, ledger: str, config: dict[str, Any]) -> None:
        config = {"IDEMPOTENCY_LEASE": LEASE, **config}
        self._runner = create_app(store=url, ledger=ledger, config=config).test_cli_runner()

    def status(self) -> int:
        """0: new keys run."""
        return self._runner.invoke(args=["idempotency", "redis", "status"]).exit_code

    def acknowledge(self) -> str | None:
        """What `ack` says where it refuses. None: done."""
        told = ["--yes", "--actor", "e2e", "--reason", "it was us"]
        result = self._runner.invoke(args=["idempotency", "redis", "ack", *told])
        return result.output if result.exit_code else None


def key_made_now() -> str:
    """A UUID of version 7, made here because Python 3.11 makes none."""
    milliseconds = time.time_ns() // 1_000_000
    rest = secrets.randbits(74)
    return str(UUID(int=milliseconds << 80 | 7 << 76 | (rest >> 62) << 64 | 2 << 62 | rest & (1 << 62) - 1))


def ask_until(port: int, data: bytes, done: Callable[[Answer], bool]) -> Answer:
    """Ask again, as a client does, until the answer is one of these."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    answer: Answer | None = None
    while time.monotonic() < deadline:
        with suppress(ConnectionError):
            answer = ask(port, data)
            if done(answer):
                return answer
        time.sleep(PAUSE_SECONDS)
    raise AssertionError(f"not told within {PATIENCE_SECONDS:.0f} s, but {answer}")


def ask_until_acknowledged(operator: Operator) -> str | None:
    """The last word of somebody who has tried until it is the time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (told := operator.acknowledge()) is not None and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    return told


def decided(answer: Answer) -> bool:
    """By a Redis that could be asked."""
    return answer.code != "store-unavailable"
