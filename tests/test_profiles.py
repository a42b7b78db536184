from __future__ import annotations

from http import HTTPStatus

import pytest

from flask_idempotency.engine.policy import Decision, Policy, merge
from flask_idempotency.engine.record import OnLapse
from flask_idempotency.profiles import (
    DIALECT_FIELDS,
    KEPT_FIELDS,
    PROFILES,
    allowed_fields,
    faults_of_kept,
    refused,
    spelled_out,
)

DAY = 24 * 3600.0


def under(name: str, **values: object) -> Policy:
    return merge(Policy(), spelled_out({"profile": name, **values}))


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
    """
    What one profile leaves open, an inner layer's profile would take over from an outer one's.
    """
    under(name).check(joint=False)

    assert set(DIALECT_FIELDS) == PROFILES[name].values.keys()


@pytest.mark.parametrize("outer", PROFILES)
@pytest.mark.parametrize("inner", PROFILES)
def test_an_inner_profile_leaves_nothing_of_the_outer_one(outer: str, inner: str) -> None:
    assert under(inner) == merge(under(outer), spelled_out({"profile": inner}))


def test_a_layers_own_values_lie_over_its_profile() -> None:
    policy = under("playbook", keep=60.0)

    assert (60.0, 409) == (policy.keep, PROFILES[policy.profile].statuses["key-reused"])


def test_a_layer_without_a_profile_lies_over_an_outer_profile_value_by_value() -> None:
    policy = merge(under("x-idempotency"), spelled_out({"max_key_length": 64}))

    assert (64, 300.0) == (policy.max_key_length, policy.lease)


@pytest.mark.parametrize("status", (200, 201, 202, 204, 301, 307, 400, 401, 404, 409, 422, 429, 500, 503, 599))
@pytest.mark.parametrize(
    ("name", "released"),
    (
        ("ietf", {307, 401, 409, 429, 500, 503, 599}),
        ("stripe", set()),
        ("x-idempotency", set()),
        ("playbook", {500, 503, 599}),
    ),
)
def test_what_is_kept_of_an_answer_the_view_chose(name: str, released: set[int], status: int) -> None:
    decision = under(name).decision(response=None, status=status, error=None, past_point=False)

    assert (Decision.RELEASE if status in released else Decision.KEEP) is decision


@pytest.mark.parametrize(
    ("name", "expected"),
    (
        ("ietf", Decision.RELEASE),
        ("stripe", Decision.KEEP),
        ("x-idempotency", Decision.KEEP),
        ("playbook", Decision.RELEASE),
    ),
)
def test_what_is_kept_of_an_unhandled_error(name: str, expected: Decision) -> None:
    decision = under(name).decision(
        response=None, status=HTTPStatus.INTERNAL_SERVER_ERROR, error=RuntimeError(), past_point=False
    )

    assert expected is decision


def test_only_x_idempotency_takes_abandoned_plain_work_over() -> None:
    assert {"x-idempotency"} == {name for name in PROFILES if under(name).on_lapse is OnLapse.TAKEOVER}


@pytest.mark.parametrize(
    "name",
    (
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
    ),
)
def test_a_policy_cannot_keep_what_belongs_to_one_caller(name: str) -> None:
    (fault,) = faults_of_kept([name])

    assert f"{name} belongs to one caller" in fault
    assert allowed_fields(frozenset()) == allowed_fields(frozenset({name}))


@pytest.mark.parametrize("name", ("", "X Total", "X-Total:", "X-Total\r\n", "Größe"))
def test_a_policy_cannot_keep_what_is_no_field_name(name: str) -> None:
    (fault,) = faults_of_kept([name])

    assert "not the name of a header field" in fault


def test_all_faults_in_keep_headers_are_told_together() -> None:
    assert 2 == len(faults_of_kept(["Date", "X-Total", "X Total"]))


def test_a_policy_may_keep_a_field_of_the_applications_own() -> None:
    assert [] == faults_of_kept(["X-Total"])
    assert KEPT_FIELDS | {"x-total"} == allowed_fields(frozenset({"X-Total"}))


def test_nothing_on_the_allow_list_is_refused() -> None:
    assert not [name for name in KEPT_FIELDS if refused(name)]
