from __future__ import annotations

from http import HTTPStatus
from itertools import product
from typing import Any

import pytest

from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.settings.profiles import (
    DIALECT_FIELDS,
    KEPT_FIELDS,
    PROFILES,
    Profile,
    faults_of_kept,
    is_kept,
    policy_of,
    refused,
)
from tests.decisions import decision_of

DAY = 24 * 3600.0


def under(name: str, **values: Any) -> Policy:
    return policy_of({"profile": name, **values})


@pytest.mark.parametrize(
    ("name", "header", "replayed", "keep", "max_key_length", "mismatch", "body"),
    (
        ("ietf", "Idempotency-Key", [("Idempotency-Replayed", "true")], DAY, 255, None, "problem"),
        ("stripe", "Idempotency-Key", [("Idempotent-Replayed", "true")], DAY, 255, 400, "stripe"),
        ("x-idempotency", "X-Idempotency-Key", [("X-Idempotency-Replay", "true")], DAY, 128, None, "problem"),
        (
            "playbook",
            "Idempotency-Key",
            [("X-Idempotency-Replayed", "true"), ("X-Cache-Lookup", "HIT")],
            7 * DAY,
            255,
            409,
            "playbook",
        ),
    ),
)
def test_the_dialects_are_those_of_the_specification(
    name: str,
    header: str,
    replayed: list[tuple[str, str]],
    keep: float,
    max_key_length: int,
    mismatch: int | None,
    body: str,
) -> None:
    policy = under(name)

    assert (name, (header,), tuple(replayed), keep, max_key_length, mismatch, body) == (
        policy.profile,
        policy.header,
        policy.replayed_header,
        policy.keep,
        policy.max_key_length,
        PROFILES[name].statuses.get("key-reused"),
        PROFILES[name].body,
    )


def test_ietf_is_what_a_policy_is_without_a_profile() -> None:
    assert Policy() == under("ietf")


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_decides_the_same_fields_and_holds_together(name: str) -> None:
    """None decides what becomes of an abandoned claim: that is the application's to say."""
    under(name).check(joint=False)

    assert set(DIALECT_FIELDS) == PROFILES[name].values.keys()
    assert not {"effects", "on_abandoned", "on_store_down"} & PROFILES[name].values.keys()


def test_an_inner_profile_leaves_nothing_of_the_outer_one() -> None:
    for inner, outer in product(PROFILES, PROFILES):
        assert under(inner) == policy_of({"profile": outer}, {"profile": inner}), (inner, outer)


def test_a_layer_without_a_profile_lies_over_an_outer_profile_value_by_value() -> None:
    policy = policy_of({"profile": "x-idempotency"}, {"max_key_length": 64})

    assert (64, 300.0) == (policy.max_key_length, policy.lease)


WRITTEN: tuple[dict[str, Any], ...] = (
    {"keep": 60.0},
    {"lease": 7.0, "max_key_length": 9},
    {"header": ("X-Key",), "replayed_header": (("X-Again", "yes"),)},
    {"on_error": "release"},
    {"on_error": None},
    {"keep_statuses": frozenset({201})},
    {"release_statuses": frozenset({422, 500})},
)


def test_a_written_value_beats_a_profile_of_any_layer() -> None:
    for profile, written in product(PROFILES, WRITTEN):
        named = {"profile": profile}

        assert policy_of(named, written) == policy_of(written, named) == policy_of({**named, **written}), (
            profile,
            written,
        )
        assert written == {name: getattr(policy_of(written, named), name) for name in written}, (profile, written)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_written_max_runtime_shortens_the_lease_that_a_profile_brings(profile: str) -> None:
    """Two written values that contradict each other stay as they are, and are refused."""
    policy = under(profile, max_runtime=20.0)

    assert (20.0, 20.0, []) == (policy.max_runtime, policy.lease, policy.faults(joint=False))
    assert under(profile, max_runtime=20.0, lease=25.0).faults(joint=False)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_a_renderer_of_problems_cannot_change_the_profile_of_other_applications(profile: Profile) -> None:
    shown: Any = profile

    for shared in (shown.values, shown.statuses):
        with pytest.raises(TypeError):
            shared["in-flight"] = 423


def decided(policy: Policy, status: int, error: BaseException | None = None) -> Decision:
    return decision_of(policy, status=status, error=error, past_point=False)


@pytest.mark.parametrize("name", ("stripe", "x-idempotency"))
def test_a_written_on_error_beats_the_statuses_that_a_profile_keeps(name: str) -> None:
    policy = under(name, on_error="release")

    assert {Decision.RELEASE} == {decided(policy, status) for status in (500, 502, 503, 599)}
    assert Decision.RELEASE is decided(policy, 500, RuntimeError())
    assert {Decision.KEEP} == {decided(policy, status) for status in (201, 409, 422, 429)}
    assert Decision.QUARANTINE is decided(under(name, on_error="quarantine"), 503)


@pytest.mark.parametrize(
    ("effects", "status", "expected"),
    (
        ("plain", 500, Decision.QUARANTINE),
        ("plain", 503, Decision.RELEASE),
        ("deduplicated", 500, Decision.RELEASE),
    ),
)
def test_a_written_none_has_effects_decide_again(effects: str, status: int, expected: Decision) -> None:
    assert expected is decided(under("stripe", on_error=None, effects=effects), status)


