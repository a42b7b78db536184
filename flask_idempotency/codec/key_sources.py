"""An example of a `KeyProvider`: a ring in a file that is worth nothing without its passphrase.

The file is JSON. It says how the passphrase becomes a key (scrypt, with its salt and costs), and has each key of the ring
encrypted with that by AES-256-GCM, the newest first. Each is bound to its id, to its place, and to how many there are, so
that nobody can make an old key the newest again by moving lines.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from flask_idempotency.codec.keyring import KEY_BYTES, NONCE_BYTES, KeyRing, read_private, write_private
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import encode

FORMAT: Final = 1
COST: Final = 2**17
"""What OWASP asks of scrypt: 128 MiB and a third of a second, once for each start."""
COSTS: Final = frozenset(2**exponent for exponent in range(14, 21))
"""Less is no obstacle. More takes over a gigabyte, and whoever can write the file could have us try."""
MIN_PASSPHRASE: Final = 16
"""Characters. Whoever has the file may guess for as long as he likes."""

_BLOCK: Final = 8
_SALT_BYTES: Final = 16
_LABEL: Final = b"flask_idempotency/wrapped-file/1"


@dataclass(frozen=True, slots=True)
class _Lock:
    """How the passphrase becomes the key of the file."""

    salt: bytes
    cost: int
    key: bytes = field(repr=False)


class PassphraseKeyFile:
    """Implements `KeyProvider`. The file is read once, when this is made; a key that is added later needs a restart."""

    def __init__(self, path: str | Path, passphrase: str) -> None:
        """Raises `ConfigurationError`, which says neither a key nor the passphrase."""
        self._path = Path(path)
        self._ring = KeyRing(_read(self._path, passphrase)[1])

    def __repr__(self) -> str:
        return f"PassphraseKeyFile({str(self._path)!r}: {', '.join(self._ring.kids())})"

    @classmethod
    def make(cls, path: str | Path, passphrase: str, kid: str, *, cost: int = COST) -> PassphraseKeyFile:
        """A new file with one key of this id, readable by its owner only. Refuses to replace one that is there."""
        if len(passphrase) < MIN_PASSPHRASE:
            raise ConfigurationError(f"The passphrase of a key file needs at least {MIN_PASSPHRASE} characters.")
        if cost not in COSTS:
            raise ConfigurationError(f"The cost of a key file is a power of two from {min(COSTS)} to {max(COSTS)}.")
        try:
            _write(Path(path), passphrase, {kid: os.urandom(KEY_BYTES)}, cost=cost, replace=False)
        except FileExistsError as error:
            raise ConfigurationError(f"There is a file {path} already: add a key to it, or name another.") from error
        return cls(path, passphrase)

    @classmethod
    def add(cls, path: str | Path, passphrase: str, kid: str, *, newest: bool = True) -> PassphraseKeyFile:
        """One more key, as the newest, or as the second: to be known everywhere before it seals anything."""
        lock, keys = _read(Path(path), passphrase)
        if kid in keys:
            raise ConfigurationError(f"The key file has a key {kid!r} already. Give the new one an id of its own.")
        pairs = list(keys.items())
        pairs.insert(0 if newest else 1, (kid, os.urandom(KEY_BYTES)))
        _write(Path(path), passphrase, dict(pairs), cost=lock.cost, replace=True)
        return cls(path, passphrase)

    @classmethod
    def arrange(cls, path: str | Path, passphrase: str, kids: Sequence[str]) -> PassphraseKeyFile:
        """These keys of the file in this order, the newest first, and no others: the rest are gone for ever."""
        lock, keys = _read(Path(path), passphrase)
        if not kids or len(set(kids)) != len(kids) or not set(kids) <= set(keys):
            raise ConfigurationError(
                f"The key file has the keys {', '.join(keys)}: name each that stays once, in order."
            )
        _write(Path(path), passphrase, {kid: keys[kid] for kid in kids}, cost=lock.cost, replace=True)
        return cls(path, passphrase)

    @property
    def newest(self) -> str:
        return self._ring.newest

    def kids(self) -> Sequence[str]:
        return self._ring.kids()

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        return self._ring.wrap(kid, key, context=context)

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        return self._ring.unwrap(kid, wrapped, context=context)


def _write(path: Path, passphrase: str, keys: Mapping[str, bytes], *, cost: int, replace: bool) -> None:
    KeyRing(keys)  # what it would refuse must not be in the file
    lock = _locked(passphrase, os.urandom(_SALT_BYTES), cost)
    wrapped = []
    for place, (kid, key) in enumerate(keys.items()):
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + AESGCM(lock.key).encrypt(nonce, key, _bound(lock, kid, place, len(keys)))
        wrapped.append({"kid": kid, "wrapped": _text(sealed)})
    content = {"format": FORMAT, "scrypt": {"salt": _text(lock.salt), "n": cost, "r": _BLOCK, "p": 1}, "keys": wrapped}
    write_private(path, json.dumps(content, indent=2) + "\n", replace=replace)


def _read(path: Path, passphrase: str) -> tuple[_Lock, dict[str, bytes]]:
    text = read_private(path)
    try:
        content = json.loads(text)
        lock = _locked(passphrase, *_costs(content))
        entries = [(str(entry["kid"]), _bytes(entry["wrapped"])) for entry in content["keys"]]
        keys = {
            kid: AESGCM(lock.key).decrypt(
                sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound(lock, kid, place, len(entries))
            )
            for place, (kid, sealed) in enumerate(entries)
        }
    except InvalidTag:
        raise ConfigurationError(
            f"The key file {path} does not open: the passphrase is another one, or the file was changed."
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"The key file {path} is not one that this release can read ({type(error).__name__})."
        ) from None
    return lock, keys


def _costs(content: Any) -> tuple[bytes, int]:
    costs = content["scrypt"]
    salt, cost = _bytes(costs["salt"]), costs["n"]
    known = content["format"] == FORMAT and costs["r"] == _BLOCK and costs["p"] == 1
    if not known or type(cost) is not int or cost not in COSTS or len(salt) != _SALT_BYTES:
        raise ValueError("not a format or a cost that this release knows")
    return salt, cost


def _locked(passphrase: str, salt: bytes, cost: int) -> _Lock:
    key = Scrypt(salt=salt, length=KEY_BYTES, n=cost, r=_BLOCK, p=1).derive(passphrase.encode("utf-8", "surrogatepass"))
    return _Lock(salt, cost, key)


def _bound(lock: _Lock, kid: str, place: int, count: int) -> bytes:
    return encode(_LABEL, lock.salt, b"%d" % lock.cost, kid.encode(), b"%d" % place, b"%d" % count)


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return b64decode(text, validate=True)
