"""Former identities by extensions: only the setting that `doctor` and the log prescribe makes the retry replay."""

from __future__ import annotations

import logging
import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from flask import Flask, request
from flask_httpauth import HTTPBasicAuth  # type: ignore[import-untyped]
from flask_jwt_extended import JWTManager
from flask_login import LoginManager, current_user  # type: ignore[import-untyped]
from flask_principal import Identity, Principal  # type: ignore[import-untyped]

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.extension import Idempotency
from flask_idempotency.web.monitors import AGAIN_SECONDS
from tests.apps import World, is_replay, new_world
from tests.web.test_former_identity import doctor
from tests.web.test_principals import KEY, User, basic, signed_in, token

LOGIN, JWT, HTTPAUTH, PRINCIPAL = "Flask-Login", "Flask-JWT-Extended", "Flask-HTTPAuth", "Flask-Principal"


class Account:
    def __init__(self, name: str) -> None:
        self.id = f"account {name}"


def loader() -> str | None:
    """The new release names every caller with credentials."""
    return None if not {"Cookie", "Authorization", "X-User"} & set(request.headers.keys()) else "u:alice"


def release(
    before: World | None = None,
    *extensions: str,
    named: Callable[[], str | None] | None = None,
    tenant: Callable[[], str | None] | None = None,
    verified: Callable[[str], Any] = str,
    **settings: Any,
) -> World:
    """A release of the shop, with these extensions, over the store of the one before."""
    app = Flask("shop")
    app.config.update(SECRET_KEY=KEY, JWT_SECRET_KEY=KEY)
    if LOGIN in extensions:
        LoginManager(app).user_loader(User)
    if JWT in extensions:
        JWTManager(app)
    if HTTPAUTH in extensions:
        auth = HTTPBasicAuth()
        auth.verify_password(lambda name, _: verified(name) if name else None)
        app.before_request(auth.login_required(optional=True)(lambda: None))
    if PRINCIPAL in extensions:
        Principal(app, use_sessions=False).identity_loader(
            lambda: Identity(request.headers["X-User"]) if "X-User" in request.headers else None
        )
    world = new_world(app, principal=named, init=False, store=None if before is None else before.store, **settings)
    if before is not None:
        world.clock, world.runs = before.clock, before.runs
    if tenant is not None:
        world.idempotency.tenant_loader(tenant)
    world.idempotency.init_app(app)

    @world.view()
    def pay() -> tuple[dict[str, Any], int]:
        world.runs.append(1)
        return {"n": len(world.runs)}, 201

    return world


def prescribed(text: str) -> Any:
    """Return the setting that a remedy names."""
    found = re.search(r"set IDEMPOTENCY_FORMER_IDENTITY to (\{.*?\})", text)
    assert found, text
    return literal_eval(found[1])


def credentials(*kinds: str) -> dict[str, str]:
    app = release(None, JWT, LOGIN).app
    headers: dict[str, str] = {}
    for kind in kinds:
        headers |= {
            LOGIN: lambda: signed_in(app, "alice"),
            JWT: lambda: token(app, "alice"),
            HTTPAUTH: lambda: basic("alice"),
            PRINCIPAL: lambda: {"X-User": "alice"},
        }[kind]()
    return headers


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        yield lambda: "\n".join(each.getMessage() for each in caplog.records if "identity" in each.getMessage().lower())


def stats(world: World) -> str:
    return str(world.app.test_cli_runner().invoke(args=["idempotency", "stats"]).output)


