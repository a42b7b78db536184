"""What a page makes of names: every character can be seen, and none reaches beyond its line."""

from __future__ import annotations

import re

import pytest

from flask_idempotency.console.wording import LONGEST_NAME, LONGEST_TEXT, MOST_MARKS, finalize, name, when

MARK = "\u0301"


@pytest.mark.parametrize(
    ("written", "shown"),
    (
        ("payments.create", "payments.create"),
        ("Zażółć 日本語", "Zażółć 日本語"),
        ("Ti\u00ea\u0301ng", "Ti\u00ea\u0301ng"),
        ("e" + MARK * MOST_MARKS, "e" + MARK * MOST_MARKS),
        ("e" + MARK * (MOST_MARKS + 2) + "e" + MARK, "e" + MARK * MOST_MARKS + "\\u0301" * 2 + "e" + MARK),
        ("<b>", "&lt;b&gt;"),
    ),
)
def test_a_name_can_be_read_and_stays_in_its_line(written: str, shown: str) -> None:
    assert name(written) == f"<bdi>{shown}</bdi>"


@pytest.mark.parametrize("text", ("\u202egnp", "\u200b", "a\x1b[31m", "\u2066", "\ud800"))
def test_what_turns_or_hides_text_is_written_out(text: str) -> None:
    assert name(text).isprintable()
    assert str(finalize(text)).isprintable()


def test_spaces_at_the_ends_can_be_seen() -> None:
    assert [name(text) for text in ("  ", "a ")] == ["<bdi>&#34;  &#34;</bdi>", "<bdi>&#34;a &#34;</bdi>"]


def test_marks_of_a_long_name_stay_in_its_line() -> None:
    """The cut comes after the marks are written out, so that no letter has more of them."""
    shown = name("e" + MARK * 10_000)

    assert shown.count(MARK) == 2 * MOST_MARKS  # once more in the title
    assert len(shown) < 2 * LONGEST_NAME + 1500


def test_other_text_of_a_page_stays_in_its_line_too() -> None:
    assert str(finalize("e" + MARK * 9)).count(MARK) == MOST_MARKS
    assert len(str(finalize("w" * 10_000))) == LONGEST_TEXT


NOON = 1_736_942_400.0
"""2025-01-15 12:00 UTC."""


@pytest.mark.parametrize(
    ("at", "now", "shown"),
    (
        (NOON, NOON + 2463, "12:00:00, 41 min ago"),
        (NOON + 90, NOON, "12:01:30, in 1 min"),
        (NOON, NOON + 86400, "15 Jan 12:00:00, 1 d ago"),
        (NOON, NOON + 366 * 86400, "15 Jan 2025 12:00:00, 366 d ago"),
        (NOON, None, "15 Jan 2025 12:00:00"),
        ("2025-01-15T12:00:00.250Z", NOON + 1.25, "12:00:00, 1 s ago"),
        ("2025-01-15T23:59:59.999Z", NOON + 43200, "15 Jan 23:59:59, 0 s ago"),
        (None, NOON, "–"),
        ("no time", NOON, "–"),
    ),
)
def test_a_time_stands_as_people_read_it(at: str | float | None, now: float | None, shown: str) -> None:
    """Without the exact time, which its title and a part for screen readers have."""
    whole = str(when(at, now))

    assert shown == re.sub("<.*?>", "", re.sub('<span class="sr">.*?</span>', "", whole))
    assert ("<time " in whole) == (shown != "–")
