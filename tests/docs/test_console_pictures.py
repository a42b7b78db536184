"""The pictures of the console stand in the documentation, with words for who does not see them."""

from __future__ import annotations

import re
import struct
import zlib
from random import Random

import pytest

from tests.browser.pictures import DRAWN, PAGES, SCHEMES, SIGNATURE, chunks, dots, faults, smaller
from tests.docs.test_pages import ROOT

NAMES = {f"{page}-{scheme}" for page in PAGES for scheme in SCHEMES}
SHOWN = re.compile(r"!\[([^\]]*)\]\([./\w]*_static/console/([\w-]+)\.png\)")
PICTURES = sorted(DRAWN.glob("*.png"))


def test_each_page_is_there_in_light_and_dark() -> None:
    assert {path.stem for path in PICTURES} == NAMES
    assert [path.name for path in DRAWN.iterdir() if path not in PICTURES] == []


def test_a_picture_is_small_and_as_wide_as_the_window() -> None:
    assert {picture: found for picture in PICTURES if (found := faults(picture.read_bytes()))} == {}


def test_every_picture_is_on_the_page_of_the_console_with_words_for_it() -> None:
    page = (ROOT / "docs" / "operate" / "console.md").read_text(encoding="utf-8")
    shown = {name: alt for alt, name in SHOWN.findall(page)}

    assert shown.keys() == NAMES
    assert all(alt.startswith("Console, ") and alt.endswith(".") for alt in shown.values())
    assert len(set(shown.values())) == len(NAMES)


def test_the_readme_shows_one() -> None:
    shown = SHOWN.findall((ROOT / "README.md").read_text(encoding="utf-8"))

    assert [name in NAMES and len(alt) > 40 for alt, name in shown] == [True]


def test_another_file_is_no_picture() -> None:
    for fault in (b"", b"GIF89a", SIGNATURE + b"\x00\x00\x00\x01IHDRx\x00\x00\x00\x00"):
        with pytest.raises(ValueError, match=r"no PNG file|damaged"):
            list(chunks(fault))


@pytest.mark.parametrize(("rule", "channels"), ((0, 3), (1, 4), (2, 3), (3, 4), (4, 3), (4, 4)))
def test_a_smaller_picture_has_the_same_dots(rule: int, channels: int) -> None:
    """Whichever way its program stored the lines (PNG specification, 9.2)."""
    random = Random(rule)
    lines = [[random.randbytes(3) for _ in range(7)] for _ in range(5)]
    opaque = b"\xff" * (channels - 3)
    png = stored([b"".join(dot + opaque for dot in line) for line in lines], rule, channels)

    width, height, dotted = dots(png)
    small = smaller(png)
    palette, data = (body for kind, body in chunks(small) if kind in (b"PLTE", b"IDAT"))
    rows = zlib.decompress(data)

    assert (width, height, dotted) == (7, 5, [b"".join(line) for line in lines])
    assert [rows[8 * row] for row in range(5)] == [0] * 5
    for row, line in enumerate(lines):
        places = rows[8 * row + 1 : 8 * row + 8]
        assert [palette[3 * place : 3 * place + 3] for place in places] == line


def test_a_colour_without_a_place_becomes_the_nearest() -> None:
    """256 colours stay. The rarest one is drawn in that which looks most like it."""
    frequent = [bytes((number, 0, 0)) for number in range(256)] * 2
    png = stored([b"".join([*frequent, bytes((9, 1, 0))])], 0, 3)

    palette, data = (body for kind, body in chunks(smaller(png)) if kind in (b"PLTE", b"IDAT"))

    place = zlib.decompress(data)[-1]
    assert len(palette) == 3 * 256
    assert palette[3 * place : 3 * place + 3] == bytes((9, 0, 0))


def stored(lines: list[bytes], rule: int, channels: int) -> bytes:
    """Return a PNG file whose lines are stored by this rule."""
    data, before = b"", bytes(len(lines[0]))
    for line in lines:
        data += bytes([rule])
        for at, byte in enumerate(line):
            left = line[at - channels] if at >= channels else 0
            up, corner = before[at], before[at - channels] if at >= channels else 0
            near = sorted(
                ((abs(up - corner), 0, left), (abs(left - corner), 1, up), (abs(left + up - 2 * corner), 2, corner))
            )
            guess = (0, left, up, (left + up) // 2, near[0][2])[rule]
            data += bytes([(byte - guess) & 255])
        before = line
    head = struct.pack(">IIBBBBB", len(lines[0]) // channels, len(lines), 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    parts = ((b"IHDR", head), (b"tEXt", b"a note"), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
