"""The tour: what a client sends, what the service must answer. Each scenario's docstring is the story that the demo prints.

Scenarios wait for events and not for times. A machine may be so busy that each step takes seconds. What a scenario does
before its `yield` is done early: a lease of five seconds must expire before the rest, and all of them expire together.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count, islice
from typing import Any

import httpx

from example_app.demo.buyer import INVOICES
from example_app.demo.client import PATIENCE_SECONDS, LossyWire, Shop
from example_app.demo.customers import BURST_ROUNDS, NEW_ROWS, at_once, play
from example_app.demo.operator import CONSOLE, OperatorClient
from example_app.demo.report import (
    Parts,
    Scenarios,
    Seen,
    comes_true,
    counted,
    executions,
    is_final,
    is_problem,
    lost_connection,
    member,
    replayed,
    seen,
    until,
)
from example_app.operators import OPERATORS
from example_app.simulate import BRIEF_SECONDS
from flask_idempotency.client import Ledger

FIRST_KEY = "order-1"
PAYMENT: dict[str, Any] = {"account": "acc_1", "amount": 1050, "currency": "EUR"}
CHARGE = {"amount": "2500", "currency": "eur"}
DOUBTFUL = {"doubtful-1": "tok_alice", "doubtful-2": "tok_carol"}
"""Charges that an operator must look at, and who sends them."""

tour = Scenarios()
"""One client and the service."""
janitor_tour = Scenarios(needs_all=True)
"""The client sends no retry, and the janitor works."""
message_tour = Scenarios(needs_all=True)
"""What follows each payment: the relay, the broker, the consumers and a company's own server."""
operator_tour = Scenarios(needs_all=True)
"""What the console shows, and what an operator does there."""
stripe_tour = Scenarios()
"""The client is the real `stripe` package. It is optional, so only `charge` imports it."""


@tour.scenario("201, runs once", rows=1)
def first_request(shop: Shop) -> Seen:
    """Alice pays 10.50 EUR. Her phone sends Idempotency-Key: order-1. The service makes the payment."""
    response = shop.pay(FIRST_KEY, PAYMENT)
    return seen(
        [response],
        status_is_201=response.status_code == 201,
        has_a_location="Location" in response.headers,
        ran_once=executions(response) == 1,
    )


@tour.scenario("the same 201, replayed", rows=0)
def retry(shop: Shop) -> Seen:
    """Alice's phone lost the response and sends the same request again. The service replays the stored response."""
    first, again = shop.pay(FIRST_KEY, PAYMENT), shop.pay(FIRST_KEY, PAYMENT)
    return seen(
        [again],
        same_body=first.content == again.content,
        same_location=first.headers.get("Location") == again.headers.get("Location"),
        replayed=replayed(again),
        ran_once=executions(again) == 1,
    )


@tour.scenario("one runs; all 16 get its 201", rows=1)
def sixteen_at_once(shop: Shop) -> Seen:
    """Sixteen copies of one request reach two workers at the same moment. One copy runs. The service answers 409 to a copy
    that comes while it runs, and that client retries."""
    body = PAYMENT | {"simulate": {"delay": 0.5}}
    attempts = at_once(16, lambda: until(lambda: shop.pay("sixteen", body), is_final))
    at_first, at_last = [each[0] for each in attempts], [each[-1] for each in attempts]
    fresh = [response for response in at_last if response.status_code == 201 and not replayed(response)]
    refused = [response for each in attempts for response in each[:-1]]
    return seen(
        [*at_first, *at_last],
        words=f"{counted(at_first)}; in the end {counted(at_last)}",
        one_copy_ran=len(fresh) == 1,
        refusals_say_when_to_retry=all("Retry-After" in response.headers for response in refused),
        all_got_one_201={(r.status_code, r.content) for r in at_last} == {(201, r.content) for r in fresh},
        ran_once={executions(response) for response in at_last} == {1},
    )


