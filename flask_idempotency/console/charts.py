"""Draw charts as SVG: outcomes over time, latency, and the shares of states.

Every chart has a title, a description and the same numbers in a table, so a screen reader loses nothing. Colours are those of
the style sheet, in light and dark. Nothing here has a script or a style of its own: the Content-Security-Policy allows none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import inf
from typing import Final

from markupsafe import Markup

from flask_idempotency.engine.activity import EDGES, HOUR
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.activity import GROUPS, Point, Summary

WIDTH: Final = 520
HEIGHT: Final = 190
LEFT: Final = 92
BOTTOM: Final = 28
TOP: Final = 18
RIGHT: Final = 8

MOST_BARS: Final = 90
"""Bars of one chart. A longer series is added up."""

TONES: Final = {"new": "a", "replayed": "b", "conflicts": "c", "mismatches": "d", "quarantined": "e"}
"""The class of each group of outcomes in the style sheet."""


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
    buckets = _together(shown.series)
    most = _nice(max((sum(groups.values()) for _, groups in buckets), default=0))
    totals = {group: sum(groups[group] for _, groups in buckets) for group in GROUPS}
    text = ", ".join(f"{number:,} {group}" for group, number in totals.items())
    slot = (WIDTH - LEFT - RIGHT) / max(len(buckets), 1)
    bars = []
    for place, (_, groups) in enumerate(buckets):
        base = float(HEIGHT - BOTTOM)
        for group, number in groups.items():
            if not number:
                continue
            # At least one unit, so that one quarantined request among thousands is seen.
            height = max(number / most * (HEIGHT - BOTTOM - TOP), 1.0)
            base -= height
            x, width = LEFT + place * slot + slot * 0.1, max(slot * 0.8, 0.8)
            bars.append(
                Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                    TONES[group], x, base, width, height
                )
            )
    svg = _svg(
        "Outcomes over time",
        f"{_span(shown)}: {text}.",
        [*_grid(most), *bars, *_times([start for start, _ in buckets], shown.length, slot)],
    )
    rows = [[_clock(start, shown.length), *(f"{groups[group]:,}" for group in GROUPS)] for start, groups in buckets]
    summary = f"{_span(shown)}: {text}."
    return Chart(svg, [(TONES[group], group) for group in GROUPS], ["Time (UTC)", *GROUPS], rows, summary)


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
    parts: list[Markup] = []
    scale = _log_scale([value for _, *both in points for value in both])
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, y, y)
        )
        parts.append(Markup('<text class="label end" x="{}" y="{:.1f}">{}</text>').format(LEFT - 6, y + 4, _took(tick)))
    for tone, which in (("p50", 1), ("p99", 2)):
        places = [
            (
                LEFT + ((point[0] - first) / shown.length + 0.5) * slot,
                scale.y(min(point[which] or 0, EDGES[-1])),
                point[0],
            )
            for point in points
        ]
        for (x1, y1, start), (x2, y2, following) in pairwise(places):
            if following - start == shown.length:
                parts.append(
                    Markup('<line class="line {}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
                        tone, x1, y1, x2, y2
                    )
                )
        parts += [Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="2"/>').format(tone, x, y) for x, y, _ in places]
    parts += _times([point.start for point in shown.series], shown.length, slot)
    said = (
        f"{_span(shown)}: no request was measured."
        if whole.p50 is None
        else f"{_span(shown)}: half of {whole.count:,} requests took less than {_took(whole.p50)}, and 99 in 100 less than "
        f"{_took(whole.p99)}."
    )
    svg = _svg("Latency of requests that ran", said, parts)
    rows = [[_clock(start, shown.length), _took(p50), _took(p99)] for start, p50, p99 in points]
    return Chart(svg, [("p50", "p50"), ("p99", "p99")], ["Time (UTC)", "p50", "p99"], rows, said)


def shares(parts: Sequence[tuple[str, int, str]]) -> Markup:
    """Return one bar with the share of each state, at least two units wide. The numbers stand beside it."""
    total = sum(number for _, number, _ in parts)
    x, drawn = 0.0, []
    room = WIDTH - 2.0 * sum(number > 0 for _, number, _ in parts)
    for _, number, tone in parts:
        if number:
            width = 2.0 + number / total * room
            drawn.append(
                Markup('<rect class="state-{}" x="{:.1f}" y="0" width="{:.1f}" height="12"/>').format(tone, x, width)
            )
            x += width
    said = ", ".join(f"{number:,} {name}" for name, number, _ in parts) if total else "There is no record."
    return Markup(
        '<svg class="chart shares" role="img" viewBox="0 0 {} 12" preserveAspectRatio="none"><title>Records by state</title>'
        "<desc>{}</desc>{}</svg>"
    ).format(WIDTH, said, Markup("").join(drawn))


# The parts of a chart.


def _svg(title: str, description: str, parts: Iterable[Markup]) -> Markup:
    return Markup('<svg class="chart" role="img" viewBox="0 0 {} {}"><title>{}</title><desc>{}</desc>{}</svg>').format(
        WIDTH, HEIGHT, title, description, Markup("").join(parts)
    )


def _together(series: Sequence[Point]) -> list[tuple[int, dict[str, int]]]:
    """Return the groups of each bar. Several buckets make one bar if there are too many."""
    size = -(-len(series) // MOST_BARS) or 1
    bars = []
    for begin in range(0, len(series), size):
        some = series[begin : begin + size]
        groups = dict.fromkeys(GROUPS, 0)
        for point in some:
            for group, number in point.figures.groups.items():
                groups[group] += number
        bars.append((some[0].start, groups))
    return bars


def _grid(most: float) -> list[Markup]:
    """Return the lines for none, half and all, with their numbers."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, y, y)
        )
        parts.append(
            Markup('<text class="label end" x="{}" y="{:.1f}">{}</text>').format(LEFT - 6, y + 4, _count(most * share))
        )
    return parts


