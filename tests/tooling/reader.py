"""A reader who follows a page from top to bottom: its files, its changes and its commands, in one folder and one shell."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.tooling.processes import DEADLINE_SECONDS, eventually, reserved_port

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVER = "http://127.0.0.1:5000"
"""Where `flask run` serves. The reader takes a free port, in its place."""
PREPARED = ("pip install ", "python -m venv ", ". .venv/")
"""Commands that make the environment, in which the reader is already."""
REST = "…"
"""What a page leaves out of a file or of an output."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block."""
    return FENCE.findall(page)


def named_file(block: str) -> str | None:
    """Return the file that a block names in its first line, such as `# app.py`."""
    found = re.match(r"# (\w+\.py)\n", block)
    return found[1] if found else None


@dataclass
class Reader:
    """A person who pastes every block into the file that it names, and every command into one shell."""

    folder: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)
    server: subprocess.Popen[bytes] | None = None
    address: str = SERVER

    def paste(self, language: str, text: str) -> None:
        """Do what a block shows. Skip a Python block that names no file, and other languages."""
        if language == "python" and (name := named_file(text)):
            (self.folder / name).write_text(text)
        elif language == "diff":
            self.change(text)
        elif language == "console":
            for command, expected in commands(text):
                if command == "flask run":
                    self.serve()
                elif not command.startswith(PREPARED):
                    output = self.enter(command)
                    assert not expected or shows(output, expected), f"{command}\n{output}\nexpected:\n{expected}"

    def change(self, diff: str) -> None:
        """Apply a diff to the one file that has the lines of each of its parts."""
        for part in re.split(rf"^{REST}\n", diff, flags=re.MULTILINE):
            lines = part.splitlines(keepends=True)
            before = "".join(line[1:] or line for line in lines if not line.startswith("+"))
            after = "".join(line[1:] or line for line in lines if not line.startswith("-"))
            (path,) = (path for path in self.folder.rglob("*.py") if path.read_text().count(before) == 1)
            path.write_text(path.read_text().replace(before, after))

    def enter(self, command: str) -> str:
        """Run a command, with what earlier ones have exported. Return what it prints."""
        kept = self.folder.parent / "exported"
        done = subprocess.run(
            ["bash", "-ec", f"{command.replace(SERVER, self.address)}\nenv -0 > {shlex.quote(str(kept))}"],
            cwd=self.folder,
            env=self._env(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        self.environment = dict(item.split("=", 1) for item in kept.read_text().split("\0") if item)
        return done.stdout

    def serve(self) -> None:
        """Start `flask run`, after a server that runs already has ended."""
        self.stop()
        with reserved_port() as held:
            port = held.getsockname()[1]
            self.address = f"http://127.0.0.1:{port}"
            self.server = subprocess.Popen(
                [self.programs / "flask", "run", "--port", str(port)],
                cwd=self.folder,
                env=self._env(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            assert eventually(lambda: _listens(port))

    def stop(self) -> None:
        """End the server. It may have inherited that SIGINT is ignored, from a shell that started the tests behind `&`."""
        if self.server is not None:
            self.server.terminate()
            self.server.wait(DEADLINE_SECONDS)
            self.server = None

    def _env(self) -> dict[str, str]:
        # Of the plugins of pytest a reader has none. Those of this environment take two seconds to load.
        plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return {**self.environment, **plugins, "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Return each command of a console block with the output below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def shows(output: str, expected: str) -> bool:
    """Return whether a command printed what the page shows. Widths of columns do not count."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in expected.split(REST))
    return re.fullmatch(r"\s*" + r".*?".join(rf"\s*{part}\s*" for part in parts), output, re.DOTALL) is not None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