Transition = tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], tuple[str, ...], Any]
BY_LOADER: dict[str, Any] = {"named": loader}
TRANSITIONS: dict[str, Transition] = {
    # extensions before, extensions after, settings after, credentials, what is prescribed
    "login to loader": ((LOGIN,), (LOGIN,), BY_LOADER, (LOGIN,), {"principal": LOGIN}),
    "jwt to loader": ((JWT,), (JWT,), BY_LOADER, (JWT,), {"principal": JWT}),
    "httpauth to loader": ((HTTPAUTH,), (HTTPAUTH,), BY_LOADER, (HTTPAUTH,), {"principal": HTTPAUTH}),
    "httpauth's users to loader": (
        (HTTPAUTH,),
        (HTTPAUTH,),
        {**BY_LOADER, "verified": Account},
        (HTTPAUTH,),
        {"principal": HTTPAUTH},
    ),
    "principal to loader": ((PRINCIPAL,), (PRINCIPAL,), BY_LOADER, (PRINCIPAL,), {"principal": PRINCIPAL}),
    "two to loader, by the first": ((JWT, LOGIN), (JWT, LOGIN), BY_LOADER, (JWT, LOGIN), {"principal": [JWT, LOGIN]}),
    "two to loader, by the second": ((JWT, LOGIN), (JWT, LOGIN), BY_LOADER, (LOGIN,), {"principal": [JWT, LOGIN]}),
    "httpauth and login to loader": (
        (HTTPAUTH, LOGIN),
        (HTTPAUTH, LOGIN),
        BY_LOADER,
        (HTTPAUTH, LOGIN),
        {"principal": [HTTPAUTH, LOGIN]},
    ),
    "nothing to loader": ((), (), {"named": lambda: "u:alice"}, (), {"principal": False}),
    "nothing to login": ((), (LOGIN,), {}, (LOGIN,), {"principal": False}),
    "login to jwt before it": ((LOGIN,), (LOGIN, JWT), {}, (LOGIN, JWT), {"principal": LOGIN}),
    "principal to jwt before it": ((PRINCIPAL,), (PRINCIPAL, JWT), {}, (PRINCIPAL, JWT), {"principal": PRINCIPAL}),
    "login to loader and namespace": (
        (LOGIN,),
        (LOGIN,),
        {**BY_LOADER, "namespace": "new"},
        (LOGIN,),
        {"namespace": "shop", "principal": LOGIN},
    ),
    "login to loader and tenant": (
        (LOGIN,),
        (LOGIN,),
        {**BY_LOADER, "tenant": lambda: "acme"},
        (LOGIN,),
        {"tenant": False, "principal": LOGIN},
    ),
}


@pytest.mark.parametrize(("old", "new", "settings", "sent", "setting"), TRANSITIONS.values(), ids=TRANSITIONS)
def test_the_prescribed_setting_makes_the_retry_replay(
    old: tuple[str, ...],
    new: tuple[str, ...],
    settings: dict[str, Any],
    sent: tuple[str, ...],
    setting: Any,
    log: Callable[[], str],
) -> None:
    """`doctor`, `stats` and the log say the same; with the setting they are silent, and nothing is paid twice."""
    verified = settings.get("verified", str)
    first = release(None, *old, verified=verified)
    headers = credentials(*sent)
    before = headers if old else {}
    answer = first.post(headers=before)
    assert 201 == answer.status_code, answer.text

    second = release(first, *new, **settings)
    verdict, text = doctor(second)[0]
    assert verdict == ("advice" if set(old) and set(old) < set(new) else "fault")
    second.post(key="another", headers=headers)
    for said in (text, log(), stats(second)):
        assert setting == prescribed(said.replace("the former one", '"shop"'))
    assert 1 == log().count("identity of keys has changed")

    third = release(first, *new, former_identity=setting, **settings)
    retry = third.post(headers=headers)
    assert (True, answer.json) == (is_replay(retry), retry.json), retry.text
    assert [1, 1] == first.runs
    assert 201 == third.post(key="2", headers=headers).status_code
    assert is_replay(first.post(key="2", headers=before))
    verdict, text = doctor(third)[0]
    assert ("advice", True) == (verdict, "Remove it after" in text)
    assert "identity" not in stats(third)
    assert 1 == log().count("identity of keys has changed")


WRONG = "does not match the history in the store"