@tour.scenario("422 key-reused", rows=0)
def changed_payload(shop: Shop) -> Seen:
    """A client sends Alice's key with another amount. That is a mistake in the client, and the service says so."""
    response = shop.pay(FIRST_KEY, PAYMENT | {"amount": 999})
    return seen([response], is_the_problem=is_problem(response, 422, "key-reused"), ran_once=executions(response) == 1)


@tour.scenario("201, another payment", rows=1)
def another_tenant(shop: Shop) -> Seen:
    """Carol, of another company, sends the same key. Keys belong to their tenant, so she makes a payment."""
    return another_payment(shop, "tok_carol")


@tour.scenario("201, another payment", rows=1)
def another_principal(shop: Shop) -> Seen:
    """Bob, of Alice's company, sends the same key. Keys belong to their principal, so he makes a payment."""
    return another_payment(shop, "tok_bob")


@tour.scenario("429 quota-exceeded; a known key is replayed", rows=3)
def over_quota(shop: Shop) -> Seen:
    """Dave's company is on trial and may have three keys. The service refuses the fourth key, and replays the others."""
    keys = [f"trial-{number}" for number in range(4)]
    responses = [shop.pay(key, PAYMENT, bearer="tok_dave") for key in (*keys, keys[0])]
    refused, again = responses[3:]
    return seen(
        responses,
        statuses_are_as_expected=[response.status_code for response in responses] == [201, 201, 201, 429, 201],
        known_key_is_replayed=replayed(again),
        is_the_problem=is_problem(refused, 429, "quota-exceeded"),
        refusal_says_when_to_retry="Retry-After" in refused.headers,
    )


@tour.scenario("no response in clear text", rows=0)
def encrypted_at_rest(shop: Shop) -> Seen:
    """A thief copies the records and the cache. They show no response, no company, no person and no key."""
    response = shop.pay(FIRST_KEY, PAYMENT)
    secrets = [response.json()["id"], "alice", "acme", FIRST_KEY]
    held = shop.held_in_stores()
    return seen(
        [response],
        replayed=replayed(response),
        no_secret_is_in_the_stores=not any(secret in entry for secret in secrets for entry in held),
    )


@tour.scenario("410 response-erased, and no second run", rows=0)
def erased(shop: Shop) -> Seen:
    """Dave's company leaves. The operator runs `flask idempotency purge --shred`, which destroys its data key. Its stored
    responses are unreadable now, and its keys do not run again."""
    purge = ("idempotency", "purge", "--tenant", "initech", "--shred", "--reason", "they have left", "--yes")
    try:
        shop.run(*purge)
    except RuntimeError as error:
        if "the replay cache did not answer" not in str(error):
            raise
        # On a busy machine its 50 ms may not be enough. The command says to repeat it.
        shop.run(*purge)
    daves, alices = shop.pay("trial-0", PAYMENT, bearer="tok_dave"), shop.pay(FIRST_KEY, PAYMENT)
    return seen(
        [daves, alices],
        is_the_problem=is_problem(daves, 410, "response-erased"),
        another_tenant_is_replayed=replayed(alices),
    )


@tour.scenario("400 invalid-key", rows=0)
def malformed_key(shop: Shop) -> Seen:
    """A client sends a key with a space. The service refuses it, and never trims it into the key of another request."""
    response = shop.pay("order 1", PAYMENT)
    return seen([response], is_the_problem=is_problem(response, 400, "invalid-key"), ran_not=executions(response) == 0)


@tour.scenario("400 missing-key", rows=0)
def missing_key(shop: Shop) -> Seen:
    """A client sends no key. Payments require one."""
    response = shop.pay(None, PAYMENT)
    return seen([response], is_the_problem=is_problem(response, 400, "missing-key"), ran_not=executions(response) == 0)


