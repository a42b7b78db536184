"""Pictures of pages for the documentation, as PNG files that are small and say nothing of the machine that made them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from tests.browser.chromium import Browser

DRAWN: Final = Path(__file__).parents[2] / "docs" / "_static" / "console"
WRITE: Final = "WRITE_PICTURES"
"""With this variable in the environment, the tests of the console write the pictures that they take."""

PAGES: Final = ("overview", "record", "settle")
SCHEMES: Final = ("light", "dark")
WIDTH: Final = 1200
HEIGHTS: Final = range(500, 1801)
LARGEST_BYTES: Final = 150_000
COLOURS: Final = 256
"""Of a picture with a palette. A page has a few dozen, and the edges of its letters some hundred between these."""

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
PALETTE: Final = (8, 3, 0, 0, 0)
"""8 bits for each dot, which name an entry of the palette."""


def take(browser: Browser) -> bytes:
    """Return a picture of the whole page that is open, as wide as the window."""
    size = browser.command("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": size["height"], "scale": 1}
    taken = browser.command("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(taken["data"])


def faults(png: bytes) -> list[str]:
    """Return what is wrong with a picture for the documentation."""
    kinds = [kind for kind, _ in chunks(png)]
    width, height, *form = header(png)
    return [
        *([f"it is {width} dots wide, and not {WIDTH}"] if width != WIDTH else []),
        *([f"it is {height} dots high"] if height not in HEIGHTS else []),
        *([f"it has {len(png)} bytes, and may have {LARGEST_BYTES}"] if len(png) > LARGEST_BYTES else []),
        *(["it was not made smaller"] if tuple(form) != PALETTE else []),
        *([f"it has notes beside the picture: {kinds}"] if kinds != [b"IHDR", b"PLTE", b"IDAT", b"IEND"] else []),
    ]


def smaller(png: bytes) -> bytes:
    """Return the same picture with a palette of its most frequent colours, and without notes of the program that made it.

    A colour that has no place in the palette becomes the nearest one.
    """
    width, height, lines = dots(png)
    pixels = [[line[place : place + 3] for place in range(0, 3 * width, 3)] for line in lines]
    frequent = [colour for colour, _ in Counter(chain.from_iterable(pixels)).most_common()]
    palette = frequent[:COLOURS]
    places = {colour: place for place, colour in enumerate(palette)}
    for colour in frequent[COLOURS:]:
        places[colour] = min(range(len(palette)), key=lambda place: _distance(palette[place], colour))
    data = b"".join(b"\0" + bytes(places[colour] for colour in line) for line in pixels)
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, *PALETTE)),
            (b"PLTE", b"".join(palette)),
            (b"IDAT", zlib.compress(data, 9)),
            (b"IEND", b""),
        )
    )


def _distance(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def dots(png: bytes) -> tuple[int, int, list[bytes]]:
    """Return width, height and the lines of a picture without a palette, three bytes for each dot.

    PNG specification, 9.2: each byte of a line is stored as the difference to its neighbours.
    """
    width, height, depth, form, *rest = header(png)
    channels = {2: 3, 6: 4}.get(form)
    if depth != 8 or channels is None or any(rest):
        raise ValueError("this PNG file has a palette, is grey, or is interlaced")
    data = zlib.decompress(b"".join(body for kind, body in chunks(png) if kind == b"IDAT"))
    size = width * channels
    before = bytes(size)
    lines = []
    for start in range(0, len(data), size + 1):
        before = _line(data[start], data[start + 1 : start + 1 + size], before, channels)
        lines.append(before if channels == 3 else b"".join(before[at : at + 3] for at in range(0, size, 4)))
    return width, height, lines


def _line(rule: int, stored: bytes, before: bytes, channels: int) -> bytes:
    if rule == 0:
        return stored
    if rule == 2:
        return bytes((byte + up) & 255 for byte, up in zip(stored, before, strict=True))
    line = bytearray(channels)  # what is left of the first dot
    corner = bytes(channels) + before
    for at, byte in enumerate(stored):
        left, up = line[at], before[at]
        if rule == 1:
            guess = left
        elif rule == 3:
            guess = (left + up) // 2
        else:
            upleft = corner[at]
            far = left + up - upleft
            guess = min((abs(far - left), 0, left), (abs(far - up), 1, up), (abs(far - upleft), 2, upleft))[2]
        line.append((byte + guess) & 255)
    return bytes(line[channels:])


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


def header(png: bytes) -> tuple[int, ...]:
    """Return width, height, bits for each value, form of the colours, and three rules that are all 0 in a plain file."""
    kind, body = next(chunks(png))
    if kind != b"IHDR":
        raise ValueError("this PNG file has no header")
    found: tuple[int, ...] = struct.unpack(">IIBBBBB", body)
    return found
