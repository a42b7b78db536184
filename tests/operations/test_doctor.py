"""The runner of `doctor`, and what each check of `operations/doctor.py` finds."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotency.codec.key_sources import load_ring
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.capabilities import DataKey, Finding, RecordPage, TenantKeys, Verdict
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, StoreUnavailable
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.step_rules import Step
from flask_idempotency.engine.tasks import TaskLog, TaskReport
from flask_idempotency.operations.admin import KeyStatus
from flask_idempotency.operations.doctor import (
    PATIENCE_SECONDS,
    RETRIED_SECONDS,
    after_loss,
    backlog,
    canary,
    clock_skew,
    clock_step,
    finish,
    gunicorn_timeout,
    janitor,
    keys,
    lapsed,
    lease,
    newest_key,
    proxy_timeout,
    quarantined,
    tasks,
    worker_timeout,
)
from flask_idempotency.operations.examination import REACHABLE, Check, Endpoint, Target, checks_of, examine
from flask_idempotency.operations.records import MOST_PAUSED
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token
from tests.operations.judging import worst
from tests.operations.memories import PARTS, Kept, Told, standing

FAULT, UNKNOWN, ADVICE, FINE = Verdict.FAULT, Verdict.UNKNOWN, Verdict.ADVICE, Verdict.FINE


def says(name: str, verdict: Verdict, *, asks_store: bool = False) -> Check:
    return Check(name, lambda: [Finding(name, verdict, "text")], asks_store=asks_store)


def fails(name: str, error: Exception) -> Check:
    def look() -> Iterable[Finding]:
        raise error

    return Check(name, look)


def there() -> None:
    """A store that answers."""


def away() -> None:
    raise StoreUnavailable("it is away")


def verdicts(findings: Iterable[Finding]) -> list[tuple[str, Verdict]]:
    return [(finding.check, finding.verdict) for finding in findings]


def test_findings_are_sorted_worst_first() -> None:
    checks = [says("a", FINE), says("b", ADVICE), says("c", FAULT), says("d", UNKNOWN), says("e", FAULT)]

    found = examine(checks, reach=there)

    expected = [("c", FAULT), ("e", FAULT), ("d", UNKNOWN), ("b", ADVICE), (REACHABLE, FINE), ("a", FINE)]
    assert expected == verdicts(found.findings)


def test_only_a_fault_makes_the_report_not_in_order() -> None:
    """What cannot be looked at from here would be out of order on every managed server for ever."""
    for verdict in (FINE, ADVICE, UNKNOWN, FAULT):
        found = examine([says("a", verdict)], reach=there)

        assert (verdict is not FAULT, True) == (found.in_order, found.complete)


def test_a_check_that_fails_is_unknown_and_hides_no_other() -> None:
    """By the class of its exception alone: its text may quote what nobody should read."""
    found = examine([fails("a", ZeroDivisionError("secret")), says("b", FAULT)], reach=there)

    assert [("b", FAULT), ("a", UNKNOWN), (REACHABLE, FINE)] == verdicts(found.findings)
    assert ("(ZeroDivisionError)" in found.findings[1].text, "secret" in str(found)) == (True, False)
    assert found.findings[1].remedy
    assert not found.complete


def test_a_configuration_error_is_a_fault_with_its_text() -> None:
    found = examine([fails("a", ConfigurationError("One. Do this.", "Two. Do that."))], reach=there)

    assert [("a", FAULT, "One. Do this."), ("a", FAULT, "Two. Do that.")] == [
        (each.check, each.verdict, each.text) for each in found.findings[:2]
    ]
    assert (True, False) == (found.complete, found.in_order)


def test_a_store_that_stops_answering_is_no_failure_of_the_check() -> None:
    found = examine([fails("a", StoreUnavailable("gone"))], reach=there)

    assert (False, True) == (found.complete, "the store did not answer" in found.findings[0].text)


def test_checks_that_ask_a_store_that_is_away_are_skipped() -> None:
    """Each question would wait for its timeout. What needs no store is looked at all the same."""
    asked: list[str] = []

    def ask() -> Iterable[Finding]:
        asked.append("asked")
        return []

    found = examine([Check("a", ask, asks_store=True), says("b", ADVICE)], reach=away)

    assert [(REACHABLE, FAULT), ("a", UNKNOWN), ("b", ADVICE)] == verdicts(found.findings)
    assert ([], False) == (asked, found.complete)
    assert all(finding.remedy for finding in found.findings[:2])


def test_a_store_that_raises_any_error_counts_as_away() -> None:
    def broken() -> None:
        raise OSError("postgresql://user:password@host")

    found = examine([], reach=broken)

    assert [(REACHABLE, FAULT)] == verdicts(found.findings)
    assert ("OSError" in found.findings[0].text, "password" in found.findings[0].text) == (True, False)


def test_a_store_that_refuses_its_server_says_why() -> None:
    """Such as MariaDB outside strict mode. The server runs, so nothing else helps."""

    def refused() -> None:
        raise ConfigurationError("sql_mode is not strict: set it")

    (finding,) = examine([], reach=refused).findings

    assert (REACHABLE, FAULT, "sql_mode is not strict: set it.") == (finding.check, finding.verdict, finding.text)
    assert finding.remedy.startswith("Do what this says")


def test_a_fault_that_several_checks_meet_is_one_fault() -> None:
    """Such as missing tables."""

    def refused() -> list[Finding]:
        raise ConfigurationError("no tables: make them")

    found = examine([Check("a", refused), Check("b", refused)], reach=lambda: None).findings

    assert [("a", FAULT), ("b", UNKNOWN)] == verdicts(found[:2])
    assert "the fault of `a`" in found[1].text


def test_a_check_that_lacks_a_module_names_it() -> None:
    def ask() -> list[Finding]:
        raise ModuleNotFoundError("No module named 'packaging'", name="packaging")

    finding, _ = examine([Check("celery", ask)], reach=lambda: None).findings

    assert (UNKNOWN, "Install the Python module packaging where this runs.") == (finding.verdict, finding.remedy)


@pytest.fixture
def bare() -> Target:
    """An application whose store has none of the optional parts."""
    return Target(
        health=None,
        task_log=None,
        recovery=None,
        responses=None,
        data_keys=None,
        data_loss=None,
        key_ring=None,
        encryption="off",
        process_local=False,
        heartbeat_interval=30.0,
        worker_timeout=None,
        proxy_timeout=None,
        lenient=False,
    )


def test_a_check_of_a_part_that_every_store_should_have_is_unknown_without_it(bare: Target) -> None:
    found = {
        check.name: list(check.look()) for check in checks_of(bare) if check.name in ("health", "lapsed", "janitor")
    }

    assert [Verdict.UNKNOWN] * 3 == [worst(findings) for findings in found.values()]
    assert ["`health`", "`task_log`", "`recovery`"] == [
        findings[0].text.split()[-1][:-1] for findings in found.values()
    ]


def test_a_check_of_a_part_that_few_stores_have_is_left_out_without_it(bare: Target) -> None:
    assert not {"canary", "after-loss", "newest-key", "keys"} & {check.name for check in checks_of(bare)}


# Clocks.


@pytest.fixture
def store(clock: FrozenClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def book(store: MemoryStore) -> TaskLog:
    return store.task_log


def looks(*times: float) -> Callable[[], float]:
    """A host's clock that says this at its first look, and at its next."""
    given: Iterator[float] = iter(times)
    return lambda: next(given)


