"""Write llms.txt, the list of pages that https://llmstxt.org asks for, from the contents of the documentation itself.

A language model reads it first, and then the pages that its question needs. The site serves it as /llms.txt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from flask_idempotency.settings.options import DOCS_URL

HERE = Path(__file__).parent
SITE = DOCS_URL.removesuffix("problems/")

_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INCLUDE = re.compile(r"^```\{include\} (\S+)", re.MULTILINE)
_NO_PROSE = re.compile(r"^(```|~~~|:::).*?^\1|<!--.*?-->|^\([\w-]+\)=$", re.MULTILINE | re.DOTALL)
_NOT_TEXT = re.compile(r"[#|!<:*-]|\d+\.")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_OPTIONAL = "contributing/index"


def text_of(name: str) -> str:
    """Return the text of a page. A page may only include another file, such as CHANGELOG.md."""
    path = HERE / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    included = _INCLUDE.match(text)
    return text if included is None else (path.parent / included[1]).read_text(encoding="utf-8")


def children(name: str) -> list[str]:
    """Return the pages that a page has in its tables of contents, in order."""
    folder = name.rpartition("/")[0]
    entries = [line for block in _TOCTREE.findall(text_of(name)) for line in block.splitlines()]
    return [f"{folder}/{entry}".lstrip("/") for entry in entries if entry and not entry.startswith(":")]


def title(name: str) -> str:
    """Return the first heading of a page, as plain text."""
    return _plain(re.findall(r"^# (.+)$", text_of(name), re.MULTILINE)[0])


def about(name: str) -> str:
    """Return the first sentence of a page, as plain text. Empty: the page begins with a section."""
    return re.split(r"(?<=[.?!]) ", prose(name), maxsplit=1)[0].removesuffix(":")


def prose(name: str) -> str:
    """Return the first paragraph of a page, as plain text on one line. Empty: it has none before its first section."""
    parts = _NO_PROSE.sub("", text_of(name)).partition("\n## ")[0].split("\n\n")
    found = (part.strip() for part in parts if part.strip() and not _NOT_TEXT.match(part.strip()))
    return _plain(" ".join(next(found, "").split()))


def _plain(text: str) -> str:
    return re.sub(r"[*`]", "", _LINK.sub(r"\1", text))


def _lines(name: str) -> Iterator[str]:
    """Yield a line for a page, and then for each page below it."""
    address = f"{SITE}{name.removesuffix('index').rstrip('/')}/"
    told = about(name)
    yield f"- [{title(name)}]({address})" + (f": {told}" if told else "")
    for child in children(name):
        yield from _lines(child)


def page() -> str:
    """Return llms.txt: what the package is, and every page with its first sentence, in the order of the site."""
    parts = children("index")
    single = [name for name in parts if not children(name)]
    first, rest = about("index"), prose("index").removeprefix(about("index")).strip()
    lines = [f"# {title('index')}", "", f"> {first}", "", rest, ""]
    for part in parts:
        if part in single or part == _OPTIONAL:
            continue
        lines += [f"## {title(part)}", "", *_lines(part), ""]
    # A reader may leave these out, says llmstxt.org.
    lines += ["## Optional", "", *(line for name in single for line in _lines(name)), *_lines(_OPTIONAL)]
    return "\n".join(lines) + "\n"
