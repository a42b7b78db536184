"""The ledger: what is on disk, and what processes and threads that share it do to each other."""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flask_idempotency.client import Intents, KeyExpired, KeyReused, Ledger, LedgerError
from flask_idempotency.client import ledger as module

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "intents.sqlite3"


def test_only_its_owner_reads_the_file(path: Path) -> None:
    old = os.umask(0)
    try:
        ledger = Ledger(path)
        ledger.begin("pay", "k", None)
    finally:
        os.umask(old)

    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


SHARED: dict[str, Callable[[Path], object]] = {
    "has mode 0660": lambda path: path.chmod(0o660),
    "has mode 0604": lambda path: path.chmod(0o604),
    "is a link": link,
    "has 2 names": lambda path: os.link(path, path.with_name("elsewhere")),
}


@pytest.mark.parametrize("fault", SHARED)
def test_a_file_that_another_user_may_change_is_refused(path: Path, fault: str) -> None:
    """Another user could put another key into it, and the payment would be made under both. Also while it is open."""
    ledger = Ledger(path)
    ledger.begin("pay", "k", None)
    SHARED[fault](path)

    with pytest.raises(LedgerError, match=fault.partition(" (")[0]):
        ledger.begin("refund", "k", None)
    ledger.close()
    with pytest.raises(LedgerError, match="Nothing was sent"):
        Ledger(path)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(LedgerError, match="belongs to another user"):
        ledger.begin("pay", "k", None)
    with pytest.raises(LedgerError, match="belongs to another user"):
        Ledger(path)


@pytest.mark.parametrize("beside", ("-wal", "-journal"))
def test_a_file_beside_it_is_refused_as_well(path: Path, beside: str) -> None:
    """SQLite takes what stands there for the newest pages."""
    Ledger(path).close()
    other = path.with_name(path.name + beside)
    other.touch()
    other.chmod(0o666)

    with pytest.raises(LedgerError, match="has mode 0666"):
        Ledger(path)


@pytest.mark.parametrize(("which", "replaced"), (("", False), ("", True), ("-wal", False), ("-shm", False)))
def test_a_file_that_went_away_while_it_is_open_takes_no_key(path: Path, which: str, replaced: bool) -> None:
    """The next run would not find the key, and would send the request under another one."""
    ledger = Ledger(path)
    ledger.begin("pay", "k", None)
    path.with_name(path.name + which).rename(path.with_name("elsewhere"))
    if replaced:
        Ledger(path).close()

    with pytest.raises(LedgerError, match="deleted or replaced"):
        ledger.begin("pay", "k", None)
    with pytest.raises(LedgerError, match="deleted or replaced"), Intents(ledger)("refund") as intent:
        intent.take()


def test_the_wait_for_the_file_is_part_of_the_time_for_which_a_key_is_kept(path: Path) -> None:
    """A last attempt that is late by that wait would meet a service that has forgotten the key."""
    times = [30.0]
    ledger = Ledger(path, keep=100.0, now=lambda: times.pop() if len(times) > 1 else times[0])
    times.append(0.0)

    assert ledger.begin("pay", "k", None).seconds_kept == 70.0


def test_a_folder_in_which_every_user_may_replace_files_is_refused(path: Path) -> None:
    Ledger(path).close()
    path.parent.chmod(0o777)
    with pytest.raises(LedgerError, match="chmod o-w"):
        Ledger(path)

    # As /tmp is: only their owner may rename files there.
    path.parent.chmod(0o1777)
    Ledger(path).close()


def test_a_file_that_goes_away_during_the_write_takes_no_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path)
    found = module._find

    def unlink_and_find(connection: sqlite3.Connection, name: str) -> module.Entry | None:
        path.unlink()
        return found(connection, name)

    monkeypatch.setattr(module, "_find", unlink_and_find)

    with pytest.raises(LedgerError, match="deleted or replaced"):
        ledger.begin("pay", "k", None)


def test_a_first_sending_in_the_future_has_an_unknown_age(path: Path) -> None:
    """The clock was ahead. The service may have forgotten the key since."""
    ledger = Ledger(path, now=lambda: 10 * 86400.0)
    with Intents(ledger)("pay") as intent:
        intent.begin(None)
    back = Intents(Ledger(path, now=lambda: 3 * 86400.0))

    with pytest.raises(KeyExpired), back("pay"):
        pass
    assert ["pay"] == [entry.name for entry in back.ledger.unsettled()]


def test_the_file_is_written_for_good_before_a_key_is_sent(path: Path) -> None:
    ledger = Ledger(path)

    with ledger._reading() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_no_content_is_in_the_file(path: Path) -> None:
    ledger = Ledger(path)
    intent = Intents(ledger)("pay")
    with intent:
        intent.begin(intent.content("POST", "text/plain", b"4111 1111 1111 1111"))
    ledger.close()

    assert b"4111" not in path.read_bytes()