@pytest.mark.parametrize(
    "wrong",
    (
        {"principal": False},
        {"principal": JWT},
        {"principal": [HTTPAUTH]},
        {"namespace": "other"},
        {"namespace": "other", "principal": LOGIN},
        {"tenant": False},
    ),
    ids=str,
)
def test_a_wrong_former_identity_is_a_fault(wrong: dict[str, Any], log: Callable[[], str]) -> None:
    """The retry runs again. `doctor` still names the right setting, and no end for the wrong one."""
    first = release(None, LOGIN)
    headers = credentials(LOGIN)
    first.post(headers=headers)

    second = release(first, LOGIN, named=loader, former_identity=wrong)
    ((verdict, text),) = doctor(second)
    assert "fault" == verdict
    assert not is_replay(second.post(headers=headers))
    for said in (text, log(), stats(second)):
        assert {"principal": LOGIN} == prescribed(said)
        assert WRONG in said
    assert [1, 1] == first.runs


def test_a_half_configured_former_identity_is_a_fault() -> None:
    first = release(None, LOGIN)
    headers = credentials(LOGIN)
    first.post(headers=headers)

    for half in ({"namespace": "shop"}, {"principal": LOGIN}, {"namespace": "shop", "principal": False}):
        second = release(first, LOGIN, named=loader, namespace="new", former_identity=half)
        assert "fault" == doctor(second)[0][0]
    whole = {"namespace": "shop", "principal": LOGIN}
    assert is_replay(release(first, LOGIN, named=loader, namespace="new", former_identity=whole).post(headers=headers))


@pytest.mark.parametrize("wrong", ({"principal": False}, {"principal": LOGIN}), ids=str)
def test_a_loader_that_replaced_a_loader_was_no_extension(wrong: dict[str, Any], log: Callable[[], str]) -> None:
    """`doctor` cannot see that one function replaced another. It does see that the setting names something else."""
    first = release(None, LOGIN, named=loader)
    first.post(headers=credentials(LOGIN))
    second = release(first, LOGIN, named=lambda: "other", former_identity=wrong)

    ((verdict, text),) = doctor(second)
    assert ("fault", True) == (verdict, WRONG in text)
    second.post(key="2")
    assert WRONG in stats(second)

    right = release(first, LOGIN, named=lambda: "other", former_identity={"principal": loader})
    assert "advice" == doctor(right)[0][0]
    assert is_replay(right.post(headers=credentials(LOGIN)))


def test_doctor_accepts_a_function_and_reports_it(log: Callable[[], str]) -> None:
    """`doctor` reports that it cannot verify the result, and until when the function is needed."""
    first = release(None, LOGIN)
    headers = credentials(LOGIN)
    first.post(headers=headers)
    second = release(first, LOGIN, named=loader, former_identity={"principal": lambda: current_user.get_id()})

    assert is_replay(second.post(headers=headers))
    ((verdict, text),) = doctor(second)
    assert "advice" == verdict
    assert "cannot be verified" in text
    assert "Remove it after" in text
    assert not log()


@pytest.mark.parametrize(
    ("new", "now"), (((), "now they have no name"), ((LOGIN,), "now they are named by Flask-Login")), ids=str
)
def test_a_removed_loader_is_prescribed_itself(new: tuple[str, ...], now: str, log: Callable[[], str]) -> None:
    headers = credentials(LOGIN)
    first = release(None, LOGIN, named=loader)
    first.post(headers=headers)
    second = release(first, *new, allow_anonymous=True)
    verdict, text = doctor(second)[0]
    assert "fault" == verdict
    second.post(key="2", headers=headers)
    for said in (text, log(), stats(second)):
        assert now in said
        assert 'to {"principal": the former loader}' in said

    for wrong in ({"principal": False}, {"principal": LOGIN}):
        assert "fault" == doctor(release(first, *new, allow_anonymous=True, former_identity=wrong))[0][0]
    third = release(first, *new, allow_anonymous=True, former_identity={"principal": loader})
    assert is_replay(third.post(headers=headers))


def test_an_extension_that_is_gone_names_no_caller() -> None:
    """It must stay installed, or a function must replace it."""
    first = release(None, LOGIN)
    first.post(headers=credentials(LOGIN))
    second = release(first, named=loader, former_identity={"principal": LOGIN})

    verdict, text = doctor(second)[0]
    assert ("fault", True) == (verdict, "Keep Flask-Login set up until then" in text)
    assert 201 == second.post(headers=credentials(LOGIN)).status_code


