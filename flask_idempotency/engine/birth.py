"""When a client made its key, where the key says so."""

from __future__ import annotations

import re
from typing import Final

# RFC 9562, section 5.7: 48 bits of milliseconds, then the version, and the variant after two more groups.
_UUID7: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
# github.com/ulid/spec: 26 letters of Crockford's alphabet, the first ten of which are as many milliseconds.
_ULID: Final = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{9})[0-9A-HJKMNP-TV-Z]{16}", re.IGNORECASE)
_CROCKFORD: Final = {letter: value for value, letter in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}


def born(client_key: str) -> float | None:
    """Seconds since the epoch, by the client's clock: of a UUID of version 7 or a ULID. None for any other key.

    Another key may look like one by chance, and then say any time from 1970 to the year 10889.
    """
    if uuid := _UUID7.fullmatch(client_key):
        return int(uuid[1] + uuid[2], 16) / 1000
    if ulid := _ULID.fullmatch(client_key):
        milliseconds = 0
        for letter in ulid[1].upper():
            milliseconds = milliseconds << 5 | _CROCKFORD[letter]
        return milliseconds / 1000
    return None