def test_the_clock_skew_decides_the_verdict(book: TaskLog, clock: FrozenClock) -> None:
    for apart, verdict in ((0.9, FINE), (1.1, ADVICE), (29.9, ADVICE), (30.1, FAULT), (86400, FAULT)):
        for host in (clock.now - apart, clock.now + apart):
            assert verdict is worst(clock_skew(book, host_clock=looks(host, host))), apart


def test_the_text_says_which_clock_is_ahead(book: TaskLog, clock: FrozenClock) -> None:
    said = [clock_skew(book, host_clock=looks(host, host))[0].text for host in (clock.now - 5, clock.now + 5)]

    assert [True, True] == ["5.0 s ahead of" in said[0], "5.0 s behind" in said[1]]


def test_a_slow_store_has_no_clock_skew(book: TaskLog, clock: FrozenClock) -> None:
    """Its clock was read at some moment of this call, and which one nobody knows."""
    assert Verdict.FINE is worst(clock_skew(book, host_clock=looks(clock.now - 50, clock.now + 50)))


@pytest.mark.parametrize(
    ("report", "verdict"),
    (
        pytest.param(None, Verdict.FINE, id="no heartbeat"),
        pytest.param('{"skew_ms":9000,"stepped_ms":0}', Verdict.FINE, id="apart, and steady"),
        pytest.param('{"skew_ms":0,"stepped_ms":-900}', Verdict.FINE, id="a little"),
        pytest.param('{"skew_ms":0,"stepped_ms":1100}', Verdict.ADVICE, id="a second"),
        pytest.param('{"skew_ms":0,"stepped_ms":-40000}', Verdict.FAULT, id="more than a lease"),
        pytest.param('{"skew_ms":0}', Verdict.FINE, id="of another release"),
        pytest.param("[]", Verdict.FINE, id="something else"),
        pytest.param("{", Verdict.FINE, id="nothing that can be read"),
    ),
)
def test_a_clock_step_is_reported(report: str | None, verdict: Verdict, book: TaskLog) -> None:
    if report is not None:
        book.report("heartbeat", report)

    assert verdict is worst(clock_step(book))
    (finding,) = clock_step(book)
    assert (verdict is FINE) is ("Retries of the latter run again" not in finding.text)


