"""Pictures of pages for the documentation, as PNG files that are small and say nothing of the machine that made them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.browser.chromium import Browser

DRAWN: Final = Path(__file__).parents[2] / "docs" / "_static" / "console"
WRITE: Final = "WRITE_PICTURES"
"""With this variable in the environment, the tests of the console write the pictures that they take."""

PAGES: Final = ("overview", "record", "settle")
SCHEMES: Final = ("light", "dark")
WIDTH: Final = 1200
LARGEST_BYTES: Final = 150_000

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
KEPT: Final = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


def take(browser: Browser) -> bytes:
    """Return a picture of the whole page that is open, as wide as the window."""
    size = browser.command("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": size["height"], "scale": 1}
    taken = browser.command("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return smaller(base64.b64decode(taken["data"]))


def smaller(png: bytes) -> bytes:
    """Return the same picture in fewer bytes: compressed as far as zlib can, and without notes of the program that made it."""
    found = list(chunks(png))
    data = zlib.compress(zlib.decompress(b"".join(body for kind, body in found if kind == b"IDAT")), 9)
    parts = [SIGNATURE]
    written = False
    for kind, body in found:
        if kind not in KEPT or (kind == b"IDAT" and written):
            continue
        written = written or kind == b"IDAT"
        body = data if kind == b"IDAT" else body
        parts += [struct.pack(">I", len(body)), kind, body, struct.pack(">I", zlib.crc32(kind + body))]
    return b"".join(parts)


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a PNG file: their kind, and their bytes. Raises `ValueError` for anything else."""
    if not png.startswith(SIGNATURE):
        raise ValueError("this is no PNG file")
    place = len(SIGNATURE)
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        kind, body = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack_from(">I", png, place + 8 + length)
        if zlib.crc32(kind + body) != checksum:
            raise ValueError(f"a chunk {kind!r} is damaged")
        yield kind, body
        place += 12 + length


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height in pixels."""
    kind, body = next(chunks(png))
    if kind != b"IHDR":
        raise ValueError("this PNG file has no header")
    width, height = struct.unpack_from(">II", body)
    return width, height
