"""The demo from outside: its output, its exit code, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import takewhile
from pathlib import Path

import httpx
import pytest

from example_app.demo import __main__ as program
from tests.example_app.demo.test_database import schemas
from tests.tooling.processes import eventually

ROOT = Path(__file__).parents[3]
DEMO_SECONDS = 400


@contextmanager
def demo(*arguments: str, temporary: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a demo with its temporary files in this folder, and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "example_app.demo", *arguments],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": "", "TMPDIR": str(temporary), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def findings(output: str) -> dict[str, str]:
    """The last column of the table, by scenario."""
    lines = iter(output.splitlines())
    assert any(line and not line.strip("- ") for line in lines), output
    return {line.split("  ")[0]: line.split()[-1] for line in takewhile(lambda line: "  " in line, lines)}


@pytest.mark.slow
@pytest.mark.timeout(DEMO_SECONDS + 20)
def test_tour_on_postgresql(tmp_path: Path, postgres_url: str) -> None:
    """`--exit` plays the whole tour, with DATABASE_URL in the spelling of hosting services. It leaves no file and no schema."""
    before = schemas(postgres_url)
    url = postgres_url.replace("postgresql+psycopg:", "postgres:")

    with demo("--exit", "--port", "0", temporary=tmp_path, DATABASE_URL=url) as process:
        output, errors = process.communicate(timeout=DEMO_SECONDS)

    assert (0, "") == (process.returncode, errors), output
    assert_every_promise_was_kept(output)
    assert [] == list(tmp_path.iterdir())
    assert before == schemas(postgres_url)


def assert_every_promise_was_kept(output: str) -> None:
    found = findings(output)
    assert len(found) > 15, output
    assert {"ok"} == set(found.values()), output


@pytest.mark.slow
@pytest.mark.timeout(DEMO_SECONDS + 20)
def test_tour_sees_broken_promises(tmp_path: Path) -> None:
    """With the library switched off, scenarios fail that a bare service cannot promise. Others of `--only` do not run."""
    played = ["first request", "retry", "changed payload", "missing key", "killed before commit", "killed after commit"]
    with demo(
        *("--exit", "--port", "0", "--only", ",".join(played)),
        temporary=tmp_path,
        FLASK_IDEMPOTENCY_ENABLED="false",
    ) as process:
        output, errors = process.communicate(timeout=DEMO_SECONDS)

    assert (1, "") == (process.returncode, errors), output
    found = findings(output)
    assert [*played, "rows at the end"] == list(found)
    assert {"first request", "killed before commit"} == {name for name, verdict in found.items() if verdict == "ok"}
    assert f"[ 1/{len(played)}] first request: " in output
    assert f"[ {len(played)}/{len(played)}] killed after commit: " in output
    assert "Promises broken: retry" in output


@pytest.mark.slow
@pytest.mark.timeout(DEMO_SECONDS + 20)
def test_serves_on(tmp_path: Path) -> None:
    """Without `--exit` the service stays after the tour, its lines work as they are printed, and Ctrl-C is a good end.

    The database is a SQLite file here.
    """
    with demo("--port", "0", temporary=tmp_path) as process:
        assert process.stdout is not None
        heard = []
        for line in process.stdout:
            heard.append(line)
            if line.endswith("/idempotency/\n"):
                break
        printed = re.search(r"the operator (\w+) with the password (\w+)\.", "".join(heard))
        assert printed
        with httpx.Client(auth=(printed[1], printed[2]), trust_env=False, timeout=DEMO_SECONDS) as operator:
            overview = operator.get(heard[-1].strip())
            waiting = operator.get(f"{heard[-1].strip()}records?state=quarantined")
        lines = "".join(heard).replace("\\\n", "").splitlines()
        commands = [line for line in lines if line.startswith("  curl")]
        said = [subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True).stdout for line in commands]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEMO_SECONDS)

    assert_every_promise_was_kept("".join(heard))
    assert (0, "\ndemo: ended\n") == (process.returncode, errors)
    assert [] == list(tmp_path.iterdir())
    assert 200 == overview.status_code
    assert "Outcomes over time" in overview.text
    assert 1 == waiting.text.count("charges.create</bdi>")
    if shutil.which("curl") is not None:
        paid, charged, crashed, payments = said
        assert paid.startswith("HTTP/1.1 201")
        assert charged.startswith("HTTP/1.1 200")
        assert crashed == ""
        assert '"payments"' in payments


@pytest.mark.slow
@pytest.mark.timeout(DEMO_SECONDS + 20)
def test_interrupted(tmp_path: Path) -> None:
    """SIGTERM in the middle of the tour ends its servers, removes its folders, and gives exit code 1."""
    with demo("--port", "0", temporary=tmp_path) as process:
        port = port_at_first_request(process)
        process.terminate()
        process.communicate(timeout=DEMO_SECONDS)

    assert 1 == process.returncode
    assert [] == list(tmp_path.iterdir())
    assert eventually(lambda: not listening(port))


@pytest.mark.slow
@pytest.mark.timeout(DEMO_SECONDS + 20)
def test_killed(tmp_path: Path) -> None:
    """Even SIGKILL leaves no server behind."""
    with demo("--port", "0", temporary=tmp_path) as process:
        port = port_at_first_request(process)
        process.kill()

    assert eventually(lambda: not listening(port))


def test_no_such_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["--only", "retyr"])

    assert "no scenario has one of these titles" in capsys.readouterr().err


@pytest.mark.slow
def test_port_in_use(tmp_path: Path) -> None:
    """If the port is taken, one line names the remedy, before the demo starts a process."""
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with demo("--exit", "--port", str(taken), temporary=tmp_path) as process:
            output, errors = process.communicate(timeout=DEMO_SECONDS)

    assert (1, "") == (process.returncode, output)
    assert errors.startswith(f"demo: port {taken} cannot be used")
    assert "--port 8001" in errors
    assert [] == list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_database(tmp_path: Path) -> None:
    """If DATABASE_URL leads nowhere, one line says so, and no process stays."""
    nowhere = "postgresql://127.0.0.1:1/name"
    with demo("--exit", "--port", "0", temporary=tmp_path, DATABASE_URL=nowhere) as process:
        output, errors = process.communicate(timeout=DEMO_SECONDS)

    assert (1, 1, 1) == (process.returncode, output.count("\n"), errors.count("\n")), errors
    assert errors.startswith("demo: the tour cannot create a schema")
    assert [] == list(tmp_path.iterdir())


def test_without_a_port_the_demo_takes_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        monkeypatch.setattr(program, "PORT", taken)
        with program.bound_socket(None) as other:
            assert other.getsockname()[1] not in (0, taken)


def port_at_first_request(process: subprocess.Popen[str]) -> int:
    """Read the output of a demo up to its first request. Return the port of its service."""
    assert process.stdout is not None
    _, _, port = next(process.stdout).rpartition(":")
    assert any("first request" in line for line in process.stdout)
    assert listening(int(port))
    return int(port)


def listening(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
