"""Define the policy of an endpoint, and decide what happens to a record when the view ends.

Layers merge app → blueprint → nested blueprint → view. The innermost that sets a value decides it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import LARGEST_KEPT, ClaimRequest, OnExpiry, RequestInfo
from flask_idempotency.engine.values import valueclass

if TYPE_CHECKING:
    from flask_idempotency.engine.keys import Identity, Scope
    from flask_idempotency.engine.step_rules import Step

Effects: TypeAlias = Literal["plain", "marked", "deduplicated", "transactional", "steps"]

Mode: TypeAlias = Literal["observe", "warn", "enforce"]
"""Whether an endpoint is protected (`enforce`), or only observed: what enforcing would do is counted, and no request changes.
`warn` also names it in a response header."""


class Decision(Enum):
    """What happens to a record when the view has ended. A `decide` function may return a member, or its value as text."""

    KEEP = "keep"
    """Store the response. Retries get it."""
    RELEASE = "release"
    """Remove the record. The next request with this key runs. Past the point of no return it is a quarantine instead."""
    QUARANTINE = "quarantine"
    """Refuse retries until a resolver or an operator settles the key."""


Decide: TypeAlias = Callable[[Any, BaseException | None], "Decision | str | None"]
"""(response, exception) → a decision, its name, or None to leave it to the other rules."""

RELEASED_BY_DEFAULT = frozenset({307, 308, 401, 403, 407, 408, 409, 419, 421, 425, 429, 501, 503})
"""Statuses that say that the request had no effect. Another resource serves it (3xx), or it may succeed later.
After any other 5xx it is unknown how far the view came."""

UUID_LENGTH = 36
"""The characters of a key with `key_format="uuid"`."""


@valueclass(frozen=True, slots=True)
class Policy:
    """Everything that may differ from one endpoint to the next. Durations are seconds."""

    required: bool = False
    mode: Mode = "enforce"
    profile: str = "ietf"
    header: tuple[str, ...] = ("Idempotency-Key",)
    replayed_header: tuple[tuple[str, str], ...] = (("Idempotency-Replayed", "true"),)
    methods: frozenset[str] = frozenset({"POST", "PUT", "PATCH", "DELETE"})
    max_key_length: int = 255
    key_format: str = "any"
    keep: float = 24 * 3600.0
    remember: float | None = None
    """Until when a key is refused after its response has expired. None: it may run again after `keep`."""
    lease: float = 30.0
    max_runtime: float = 15 * 60.0
    in_flight: Literal["reject", "wait"] = "reject"
    wait: float = 10.0
    effects: Effects = "plain"
    on_abandoned: Literal["takeover", "quarantine"] | None = None
    on_error: Literal["release", "keep", "quarantine"] | None = None
    on_store_down: Literal["refuse", "allow"] = "refuse"
    keep_statuses: frozenset[int] = frozenset()
    release_statuses: frozenset[int] = frozenset()
    decide: Decide | None = None
    max_body: int = 256 * 1024
    max_request_body: int | None = None
    keep_headers: frozenset[str] = frozenset()
    fingerprint: Literal["canonical", "raw", "none"] = "canonical"
    ignore_fields: tuple[str, ...] = ()
    fingerprint_headers: tuple[str, ...] = ()
    form_field: str | None = None
    scope: Literal["key", "operation"] = "key"
    published: bool = True
    void: bool = False
    """Whether clients may void keys of this endpoint."""
    key: Callable[[Any], str | None] | None = None
    """Read the key from the request. None: a header or the form field carries it."""
    principal: str | None = None
    """The caller of every request. None: the application names the caller of each."""
    steps: tuple[Step, ...] = ()
    """The steps that the view may take. Only with `effects="steps"`."""
    dropped_steps: frozenset[str] = frozenset()
    """Names of earlier steps. A request that recorded one is resumed without it."""
    steps_in_any_order: bool = False
    """Whether a new step may begin although a recorded one has not been asked for yet."""
    resume_within: float | None = None
    """Seconds after which the janitor quarantines a paused request. None: as long as `keep`."""
    finish: Literal["client", "janitor"] = "client"
    """Who finishes a request that stopped between two steps: the client's retry, or the janitor as well."""
    finish_headers: tuple[str, ...] = ()
    """The request headers that are kept for the janitor."""

    def __post_init__(self) -> None:
        if self.remember == self.keep:
            # Nothing is remembered beyond the response, so it costs nothing.
            object.__setattr__(self, "remember", None)

    def step(self, name: str) -> Step | None:
        """Return the step of this name. None: this endpoint does not list it."""
        return next((step for step in self.steps if step.name == name), None)

    def recorded_as(self, name: str) -> str:
        """Return the name in journals and downstream keys: the original one of a renamed step. Any other stays as it is."""
        step = self.step(name)
        return name if step is None else step.recorded_as

    def recorded_step(self, name: str) -> Step | None:
        """Return the step that is recorded under this name, through `was` too. None: this endpoint has none.

        An entry under the new name of a renamed step fits no step: it has another identity, so the step would run again.
        """
        return next((step for step in self.steps if step.recorded_as == name), None)

    @property
    def lifetime(self) -> float:
        """For how long the key of a completed request is known, in seconds."""
        return self.keep if self.remember is None else max(self.keep, self.remember)

    @property
    def commits_rows(self) -> bool:
        """Whether this package commits rows of the view, with a claim and without one."""
        return self.effects == "transactional" or any(step.effects == "transactional" for step in self.steps)

    def commits_step(self, name: str | None) -> bool:
        """Return whether this package commits the rows of the step of this name."""
        return any(step.name == name and step.effects == "transactional" for step in self.steps)

    @property
    def shows_effects(self) -> bool:
        """Whether the store has a trace of each effect before it happens, so that a record without one had none.

        `marked`: the point of no return. `steps`: the entry of a step, unless it is one with `intent=False`.
        """
        if self.on_abandoned is not None:
            return False
        return self.effects == "marked" or (self.effects == "steps" and all(step.intent for step in self.steps))

    @property
    def has_plain_step(self) -> bool:
        """Whether a worker that vanishes may leave a step in doubt."""
        return any(step.effects == "plain" for step in self.steps)

    @property
    def on_expiry(self) -> OnExpiry:
        """What a claim writes into its record for the case that its worker vanishes."""
        match self.on_abandoned:
            case "takeover":
                return OnExpiry.TAKEOVER
            case "quarantine":
                return OnExpiry.QUARANTINE
            case None:
                return OnExpiry.QUARANTINE if self.effects == "plain" else OnExpiry.TAKEOVER

    def claim_requests(
        self,
        scope: Scope,
        client_key: str,
        identities: Sequence[Identity],
        prints: Sequence[bytes],
        *,
        method: str,
        operation: str,
        hashed: bool,
        timestamp: float | None,
        in_quota: bool = True,
        former_prints: Sequence[bytes] = (),
        trace: str = "",
    ) -> list[ClaimRequest]:
        """Return one request to claim the key for each identity, the newest first, with the fingerprint under that identity.

        `former_prints` are the fingerprints that an earlier release would have computed, if they differ.
        `hashed`: the records name the tenant and the principal by a keyed hash under the newest secret.
        """
        # Never by `str()`: that of a loader's `class Tenant(str, Enum)` is another text.
        tenant = "" if scope.tenant is None else scope.tenant
        principal = "" if scope.principal is None else scope.principal
        if hashed:
            pseudonym = identities[0].pseudonym
            tenant = "" if scope.tenant is None else pseudonym(tenant)
            principal = "" if scope.principal is None else pseudonym(principal)
        info = RequestInfo(tenant, principal, method, operation, trace)
        on_expiry, waited_for = self.on_expiry, self.in_flight == "wait"
        requests = []
        for identity, fingerprint, former in zip(
            identities, prints, former_prints or (None,) * len(prints), strict=True
        ):
            key = identity.storage_key(scope, client_key)
            requests.append(
                ClaimRequest(
                    key, fingerprint, on_expiry, info, waited_for, timestamp, in_quota, former_fingerprint=former
                )
            )
        return requests

    def stated(
        self, *, response: Any, status: int, error: BaseException | None, overruled: bool = False
    ) -> Decision | None:
        """Return the decision of `decide`, the status lists, `on_error` or the status itself. None: `effects` decides.

        `overruled`: an application hook replaced a success of the view with this status. So the status does not show what
        the view did, and a 503 of the hook does not mean that the request had no effect.
        """
        chosen = self.decide(response, error) if self.decide is not None else None
        if chosen is not None:
            return Decision(chosen)
        crashed = error is not None
        if status in self.keep_statuses and not crashed:
            return Decision.KEEP
        if status in self.release_statuses:
            return Decision.RELEASE
        failed = crashed or status >= 500
        if failed and self.on_error is not None:
            return Decision(self.on_error)
        if status in RELEASED_BY_DEFAULT and not crashed:
            return None if overruled else Decision.RELEASE
        return None if failed else Decision.KEEP

    def settled_as(self, stated: Decision | None, *, past_point: bool) -> Decision:
        """Complete the decision: `effects` decides if it is not stated, and past the point a release quarantines."""
        by_effects = Decision.QUARANTINE if self.effects == "plain" else Decision.RELEASE
        decision = by_effects if stated is None else stated
        return Decision.QUARANTINE if past_point and decision is Decision.RELEASE else decision

    def check(self, *, joint: bool, journals: bool = True) -> None:
        """Raise `ConfigurationError` if the values contradict each other. See `faults`."""
        if faults := self.faults(joint=joint, journals=journals):
            raise ConfigurationError(*faults)

    def faults(
        self,
        *,
        joint: bool,
        journals: bool = True,
        observations: bool = True,
        voids: bool = True,
        remembers: bool = True,
    ) -> list[str]:
        """Return one message for each contradiction: what it is, why, and what to set instead.

        `joint`: whether the store keeps its records in the database of the application's own session. `journals`: whether
        the store remembers steps. `observations`: whether it remembers the keys of observed requests. `voids`: whether it
        can void keys. `remembers`: whether it can refuse a key after its response has expired.
        """
        steps, transactional, finish = (
            self.effects == "steps",
            self.effects == "transactional",
            self.finish == "janitor",
        )
        # To the provider of a webhook, a redirect is a failure that it repeats. To any other client it may be a success.
        success = 400 if self.principal is None else 300
        both = self.keep_statuses & self.release_statuses
        # Whether a request that had an effect may leave no record, because it may run again.
        runs_again = self.effects == "deduplicated" or (steps and not all(step.intent for step in self.steps))
        if self.effects == "plain":
            unsure = {status for status in self.release_statuses if status >= 500} - RELEASED_BY_DEFAULT
            runs_again = self.on_error == "release" or self.on_abandoned == "takeover" or bool(unsure)
        rules = (
            (
                self.mode != "enforce" and not observations,
                f'mode="{self.mode}" needs a store that remembers observed keys, and this one has no `observations`. Use the '
                "Redis, SQL or memory store of this package, or leave `mode` out.",
            ),
            (
                bool(self.steps) and not steps,
                f'steps= and effects="{self.effects}" exclude each other: each step has its own effects. Leave effects= out, '
                'or write effects="steps".',
            ),
            (steps and not self.steps, 'effects="steps" needs steps=: list every step that the view may take.'),
            (
                steps and self.on_abandoned is not None,
                'effects="steps" and on_abandoned exclude each other: the recorded steps decide whether a retry may go on. '
                "Leave on_abandoned out.",
            ),
            (
                steps and not journals,
                'effects="steps" needs a store that remembers steps, and this one has no `journals`. Use the Redis, SQL or '
                "memory store of this package, or another `effects`.",
            ),
            (
                finish and not steps,
                'finish="janitor" needs effects="steps": without recorded steps, the janitor cannot tell where a request '
                "stopped. List its steps in steps=, or leave finish= out.",
            ),
            (
                finish and (self.principal is not None or self.key is not None),
                'finish="janitor" is not for webhooks: their provider sends each delivery again. Leave finish= out.',
            ),
            (
                finish and self.form_field is not None,
                'finish="janitor" and form_field exclude each other: the form carries the client\'s key, and the janitor keeps '
                "the form. Let the client send the key in a header, and write form_field=None.",
            ),
            (
                finish and (self.max_request_body or 0) > LARGEST_KEPT,
                f'finish="janitor" keeps the body of the request, and a store keeps at most {LARGEST_KEPT} bytes of it. Set '
                "max_request_body to that or less, or leave it out.",
            ),
            (
                self.void and self.on_store_down == "allow",
                'void=True and on_store_down="allow" exclude each other: without a store, a request runs under a voided key. '
                "Leave one of them out.",
            ),
            (
                self.void and runs_again,
                f'void=True and effects="{self.effects}" exclude each other where a request that failed may release its key '
                "although it had an effect: it would be called voided. Use steps, marked or transactional effects, or leave "
                "`void` out.",
            ),
            (
                self.void and not voids,
                "void=True needs a store that can void keys, and this one has no `void`. Use the Redis, SQL or memory store of "
                "this package, or leave `void` out.",
            ),
            (
                self.resume_within is not None and self.resume_within <= 0,
                "resume_within must be longer than 0 seconds.",
            ),
            (
                transactional and not joint,
                'effects="transactional" needs a SQL store on the session\'s database: the record could not be committed '
                "together with the business rows. Set IDEMPOTENCY_STORE to flask-sqlalchemy://, or use "
                'effects="marked" or "deduplicated" with this store.',
            ),
            (
                transactional and self.on_store_down == "allow",
                'effects="transactional" and on_store_down="allow" exclude each other: the store is the database that '
                "the view needs, so there is nothing to run on without it. Leave on_store_down as it is.",
            ),
            (
                transactional and any(status < success for status in self.release_statuses),
                f'effects="transactional" and release_statuses below {success} exclude each other: the rows of a released '
                "response are rolled back, and it would tell its client otherwise.",
            ),
            (
                bool(both),
                f"keep_statuses and release_statuses both name {_some(both)}: a response is either kept, or its key runs "
                "again. Name each status in one of them.",
            ),
            (
                self.fingerprint == "raw" and bool(self.ignore_fields),
                'fingerprint="raw" and ignore_fields exclude each other: raw bytes have no fields. Write ignore_fields=() '
                "beside the raw fingerprint, or leave the fingerprint canonical.",
            ),
            (
                self.key_format == "uuid" and self.max_key_length < UUID_LENGTH,
                f'key_format="uuid" and max_key_length={self.max_key_length} exclude each other: a UUID has {UUID_LENGTH} '
                f"characters, so every key would be refused. Set max_key_length to {UUID_LENGTH} or more, or leave it out.",
            ),
            (
                self.lease <= 0 or self.keep <= 0 or self.max_runtime <= 0,
                "lease, keep and max_runtime must be longer than 0 seconds.",
            ),
            (
                self.remember is not None and self.remember < self.keep,
                f"remember ({self.remember or 0:.0f} s) must not be shorter than keep ({self.keep:.0f} s). If another layer "
                "has set it, write remember=None here.",
            ),
            (
                self.remember is not None and not remembers,
                "remember= needs a store that refuses keys whose response has expired, and this one has no `remembers`. Use "
                "the Redis, SQL or memory store of this package, or leave `remember` out.",
            ),
            (
                self.max_runtime < self.lease,
                f"max_runtime ({self.max_runtime:g} s) must not be shorter than lease ({self.lease:g} s).",
            ),
        )
        found = [fault for broken, fault in rules if broken]
        if not self.steps and not self.dropped_steps:
            return found
        from flask_idempotency.engine.step_rules import step_faults  # for the endpoints that have steps

        return [*step_faults(self.steps, self.dropped_steps, joint=joint), *found]


def _some(statuses: frozenset[int]) -> str:
    first = ", ".join(map(str, sorted(statuses)[:5]))
    return f"{first} and {len(statuses) - 5} more" if len(statuses) > 5 else first


Override: TypeAlias = Mapping[str, Any]
"""The values that one layer sets, by `Policy`'s field names. The package `settings` loads and checks them."""

VIEW_FIELDS = frozenset({"key", "principal"})
"""Values that only a decorator of one view sets. They are no settings, and no keywords of `@idempotent`."""

POLICY_FIELDS = frozenset(field.name for field in fields(Policy)) - VIEW_FIELDS


def merge(base: Policy, *layers: Override) -> Policy:
    """Return `base` with the values of each layer, outermost first."""
    for layer in layers:
        base = replace(base, **layer)
    return base