# Data loss.

MISSING = standing(missing=PARTS, store_id=None)
LOSSES = (
    (standing(), "refuse", FINE),  # fine
    (standing(acknowledged=PARTS), "refuse", FINE),  # acknowledged
    (MISSING, "refuse", FAULT),  # missing
    (standing(missing=1), "refuse", FAULT),  # a part is missing
    (standing(changed=1), "refuse", FAULT),  # changed
    (standing(foreign=PARTS), "refuse", FAULT),  # foreign
    (standing(changed=1), "hold", FAULT),  # changed, held
    (standing(changed=1, hold=1.0), "hold", ADVICE),  # nobody has looked
    (MISSING, "run", FINE),  # whatever it is
    (standing(foreign=PARTS), "run", FAULT),  # but foreign
    (standing(blind=True), "refuse", UNKNOWN),  # not told which process
    (standing(blind=True, missing=1), "refuse", FAULT),  # which hides no other
)


def test_a_data_loss_is_a_fault_while_new_keys_are_refused() -> None:
    for how, rule, verdict in LOSSES:
        assert verdict is worst(canary(Kept(how, Told(after_loss=rule)))), (how, rule)


@pytest.mark.parametrize(
    ("rules", "lenient", "verdict"),
    (
        pytest.param({}, False, Verdict.FINE, id="named, and held for longer than a lease"),
        pytest.param({"store_id": None}, False, Verdict.ADVICE, id="any store will do"),
        pytest.param({"after_loss": "run"}, False, Verdict.ADVICE, id="run"),
        pytest.param({"after_loss": "run", "store_id": None}, True, Verdict.FINE, id="run, in debug mode"),
        pytest.param({"grace": 30.0}, False, Verdict.FINE, id="as long as a lease"),
        pytest.param({"grace": 29.0}, False, Verdict.ADVICE, id="acknowledged too early"),
        pytest.param({"grace": 29.0, "after_loss": "hold"}, False, Verdict.FAULT, id="by itself too early"),
    ),
)
def test_data_loss_settings_are_judged_by_their_effect(rules: dict[str, Any], lenient: bool, verdict: Verdict) -> None:
    endpoints = [Endpoint("pay", Policy(lease=30.0)), Endpoint("refund", Policy(lease=10.0))]

    assert verdict is worst(after_loss(Kept(standing(), Told(**rules)), endpoints, lenient=lenient))


def test_after_loss_names_the_store_and_the_endpoints() -> None:
    endpoints = [Endpoint("pay", Policy(lease=30.0)), Endpoint("refund", Policy(lease=10.0))]

    unnamed, hasty = after_loss(Kept(standing(), Told(store_id=None, grace=20.0)), endpoints, lenient=False)

    assert "IDEMPOTENCY_STORE_ID to shop." in unnamed.remedy
    assert [True, False] == [name in hasty.text for name in ("pay", "refund")]
    assert "IDEMPOTENCY_DATA_LOSS_GRACE to 30" in hasty.remedy


