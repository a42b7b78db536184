"""Find a record by the client's key; settle or release every record of a filtered list.

The second has one reason for all of them, and the operator types how many there are. Its form carries the handle and the
version of each record, so one that has changed since stays as it is. So does one that has warnings: only its own form can
overrule these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from flask import current_app

from flask_idempotency.console import actions
from flask_idempotency.console.access import Action, Operator, Stopped
from flask_idempotency.console.pages import BULK, MOST_CHOICES, endpoints_of, filtered, look, see_other
from flask_idempotency.console.visit import Visit
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.operations import MESSAGE
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations import records
from flask_idempotency.operations.browse import Place, version_of
from flask_idempotency.operations.records import Case, RecordView, Refused
from flask_idempotency.web import operator
from flask_idempotency.web.client_keys import uses_of
from flask_idempotency.web.recorded_steps import undone

CHANGED: Final = "It has changed since you opened the form."
MOST: Final = 50
"""Records of one form."""

_CHOSEN: Final = re.compile(rf"[a-z2-7]{{77}}:[0-9a-f]{{32}}(?: [a-z2-7]{{77}}:[0-9a-f]{{32}}){{0,{MOST - 1}}}")

VERDICTS: Final[Mapping[str, tuple[str, str]]] = {
    "happened": (
        "Each happened",
        "Retries get the status that you give, without a body (response-not-kept). No view runs again.",
    ),
    "never": ("None happened", "Each key is released: the next retry runs the request."),
}


def find(visit: Visit) -> actions.Page:
    """Lead to the record of a client's key. The key is in no address, and no page shows it."""
    visit.admit()
    fields = actions.posted(visit)
    key = "" if fields is None else fields.get("key", "").strip()
    shown = {"endpoints": endpoints_of(), "tenants": sorted(visit.tenants or ())[:MOST_CHOICES]}

    def do(fields: Mapping[str, str]) -> actions.Page:
        named = {name: actions.line_of(fields, name) or None for name in ("tenant", "principal", "endpoint")}
        try:
            cases = uses_of(key, **named)
        except Refused as refused:
            raise actions.Invalid(str(refused)) from None
        # Of another tenant, or one that the operator may not see, there is no record.
        seen = [case.first for case in cases if visit.sees(case.first, operator.show_of(case.first)) is not None]
        uses = [(found.record.info.operation, records.handle_of(found.key)) for found in seen]
        if not uses:
            raise actions.Invalid(
                "There is no record of this key: it was never used, was released, or expired; or it is of another caller. "
                "Check the tenant and the principal."
            )
        if len(uses) == 1:
            return see_other(visit.url("record", handle=uses[0][1]))
        return visit.render("find.html", **shown, said=fields, fault=None, uses=uses)

    # Without the key: the next person at this screen must not read it.
    return actions.form(visit, "find.html", None if fields is None else {**fields, "key": ""}, do, **shown, uses=[])


def bulk(visit: Visit, verb: str) -> actions.Page:
    """Settle or release the records of a filtered list."""
    visit.admit()
    if verb not in BULK:
        raise visit.not_found()
    action: Action = "settle" if verb == "settle" else "release"
    fields, named = actions.posted(visit), list[tuple[str, str | None]]()
    if fields is None:
        _, views = look(visit, filtered(visit)[0], Place())
        named += [(view.handle, None) for view in views if view.condition in BULK[action]]
    elif _CHOSEN.fullmatch(fields.get("chosen", "")):
        named += [
            (handle, version) for handle, _, version in (each.partition(":") for each in fields["chosen"].split())
        ]
    chosen = _chosen(visit, action, named[:MOST])
    if not chosen:
        raise Stopped(409, "There is nothing to change", f"No record of this list is yours to {action} now.")
    shown = {
        "verb": action,
        "verdicts": VERDICTS if action == "settle" else {},
        "views": [each.view for each in chosen],
        "chosen": " ".join(f"{each.view.handle}:{each.version}" for each in chosen),
        "most": MOST,
    }

    def do(fields: Mapping[str, str]) -> actions.Page:
        reason, verdict, status = actions.reason_of(fields), fields.get("verdict", ""), fields.get("status", "").strip()
        if action == "settle" and verdict not in VERDICTS:
            raise actions.Invalid("Choose what happened. Nothing was changed.")
        happened = action == "settle" and verdict == "happened"
        if happened and not actions.STATUS.fullmatch(status):
            raise actions.Invalid("Give the status of the response: a number from 200 to 599. Nothing was changed.")
        if fields.get("typed", "").strip() != str(len(chosen)):
            raise actions.Invalid(f"Type how many records these are: {len(chosen)}. Nothing was changed.")
        done, left = 0, list[tuple[RecordView, str]]()
        for each in chosen:
            try:
                visit.operator = each.operator
                if not actions.is_version(each.version, each.case):
                    raise Refused(CHANGED)
                if action == "settle":
                    records.check_quarantined(each.case)
                _change(visit, each.case, reason, status=int(status) if happened else None)
                done += 1
            except Stopped as stopped:
                left.append((each.view, f"{stopped.title}."))
            except Refused as refused:
                left.append((each.view, str(refused)))
            except IdempotencyError as error:  # its text may name a server
                current_app.logger.warning("the console could not change a record: %s", cause_of(error))
                left.append((each.view, "The store or the key provider did not answer. Look whether it has changed."))
        visit.admit()
        return visit.render("bulk_done.html", verb=action, done=done, left=left)

    return actions.form(visit, "bulk.html", fields, do, **shown)


def _change(visit: Visit, case: Case, reason: str, *, status: int | None) -> None:
    """Complete this case with a status, or release it. Raises `Refused` if it stays as it is."""
    about = case.first.record.info
    policy = operator.policy_for(about)
    operator.check_cache(case)
    if status is not None:
        if left := undone(operator.recorded_of(case.first)[1], policy):
            raise Refused(f"Some effects would never happen: {', '.join(left)}. Settle its step, or use its own form.")
        stored, _ = operator.response_for(policy, status, None)
        if about.method == MESSAGE:
            stored = operator.value_for(about, None, named="The value")
        report = records.complete(operator.settler(), case, stored, actions.counted(visit, reason), policy)
    else:
        against, _ = operator.objections(case)
        if against:
            raise Refused(f"{against[0]} Its own form can overrule this.")
        report = records.release(operator.settler(), case, actions.counted(visit, reason), forced=False)
    if not report.settled:
        raise Refused(CHANGED)


@valueclass(frozen=True, slots=True)
class Chosen:
    """A record that a form is about, in the version that its operator saw."""

    view: RecordView
    case: Case
    operator: Operator | None
    version: str


def _chosen(visit: Visit, action: Action, named: Iterable[tuple[str, str | None]]) -> list[Chosen]:
    """Return the records of these handles to which the operator may do this. Without a version they have the present one.

    Stops the request with the last refusal if there is none.
    """
    chosen, refused = list[Chosen](), None
    for handle, version in named:
        try:
            _, found, view = visit.find(handle)
            if found is not None and view is not None:
                visit.admit_to(action, found, view)
                case = actions.case_of(visit, found)
                version = version or version_of(case, operator.identity().console)
                chosen.append(Chosen(view, case, visit.operator, version))
        except (Stopped, Refused) as error:
            refused = error
    visit.admit()
    if refused is not None and not chosen:
        raise refused
    return chosen
