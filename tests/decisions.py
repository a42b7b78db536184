"""What a policy decides about a record whose view has ended."""

from __future__ import annotations

from typing import Any

from flask_idempotency.engine.policy import Decision, Policy


def decision_of(
    policy: Policy,
    *,
    status: int,
    error: BaseException | None = None,
    response: Any = None,
    past_point: bool = False,
    overruled: bool = False,
) -> Decision:
    stated = policy.stated(response=response, status=status, error=error, overruled=overruled)
    return policy.settled_as(stated, past_point=past_point)
