"""Charts show what was counted, as a picture and as a table."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from flask_idempotency.console import charts, wording
from flask_idempotency.engine.activity import ENDINGS, HOUR, MINUTE, OUTCOMES
from flask_idempotency.operations.activity import GROUPS, Figures, Point, Summary


def shown(*buckets: dict[str, int], length: int = MINUTE) -> Summary:
    series = [Point(number * length, Figures(counts)) for number, counts in enumerate(buckets)]
    total: dict[str, int] = {}
    for counts in buckets:
        for name, number in counts.items():
            total[name] = total.get(name, 0) + number
    return Summary(float(len(buckets) * length), float(len(buckets) * length), length, Figures(total), {}, series)


def parsed(svg: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(str(svg))  # noqa: S314 - our own chart


def rects(svg: Markup, tone: str) -> list[float]:
    return [float(each.attrib["height"]) for each in parsed(svg).findall("rect") if each.attrib["class"] == tone]


@pytest.mark.parametrize("chart", (charts.stacked, charts.latency))
@pytest.mark.parametrize(
    "buckets",
    ([], [{}], [{"new": 1}], [{"new": 10**9, "t:new:28": 10**9}], [{"t:new:0": 1, "new": 1}, {}, {"t:new:5": 2}]),
)
def test_a_chart_of_any_counts_is_well_formed(chart: object, buckets: list[dict[str, int]]) -> None:
    drawn = chart(shown(*buckets))  # type: ignore[operator]
    svg = parsed(drawn.svg)

    assert "img" == svg.attrib["role"]
    assert ["title", "desc"] == [each.tag for each in svg][:2]
    assert all(each.text for each in list(svg)[:2])
    assert not [each for each in svg.iter() if "style" in each.attrib]
    for each in svg.iter():
        for name in ("x", "y", "cx", "cy", "width", "height", "x1", "x2", "y1", "y2"):
            if each is not svg and name in each.attrib:
                assert -0.1 <= float(each.attrib[name]) <= charts.WIDTH


def test_bars_are_as_high_as_their_counts() -> None:
    drawn = charts.stacked(shown({"new": 200, "replayed": 100}, {"new": 400}))

    new, replayed = rects(drawn.svg, "a"), rects(drawn.svg, "b")
    assert new[1] == pytest.approx(2 * new[0], abs=0.2)
    assert replayed[0] == pytest.approx(new[0] / 2, abs=0.2)


def test_one_quarantined_among_thousands_is_seen() -> None:
    (height,) = rects(charts.stacked(shown({"new": 100_000, "quarantined": 1})).svg, "e")

    assert height >= 1


def test_the_table_has_the_same_numbers() -> None:
    drawn = charts.stacked(shown({"new": 1200, "replayed": 3, "mismatch": 2}, {"conflict": 4}))

    assert ["Time (UTC)", *charts.WORDS.values(), charts.MARKED] == drawn.head
    assert ["00:00", "1,200", "3", "0", "2", "0", "0", "0", "0", "0"] == drawn.rows[0]
    assert ["00:01", "0", "0", "4", "0", "0", "0", "0", "0", "0"] == drawn.rows[1]
    assert "1,200 new, 3 replayed, 4 conflicts, 2 mismatches. Runs that ended in quarantine: 0." in drawn.summary
    assert drawn.summary in str(drawn.svg)


def test_each_request_is_in_one_part_of_a_bar() -> None:
    """A run that ends in quarantine or pauses was new when it came: it makes no bar higher."""
    counts = dict.fromkeys((*OUTCOMES, *ENDINGS), 3)
    drawn = charts.stacked(shown(counts))

    assert Figures(counts).requests == 3 * len(OUTCOMES) == sum(map(int, drawn.rows[0][1:-1]))
    assert "3" == drawn.rows[0][-1]
    bars = [each for each in parsed(drawn.svg).findall("rect") if each.attrib["class"] in charts.TONES.values()]
    assert len(charts.TONES) == len(bars)
    assert sorted(counter for counters in GROUPS.values() for counter in counters) == sorted(OUTCOMES)


def test_a_rare_outcome_is_named_when_it_occurs() -> None:
    words = [word for _, word in charts.stacked(shown({"new": 1, "data-loss": 1})).legend]

    assert ["new", "replayed", "conflicts", "mismatches", "refused"] == words


def test_many_buckets_are_added_up() -> None:
    drawn = charts.stacked(shown(*[{"new": 1}] * 720, length=HOUR))

    assert len(drawn.rows) <= charts.MOST_BARS
    assert 720 == sum(int(row[1]) for row in drawn.rows)


def test_latency_is_drawn_where_it_was_measured() -> None:
    """A gap between two minutes is no line."""
    measured = {"new": 1, "t:new:5": 1}
    drawn = charts.latency(shown(measured, measured, {}, measured))
    svg = parsed(drawn.svg)

    assert 6 == len(svg.findall("circle"))
    assert 2 == len([each for each in svg.findall("line") if each.attrib["class"].startswith("line")])
    assert [["00:00", "10 ms", "10 ms"], ["00:01", "10 ms", "10 ms"], ["00:03", "10 ms", "10 ms"]] == drawn.rows


def test_a_longer_time_is_higher() -> None:
    drawn = charts.latency(shown({"new": 1, "t:new:3": 1}, {"new": 1, "t:new:15": 1}))
    low, high = (float(each.attrib["cy"]) for each in parsed(drawn.svg).findall("circle")[:2])

    assert high < low


def test_past_the_last_edge_is_said() -> None:
    assert "over 60 s" in charts.latency(shown({"new": 1, "t:new:28": 1})).summary


def test_shares_add_up_to_the_whole_bar() -> None:
    svg = charts.shares([("quarantined", 1, "bad"), ("in flight", 0, "active"), ("completed", 999_999, "good")])
    widths = [float(each.attrib["width"]) for each in parsed(svg).findall("rect")]

    assert 2 == len(widths)
    assert sum(widths) == pytest.approx(charts.WIDTH, abs=1)
    assert min(widths) >= 2
    assert "1 quarantined, 0 in flight, 999,999 completed" in svg


def test_no_record_is_said() -> None:
    assert "There is no record." in charts.shares([("completed", 0, "good")])


# Words.


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        (None, wording.NONE),
        ("", wording.NONE),
        ("acme", "<bdi>acme</bdi>"),
        ("<b>", "<bdi>&lt;b&gt;</bdi>"),
        ("\u202eevil", "<bdi>\\u202eevil</bdi>"),
        ("a\nb", "<bdi>a\\nb</bdi>"),
    ),
)
def test_a_name_is_escaped_and_set_apart(text: str | None, expected: str) -> None:
    assert expected == wording.name(text)


def test_a_long_name_is_cut_with_a_title() -> None:
    shown = wording.name("n" * 10_000)

    assert re.fullmatch(r'<bdi class="cut" title="n{999}…">n{79}…</bdi>', shown)


def test_whatever_a_template_prints_is_bounded_and_printable() -> None:
    assert "a\\x1bb" == wording.finalize("a\x1bb")
    assert wording.LONGEST_TEXT == len(wording.finalize("x" * 10_000))
    assert "" == wording.finalize(None)
    assert 7 == wording.finalize(7)
