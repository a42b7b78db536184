"""The token of a claim: random, with a mark of the application and of the secret that its downstream keys come from.

A vanished owner's downstream keys must be found again by whoever asks the other side what it has done. Under another
secret than the owner's they would be other keys, which nobody has ever heard of; and that would look like proof that
nothing was done. So two bytes of each token say which secret it was, and that it was one alone; and three say whose claim
it is, for applications may share a store, and each of them can ask about its own only.
"""

from __future__ import annotations

import secrets
from typing import Final

TOKEN_BYTES: Final = 16
OWNER_BYTES: Final = 3
"""Of the mark of an application. It is no secret, and stays the same while secrets rotate."""
MARK_BYTES: Final = 5
"""Of both marks."""

_SEVERAL: Final = 0x80


def new_token(mark: bytes = b"", *, several: bool = False) -> bytes:
    """A token for a claim with this mark. 88 bits of it are random.

    `several`: it is claimed under more than one secret, so nobody can tell from a record which of them its name is from.
    """
    beginning = _beginning(mark, several=several) if mark else b""
    return beginning + secrets.token_bytes(TOKEN_BYTES - len(beginning))


def successor(token: bytes) -> bytes:
    """A token with the same mark, for whoever settles a claim in its owner's place."""
    return token[:MARK_BYTES] + secrets.token_bytes(TOKEN_BYTES - MARK_BYTES)


def marked(token: bytes, mark: bytes) -> bool:
    """Whether this is the token of a claim of this application, under this secret, and no other secret beside it."""
    return token[:MARK_BYTES] == _beginning(mark, several=False)


def _beginning(mark: bytes, *, several: bool) -> bytes:
    secret = mark[OWNER_BYTES] & ~_SEVERAL | (_SEVERAL if several else 0)
    return mark[:OWNER_BYTES] + bytes((secret,)) + mark[OWNER_BYTES + 1 :]
