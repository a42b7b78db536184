"""A ring in a file that is worth nothing without its passphrase."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotency.codec import key_sources
from flask_idempotency.codec.key_sources import PassphraseKeyFile, load_ring
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.memory import MemoryStore
from tests.codec.sealing import BINDING, KEY, OTHER_TENANT, RESULT, codec

PASSPHRASE = "correct horse battery"
CHEAP = 2**14
CONTEXT = b"whose key it is"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring.json"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a file with the keys `summer` and `spring` holds. To stretch a passphrase is slow, so it is made once."""
    made = tmp_path_factory.mktemp("made") / "ring.json"
    PassphraseKeyFile.make(made, PASSPHRASE, "spring", cost=CHEAP)
    PassphraseKeyFile.add(made, PASSPHRASE, "summer")
    return made.read_bytes()


def private(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def test_a_file_is_made_and_wraps(path: Path) -> None:
    wrapped = PassphraseKeyFile.make(path, PASSPHRASE, "spring", cost=CHEAP).wrap("spring", b"k" * 32, context=CONTEXT)
    again = load_ring(PassphraseKeyFile(path, PASSPHRASE))

    assert b"k" * 32 == again.unwrap("spring", wrapped, context=CONTEXT)
    assert ("spring", ["spring"]) == (again.newest, list(again.kids()))
    with pytest.raises(CorruptRecord):
        again.unwrap("spring", wrapped, context=b"whose else")


def test_keys_come_and_go(path: Path) -> None:
    wrapped = PassphraseKeyFile.make(path, PASSPHRASE, "spring", cost=CHEAP).wrap("spring", b"k" * 32, context=CONTEXT)

    assert ("spring", "summer") == PassphraseKeyFile.add(path, PASSPHRASE, "summer", newest=False).kids()
    assert ("summer", "spring") == PassphraseKeyFile.arrange(path, PASSPHRASE, ["summer", "spring"]).kids()
    assert ("autumn", "summer", "spring") == PassphraseKeyFile.add(path, PASSPHRASE, "autumn").kids()
    assert b"k" * 32 == PassphraseKeyFile(path, PASSPHRASE).unwrap("spring", wrapped, context=CONTEXT)
    assert ("autumn",) == PassphraseKeyFile.arrange(path, PASSPHRASE, ["autumn"]).kids()
    with pytest.raises(CorruptRecord, match="spring"):
        PassphraseKeyFile(path, PASSPHRASE).unwrap("spring", wrapped, context=CONTEXT)


def test_only_its_owner_can_read_it(path: Path) -> None:
    before = os.umask(0)
    try:
        PassphraseKeyFile.make(path, PASSPHRASE, "spring", cost=CHEAP)
        PassphraseKeyFile.add(path, PASSPHRASE, "summer")
    finally:
        os.umask(before)

    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert [path.name] == os.listdir(path.parent)
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        PassphraseKeyFile(path, PASSPHRASE)


def test_refusals_change_nothing(path: Path) -> None:
    PassphraseKeyFile.make(path, PASSPHRASE, "spring", cost=CHEAP)
    before = path.read_bytes()

    with pytest.raises(ConfigurationError, match="already"):
        PassphraseKeyFile.make(path, PASSPHRASE, "spring", cost=CHEAP)
    for kid in ("spring", "no id", "env"):
        with pytest.raises(ConfigurationError):
            PassphraseKeyFile.add(path, PASSPHRASE, kid)
    for kids in ([], ["summer"], ["spring", "spring"]):
        with pytest.raises(ConfigurationError, match="spring"):
            PassphraseKeyFile.arrange(path, PASSPHRASE, kids)
    assert before == path.read_bytes()
    assert [path.name] == os.listdir(path.parent)


@pytest.mark.parametrize(("passphrase", "cost"), (("too short", CHEAP), (PASSPHRASE, 2**13), (PASSPHRASE, 2**14 + 1)))
def test_weak_files_are_not_made(path: Path, passphrase: str, cost: int) -> None:
    with pytest.raises(ConfigurationError):
        PassphraseKeyFile.make(path, passphrase, "spring", cost=cost)
    assert not path.exists()


def test_another_passphrase_does_not_open_it(path: Path) -> None:
    PassphraseKeyFile.make(path, PASSPHRASE, "spring", cost=CHEAP)

    with pytest.raises(ConfigurationError, match="passphrase is wrong") as caught:
        PassphraseKeyFile(path, "wrong horse battery")
    assert "horse" not in repr(caught.value)
    assert f"PassphraseKeyFile({str(path)!r}: spring)" == repr(PassphraseKeyFile(path, PASSPHRASE))


def swap(content: Any) -> None:
    content["keys"].reverse()


def rename(content: Any) -> None:
    content["keys"][0]["kid"] = "winter"


def shorten(content: Any) -> None:
    content["keys"].pop()


def salt(content: Any) -> None:
    first, rest = content["scrypt"]["salt"][0], content["scrypt"]["salt"][1:]
    content["scrypt"]["salt"] = ("B" if first == "A" else "A") + rest


CHANGES = (swap, rename, shorten, salt)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_does_not_open(path: Path, content: bytes, change: Any) -> None:
    changed = json.loads(content)
    change(changed)

    with pytest.raises(ConfigurationError, match="file was changed"):
        PassphraseKeyFile(private(path, json.dumps(changed)), PASSPHRASE)


COSTS: tuple[tuple[str, object], ...] = (
    ("n", 2**13),
    ("n", 2**21),
    ("n", 2**14 + 1),
    ("n", "16384"),
    ("n", None),
    ("n", 16384.0),
    ("r", 2**20),
    ("p", 2**20),
    ("salt", ""),
    ("salt", 5),
    ("salt", "é"),
)


def test_costs_are_bounded_before_they_are_paid(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can write the file cannot have us take all memory, nor make guessing cheap."""
    monkeypatch.setattr(key_sources, "Scrypt", lambda **_: pytest.fail("it was paid"))
    for name, value in COSTS:
        changed = json.loads(content)
        changed["scrypt"][name] = value
        with pytest.raises(ConfigurationError, match="cannot be read by this release"):
            PassphraseKeyFile(private(path, json.dumps(changed)), PASSPHRASE)


# The last is what a later release may write. It may look the same and mean something else.
TEXTS = ("", "{", "[]", "5", "{}", '{"format": 1}', '{"format": 1, "scrypt": 5, "keys": []}', "[" * 60000, "later")


def test_any_text_is_refused(path: Path, content: bytes) -> None:
    for found in TEXTS:
        text = content.decode().replace('"format": 1', '"format": 2') if found == "later" else found
        with pytest.raises(ConfigurationError, match="cannot be read by this release"):
            PassphraseKeyFile(private(path, text), PASSPHRASE)


@pytest.mark.parametrize("keys", ([], [5], [{}], [{"kid": "a"}], [{"kid": "\ud800", "wrapped": ""}], 5))
def test_any_keys_are_refused(path: Path, content: bytes, keys: object) -> None:
    with pytest.raises(ConfigurationError):
        PassphraseKeyFile(private(path, json.dumps({**json.loads(content), "keys": keys})), PASSPHRASE)


def test_the_default_cost_is_what_is_recommended() -> None:
    assert 2**17 == key_sources.COST
    assert key_sources.COST in key_sources.COSTS


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "encryption.md"


@pytest.fixture
def recipe() -> dict[str, Any]:
    """The names that the page's recipe defines."""
    names: dict[str, Any] = {"app": SimpleNamespace(config={})}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(next(block for block in blocks if "OurRing" in block), names)  # noqa: S102 - our own page
    return names


def test_the_recipe_seals_and_opens(recipe: dict[str, Any]) -> None:
    shelf, ring = MemoryStore().data_keys, recipe["app"].config["IDEMPOTENCY_KEY_RING"]
    sealed = codec(shelf, provider=load_ring(ring)).seal(RESULT, BINDING)

    assert RESULT == codec(shelf, provider=ring).open(sealed, BINDING)


def test_the_recipe_binds_keys_to_their_place(recipe: dict[str, Any]) -> None:
    ring = recipe["app"].config["IDEMPOTENCY_KEY_RING"]
    wrapped = ring.wrap(ring.newest, b"k" * 32, context=b"here")

    assert b"k" * 32 == ring.unwrap(ring.newest, wrapped, context=b"here")
    for kid, blob, context in (
        (ring.newest, wrapped, b"there"),
        ("none", wrapped, b"here"),
        (ring.newest, b"never", b"here"),
    ):
        with pytest.raises(CorruptRecord):
            ring.unwrap(kid, blob, context=context)


def test_a_service_that_is_away_is_unavailable(recipe: dict[str, Any]) -> None:
    ring = recipe["app"].config["IDEMPOTENCY_KEY_RING"]
    sealing = codec(provider=ring)
    sealing.prepare(KEY)

    def throttled(*_: object) -> None:
        raise ConnectionError("throttled")

    ring._client.send = throttled

    assert 201 == sealing.seal(RESULT, BINDING).status
    with pytest.raises(StoreUnavailable, match="ConnectionError"):
        sealing.seal(RESULT, replace(BINDING, key=StorageKey(KEY.rid, OTHER_TENANT)))
