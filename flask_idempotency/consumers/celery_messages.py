"""The messages of Celery tasks: what identifies them, the ids of their links, and how a message is sent again.

What reads Celery's own attributes of a request and a message is here. They are the same from Celery 5.6 to 5.7.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeAlias
from uuid import UUID, uuid5

from celery import Celery, states
from celery.exceptions import Ignore, Reject
from kombu.transport.native_delayed_delivery import CELERY_DELAYED_DELIVERY_EXCHANGE
from kombu.utils.json import dumps

from flask_idempotency.consumers.verdicts import Later, MissingMessageId, TaskBusy
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import BrokerId, message_key
from flask_idempotency.engine.values import fits

AnyTask: TypeAlias = Any
"""A Celery task. Its attributes come from its options and the configuration."""
Argument: TypeAlias = str | Callable[..., Any]
"""An argument's name, or a function of the arguments."""

WAITS: Final = "idempotency-waits"
"""The header of a message that was sent again: how often."""
LONGEST_WAIT_SECONDS: Final = 30
REJECT_PAUSE_SECONDS: Final = 1.0
"""Before a message goes back to a broker that takes no other: the broker delivers it again hundreds of times a second."""
DEFAULT_VISIBILITY_SECONDS: Final = 3600.0
"""Celery's own `visibility_timeout` on Redis."""

_OF_RABBITMQ: Final = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
"""Headers of a message that RabbitMQ has delayed. It drops one that carries them into a second delay, as a circle."""
_DELAY: Final = re.compile(r"^(?:[01]\.){28}")
"""What Celery puts before the routing key of a message that RabbitMQ delays."""
_LINKS: Final = UUID("5f0a3bb2-64a1-4f7e-9f2d-0a3f6f0b9c11")
"""The namespace of the ids of `link` callbacks."""

_log = logging.getLogger("flask_idempotency")


def message_id_of(request: Any) -> str:
    """Return the task id. A task that replaces itself keeps it, so each depth is another message."""
    if not request.id:
        raise MissingMessageId("this message has no task id")
    depth = request.replaced_task_nesting or 0
    return BrokerId(f"{request.id}:{depth}") if depth else str(request.id)


class Arguments:
    """The arguments of one task's function, and which of them identify a message."""

    def __init__(self, where: str, function: Callable[..., Any], chosen: Mapping[str, Argument | None]) -> None:
        """`chosen` has `key`, `tenant` and `fingerprint`. Raises `ConfigurationError` for what the function does not take."""
        self._where = where
        self._parameters = inspect.signature(function).parameters
        self._bind = inspect.signature(function).bind
        self._chosen = {keyword: argument for keyword, argument in chosen.items() if argument is not None}
        parameters = list(self._parameters.values())
        for keyword, argument in self._chosen.items():
            if callable(argument):
                if not _takes_arguments(argument, parameters):
                    # Each message would fail, and its retry too.
                    raise ConfigurationError(
                        f"{where}: {keyword} is called with the arguments of the message, and takes none of the ways to pass "
                        f"{', '.join(self._parameters) or 'no argument'}. Let it take them, or some of them and **others."
                    )
            elif argument not in self._parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters):
                raise ConfigurationError(
                    f"{where}: {keyword}={argument!r} is no argument of the function. Its arguments are "
                    f"{', '.join(self._parameters)}."
                )

    def identify(
        self, task: AnyTask, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, bytes | None, str | None]:
        """Return the id of this message, the bytes that must be the same under one id, and its tenant."""
        if not self._chosen:
            return message_id_of(task.request), None, None
        # Without defaults, so that a new default changes no fingerprint.
        named = self._bind(*args, **kwargs).arguments
        if args and args[0] is task:
            # `bind=True` puts the task itself first, which is no argument of the message.
            first = next(iter(self._parameters.values()))
            if first.kind is first.VAR_POSITIONAL:
                named[first.name] = named[first.name][1:]
            else:
                del named[first.name]
            args = args[1:]
        values = {keyword: self._read(each, named, args, kwargs) for keyword, each in self._chosen.items()}
        if "key" not in values:
            message_id = message_id_of(task.request)
        elif values["key"] in (None, ""):
            raise MissingMessageId(
                f"{self._where}: this message has no key, so no repetition of it would be recognised. Send one, or leave out "
                "key= and go by the task id."
            )
        else:
            message_id = self._text(values["key"], "key")
        tenant = values.get("tenant")
        payload = None
        if values.keys() & {"key", "fingerprint"}:
            payload = self._canonical(values.get("fingerprint", named))
        return message_id, payload, None if tenant is None else self._text(tenant, "tenant")

    def _read(self, argument: Argument, named: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if callable(argument):
            return argument(*args, **kwargs)
        if argument in named:
            return named[argument]
        parameter = self._parameters.get(argument)
        if parameter is None:
            return kwargs.get(argument)
        return None if parameter.default is parameter.empty else parameter.default

    def _text(self, value: object, what: str) -> str:
        """Return this as text. Raise `TypeError` for what may be another text in each process."""
        if isinstance(value, bool) or not isinstance(value, str | int | UUID):
            raise TypeError(f"{self._where}: a {what} is a string, an integer or a UUID, not {type(value).__name__}.")
        return str(value)

    def _canonical(self, value: object) -> bytes:
        if isinstance(value, bytes):
            return value
        try:
            # Celery's own JSON, because it gives dates, UUIDs and decimals back as such.
            return str(dumps(value, sort_keys=True, separators=(",", ":"))).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self._where}: the arguments cannot be compared, because they are no JSON ({type(error).__name__}). Give "
                "fingerprint= a function that returns what must be the same under one key."
            ) from error


