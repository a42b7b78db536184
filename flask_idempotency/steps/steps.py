"""Run the steps of a view or of a message: `durable_step`, `current_step`, and what `current_claim` calls.

A finished step returns what it returned and does nothing. The engine (`Steps`) decides whether a function may run; here its
arguments and its result become bytes, and the code that called it learns how it ended.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType, TracebackType
from typing import Any, Final, ParamSpec, Self, TypeAlias, TypeVar, cast

from flask_idempotency.engine import ending, errors
from flask_idempotency.engine.ending import IN_STREAM, Running, in_stream, running, work_here
from flask_idempotency.engine.journal import LARGEST_JOURNAL, LARGEST_RESULT, Effects
from flask_idempotency.engine.keys import keyed_name
from flask_idempotency.engine.step_rules import Returns, Step, UndeclaredStep
from flask_idempotency.engine.steps import StepRun, Steps
from flask_idempotency.engine.store import Transaction
from flask_idempotency.steps import arguments, values
from flask_idempotency.steps.values import Item

__all__ = ["ManualStep"]

P = ParamSpec("P")
R = TypeVar("R")
Name: TypeAlias = "str | tuple[str, Item]"
"""The name of a step, or its name and item."""

_log = logging.getLogger("flask_idempotency")


@dataclass(slots=True, eq=False, repr=False)
class _Call:
    """One run of a step's function, as `current_step` shows it."""

    name: str
    item: Item | None
    work: Running | None
    """The work that this run is part of, with a claim or without."""
    run: StepRun | None = None
    """What the claim records of it. None: there is no claim."""
    result: Any = None
    """What an earlier attempt returned, if the step is recalled."""
    random_key: str = ""

    @property
    def attempt(self) -> int:
        return 1 if self.run is None else self.run.steps.attempt

    @property
    def downstream_key(self) -> str:
        if self.work is not None and self.run is not None:
            return downstream_key(self.work, self.name, self.item)
        if not self.random_key:
            # Nothing remembers this run, so no later one can be the same.
            self.random_key = keyed_name(secrets.token_bytes(32))
        return self.random_key


_call: ContextVar[_Call | None] = ContextVar("flask_idempotency_step", default=None)
"""The step whose function this code runs in."""


def _step_in(work: Running) -> str | None:
    call = _call.get()
    return None if call is None or call.work is not work else call.name


ending.step_in = _step_in


class CurrentStep:
    """The step whose function runs here. False outside of one: then its attributes raise `RuntimeError`."""

    def __bool__(self) -> bool:
        return _call.get() is not None

    @property
    def name(self) -> str:
        """The name of the step."""
        return _here("name").name

    @property
    def item(self) -> Item | None:
        """What tells this step from others of its name, or None."""
        return _here("item").item

    @property
    def attempt(self) -> int:
        """1 in the first attempt at this request or message, and one more in each later one."""
        return _here("attempt").attempt

    @property
    def downstream_key(self) -> str:
        """An idempotency key for the call that this step makes: 52 characters, the same in all attempts.

        It stays the same while you rotate secrets, and over a rename with `was=`. Without a claim it is random, and the same
        in one run of the function.
        """
        return _here("downstream_key").downstream_key


current_step: Final = CurrentStep()


def _here(attribute: str) -> _Call:
    call = _call.get()
    if call is None:
        raise RuntimeError(f"current_step.{attribute}: this code does not run in the function of a step.")
    return call


