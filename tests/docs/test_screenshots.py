"""The pictures of the command line show what the commands print today, and load nothing from another site."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
from html import unescape
from pathlib import Path

from docs.screenshots import ALONE, COLUMNS, COMMANDS, DRAWN, Terminal
from tests.docs.test_pages import ROOT

PICTURES = sorted(DRAWN.glob("*.svg"))
NAMESPACE = "http://www.w3.org/2000/svg"
SHOWN = re.compile(r"!\[([^\]]*)\]\(\.\./_static/cli/(\w+)\.svg\)")
TEXT = re.compile(r'<text class="cli-\w+-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')


def lines_of(picture: Path) -> list[str]:
    """Return the lines of text in a picture."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in TEXT.findall(picture.read_text(encoding="utf-8")):
        rows.setdefault(float(y), []).append((float(x), unescape(text).replace("\xa0", " ")))
    return ["".join(text for _, text in sorted(rows[y])).rstrip("\n") for y in sorted(rows)]


def test_the_pictures_are_current() -> None:
    """`python -m docs.screenshots` would change nothing.

    A process of its own draws them: rich keeps the colours of the first terminal that a process showed a style on.
    """
    program = "import json; from docs.screenshots import draw; print(json.dumps(draw()))"
    drawn = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert drawn.returncode == 0, drawn.stderr
    assert {path.stem: path.read_text(encoding="utf-8") for path in PICTURES} == json.loads(drawn.stdout)


def test_a_picture_begins_with_its_command_and_fits_80_columns() -> None:
    for picture in PICTURES:
        first, *more = lines_of(picture)
        assert f"$ flask idempotency {COMMANDS.get(picture.stem, 'rotate')}" == first
        assert more, picture
        assert max(map(len, (first, *more))) <= COLUMNS, picture


def test_a_picture_loads_nothing_and_names_no_machine() -> None:
    for picture in PICTURES:
        svg = picture.read_text(encoding="utf-8")
        assert {NAMESPACE} == set(re.findall(r"https?://[^\s\"')]+", svg)), picture
        secrets = ["@font-face", str(ROOT), str(Path.home()), "/tmp/", "/dev/shm/"]  # noqa: S108
        secrets += [socket.gethostname(), f"{getpass.getuser()}@"]
        assert [secret for secret in secrets if secret in svg] == [], picture


def test_every_picture_is_on_a_page_with_words_for_it() -> None:
    shown = {
        name: alt
        for page in (ROOT / "docs").rglob("*.md")
        for alt, name in SHOWN.findall(page.read_text(encoding="utf-8"))
    }

    assert {*COMMANDS, ALONE} == {path.stem for path in PICTURES} == shown.keys()
    assert all(alt.startswith("Terminal: ") and alt.endswith(".") for alt in shown.values())


def test_a_terminal_shows_what_is_left_after_a_line_was_written_over() -> None:
    terminal = Terminal()
    terminal.write("one\n10 %\r20 %\n\x1b[1A\x1b[2Kdone\n\x1b[31mtwo\x1b[0m")

    assert ["one", "done", "\x1b[31mtwo\x1b[0m"] == terminal.lines
