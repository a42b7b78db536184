"""The messages of Celery tasks: their ids, those of their links, and how a message is sent again.

What reads Celery's own attributes of a request and a message is here. They are the same from Celery 5.6 to 5.7.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeAlias
from uuid import UUID, uuid5

from celery import Celery, states
from celery.exceptions import Ignore, Reject
from kombu.transport.native_delayed_delivery import CELERY_DELAYED_DELIVERY_EXCHANGE

from flask_idempotency.consumers.verdicts import Later, MissingMessageId, TaskBusy
from flask_idempotency.engine.claim_requests import BrokerId, message_key

AnyTask: TypeAlias = Any
"""A Celery task. Its attributes come from its options and the configuration."""

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
