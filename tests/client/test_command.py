"""`python -m flask_idempotency.client`, as a script calls it."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flask_idempotency.client import Entry, Ledger, LedgerError, NotSent
from flask_idempotency.client.__main__ import _cause, main
from tests.client.scripted import Drop, Line, ScriptedServer, problem, reply

REPLAYED = "Idempotency-Replayed: true"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "intents.sqlite3"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def pay(server: ScriptedServer, ledger: Path, *more: str) -> int:
    return main(
        ["POST", f"{server.url}/payments", "--data", '{"amount": 5}', "--intent", "pay", "--ledger", str(ledger), *more]
    )


@pytest.mark.slow
def test_a_request_is_sent_once_and_its_response_is_printed(
    server: ScriptedServer, ledger: Path, tmp_path: Path
) -> None:
    server.script = [Drop(), reply(201, b'{"id": 7}')]
    (tmp_path / "payment.json").write_text('{"amount": 5}')

    command = [sys.executable, "-m", "flask_idempotency.client", "--ledger", str(ledger), "POST", server.url]
    options = ["--data", f"@{tmp_path / 'payment.json'}", "--intent", "pay", "--header", "Authorization: Bearer t"]

    done = subprocess.run([*command, *options], capture_output=True, check=False, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, b'{"id": 7}', b"")
    first, second = server.seen
    assert first.key == second.key
    assert first.body == b'{"amount": 5}'
    assert (first.headers["content-type"], first.headers["authorization"]) == ("application/json", "Bearer t")


def test_the_same_command_again_sends_the_same_key(server: ScriptedServer, ledger: Path) -> None:
    assert pay(server, ledger) == 0
    assert pay(server, ledger) == 0

    assert len(server.seen) == 2
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ([reply(200)], 0),
        ([reply(303, b"", "Location: /payments/1")], 0),
        ([reply(302, b"", "Location: /payments/1", REPLAYED)], 0),
        ([reply(402)], 1),
        ([Drop(), reply(402, b"{}", REPLAYED)], 1),
        ([Drop(), reply(402)], 4),
        ([Drop(), reply(400)], 4),
        ([Drop(), reply(404)], 4),
        ([reply(302, b"", "Location: /sign-in")], 4),
        ([reply(501)], 4),
        ([Drop(), reply(401)], 4),
        ([reply(401)], 9),
        ([reply(408)], 9),
        ([reply(307, b"", "Location: /v2/payments")], 9),
    ],
)
def test_the_ledger_decides_the_exit_code_of_a_response(
    server: ScriptedServer, ledger: Path, script: list[Line], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = script

    assert pay(server, ledger) == code
    unsettled = [entry.name for entry in Ledger(ledger).unsettled()]
    assert unsettled == (["pay"] if code == 4 else [])
    entry = Ledger(ledger).find("pay")
    assert entry is not None
    assert (entry.state == "refused") == (code == 1)
    told = capsys.readouterr().err
    assert ("was carried out" in told) == (code == 0 and b"200" not in script[-1][:12])  # type: ignore[index]
    assert ("Change the request" in told) == (code == 1)


def test_a_response_settles_nothing_if_the_ledger_cannot_be_read_after_it(
    server: ScriptedServer, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [reply(402)]
    found = Ledger.find

    def once(self: Ledger, name: str) -> Entry | None:
        if server.seen:
            raise LedgerError("The disk is gone.")
        return found(self, name)

    monkeypatch.setattr(Ledger, "find", once)

    assert pay(server, ledger) == 4


def test_after_a_401_the_same_body_is_sent_with_other_credentials(server: ScriptedServer, ledger: Path) -> None:
    server.script = [reply(401), reply(201)]

    assert pay(server, ledger) == 9
    assert pay(server, ledger, "--header", "Authorization: Bearer t") == 0
    assert len(set(server.keys)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code", "closed"), [(reply(201), 10, True), (reply(201), 10, False), (reply(402), 1, False)]
)
def test_a_response_that_cannot_be_written(
    server: ScriptedServer, ledger: Path, answer: bytes, code: int, closed: bool
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("This system has no /dev/full.")
    server.script = [answer]
    command = [sys.executable, "-m", "flask_idempotency.client", "POST", server.url, "--intent", "pay"]
    shell = f"exec {shlex.join([*command, '--ledger', str(ledger)])} >{'&-' if closed else '/dev/full'}"

    done = subprocess.run(["/bin/sh", "-c", shell], stderr=subprocess.PIPE, check=False, timeout=60)

    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert (b"It was carried out" in done.stderr) == (code == 10)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (problem("missing-key", 400), 3),
        (problem("outcome-unknown", 409), 4),
        (problem("response-erased", 410), 5),
        (problem("key-expired", 410), 5),
        (problem("key-reused", 422), 6),
    ],
)
def test_the_exit_code_says_what_may_be_done_next(
    server: ScriptedServer, ledger: Path, answer: bytes, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = [answer]

    assert pay(server, ledger) == code
    assert (capsys.readouterr().err != "") == (code != 0)
    assert server.keys[0] is not None


def test_a_name_that_was_sent_too_long_ago(
    server: ScriptedServer, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = [problem("outcome-unknown", 409)]
    assert pay(server, ledger, "--keep", "0.001") == 4

    assert pay(server, ledger, "--keep", "0.001") == 7
    assert len(server.seen) == 1

    assert main(["--unsettled", "--ledger", str(ledger), "--keep", "0.001"]) == 0
    assert "pay  look it up" in capsys.readouterr().out
    assert main(["--forget", "pay", "--ledger", str(ledger)]) == 0
    assert main(["--forget", "pay", "--ledger", str(ledger)]) == 1


def test_the_status_url_is_shown(server: ScriptedServer, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = [problem("outcome-unknown", 409, 'Link: </keys>; rel="status"')]

    pay(server, ledger)

    assert f"{server.url}/keys" in capsys.readouterr().err


def test_no_key_is_printed(server: ScriptedServer, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = [problem("outcome-unknown", 409)]
    pay(server, ledger)
    main(["--unsettled", "--ledger", str(ledger)])
    printed = capsys.readouterr()

    assert server.keys[0] is not None
    assert server.keys[0] not in printed.out + printed.err


def test_the_body_may_come_from_a_pipe(server: ScriptedServer, ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"plain words")))

    assert main(["PUT", server.url, "--data", "@-", "--intent", "put", "--ledger", str(ledger)]) == 0
    assert server.seen[0].body == b"plain words"
    assert server.seen[0].headers["content-type"] == "text/plain"


FAULTY: list[list[str]] = [
    [],
    ["POST"],
    ["POST", "http://127.0.0.1:1"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--unsettled"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--data", "@/none/such"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--header", "no colon"],
    ["--unsettled", "--forget", "x"],
    ["GET", "http://127.0.0.1:1", "--intent", "x"],
    ["OPTIONS", "http://127.0.0.1:1", "--intent", "x"],
    ["POST", "nohost", "--intent", "x"],
    ["POST", "127.0.0.1:1", "--intent", "x"],
    ["POST", "ftp://127.0.0.1:1", "--intent", "x"],
    ["POST", "http://", "--intent", "x"],
    ["POST", "http://h:port/", "--intent", "x"],
    ["POST", "http://[::1", "--intent", "x"],
    ["POST", "http://127.0.0.1:1/\x01", "--intent", "x"],
    ["POST", "http://127.0.0.1:1", "--intent", ""],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--deadline", "0"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--key-header", "a b"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--header", "a b: c"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--header", ": c"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--header", "@/none/such"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--header-env", "Authorization"],
    ["POST", "http://127.0.0.1:1", "--intent", "x", "--header-env", "Authorization=NO_SUCH_VARIABLE"],
    ["POST", "http://127.0.0.1:1", "--intent", "\udcff"],
]


def test_a_faulty_command_line_sends_nothing(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in FAULTY:
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--ledger", str(ledger)])

        assert caught.value.code == 2, arguments
        assert "usage:" in capsys.readouterr().err
        assert not ledger.exists() or Ledger(ledger).find("x") is None


def test_credentials_come_from_a_file_or_the_environment(
    server: ScriptedServer, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of the machine sees the arguments of a process."""
    (tmp_path / "fields").write_text("Authorization: Bearer file\n\nX-Shop: 7\n")
    monkeypatch.setenv("SHOP_TOKEN", "Bearer environment")

    assert pay(server, ledger, "--header", f"@{tmp_path / 'fields'}") == 0
    assert pay(server, ledger, "--header-env", "Authorization=SHOP_TOKEN") == 0

    assert [request.headers["authorization"] for request in server.seen] == ["Bearer file", "Bearer environment"]
    assert server.seen[0].headers["x-shop"] == "7"


