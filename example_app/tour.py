"""What the demo asks of the service over HTTP, and what it must get. Each scenario's docstring is its story."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import httpx

from example_app.report import Scenarios, Seen, counted, seen
from example_app.shop import Shop

PATIENCE_SECONDS = 10.0
FIRST_KEY = "order-1"
PAYMENT: dict[str, Any] = {"account": "acc_1", "amount": 1050, "currency": "EUR"}

tour = Scenarios()


@tour.scenario("201, runs once", rows=1)
def first_request(shop: Shop) -> Seen:
    """Alice pays 10.50 EUR and names her intent: Idempotency-Key: order-1."""
    answer = shop.pay(FIRST_KEY, PAYMENT)
    return seen([answer], ok=answer.status_code == 201 and "Location" in answer.headers and executions(answer) == 1)


@tour.scenario("the same 201, replayed", rows=0)
def retry(shop: Shop) -> Seen:
    """Her phone lost the answer, so it sends the same request again."""
    first, again = shop.pay(FIRST_KEY, PAYMENT), shop.pay(FIRST_KEY, PAYMENT)
    same = first.content == again.content and first.headers["Location"] == again.headers["Location"]
    return seen([again], ok=same and replayed(again) and executions(again) == 1)


@tour.scenario("one runs; then 16 equal answers", rows=1)
def sixteen_at_once(shop: Shop) -> Seen:
    """Sixteen copies of one request arrive at the same moment, on two workers. Those refused try again."""
    body = PAYMENT | {"simulate": {"delay": 0.5}}
    barrier = Barrier(16)

    def pay(_: int) -> httpx.Response:
        barrier.wait(PATIENCE_SECONDS)
        return shop.pay("sixteen", body)

    with ThreadPoolExecutor(16) as threads:
        at_once = list(threads.map(pay, range(16)))
        afterwards = list(threads.map(pay, range(16)))
    fresh = [answer for answer in at_once if answer.status_code == 201 and not replayed(answer)]
    refused = [answer for answer in at_once if answer.status_code == 409]
    others = [answer for answer in at_once if answer.status_code == 201 and replayed(answer)]
    ok = len(fresh) == 1 and len(refused) + len(others) == 15 and all("Retry-After" in a.headers for a in refused)
    ok = ok and {(a.status_code, a.content) for a in afterwards} == {(201, fresh[0].content)}
    return seen(
        afterwards[-1:],
        answers=f"{counted(at_once)}; then {counted(afterwards)}",
        ok=ok and executions(afterwards[0]) == 1,
    )


@tour.scenario("422 key-reused", rows=0)
def changed_payload(shop: Shop) -> Seen:
    """The same key with another amount is a mistake in the client, and is told so."""
    answer = shop.pay(FIRST_KEY, PAYMENT | {"amount": 999})
    return seen([answer], ok=answer.status_code == 422 and code(answer) == "key-reused" and executions(answer) == 1)


@tour.scenario("201, an answer of her own", rows=1)
def another_tenant(shop: Shop) -> Seen:
    """Carol, of another company, happens to use the very same key."""
    return own_answer(shop, "tok_carol")


@tour.scenario("201, an answer of his own", rows=1)
def another_principal(shop: Shop) -> Seen:
    """So does Bob, of Alice's company."""
    return own_answer(shop, "tok_bob")


@tour.scenario("429 quota-exceeded, a known key still answered", rows=3)
def over_quota(shop: Shop) -> Seen:
    """Dave's company is on trial: three keys at a time. The fourth is refused, and retries of the others are not."""
    keys = [f"trial-{number}" for number in range(4)]
    answers = [shop.pay(key, PAYMENT, bearer="tok_dave") for key in (*keys, keys[0])]
    refused, retry = answers[3:]
    ok = [answer.status_code for answer in answers] == [201, 201, 201, 429, 201] and replayed(retry)
    return seen(answers, ok=ok and code(refused) == "quota-exceeded" and "Retry-After" in refused.headers)


