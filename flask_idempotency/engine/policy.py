"""What an endpoint promises, and what becomes of each way its work can end.

Layers merge app → blueprint → nested blueprint → view; the innermost that names a value decides it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, TypeAlias

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.record import OnLapse

Effects: TypeAlias = Literal["plain", "marked", "deduplicated", "transactional"]


class Decision(Enum):
    """What becomes of a record when its work has ended."""

    KEEP = "keep"
    RELEASE = "release"
    QUARANTINE = "quarantine"


Decide: TypeAlias = Callable[[Any, BaseException | None], "Decision | str | None"]
"""(response, exception) → a decision, its name, or None to leave it to the other rules."""

RELEASED_BY_DEFAULT = frozenset({307, 308, 401, 403, 407, 408, 409, 419, 421, 425, 429})
"""Not final answers: somebody else answers (3xx), or the same request may well succeed later (P-45 in research/peers)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that may differ from one endpoint to the next. Durations are seconds."""

    required: bool = False
    profile: str = "ietf"
    header: tuple[str, ...] = ("Idempotency-Key",)
    replayed_header: tuple[tuple[str, str], ...] = (("Idempotency-Replayed", "true"),)
    methods: frozenset[str] = frozenset({"POST", "PUT", "PATCH", "DELETE"})
    max_key_length: int = 255
    key_format: str = "any"
    keep: float = 24 * 3600.0
    lease: float = 30.0
    max_runtime: float = 15 * 60.0
    in_flight: Literal["reject", "wait"] = "reject"
    wait: float = 10.0
    effects: Effects = "plain"
    on_abandoned: Literal["takeover", "quarantine"] | None = None
    on_error: Literal["release", "keep", "quarantine"] = "release"
    on_store_down: Literal["refuse", "allow"] = "refuse"
    keep_statuses: frozenset[int] = frozenset()
    release_statuses: frozenset[int] = frozenset()
    decide: Decide | None = None
    max_body: int = 256 * 1024
    max_request_body: int | None = None
    keep_headers: frozenset[str] = frozenset()
    fingerprint: Literal["canonical", "raw"] = "canonical"
    ignore_fields: tuple[str, ...] = ()
    fingerprint_headers: tuple[str, ...] = ()
    form_field: str | None = None
    scope: Literal["key", "operation"] = "key"

    @property
    def on_lapse(self) -> OnLapse:
        """What a claim writes into its record for the case that its owner vanishes."""
        match self.on_abandoned:
            case "takeover":
                return OnLapse.TAKEOVER
            case "quarantine":
                return OnLapse.QUARANTINE
            case None:
                return OnLapse.QUARANTINE if self.effects == "plain" else OnLapse.TAKEOVER

    def decision(self, *, response: Any, status: int, error: BaseException | None, past_point: bool) -> Decision:
        """What to do with a record whose work ended in this response, or in this unhandled error.

        Past the point of no return nothing is released: what would be is quarantined.
        """
        decision = self._chosen(response, error) or self._by_status(status, crashed=error is not None)
        return Decision.QUARANTINE if past_point and decision is Decision.RELEASE else decision

    def _chosen(self, response: Any, error: BaseException | None) -> Decision | None:
        chosen = self.decide(response, error) if self.decide is not None else None
        return None if chosen is None else Decision(chosen)

    def _by_status(self, status: int, *, crashed: bool) -> Decision:
        if status in self.keep_statuses and not crashed:
            return Decision.KEEP
        if status in self.release_statuses:
            return Decision.RELEASE
        if crashed or status >= 500:
            return Decision(self.on_error)
        return Decision.RELEASE if status in RELEASED_BY_DEFAULT else Decision.KEEP

    def check(self, *, joint: bool) -> None:
        """Raises `ConfigurationError` for a combination that could not keep its promise. See `faults`."""
        if faults := self.faults(joint=joint):
            raise ConfigurationError(*faults)

    def faults(self, *, joint: bool) -> list[str]:
        """One sentence for each combination that could not keep its promise: what cannot hold, why, and what can.

        `joint`: whether the store keeps its records in the database of the application's own session.
        """
        faults = []
        if self.effects == "transactional" and not joint:
            faults.append(
                'effects="transactional" needs a SQL store on the session\'s database: the record could not be committed '
                "together with the business rows. Set IDEMPOTENCY_STORE to flask-sqlalchemy://, or use "
                'effects="marked" or "deduplicated" with this store.'
            )
        if self.effects == "transactional" and self.on_store_down == "allow":
            faults.append(
                'effects="transactional" and on_store_down="allow" exclude each other: the store is the database that '
                "the view needs, so there is nothing to run on without it. Leave on_store_down as it is."
            )
        if self.effects == "transactional" and any(status < 400 for status in self.release_statuses):
            faults.append(
                'effects="transactional" and release_statuses below 400 exclude each other: the rows of a released answer '
                "are rolled back, and it would tell its client otherwise."
            )
        if self.lease <= 0 or self.keep <= 0 or self.max_runtime <= 0:
            faults.append("lease, keep and max_runtime must be longer than 0 seconds.")
        if self.max_runtime < self.lease:
            faults.append(f"max_runtime ({self.max_runtime:g} s) must not be shorter than lease ({self.lease:g} s).")
        return faults


Override: TypeAlias = Mapping[str, Any]
"""The values that one layer names; keys are `Policy`'s field names. Loaded and checked by `settings.py`."""

POLICY_FIELDS = frozenset(field.name for field in fields(Policy))


def merge(base: Policy, *layers: Override) -> Policy:
    """`base` with each layer's values laid over it, outermost first."""
    for layer in layers:
        base = replace(base, **layer)
    return base