def test_flask_httpauth_is_noted_if_it_names_its_first_caller_while_another_request_looks() -> None:
    """The store takes the note of one of the two."""
    first = release(None, HTTPAUTH)
    monitor, now = first.app.extensions["idempotency"].hooks._identity, 100.0
    monitor.monotonic, reports = lambda: now, monitor.task_log.reports

    def another() -> Any:
        monitor.note_httpauth()
        return reports()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor.task_log, "reports", another)
        monitor.look()
    now += AGAIN_SECONDS
    monitor.look()

    assert {"principal": HTTPAUTH} == prescribed(doctor(release(first, HTTPAUTH, named=loader))[0][1])


def test_flask_httpauth_is_noted_once_it_has_named_a_caller() -> None:
    """The application does not show that it uses it. The first requests may be anonymous."""
    first = release(None, HTTPAUTH)
    first.post(key="0")
    assert "had no name" in doctor(release(first, HTTPAUTH, named=loader))[0][1]
    answer = first.post(headers=credentials(HTTPAUTH))
    again = release(first, HTTPAUTH)
    again.post(key="2")
    first.clock.advance(3700)
    again.post(key="3")
    release(first, HTTPAUTH).post(key="4")

    assert "fine" == doctor(release(first, HTTPAUTH))[0][0]
    text = doctor(release(first, HTTPAUTH, named=loader))[0][1]
    assert {"principal": HTTPAUTH} == prescribed(text)
    third = release(first, HTTPAUTH, named=loader, former_identity={"principal": HTTPAUTH})
    assert answer.json == third.post(headers=credentials(HTTPAUTH)).json


def test_a_token_that_is_not_of_flask_jwt_extended_named_no_caller() -> None:
    """Clients of the new release may send other tokens. An expired one named its caller, and is refused."""
    former = release(None, JWT)
    second = release(former, JWT, named=loader, former_identity={"principal": JWT})

    assert 201 == second.post(headers={"Authorization": "Bearer opaque"}).status_code
    expired = token(former.app, "alice", expires_delta=timedelta(seconds=-1))
    assert 401 == second.post(key="2", headers=expired).status_code
    assert 1 == len(second.runs)


def test_former_names_of_extensions_are_those_of_the_caller() -> None:
    """Another caller with the same key gets no response of theirs, and one without a name is claimed once."""
    first = release(None, LOGIN)
    alice, bob = (signed_in(first.app, name) for name in ("alice", "bob"))
    first.post(headers=alice)

    def named() -> str | None:
        return f"u{current_user.get_id()}" if current_user.is_authenticated else None

    second = release(first, LOGIN, named=named, former_identity={"principal": LOGIN})

    assert is_replay(second.post(headers=alice))
    assert not is_replay(second.post(headers=bob))
    assert is_replay(second.post(headers=bob))
    before = len(second.store.calls)
    second.post(key="3")
    assert ["claim", "complete"] == [call.verb for call in second.store.calls[before:]]


def test_a_function_stands_for_what_was_before_it_and_for_nothing_later(log: Callable[[], str]) -> None:
    """The former release may return at any time. A third naming of callers is a change."""
    first = release(None, LOGIN)
    headers = credentials(LOGIN, JWT)
    first.post(headers=headers)
    first.clock.advance(60)
    release(first, LOGIN, named=loader, former_identity={"principal": lambda: current_user.get_id()}).post(
        key="2", headers=headers
    )
    first.clock.advance(60)

    back = release(first, LOGIN)
    assert "fine" == doctor(back)[0][0]
    assert is_replay(back.post(key="2", headers=headers))
    assert not log()
    found = doctor(release(first, JWT))
    assert ["fault"] * 2 == [verdict for verdict, _ in found]
    assert any("a principal_loader was removed" in text for _, text in found)


@pytest.mark.parametrize("wrong", ({"tenant": False}, {"principal": False}), ids=str)
def test_a_former_tenant_that_never_was_is_a_fault(wrong: dict[str, Any]) -> None:
    first = release(None, tenant=lambda: "acme")
    first.post()
    second = release(first, former_identity=wrong)

    verdict, text = doctor(second)[0]
    assert ("fault", True) == (verdict, WRONG in text)
    assert '{"tenant": the former loader}' in text