@tour.scenario("nothing of an answer in clear", rows=0)
def encrypted_at_rest(shop: Shop) -> Seen:
    """Whoever gets hold of the records or of the cache reads no answer, no company and no person in them."""
    answer = shop.pay(FIRST_KEY, PAYMENT)
    shown = [answer.json()["id"], "alice", "acme", FIRST_KEY]
    ok = replayed(answer) and not any(text in held for text in shown for held in shop.held_in_stores())
    return seen([answer], ok=ok)


@tour.scenario("410 answer-erased, and no second run", rows=0)
def erased(shop: Shop) -> Seen:
    """Dave's company leaves, and `flask idempotency purge --shred` destroys its key: nobody reads its answers again."""
    shop.run("idempotency", "purge", "--tenant", "initech", "--shred", "--reason", "they have left", "--yes")
    answer = shop.pay("trial-0", PAYMENT, bearer="tok_dave")
    alices = shop.pay(FIRST_KEY, PAYMENT)
    return seen([answer, alices], ok=answer.status_code == 410 and code(answer) == "answer-erased" and replayed(alices))


@tour.scenario("400 invalid-key", rows=0)
def malformed_key(shop: Shop) -> Seen:
    """A key with a space in it is refused, never trimmed into somebody else's."""
    answer = shop.pay("order 1", PAYMENT)
    return seen([answer], ok=answer.status_code == 400 and code(answer) == "invalid-key" and executions(answer) == 0)


@tour.scenario("400 missing-key", rows=0)
def missing_key(shop: Shop) -> Seen:
    """Payments require a key."""
    answer = shop.pay(None, PAYMENT)
    return seen([answer], ok=answer.status_code == 400 and code(answer) == "missing-key" and executions(answer) == 0)


@tour.scenario("503, then it runs again", rows=1)
def released_after_503(shop: Shop) -> Seen:
    """A 503 is no final answer: the key is released, and the retry runs."""
    body = PAYMENT | {"simulate": {"status": 503}}
    answers = [shop.pay("busy", body) for _ in range(3)]
    statuses = [answer.status_code for answer in answers]
    return seen(answers, ok=statuses == [503, 201, 201] and replayed(answers[2]) and executions(answers[2]) == 2)


@tour.scenario("200 twice, runs once", rows=0)
def double_click(shop: Shop) -> Seen:
    """Alice clicks "save" twice. Here in_flight="wait" applies: the second click waits for the first answer."""
    path = shop.pay(FIRST_KEY, PAYMENT).headers["Location"]
    body = {"amount": 2000, "simulate": {"delay": 0.5}}
    barrier = Barrier(2)

    def click(_: int) -> httpx.Response:
        barrier.wait(PATIENCE_SECONDS)
        return shop.send("PATCH", path, "save-1", body)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(click, range(2)))
    same = {(answer.status_code, answer.content) for answer in answers} == {(200, answers[0].content)}
    return seen(answers, ok=same and sorted(map(replayed, answers)) == [False, True] and executions(answers[0]) == 1)


@tour.scenario("taken over: two starts, one row", rows=1)
def killed_before_commit(shop: Shop) -> Seen:
    """The worker gets SIGKILL on the brink of its commit, so nothing is there. When its lease is over, a retry pays."""
    body = PAYMENT | {"simulate": {"crash": "before_commit"}}
    with lost_connection():
        shop.pay("crash-before", body)
    answers = until(lambda: shop.pay("crash-before", body), lambda answer: answer.status_code != 409)
    return seen(
        answers,
        ok=answers[-1].status_code == 201 and executions(answers[-1]) == 2,
        answers=f"dropped, {counted(answers)}",
    )


@tour.scenario("the lost 201, replayed", rows=1)
def killed_after_commit(shop: Shop) -> Seen:
    """Killed right after its commit, before the answer leaves. Payment and answer are there, so the retry is a replay."""
    body = PAYMENT | {"simulate": {"crash": "after_commit"}}
    with lost_connection():
        shop.pay("crash-after", body)
    answer = shop.pay("crash-after", body)
    ok = answer.status_code == 201 and replayed(answer) and executions(answer) == 1
    return seen([answer], ok=ok, answers=f"dropped, {counted([answer])}")


