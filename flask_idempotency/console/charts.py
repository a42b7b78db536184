"""Draw charts as SVG: outcomes over time, latency, and the shares of states.

Every chart has a title, a description and the same numbers in a table, so a screen reader loses nothing. Colours are those of
the style sheet, in light and dark. Nothing here has a script or a style of its own: the Content-Security-Policy allows none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from flask_idempotency.engine.activity import EDGES, HOUR, QUARANTINED
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.activity import GROUPS, Figures, Summary
from flask_idempotency.operations.times import format_edge

WIDTH: Final = 520
HEIGHT: Final = 190
LEFT: Final = 92
BOTTOM: Final = 28
TOP: Final = 18
RIGHT: Final = 8
ROOM: Final = HEIGHT - BOTTOM - TOP

MOST_BARS: Final = 90
"""Bars of one chart. A longer series is added up."""

TONES: Final = dict(zip(GROUPS, ("a", "b", "c", "d", "f", "g", "h", "i"), strict=True))
"""The class of each group of outcomes in the style sheet."""
WORDS: Final = {group: group.replace("-", " ") for group in GROUPS}
"""How a page names each group."""
MARK: Final = "e"
"""The class of the mark above a bar in whose time a key was quarantined."""
MARKED: Final = "quarantined then"
ALWAYS: Final = frozenset({"new", "replayed", "conflicts", "mismatches"})
"""Groups that are named even if they are empty. The others appear when they occur."""


@valueclass(frozen=True, slots=True)
class Chart:
    """A chart and the numbers that it shows."""

    svg: Markup
    legend: Sequence[tuple[str, str]]
    """The class and the name of each part."""
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: str
    """What the chart shows, in one sentence."""


def stacked(shown: Summary) -> Chart:
    """Return the outcomes of a time span as stacked bars."""
    # Several buckets make one bar if there are too many.
    size = -(-len(shown.series) // MOST_BARS) or 1
    bars = [shown.series[first : first + size] for first in range(0, len(shown.series), size)]
    summed = [Figures(sum((Counter(point.figures.counts) for point in bar), Counter())) for bar in bars]
    buckets = [(bar[0].start, each.groups, each.of(QUARANTINED)) for bar, each in zip(bars, summed, strict=True)]
    most = _nice(max((sum(groups.values()) for _, groups, _ in buckets), default=0))
    totals = {group: sum(groups[group] for _, groups, _ in buckets) for group in GROUPS}
    quarantined = sum(number for _, _, number in buckets)
    ended = [f"{totals[each]:,} {WORDS[each]}" for each in GROUPS if totals[each] or each in ALWAYS]
    said = f"{_span(shown)}: {', '.join(ended)}. Runs that ended in quarantine: {quarantined:,}."
    slot = (WIDTH - LEFT - RIGHT) / max(len(buckets), 1)
    parts = [each for share in (0.0, 0.5, 1.0) for each in _level(_height(share), f"{most * share:,.0f}")]
    for place, (_, groups, marked) in enumerate(buckets):
        base, x, width = _height(0.0), LEFT + place * slot + slot * 0.1, max(slot * 0.8, 0.8)
        if marked:
            parts.append(_element("rect", class_=MARK, x=x, y=2.0, width=width, height=5.0))
        for group, number in groups.items():
            if number:
                # At least one unit, so that one refused request among thousands is seen.
                height = max(number / most * ROOM, 1.0)
                base -= height
                parts.append(_element("rect", class_=TONES[group], x=x, y=base, width=width, height=height))
    parts += _times([start for start, _, _ in buckets], shown.length, slot)
    rows = [
        [_clock(start, shown.length), *(f"{groups[group]:,}" for group in GROUPS), f"{marked:,}"]
        for start, groups, marked in buckets
    ]
    svg = _svg("Outcomes over time", said, parts)
    legend = [(TONES[group], WORDS[group]) for group in GROUPS if totals[group] or group in ALWAYS]
    legend += [(MARK, MARKED)] if quarantined else []
    return Chart(svg, legend, ["Time (UTC)", *WORDS.values(), MARKED], rows, said)


def latency(shown: Summary) -> Chart:
    """Return p50 and p99 of requests that ran, over the time span, as two lines on a scale of powers."""
    points = [
        (point.start, times.p50, times.p99)
        for point in shown.series
        if (times := point.figures.new_times).count and times.p50 is not None and times.p99 is not None
    ]
    whole = shown.total.new_times
    slot = (WIDTH - LEFT - RIGHT) / max(len(shown.series), 1)
    first = shown.series[0].start if shown.series else 0
    # Every edge of the histograms is as far from the next: nearly a scale of powers.
    numbers = [_edge(value) for _, *both in points for value in both] or [0, 15]
    low, high = max(min(numbers) - 2, 0), min(max(numbers) + 2, len(EDGES) - 1)

    def y_of(seconds: float) -> float:
        return _height((_edge(seconds) - low) / max(high - low, 1))

    ticks = EDGES[low : high + 1 : max((high - low) // 4, 1)]
    parts = [each for tick in ticks for each in _level(y_of(tick), _took(tick))]
    for tone, which in (("p50", 1), ("p99", 2)):
        places = [
            (point[0], LEFT + ((point[0] - first) / shown.length + 0.5) * slot, y_of(point[which])) for point in points
        ]
        for (start, x1, y1), (following, x2, y2) in pairwise(places):
            if following - start == shown.length:
                parts.append(_element("line", class_=f"line {tone}", x1=x1, y1=y1, x2=x2, y2=y2))
        parts += [_element("circle", class_=tone, cx=x, cy=y, r=2) for _, x, y in places]
    parts += _times([point.start for point in shown.series], shown.length, slot)
    said = f"{_span(shown)}: no request was measured."
    if whole.p50 is not None:
        half, most = _took(whole.p50), _took(whole.p99)
        said = (
            f"{_span(shown)}: half of {whole.count:,} requests took less than {half}, and 99 in 100 less than {most}."
        )
    rows = [[_clock(start, shown.length), _took(p50), _took(p99)] for start, p50, p99 in points]
    svg = _svg("Latency of requests that ran", said, parts)
    return Chart(svg, [("p50", "p50"), ("p99", "p99")], ["Time (UTC)", "p50", "p99"], rows, said)


def shares(parts: Sequence[tuple[str, int, str]]) -> Markup:
    """Return one bar with the share of each state, at least two units wide. The numbers stand beside it."""
    total = sum(number for _, number, _ in parts)
    x, drawn = 0.0, []
    room = WIDTH - 2.0 * sum(number > 0 for _, number, _ in parts)
    for _, number, tone in parts:
        if number:
            width = 2.0 + number / total * room
            drawn.append(_element("rect", class_=f"state-{tone}", x=x, y=0, width=width, height=12))
            x += width
    said = ", ".join(f"{number:,} {name}" for name, number, _ in parts) if total else "There is no record."
    return _svg("Records by state", said, drawn, kind="chart shares", height=12, preserveAspectRatio="none")


# The parts of a chart.


def _svg(
    title: str, description: str, parts: Iterable[Markup], *, kind: str = "chart", height: int = HEIGHT, **more: str
) -> Markup:
    texts = (_element("title", title), _element("desc", description))
    return _element("svg", *texts, *parts, class_=kind, role="img", viewBox=f"0 0 {WIDTH} {height}", **more)


def _element(name: str, *content: str, **attributes: object) -> Markup:
    """Return an element of SVG. Texts are escaped, and numbers have one decimal place."""
    written = [
        Markup(' {}="{}"').format(key.rstrip("_"), f"{value:.1f}" if isinstance(value, float) else value)
        for key, value in attributes.items()
    ]
    begin = Markup("<{}{}").format(name, Markup("").join(written))
    return Markup("{}>{}</{}>").format(begin, Markup("").join(content), name) if content else begin + Markup("/>")


def _height(share: float) -> float:
    """Return where a part of the whole height is drawn."""
    return HEIGHT - BOTTOM - share * ROOM


def _level(y: float, label: str) -> tuple[Markup, Markup]:
    """Return a line across the chart, and its label."""
    return (
        _element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y),
        _element("text", label, class_="label end", x=LEFT - 6, y=y + 4),
    )


def _times(starts: Sequence[int], length: int, slot: float) -> list[Markup]:
    """Return some four times below the axis."""
    every = max(len(starts) // 4, 1)
    return [
        _element(
            "text",
            _clock(start, length),
            class_=f"label {'middle' if place else 'start'}",
            x=LEFT + (place + 0.5 * (place > 0)) * slot,
            y=HEIGHT - 8,
        )
        for place, start in enumerate(starts)
        if place % every == 0 and place < len(starts) - every / 2
    ]


def _edge(seconds: float) -> int:
    return next((number for number, edge in enumerate(EDGES) if edge >= seconds), len(EDGES) - 1)


def _nice(number: int) -> float:
    """Return a round number that is at least this one."""
    if number <= 4:
        return 4.0
    power = 10 ** (len(str(number)) - 1)
    return float(next(factor * power for factor in (1, 2, 4, 5, 10) if factor * power >= number))


def _took(seconds: float | None) -> str:
    return format_edge(seconds, over="over ", none="–")


def _clock(start: int, length: int) -> str:
    return datetime.fromtimestamp(start, tz=UTC).strftime("%d %b %H:%M" if length >= HOUR else "%H:%M")


def _span(shown: Summary) -> str:
    hours = shown.seconds / HOUR
    return "In the last " + ("hour" if hours == 1 else f"{hours:g} hours" if hours <= 24 else f"{hours / 24:g} days")