@tour.scenario("503, then it runs again", rows=1)
def released_after_503(shop: Shop) -> Seen:
    """The view answers 503. That is not a final response, so the service releases the key and the retry runs."""
    body = PAYMENT | {"simulate": {"status": 503}}
    responses = [shop.pay("busy", body) for _ in range(3)]
    return seen(
        responses,
        statuses_are_as_expected=[response.status_code for response in responses] == [503, 201, 201],
        third_is_replayed=replayed(responses[2]),
        ran_twice=executions(responses[2]) == 2,
    )


@tour.scenario("200 twice, runs once", rows=0)
def double_click(shop: Shop) -> Seen:
    """Alice clicks "save" twice. This view has in_flight="wait": the second request waits for the first one's response."""
    path = shop.pay(FIRST_KEY, PAYMENT).headers["Location"]
    body = {"amount": 2000, "simulate": {"delay": 0.5}}
    # The view waits for 5 s. On a very busy machine that is too short, and the client gets a 409 and retries.
    responses = at_once(2, lambda: until(lambda: shop.send("PATCH", path, "save-1", body), is_final)[-1])
    return seen(
        responses,
        same_response={(r.status_code, r.content) for r in responses} == {(200, responses[0].content)},
        one_is_replayed=sorted(map(replayed, responses)) == [False, True],
        ran_once=executions(responses[0]) == 1,
    )


@tour.scenario("taken over: two starts, one row", rows=1)
def killed_before_commit(shop: Shop) -> Parts:
    """SIGKILL ends the worker just before its commit, so the database has no payment. The lease expires. Then a retry takes
    over and pays."""
    body = PAYMENT | {"simulate": {"crash": "before_commit"}}
    with lost_connection():
        shop.pay("crash-before", body)
    at_once = shop.pay("crash-before", body)
    yield
    responses = until(lambda: shop.pay("crash-before", body), is_final, earlier=[at_once])
    return seen(
        responses,
        words=f"dropped, {counted(responses)}",
        status_is_201=responses[-1].status_code == 201,
        ran_twice=executions(responses[-1]) == 2,
    )


@tour.scenario("the lost 201, replayed", rows=1)
def killed_after_commit(shop: Shop) -> Seen:
    """SIGKILL ends the worker just after its commit, before it sends the response. Payment and response are in the database,
    so the service replays the response to the retry."""
    body = PAYMENT | {"simulate": {"crash": "after_commit"}}
    with lost_connection():
        shop.pay("crash-after", body)
    response = shop.pay("crash-after", body)
    return seen(
        [response],
        words=f"dropped, {counted([response])}",
        status_is_201=response.status_code == 201,
        replayed=replayed(response),
        ran_once=executions(response) == 1,
    )


@tour.scenario("killed, started again: 12 payments", rows=INVOICES)
def paying_program(shop: Shop) -> Seen:
    """A program pays twelve invoices through flask_idempotency.client. The network loses every third reply, and SIGKILL ends
    the program after its fourth invoice. Started again, it reads its keys from its ledger and pays the rest."""
    with tempfile.TemporaryDirectory() as folder, LossyWire(shop.port) as wire:
        wire.lose_every(3)
        ledger = f"{folder}/intents.sqlite3"
        with shop.start_buyer(wire.url, ledger) as first:
            paid_first = list(islice(first.stdout or (), 4))
            first.kill()
        with shop.start_buyer(wire.url, ledger) as second:
            paid = list(second.stdout or ())
        with closing(Ledger(ledger)) as noted:
            unsettled = noted.unsettled()
        lost = wire.lost
    checks = {
        "the program was killed": first.returncode == -signal.SIGKILL and len(paid_first) == 4,
        "replies were lost": lost >= 4,
        "the second run paid all": second.returncode == 0 and len(paid) == INVOICES,
        "no intent is unsettled": not unsettled,
    }
    return Seen(f"{lost} dropped, {len(paid)} 201", "1", checks)


