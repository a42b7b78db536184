"""How heavy the package is: what the measures count, and what `run.py check` refuses."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from tests.tooling import weight


def test_texts_comments_and_blank_lines_are_no_code() -> None:
    source = '''
        """A text
        of two lines."""

        import os  # code

        # a comment
        def pay(
            cents: int,
        ) -> str:
            """Another."""
            return """no text,
            # but a value"""
    '''
    assert 6 == len(weight.code_lines(dedent(source)))


def test_a_room_above_its_limit_or_without_one_is_named() -> None:
    found = {"web": 11, "cli": 10, "new": 1}
    assert [
        "web: 11, and the limit is 10",
        "new has no limit",
        "gone has a limit, and is not there",
    ] == weight.faults(found, {"web": 10, "cli": 10, "gone": 1})


def test_a_private_function_that_one_place_calls_is_counted() -> None:
    source = "def _once(): ...\ndef _twice(): ...\ndef pay():\n    _once()\n    _twice() or _twice()\n"
    assert (3, 1) == weight.private_functions({Path("a.py"): source})


def test_a_stretch_of_equal_lines_is_one_pair() -> None:
    stretch = "\n".join(f"step_{number} = pay({number})" for number in range(9))
    assert 1 == weight.shared_places({Path("a.py"): f"{stretch}\nsent = 1", Path("b.py"): f"kept = 2\n{stretch}"})
    assert 0 == weight.shared_places({Path("a.py"): stretch})


def test_an_application_on_redis_loads_no_more_than_it_has() -> None:
    """What it never needs would slow the start of each worker, and a reader of its path."""
    modules, lines, _ = weight.loaded(tries=1)
    most = weight.limits()["measures"]
    assert modules <= most["modules that Idempotency(app) on Redis loads"]
    assert lines <= most["lines of these modules"]