@pytest.mark.parametrize("how", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "without a scheme", "--proxy"])
def test_a_proxy_is_named_by_the_environment_or_an_argument(
    server: ScriptedServer, ledger: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    proxy = server.url.replace("//", "//bob:hunter2@")
    command = ["POST", "http://shop.example/payments", "--intent", "pay", "--ledger", str(ledger)]
    if how == "--proxy":
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        command += ["--proxy", proxy]
    elif how == "without a scheme":
        monkeypatch.setenv("http_proxy", proxy.removeprefix("http://"))
    else:
        monkeypatch.setenv(how, proxy)

    assert main(command) == 0
    assert server.seen[0].path == "http://shop.example/payments"
    assert server.seen[0].headers["proxy-authorization"].startswith("Basic ")


@pytest.mark.parametrize("direct", [["NO_PROXY", "127.0.0.1"], []])
def test_a_proxy_of_the_environment_may_be_left_out(
    server: ScriptedServer, ledger: Path, monkeypatch: pytest.MonkeyPatch, direct: list[str]
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    if direct:
        monkeypatch.setenv(*direct)

    assert pay(server, ledger, *[] if direct else ["--proxy", ""]) == 0


def test_a_faulty_proxy_sends_nothing_and_its_password_is_not_shown(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["POST", "http://127.0.0.1:1", "--intent", "x", "--ledger", str(ledger)]
    for proxy in ("http://bob:hunter2@", "ftp://bob:hunter2@proxy", "http://bob:hunter2@proxy:x"):
        monkeypatch.setenv("http_proxy", proxy)
        for more in ([], ["--proxy", proxy]):
            with pytest.raises(SystemExit):
                main([*command, *more])
            told = capsys.readouterr().err
            assert "the proxy must be a URL" in told
            assert "hunter2" not in told


def test_a_name_cannot_command_the_terminal(
    server: ScriptedServer, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = [problem("outcome-unknown", 409, "Link: </\x1b[2Jkeys>; rel=status")]
    name = "pay\x1b[2J\n1970-01-01 00:00:00Z  1 attempts  other\u202e \xfc"
    assert main(["POST", server.url, "--intent", name, "--ledger", str(ledger)]) == 4
    assert main(["--unsettled", "--ledger", str(ledger)]) == 0

    printed = capsys.readouterr()
    assert "pay\\x1b[2J\\n1970-01-01 00:00:00Z  1 attempts  other\\u202e \xfc" in printed.out
    assert "\x1b" not in printed.out + printed.err
    assert printed.out.count("\n") == 1
    assert main(["--forget", "\udcff", "--ledger", str(ledger)]) == 1


def test_a_method_may_be_in_lower_case(server: ScriptedServer, ledger: Path) -> None:
    assert main(["patch", server.url, "--intent", "x", "--ledger", str(ledger)]) == 0
    assert server.seen[0].method == "PATCH"
    assert server.keys != [None]


@pytest.mark.parametrize("value", ["\u00fc", "a\nb", "\x7f"])
def test_a_value_that_no_header_field_can_have_is_named_by_its_field(
    ledger: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["POST", "http://127.0.0.1:1", "--intent", "x", "--header", f"X-Note: {value}", "--ledger", str(ledger)])

    told = capsys.readouterr().err
    assert "header field X-Note" in told
    assert value not in told.splitlines()[-1]


def test_a_ledger_that_cannot_be_used(server: ScriptedServer, tmp_path: Path) -> None:
    assert pay(server, tmp_path / "none" / "intents.sqlite3") == 8
    assert server.seen == []


def test_a_state_folder_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))

    assert main(["POST", "http://127.0.0.1:1", "--intent", "x"]) == 8
    assert "Give --ledger FILE" in capsys.readouterr().err


def test_nothing_listens(server: ScriptedServer, ledger: Path) -> None:
    server.close()

    assert pay(server, ledger, "--deadline", "0.3") == 3
    found = Ledger(ledger).find("pay")
    assert found is not None
    assert found.state == "new"


def test_the_cause_is_named_if_nothing_could_be_sent(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://alice:hunter2@no-such-host.invalid/payments"

    assert main(["POST", url, "--intent", "pay", "--deadline", "0.3", "--ledger", str(ledger)]) == 3
    told = capsys.readouterr().err
    assert "The cause: Connect" in told
    assert "alice" not in told
    assert "hunter2" not in told


def test_a_cause_with_a_secret_is_named_by_its_class() -> None:
    def caused(text: str) -> NotSent:
        error = NotSent(key="k-17")
        error.__cause__ = ConnectionError(text)
        return error

    url = "http://alice:hunter2@127.0.0.1/"
    assert _cause(caused("refused"), url) == "ConnectionError: refused"
    for secret in ("k-17", "alice", "hunter2"):
        assert _cause(caused(f"refused {secret}"), url) == "ConnectionError"


def test_the_ledger_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    assert main(["--unsettled"]) == 0
    assert (tmp_path / "flask-idempotency" / "intents.sqlite3").exists()
    assert (os.stat(tmp_path / "flask-idempotency").st_mode & 0o777) == 0o700


def test_the_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    text = capsys.readouterr().out
    assert [number for number in range(11) if f"\n  {number}  " not in text] == []


def test_without_httpx_the_command_names_what_to_install(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)

    with pytest.raises(SystemExit):
        main(["POST", "http://127.0.0.1:1", "--intent", "x", "--ledger", str(ledger)])

    assert "pip install" in capsys.readouterr().err