def _times(starts: Sequence[int], length: int, slot: float) -> list[Markup]:
    """Return some four times below the axis."""
    if not starts:
        return []
    every = max(len(starts) // 4, 1)
    return [
        Markup('<text class="label {}" x="{:.1f}" y="{}">{}</text>').format(
            "start" if place == 0 else "middle",
            LEFT + (place + 0.5 * (place > 0)) * slot,
            HEIGHT - 8,
            _clock(start, length),
        )
        for place, start in enumerate(starts)
        if place % every == 0 and place < len(starts) - every / 2
    ]


@valueclass(frozen=True, slots=True)
class _LogScale:
    low: int
    """The lowest edge that is shown, by its number."""
    high: int
    ticks: Sequence[float]

    def y(self, seconds: float) -> float:
        share = (_edge(seconds) - self.low) / max(self.high - self.low, 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _log_scale(values: Sequence[float]) -> _LogScale:
    """Return a scale on which every edge of the histograms is as far from the next: nearly one of powers."""
    numbers = [_edge(min(value, EDGES[-1])) for value in values] or [0, 15]
    low, high = max(min(numbers) - 2, 0), min(max(numbers) + 2, len(EDGES) - 1)
    step = max((high - low) // 4, 1)
    return _LogScale(low, high, [EDGES[number] for number in range(low, high + 1, step)])


def _edge(seconds: float) -> int:
    return next((number for number, edge in enumerate(EDGES) if edge >= seconds), len(EDGES) - 1)


def _nice(number: int) -> float:
    """Return a round number that is at least this one."""
    if number <= 4:
        return 4.0
    power = 10 ** (len(str(number)) - 1)
    return float(next(factor * power for factor in (1, 2, 4, 5, 10) if factor * power >= number))


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _took(seconds: float | None) -> str:
    """Return the edge of a duration: `under 20 ms` would be longer than the label of an axis."""
    if seconds is None:
        return "–"
    if seconds == inf:
        return "over 60 s"
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def _clock(start: int, length: int) -> str:
    return datetime.fromtimestamp(start, tz=UTC).strftime("%d %b %H:%M" if length >= HOUR else "%H:%M")


def _span(shown: Summary) -> str:
    hours = shown.seconds / HOUR
    if hours < 1:
        return f"In the last {shown.seconds / 60:.0f} minutes"
    if hours > 24:
        return f"In the last {hours / 24:g} days"
    return f"In the last {hours:g} hours" if hours > 1 else "In the last hour"