def durable_step(
    name: str,
    *,
    effects: Effects = "plain",
    harmless: tuple[type[Exception], ...] = (),
    returns: Returns | None = None,
    item: str | None = None,
    compare: tuple[str, ...] | None = None,
    was: str | None = None,
    intent: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a step: after it has finished, later attempts get what it returned, and it does not run.

    List it in `steps=` of each endpoint that calls it. `effects` says what may happen if a worker vanishes in it:

    * `plain` (default): it runs at most once. A doubt is for a resolver or an operator.
    * `deduplicated`: it may run again, with the same `current_step.downstream_key`.
    * `transactional`: it writes with the session of the application, and commits together with its result.
    * `pure`: it only computes a value, which stays the same in all attempts.

    `harmless`: exceptions that prove that nothing happened, such as a declined card; never a timeout or a 5xx. `returns`:
    a dataclass, a NamedTuple, or a pair of functions (to a plain value, and back). `item` names the parameter that makes
    several of one. `compare` names the arguments that a retry must repeat; default: all. `was` is the former name. Without
    `intent`, a step that is deduplicated is not recorded before it runs.

    Without a claim, the function just runs; in a request or message, a transactional one is committed. Raises `TypeError`
    for a generator function and for parameters that do not exist.
    """
    step = Step(
        name,
        effects=effects,
        harmless=harmless,
        returns=returns,
        item=item,
        compare=compare,
        was=was,
        intent=intent,
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _refuse_generator(step.name, function)
        signature = arguments.signature_of(function)
        named = {*(step.compare or ()), *([step.item] if step.item is not None else [])}
        if signature is not None and (unknown := sorted(named - signature.parameters.keys())):
            raise TypeError(
                f"step {step.name!r}: its function has no parameter {', '.join(unknown)}. It has "
                f"{', '.join(signature.parameters) or 'none'}."
            )
        made: Any
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def made(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await _run_async(step.name, _item_of(step, function, args, kwargs), function, args, kwargs, step)

        else:

            @wraps(function)
            def made(*args: P.args, **kwargs: P.kwargs) -> Any:
                return _run(step.name, _item_of(step, function, args, kwargs), function, args, kwargs, step)

        made.step = step
        return cast("Callable[P, R]", made)

    return decorate


def call_step(name: Name, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a step of the current claim, or return what it returned. A coroutine function gives an awaitable."""
    name, item = _split(name)
    _refuse_generator(name, function)
    if isinstance(getattr(function, "step", None), Step):
        raise TypeError(f"step {name!r}: this function is a step itself, and steps do not nest. Call it directly.")
    run = _run_async if inspect.iscoroutinefunction(function) else _run
    return run(name, item, function, args, kwargs)


def _split(name: Name) -> tuple[str, Item | None]:
    if isinstance(name, tuple):
        if len(name) != 2:
            raise TypeError("a step is named by its name, or by a pair of its name and its item.")
        return name
    return name, None


def _run(
    name: str, item: Item | None, function: Callable[..., Any], args: Any, kwargs: Any, own: Step | None = None
) -> Any:
    call = _begin(name, item, function, args, kwargs, own)
    if call.run is not None and call.run.recalled:
        return call.result
    with _function_of(call):
        value = function(*args, **kwargs)
        waits = inspect.isawaitable(value)
        if call.run is not None and not waits and (inspect.isgenerator(value) or inspect.isasyncgen(value)):
            # The function ran, and may have had an effect before it returned.
            raise TypeError(
                f"step {name!r} returned a generator, which does nothing until it is read. Return what it yields, as a list."
            )
    return _finish_later(call, value) if waits else _finish(call, value)


async def _run_async(
    name: str, item: Item | None, function: Callable[..., Any], args: Any, kwargs: Any, own: Step | None = None
) -> Any:
    call = _begin(name, item, function, args, kwargs, own)
    if call.run is not None and call.run.recalled:
        return call.result
    return await _finish_later(call, function(*args, **kwargs))


async def _finish_later(call: _Call, awaitable: Awaitable[Any]) -> Any:
    with _function_of(call):
        value = await awaitable
    return _finish(call, value)


@contextmanager
def _function_of(call: _Call) -> Iterator[None]:
    """Run the function of a step, and end the step if it raises.

    Without a claim, nothing records the step. A transactional one leaves its commit to us all the same.
    """
    work, run = call.work, call.run
    transaction: Transaction | None = None
    token = _call.set(call)
    try:
        if run is None and work is not None and work.transactions is not None and work.policy.commits_step(call.name):
            # Work without a claim may commit by itself: nothing comes of that.
            transaction = work.transactions.join((), b"", operation=work.operation, on_early_commit=lambda: None)
        try:
            yield
            if transaction is not None:
                transaction.commit(to_several=True)
        except BaseException as error:
            if transaction is not None:
                transaction.roll_back()
            if work is not None and run is not None and not run.ended:
                with work.shield():
                    run.fail(error)
            raise
        finally:
            if transaction is not None:
                transaction.leave()
    finally:
        _call.reset(token)


def _steps_of(work: Running | None, name: str) -> Steps | None:
    """Return the steps of this claim, or None without one. Raises `RuntimeError` where no step may begin."""
    outer = _call.get()
    # The function of a step may send a request to its own application: that has other steps, under another claim.
    if outer is not None and outer.work is work:
        raise RuntimeError(
            f"step {name!r} begins inside step {outer.name!r}, and steps do not nest: finish one before the next."
        )
    if work is None:
        if in_stream.get():
            raise RuntimeError(f"step {name!r} begins {IN_STREAM}")
        return None
    if hindrance := work.step_hindrance:
        raise RuntimeError(f"step {name!r} begins {hindrance}")
    if work.claim is None:
        return None
    if work.claim.steps is None:
        raise UndeclaredStep(
            f"step {name!r}: {work.operation} declares no steps. List all that it may take: @idempotent(steps=(…, {name}))."
        )
    return work.claim.steps


def _begin(
    name: str,
    item: Item | None,
    function: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    own: Step | None = None,
) -> _Call:
    """Begin this step, or recall it. Without a `function`, it is a block. `own` is what a decorator declares.

    Raises `StepsChanged`, and the request is held then, or `ResultNotRebuilt`, and it is paused.
    """
    work = work_here()
    steps = _steps_of(work, name)
    if work is None or steps is None:
        return _Call(name, item, work)
    given = {} if function is None else arguments.bind(function, args, kwargs)
    rule = steps.rule(name)
    if own is not None and (own.effects, own.was) != (rule.effects, rule.was):
        raise RuntimeError(
            f"step {name!r}: its decorator says effects={own.effects!r} and was={own.was!r}, and {work.operation} lists it "
            f"with effects={rule.effects!r} and was={rule.was!r}. List the decorated function itself in steps=."
        )
    # An endpoint that lists the name alone leaves the rest to the decorator.
    own = own if rule == Step(name) else None
    step, compared = own or rule, b""
    if function is not None and step.effects != "pure":
        compared = arguments.comparable(name, given, compare=step.compare)
    # Steps of other threads have no order, nor have those of a task beside others: `asyncio.gather` starts them in any order.
    loop = _loop_here()
    in_line = threading.get_ident() == work.thread if loop is None else len(asyncio.all_tasks(loop)) == 1
    with _noted(work), work.shield():
        run = steps.enter(
            name,
            values.encode_item(item),
            alike=b"" if item is None else values.encode_alike(item),
            digest=compared,
            former=lambda: arguments.former(given, compare=step.compare),
            in_line=in_line,
            own=own,
        )
    return _Call(name, item, work, run, _recalled(work, run) if run.recalled else None)


@contextmanager
def _noted(work: Running) -> Iterator[None]:
    """Remember an error of ours that leaves a step, so that its request gets the right response.

    A `ConfigurationError` is a mistake of the view, such as an open transaction. It is the view's own error, so it is logged.
    """
    try:
        yield
    except errors.ConfigurationError:
        raise
    except errors.IdempotencyError as error:
        if work.claim is not None and work.claim.steps is not None:
            work.claim.steps.refusals.append(error)
        raise


def _loop_here() -> asyncio.AbstractEventLoop | None:
    """Return the event loop whose task runs here or waits for this function, as in `sync_to_async`. None: there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        # Flask runs an async view with asgiref, in another thread. The view's own thread then runs its sync functions.
        asgiref: Any = sys.modules.get("asgiref.sync")
        waiting = None if asgiref is None else getattr(asgiref.AsyncToSync.executors, "current", None)
        if waiting is None:
            return None
        loops = list(asgiref.AsyncToSync.loop_thread_executors.items())
        return next((loop for loop, executor in loops if executor is waiting), None)


def _recalled(work: Running, run: StepRun) -> Any:
    """Return what an earlier attempt kept of this step. Raises as `_begin` does."""
    cause: Exception | None = None
    if run.result is not None:
        try:
            return values.from_plain(values.decode(run.result), run.step.returns)
        except (errors.StepsChanged, errors.CorruptRecord) as error:
            cause = error
        except errors.ResultNotRebuilt as error:
            _log_not_rebuilt(work, run, error)
            with _noted(work):
                raise
    with _noted(work), work.shield():
        raise run.misfits() from cause


def _finish(call: _Call, value: Any) -> Any:
    """Keep the result, and return it as a later attempt will get it."""
    work, run = call.work, call.run
    if work is None or run is None:
        return value
    returns, why = run.step.returns, ""
    cause: Exception | None = None
    not_rebuilt: errors.ResultNotRebuilt | None = None
    with _noted(work), work.shield():
        try:
            data, back = values.encode(values.to_plain(value, returns)), None
            try:
                back = values.from_plain(values.decode(data), returns)
            except errors.ResultNotRebuilt as error:
                not_rebuilt = error
        except errors.NotStorable as error:
            why, cause = str(error), error
        except errors.StepsChanged as error:
            why, cause = f"`returns` cannot rebuild it: {error}", error
        except Exception as error:  # noqa: BLE001 - a value's own methods may raise anything, after its effect
            why, cause = f"{type(error).__name__} was raised when it was written and read back", error
        except BaseException as error:
            run.fail(error)
            raise
        if why:
            run.finish(None)
        elif run.finish(data):
            if not_rebuilt is not None:
                _log_not_rebuilt(work, run, not_rebuilt)
                raise not_rebuilt
            return back
        else:
            why = (
                f"it takes {len(data)} bytes. One result has at most {LARGEST_RESULT}, and all of a request {LARGEST_JOURNAL}: "
                "return an id"
            )
    text = f"the result of step {run.step.name!r} cannot be kept: {why}"
    if work.strict:
        raise errors.NotStorable(f"{text}. The step counts as done.") from cause
    _log.error("%s: %s. A retry that needs it is quarantined.", work.operation, text)
    return value


def _log_not_rebuilt(work: Running, run: StepRun, error: errors.ResultNotRebuilt) -> None:
    _log.warning(
        "%s: the step %r is done, and %s. The request is paused, and its next retry rebuilds the result again.",
        work.operation,
        run.step.name,
        error,
    )


class ManualStep:
    """A step whose code is a block and no function. See `current_claim.manual_step`."""

    def __init__(self, name: Name) -> None:
        self.name: str
        self.item: Item | None
        self.name, self.item = _split(name)
        self.done: bool = False
        """Whether it has finished, in an earlier attempt or here. Then do not do its work."""
        self.result: Any = None
        """What it finished with."""
        self._call: _Call
        self._block: AbstractContextManager[None]
        self._open = False
        """Whether this code is in the block, and has not said that nothing was done."""

    def __enter__(self) -> Self:
        self._call = _begin(self.name, self.item)
        if self._call.run is not None:
            self.result, self.done = self._call.result, self._call.run.recalled
        self._block = _function_of(self._call)
        self._block.__enter__()
        self._open = True
        return self

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise RuntimeError(
                f"step {self.name!r}: {call} records nothing here. Call it once, inside `with current_claim.manual_step(…)`."
            )

    def finish(self, value: Any = None) -> Any:
        """Record that the step is done, with this result. Return it as later attempts get it."""
        if self.done:
            raise RuntimeError(f"step {self.name!r} has finished. Test `step.done` before you do its work.")
        self._check_open("finish()")
        self.done = True
        self.result = _finish(self._call, value)
        return self.result

    def nothing_done(self) -> None:
        """Record that the step did nothing, so that it may run again."""
        if self.done:
            raise RuntimeError(f"step {self.name!r} has finished, so it did something.")
        self._check_open("nothing_done()")
        self._open = False
        if self._call.run is not None and self._call.work is not None:
            with self._call.work.shield():
                self._call.run.withdraw()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        if error is None and not self.done:
            error = RuntimeError(f"step {self.name!r} was left without finish() or nothing_done()")
        # It returns False, and raises nothing, for the error that it gets.
        self._block.__exit__(None if error is None else type(error), error, traceback)


@contextmanager
def _carried(work: Running) -> Iterator[None]:
    token = running.set((work, None))
    try:
        yield
    finally:
        running.reset(token)


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function that runs under the current claim in whatever thread calls it. Without a claim: the function itself.

    Raises `TypeError` for a generator function: its body would run when the claim has been left, and its steps without one.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("carry(): a generator runs when it is read, without the claim. Carry a function that reads it.")
    work = work_here()
    if work is None or work.claim is None:
        return function
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def carried(*args: P.args, **kwargs: P.kwargs) -> Any:
            with _carried(work):
                return await function(*args, **kwargs)

        return cast("Callable[P, R]", carried)
    return _carried(work)(function)


def downstream_key(work: Running, name: str, item: Item | None = None) -> str:
    """Derive the downstream key of a step, or of any name. Raises `RuntimeError` without a claim."""
    claim = work.claim
    if claim is None or work.oldest is None:
        raise RuntimeError("a downstream key belongs to a claim, and this code runs without one.")
    # A call outside of steps has a key too, under any name.
    return work.oldest.downstream_key(claim.oldest_key, work.policy.recorded_as(name), values.encode_item(item))


def _item_of(step: Step, function: Callable[..., Any], args: Any, kwargs: Any) -> Item | None:
    return None if step.item is None else cast("Item", arguments.bind(function, args, kwargs)[step.item])


def _refuse_generator(name: str, function: Callable[..., Any]) -> None:
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise TypeError(
            f"step {name!r}: a {kind} has no place here. Put the decorator below @{kind}, above the function."
        )
    if not callable(function):
        raise TypeError(f"step {name!r}: pass a function and its arguments, and not what the function returned.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"step {name!r}: a generator does nothing until it is read. Pass a function that returns its result."
        )
