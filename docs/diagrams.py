"""Draw docs/diagrams/*.txt as SVG into docs/_static/diagrams: `python -m docs.generate` does.

Two kinds. A file with `lanes:` is a sequence: `A -> B: text` is a message, `-->` a reply and `-x` a refusal;
`A [note]: text` is a box on a lane (`note`, `good` or `bad`); `begin A: work` and `end A` draw a bar (`work`, `lease` or
`lost`); `== text` starts a part. A file with `size:` is a state diagram: `box NAME at X,Y`, then arrows
`A -> B [shift N] side: verb, verb` with the verbs on that side. `shift` moves an arrow to its left.

Colours are furo's variables, so a drawing follows the switch of the site. In an <img>, they follow the system.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Final

SOURCES: Final = Path(__file__).with_suffix("")
DRAWN: Final = SOURCES.parent / "_static" / SOURCES.name

LANE, MARGIN, LINE, CHAR = 184, 90, 17, 7.4
"""Widths of a lane and beside the outer ones, height of a line, and width of a character at 14 pixels."""

STYLE: Final = """
.drawn{--ink:#1f2328;--dim:#59636e;--edge:#8b949e;--back:#fff;--box:#f6f8fa;--good:#0b6e4f;--bad:#b3261e}
@media (prefers-color-scheme:dark){
.drawn{--ink:#e6edf3;--dim:#9198a1;--edge:#6e7681;--back:#131416;--box:#1a1c1e;--good:#5fd3a6;--bad:#ff8a80}}
body .drawn{--ink:var(--color-foreground-primary);--dim:var(--color-foreground-secondary);
--edge:var(--color-foreground-muted);--back:var(--color-background-primary);--box:var(--color-background-secondary);
--good:var(--color-brand-primary);--bad:var(--color-problematic)}
.drawn{background:var(--back);font:14px system-ui,sans-serif}
.drawn text{fill:var(--ink);paint-order:stroke;stroke:var(--back);stroke-width:5px;stroke-linejoin:round}
.drawn .inside text,.drawn .head text{stroke:none}
.drawn .mono text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.drawn .head text,.drawn .part text{font-weight:600}
.drawn path,.drawn line,.drawn rect{fill:none;stroke:var(--edge);stroke-width:1.5}
.drawn .lane{stroke-dasharray:2 5}
.drawn .call path,.drawn .move path{stroke:var(--ink)}
.drawn .reply path{stroke-dasharray:6 4}
.drawn .head rect,.drawn .inside rect{fill:var(--box)}
.drawn .head rect{stroke:var(--ink)}
.drawn .good rect,.drawn .work{stroke:var(--good)}
.drawn .bad rect,.drawn .lost,.drawn .refused path{stroke:var(--bad)}
.drawn .refused text{fill:var(--bad)}
.drawn .work{fill:var(--good)}
.drawn .lease{fill:var(--edge)}
.drawn .lost{fill:var(--back);stroke-dasharray:3 3}
.drawn g .point{fill:var(--ink);stroke:none}
.drawn g.refused .point{fill:var(--bad)}
"""

MESSAGE = re.compile(r"(?P<a>.+?) (?P<arrow>-->|->|-x) (?P<b>.+?): (?P<text>.+)")
NOTE = re.compile(r"(?P<a>.+?) \[(?P<kind>note|good|bad)\]: (?P<text>.+)")
BEGIN = re.compile(r"begin (?P<a>.+): (?P<kind>work|lease|lost)")
BOX = re.compile(r"box (?P<name>\S+) at (?P<x>\d+),(?P<y>\d+)")
MOVE = re.compile(r"(?P<a>\S+) -> (?P<b>\S+)(?: shift (?P<shift>\d+))? (?P<side>left|right|above|below): (?P<verbs>.+)")


class NotDrawn(ValueError):
    """A line that a source may not have."""


@dataclass(slots=True)
class Drawing:
    """What is drawn so far. `told` is the same in words, for readers who do not see it."""

    name: str
    title: str
    parts: list[str] = field(default_factory=list)
    under: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def lines(self, x: float, y: float, lines: list[str], *, anchor: str = "middle") -> str:
        """Return these lines as text, the first one with its baseline at `y`."""
        return "".join(
            f'<text x="{x:g}" y="{y + at * LINE:g}" text-anchor="{anchor}">{escape(line)}</text>'
            for at, line in enumerate(lines)
        )

    def svg(self, width: float, height: float) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" role="img" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" aria-labelledby="{self.name}-title" aria-describedby="{self.name}-text">\n'
            f'<title id="{self.name}-title">{escape(self.title)}</title>\n'
            f'<desc id="{self.name}-text">{escape(" ".join(self.told))}</desc>\n'
            f"<style>{STYLE}</style>\n" + "\n".join([*self.under, *self.parts]) + "\n</svg>\n"
        )


def _wrapped(text: str, width: float) -> list[str]:
    """Return the lines of this text, about equally long, so that no word is left alone."""
    most = int(width / CHAR)
    lines = wrap(text, most)
    even = (wrap(text, narrow) for narrow in range(max(map(len, text.split())), most + 1))
    return next((each for each in even if len(each) == len(lines)), lines)


def _head(x: float, y: float, *, angle: float) -> str:
    """Return the point of an arrow that ends here. Angle 0 points right."""
    return f'<path class="point" transform="translate({x:g} {y:g}) rotate({angle:g})" d="M0 0-9-4.5V4.5z"/>'


def sequence(name: str, title: str, lanes: list[str], body: list[str]) -> str:
    """Draw messages between lanes, from top to bottom."""
    drawing, y = Drawing(name, title), 50.0
    at = {lane: MARGIN + number * LANE for number, lane in enumerate(lanes)}
    width = 2 * MARGIN + (len(lanes) - 1) * LANE
    bars: dict[str, tuple[str, float]] = {}
    for lane, x in at.items():
        box = f'<rect x="{x - 76}" y="6" width="152" height="30" rx="4"/>'
        drawing.parts.append(f'<g class="head">{box}{drawing.lines(x, 26, [lane])}</g>')
    for line in body:
        if line.startswith("== "):
            y += 26 if drawing.told else 0
            rule = f'<line x1="8" x2="{width - 8}" y1="{y:g}" y2="{y:g}"/>'
            drawing.parts.append(f'<g class="part">{rule}{drawing.lines(14, y + 20, [line[3:]], anchor="start")}</g>')
            drawing.told.append(f"{line[3:]}.")
            y += 24
        elif found := MESSAGE.fullmatch(line):
            y = _message(drawing, found, at[found["a"]], at[found["b"]], y)
        elif found := NOTE.fullmatch(line):
            text = _wrapped(found["text"], 160)
            tall, x = len(text) * LINE + 12, at[found["a"]]
            box = f'<rect x="{x - 84}" y="{y + 12:g}" width="168" height="{tall}" rx="4"/>'
            drawing.parts.append(f'<g class="inside {found["kind"]}">{box}{drawing.lines(x, y + 31, text)}</g>')
            drawing.told.append(f"{found['a']}: {found['text']}.")
            y += tall + 12
        elif found := BEGIN.fullmatch(line):
            bars[found["a"]] = found["kind"], y + 4
        elif line.removeprefix("end ") in bars:
            kind, top = bars.pop(line.removeprefix("end "))
            x = at[line.removeprefix("end ")]
            bar = f'<rect class="{kind}" x="{x - 4}" y="{top:g}" width="8" height="{y + 10 - top:g}" rx="3"/>'
            drawing.under.append(bar)
            y += 6
        else:
            raise NotDrawn(f"{name}: {line}")
    if bars:
        raise NotDrawn(f"{name}: no end of {', '.join(bars)}")
    y += 22
    dotted = [f'<line class="lane" x1="{x}" x2="{x}" y1="36" y2="{y:g}"/>' for x in at.values()]
    drawing.under[:0] = dotted
    return drawing.svg(width, y + 4)


def _message(drawing: Drawing, found: re.Match[str], start: int, end: int, y: float) -> float:
    """Draw one message below `y`, and return where it ends."""
    way = 1 if end > start else -1
    text = _wrapped(found["text"], abs(end - start) - 18)
    y += 22
    label = drawing.lines((start + end) / 2, y, text)
    y += (len(text) - 1) * LINE + 8
    kind = {"->": "call", "-->": "reply", "-x": "reply refused"}[found["arrow"]]
    line = f'<path d="M{start + 6 * way} {y:g}H{end - 12 * way}"/>'
    point = _head(end - 6 * way, y, angle=0 if way > 0 else 180)
    drawing.parts.append(f'<g class="{kind}">{line}{point}{label}</g>')
    drawing.told.append(f"{found['a']} to {found['b']}: {found['text']}.")
    return y


def states(name: str, title: str, size: str, body: list[str]) -> str:
    """Draw boxes where the source puts them, and straight arrows between them."""
    drawing = Drawing(name, title)
    boxes: dict[str, list[tuple[float, float]]] = {}
    for found in (BOX.fullmatch(line) for line in body):
        if found is not None:
            boxes.setdefault(found["name"], []).append((float(found["x"]), float(found["y"])))
    for line, move in ((line, MOVE.fullmatch(line)) for line in body if not BOX.fullmatch(line)):
        if move is None:
            raise NotDrawn(f"{name}: {line}")
        drawing.parts.append(f'<g class="move mono">{_arrow(drawing, boxes, move)}</g>')
        drawing.told.append(f"{move['a']} to {move['b']}: {move['verbs']}.")
    for label, places in boxes.items():
        for x, y in places:
            box = f'<rect x="{x - 66:g}" y="{y - 20:g}" width="132" height="40" rx="{20 if label == "absent" else 4}"/>'
            drawing.parts.append(f'<g class="head">{box}{drawing.lines(x, y + 5, [label])}</g>')
    width, _, height = size.partition("x")
    return drawing.svg(float(width), float(height))


def _arrow(drawing: Drawing, boxes: Mapping[str, list[tuple[float, float]]], move: re.Match[str]) -> str:
    verbs = move["verbs"].split(", ")
    # A box that is drawn twice takes the arrow where that is shorter.
    (x1, y1), (x2, y2) = min(
        ((a, b) for a in boxes[move["a"]] for b in boxes[move["b"]]), key=lambda ends: math.dist(*ends)
    )
    if move["a"] == move["b"]:
        x = x1 + 66
        loop = f'<path d="M{x:g} {y1 - 10:g}h20q8 0 8 10t-8 10h-12"/>{_head(x + 1, y1 + 10, angle=180)}'
        return loop + drawing.lines(x + 38, y1 + 5 - (len(verbs) - 1) * LINE / 2, verbs, anchor="start")
    shift, long = float(move["shift"] or 0), math.dist((x1, y1), (x2, y2))
    dx, dy = (x2 - x1) / long, (y2 - y1) / long
    x1, y1, x2, y2 = x1 + dy * shift, y1 - dx * shift, x2 + dy * shift, y2 - dx * shift
    # The way from the middle of a box to its edge.
    out = min(66 / abs(dx) if dx else math.inf, 20 / abs(dy) if dy else math.inf)
    x1, y1, x2, y2 = x1 + dx * out, y1 + dy * out, x2 - dx * (out + 2), y2 - dy * (out + 2)
    line = f'<path d="M{x1:.1f} {y1:.1f}L{x2 - dx * 6:.1f} {y2 - dy * 6:.1f}"/>'
    head = _head(round(x2, 1), round(y2, 1), angle=round(math.degrees(math.atan2(dy, dx)), 1))
    x, y, tall = (x1 + x2) / 2, (y1 + y2) / 2 + 5, (len(verbs) - 1) * LINE
    beside = 14 + (8 + tall) * abs(dx)
    match move["side"]:
        case "left":
            label = drawing.lines(round(x - beside), round(y - tall / 2), verbs, anchor="end")
        case "right":
            label = drawing.lines(round(x + beside), round(y - tall / 2), verbs, anchor="start")
        case "above":
            label = drawing.lines(round(x), round(y - 14 - tall), verbs)
        case _:
            label = drawing.lines(round(x), round(y + 16), verbs)
    return line + head + label


def draw(source: Path) -> str:
    """Return the SVG of one source. Raises `NotDrawn` for a line that it does not know."""
    title, kind, *rest = (line for line in source.read_text(encoding="utf-8").splitlines() if line)
    body, title = rest, title.removeprefix("title: ")
    if kind.startswith("lanes: "):
        return sequence(source.stem, title, kind.removeprefix("lanes: ").split(" | "), body)
    return states(source.stem, title, kind.removeprefix("size: "), body)


def write() -> None:
    """Draw every source."""
    DRAWN.mkdir(parents=True, exist_ok=True)
    for source in sorted(SOURCES.glob("*.txt")):
        (DRAWN / f"{source.stem}.svg").write_text(draw(source), encoding="utf-8")


def moves(source: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each transition of a state diagram: state, verb, next state."""
    for line in source.read_text(encoding="utf-8").splitlines():
        if found := MOVE.fullmatch(line):
            for verb in found["verbs"].split(", "):
                yield found["a"], verb, found["b"]
