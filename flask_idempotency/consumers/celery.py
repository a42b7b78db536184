"""Run each Celery task once per message: `idempotent_task` claims before the body, and `serve` prepares the workers.

A message that another worker has is sent again with a delay, under the same id, and never acknowledged away: it may be the
last copy. A message that was done returns the stored value, so that results, links, chains and chords go on.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from functools import wraps
from os import cpu_count
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from celery import Celery, Task, signals
from celery._state import get_current_task
from celery.exceptions import Ignore, Reject, Retry
from flask import Flask, current_app, has_app_context, has_request_context
from kombu.utils.json import dumps, loads

from flask_idempotency.activity import add_the_last
from flask_idempotency.assembly import engines_made
from flask_idempotency.consumers import celery_messages as messages
from flask_idempotency.consumers import interrupts, verdicts
from flask_idempotency.consumers.celery_messages import AnyTask, Argument, Arguments
from flask_idempotency.consumers.inbox import Inbox, check_names, drain, drain_at_exit
from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.ending import commits_rows_here, work_here
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.operations.examination import some

__all__ = ["idempotent_task", "serve"]

P = ParamSpec("P")
R = TypeVar("R")

IGNORED: Final = {"flask_idempotency": "ignored"}
"""What is stored for a body that ended with `Ignore`, which `self.replace()` raises."""

_SERVED: Final = "_flask_idempotency_consumers"
"""Where a Celery application keeps the Flask application that its tasks run in."""
_BEGUN: Final = "_flask_idempotency_begun"
"""Where a task's request notes that its body has begun: what the body calls is a function."""

CHECK: Final = "celery"
"""The name of our check in `flask idempotency doctor`."""
_PREFORK: Final = ("prefork", "processes", "celery.concurrency.prefork:TaskPool")
"""The names of Celery's pool of processes."""
_LOST: Final = "a worker that is killed loses the message"
_USE_WRAPS: Final = "Let that decorator use functools.wraps."
_ACKS_LATE: Final = "Set acks_late=True and reject_on_worker_lost=True."

_log = logging.getLogger("flask_idempotency")