@tour.scenario("X-Idempotency-Replay: true", rows=1)
def x_idempotency(shop: Shop) -> Seen:
    """Invoices have another dialect: the client sends X-Idempotency-Key."""
    body = {"customer": "cus_1", "amount": 4200, "currency": "EUR"}
    responses = [shop.send("POST", "/api/invoices", "inv-1", body, header="X-Idempotency-Key") for _ in range(2)]
    return seen(
        responses,
        same_body=responses[0].content == responses[1].content,
        replayed=responses[1].headers.get("X-Idempotency-Replay") == "true",
        ran_once=executions(responses[1]) == 1,
    )


@tour.scenario("replayed; another amount: 409", rows=1)
def playbook(shop: Shop) -> Seen:
    """The gateway's clients put a new timestamp into every attempt. The service ignores that field when it compares."""

    def charge_gateway(amount: int, timestamp: int) -> httpx.Response:
        body = {"account_id": "acc_1", "amount": amount, "currency": "EUR", "timestamp": timestamp}
        return shop.send("POST", "/gateway/charges", "gw-1", body)

    first, again, other = charge_gateway(100, 1), charge_gateway(100, 2), charge_gateway(200, 3)
    return seen(
        [first, again, other],
        same_body=first.content == again.content,
        replayed=again.headers.get("X-Cache-Lookup") == "HIT",
        ran_once=executions(again) == 1,
        mismatch_is_409=other.status_code == 409,
        mismatch_has_its_code=member(other, "error_code") == "idempotency_payload_mismatch",
    )


@tour.scenario("replayed before and after", rows=1)
def wiped_valkey(shop: Shop) -> Seen:
    """FLUSHALL deletes every response in the cache. The database still has them."""
    responses = [shop.pay("wiped", PAYMENT) for _ in range(2)]
    deleted = shop.wipe_cache()
    responses.append(shop.pay("wiped", PAYMENT))
    words = f"{counted(responses)}; {deleted} deleted"
    return seen(responses, words=words, cache_had_entries=deleted > 0, paid_once=paid_once(responses))


@tour.scenario("201, then replayed", rows=1)
def silent_valkey(shop: Shop) -> Seen:
    """Valkey stops answering. It only holds copies of responses, and the database decides, so payments go on."""
    shop.cache.pause()
    try:
        responses = [shop.pay("silent", PAYMENT) for _ in range(2)]
    finally:
        shop.cache.resume()
    return seen(responses, paid_once=paid_once(responses))


@tour.scenario("one charge, one order, one mail", rows=1)
def checkout(shop: Shop) -> Seen:
    """Alice's checkout has four effects: it reserves stock, charges her card, writes an order and sends a mail. Each is a
    durable step."""
    return checked_out(shop, "checkout")


@tour.scenario("goes on after the charge", rows=1)
def killed_between_steps(shop: Shop) -> Parts:
    """SIGKILL ends the worker after the charge: the money is taken, and there is no order. The lease expires. The retry does
    not charge again. It writes the order and sends the mail."""
    return (yield from killed_checkout(shop, "checkout-between", step="behind_charge"))


@tour.scenario("goes on at the order", rows=2)
def killed_at_the_order(shop: Shop) -> Parts:
    """SIGKILL ends one worker just before it commits the order, and another one just after. The first retry writes the order,
    and the second one finds it."""
    kills = [killed_checkout(shop, f"checkout-{step}", step=step) for step in ("before_commit", "after_commit")]
    for kill in kills:
        next(kill)
    yield
    before, after = (yield from kills[0]), (yield from kills[1])
    checks = {
        f"{name} ({moment})": ok for moment, saw in (("1", before), ("2", after)) for name, ok in saw.checks.items()
    }
    words = f"{before.responses}; {after.responses}"
    return Seen(words, before.executions, checks, [*before.received, *after.received])


