"""Find a record by the client's key; settle or release every record of a filtered list.

The second has one reason for all of them, and the operator types how many there are. Its form carries the handle and the
version of each record, so one that has changed since stays as it is. So does one that has warnings: only its own form can
overrule these.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from typing import Final

from flask import Response, current_app

from flask_idempotency.assembly import identities
from flask_idempotency.console.access import Action, Operator, Stopped
from flask_idempotency.console.actions import STATUS, Invalid, Page, case_of, counted, form, posted, reason_of
from flask_idempotency.console.pages import BULK, MOST_CHOICES, endpoints_of, filtered, look, see_other
from flask_idempotency.console.visit import Visit
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.keys import LONGEST_NAME
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


def find(visit: Visit) -> Page | Response:
    """Lead to the record of a client's key. The key is in no address, and no page shows it."""
    visit.admit()
    fields = posted(visit)

    def do(fields: Mapping[str, str]) -> Page | Response:
        named = {name: fields.get(name, "").strip() or None for name in ("tenant", "principal", "endpoint")}
        if any(
            value is not None and (len(value) > LONGEST_NAME or not value.isprintable()) for value in named.values()
        ):
            raise Invalid(f"A name is one line of at most {LONGEST_NAME} characters.")
        cases = list[Case]()
        if visit.tenants is None or named["tenant"] in visit.tenants:
            try:
                cases = uses_of(fields.get("key", "").strip(), **named)
            except Refused as refused:
                raise Invalid(str(refused)) from None
        handles = [records.handle_of(case.first.key) for case in cases]
        if not handles:
            raise Invalid(
                "There is no record of this key: it was never used, was released, or expired; or it is of another caller. "
                "Check the tenant and the principal."
            )
        if len(handles) == 1:
            return see_other(visit.url("record", handle=handles[0]))
        uses = [(case.first.record.info.operation, handle) for case, handle in zip(cases, handles, strict=True)]
        return visit.render("find.html", **shown, said={**named, "key": ""}, fault=None, uses=uses)

    shown = {"endpoints": endpoints_of(), "tenants": sorted(visit.tenants or ())[:MOST_CHOICES]}
    try:
        return visit.render("find.html", **shown, said={}, fault=None, uses=[]) if fields is None else do(fields)
    except Invalid as invalid:
        # Without the key: the next person at this screen must not read it.
        said = {**(fields or {}), "key": ""}
        return visit.render("find.html", **shown, said=said, fault=str(invalid), uses=[]), 400


def bulk(visit: Visit, verb: str) -> Page:
    """Settle or release the records of a filtered list."""
    visit.admit()
    if verb not in BULK:
        raise visit.not_found()
    action: Action = "settle" if verb == "settle" else "release"
    fields = posted(visit)
    chosen = _listed(visit, action) if fields is None else _carried(visit, action, fields)
    if not chosen:
        raise Stopped(409, "There is nothing to change", f"No record of this list is yours to {action} now.")
    shown = {
        "verb": action,
        "verdicts": VERDICTS if action == "settle" else {},
        "views": [each.view for each in chosen],
        "chosen": " ".join(f"{each.view.handle}:{each.version}" for each in chosen),
        "most": MOST,
    }

    def do(fields: Mapping[str, str]) -> Page:
        reason, verdict, status = reason_of(fields), fields.get("verdict", ""), fields.get("status", "").strip()
        if action == "settle" and verdict not in VERDICTS:
            raise Invalid("Choose what happened. Nothing was changed.")
        happened = action == "settle" and verdict == "happened"
        if happened and not STATUS.fullmatch(status):
            raise Invalid("Give the status of the response: a number from 200 to 599. Nothing was changed.")
        if fields.get("typed", "").strip() != str(len(chosen)):
            raise Invalid(f"Type how many records these are: {len(chosen)}. Nothing was changed.")
        done, left = 0, list[tuple[RecordView, str]]()
        for each in chosen:
            try:
                visit.operator = each.operator
                if not _is(each.version, each.case):
                    raise Refused(CHANGED)
                _change(visit, each.case, reason, status=int(status) if happened else None)
                done += 1
            except Stopped as stopped:
                left.append((each.view, f"{stopped.title}."))
            except Refused as refused:
                left.append((each.view, str(refused)))
            except IdempotencyError as error:  # its text may name a server
                current_app.logger.warning("the console could not change a record: %s", cause_of(error))
                left.append(
                    (each.view, "The store or the key provider did not answer: it may have changed. Look at it.")
                )
        visit.admit()
        return visit.render("bulk_done.html", verb=action, done=done, left=left)

    return form(visit, "bulk.html", fields, do, **shown)


