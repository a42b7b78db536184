"""The token of a claim: random, and a mark of the application and the secret that its downstream keys were derived from.

A vanished owner's downstream keys must be found again by whoever asks the other side what it has done. Under another
secret than the owner's they would be other keys, which nobody has ever heard of; and that would look like proof that
nothing was done. So four bytes of each token say which secret it was, that it was one alone, and whose: applications may
share a store and a secret, and each of them can ask about its own claims only.
"""

from __future__ import annotations

import secrets
from typing import Final

TOKEN_BYTES: Final = 16
MARK_BYTES: Final = 4

_SEVERAL: Final = 0x80


def new_token(mark: bytes = b"", *, several: bool = False) -> bytes:
    """A token for a claim whose downstream keys come from the secret with this mark. 96 bits of it are random.

    `several`: it is claimed under more than one secret, so nobody can tell from a record which of them its name is from.
    """
    if not mark:
        return secrets.token_bytes(TOKEN_BYTES)
    first = mark[0] & ~_SEVERAL | (_SEVERAL if several else 0)
    return bytes((first, *mark[1:MARK_BYTES])) + secrets.token_bytes(TOKEN_BYTES - MARK_BYTES)


def successor(token: bytes) -> bytes:
    """A token with the same mark, for whoever settles a claim in its owner's place."""
    return token[:MARK_BYTES] + secrets.token_bytes(TOKEN_BYTES - MARK_BYTES)


def marked(token: bytes, mark: bytes) -> bool:
    """Whether this is the token of a claim under this secret, and no other secret beside it."""
    return token[:MARK_BYTES] == beginnings(mark)[0]


def beginnings(mark: bytes) -> tuple[bytes, bytes]:
    """How the tokens of claims with this mark begin: under this secret alone, and under others beside it."""
    rest = mark[1:MARK_BYTES]
    return bytes((mark[0] & ~_SEVERAL, *rest)), bytes((mark[0] | _SEVERAL, *rest))