@janitor_tour.scenario("2 charges, both in doubt", rows=2)
def killed_while_answering(shop: Shop) -> Parts:
    """SIGKILL ends a worker just after it committed Alice's charge, and another after Carol's. A charge commits by itself, so
    the service cannot know. It refuses their retries until an operator has looked, and does not charge again."""
    for key, bearer in DOUBTFUL.items():
        with lost_connection():
            shop.charge(key, CHARGE | {"simulate[crash]": "after_commit"}, bearer=bearer)
    yield
    refused = [
        shop.charge(key, CHARGE | {"simulate[crash]": "after_commit"}, bearer=bearer)
        for key, bearer in DOUBTFUL.items()
    ]
    return seen(
        refused,
        words=f"dropped, {counted(refused)}",
        both_are_refused=[response.status_code for response in refused] == [409, 409],
    )


@janitor_tour.scenario("charge looked up, goes on", rows=1)
def killed_while_charging(shop: Shop) -> Parts:
    """SIGKILL ends the worker while it charges: the provider took the money, and the service does not know it. The service
    answers 409 until the janitor's resolver has looked the charge up at the provider. Then the retry does not charge again. It
    writes the order and sends the mail."""
    before = shop.providers.lookups()
    saw = yield from killed_checkout(shop, "checkout-charging", step="in_charge")
    checks = {**saw.checks, "the resolver looked it up": shop.providers.lookups() > before}
    return Seen(saw.responses, saw.executions, checks, saw.received)


@janitor_tour.scenario("resolved by the janitor, replayed", rows=1)
def reaped(shop: Shop) -> Parts:
    """SIGKILL ends a worker just after it charged through the gateway, and the client does not retry. The janitor finds the
    expired lease, and the gateway's resolver finds the charge."""
    body = {"account_id": "acc_1", "amount": 700, "currency": "EUR", "simulate": {"crash": "after_commit"}}
    with lost_connection():
        shop.send("POST", "/gateway/charges", "gw-lost", body)
    yield
    resolved = comes_true(lambda: shop.records("gateway.create", "processing", "quarantined") == 0)
    response = shop.send("POST", "/gateway/charges", "gw-lost", body)
    return seen(
        [response],
        words=f"dropped, {counted([response])}",
        janitor_resolved_it=resolved,
        status_is_201=response.status_code == 201,
        replayed=response.headers.get("X-Cache-Lookup") == "HIT",
        ran_once=executions(response) == 1,
    )


@janitor_tour.scenario("replayed, removed, runs again", rows=0)
def expired(shop: Shop) -> Parts:
    """The service keeps most responses for a day, and this one for two seconds. Then the janitor removes the record, and the
    same key runs again."""

    def ask(key: str) -> httpx.Response:
        return shop.send("POST", "/simulate/brief", key, {})

    deadline = time.monotonic() + PATIENCE_SECONDS
    for number in count(1):
        key, began = f"brief-{number}", time.monotonic()
        first, again = ask(key), ask(key)
        # On a busy machine the retry may come after those two seconds. That shows nothing, so try with another key.
        late = time.monotonic() - began > BRIEF_SECONDS
        if replayed(again) or not late or time.monotonic() > deadline:
            break
    yield
    removed = comes_true(lambda: shop.records("simulate.brief", "completed") == 0)
    last = ask(key)
    return seen(
        [first, again, last],
        words=f"{counted([first, again])}; then {counted([last])}",
        first_ran=not replayed(first),
        second_is_replayed=replayed(again),
        janitor_removed_it=removed,
        third_ran=not replayed(last),
        ran_twice=executions(last) == 2,
    )


@message_tour.scenario("booked once, reported once", rows=2)
def killed_consumer(shop: Shop) -> Parts:
    """SIGKILL ends the worker that books Alice's payment just before its commit, and the worker of the next payment just
    after. The broker delivers both messages again. Each payment has one ledger entry, and its company hears of it once."""
    responses = [
        shop.pay(f"booking-{moment}", PAYMENT | {"simulate": {"booking": moment}})
        for moment in ("before_commit", "after_commit")
    ]
    yield
    paid = sorted(response.json()["id"] for response in responses)
    # In this order: a booking commits together with the message that reports it.
    done = shop.messages() > 0 and comes_true(lambda: set(paid) <= set(shop.bookings()) and shop.is_quiet())
    return seen(
        responses,
        messages_were_handled=done,
        each_is_booked_once=[each for each in shop.bookings() if each in paid] == paid,
        each_is_reported_once=sorted(payment for payment, _ in shop.merchant.calls if payment in paid) == paid,
    )


