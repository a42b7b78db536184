"""Report what enforcing would have done, or did, at each endpoint, and suggest its policy with reasons.

No suggestion loosens a policy: tests/operations/advice.py has each sentence with a test that following it keeps every promise.
It reads the counters of activity. Observed and enforced requests have the same counters here, so an endpoint that was switched
to `enforce` within the span has one row. A suggestion rests on what was counted, and its reason says what that is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Final

from flask_idempotency.engine import activity as names
from flask_idempotency.engine.activity import CALLERS, OBSERVED, OUTCOMES, WOULD, ActivityLog, percentile
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.activity import edges_object, slots_of, summary
from flask_idempotency.operations.times import format_edge, moment

FEW: Final = 20
"""With fewer requests than this, an endpoint gets no suggestion: a share of so few says little."""

DEFAULT_SPAN: Final = 7 * 24 * 3600.0

_WITHOUT_KEY: Final = (names.MISSING_KEY, names.UNKEYED)
_CAME: Final = tuple(dict.fromkeys((*OBSERVED[: OBSERVED.index(names.COMPLETED)], *OUTCOMES)))
"""What is counted of a request when it comes: one of these."""
_COUNTED: Final = tuple(dict.fromkeys((*_CAME, *OBSERVED, *names.ENDINGS)))


@valueclass(frozen=True, slots=True)
class Suggestion:
    """A value of a policy keyword, as it is written there, and the reason. No value: something to look at."""

    keyword: str
    value: str
    reason: str


@valueclass(frozen=True, slots=True)
class EndpointReport:
    """What was counted at one endpoint. `counts` has the observed and the enforced requests under the same names."""

    counts: Mapping[str, int]
    callers: Mapping[str, Mapping[str, int]]
    """Of the observed ones, by the kind of caller. Enforced requests are not counted by caller."""
    apart: Mapping[int, int]
    """How long after the first request concurrent duplicates came: numbers by slot."""
    ran: Mapping[int, int]
    """How long views ran."""
    keyless: Mapping[str, int]
    """Requests without a key, observed and enforced, by the kind of caller. An earlier release did not count the latter."""
    in_doubt: Mapping[str, int]
    """How often each step was left in doubt by its worker. One whose worker vanished is not counted."""

    def of(self, *outcomes: str) -> int:
        """Return how many requests had one of these outcomes."""
        return sum(self.counts.get(outcome, 0) for outcome in outcomes)

    @property
    def seen(self) -> int:
        """Requests in all. An enforced one without a key is counted only where a key is required."""
        return self.of(*_CAME)

    @property
    def keyed(self) -> int:
        """Requests that carried a key, also a malformed one. One that could not be observed counts as keyed."""
        return self.seen - self.of(*_WITHOUT_KEY)

    @property
    def concurrent(self) -> int:
        """Duplicates that came while the first request ran. If they were observed, both ran."""
        return self.of(names.CONFLICT, names.WAIT)

    def keyed_of(self, caller: str) -> tuple[int, int]:
        """Return how many observed requests of this kind of caller carried a key, and how many there were."""
        counts = self.callers.get(caller, {})
        seen = sum(counts.get(outcome, 0) for outcome in _CAME)
        return seen - sum(counts.get(outcome, 0) for outcome in _WITHOUT_KEY), seen


@valueclass(frozen=True, slots=True)
class Report:
    """The endpoints of an application over a time span, the busiest first."""

    now: float
    seconds: float
    endpoints: Mapping[str, EndpointReport]


def report(log: ActivityLog, owner: bytes, *, seconds: float = DEFAULT_SPAN) -> Report:
    """Return what was counted in the last `seconds` of the application with this mark: see `keys.owner_mark`.

    Raises `StoreUnavailable` if the store does not answer.
    """
    found = summary(log, owner, seconds=seconds)
    endpoints = {name: _read(figures.counts) for name, figures in found.endpoints.items()}
    busiest = sorted(endpoints.items(), key=lambda pair: (-pair[1].seen, pair[0]))
    return Report(found.now, found.seconds, {name: each for name, each in busiest if each.seen or each.counts})


def _read(counters: Mapping[str, int]) -> EndpointReport:
    counts, keyless, callers = Counter[str](), Counter[str](), defaultdict[str, Counter[str]](Counter)
    for counter, number in counters.items():
        outcome, _, caller = counter.removeprefix(WOULD).partition("@")
        if counter.startswith(WOULD):
            counts[outcome] += number
            callers[caller][outcome] += number
        elif counter in _COUNTED:
            counts[counter] += number
        if counter == names.without_key(caller) or (counter.startswith(WOULD) and outcome in _WITHOUT_KEY):
            keyless[caller] += number
    in_doubt = {
        counter.removeprefix(names.IN_DOUBT): number
        for counter, number in counters.items()
        if counter.startswith(names.IN_DOUBT)
    }
    apart, ran = slots_of(counters, names.APART_TIME), slots_of(counters, names.RAN_TIME, names.NEW_TIME)
    return EndpointReport(counts, callers, apart, ran, keyless, in_doubt)


# Suggestions.


def suggestions(found: EndpointReport, policy: Policy, *, joint: bool) -> list[Suggestion]:
    """Return what these counts suggest for an endpoint with this policy.

    `joint`: the store is in the application's own database.
    """
    if found.seen < FEW:
        few = f"Only {_counted(found.seen, 'request')} came: wait for more before you decide anything."
        return [Suggestion("", "", few)]
    made = (_of_required(found, policy), _of_waiting(found, policy), _of_effects(found, policy, joint=joint))
    scope = "one key for several endpoints, which they must not, or " if policy.scope == "key" else ""
    # By caller: an enforced request over its quota was refused, and that is no advice for it.
    unrecorded = sum(counts.get(names.OVER_QUOTA, 0) for counts in found.callers.values())
    counted = (
        (
            *(found.of(names.MISMATCH), "request", "ignore_fields", ""),
            "had the key of another request: another payload, path or query. The counts do not tell which. Ask these clients "
            f"whether they use {scope}a field that changes with each retry (ignore_fields).",
        ),
        (
            *(found.of(names.NOT_KEPT), "response", "max_body", ""),
            f"could not be kept: over max_body ({policy.max_body:,} bytes), broken off, or with a header that no response may "
            "have. Retries get `response-not-kept` instead of it.",
        ),
        (
            *(found.of(names.SETS_COOKIE), "response", "", ""),
            "set a cookie or changed the session, which no replay carries. Set what a retry needs too in an after_request "
            "hook: hooks run on replays.",
        ),
        (
            *(found.of(names.BAD_REQUEST), "request", "", ""),
            "had a malformed key, a truncated or too large body, or a caller without a name. Enforcing refuses them with 400, "
            "403, 413 or 500: the log names callers without a name.",
        ),
        (
            *(unrecorded, "request", "", ""),
            "came when as many keys of their tenant were remembered as may be, and were not recorded, so these counts are too "
            "low.",
        ),
        (
            *(found.of(names.FAILED), "request", "", ""),
            "could not be observed, so these counts are too low. The log names the kind of each failure once.",
        ),
    )
    return [
        *(each for each in made if each is not None),
        *(
            Suggestion(keyword, value, f"{_counted(number, what)} {reason}")
            for number, what, keyword, value, reason in counted
            if number
        ),
    ]


def _of_required(found: EndpointReport, policy: Policy) -> Suggestion | None:
    by_caller = [(caller, *found.keyed_of(caller)) for caller in CALLERS if found.callers.get(caller)]
    # An enforced request without a key is counted only where a key is required.
    keyed, seen = (sum(column) for column in list(zip(*by_caller, strict=True))[1:]) if by_caller else (0, 0)
    if policy.required:
        keyed, seen = found.keyed, found.seen
    if not seen or (policy.required and keyed == seen):
        return None
    shares = "; ".join(f"{its:,} of {all_of_it:,} by {caller}" for caller, its, all_of_it in by_caller if all_of_it)
    said = f"{keyed:,} of {seen:,} requests carried a key" + (f" ({shares})." if shares else ".")
    if keyed == seen:
        return Suggestion("required", "True", f"{said} So requiring one refuses none of these.")
    # The credential is all that is counted of a client: a name in a counter would let clients fill the store.
    named = ", ".join(f"{found.keyless[caller]:,} by {caller}" for caller in CALLERS if found.keyless.get(caller))
    came = f" Without one came: {named}." if named else ""
    if policy.required:
        return Suggestion("required", "", f"{said}{came} They get 400 and run nothing. Let these clients send a key.")
    if not keyed:
        return Suggestion("required", "", f"{said}{came} Until clients send keys, nothing is protected.")
    return Suggestion("required", "", f"{said}{came} Let these clients send a key, and then set required=True.")


def _of_waiting(found: EndpointReport, policy: Policy) -> Suggestion | None:
    apart, ran = percentile(found.apart, 0.5), percentile(found.ran, 0.99)
    if not found.concurrent or ran is None or (ran <= policy.wait and policy.in_flight == "wait"):
        return None
    soon = "" if apart is None else f", half of them within {format_edge(apart)}"
    took = (
        f"{'some' if ran == inf else '99 % of the'} views took {'over' if ran == inf else 'at most'} {format_edge(ran)}"
    )
    said = f"{_counted(found.concurrent, 'duplicate')} came while the first request ran{soon}, and {took}"
    if ran <= policy.wait:
        return Suggestion("in_flight", '"wait"', f"{said}: within `wait` ({policy.wait:g} s) they get its response.")
    more = (
        f"longer than `wait` ({policy.wait:g} s), so a waiting duplicate holds a thread and may get 409 all the same."
    )
    return Suggestion("in_flight", '"reject"', f"{said}: {more}")


def _of_effects(found: EndpointReport, policy: Policy, *, joint: bool) -> Suggestion | None:
    quarantined, met = found.of(names.QUARANTINED), found.of(names.UNKNOWN)
    if not quarantined and not met:
        return None
    ended = f"{_counted(quarantined, 'key')} ended in quarantine" if quarantined else "no key ended in quarantine"
    said = f"{ended} (an exception, a 5xx or a worker that vanished), and {_counted(met, 'retry', 'retries')} met such a key. "
    if policy.effects == "steps":
        # Another kind of effects would forget what is recorded: only the step that was in doubt can become a better one.
        left = "; ".join(f"{step}, {number:,} times" for step, number in sorted(found.in_doubt.items()))
        said += f"Steps left in doubt: {left}. " if left else ""
        said += (
            "A plain step is in doubt until an operator or a resolver settles it: `flask idempotency show` names it. Give it a "
            "resolver, name errors that are harmless, or give its effect a downstream key."
        )
        return Suggestion("steps", "", said[0].upper() + said[1:])
    possible = (
        '"transactional" if all its effects are rows of your database, which also has the records; "deduplicated" if each '
        "effect carries a downstream key or a marker row"
        if joint
        else '"deduplicated" if each effect carries a downstream key or a marker row ("transactional" is not possible: the '
        "store is not in your database)"
    )
    said += f'Under effects="{policy.effects}" an operator or a resolver settles each.'
    if policy.effects in ("plain", "marked"):
        said += f" What the view does is not counted: declare {possible}"
        said += '; "marked" if it can name its point of no return.' if policy.effects == "plain" else "."
    return Suggestion("effects", "", said[0].upper() + said[1:])


def _counted(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


# For machines.


def as_object(found: Report, suggested: Mapping[str, Sequence[Suggestion]]) -> dict[str, object]:
    """Return this report for JSON, with the suggestions of each endpoint."""
    return {
        "now": moment(found.now),
        "seconds": found.seconds,
        "endpoints": {
            name: {
                "seen": each.seen,
                "keyed": each.keyed,
                "counts": {outcome: each.of(outcome) for outcome in _COUNTED},
                "callers": {caller: dict(counts) for caller, counts in sorted(each.callers.items())},
                "apart": _percentiles(each.apart),
                "ran": _percentiles(each.ran),
                "suggestions": [asdict(suggestion) for suggestion in suggested.get(name, ())],
            }
            for name, each in found.endpoints.items()
        },
    }


def _percentiles(slots: Mapping[int, int]) -> dict[str, float | None]:
    return edges_object(sum(slots.values()), p50=percentile(slots, 0.5), p99=percentile(slots, 0.99))
