"""`flask idempotency resolve`: what became of a quarantined key is said by hand, and stays said."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.events import Resolved
from flask_idempotency.engine.model import State
from tests.apps import (
    ALICES,
    ANSWER,
    GONE,
    LEASE,
    WHY,
    World,
    lapsed,
    paid,
    record,
    refusal,
    run,
    said,
    shop,
    vanished,
)

RESOLVE = ("resolve", *ALICES, *WHY, "--yes")
OLD, NEW = (base64.b64encode(letter * 32).decode() for letter in (b"o", b"n"))


def unknown(**settings: Any) -> World:
    """A shop whose only payment has failed in a way that nobody knows the outcome of. Its request can be retried."""
    world = shop(on_error="quarantine", **settings)
    assert 500 == paid(world, Fail="yes").status_code
    return world


def state(world: World) -> State | None:
    found = record(world)
    return None if found is None else found.state


@pytest.mark.parametrize(("store", "encrypted"), (("memory", True), ("sqlite", False)))
def test_a_response_for_a_purged_tenant_is_announced_as_erased(store: str, encrypted: bool, tmp_path: Path) -> None:
    """The store keeps only that the request completed, and the retry gets 410."""
    settings: dict[str, Any] = {"encryption": "on", "key_ring": {"a": OLD}} if encrypted else {}
    if store == "sqlite":
        settings["store"] = f"sqlite:///{tmp_path / 'records.db'}"
    world = unknown_after_purge(**settings)
    (tmp_path / "answer").write_bytes(b"paid")

    told = run(world, *RESOLVE, "--happened", "--status", "201", "--body-file", str(tmp_path / "answer"))

    assert 0 == told.exit_code, told.output
    assert told.output.startswith("Resolved: retries get 410 `response-erased`, and not your response")
    assert 410 == paid(world).status_code


def unknown_after_purge(**settings: Any) -> World:
    world = shop(on_error="quarantine", **settings)
    if isinstance(settings.get("store"), str):
        assert 0 == run(world, "db", "upgrade").exit_code
    assert 500 == paid(world, Fail="yes").status_code
    assert 0 == run(world, "purge", "--tenant", "acme", *WHY, "--yes").exit_code
    return world


def test_an_answer_that_is_given_is_every_retrys(tmp_path: Path) -> None:
    """Its status, its body byte for byte, its type, and the headers that this endpoint keeps."""
    world = unknown()
    (tmp_path / "answer").write_bytes(b'{"id": 7}\n')
    location = ("--header", "Location: /payments/7", "--header", "Link: </a>; rel=a", "--header", "Link: </b>; rel=b")
    body = ("--body-file", str(tmp_path / "answer"), "--content-type", "application/json")

    told = run(world, *RESOLVE, "--happened", "--status", "201", *body, *location)

    assert (0, "Resolved: retries get 201.\n") == (told.exit_code, told.output)
    for _ in range(2):
        answer = paid(world)
        assert (201, b'{"id": 7}\n', "application/json") == (answer.status_code, answer.data, answer.content_type)
        assert ("/payments/7", "true") == (answer.headers["Location"], answer.headers["Idempotency-Replayed"])
        assert ["</a>; rel=a", "</b>; rel=b"] == answer.headers.getlist("Link")
    assert 1 == len(world.runs)


@pytest.mark.parametrize(
    ("body", "media_type"), (('{"id": 7}', "application/json"), ("paid\x1b[2J", "text/html; charset=utf-8"))
)
def test_a_body_without_a_type_is_json_if_it_can_be_and_is_shown_first(
    tmp_path: Path, body: str, media_type: str
) -> None:
    world = unknown()
    (tmp_path / "answer").write_text(body)

    told = run(
        world, *RESOLVE[:-1], "--happened", "--status", "201", "--body-file", str(tmp_path / "answer"), typed="y\n"
    )

    assert f"Response: 201, {media_type}, {len(body)} bytes\n" in told.output
    assert f"Body: {body[:4]}" in told.output
    assert "\x1b" not in told.output
    assert media_type == paid(world).content_type


def test_a_body_may_come_from_standard_input() -> None:
    """As it is: bytes, not text."""
    world = unknown()

    told = run(world, *RESOLVE, "--happened", "--status", "200", "--body-file", "-", typed=b"\xff\x00\r\n")

    assert (0, b"\xff\x00\r\n") == (told.exit_code, paid(world).data)


@pytest.mark.parametrize(
    "verdict", (("--never-happened",), ("--happened", "--status", "201")), ids=("freed", "settled")
)
def test_where_standard_input_was_the_key_nobody_can_answer(verdict: tuple[str, ...]) -> None:
    """The error says what to add, and nothing is changed; with it, it is done. A second line is an answer."""
    asked = ("resolve", "--key", "-", *ALICES[2:], *WHY, *verdict)
    world = unknown()
    world.clock.advance(GONE)

    told = run(world, *asked, typed="k\n")
    no = run(world, *asked, typed="k\nn\n")

    assert (1, State.QUARANTINED) == (told.exit_code, state(world))
    assert "\nError: Standard input held the key" in told.stderr
    assert told.stderr.endswith("Add --yes to skip the question.\n")
    assert (1, "Aborted!") == (no.exit_code, no.stderr.splitlines()[-1])
    assert 0 == run(world, *asked, typed="k\ny\n").exit_code
    again = unknown()
    again.clock.advance(GONE)
    assert 0 == run(again, *asked, "--yes", typed="k\n").exit_code


def test_without_a_body_retries_get_the_status_and_that_nothing_was_kept() -> None:
    """And the headers: where the payment is to be found, say."""
    world = unknown()

    told = run(world, *RESOLVE, "--happened", "--status", "201", "--header", "Location: /payments/7")
    answer = paid(world)

    assert "Resolved: retries get 201, and `response-not-kept`.\n" == told.output
    assert (201, "response-not-kept") == (answer.status_code, answer.get_json()["code"])
    assert "/payments/7" == answer.headers["Location"]


def test_a_status_that_has_no_body_is_whole_without_one() -> None:
    world = unknown()

    assert "Resolved: retries get 204.\n" == run(world, *RESOLVE, "--happened", "--status", "204").output
    assert (204, b"", None) == ((answer := paid(world)).status_code, answer.data, answer.content_type)


def test_a_body_that_is_longer_than_the_endpoint_keeps_is_not_kept() -> None:
    """As if its view had returned it; and whoever gave it is told."""
    world = unknown(max_body=8)

    told = run(world, *RESOLVE, "--happened", "--status", "200", "--body-file", "-", typed=b"123456789")

    assert "Resolved: retries get 200, and `response-not-kept`.\n" == told.output
    assert "response-not-kept" == paid(world).get_json()["code"]


def test_headers_that_are_never_replayed_are_not_kept_and_named() -> None:
    """Not even by hand: a cookie is one caller's."""
    world = unknown(keep_headers=["X-Receipt"])
    headers = ("--header", "Set-Cookie: a=b", "--header", "X-Other: 1", "--header", "X-Receipt: 7")

    told = run(world, *RESOLVE, "--happened", "--status", "201", *headers)
    answer = paid(world)

    assert "retries do not get: Set-Cookie, X-Other." in told.stderr
    assert "Resolved" in told.stdout
    assert (None, None, "7") == tuple(answer.headers.get(name) for name in ("Set-Cookie", "X-Other", "X-Receipt"))