def idempotent_task(
    *,
    key: Argument | None = None,
    tenant: Argument | None = None,
    name: str | None = None,
    fingerprint: Argument | None = None,
    **policy: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the body of a Celery task once per message. Put it under `@celery_app.task`, next to the function.

    Without `key` a message is recognised by its task id, which a redelivery and `retry` keep. `key` is the name of an
    argument or a function of the arguments: then two messages with the same key take effect once. `tenant` is given in the
    same way. `name` is the scope of the ids, by default the function's qualified name. `fingerprint` is what must be equal
    under one key, by default all arguments. The other keywords are those of `Idempotency.inbox`.

    Called as a function, the task is the function. With `effects="transactional"` it raises `ConfigurationError` then, unless
    transactional work or a transactional step calls it: its rows would not be committed.

    A message raises `OutcomeUnknown`, `TooManyAttempts`, `MessageReused`, `MissingMessageId` or `ResultNotKept` as the failure
    of the task. `TaskBusy` is raised by a task that runs eagerly and would have to wait.

    Raises `ConfigurationError` for a wrong keyword or value.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        body = _Body(function, name, {"key": key, "tenant": tenant, "fingerprint": fingerprint}, policy)

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            task: AnyTask = get_current_task()
            if task is None or not _runs_as_message(task) or (found := _body_of(task)) is not body:
                if task is not None and _runs_as_message(task) and found is None and _has_hidden_body(task):
                    # A worker would not have started. An eager task has none, nor has one that was made later.
                    raise ConfigurationError(f"{_hidden(task.name)} {_USE_WRAPS}")
                body.check_call()
                return function(*args, **kwargs)
            try:
                result: R = body.run(task, args, kwargs)
            except BaseException:
                # A decorator above may repeat the call: that is a run of the message, and claims again.
                setattr(task.request, _BEGUN, False)
                raise
            return result

        # Celery reads this, and not `__wrapped__`, to check the arguments of a message that is sent.
        run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        _bodies[run] = body
        return run

    return decorate


class _Body:
    """The body of one task: its function, what identifies its messages, and its inbox."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None,
        chosen: Mapping[str, Argument | None],
        policy: Mapping[str, Any],
    ) -> None:
        if isinstance(function, Task) or not inspect.isfunction(function):
            raise ConfigurationError(
                "@idempotent_task(…): call it with its keywords, and put it under @celery_app.task(…), next to the function."
            )
        self.name = name or f"{function.__module__}.{function.__qualname__}"
        self._is_named = bool(name)
        where = f"@idempotent_task on {self.name}"
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigurationError(f"{where}: Celery calls functions, not coroutines and not generators.")
        self.function = function
        self._arguments = Arguments(where, function, chosen)
        self._policy = dict(policy)
        # Faults are raised where the decorator stands.
        self._declared = self._inbox_with(policy)
        self.inboxes: WeakKeyDictionary[Any, Inbox] = WeakKeyDictionary()

    def _inbox_with(self, policy: Mapping[str, Any], owner: str = "") -> Inbox:
        return Inbox(
            self.name,
            operation=f"task:{self.name}",
            owner=owner,
            shield=interrupts.held_off,
            unfinished=(Retry, Reject, interrupts.NotStarted),
            dump=_to_json,
            load=loads,
            **policy,
        )

    def inbox(self, task: AnyTask) -> Inbox:
        """Return the inbox of this task. Its `max_runtime` is the task's hard time limit, unless you set one."""
        if task not in self.inboxes:
            policy, limit = dict(self._policy), _time_limit(task)
            if "max_runtime" not in policy and limit is not None:
                policy["max_runtime"] = max(limit, self._declared.policy.lease) if "lease" in policy else limit
            # Without a name of its own, a function that two tasks have would give them one scope.
            self.inboxes[task] = self._inbox_with(policy, "" if self._is_named else task.name)
        return self.inboxes[task]

    def check_call(self) -> None:
        """Raise `ConfigurationError` if no code would commit the rows of a call as a function: outside transactional work."""
        if self._declared.policy.effects == "transactional" and not commits_rows_here():
            raise ConfigurationError(
                f"{self.name} was called as a function, and its effects are transactional: its rows would be committed by no "
                "code. Send it (.delay, or .apply to run it here), or call an undecorated function and commit yourself."
            )

    def run(self, task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Process the message that this task has been called for. Return its value, as an earlier run may have stored it."""
        request = task.request
        setattr(request, _BEGUN, True)
        ended: list[Ignore] = []

        def work() -> Any:
            try:
                return interrupts.let_through(lambda: self.function(*args, **kwargs))
            except Ignore as error:
                ended.append(error)
                return IGNORED

        with interrupts.held_off():
            # The body may change its arguments, and the message may have to be sent again after that.
            sent = request.args, request.kwargs
            with suppress(Exception):  # an argument that came pickled may be anything
                sent = deepcopy(sent)
            try:
                with _application_context(task):
                    message_id, payload, tenant = self._arguments.identify(task, args, kwargs)
                    # The message may set a longer hard limit than its task.
                    inbox, limit = self.inbox(task), (request.timelimit or (None,))[0]
                    if limit is not None and "max_runtime" not in self._policy:
                        inbox = inbox.lasting(float(limit))
                    verdict = inbox.process(message_id, work, payload=payload, tenant=tenant)
                match verdict:
                    case verdicts.Processed(replayed=False):
                        if ended:
                            raise ended[0]
                        messages.derive_link_ids(request)
                        return verdict.value
                    case verdicts.Processed():
                        return self._replay(task, verdict)
                    case verdicts.Later():
                        messages.send_again(task, verdict, sent, eager=_lock_held(task, verdict))
                    case verdicts.Dead("too-many-attempts"):
                        raise verdicts.TooManyAttempts(
                            f"{self.name}: too many workers vanished at this message, so no further one runs it."
                        )
                    case verdicts.Dead("message-reused"):
                        raise verdicts.MessageReused(
                            f"{self.name}: this key was used before, with other arguments. Send another key, or compare fewer "
                            "arguments: fingerprint=."
                        )
                    case verdicts.Dead(reason):
                        raise verdicts.OutcomeUnknown(
                            f"{self.name}: an earlier run of this message may have taken effect ({reason}). Find its key with "
                            f"`flask idempotency list --endpoint task:{self.name}`, resolve it, and send the message again "
                            "under its id."
                        )
            except interrupts.NotStarted as signal:
                raise signal.__cause__ or signal from None
            finally:
                interrupts.forget_soft_limit()

    def _replay(self, task: AnyTask, verdict: verdicts.Processed) -> Any:
        """Return the stored value, so that the result, links, chains and chords go on as they would have."""
        if verdict.value == IGNORED:
            raise Ignore("an earlier run of this message ended with Ignore")
        if messages.has_all_been_sent(task):
            raise Ignore("an earlier run of this message has stored its result")
        if not verdict.kept:
            raise verdicts.ResultNotKept(
                f"{self.name}: this message was done, and its value was not kept: it is too large (max_result), nothing that "
                "Celery's JSON carries, or erased. Let the task return None, or the id of what it made."
            )
        messages.derive_link_ids(task.request)
        return verdict.value


def _to_json(value: Any) -> bytes:
    """Return the JSON of Celery, which gives dates, times, UUIDs, decimals and bytes back as such.

    Raises `TypeError`, `ValueError` or `RecursionError` for what it does not give back.
    """
    check_names(value)
    data = str(dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)).encode()
    loads(data)  # raises for a mapping that looks like one of its own types
    return data


# The task that is being run.


def _runs_as_message(task: AnyTask) -> bool:
    """Return whether a worker, or `apply`, has called this task for a message, and its body has not begun."""
    request = task.request
    return not request.called_directly and not getattr(request, _BEGUN, False)


def _wrapped(task: AnyTask) -> Iterator[Any]:
    """Return the function of this task and all that it says to wrap, outermost first."""
    found: Any = getattr(task, "_orig_run", None) or task.run
    while found is not None:
        found = getattr(found, "__func__", found)
        yield found
        found = getattr(found, "__wrapped__", None)


def _body_of(task: AnyTask) -> _Body | None:
    return next((_bodies[each] for each in _wrapped(task) if inspect.isfunction(each) and each in _bodies), None)


def _has_hidden_body(task: AnyTask) -> bool:
    """Return whether a decorator without `functools.wraps` calls one of our bodies for this task."""
    waiting, seen = list(_wrapped(task)), set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen or not inspect.isfunction(function):
            continue
        seen.add(id(function))
        if function in _bodies:
            return True
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
    return False


def _hidden(name: str) -> str:
    return f"{name}: a decorator between @celery_app.task and @idempotent_task hides it: each delivery would run."


def _time_limit(task: AnyTask) -> float | None:
    limit = task.time_limit or task.app.conf.task_time_limit
    return None if limit is None else float(limit)


def _application_of(celery_app: Celery) -> Flask | None:
    return next((served.flask_app for served in vars(celery_app).get(_SERVED, ())), None)


def _application_context(task: AnyTask) -> AbstractContextManager[object]:
    """Return the application context that the body runs in: the worker's, or a new one."""
    flask_app = _application_of(task.app)
    if flask_app is None:
        if has_app_context():
            return nullcontext()
        unserved = ConfigurationError(
            f"{task.name}: no Flask application is known. Call flask_idempotency.consumers.celery.serve(celery_app, flask_app)."
        )
        if task.acks_late and not task.request.is_eager:
            # As a failure it would be acknowledged, and lost to the worker that is started right.
            _log.error("%s The message goes back to the broker.", unserved)
            raise messages.given_back("no Flask application is known") from unserved
        raise unserved
    # An eager task may run within a request, whose session must not be committed with the task.
    eager = task.request.is_eager or has_request_context()
    if not eager and has_app_context() and current_app._get_current_object() is flask_app:  # type: ignore[attr-defined]
        return nullcontext()
    return flask_app.app_context()


def _lock_held(task: AnyTask, later: verdicts.Later) -> str:
    """Return what an eager task waits for in vain: on SQLite, the rows of the code that called it hold the only lock."""
    flask_app = _application_of(task.app) or (current_app if has_app_context() else None)
    if later.reason != "store-unavailable" or flask_app is None or "sqlalchemy" not in flask_app.extensions:
        return ""
    with flask_app.app_context():
        if flask_app.extensions["sqlalchemy"].engine.dialect.name != "sqlite":
            return ""
    work = work_here()
    holder = "code that called it" if work is None else f"transaction of {work.operation}"
    return (
        f" SQLite has one writer, and the {holder} may hold its lock (database is locked). Publish the message with an outbox "
        "(outbox.publish, routed to outbox.Tasks), send it after your commit, or use PostgreSQL."
    )


# Workers.


def serve(celery_app: Celery, flask_app: Flask) -> None:
    """Let the idempotent tasks of this Celery application run in the context of this Flask application.

    Workers check their settings when they start: they end if a policy cannot hold, and log what costs messages. Forked
    children use none of the database connections that they inherit, and write what is left to write before they end.
    `flask idempotency doctor` reports the same findings.

    Call it again with another Flask application when the former one is gone, or in tests (`testing` is true for either): the
    tasks then run in the newest one.

    Raises `ConfigurationError` if Idempotency is not set up on the Flask application, if the Celery application serves
    another one that is in use, or if a task that is already there cannot hold its policy.
    """
    if "idempotency" not in flask_app.extensions:
        raise ConfigurationError("Idempotency is not set up on this Flask application: call init_app first.")
    served: list[_Served] = vars(celery_app).setdefault(_SERVED, [])
    if served and served[0].flask_app is flask_app:
        return
    found = _Served(celery_app, flask_app)
    if vars(celery_app)["finalized"] and (faults := _faults_in(found.findings())):
        raise ConfigurationError(*faults)
    if served and not flask_app.testing and not _is_gone(served):
        raise ConfigurationError(
            "This Celery application serves another Flask application already. Make a Celery application for each. In tests, "
            "set TESTING on the applications: the newest one serves."
        )
    served[:] = [found]
    for _, body in found.tasks() if vars(celery_app)["finalized"] else ():
        # They hold what the store of the former application has not taken.
        body.inboxes.clear()
    found.register()
    signals.worker_init.connect(_check_worker, weak=False, dispatch_uid=_SERVED)
    for ending in (signals.worker_process_shutdown, signals.worker_shutdown):
        ending.connect(_drain, weak=False, dispatch_uid=_SERVED)


def _is_gone(served: list[_Served]) -> bool:
    """Return whether no code but ours holds the Flask application that is served, or whether it is one in tests."""
    if served[0].flask_app.testing:
        return True
    former = weakref.ref(served.pop())
    # An application is in circles, and only the collector sees that it has ended.
    gc.collect()
    still = former()
    if still is None:
        return True
    served.append(still)
    return False


def _faults_in(findings: Sequence[Finding]) -> list[str]:
    return [f"{finding.text} {finding.remedy}" for finding in findings if finding.verdict is Verdict.FAULT]


class _Served:
    """A Celery application whose tasks run in the context of a Flask application."""

    def __init__(self, celery_app: Celery, flask_app: Flask) -> None:
        self.celery_app = celery_app
        self.flask_app = flask_app
        self._database: Any = None
        with suppress(ModuleNotFoundError):
            # Before the fork: it notes which process has opened a connection.
            from flask_idempotency.stores.sql import database

            self._database = database

    def register(self) -> None:
        """Take part in forks, `flask idempotency doctor` and the end of the process."""
        after_fork(self.after_fork)
        self._state.checks.append(self.findings)
        self._state.consumers.operations.discover(self.declare)
        if self._state.engine is not None:
            drain_at_exit(self._state.engine)

    @property
    def _state(self) -> Any:
        """What the extension keeps of the Flask application."""
        return self.flask_app.extensions["idempotency"]

    def after_fork(self) -> None:
        """In a child: leave the parent's database connections alone, also those of the application's sessions.

        A store on the application's own database does so itself.
        """
        extension = self.flask_app.extensions.get("sqlalchemy")
        engine = self._state.engine
        if extension is None or self._database is None or (engine is not None and engine.transactions is not None):
            return
        from flask_idempotency.stores.sql.engines import names_memory  # loaded with `database`

        for each in engines_made(extension):
            if not names_memory(each.url):
                self._database.leave_to_parent(each)
        if hasattr(extension, "_app_engines"):  # Flask-SQLAlchemy-Lite keeps no session outside of its context
            registry: Any = extension.session.registry.registry
            for session in list(registry.values()) if isinstance(registry, dict) else []:
                self._database.abandon_inherited(session)

    def tasks(self) -> list[tuple[AnyTask, _Body]]:
        """Return the idempotent tasks, by name."""
        found = [(task, _body_of(task)) for _, task in sorted(self.celery_app.tasks.items())]
        return [(task, body) for task, body in found if body is not None]

    def declare(self) -> None:
        """Make the tasks known to the commands and the janitor of the Flask application."""
        self.celery_app.loader.import_default_modules()
        with self.flask_app.app_context():
            for task, body in self.tasks():
                body.inbox(task).check()

    def findings(self, worker: Any = None) -> list[Finding]:
        """Return what is wrong with the tasks and the settings of their workers. `worker`: the one that starts."""
        tasks = self.tasks()
        findings = [*self._faults(), *self._store(tasks, worker)]
        early = [task.name for task, _ in tasks if not task.acks_late]
        if early:
            findings.append(_advice(f"Workers acknowledge {some(early)} before the body runs: {_LOST}.", _ACKS_LATE))
        lost = [
            task.name
            for task, body in tasks
            if task.acks_late
            and not task.reject_on_worker_lost
            and body.inbox(task).policy.on_expiry is OnExpiry.TAKEOVER
        ]
        if lost:
            text = f"If a pool process is killed in {some(lost)}, Celery acknowledges the message: {_LOST}."
            findings.append(_advice(text, "Set reject_on_worker_lost=True: another worker can take these tasks over."))
        findings += self._broker(tasks)
        return findings or [Finding(CHECK, Verdict.FINE, f"{len(tasks)} Celery tasks run once per message.")]

    def _faults(self) -> Iterator[Finding]:
        for name, task in sorted(self.celery_app.tasks.items()):
            if (body := _body_of(task)) is not None:
                try:
                    with self.flask_app.app_context():
                        body.inbox(task).check()
                except ConfigurationError as error:
                    for fault in error.faults:
                        yield Finding(CHECK, Verdict.FAULT, f"{name}: {fault}", "Change it at @idempotent_task(…).")
            elif _has_hidden_body(task):
                yield Finding(CHECK, Verdict.FAULT, _hidden(name), _USE_WRAPS)

    def _store(self, tasks: Sequence[tuple[AnyTask, _Body]], worker: Any) -> Iterator[Finding]:
        """Yield a fault if the processes of the pool do not see each other's records."""
        if not tasks or self._state.engine is None or not self._state.built.process_local:
            return
        conf = self.celery_app.conf
        if worker is not None:
            processes = _processes(worker.pool_cls, worker.concurrency, worker.options)
        else:
            # Tests call tasks in their own process, with the settings of a worker that they never start.
            processes = 0 if self.flask_app.testing else _processes(conf.worker_pool, conf.worker_concurrency, {})
        if processes > 1:
            text = (
                f"The pool has {processes} processes, and each keeps the records of {some(task.name for task, _ in tasks)} in "
                "its own memory: a message that is delivered again runs again in another process."
            )
            remedy = (
                "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL. In development, start the worker with "
                "--pool solo or --pool threads."
            )
            yield Finding(CHECK, Verdict.FAULT, text, remedy)

    def _broker(self, tasks: Sequence[tuple[AnyTask, _Body]]) -> Iterator[Finding]:
        conf = self.celery_app.conf
        if not tasks:
            return
        if self.celery_app.connection_for_write().transport.driver_type == "amqp":
            if not (conf.broker_transport_options or {}).get("confirm_publish"):
                text = "RabbitMQ does not confirm what is published: a message that is sent again may be lost."
                yield _advice(text, 'Set broker_transport_options = {"confirm_publish": True}.')
            return
        timeout = messages.visibility_timeout(self.celery_app)
        if timeout is None:
            return
        limits = {task.name: limit for task, _ in tasks if (limit := _time_limit(task)) is not None}
        above = [name for name, limit in limits.items() if limit >= timeout]
        remedy = (
            'Set broker_transport_options = {"visibility_timeout": …} above the time limits. The copies cost messages, and '
            "not correctness."
        )
        if above:
            text = f"Redis delivers {some(above)} again while it runs: visibility_timeout is {timeout:g} s."
            yield _advice(text, remedy)
        ahead = conf.worker_prefetch_multiplier
        # 0 reserves without a limit.
        waiting = [
            name
            for name, limit in limits.items()
            if name not in above and (not ahead or limit * (1 + ahead) >= timeout)
        ]
        if waiting:
            text = (
                f"Redis may deliver again what a worker has reserved and not begun: {ahead or 'any number of'} "
                f"message{'' if ahead == 1 else 's'} may wait for {some(waiting)}, and visibility_timeout is {timeout:g} s."
            )
            least = 2 * max(limits[name] for name in waiting)
            longer = f'broker_transport_options = {{"visibility_timeout": …}} above {least:g} s'
            enough = "Set worker_prefetch_multiplier = 1" + (f", and {longer}" if least >= timeout else "")
            yield _advice(text, f"Set {longer}." if ahead == 1 else f"{enough}.")


def _advice(text: str, remedy: str) -> Finding:
    return Finding(CHECK, Verdict.ADVICE, text, remedy)


def _processes(pool: Any, concurrency: Any, options: Mapping[str, Any]) -> int:
    """Return how many processes a pool may have that run tasks at the same time. 0: that is not known yet."""
    kinds = pool.__mro__ if isinstance(pool, type) else ()
    if pool not in _PREFORK and not any(kind.__module__ == "celery.concurrency.prefork" for kind in kinds):
        return 1
    if concurrency == "auto":  # Celery counts the processors after the checks
        concurrency = cpu_count() or 1
    autoscale = options.get("autoscale") or 0
    if isinstance(autoscale, str):
        autoscale = autoscale.partition(",")[0]
    most = autoscale[0] if isinstance(autoscale, list | tuple) else autoscale
    return max(int(concurrency or 0), int(most))


def _check_worker(sender: Any, **_: Any) -> None:
    """End a worker whose tasks cannot hold their policy, and log what costs messages."""
    for served in vars(sender.app).get(_SERVED, []):
        findings = served.findings(sender)
        for finding in findings:
            if finding.verdict is Verdict.ADVICE:
                _log.warning("%s %s", finding.text, finding.remedy)
        if faults := _faults_in(findings):
            # Celery logs any other exception of a receiver, and goes on.
            sys.exit("\n".join(["The worker cannot start.", *faults]))


def _drain(**_: Any) -> None:
    drain()
    # A process of the pool ends without the functions of `atexit`.
    add_the_last()


_bodies: WeakKeyDictionary[Any, _Body] = WeakKeyDictionary()
"""By the function that Celery gets."""