def test_another_application_of_the_same_name_is_no_former_identity() -> None:
    """Both run side by side: one is not the former identity of the other."""
    first = release(None)
    first.post()
    second = release(first, named=loader, former_identity={"principal": False})
    twin = release(first, namespace="twin", named=loader)
    for number in range(30):
        first.clock.advance(3600)
        for world in (release(first, named=loader, former_identity={"principal": False}), twin):
            world.post(key=f"{number}")
            twin = release(first, namespace="twin", named=loader)

    ((verdict, text),) = doctor(second)
    assert ("advice", True) == (verdict, "Remove it" in text)


# What a key under its former name does


def changed(first: World, **settings: Any) -> World:
    return release(first, LOGIN, named=loader, former_identity={"principal": LOGIN}, **settings)


def test_another_request_is_refused_under_the_former_name() -> None:
    first, headers = release(None, LOGIN), credentials(LOGIN)
    first.post(headers=headers, data="one")

    reused = changed(first).post(headers=headers, data="other")

    assert (422, "key-reused", [1]) == (reused.status_code, reused.json["code"], first.runs)  # type: ignore[index]


def test_a_request_waits_for_the_former_release() -> None:
    first, headers = release(None, LOGIN), credentials(LOGIN)
    second, statuses = changed(first), []

    def slow() -> str:
        first.runs.append(1)
        statuses.append(second.post("/slow", headers=headers).status_code)
        return "paid"

    for world in (first, second):
        world.view("/slow")(slow)

    assert 200 == first.post("/slow", headers=headers).status_code
    assert ([409], [1]) == (statuses, first.runs)


def test_an_unknown_outcome_stays_unknown_under_the_former_name() -> None:
    first, headers = release(None, LOGIN), credentials(LOGIN)
    second = changed(first)

    def broken() -> str:
        first.runs.append(1)
        raise RuntimeError

    for world in (first, second):
        world.view("/broken")(broken)
    first.post("/broken", headers=headers)

    assert "outcome-unknown" == second.post("/broken", headers=headers).json["code"]  # type: ignore[index]
    assert [1] == first.runs


@pytest.mark.parametrize("former", (LOGIN, lambda: current_user.get_id()), ids=("extension", "function"))
@pytest.mark.parametrize("name", ("u:alice", "alice"), ids=("present", "former"))
def test_a_key_is_released_under_both_names_by_either(name: str, former: Any) -> None:
    """No command has a request with the other name. "Released: the next retry runs" must be true."""
    headers = credentials(LOGIN)
    world = release(None, LOGIN, named=loader, former_identity={"principal": former})

    @world.view("/broken")
    def broken() -> str:
        world.runs.append(1)
        if len(world.runs) == 1:
            raise RuntimeError
        return "paid"

    assert 500 == world.post("/broken", headers=headers).status_code
    why = ["--yes", "--force", "--reason", "r", "--actor", "a"]
    run = world.app.test_cli_runner().invoke
    freed = run(args=["idempotency", "release", "--key", "k", "--principal", name, *why])

    assert 0 == freed.exit_code, freed.output
    assert 200 == world.post("/broken", headers=headers).status_code


def test_a_replay_by_the_former_name_needs_no_quota() -> None:
    first, headers = release(None, LOGIN), credentials(LOGIN)
    first.post(headers=headers)
    second = changed(first, quota_records=1)

    assert 201 == second.post(key="2", headers=headers).status_code
    assert 429 == second.post(key="3", headers=headers).status_code
    assert is_replay(second.post(headers=headers))


@pytest.mark.parametrize(
    "former",
    (
        {"principal": "flask-login"},
        {"principal": []},
        {"principal": [LOGIN, "other"]},
        {"principal": [LOGIN, []]},
        {"principal": None},
        {"principal": True},
        {"tenant": LOGIN},
    ),
    ids=str,
)
def test_a_former_identity_without_callers_is_refused(former: Any) -> None:
    with pytest.raises(ConfigurationError, match="former_identity"):
        Idempotency(Flask("shop"), former_identity=former)
