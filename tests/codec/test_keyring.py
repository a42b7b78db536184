"""Where the keys that wrap keys come from, and what is refused. No error says a key."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.codec.key_sources import generate, load_ring
from flask_idempotency.codec.keyring import KeyRing, _refuse_shared_folders
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord
from tests.codec.sealing import NEW, OLD, RING, Service, text

CONTEXT = b"whose key it is"
WRITTEN = f"new:{text(NEW)},old:{text(OLD)}"
LINES = f"# since spring\nnew:{text(NEW)}\n\n  old: {text(OLD)} \n"
WRAPPED = RING.wrap("old", b"k" * 32, context=CONTEXT)


def opens(ring: object, kid: str = "old") -> bool:
    """Whether this ring has the keys of the tests, in their order."""
    loaded = load_ring(ring)
    unwrapped = loaded.unwrap(kid, WRAPPED, context=CONTEXT)
    return ("new", ["new", "old"], b"k" * 32) == (loaded.newest, list(loaded.kids()), unwrapped)


def private(path: Path, content: str = LINES) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def ring_as_text() -> str:
    return WRITTEN


def ring_as_provider() -> Service:
    return Service()


def another_name() -> str:
    return f"{__name__}:another_name"


NO_FUNCTION = 1


def test_a_ring_in_the_configuration() -> None:
    assert opens({"new": text(NEW), "old": text(OLD)})
    assert opens(WRITTEN)
    assert opens(f"  new: {text(NEW)} , old:{text(OLD)} ,\n")


def test_a_ring_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYMENT_KEYS", WRITTEN)

    assert opens("env:PAYMENT_KEYS")


@pytest.mark.parametrize("value", (None, "", "  "))
def test_an_environment_without_a_ring_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("PAYMENT_KEYS", raising=False)
    if value is not None:
        monkeypatch.setenv("PAYMENT_KEYS", value)

    with pytest.raises(ConfigurationError, match="PAYMENT_KEYS"):
        load_ring("env:PAYMENT_KEYS")


def test_a_ring_in_a_file(tmp_path: Path) -> None:
    file = private(tmp_path / "keys")

    assert opens(f"file:{file}")


def test_a_file_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    file = private(tmp_path / "keys")
    for mode in (0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777):
        file.chmod(mode)
        with pytest.raises(ConfigurationError, match=f"chmod 600 {file}"):
            load_ring(f"file:{file}")


def test_a_link_is_refused(tmp_path: Path) -> None:
    """A user who can change the link chooses the keys. The text says to name the file itself."""
    file = private(tmp_path / "keys")
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")

    for name in ("link", "dangling"):
        with pytest.raises(ConfigurationError, match=r"symbolic link.*Name the file"):
            load_ring(f"file:{tmp_path / name}")
    assert opens(f"file:{file}")


def as_user(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)


def owned_by(monkeypatch: pytest.MonkeyPatch, owners: Mapping[Path, int]) -> None:
    """Files and folders look as if these users owned them: only root can have it so."""
    real_fstat, real_stat, by_inode = os.fstat, os.stat, {os.stat(path).st_ino: uid for path, uid in owners.items()}

    def changed(status: os.stat_result) -> os.stat_result:
        values = list(status)
        values[4] = by_inode.get(status.st_ino, status.st_uid)
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", lambda descriptor: changed(real_fstat(descriptor)))
    monkeypatch.setattr(os, "stat", lambda *arguments, **options: changed(real_stat(*arguments, **options)))


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That user can read it, and write other keys into it. Root may own it: root can do all that anyway."""
    file = private(tmp_path / "keys")
    me = os.geteuid() + 1000
    folders = dict.fromkeys((tmp_path, *tmp_path.parents), 0)
    as_user(monkeypatch, me)
    with monkeypatch.context() as patch:
        owned_by(patch, {**folders, file: me + 1})
        with pytest.raises(ConfigurationError, match=rf"user {me + 1}.*Run: chown {me} {file}"):
            load_ring(f"file:{file}")
    for owner in (me, 0):
        with monkeypatch.context() as patch:
            owned_by(patch, {**folders, file: owner})
            assert opens(f"file:{file}")


@pytest.mark.parametrize("mode", (0o770, 0o707, 0o777))
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """They could put an old key file of yours in the place of the new one. The text says what to run."""
    folder = tmp_path / "secrets"
    (folder / "inner").mkdir(parents=True)
    file = private(folder / "inner" / "keys")
    folder.chmod(mode)

    with pytest.raises(ConfigurationError, match=f"Run: chmod go-w {folder}$"):
        load_ring(f"file:{file}")
    folder.chmod(0o1777)
    assert opens(f"file:{file}")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    file = private(folder / "keys")
    me = os.geteuid()
    owned_by(monkeypatch, {folder: me + 1})

    with pytest.raises(ConfigurationError, match=f"folder {folder}.*user {me + 1}"):
        load_ring(f"file:{file}")