def test_a_late_owner_is_told_that_it_has_lost() -> None:
    """And what was said by hand stays."""
    world = shop()
    key, token = lapsed(world)
    assert 0 == run(world, *RESOLVE, "--happened", "--status", "201").exit_code
    resolved = record(world)

    with pytest.raises(LeaseLost):
        world.store.complete(key, token, ANSWER, keep=60)

    assert resolved == record(world)


def test_it_is_kept_for_as_long_as_the_endpoint_keeps_answers() -> None:
    world = unknown(keep=100)
    run(world, *RESOLVE, "--happened", "--status", "201")
    found = record(world)

    assert found is not None
    assert (State.COMPLETED, 100.0) == (found.state, found.remaining)


def test_what_never_happened_runs_again() -> None:
    world = unknown()
    world.clock.advance(LEASE)

    told = run(world, *RESOLVE, "--never-happened", "--json")

    assert {"verb": "released", "forced": False, "settled": 1, "left": 0} == said(told)
    assert (201, 2) == (paid(world).status_code, len(world.runs))


def test_what_never_happened_is_refused_while_the_owner_may_live() -> None:
    """As `release` is, and overruled as that is."""
    world = shop()
    lapsed(world)
    never = (*RESOLVE, "--never-happened")

    assert "Its worker may still run" in refusal(run(world, *never))
    assert State.QUARANTINED is state(world)
    assert said(run(world, *never, "--force", "--json"))["forced"]
    assert record(world) is None


def sealed_and_lost() -> World:
    """A payment that an earlier release quarantined, because a key was missing in the ring; and the ring without it."""
    world = shop(encryption="on", key_ring={"old": OLD})
    paid(world)
    (kept,) = world.store.responses.scan(limit=10).answers
    assert kept.record.payload is not None
    world.store.mark_corrupt(kept.key, kept.record.payload)
    return shop(store=world.store, encryption="on", key_ring={"new": NEW})


def test_an_answer_that_opens_again_is_given_again() -> None:
    """After the missing key is back; before that it is refused, and stays as it is."""
    lost = sealed_and_lost()
    early = refusal(run(lost, *RESOLVE, "--reopen"))
    world = shop(store=lost.store, encryption="on", key_ring={"new": NEW, "old": OLD})
    quarantined = state(world)
    told = run(world, *RESOLVE, "--reopen")

    assert ("It cannot be reopened: ", True) == (early[:23], early.endswith("Nothing was changed.\n"))
    assert State.QUARANTINED is quarantined
    assert (0, "Reopened: retries get the stored response.\n") == (told.exit_code, told.output)
    assert (201, b"paid", []) == ((answer := paid(world)).status_code, answer.data, world.runs)
    assert ["reopened"] == [event.verb for event in world.told(Resolved) if isinstance(event, Resolved)]