def test_without_a_store_id_the_remedy_names_redis_status() -> None:
    assert "redis status" in after_loss(Kept(MISSING, Told(store_id=None)), [], lenient=False)[0].remedy


# Encryption.

NEW = KeyStatus("new", 5, 1, newest=True, known=True)


def ring(*keys: KeyStatus) -> Any:
    """The part of a key ring that says which keys there are."""
    return SimpleNamespace(newest=keys[0].kid, kids=lambda: [key.kid for key in keys if key.known], unwrap=unwrap)


def unwrap(kid: str, wrapped: bytes, *, context: bytes) -> bytes:
    """Open the data keys of `stored`, but for those that are damaged, and those of a service that is away."""
    if wrapped == b"other":
        raise CorruptRecord("another key")
    if wrapped == b"away":
        raise TimeoutError
    return b"k" * 32


def stored(*keys: KeyStatus, plain: int = 0, data_keys: Sequence[bytes] = (b"ok",)) -> tuple[Any, Any]:
    """Responses and data keys of a store in these numbers."""
    return (
        SimpleNamespace(count=lambda: {**{key.kid: key.records for key in keys}, "": plain}),
        SimpleNamespace(
            count=lambda: {key.kid: key.data_keys for key in keys},
            sample=lambda kid, limit: [(b"t", DataKey(1, kid, wrapped)) for wrapped in data_keys][:limit],
            read_keys=lambda tid: TenantKeys(b"store"),
        ),
    )


def test_a_working_key_ring_is_fine() -> None:
    assert Verdict.FINE is worst(newest_key(load_ring({"a": b64encode(b"k" * 32).decode()}), *stored()))


