"""What pages say in numbers, defaults and lists is what the code has."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from docs.generate import HERE
from flask_idempotency import Happened, Resolution, StillUnknown, UnknownOutcome
from flask_idempotency.codec.encryption import CACHE_KEYS, CACHE_SECONDS, FINISHING_SECONDS
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Policy
from flask_idempotency.engine.recovery import SILENT_LEASES
from flask_idempotency.engine.store import Store
from flask_idempotency.maintenance.reap import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS
from flask_idempotency.settings import load_settings
from flask_idempotency.settings.profiles import KEPT_FIELDS, PROFILES
from flask_idempotency.stores.redis.layout import PARTITIONS
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.web.principals import ASSERTED, CERTIFICATES, NO_CERTIFICATE, TOKENS
from flask_idempotency.web.problems import PROBLEMS
from tests.docs.test_pages import BLOCK, surroundings

README = (HERE.parent / "README.md").read_text(encoding="utf-8")
SECURITY = (HERE.parent / "SECURITY.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (HERE / f"{name}.md").read_text(encoding="utf-8")


def test_no_limit_holds_until_one_is_set() -> None:
    """The security page says of floods and of long bodies that their limits are yours to set."""
    settings = load_settings({"IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60"}, {}, app_name="shop", lenient=False)

    assert 2 == SECURITY.count("by default there is no limit")
    assert (None, None) == (settings.quota, Policy().max_request_body)


def test_each_threat_names_the_test_that_tries_it() -> None:
    rows = [line for line in SECURITY.partition("## What is not")[0].splitlines() if line.startswith("| ")][1:]

    assert len(rows) > 15
    assert [] == [row for row in rows if not re.search(r"\.py`", row.split("|")[-2])]


def test_statuses_that_release_a_key() -> None:
    (rule,) = re.findall(r"^4\. (.*)", page("promises"), re.MULTILINE)

    assert RELEASED_BY_DEFAULT == {int(status) for status in re.findall(r"\b\d{3}\b", rule)}


def test_times_of_the_policy() -> None:
    text = page("operations") + page("quarantine")
    plain = Policy()

    assert (30, 900, 3) == (plain.lease, plain.max_runtime, SILENT_LEASES)
    assert "until `max_runtime` after its lease (15 minutes)" in text
    assert "for three leases (90 seconds)" in text
    assert (30, 3600) == (FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS)
    assert "after 30 seconds (half a lease, if that is longer), and in pauses that double up to an hour" in text


def test_memory_of_data_keys() -> None:
    text = page("encryption")

    assert f"remembers a data key for {CACHE_SECONDS:g} seconds" in text
    assert f"up to {FINISHING_SECONDS:g} seconds" in text
    assert f"At most {CACHE_KEYS:,} keys" in text


def test_sizes() -> None:
    assert f"at most {LONGEST_NAME} characters" in page("identity")
    assert f"more than {LONGEST_NAME} characters" in page("redis")
    assert f"{PARTITIONS:,} partitions" in page("redis")
    assert "Store`: eight methods" in page("testing-a-store")
    assert 8 == len([name for name in vars(Store) if not name.startswith("_")])


def test_tables() -> None:
    text = page("sql")

    assert "Seven tables:" in text
    assert set(re.findall(r"^\| `(idempotency_\w+)`", text, re.MULTILINE)) == set(metadata.tables)
    assert 7 == len(metadata.tables)


def test_header_fields_that_a_replay_carries() -> None:
    (line,) = re.findall(r"^A replay carries these fields.*", page("endpoints"), re.MULTILINE)

    named = set(re.findall(r"`([A-Z][\w-]+)`", line))
    assert KEPT_FIELDS == {name.lower() for name in named}


def test_what_counts_as_credentials() -> None:
    text = page("identity").partition("## What counts as credentials")[2].partition("\n## ")[0]

    assert set() == {
        name for name in (*TOKENS, *ASSERTED, *CERTIFICATES, *NO_CERTIFICATE) if f"`{name}`" not in text
    } - {
        "Cookie"  # "any cookie"
    }


def test_profiles() -> None:
    """The table of the README: header, replay headers, statuses, and for how long a response is kept."""
    rows = {
        cells[1].strip("` "): cells[2:-1]
        for cells in (line.split("|") for line in README.splitlines())
        if len(cells) == 8
    }
    for name, profile in PROFILES.items():
        header, replayed, mismatch, in_flight, kept = rows[name]
        assert tuple(re.findall(r"`([^`]+)`", header)) == profile.values["header"]
        assert re.findall(r"`([^`]+)`", replayed) == [
            f"{field}: {value}" for field, value in profile.values["replayed_header"]
        ]
        assert int(mismatch.split()[0]) == profile.statuses.get("key-reused", PROBLEMS["key-reused"].status)
        assert int(in_flight.split()[0]) == profile.statuses.get("in-flight", PROBLEMS["in-flight"].status)
        number, unit = kept.split()
        assert int(number) * {"h": 3600, "d": 86400}[unit] == profile.values["keep"]


def test_every_page_is_in_the_list_of_pages() -> None:
    index = page("README")

    assert [] == [path.name for path in HERE.glob("*.md") if path.name != "README.md" and f"({path.name}" not in index]


@pytest.mark.parametrize(
    ("found", "refuses", "expected"),
    (
        ({"settled": True}, False, Happened(({"settled": True}, 201))),
        ({"settled": False}, True, StillUnknown()),
        (None, False, StillUnknown()),
        (None, True, Happened(({"status": "cancelled"}, 402))),
    ),
    ids=("made", "on its way", "not heard of", "ruled out"),
)
def test_the_resolver_of_the_page_never_takes_ignorance_for_proof(
    found: dict[str, bool] | None, refuses: bool, expected: Resolution
) -> None:
    """It frees no key: a provider that refuses this one refuses the retry too."""
    names = surroundings()
    exec(compile(BLOCK.findall(page("quarantine"))[0], "documentation", "exec", dont_inherit=True), names)  # noqa: S102
    found_by, refused_by = Mock(return_value=found), Mock(return_value=refuses)
    names["provider"] = SimpleNamespace(find_charge=found_by, cancel=refused_by)
    resolver = names["what_became_of_it"]

    assert expected == resolver(UnknownOutcome(SimpleNamespace(), lambda name: f"downstream of {name}"))  # type: ignore[arg-type]
    found_by.assert_called_once_with(key="downstream of charge")
    assert refused_by.mock_calls in ([], [call(key="downstream of charge")])