def test_what_cannot_be_opened_any_more_can_be_given_anew() -> None:
    """By whoever has the answer from elsewhere."""
    world = sealed_and_lost()
    run(world, *RESOLVE, "--happened", "--status", "201", "--body-file", "-", typed="paid")

    assert (201, b"paid", []) == ((answer := paid(world)).status_code, answer.data, world.runs)


def test_there_is_nothing_to_reopen_where_there_is_no_answer() -> None:
    world = unknown()

    assert "this record holds no response to reopen" in refusal(run(world, *RESOLVE, "--reopen"))
    assert State.QUARANTINED is state(world)


VERDICTS = (("--never-happened",), ("--happened", "--status", "201"), ("--reopen",))


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict[0])
def test_only_what_is_quarantined_can_be_resolved(verdict: tuple[str, ...]) -> None:
    """What is done has its answer, and what is in progress may get its own."""
    done, busy = shop(), shop()
    paid(done), vanished(busy)
    before = record(done), record(busy)

    assert "retries get the response" in refusal(run(done, *RESOLVE, *verdict))
    assert "this one is in progress" in refusal(run(busy, *RESOLVE, *verdict))
    assert before == (record(done), record(busy))


@pytest.mark.parametrize("verdict", VERDICTS[:2], ids=lambda verdict: verdict[0])
def test_it_shows_when_the_owner_was_last_seen_before_it_asks(verdict: tuple[str, ...]) -> None:
    """No, and no answer at all, leave everything as it is."""
    world = shop()
    lapsed(world, after=GONE + 60)
    before = record(world)
    told = [run(world, *RESOLVE[:-1], *verdict, typed=typed) for typed in ("n\n", "")]

    assert [1, 1] == [each.exit_code for each in told]
    assert all("owner:        last seen 16 min 30 s ago" in each.stderr for each in told)
    assert before == record(world)
    assert 0 == run(world, *RESOLVE[:-1], *verdict, typed="y\n").exit_code
    assert before != record(world)


def test_an_owner_that_may_live_is_named_to_whoever_says_that_it_happened() -> None:
    """It is no refusal: its own answer would be accepted, and perhaps it is better."""
    world = shop()
    lapsed(world)

    told = run(world, *RESOLVE[:-1], "--happened", "--status", "201", typed="n\n")

    assert "Its worker may still run: it was last seen 31 s ago" in told.stderr


@pytest.mark.parametrize("verdict", VERDICTS[:2], ids=lambda verdict: verdict[0])
def test_an_owner_that_was_faster_wins(verdict: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer stays, and nobody is told that anything was settled."""
    world = shop()
    key, token = lapsed(world, after=GONE)
    read = world.store.read

    def looked(which: Any) -> Any:
        found = read(which)
        world.store.complete(key, token, ANSWER, keep=60)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "read", looked)
        told = refusal(run(world, *RESOLVE, *verdict))

    found = record(world)
    assert "Another process resolved the key first" in told
    assert found is not None
    assert ((State.COMPLETED, ANSWER), []) == ((found.state, found.payload), world.told(Resolved))


def test_while_secrets_rotate_it_is_resolved_under_each() -> None:
    """The oldest first, which is the one that retries ask first."""
    world = unknown(secret=["new", "old"])

    told = said(run(world, *RESOLVE, "--happened", "--status", "201", "--json"))

    assert (2, 0) == (told["settled"], told["left"])
    assert 201 == paid(world).status_code
    assert 1 == len(world.runs)


MISTAKES: tuple[tuple[str, ...], ...] = (
    (),
    ("--happened",),
    ("--status", "201"),
    ("--never-happened", "--status", "201"),
    ("--reopen", "--header", "A: b"),
    ("--happened", "--status", "100"),
    ("--happened", "--status", "600"),
    ("--happened", "--status", "201", "--force"),
    ("--happened", "--status", "201", "--content-type", "text/plain"),
    ("--happened", "--status", "201", "--header", "no colon"),
    ("--happened", "--status", "201", "--header", "A: b\r\nSet-Cookie: c=d"),
    ("--happened", "--status", "201", "--header", "Ä: b"),
    ("--happened", "--status", "201", "--header", "Content-Type: text/plain"),
    ("--happened", "--status", "201", "--header", "content-length: 7"),
    ("--happened", "--status", "201", "--body-file", "nowhere"),
)


def test_what_is_not_said_whole_is_a_mistake_in_typing() -> None:
    world = unknown()
    before = record(world)

    for verdict in MISTAKES:
        assert 2 == run(world, *RESOLVE, *verdict).exit_code, verdict
    assert before == record(world)


@pytest.mark.parametrize("named", (("--key", "-", *ALICES[2:], "--yes"), ALICES), ids=("the key", "a yes"))
def test_standard_input_is_one_thing_only(named: tuple[str, ...]) -> None:
    """Else the body would be taken for a yes, or the key for a body."""
    world = unknown()
    happened = ("--happened", "--status", "201", "--body-file", "-")

    assert 2 == run(world, "resolve", *named, *happened, *WHY, typed="k\ny\n").exit_code
    assert State.QUARANTINED is state(world)