class Broken(KeyRing):
    """A key service that has lost its newest key, or does not answer."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__({"a": b"k" * 32})
        self.error = error

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        if self.error is not None:
            raise self.error
        return b"something else"


@pytest.mark.parametrize(
    "error",
    (
        pytest.param(StoreUnavailable("away"), id="away"),
        pytest.param(PermissionError("arn:aws:kms:secret"), id="forbidden"),
        pytest.param(None, id="another key"),
    ),
)
def test_an_unusable_newest_key_is_a_fault(error: Exception | None) -> None:
    found = newest_key(Broken(error), *stored())

    assert Verdict.FAULT is worst(found)
    assert "arn:" not in found[0].text


def test_a_store_that_shows_no_sample_of_its_data_keys_is_judged_by_their_ids() -> None:
    responses, data_keys = stored(NEW)
    del data_keys.sample

    assert Verdict.FINE is worst(keys(ring(NEW), responses, data_keys, encryption="on"))


@pytest.mark.parametrize(
    ("data_keys", "verdict"),
    (
        ([b"ok"] * 9, Verdict.FINE),
        ([b"ok", b"other"], Verdict.FAULT),
        ([b"other"] * 50, Verdict.FAULT),
        ([b"away", b"other"], Verdict.FINE),  # `newest-key` reports a service that is away
    ),
)
def test_a_key_that_does_not_open_what_names_it_is_a_fault(data_keys: Sequence[bytes], verdict: Verdict) -> None:
    many = KeyStatus("new", 0, len(data_keys), newest=True, known=True)
    (found,) = keys(ring(many), *stored(many, data_keys=data_keys), encryption="on")

    assert verdict is found.verdict
    if verdict is Verdict.FAULT:
        assert f"{'1 of 2' if len(data_keys) == 2 else '10 of 10'} under new" in found.text


@pytest.mark.parametrize(
    ("others", "plain", "required", "verdict"),
    (
        pytest.param((), 0, True, Verdict.FINE, id="one key"),
        pytest.param((KeyStatus("old", 0, 0, newest=False, known=True),), 0, True, Verdict.FINE, id="a spare one"),
        pytest.param((KeyStatus("old", 1, 0, newest=False, known=True),), 0, False, Verdict.ADVICE, id="an old record"),
        pytest.param(
            (KeyStatus("old", 0, 1, newest=False, known=True),), 0, False, Verdict.ADVICE, id="an old data key"
        ),
        pytest.param((KeyStatus("lost", 1, 0, newest=False, known=False),), 0, False, Verdict.FAULT, id="a lost key"),
        pytest.param((), 3, False, Verdict.ADVICE, id="plain ones, which open"),
        pytest.param((), 3, True, Verdict.FAULT, id="plain ones, which are refused"),
    ),
)
def test_the_key_status_decides_the_verdict(
    others: tuple[KeyStatus, ...], plain: int, required: bool, verdict: Verdict
) -> None:
    assert verdict is worst(
        keys(ring(NEW, *others), *stored(NEW, *others, plain=plain), encryption="required" if required else "on")
    )


@pytest.mark.parametrize(("required", "first"), ((True, "Find out who stored them"), (False, "Wait until they expire")))
def test_the_remedy_for_plain_responses_is_never_a_rotation(required: bool, first: str) -> None:
    """A rotation goes on by itself. To seal a planted answer makes it genuine, so a person has to decide that."""
    (found,) = keys(ring(NEW), *stored(NEW, plain=3), encryption="required" if required else "on")

    assert (True, True) == (found.text.startswith("3 stored responses"), found.remedy.startswith(first))
    assert ("rotate" in found.remedy, "flask idempotency seal" in found.remedy) == (False, True)
    assert required is ("planted" in found.text)


# The janitor.


def log(reports: Mapping[str, TaskReport]) -> Any:
    """A task log with these reports."""
    return SimpleNamespace(reports=lambda: reports)


def beating(seconds: float) -> dict[str, TaskReport]:
    """The heartbeat of a janitor that began so long ago."""
    return {"heartbeat": TaskReport(1.0, json.dumps({"beating_s": round(seconds) - 1}))}


DONE, CUT = '{"removed":1,"finished":true}', '{"removed":1,"finished":false}'


@pytest.mark.parametrize(
    ("last", "verdict"),
    (
        pytest.param({}, Verdict.FAULT, id="never"),
        pytest.param({"heartbeat": TaskReport(59.0, "{}")}, Verdict.FINE, id="lately"),
        pytest.param({"heartbeat": TaskReport(61.0, "{}")}, Verdict.FAULT, id="long ago"),
        pytest.param({"heartbeat": TaskReport(9e9, "{}"), "expire": TaskReport(5.0, "{}")}, Verdict.FINE, id="by cron"),
        pytest.param({"relay": TaskReport(1.0, "{}")}, Verdict.FAULT, id="a relay is no janitor"),
        pytest.param(
            {"relay": TaskReport(1.0, "{}"), "reap": TaskReport(61.0, "{}")}, Verdict.FAULT, id="beside a relay"
        ),
    ),
)
def test_a_janitor_is_missed_after_two_intervals(last: dict[str, TaskReport], verdict: Verdict) -> None:
    assert verdict is worst(janitor(log(last), heartbeat_interval=30.0))


def test_no_janitor_is_missed_if_none_is_expected() -> None:
    assert Verdict.FINE is worst(janitor(log({}), heartbeat_interval=None))


@pytest.mark.parametrize(
    ("last", "verdict"),
    (
        pytest.param({"expire": TaskReport(179.0, DONE), "rotate": TaskReport(9.0, DONE)}, Verdict.FINE, id="in time"),
        pytest.param({"expire": TaskReport(181.0, DONE), "rotate": TaskReport(9.0, DONE)}, Verdict.FAULT, id="late"),
        pytest.param({"rotate": TaskReport(9.0, DONE)}, Verdict.FAULT, id="never, though due every minute"),
        pytest.param({"expire": TaskReport(9.0, DONE)}, Verdict.FAULT, id="never, by cron, which has no heartbeat"),
        pytest.param({"expire": TaskReport(9.0, DONE), **beating(3 * 86400)}, Verdict.FINE, id="never, and due today"),
        pytest.param({"expire": TaskReport(9.0, DONE), **beating(3 * 86401)}, Verdict.FAULT, id="never in three days"),
        pytest.param({**beating(170)}, Verdict.FINE, id="none yet, of a janitor that starts"),
        pytest.param({**beating(181)}, Verdict.FAULT, id="none, of a janitor that runs"),
        pytest.param({}, Verdict.FINE, id="no janitor at all is another check's"),
        pytest.param({"relay": TaskReport(9.0, DONE)}, Verdict.FINE, id="nor beside a relay"),
    ),
)
def test_a_late_task_is_reported(last: dict[str, TaskReport], verdict: Verdict) -> None:
    assert verdict is worst(tasks(log(last), {"expire": 60.0, "rotate": 86400.0}, heartbeat_interval=30.0))


def test_each_task_has_its_own_age() -> None:
    """One that runs hides none that does not."""
    last = {"reap": TaskReport(1.0, DONE), "expire": TaskReport(500.0, DONE), **beating(9e5)}
    every = {"reap": 10.0, "expire": 60.0, "rotate": 86400.0, "relay": 5.0, "finish": 15.0}
    found = tasks(log(last), every, heartbeat_interval=30.0)

    assert [
        (FAULT, "The task expire is due every 1 min, and last ran 8 min 20 s ago."),
        (FAULT, "The task rotate is due every 1 d, and never ran."),
        (FAULT, "The task relay is due every 5 s, and never ran."),
    ] == [(each.verdict, each.text) for each in found]
    assert "`flask idempotency relay --once`" in found[2].remedy
    assert [FAULT] == [each.verdict for each in tasks(log({}), {"relay": 5.0}, heartbeat_interval=30.0)]


@pytest.mark.parametrize(("ago", "verdict"), ((119.0, Verdict.FINE), (121.0, Verdict.FAULT)))
def test_a_task_is_not_late_before_the_janitor_is(ago: float, verdict: Verdict) -> None:
    """Who reaps by cron, once a minute, need not be told that ten seconds were the default."""
    assert verdict is worst(tasks(log({"reap": TaskReport(ago, DONE)}), {"reap": 10.0}, heartbeat_interval=60.0))


def test_a_task_without_a_schedule_is_not_missed() -> None:
    assert Verdict.FINE is worst(tasks(log({"expire": TaskReport(9e9, DONE)}), {}, heartbeat_interval=30.0))


@pytest.mark.parametrize(
    ("last", "every", "verdict"),
    (
        pytest.param({}, {"finish": 15.0}, FAULT, id="never"),
        pytest.param({"reap": TaskReport(1.0, DONE)}, {}, FAULT, id="never, as beat leaves it out"),
        pytest.param({"finish": TaskReport(59.0, DONE)}, {"finish": 15.0}, FINE, id="in time"),
        pytest.param({"finish": TaskReport(61.0, DONE)}, {"finish": 15.0}, FAULT, id="late"),
        pytest.param({"finish": TaskReport(599.0, DONE)}, {"finish": 200.0}, FINE, id="in time, every 200 s"),
        pytest.param({"finish": TaskReport(601.0, DONE)}, {"finish": 200.0}, FAULT, id="late, every 200 s"),
    ),
)
def test_an_endpoint_that_the_janitor_does_not_finish_is_reported(
    last: dict[str, TaskReport], every: dict[str, float], verdict: Verdict
) -> None:
    """Also if the application expects no janitor."""
    at = [endpoint("checkout", effects="steps", finish="janitor")]

    assert verdict is worst(finish(log(last), at, every, heartbeat_interval=30.0))
    assert (verdict is FAULT) is ("checkout" in finish(log(last), at, every)[0].text)
    assert FINE is worst(finish(log(last), [endpoint()], every))
    assert FINE is worst(finish(log(last), at, every, process_local=True))
    assert FINE is worst(tasks(log({"finish": TaskReport(9e9, DONE)}), {"finish": 15.0}, heartbeat_interval=30.0))


@pytest.mark.parametrize(
    ("last", "verdict"),
    (
        pytest.param({}, Verdict.FINE, id="nothing"),
        pytest.param({"expire": TaskReport(1.0, DONE)}, Verdict.FINE, id="to its end"),
        pytest.param({"expire": TaskReport(1.0, CUT)}, Verdict.ADVICE, id="cut short"),
        pytest.param({"reap": TaskReport(1.0, CUT), "expire": TaskReport(1.0, DONE)}, Verdict.ADVICE, id="one of two"),
        pytest.param({"expire": TaskReport(1.0, "?")}, Verdict.FINE, id="of another release"),
    ),
)
def test_a_run_that_its_budget_ended_is_a_backlog(last: dict[str, TaskReport], verdict: Verdict) -> None:
    assert verdict is worst(backlog(log(last), heartbeat_interval=30.0))


def test_the_backlog_of_expire_names_its_rate() -> None:
    said = [
        backlog(log({task: TaskReport(1.0, CUT)}), heartbeat_interval=30.0)[0].remedy for task in ("expire", "reap")
    ]

    assert [True, False] == ["IDEMPOTENCY_EXPIRE_RATE" in remedy for remedy in said]


# Timeouts and leases.


def endpoint(name: str = "pay", **policy: Any) -> Endpoint:
    return Endpoint(name, Policy(**policy))


COMMAND_LINES = (
    ("", None),
    ("--bind 0.0.0.0:80", None),
    ("--timeout 45", 45.0),
    ("--timeout=45 --workers 2", 45.0),
    ("-w 2 -t 45", 45.0),
    ("-t45", 45.0),
    ("-t 0", inf),
    ("-t 45 -k sync", 45.0),
    ("-t 45 --threads 1", 45.0),
    ("-t 45 --threads 8", inf),
    ("-t 45 -k gthread", inf),
    ("--worker-class=gevent -t 45", inf),
    ("-t soon", None),
    ("-t", None),
    ("--timeout '45", None),
)


def test_the_worker_timeout_is_read_from_gunicorns_arguments() -> None:
    """Only a worker that does one thing at a time is taken for dead while it does it; 0 is never."""
    for command_line, seconds in COMMAND_LINES:
        assert seconds == gunicorn_timeout(command_line), command_line


def test_a_worker_timeout_below_max_runtime_is_a_fault_if_outcomes_become_unknown() -> None:
    for effects in ("plain", "marked"):
        found = worker_timeout([endpoint(effects=effects, max_runtime=60.0)], {}, worker_timeout=30.0)

        assert FAULT is worst(found)
        assert all(text in found[0].text for text in ("30 s", "60 s", "pay"))
    for effects in ("deduplicated", "transactional"):
        assert ADVICE is worst(worker_timeout([endpoint(effects=effects)], {}, worker_timeout=30.0))


@pytest.mark.parametrize(
    ("step", "verdict"),
    ((Step("charge"), Verdict.FAULT), (Step("mail", effects="deduplicated"), Verdict.ADVICE)),
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_worker_timeout_below_max_runtime_is_a_fault_if_a_step_may_be_in_doubt(step: Step, verdict: Verdict) -> None:
    policy = Policy(effects="steps", steps=(step,))

    assert verdict is worst(worker_timeout([Endpoint("pay", policy)], {"pay": 60.0}, worker_timeout=30.0))


@pytest.mark.parametrize(
    ("ran", "verdict"),
    (({}, Verdict.ADVICE), ({"pay": 5.0, "other": 60.0}, Verdict.ADVICE), ({"pay": 30.0}, Verdict.FAULT)),
    ids=("unknown", "quick", "measured"),
)
def test_gunicorns_default_is_advice_for_views_that_end_in_seconds(ran: dict[str, float], verdict: Verdict) -> None:
    """Every newcomer has it, and the default of `max_runtime` says nothing of a view."""
    (found,) = worker_timeout([endpoint()], ran, worker_timeout=30.0)

    assert (verdict, verdict is Verdict.ADVICE) == (found.verdict, "None is known to run for so long." in found.text)


def test_a_worker_timeout_above_max_runtime_is_fine() -> None:
    for seconds in (60.0, inf):
        assert FINE is worst(worker_timeout([endpoint(max_runtime=60.0)], {}, worker_timeout=seconds))


def test_a_timeout_that_is_not_configured_is_unknown() -> None:
    assert Verdict.UNKNOWN is worst(worker_timeout([endpoint()], {}, worker_timeout=None))
    assert Verdict.UNKNOWN is worst(proxy_timeout([endpoint(in_flight="wait")], proxy_timeout=None))


def test_a_finding_names_only_the_first_endpoints() -> None:
    every = [endpoint(f"pay{number}") for number in range(8)]

    assert "pay0, pay1, pay2, pay3, pay4 and 3 more." in worker_timeout(every, {}, worker_timeout=1.0)[0].text


def test_a_proxy_timeout_must_exceed_the_wait_of_a_duplicate() -> None:
    """Else its caller gets a 504 of the proxy. If no duplicate waits, any is fine, known or not."""
    for seconds, verdict in ((10.0, ADVICE), (10.1, FINE), (inf, FINE)):
        assert verdict is worst(proxy_timeout([endpoint(in_flight="wait", wait=10.0)], proxy_timeout=seconds))
    for any_seconds in (1.0, None):
        assert FINE is worst(proxy_timeout([endpoint(wait=10.0)], proxy_timeout=any_seconds))


def test_a_lease_below_six_seconds_is_advised_against() -> None:
    assert [ADVICE, FINE] == [worst(lease([endpoint(lease=seconds)])) for seconds in (5.9, 6.0)]


# Keys that wait.


def claim(store: MemoryStore, on_expiry: OnExpiry = OnExpiry.QUARANTINE) -> None:
    store.claim(a_request(a_key(), on_expiry=on_expiry), token=a_token(), lease=LEASE)


def test_quarantined_keys_are_counted_with_their_age(store: MemoryStore, clock: FrozenClock) -> None:
    key, token = a_key(), a_token()
    store.claim(a_request(key), token=token, lease=LEASE)
    store.quarantine(key, token, "test")
    clock.advance(LEASE + 7200)

    found = quarantined(store.recovery)

    assert Verdict.ADVICE is worst(found)
    assert "1 key is quarantined, the first for 2 h" in found[0].text


def test_no_quarantined_key_is_fine(store: MemoryStore, clock: FrozenClock) -> None:
    claim(store)
    before = quarantined(store.recovery)
    clock.advance(LEASE + 1)

    assert [Verdict.FINE, Verdict.FINE] == [worst(before), worst(quarantined(store.recovery))]


def looked(store: MemoryStore) -> list[Finding]:
    return lapsed(store.recovery, store.task_log)


@pytest.mark.parametrize(
    ("on_expiry", "since", "verdict"),
    (
        pytest.param(OnExpiry.QUARANTINE, -1, Verdict.FINE, id="at work"),
        pytest.param(OnExpiry.QUARANTINE, PATIENCE_SECONDS - 1, Verdict.FINE, id="the janitor's turn is to come"),
        pytest.param(OnExpiry.QUARANTINE, PATIENCE_SECONDS + 1, Verdict.FAULT, id="no janitor came"),
        pytest.param(OnExpiry.TAKEOVER, RETRIED_SECONDS - 1, Verdict.FINE, id="a retry may come"),
        pytest.param(OnExpiry.TAKEOVER, RETRIED_SECONDS + 1, Verdict.ADVICE, id="no retry came"),
    ),
)
def test_an_expired_lease_is_reported_once_it_is_overdue(
    on_expiry: OnExpiry, since: float, verdict: Verdict, store: MemoryStore, clock: FrozenClock
) -> None:
    claim(store, on_expiry)
    clock.advance(LEASE + since)

    assert verdict is worst(looked(store))


def test_overdue_and_forgotten_leases_are_two_findings(store: MemoryStore, clock: FrozenClock) -> None:
    claim(store, OnExpiry.QUARANTINE)
    claim(store, OnExpiry.TAKEOVER)
    claim(store, OnExpiry.TAKEOVER)
    clock.advance(LEASE + RETRIED_SECONDS + 1)

    found = looked(store)

    assert [(Verdict.FAULT, "1 key is"), (Verdict.ADVICE, "2 keys are")] == [
        (finding.verdict, finding.text[: finding.text.index(" w")]) for finding in found
    ]


def test_the_search_for_expired_leases_is_bounded(
    store: MemoryStore, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sheets are not the last ones, and a million records are no reason to wait for a minute."""
    sheets: list[int] = []

    def stale(*, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        sheets.append(limit)
        return RecordPage((), after=b"more")

    monkeypatch.setattr(store.recovery, "expired_leases", stale)

    assert Verdict.FINE is worst(looked(store))
    assert MOST_PAUSED == sum(sheets)
