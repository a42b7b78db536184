"""The policy keywords of consumers: what an inbox or a task may set, checked with every fault at once.

They are the keywords of endpoints that do not need HTTP, with defaults for messages. A policy of endpoints, a profile or an
`IDEMPOTENCY_*` setting never reaches a consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings.loading import load_values
from flask_idempotency.settings.options import PolicyOptions
from flask_idempotency.settings.reading import (
    MIN_LEASE_SECONDS,
    NOT_NEGATIVE,
    POSITIVE,
    UP_TO_90_DAYS,
    Option,
    decision,
    documented,
    imply_steps,
    one_of,
    seconds,
    whole_number,
)

LONGEST_RESULT: Final = 64 * 1024 * 1024
"""Bytes. A codec stores no longer value."""


@valueclass(frozen=True, slots=True)
class ConsumerPolicy(Policy):
    """Everything that may differ from one inbox or task to the next. Durations are seconds."""

    keep: float = 7 * 24 * 3600.0
    max_runtime: float = 6 * 3600.0
    on_error: Literal["release", "keep", "quarantine"] | None = "release"
    max_attempts: int = 5
    settle_wait: float = 10.0

    @property
    def max_result(self) -> int:
        """The most bytes of a value that is kept."""
        return self.max_body


class ConsumerOptions:
    """Every policy keyword of an inbox or a task. Its defaults are those of `ConsumerPolicy`."""

    effects: Option = documented(
        one_of("plain", "marked", "deduplicated", "transactional", "steps"),
        "What a second run of the work may repeat. Decides what happens after a worker vanished.",
    )
    steps: Option = PolicyOptions.steps
    dropped_steps: Option = PolicyOptions.dropped_steps
    steps_in_any_order: Option = PolicyOptions.steps_in_any_order
    resume_within: Option = documented(
        Option(seconds, POSITIVE, allow_none=True),
        "How long a paused message may wait for its redelivery. Then the janitor quarantines it.",
    )
    on_abandoned: Option = PolicyOptions.on_abandoned
    on_error: Option = documented(
        one_of("release", "keep", "quarantine"),
        "How to end the key if the work raises an exception. Past the point of no return it is never released.",
    )
    decide: Option = documented(
        Option(decision, allow_none=True), '`(value, exception) -> "keep" | "release" | "quarantine" | None`.'
    )
    lease: Option = PolicyOptions.lease
    max_runtime: Option = documented(
        Option(seconds, POSITIVE), "How long the worker renews the lease: at least your longest message."
    )
    keep: Option = documented(
        Option(seconds, *UP_TO_90_DAYS),
        "How long a message is recognised. Longer than any redelivery or dead-letter replay.",
    )
    in_flight: Option = documented(
        one_of("later", "wait"),
        "How to treat a message that another worker has: `later`, or `wait` for its value first.",
    )
    wait: Option = documented(Option(seconds, NOT_NEGATIVE), "Longest time that such a message waits.")
    max_result: Option = documented(
        whole_number(most=LONGEST_RESULT),
        "Largest value to keep, in bytes of JSON. Replays of a larger one have no value.",
    )
    max_attempts: Option = documented(
        whole_number(least=1),
        "How many workers may vanish at one message. Then it is `Dead`, or raises `TooManyAttempts`.",
    )
    settle_wait: Option = documented(
        Option(seconds, NOT_NEGATIVE),
        "How long to repeat a write that the store does not take, before the verdict is `Later`.",
    )


CONSUMER: Final[Mapping[str, Option]] = {name: vars(ConsumerOptions)[name] for name in ConsumerOptions.__annotations__}

_ANALOGOUS: Final = {"max_body": "max_result", "on_expiry": "on_abandoned", "retries": "max_attempts"}


def load_consumer_policy(values: Mapping[str, Any], *, where: str) -> ConsumerPolicy:
    """Check and convert these keywords. `where` names the call in which you wrote them, for error texts.

    Raises `ConfigurationError` with every fault. Whether the store can follow it is checked when it is known.
    """
    of_http = {name: value for name, value in values.items() if name in POLICY_FIELDS - CONSUMER.keys()}
    rest = {name: value for name, value in values.items() if name not in of_http}
    loaded, faults = load_values(CONSUMER, rest, name_of=lambda name: f"{where}: {name}")
    imply_steps(loaded)
    for name in of_http:
        meant = f"{_ANALOGOUS[name]}" if name in _ANALOGOUS else f"@idempotent({name}=…) on a view"
        faults.append(
            f"{where}: {name}: this keyword is for HTTP endpoints, and messages have none. Did you mean {meant}?"
        )
    if loaded.get("in_flight") == "later":
        loaded["in_flight"] = "reject"
    if "max_result" in loaded:
        loaded["max_body"] = loaded.pop("max_result")
    if "max_runtime" in loaded and "lease" not in loaded:
        loaded["lease"] = max(min(ConsumerPolicy().lease, loaded["max_runtime"]), MIN_LEASE_SECONDS)
    policy = ConsumerPolicy(**loaded)
    faults += [f"{where}: {fault}" for fault in policy.faults(joint=True)]
    if faults:
        raise ConfigurationError(*faults)
    return policy
