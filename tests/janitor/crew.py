"""Workers and beats as people run them: processes that dispose of themselves, their logs, and what they have done."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from example_app.demo.servers import DIE_WITH_PARENT

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60.0

# Each of these costs a second at the start, and there is nobody to hear it.
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
SCHEDULE = "beat/schedule"
SOLO = ("worker", "-P", "solo", *QUIET)
PREFORK = ("worker", "-P", "prefork", "-c", "2", *QUIET)
WITH_BEAT = ("-B", "-s", SCHEDULE)
BEAT = ("beat", "-s", SCHEDULE, "--pidfile=")


class Crew:
    """What is running in one folder, for one application."""

    def __init__(self, folder: Path, *, store: str, broker: str | None = None, **config: object) -> None:
        self.folder = folder
        self.diary_path = folder / "diary"
        settings = {"after_loss": "run", "reap_interval": 1, "expire_interval": 1, "heartbeat_interval": 1, **config}
        settings = {"store": store, "secret": "s-9f2c47d1e8b35a60", **settings}
        if broker is not None:
            settings["broker_url"] = broker
        (folder / "beat").mkdir(exist_ok=True)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FLASK_APP": "tests.janitor.shop:create_app",
            "SHOP_DIARY": str(self.diary_path),
            **{f"FLASK_IDEMPOTENCY_{name.upper()}": json.dumps(value) for name, value in settings.items()},
        }
        self.members: list[Member] = []

    def start(self, *arguments: str, folder: Path | None = None, **environment: str) -> Member:
        """`celery -A janitor` with these arguments, in this folder or the crew's own."""
        log = self.folder / f"log-{len(self.members)}"
        member = Member(arguments, folder or self.folder, {**self._environment, **environment}, log=log)
        self.members.append(member)
        return member

    def diary(self, beginning: str = "") -> list[str]:
        """What was told so far, in order: `done reap 123`, `reaped abcd 123`."""
        if not self.diary_path.exists():
            return []
        return [line for line in self.diary_path.read_text().splitlines() if line.startswith(beginning)]

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    @property
    def log(self) -> str:
        return "\n".join(f"{' '.join(member.arguments)}\n{member.log[-3000:]}" for member in self.members)


class Member:
    """One `celery` command with all the processes that it starts. It dies with the thread that started it."""

    def __init__(self, arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], *, log: Path) -> None:
        self.arguments = arguments
        self._log_path = log
        launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), sys.executable]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*launcher, "-m", "celery", "-A", "janitor", *arguments, "-l", "INFO"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,  # one process group, so that no child of it is left behind
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def said(self, words: str) -> int:
        """How often its log has these words by now."""
        return self.log.count(words)

    def end(self) -> int:
        """As systemd would: it finishes what it is at. Returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """As the kernel does when memory runs out, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