@tour.scenario("X-Idempotency-Replay: true", rows=1)
def x_idempotency(shop: Shop) -> Seen:
    """Another dialect: invoices under X-Idempotency-Key."""
    body = {"customer": "cus_1", "amount": 4200, "currency": "EUR"}
    answers = [shop.send("POST", "/api/invoices", "inv-1", body, header="X-Idempotency-Key") for _ in range(2)]
    same = answers[0].content == answers[1].content and answers[1].headers.get("X-Idempotency-Replay") == "true"
    return seen(answers, ok=same and executions(answers[1]) == 1)


@tour.scenario("replay; other amount 409", rows=1)
def playbook(shop: Shop) -> Seen:
    """A gateway whose clients stamp each attempt with a new timestamp, which is no part of the request."""

    def charge(amount: int, timestamp: int) -> httpx.Response:
        body = {"account_id": "acc_1", "amount": amount, "currency": "EUR", "timestamp": timestamp}
        return shop.send("POST", "/gateway/charges", "gw-1", body)

    first, again, other = charge(100, 1), charge(100, 2), charge(200, 3)
    ok = first.content == again.content and again.headers.get("X-Cache-Lookup") == "HIT" and executions(again) == 1
    ok = ok and other.status_code == 409 and other.json().get("error_code") == "idempotency_payload_mismatch"
    return seen([first, again, other], ok=ok)


@tour.scenario("replayed before and after", rows=1)
def wiped_valkey(shop: Shop) -> Seen:
    """FLUSHALL: Valkey forgets every answer that it was replaying. The database does not."""
    answers = [shop.pay("wiped", PAYMENT) for _ in range(2)]
    forgotten = shop.wipe_cache()
    answers.append(shop.pay("wiped", PAYMENT))
    return seen(answers, ok=forgotten > 0 and paid_once(answers), answers=f"{counted(answers)}; {forgotten} forgotten")


@tour.scenario("201, then replayed", rows=1)
def silent_valkey(shop: Shop) -> Seen:
    """Valkey stops answering. It only keeps copies of answers: the database decides, so payments go on."""
    shop.cache.pause()
    try:
        answers = [shop.pay("silent", PAYMENT) for _ in range(2)]
    finally:
        shop.cache.resume()
    return seen(answers, ok=paid_once(answers))


def paid_once(answers: list[httpx.Response]) -> bool:
    """Whether the first of these paid, and all others got its answer without another run."""
    first, *others = answers
    fresh = first.status_code == 201 and not replayed(first)
    same = all(replayed(other) and other.content == first.content for other in others)
    return fresh and same and {executions(answer) for answer in answers} == {1}


def own_answer(shop: Shop, bearer: str) -> Seen:
    alices, answer = shop.pay(FIRST_KEY, PAYMENT), shop.pay(FIRST_KEY, PAYMENT, bearer=bearer)
    ok = answer.status_code == 201 and not replayed(answer) and answer.json()["id"] != alices.json()["id"]
    return seen([answer], ok=ok and executions(answer) == 1)


def until(ask: Callable[[], httpx.Response], settled: Callable[[httpx.Response], bool]) -> list[httpx.Response]:
    """Every answer up to the first that is settled. Less patient than Retry-After asks for: this is a tour."""
    answers = [ask()]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not settled(answers[-1]) and time.monotonic() < deadline:
        time.sleep(0.1)
        answers.append(ask())
    return answers


@contextmanager
def lost_connection() -> Iterator[None]:
    """The request inside must get no answer at all."""
    try:
        yield
    except httpx.TransportError:
        return
    raise AssertionError("the worker answered, though it was to be killed")


def executions(answer: httpx.Response) -> int:
    return int(answer.headers["X-Executions"])


def replayed(answer: httpx.Response) -> bool:
    return bool(answer.headers.get("Idempotency-Replayed") == "true")


def code(answer: httpx.Response) -> str | None:
    found: str | None = answer.json().get("code")
    return found