def test_equal_bodies_of_two_names_have_different_digests() -> None:
    digests = set()
    for name in ("one", "two"):
        with Intents()(name) as intent:
            digests.add(intent.begin(intent.content("POST", "text/plain", b"x")).entry.digest)

    assert len(digests) == 2


def test_a_guess_at_a_body_cannot_be_checked_with_the_ledger_alone(path: Path) -> None:
    """The key of the digests is in a file of its own. What stands in the ledger gave it away before."""
    digests = set()
    for place in (path, path.with_name("other")):
        ledger = Ledger(place)
        with Intents(ledger)("pay", key="k-17") as intent:
            begun = intent.begin(intent.content("POST", "text/plain", b"4111 1111 1111 1111"))
        assert begun.entry.digest is not None
        digests.add(begun.entry.digest)
        ledger.close()
        secret = place.with_name(place.name + ".secret").read_bytes()
        assert len(secret) == 32
        assert secret not in place.read_bytes()

    assert len(digests) == 2


@pytest.mark.parametrize("lost", [b"", b"torn", None])
def test_a_lost_secret_is_made_again_and_leaves_the_comparison_to_the_service(path: Path, lost: bytes | None) -> None:
    for number, body in enumerate((b"5", b"6", b"7")):
        ledger = Ledger(path)
        with Intents(ledger)("pay") as intent:
            content = intent.content("POST", "text/plain", body)
            if number < 2:
                intent.begin(content)
            else:
                with pytest.raises(KeyReused):
                    intent.begin(content)
        ledger.close()
        secret = path.with_name(path.name + ".secret")
        if number == 0 and lost is None:
            secret.unlink()
        elif number == 0:
            secret.write_bytes(lost or b"")


def test_a_digest_of_an_earlier_version_still_counts(path: Path) -> None:
    former = hashlib.blake2b(b"POST\ntext/plain\n5", key=hashlib.sha256(b"pay").digest(), digest_size=32).digest()
    ledger = Ledger(path)
    with Intents(ledger)("pay") as intent:
        intent.begin(intent.content("POST", "text/plain", b"5"))
    ledger.close()
    with sqlite3.connect(path) as file:
        file.execute("UPDATE intents SET digest = ?", (former,))
    file.close()

    with Intents(Ledger(path))("pay") as intent, pytest.raises(KeyReused):
        intent.begin(intent.content("POST", "text/plain", b"6"))
    with Intents(Ledger(path))("pay") as intent:
        begun = intent.begin(intent.content("POST", "text/plain", b"5"))
    assert begun.entry.digest != former


def test_a_secret_of_another_user_is_refused(path: Path) -> None:
    path.with_name(path.name + ".secret").symlink_to("elsewhere")

    with pytest.raises(LedgerError, match="is a link"):
        Ledger(path)


def test_a_later_delivery_keeps_a_refusal_from_ending_the_name() -> None:
    """Two processes send one key. The first is refused for its quota, the second is carried out and dies."""
    ledger = Ledger()
    first = ledger.begin("pay", "k1", b"d")
    ledger.begin("pay", "k1", b"d")

    ledger.settle(first.entry, "refused", status=429, attempts=1)

    assert ledger.begin("pay", "k2", b"d").entry.key == "k1"


def test_a_name_that_was_begun_again_gives_an_older_intent_its_key() -> None:
    """The old key was refused for a quota, so the service does not know it: it must not run beside the new one."""
    ledger = Ledger()
    intents = Intents(ledger)
    with intents("pay") as old:
        first = ledger.begin("pay", old.key, b"d")
        ledger.settle(first.entry, "refused", status=429, attempts=1)
        with intents("pay") as new:
            new.take()

        assert old.take() == new.key


def test_a_carried_out_name_stays_so() -> None:
    ledger = Ledger()
    begun = ledger.begin("pay", "k", b"d")
    ledger.settle(begun.entry, "done", status=201, attempts=1)

    ledger.settle(begun.entry, "refused", status=402, attempts=1, certain=True)

    entry = ledger.find("pay")
    assert entry is not None
    assert (entry.state, entry.status, entry.attempts) == ("done", 201, 2)


def test_a_forgotten_name_is_sent_under_its_open_intents_key() -> None:
    ledger = Ledger()
    with Intents(ledger)("pay") as intent:
        ledger.forget("pay")

        assert intent.take() == intent.key
        entry = ledger.find("pay")

    assert entry is not None
    assert entry.key == intent.key