@message_tour.scenario("all once: entries, calls", rows=0)
def sent_three_times(shop: Shop) -> Seen:
    """The relay forgets twice what it has sent, and sends each message of this tour again. No payment is booked again, and no
    company hears of one twice."""
    quiet, sent = comes_true(shop.is_quiet), 0
    for _ in range(2):
        sent += shop.forget_what_was_sent()
        quiet = comes_true(shop.is_quiet) and quiet
    paid, calls = shop.payments(), sorted(payment for payment, _ in shop.merchant.calls)
    checks = {
        "the messages were handled": quiet and sent > 0,
        "each payment is booked once": shop.bookings() == paid,
        "each company was called once for each payment": [each for each in calls if each in paid] == paid,
    }
    return Seen(f"{sent} sent again, {len(shop.bookings())} entries", "1", checks)


@operator_tour.scenario("settled: 200, replayed", rows=0)
def settled_by_an_operator(shop: Shop) -> Seen:
    """Dana, an operator, opens the console at /idempotency. Two charges are in doubt. She finds Alice's by its key. The bank
    has that charge, so she settles it: it happened. Alice's retry gets a response. Carol's charge still waits, for you."""
    with OperatorClient(shop, "dana", OPERATORS["dana"].password) as dana:
        waited = comes_true(lambda: shop.records("charges.create", "quarantined") == len(DOUBTFUL))
        search = dana.open(f"{CONSOLE}/records").link("/find")
        record = dana.send(dana.open(search).form("/find"), key="doubtful-1", tenant="acme", principal="alice")
        form = dana.open(record.link("/settle")).form("/settle")
        preview = dana.send(
            form,
            verdict="happened",
            status="200",
            content_type="application/json",
            body='{"object": "charge", "amount": 2500, "status": "succeeded"}',
            reason="The bank has the charge.",
        )
        dana.send(preview.form("/settle"), confirm="yes")
    response = shop.charge("doubtful-1", CHARGE | {"simulate[crash]": "after_commit"})
    return seen(
        [response],
        both_were_in_doubt=waited,
        status_is_200=response.status_code == 200,
        has_the_body=member(response, "amount") == 2500,
        replayed=response.headers.get("Idempotent-Replayed") == "true",
        ran_once=executions(response) == 1,
        the_other_waits=shop.records("charges.create", "quarantined") == len(DOUBTFUL) - 1,
    )


@operator_tour.scenario("each of 24 paid once", rows=BURST_ROUNDS * NEW_ROWS)
def busy_customers(shop: Shop) -> Seen:
    """Customers pay, send again, click twice and make mistakes, at every endpoint. The console counts what became of each
    request, as its charts show."""
    responses = [response for number in range(BURST_ROUNDS) for response in play(shop, number)]
    statuses = {response.status_code for response in responses}
    with OperatorClient(shop, "dana", OPERATORS["dana"].password) as dana:
        pages = [dana.open(f"{CONSOLE}/{page}") for page in ("", "records", "tenants", "endpoints", "health")]
    return seen(
        responses[:1],
        words=f"{len(responses)} requests",
        no_request_failed=max(statuses) < 500,
        every_page_opens=len(pages) == 5,
    )


