"""The pages that change something: settle or release a record, purge a tenant, retry or discard messages. Each asks before.

A change of a record takes two forms: the first says what shall happen, the second shows what follows and confirms it. Both
carry the version of the record, so a form about a record that has changed since changes nothing.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Final, TypeAlias

from flask import Response, request

from flask_idempotency.assembly import identities
from flask_idempotency.console.access import HOUR_SECONDS, Action, Stopped, check_form, check_origin, form_of
from flask_idempotency.console.visit import Visit
from flask_idempotency.engine.audit import SAYS
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.keys import LONGEST_NAME, StorageKey
from flask_idempotency.engine.model import ERASED, StoredResponse
from flask_idempotency.engine.operations import MESSAGE
from flask_idempotency.engine.outbox import TOPIC
from flask_idempotency.engine.recovery import resume_fault
from flask_idempotency.operations import records
from flask_idempotency.operations.browse import version_of
from flask_idempotency.operations.outbox import CHANGES, change, retry_failed
from flask_idempotency.operations.records import AuditNote, Case, RecordView, Refused, ResolveReport
from flask_idempotency.steps import values
from flask_idempotency.web import operator
from flask_idempotency.web.purge import WIPED, Purge, cache_unknown, check_purge, purge_text
from flask_idempotency.web.recorded_steps import result_of_step, settled_step, undone, view_of

Page: TypeAlias = "Response | str | tuple[str, int]"

PURGE_SECONDS: Final = 20.0
"""How long a purge may wipe within one request. Servers and proxies end a request after 30 s."""

LONGEST_TYPE: Final = 100
"""Characters of a media type."""

SEQ: Final = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
MOST_RETRIED: Final = 500
"""Messages that one form looks at: each that is retried is a call of the database."""

STATUS: Final = re.compile(r"[2-5][0-9]{2}")

VERDICTS: Final[Mapping[str, tuple[str, str]]] = {
    "happened": ("It happened", "Retries get the response that you give here, and the view does not run again."),
    "never": ("It never happened", "The key is released: the next retry runs the request."),
    "reopen": ("It happened, and its response can be opened now", "Retries get the response that the record holds."),
    "resume": ("It may go on", "The next retry goes on after the finished steps."),
}
"""What an operator can say of a quarantined request, and what follows."""

STEP_VERDICTS: Final[Mapping[str, tuple[str, str]]] = {
    "happened": ("It happened", "Retries get the result that you give here, and the step does not run again."),
    "never": ("It never happened", "The next retry takes the step again."),
}
"""What an operator can say of one step in doubt, and what follows."""


def settle(visit: Visit, handle: str) -> Page:
    """Say what became of a quarantined request."""
    return _resolved(visit, handle, "settle")


def release(visit: Visit, handle: str) -> Page:
    """Let the next retry of a request run, in whatever state its record is."""
    return _resolved(visit, handle, "release")


def _resolved(visit: Visit, handle: str, action: Action) -> Page:
    view, case, fields = _opened(visit, handle, action)
    policy, message = operator.policy_for(case.first.record.info), view.method == MESSAGE
    possible, payload = ["never"], case.first.record.payload
    if action == "settle":
        possible.append("happened")
        if payload is not None and not case.first.record.erased and payload.sealed_by != ERASED:
            possible.append("reopen")
        if not any(resume_fault(found.record, operator.recorded_of(found)[0], ()) for found in case.found):
            possible.append("resume")
    shared = {
        **_shared(view, case, page=action),
        "verdicts": {name: words for name, words in VERDICTS.items() if name in possible},
        "message": message,
        "undone": undone(operator.recorded_of(case.first)[1], policy),
    }

    def do(fields: Mapping[str, str]) -> Page:
        reason, verdict = reason_of(fields), fields.get("verdict", "") if action == "settle" else "never"
        if verdict not in possible:
            raise Invalid("Choose what happened. Nothing was changed.")
        stored, dropped = _response(fields, view, case) if verdict == "happened" else (None, [])
        said = VERDICTS[verdict][1]
        if stored is not None and message:
            said = f"The next delivery gets {'this value' if stored.kept else 'no value'}, and the work does not run again."
        elif stored is not None:
            what = operator.described(stored) if stored.kept else f"`response-not-kept` with status {stored.status}"
            said = f"Retries get {what}, and the view does not run again."
        forced = verdict == "never" and bool(shared["against"])
        if not _confirmed(fields, forced=forced):
            carried = {name: fields.get(name, "") for name in ("verdict", "status", "content_type", "body")}
            shown = {"consequence": said, "reason": reason, "forced": forced, "dropped": dropped, "carried": carried}
            return visit.render("confirm.html", **shared, **shown)
        settler, word = operator.settler(), counted(visit, reason)
        if verdict == "never":
            done = records.release(settler, case, word, forced=forced)
        elif verdict == "resume":
            journals = [operator.recorded_of(each)[0] for each in case.found]
            done = records.resume(settler, case, journals, [() for _ in journals], word)
        else:
            done = records.complete(settler, case, stored, word, policy)
            if stored is not None and done.settled and operator.is_erased(case):
                said = "Retries get 410 `response-erased`, and not your response: its tenant was purged before."
        return _done(visit, view, case, done, said)

    return form(visit, f"{action}.html", fields, do, **shared)


def settle_step(visit: Visit, handle: str, number: int) -> Page:
    """Say what became of one step of a quarantined request, which is the step of this number."""

    def chosen(found: SeenRecord) -> bytes:
        steps = operator.recorded_of(found)[1]
        if not 1 <= number <= len(steps):
            raise visit.not_found()
        return steps[number - 1].entry.id + steps[number - 1].state.value.encode()

    view, case, fields = _opened(visit, handle, "settle", part=chosen)
    part, policy = chosen(case.first), operator.policy_for(case.first.record.info)
    journals, steps = zip(*map(operator.recorded_of, case.found), strict=True)
    step = steps[0][number - 1]
    if not step.in_doubt:
        raise Refused("This step is not in doubt: its result stays as it is. Nothing was changed.")
    shared = {**_shared(view, case, part=part), "step": view_of(step)}

    def do(fields: Mapping[str, str]) -> Page:
        reason, verdict = reason_of(fields), fields.get("verdict", "")
        if verdict not in STEP_VERDICTS:
            raise Invalid("Choose what happened. Nothing was changed.")
        result, typed = None, fields.get("result", "")
        if verdict == "happened":
            try:
                result = result_of_step(step.name, values.decode(typed.encode("utf-8", "surrogatepass")), None)
            except (IdempotencyError, ValueError):
                raise Invalid(
                    "Give the result of the step as JSON: a text has quotes, and no result is null. Nothing was changed."
                ) from None
        settled = []
        for each in steps:
            # A step whose item is unreadable is like others of its name, so under another secret it cannot be told.
            alike = [one for one in each if (one.name, one.stored_item) == (step.name, step.stored_item)]
            if each is not steps[0] and len(alike) != 1:
                raise Refused("This step cannot be told from others under another secret. Settle the whole request.")
            same = step if each is steps[0] else alike[0]
            try:
                settled.append([settled_step(same, policy, result, named="The result")])
            except Refused as refused:
                raise Invalid(str(refused)) from None
        forced = verdict == "never" and bool(shared["against"])
        if not _confirmed(fields, forced=forced):
            carried = {"verdict": verdict, "result": typed}
            shown = {"consequence": STEP_VERDICTS[verdict][1], "reason": reason, "forced": forced, "carried": carried}
            return visit.render("confirm.html", **shared, **shown, dropped=[])
        done = records.resume(operator.settler(), case, journals, settled, counted(visit, reason))
        left = [entry.name for entry in journals[0].entries if entry.in_doubt and entry.id != step.entry.id]
        said = f"Still in doubt: {', '.join(left)}." if left else "The next retry goes on after the finished steps."
        return _done(visit, view, case, done, said)

    return form(visit, "settle_step.html", fields, do, verdicts=STEP_VERDICTS, **shared)


def purge(visit: Visit) -> Page:
    """Erase the responses of one tenant, for good."""
    visit.admit_to_all()
    visit.admit_to("purge")
    fields = posted(visit)
    tenant = (request.args if fields is None else fields).get("tenant", "")
    if len(tenant) > LONGEST_NAME or not tenant.isprintable():
        raise Stopped(400, "That is no tenant", f"A tenant has at most {LONGEST_NAME} characters. Nothing was changed.")
    whom = operator.tids(tenant) if tenant else []
    check_purge(whom, shred=False)

    def do(fields: Mapping[str, str]) -> Page:
        reason = reason_of(fields)
        if not tenant or fields.get("typed") != tenant:
            raise Invalid("Type the name of the tenant twice, exactly. Nothing was changed.")
        with Purge(tenant, counted(visit, reason)) as erased:
            erased.shred(whom)
            erased.wipe(whom, budget=PURGE_SECONDS)
        said = purge_text(erased, shred=False, secrets=len(operator.settings().secrets), cache_unknown=cache_unknown())
        return visit.render("purged.html", tenant=tenant, said=said, finished=erased.finished)

    return form(visit, "purge.html", fields, do, tenant=tenant, consequence=WIPED)


def outbox_change(visit: Visit, verb: str) -> Page:
    """Send a message now, the failed ones of a topic or all failed ones; or discard one message."""
    visit.admit_to_all()
    visit.admit_to("outbox")
    fields = posted(visit)
    named = request.args if fields is None else fields
    seq, topic = named.get("seq", ""), named.get("topic", "")
    if verb not in CHANGES or not (SEQ.fullmatch(seq) if verb == "discard" or seq else TOPIC.fullmatch(topic or "-")):
        raise Stopped(400, "That is no message", "Choose one on the page of the outbox. Nothing was changed.")
    services = operator.outbox_of()

    def do(fields: Mapping[str, str]) -> Page:
        reason = reason_of(fields)
        if verb == "discard" and fields.get("typed") != seq:
            raise Invalid("Type the number of the message, exactly. Nothing was changed.")
        table, publish, note = services.table, services.observers, counted(visit, reason)
        if not seq:
            done = retry_failed(table, publish, topic or None, note, limit=MOST_RETRIED)
            return visit.render("outbox_done.html", said=f"Messages retried: {len(done.retried):,}.", more=done.more)
        change(table, publish, verb, int(seq), note)
        return visit.render("outbox_done.html", said=f"Message {seq}: {CHANGES[verb][0]}.", more=False)

    return form(visit, "outbox_change.html", fields, do, verb=verb, seq=seq, topic=topic)


# What a form must have before it may change anything.


class Invalid(Exception):
    """A field of a form is missing or wrong. The text says what to do."""


def posted(visit: Visit) -> Mapping[str, str] | None:
    """Return the fields of this form, which our page made for this operator. None: no form was sent."""
    if request.method != "POST":
        return None
    check_origin(request, any_scheme=visit.mounted.any_scheme)
    fields = form_of(request)
    check_form(request, fields, visit.who)
    return fields


def form(
    visit: Visit, template: str, fields: Mapping[str, str] | None, do: Callable[[Mapping[str, str]], Page], **shown: Any
) -> Page:
    """Do what the form says. Show it if it was not sent, and again with what is wrong in it."""
    if fields is None:
        return visit.render(template, **shown, said={}, fault=None)
    try:
        return do(fields)
    except Invalid as invalid:
        return visit.render(template, **shown, said=fields, fault=str(invalid)), 400


def _confirmed(fields: Mapping[str, str], *, forced: bool) -> bool:
    return fields.get("confirm") == "yes" and (not forced or fields.get("force") == "yes")


def reason_of(fields: Mapping[str, str]) -> str:
    reason = records.one_line(fields.get("reason", ""))
    if not reason:
        raise Invalid(
            f"Give a reason: one line of 1 to {LONGEST_NAME} characters, which names no key, person or body. Nothing was "
            "changed."
        )
    return reason


def counted(visit: Visit, reason: str) -> AuditNote:
    """Count a change that the operator confirmed, and return the note about it. Stop one too many."""
    actor, attempts, audit = visit.who.name, visit.mounted.attempts, operator.built().audit
    wait = attempts.take(actor)
    if wait is None and audit is not None and audit.count(actor, seconds=HOUR_SECONDS) >= attempts.most:
        wait = HOUR_SECONDS  # made by other processes too, and the trail does not say when
    if wait is not None:
        raise Stopped(
            429,
            "Too many changes",
            f"An operator may make {attempts.most} changes an hour. Nothing was changed. Many records with one cause need a "
            "resolver, or `flask idempotency resolve` in a script.",
            headers={"Retry-After": str(ceil(wait))},
        )
    return AuditNote(actor, reason)


def line_of(fields: Mapping[str, str], name: str) -> str:
    """Return a name in a form."""
    line = records.one_line(fields.get(name, ""))
    if line is None:
        raise Invalid(f"{name} must be one line of at most {LONGEST_NAME} characters.")
    return line


# One record.


def _opened(
    visit: Visit, handle: str, action: Action, *, part: Callable[[SeenRecord], bytes] = lambda found: b""
) -> tuple[RecordView, Case, Mapping[str, str] | None]:
    """Return the record of this handle, for an operator who may do this to it, and the form about its present version.

    `part` returns what of the record the form is about. Raises `Refused` for a record that is not to be settled.
    """
    key, found, view = visit.find(handle)
    if found is None or view is None:
        audit = operator.built().audit
        if request.method == "POST" and audit is not None and audit.entries(key, limit=1):
            raise _changed(visit, key, None)
        raise visit.not_found()
    visit.admit_to(action, found, view)
    fields, case = posted(visit), case_of(visit, found)
    if fields is not None and not is_version(fields.get("version", ""), case, part=part(case.first)):
        raise _changed(visit, case.first.key, view)
    if action == "settle":
        if view.paused:
            raise Refused(operator.PAUSED)
        records.check_quarantined(case)
    operator.check_cache(case)
    return view, case, fields


def is_version(sent: str, case: Case, *, part: bytes = b"") -> bool:
    """Return whether a form with this version is about the records as they are."""
    versions = [version_of(case, who.console, part=part) for who in identities(operator.settings())]
    return any(hmac.compare_digest(sent.encode("utf-8", "surrogatepass"), each.encode()) for each in versions)


def case_of(visit: Visit, found: SeenRecord) -> Case:
    """Return the case of this record: with those of the same use under other secrets."""
    operator.check_own(found.record)
    tenant: str | None = found.record.info.tenant or None
    if visit.tenants is not None:
        # The record may have a hash in place of the name.
        tenant = next((each for each in visit.tenants if found.key.tid in operator.tids(each)), tenant)
    return records.with_rotated(Case((found,)), operator.recovery(), operator.read, operator.every_tids(tenant))


def _shared(view: RecordView, case: Case, *, page: Action = "settle", part: bytes = b"") -> dict[str, Any]:
    """Return what both forms about this record show. A form about a part of it needs no warning of recorded steps."""
    against, out = operator.objections(case, steps=not part)
    return {
        "view": view,
        "version": version_of(case, operator.identity().console, part=part),
        "target": request.script_root + request.path,
        "page": page,
        "against": against,
        # A form has a box to tick, and no option of a command.
        "out": out.replace(": --force.", ": tick the box below."),
        "lives": records.alive(case.first.record, operator.policy_for(case.first.record.info)),
    }


def _changed(visit: Visit, key: StorageKey, view: RecordView | None) -> Stopped:
    """Return what to say to an operator whose form is about an earlier version of this record."""
    now = "It is gone." if view is None else f"It is {view.condition.value} now."
    audit = operator.built().audit
    entries = [] if audit is None else [each for each in audit.entries(key) if each.verb not in SAYS]
    last = "".join(f" The last change was by {each.actor} ({each.verb}): {each.reason}." for each in entries[-1:])
    return Stopped(
        409,
        "The record has changed since you opened this form",
        f"Nothing was changed. {now}{last}",
        page=visit.url("record", handle=records.handle_of(key)),
    )


def _response(fields: Mapping[str, str], view: RecordView, case: Case) -> tuple[StoredResponse, list[str]]:
    """Return what retries will get, and the names of the header fields that they will not."""
    about = case.first.record.info
    policy, typed = operator.policy_for(about), fields.get("body", "")
    # A browser sends the lines of a text field with CR and LF.
    body = typed.replace("\r\n", "\n").encode("utf-8", "surrogatepass") or None
    if view.method == MESSAGE:
        try:
            return operator.value_for(about, body, named="The value"), []
        except Refused as refused:
            raise Invalid(str(refused)) from None
    status, media_type = fields.get("status", "").strip(), fields.get("content_type", "").strip()
    if not STATUS.fullmatch(status):
        raise Invalid("Give the status of the response: a number from 200 to 599. Nothing was changed.")
    if not media_type.isprintable() or not media_type.isascii() or len(media_type) > LONGEST_TYPE:
        raise Invalid("A media type is one line in ASCII, such as application/json. Nothing was changed.")
    if body is not None and status in ("204", "304"):
        raise Invalid(f"A response with status {status} has no body. Leave it empty. Nothing was changed.")
    if media_type and body is None:
        raise Invalid("A media type goes with a body. Nothing was changed.")
    if body is not None and len(body) > policy.max_body:
        raise Invalid(
            f"The body has {len(body):,} bytes, and this endpoint keeps {policy.max_body:,}. Nothing was changed."
        )
    return operator.response_for(policy, int(status), body, content_type=media_type or None)


def _done(visit: Visit, view: RecordView, case: Case, done: ResolveReport, said: str) -> str:
    """Return the page after a change; or stop, if another process was faster."""
    if not done.settled:
        key, _, now = visit.find(view.handle)
        raise _changed(visit, key, now)
    return visit.render("done.html", view=view, said=said, left=done.left)