def test_a_database_that_is_no_ledger_is_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE accounts (id INTEGER)")
    other.commit()
    other.close()
    path.chmod(0o600)

    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(path)


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough for SQLite to look at" * 100)
    path.chmod(0o600)

    with pytest.raises(LedgerError, match="Check the file"):
        Ledger(path)


def test_a_newer_format_is_left_alone(path: Path) -> None:
    Ledger(path).close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.commit()
    other.close()

    with pytest.raises(LedgerError, match="format 99"):
        Ledger(path)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="folder that exists"):
        Ledger(tmp_path / "none" / "intents.sqlite3")


def test_a_closed_ledger_says_so(path: Path) -> None:
    ledger = Ledger(path)
    ledger.close()

    with pytest.raises(LedgerError, match="closed"):
        ledger.find("pay")


def test_times_that_cannot_hold_are_a_fault() -> None:
    with pytest.raises(ValueError, match="keep"):
        Ledger(keep=10.0, forget_after=5.0)


def test_threads_get_one_key(path: Path) -> None:
    ledger = Ledger(path)
    barrier = threading.Barrier(8)
    keys = []

    def take() -> None:
        barrier.wait(60)
        with Intents(ledger)("pay") as intent:
            keys.append(intent.take())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(keys) == 8
    assert len(set(keys)) == 1


@pytest.mark.parametrize(("seconds", "opens"), ((0.0, True), (module.BUSY_SECONDS, False)))
def test_a_file_whose_mode_another_process_sets_is_opened_a_little_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, opens: bool
) -> None:
    """SQLite does not wait there: a program that starts beside another one would fail. In the end it must."""
    clock, connect = itertools.count(step=seconds + 1), sqlite3.connect

    class Busy(sqlite3.Connection):
        refusals = 3

        def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
            if "journal_mode" in sql and self.refusals:
                self.refusals -= 1
                raise sqlite3.OperationalError("database is locked")
            return super().execute(sql, *parameters)  # type: ignore[arg-type]

    monkeypatch.setattr(sqlite3, "connect", functools.partial(connect, factory=Busy))
    time = SimpleNamespace(sleep=lambda _: None, monotonic=clock.__next__, time=lambda: 1.0)
    monkeypatch.setattr(module, "time", time)

    if opens:
        Ledger(path).close()
    else:
        with pytest.raises(LedgerError, match="locked"):
            Ledger(path)


def open_and_take(path: str, rounds: int, answers: multiprocessing.Queue[list[str]]) -> None:
    keys = []
    for number in range(rounds):
        ledger = Ledger(path)
        with Intents(ledger)(f"pay {number}") as intent:
            keys.append(intent.take())
        ledger.close()
    answers.put(keys)


ROUNDS = 30


@pytest.mark.slow
def test_processes_open_write_and_close_beside_each_other(path: Path) -> None:
    """Each round opens the file and closes it. With a lock lost on the way, SQLite reports a disk I/O error."""
    answers = SPAWN.Queue()
    workers = [SPAWN.Process(target=open_and_take, args=(str(path), ROUNDS, answers)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)

    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == ROUNDS


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_opens_its_own_connection(path: Path) -> None:
    ledger = Ledger(path)
    with Intents(ledger)("pay") as intent:
        key = intent.take()
    memory = Ledger()
    memory.begin("pay", "k", None)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - the child
        try:
            with Intents(ledger)("pay") as again:
                found = again.take()
            try:
                memory.find("pay")
            except LedgerError:
                found += " refused"
            os.write(writing, found.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert os.read(reading, 1000).decode() == f"{key} refused"
    assert ledger.find("pay") is not None
    os.close(reading)
    os.close(writing)


def test_a_ledger_that_fails_after_the_response_loses_no_response(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(path)
    with Intents(ledger)("pay") as intent:
        intent.take()
        monkeypatch.setattr(module, "_SETTLE", "broken")
        intent.settled(201)

    assert "The next run must send its key again" in caplog.text
    assert "Nothing was sent" not in caplog.text
    assert intent.key not in caplog.text
    entry = ledger.find("pay")
    assert entry is not None
    assert entry.state == "sent"


def test_a_relative_path_stays_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("intents.sqlite3")
    ledger.begin("pay", "k", None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger._after_fork()

    entry = ledger.find("pay")
    assert entry is not None
    assert entry.key == "k"


def test_intents_without_a_name_work_in_a_forked_process() -> None:
    intents = Intents()
    intents.ledger._after_fork()
    intents._unnamed._after_fork()

    with intents() as intent:
        assert intent.take() == intent.key
    with pytest.raises(LedgerError, match="forked"):
        intents.ledger.find("pay")