@stripe_tour.scenario("one charge, after a retry", rows=1)
def stripe_lost_reply(shop: Shop) -> Seen:
    """The service makes the charge, and the network loses the response. Stripe's client retries with the same key."""
    with LossyWire(shop.port) as wire:
        wire.lose_next_reply()
        headers = charge(wire.url, amount=500, key="stripe-1")
        lost = wire.lost
    again, executed = headers.get("Idempotent-Replayed") == "true", headers.get("X-Executions", "?")
    checks = {"one response was lost": lost == 1, "replayed": again, "ran once": executed == "1"}
    return Seen(f"{lost} dropped, 200{' replayed' if again else ''}", executed, checks)


@stripe_tour.scenario("IdempotencyError", rows=0)
def stripe_key_reused(shop: Shop) -> Seen:
    """The client sends the same key for another amount. Stripe's client raises the same exception as against Stripe."""
    import stripe

    try:
        charge(shop.url, amount=999, key="stripe-1")
    except stripe.IdempotencyError as error:
        executed = (error.headers or {}).get("X-Executions", "?")
        return Seen(f"{error.http_status} {type(error).__name__}", executed, {})
    return Seen("200", "?", {"the client raised IdempotencyError": False})


def charge(url: str, *, amount: int, key: str) -> dict[str, str]:
    """Make a charge with Stripe's client. Return the headers of the response that it accepted."""
    import stripe

    client = stripe.StripeClient("tok_alice", base_addresses={"api": url}, max_network_retries=2)
    made = client.v1.charges.create(
        {"amount": amount, "currency": "eur", "source": "tok_visa"}, {"idempotency_key": key}
    )
    if made.last_response is None:
        raise AssertionError("the stripe client keeps no response")
    return dict(made.last_response.headers)


def killed_checkout(shop: Shop, key: str, *, step: str) -> Parts:
    """Check out, with a worker killed at this moment. After the `yield`, send the request until it is answered."""
    before = shop.providers.counts()
    with lost_connection():
        check_out(shop, key, step)
    at_once = check_out(shop, key, step)
    made = added(before, shop.providers.counts())
    yield
    return checked_out(shop, key, step=step, at_once=[at_once], made=made)


def checked_out(
    shop: Shop,
    key: str,
    *,
    step: str | None = None,
    at_once: Sequence[httpx.Response] = (),
    made: tuple[int, ...] = (0, 0, 0),
) -> Seen:
    """Check out. Count what the other companies have done since then, and add what they had `made` in an earlier attempt."""
    before = shop.providers.counts()
    responses = until(lambda: check_out(shop, key, step), is_final, earlier=at_once)
    again = check_out(shop, key, step)
    made = tuple(map(sum, zip(made, added(before, shop.providers.counts()), strict=True)))
    return seen(
        [*responses, again],
        words=("dropped, " if step else "") + f"{counted([*responses, again])}; charged {made[1]} ×",
        status_is_201=responses[-1].status_code == 201,
        then_replayed=replayed(again) and again.content == responses[-1].content,
        each_was_done_once=made == (1, 1, 1),
        attempts_are_as_expected=executions(again) == (2 if step else 1),
    )


def check_out(shop: Shop, key: str, step: str | None) -> httpx.Response:
    body = {"item": "tea", "card": "tok_visa"} | ({"simulate": {"step": step}} if step else {})
    return shop.send("POST", "/checkouts", key, body)


def added(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(number - earlier for number, earlier in zip(now, before, strict=True))


def paid_once(responses: list[httpx.Response]) -> bool:
    """Return True if the first response paid, and each other one is its replay."""
    first, *others = responses
    fresh = first.status_code == 201 and not replayed(first)
    same = all(replayed(other) and other.content == first.content for other in others)
    return fresh and same and {executions(response) for response in responses} == {1}


def another_payment(shop: Shop, bearer: str) -> Seen:
    alices, response = shop.pay(FIRST_KEY, PAYMENT), shop.pay(FIRST_KEY, PAYMENT, bearer=bearer)
    return seen(
        [response],
        status_is_201=response.status_code == 201,
        is_not_replayed=not replayed(response),
        is_another_payment=member(response, "id") != member(alices, "id"),
        ran_once=executions(response) == 1,
    )