def _takes_arguments(argument: Callable[..., Any], parameters: list[inspect.Parameter]) -> bool:
    """Return whether some message of a function with these parameters can be passed to this one."""
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        return True
    for given in (parameters, parameters[1:]):  # `bind=True` puts the task first, which is no argument of the message
        for chosen in (given, [each for each in given if each.default is each.empty]):
            named = {each.name: None for each in chosen if each.kind is not each.POSITIONAL_ONLY}
            first = [None for each in chosen if each.kind is each.POSITIONAL_ONLY]
            placed = [None for each in chosen if each.kind is not each.KEYWORD_ONLY]
            only = {each.name: None for each in chosen if each.kind is each.KEYWORD_ONLY}
            if fits(argument, *first, **named) or fits(argument, *placed, **only):
                return True
    return False


def derive_link_ids(request: Any) -> None:
    """Give each `link` callback an id that follows from this task's, so that a replay sends it under the same one.

    Chains, groups and chords have fixed ids. A link that is one of them keeps fresh inner ids.
    """
    callbacks = request.callbacks
    # An eager message is never delivered again, and its links are the caller's own objects, which later calls may share.
    if request.is_eager or not isinstance(callbacks, list):
        return
    for number, callback in enumerate(callbacks):
        options = callback.get("options") or {}
        if callback.get("subtask_type") is None and not options.get("task_id"):
            derived = str(uuid5(_LINKS, repr((message_key(message_id_of(request)), number, callback.get("task")))))
            # In place: a task class whose `__call__` pushes a request has copied this one.
            callback["options"] = {**options, "task_id": derived}


def has_all_been_sent(task: AnyTask) -> bool:
    """Return whether the result of this very message is stored, which Celery does after it has sent links and the chain.

    In a chord the part still has to be counted.
    """
    request = task.request
    if request.is_eager or request.chord:
        return False
    try:
        if task.backend.as_uri().startswith(("rpc:", "disabled:")):
            return False
        return bool(task.backend.get_state(request.id) == states.SUCCESS)
    except Exception:  # noqa: BLE001 - a backend may raise anything, and sending again does no harm
        return False


class GivenBack(Reject, Ignore):
    """A message goes back to its broker. It is an `Ignore` too, because `autoretry_for=(Exception,)` lets only those pass.

    A retry that cannot be sent either would drop the message.
    """


def send_again(task: AnyTask, later: Later, sent: tuple[Any, Any], *, eager: str) -> NoReturn:
    """Send this message again under its id, then raise `Ignore`. It counts as no retry, and its state is left alone.

    An eager task raises `TaskBusy`, with what `eager` adds.
    """
    request = task.request
    if request.is_eager:
        raise TaskBusy(
            f"{task.name}: this message cannot run now ({later.reason}), and an eager task cannot wait.{eager}"
        )
    headers = {
        name: value for name, value in (request.headers or {}).items() if not name.lower().startswith(_OF_RABBITMQ)
    }
    try:
        waits = int(headers.get(WAITS, 0))
    except (TypeError, ValueError):
        waits = 0
    options: dict[str, Any] = {
        "countdown": countdown(waits, later, visibility=visibility_timeout(task.app)),
        "headers": {**headers, WAITS: waits + 1},
        "retries": request.retries,
        "add_to_parent": False,
    }
    if "ignore_result" in vars(request):
        options["ignore_result"] = request.ignore_result
    try:
        task.signature_from_request(request, *sent, **options, **_route(task)).apply_async()
    except Exception as error:
        _log.warning("%s could not be sent again (%s): it goes back to the broker", task.name, type(error).__name__)
        raise given_back(f"it could not be sent again ({type(error).__name__})") from error
    raise Ignore(f"sent again: {later.reason}")


def given_back(reason: str) -> GivenBack:
    """Return the exception that gives this message back to its broker, after a pause: brokers deliver it again at once."""
    time.sleep(REJECT_PAUSE_SECONDS)
    return GivenBack(reason, requeue=True)


def countdown(waits: int, later: Later, *, visibility: float | None) -> int:
    """Return the seconds until this message is due again, after so many waits: 1, 2, 4 … 30, and whole.

    Never beyond the other worker's lease. A Redis broker delivers what waits too long to every worker: at most a third of its
    visibility timeout.
    """
    seconds: int = min(2 ** min(waits, 5), LONGEST_WAIT_SECONDS)
    if visibility is not None:
        seconds = min(seconds, int(visibility / 3))
    if later.lease_left is not None:
        seconds = min(seconds, math.ceil(later.lease_left))
    return max(seconds, 1)


def visibility_timeout(celery_app: Celery) -> float | None:
    """Return after how many seconds a Redis broker delivers an unacknowledged message again. None: another broker."""
    if celery_app.connection_for_write().transport.driver_type != "redis":
        return None
    options: Mapping[str, Any] = celery_app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", DEFAULT_VISIBILITY_SECONDS))


def _route(task: AnyTask) -> dict[str, Any]:
    """Return where to send a message that RabbitMQ has delayed: not to the exchange of delays, but to its queue."""
    delivered = task.request.delivery_info or {}
    if not str(delivered.get("exchange") or "").endswith(CELERY_DELAYED_DELIVERY_EXCHANGE):
        return {}
    routing_key = _DELAY.sub("", str(delivered.get("routing_key") or ""))
    for name, queue in task.app.amqp.queues.items():
        if queue.routing_key == routing_key:
            return {"queue": name}
    return {}