def _change(visit: Visit, case: Case, reason: str, *, status: int | None) -> None:
    """Complete this case with a status, or release it. Raises `Refused` if it stays as it is."""
    about = case.first.record.info
    policy = operator.policy_for(about)
    operator.check_cache(case)
    if status is not None:
        records.check_quarantined(case)
        if left := undone(operator.recorded_of(case.first)[1], policy.step_rules):
            raise Refused(f"Some effects would never happen: {', '.join(left)}. Settle its step, or use its own form.")
        stored, _ = operator.response_for(policy, status, None)
        if about.method == MESSAGE:
            stored = operator.value_for(about, None, named="The value")
        settler, note = operator.settler(), counted(visit, reason)
        report = records.complete(settler, case, stored, note, keep=policy.keep, remember=policy.remember)
    else:
        against, _ = operator.objections(case)
        if against:
            raise Refused(f"{against[0]} Its own form can overrule this.")
        report = records.release(operator.settler(), case, counted(visit, reason), forced=False)
    if not report.settled:
        raise Refused(CHANGED)


@valueclass(frozen=True, slots=True)
class Chosen:
    """A record that a form is about, in the version that its operator saw."""

    view: RecordView
    case: Case
    operator: Operator | None
    version: str


def _listed(visit: Visit, action: Action) -> list[Chosen]:
    """Return the records of the filter in the address to which the operator may do this."""
    _, views = look(visit, filtered(visit).wanted, Place())
    chosen, refused = list[Chosen](), None
    for view in views:
        if len(chosen) < MOST and view.condition in BULK[action]:
            try:
                found = _found(visit, action, view.handle)
            except Stopped as stopped:
                refused = stopped
                continue
            except Refused:  # of another application
                continue
            if found is not None:
                chosen.append(Chosen(*found, version_of(found[1], operator.identity().console)))
    visit.admit()
    if refused is not None and not chosen:
        raise refused
    return chosen


def _carried(visit: Visit, action: Action, fields: Mapping[str, str]) -> list[Chosen]:
    """Return the records that this form carries. Stops one that the console did not make."""
    if not _CHOSEN.fullmatch(fields.get("chosen", "")):
        raise Stopped(400, "This is no form of the console", "It names no records. Nothing was changed.")
    chosen = list[Chosen]()
    for each in fields["chosen"].split(" "):
        handle, _, version = each.partition(":")
        try:
            found = _found(visit, action, handle)
        except Stopped as stopped:
            if stopped.status == 403:
                raise
            found = None
        if found is not None:
            chosen.append(Chosen(*found, version))
    visit.admit()
    return chosen


def _found(visit: Visit, action: Action, handle: str) -> tuple[RecordView, Case, Operator | None] | None:
    """Return this record for an operator who may do this to it, and its case. None: it is gone."""
    seen = visit.find(handle)
    if seen.found is None or seen.view is None:
        return None
    visit.admit_to(action, seen.found, seen.view)
    return seen.view, case_of(visit, seen.found), visit.operator


def _is(version: str, case: Case) -> bool:
    """Return whether this is the version of the records as they are."""
    ours = [version_of(case, who.console) for who in identities(operator.settings())]
    return any(hmac.compare_digest(version.encode(), each.encode()) for each in ours)