@pytest.mark.parametrize("status", (402, 500))
def test_written_release_statuses_beat_the_statuses_that_a_profile_keeps(status: int) -> None:
    policy = under("stripe", release_statuses=frozenset({status}))

    assert Decision.RELEASE is decided(policy, status)
    assert Decision.KEEP is decided(policy, status + 1)
    assert [] == policy.faults(joint=False)


def test_written_keep_statuses_beat_a_profiles_on_error() -> None:
    policy = under("playbook", keep_statuses=frozenset({502}))

    assert (Decision.KEEP, Decision.RELEASE) == (decided(policy, 502), decided(policy, 500))


@pytest.mark.parametrize("profile", PROFILES)
def test_two_written_lists_that_name_one_status_are_refused(profile: str) -> None:
    lists = {"keep_statuses": frozenset({409, 500}), "release_statuses": frozenset({500, 502})}
    both = under(profile, **lists)
    apart = policy_of({"keep_statuses": lists["keep_statuses"]}, {"release_statuses": lists["release_statuses"]})

    for policy in (both, apart):
        (fault,) = policy.faults(joint=False)
        assert fault.startswith("keep_statuses and release_statuses both name 500:")


def test_what_is_kept_of_an_answer_the_view_chose() -> None:
    for (name, released), status in product(
        (
            ("ietf", {307, 401, 409, 429, 503}),
            ("stripe", set()),
            ("x-idempotency", set()),
            ("playbook", {500, 503, 599}),
        ),
        (200, 201, 202, 204, 301, 307, 400, 401, 404, 409, 422, 429, 500, 503, 599),
    ):
        decision = decision_of(under(name), status=status, error=None, past_point=False)
        unknown = name == "ietf" and status in (500, 599)

        assert (
            Decision.RELEASE if status in released else Decision.QUARANTINE if unknown else Decision.KEEP
        ) is decision, (name, released, status)


@pytest.mark.parametrize(
    ("name", "expected"),
    (
        ("ietf", Decision.QUARANTINE),
        ("stripe", Decision.KEEP),
        ("x-idempotency", Decision.KEEP),
        ("playbook", Decision.RELEASE),
    ),
)
def test_what_is_kept_of_an_unhandled_error(name: str, expected: Decision) -> None:
    decision = decision_of(
        under(name), response=None, status=HTTPStatus.INTERNAL_SERVER_ERROR, error=RuntimeError(), past_point=False
    )

    assert expected is decision


@pytest.mark.parametrize("name", PROFILES)
def test_no_profile_takes_abandoned_plain_work_over(name: str) -> None:
    """`effects` decide, or the application in so many words."""
    assert OnExpiry.QUARANTINE is under(name).on_expiry
    assert OnExpiry.TAKEOVER is under(name, effects="deduplicated").on_expiry
    assert OnExpiry.TAKEOVER is under(name, on_abandoned="takeover").on_expiry


def test_a_policy_cannot_keep_what_belongs_to_one_caller() -> None:
    for name in (
        "Set-Cookie",
        "set-cookie",
        "WWW-Authenticate",
        "Authorization",
        "Date",
        "Server",
        "Age",
        "Connection",
        "Keep-Alive",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
        "Content-Length",
        "X-Request-ID",
        "RateLimit",
        "X-RateLimit-Remaining",
        "Access-Control-Allow-Origin",
    ):
        (fault,) = faults_of_kept([name])

        assert f"{name} belongs to one caller" in fault, name
        assert not is_kept(name.lower(), frozenset({name})), name


def test_a_policy_cannot_keep_what_is_no_field_name() -> None:
    for name in ("", "X Total", "X-Total:", "X-Total\r\n", "Größe"):
        (fault,) = faults_of_kept([name])

        assert "not the name of a header field" in fault, name


def test_all_faults_in_keep_headers_are_reported_together() -> None:
    assert 2 == len(faults_of_kept(["Date", "X-Total", "X Total"]))


def test_a_policy_may_keep_a_field_of_the_applications_own() -> None:
    assert [] == faults_of_kept(["X-Total"])
    assert [True, False] == [is_kept(name, frozenset({"X-Total"})) for name in ("x-total", "x-totals")]


def test_a_beginning_keeps_every_field_that_begins_so_except_what_is_never_kept() -> None:
    assert [] == faults_of_kept(["X-Shop-*", "X-*", "X-Re*", "Content-*", "d*"])
    for beginning, name, kept in (
        ("X-Shop-*", "x-shop-receipt", True),
        ("X-Shop-*", "x-shop", False),
        ("X-*", "x-receipt", True),
        ("X-*", "x-request-id", False),
        ("X-*", "x-ratelimit-remaining", False),
        ("X-*", "x-ratelimitremaining", False),
        ("x-*", "x-accel-redirect", False),
        ("D*", "date", False),
        ("*", "x-receipt", False),
        ("*", "set-cookie", False),
        ("Set-*", "set-cookie", False),
    ):
        assert kept is is_kept(name, frozenset({beginning})), (beginning, name)


def test_a_beginning_of_names_that_are_never_kept_is_refused() -> None:
    for name in (
        "*",
        "Set-Cookie*",
        "set-*",
        "Access-Control-*",
        "X-RateLimit-*",
        "X-Rate-*",
        "X-Accel-*",
        "X-*-Id",
        "**",
    ):
        assert 1 == len(faults_of_kept([name])), name


def test_nothing_on_the_allow_list_is_refused() -> None:
    assert not [name for name in KEPT_FIELDS if refused(name)]