def test_a_link_among_the_folders_is_followed_and_its_target_is_looked_at(tmp_path: Path) -> None:
    """A release's `current` is such a link. Who may write to where it leads could put another file there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    private(shared / "keys")
    (tmp_path / "current").symlink_to(shared)

    assert opens(f"file:{tmp_path / 'current' / 'keys'}")
    shared.chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"chmod go-w {shared}"):
        load_ring(f"file:{tmp_path / 'current' / 'keys'}")


def test_a_link_that_others_may_turn_is_refused(tmp_path: Path) -> None:
    """
    Where it leads to now is in order, and where it leads to next is another user's choice. Also at the second link.
    """
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for folder in (mine, shared):
        folder.mkdir()
    private(mine / "keys")
    (shared / "current").symlink_to("../mine")
    (tmp_path / "latest").symlink_to(shared / "current")
    ways = shared / "current" / "keys", tmp_path / "latest" / "keys", tmp_path / "latest" / ".." / "mine" / "keys"

    assert all(opens(f"file:{way}") for way in ways)
    shared.chmod(0o777)
    for way in ways:
        with pytest.raises(ConfigurationError, match=f"chmod go-w {shared}"):
            load_ring(f"file:{way}")


def test_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, tmp = tmp_path / "mine", tmp_path / "tmp"
    for folder in (mine, tmp):
        folder.mkdir()
    tmp.chmod(0o1777)
    private(mine / "keys")
    link = tmp / "current"
    link.symlink_to(mine)
    assert opens(f"file:{link / 'keys'}")
    me, real, inode = os.geteuid(), os.lstat, os.lstat(link).st_ino

    def changed(status: os.stat_result) -> os.stat_result:
        return os.stat_result([*status[:4], me + 1, *status[5:]]) if status.st_ino == inode else status

    monkeypatch.setattr(os, "lstat", lambda *arguments, **options: changed(real(*arguments, **options)))

    with pytest.raises(ConfigurationError, match=rf"link {link} .* user {me + 1}"):
        load_ring(f"file:{link / 'keys'}")


def test_links_without_an_end_are_refused(tmp_path: Path) -> None:
    """Made between the opening of the file and the look at its folders."""
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")

    with pytest.raises(ConfigurationError, match="too many"):
        _refuse_shared_folders(tmp_path / "one" / "keys")


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    private(tmp_path / "large", "#" * 65537)
    (tmp_path / "bytes").write_bytes(b"new:\xff")
    (tmp_path / "bytes").chmod(0o600)
    tmp_path.chmod(0o700)

    for name in ("nothing", "", "pipe", "large", "bytes", "\0"):
        with pytest.raises(ConfigurationError, match="key file"):
            load_ring(f"file:{tmp_path / name}")


def test_a_ring_that_a_function_makes() -> None:
    assert opens(f"{__name__}:ring_as_text")
    assert opens(f"{__name__}:ring_as_provider")


@pytest.mark.parametrize(
    "source",
    (
        f"{__name__}:not_there",
        f"{__name__}:NO_FUNCTION",
        f"{__name__}:another_name",
        "no_such_package.no_such_module:factory",
    ),
)
def test_a_function_that_makes_no_ring_is_refused(source: str) -> None:
    """Also one that only names another: two of them could do so for ever."""
    with pytest.raises(ConfigurationError):
        load_ring(source)


def test_a_provider_is_used_as_it_is() -> None:
    service = Service()

    assert load_ring(service) is service
    for nothing in (None, 5, b"bytes", object()):
        with pytest.raises(ConfigurationError, match="newest, kids, wrap, unwrap"):
            load_ring(nothing)


# Parts of keys that would be worth something to a reader of logs; none may be told.
CANARY = "c2VjcmV0LWNhbmFyeS1zZWNyZXQtY2FuYXJ5LXNlY3JldA=="

FAULTY = {
    "nothing": "",
    "only commas": ",,",
    "no id": CANARY,
    "empty id": f":{CANARY}",
    "too short": "new:c2VjcmV0",
    "too long": f"new:{CANARY}",
    "not base64": f"new:{CANARY[:-4]}!!",
    "cut": f"new:{text(b'c2VjcmV0' * 4)[:-1]}",
    "cut to a name": "new:c2VjcmV0YWNhbmFyeTE",
    "cut to a name that is not there": "base64:c2VjcmV0YWNhbmFyeTE",
    "all zeros": f"new:{text(bytes(32))}",
    "the wrong way round": f"{CANARY}:new",
    "twice": f"new:{text(NEW)},old:{text(OLD)},new:{text(b'c2VjcmV0' * 4)}",
    "id too long": f"{'n' * 33}:{text(NEW)}",
    "id with a blank": f"n w:{text(NEW)}",
    "id that is a source": f"new:{text(NEW)},env:{text(OLD)}",
    "id that is a file": f"new:{text(NEW)},file:{text(OLD)}",
    "no separator": f"new:{text(NEW)},{CANARY}",
}


def test_a_faulty_ring_is_refused_and_not_shown() -> None:
    for name, source in FAULTY.items():
        with pytest.raises(ConfigurationError) as caught:
            load_ring(source)

        told = "".join([*caught.value.faults, str(caught.value), repr(caught.value), repr(caught.value.__cause__)])
        parts = (CANARY[:8], "c2VjcmV0", text(NEW)[:8], text(OLD)[:8], "secret-canary")
        assert not any(part in told for part in parts), name


def test_a_mapping_holds_text() -> None:
    values: tuple[object, ...] = (NEW, 5, None, text(NEW)[:-2], f"{text(NEW)[:9]}!{text(NEW)[9:]}")
    for value in values:
        with pytest.raises(ConfigurationError, match="base64"):
            load_ring({"new": value})


@settings(max_examples=30)
@given(st.text())
def test_any_text_is_a_ring_or_refused(source: str) -> None:
    with pytest.raises(ConfigurationError):
        load_ring({"new": source})
    with pytest.raises(ConfigurationError):
        load_ring(f"new:{source}")


def test_a_generated_key_is_a_line_of_a_ring() -> None:
    line = generate(today=date(2026, 11, 21))
    kid, _, key = line.partition(":")

    assert ("2026-11-21-", 17, 32) == (kid[:11], len(kid), len(b64decode(key)))
    assert line != generate(today=date(2026, 11, 21))
    assert [kid] == list(load_ring(line).kids())
    assert "march" == load_ring(generate("march")).newest
    assert date.fromisoformat(load_ring(generate()).newest[:10]) <= datetime.now(UTC).date()
    with pytest.raises(ConfigurationError):
        generate("no id")


def test_a_wrapped_key_opens_under_its_own_id_and_context_only() -> None:
    assert b"k" * 32 == RING.unwrap("old", WRAPPED, context=CONTEXT)
    assert 61 == len(WRAPPED)
    for kid, wrapped, context in (
        ("new", WRAPPED, CONTEXT),
        ("old", WRAPPED, b"whose else"),
        *(("old", WRAPPED[:length], CONTEXT) for length in (0, 1, 13, 28, 29, 60)),
        ("old", WRAPPED + b"\0", CONTEXT),
    ):
        with pytest.raises(CorruptRecord, match=kid):
            RING.unwrap(kid, wrapped, context=context)
    for place in range(len(WRAPPED)):
        damaged = bytearray(WRAPPED)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptRecord):
            RING.unwrap("old", bytes(damaged), context=CONTEXT)


@given(st.binary())
def test_any_bytes_are_no_wrapped_key(wrapped: bytes) -> None:
    with pytest.raises(CorruptRecord):
        RING.unwrap("old", wrapped, context=CONTEXT)
    with pytest.raises(CorruptRecord):
        RING.unwrap("old", b"\x01" + wrapped, context=CONTEXT)


def test_an_unknown_key_is_named_with_the_remedy() -> None:
    """Which key is missing is no secret, and the one thing an operator must know."""
    ring = KeyRing({"new": NEW})

    with pytest.raises(CorruptRecord, match=r"'old' is not in the ring: put it back into IDEMPOTENCY_KEY_RING"):
        ring.unwrap("old", WRAPPED, context=CONTEXT)
    with pytest.raises(CorruptRecord, match="another key under this id"):
        KeyRing({"old": NEW}).unwrap("old", WRAPPED, context=CONTEXT)


def test_wrapping_twice_gives_two_texts() -> None:
    assert RING.wrap("new", OLD, context=CONTEXT) != RING.wrap("new", OLD, context=CONTEXT)


def test_a_ring_says_its_ids_and_no_keys() -> None:
    assert "KeyRing(new, old)" == repr(RING) == str(RING)
