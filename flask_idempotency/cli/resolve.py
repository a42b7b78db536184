"""The commands by which an operator resolves a key, `release` and `resolve`, and voids one: `void`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import click
from flask import current_app

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import Output, confirm, prints_json, word_options
from flask_idempotency.cli.output import clean, facts_of, say
from flask_idempotency.cli.record_options import (
    STDIN,
    RecordOptions,
    client_key,
    find_record,
    naming_options,
    steps_named,
)
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.model import OverQuota, RequestInfo, StoredResponse
from flask_idempotency.engine.operations import MESSAGE
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SeenStep, SettledStep
from flask_idempotency.operations import records
from flask_idempotency.operations.records import AuditNote, Case, Refused, ResolveReport
from flask_idempotency.settings.consumers import LONGEST_RESULT
from flask_idempotency.steps import values
from flask_idempotency.web import operator
from flask_idempotency.web.principals import identifies
from flask_idempotency.web.recorded_steps import result_of_step, settled_step, undone

_FASTER: Final = (
    "Another process resolved the key first, or its worker has just renewed its lease. Nothing was changed."
)
_ERASED: Final = (
    "Resolved: retries get 410 `response-erased`, and not your response. The tenant was purged after the first request with "
    "this key."
)
_LEFT: Final = "Records of the same use under other secrets changed during this command, and stay as they are: {left}."
_NOBODY: Final = (
    "Standard input held the key, or is at its end, so you cannot reply to the question. Nothing was changed. Add --yes to "
    "skip the question."
)
_RELEASED: Final = "Released: the next retry runs."
_VOIDED: Final = "Voided: no request runs under this key."
_NOT_VOIDED: Final = {
    "in-flight": "A request with this key is running.",
    "paused": "A request with this key may have had an effect, and the next retry runs it.",
    "outcome-unknown": "The outcome of the request with this key is unknown: see `flask idempotency resolve`.",
    "done": "A request with this key has completed.",
    "expired": "A request with this key has completed.",
    "of-other": "The key belongs to another caller.",
}
_STATUS: Final = "--happened needs --status, and only --happened takes a response."
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*([ -~]*)")

_STEP: Final = "--step goes with --happened --result JSON, or with --never-happened."

_force = click.option("--force", is_flag=True, help="Even if its worker may still run, or its request completed.")


@cli.command("release")
@naming_options
@_force
@word_options(required=True)
def release_command(named: RecordOptions, force: bool, yes: bool, word: AuditNote) -> Output:
    """Release a running or quarantined key: its next retry runs.

    Changes one record: it removes it. The command refuses and exits with 1 while the worker may still run, if the request
    completed, or if effects of its steps are recorded, because the next retry runs them again. --force overrules all three,
    and the audit event notes it. With effects "deduplicated" and "transactional" a worker counts as gone when it has not
    renewed its lease for three leases. You confirm first.

    \b
    Example:
      $ flask idempotency release 3f9a1c7e --reason "the bank has no such payment"
    """
    case = find_record(named, whole=True)
    operator.check_cache(case)
    done, forced = _freed(case, force=force, yes=yes, word=word)
    return _output(done, "released", _RELEASED, forced=forced)


@cli.command("void")
@naming_options
@click.option("--method", metavar="M", help="The method of the request. Needed if the endpoint takes keys for several.")
@word_options(required=True)
def void_command(named: RecordOptions, method: str | None, yes: bool, word: AuditNote) -> Output:
    """Void a key that no request has used: no request runs under it.

    Changes one record: it adds it, for `keep` or `remember`, and a request with this key gets 409. The command refuses
    and exits with 1 if a request with this key has run or may still have an effect. Name the client's key and the
    endpoint. You confirm first.

    \b
    Example:
      $ flask idempotency void --key - --endpoint pay --reason "ordered by phone"
    """
    if named.key is None or named.handle is not None or named.endpoint is None:
        raise click.UsageError(
            "Name the client's key by --key, and the endpoint by --endpoint: a key without a record has no ID."
        )
    loaders = operator.state().loaders
    if named.tenant is not None and loaders.tenant is None:
        raise click.UsageError("This application has no tenant_loader, so no key has a tenant. Leave --tenant out.")
    if named.principal is not None and loaders.principal is None and not identifies(current_app):
        raise click.UsageError("This application names no principals, so no key has one. Leave --principal out.")
    methods = operator.keyed_methods(named.endpoint)
    if (method := method.upper() if method else methods[0] if len(methods) == 1 else None) not in methods:
        raise click.UsageError(f"Name the method of the request by --method: {' or '.join(methods)}.")
    key = client_key(named.key)
    confirm(f"Void this key of {method} {clean(named.endpoint)}? A key that was mistyped is voided too.", yes=yes)
    found = operator.void(
        key, tenant=named.whose, principal=named.who, endpoint=named.endpoint, method=method, **asdict(word)
    )
    if isinstance(found, OverQuota):
        raise Refused(
            f"The tenant has reached its limit on {found.limit}, and a voided key counts. Nothing was changed."
        )
    if found.state != "voided":
        seen = None if found.key is None or found.record is None else SeenRecord(found.key, found.record)
        steps = "" if seen is None else operator.steps_taken(seen)
        raise Refused(f"{_NOT_VOIDED[found.state]}{steps} Nothing was changed.")
    return Output({"verb": "voided"}, [_VOIDED])


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the operator says happened: the options of `resolve`."""

    verdict: str | None
    step_name: str | None
    item: str | None = field(repr=False)
    result: str | None = field(repr=False)
    status: int | None
    body_file: str | None
    content_type: str | None
    headers: tuple[str, ...] = field(repr=False)
    force: bool

    def check(self, named: RecordOptions, *, yes: bool) -> None:
        """Raise `UsageError` for options that do not go together."""
        of_step, headers = self.step_name is not None, self.headers
        of_response = self.status is not None or self.body_file is not None or bool(self.content_type or headers)
        for wrong, said in (
            (self.verdict is None, "Name what happened: --never-happened, --happened, --reopen, or --resume."),
            (not of_step and (self.item, self.result) != (None, None), "--item and --result go with --step."),
            (of_step and self.verdict not in ("happened", "never"), _STEP),
            (of_step and (self.verdict == "happened") != (self.result is not None), _STEP),
            (of_step and of_response, "A step has a --result, and no status, body or headers."),
            (of_response and self.verdict != "happened", _STATUS),
            (self.content_type is not None and self.body_file is None, "--content-type goes with --body-file."),
            (self.force and self.verdict != "never", "--force goes with --never-happened."),
            (
                self.body_file == STDIN and (named.key == STDIN or not yes),
                "Standard input holds one thing: the key, the body, or your reply. See --yes.",
            ),
            (any(_FIELD.fullmatch(header) is None for header in headers), "--header takes one 'Name: value' in ASCII."),
            (
                any(header.lower().startswith(("content-type:", "content-length:")) for header in headers),
                "Set the type of the body by --content-type. The command sets its length.",
            ),
        ):
            if wrong:
                raise click.UsageError(said)
        self.value()

    def value(self) -> bytes | None:
        """Return the result of the step as tagged JSON. Raises `UsageError`, which does not quote it."""
        if self.result is None:
            return None
        try:
            return result_of_step(self.step_name or "", values.decode(self.result.encode()), None)
        except IdempotencyError:
            raise click.UsageError(
                "--result holds no JSON that a step can keep. Quote a text twice: --result '\"ch_1\"'."
            ) from None

    def settled(self, steps: Sequence[SeenStep], policy: Policy) -> SettledStep:
        """Return what became of the step among those of a record.

        Raises `Refused` if it is not recorded, or if the code that runs now cannot return the result.
        """
        named, met = steps_named(steps, policy, self.step_name or "", self.item)
        if len(met) == 1:
            return settled_step(met[0], policy, self.value(), named="--result")
        if named and self.item is None:
            raise Refused("This step is recorded with an item. Add --item, as `show` prints it. Nothing was changed.")
        raise Refused("No such step is recorded: `flask idempotency show` lists them. Nothing was changed.")


@cli.command("resolve")
@naming_options
@click.option("--never-happened", "verdict", flag_value="never", help="The work was not done: the next retry runs.")
@click.option("--happened", "verdict", flag_value="happened", help="The work was done: retries get your response.")
@click.option(
    "--reopen", "verdict", flag_value="reopen", help="The stored response could not be opened, and can be now."
)
@click.option("--resume", "verdict", flag_value="resume", help="The next retry goes on after the finished steps.")
@click.option("--step", "step_name", metavar="NAME", help="Say it of this step alone, and not of the request.")
@click.option("--item", metavar="ITEM", help="The item of the step, as `show` prints it.")
@click.option("--result", metavar="JSON", help="What the step returns to retries.")
@click.option("--status", type=click.IntRange(200, 599), help="The status of the response.")
@click.option(
    "--body-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="The body of the response; - reads standard input. Default: no body.",
)
@click.option(
    "--content-type",
    metavar="TYPE",
    help="The type of the body. Default: application/json for JSON, else that of the application.",
)
@click.option(
    "--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="A header of the response; repeat it for more."
)
@_force
@word_options(required=True)
def resolve_command(named: RecordOptions, yes: bool, word: AuditNote, **options: Any) -> Output:
    """Resolve a quarantined key, when you know what happened.

    Changes one record: it completes it or removes it. --never-happened releases it, and refuses as `release` does. With
    --happened retries get --status, the body and the headers as if the view had returned them; without a body,
    `response-not-kept` with that status. A message takes --body-file alone: the JSON value of its replays. You
    confirm first.

    With --step you say what happened to one step (see `show`): --happened with its --result, or --never-happened. When no
    step is left in doubt, the next retry goes on after the finished ones. --resume lets it go on where the quarantine has
    another reason: `steps-changed`, after you have deployed the fix, or `never-resumed`.

    \b
    Example:
      $ flask idempotency resolve 3f9a1c7e --happened --status 201 --reason paid
    """
    given = Resolution(**options)
    given.check(named, yes=yes)
    verdict, forced, notes = given.verdict, False, list[str]()
    case = find_record(named, whole=True)
    if operator.show_of(case.first).paused:
        raise Refused(operator.PAUSED)
    records.check_quarantined(case)
    operator.check_cache(case)
    about = case.first.record.info
    policy, of_message = operator.policy_for(about), about.method == MESSAGE
    if verdict == "resume" or given.step_name is not None:
        done, forced, said = _resumed(case, given, yes=yes, word=word)
        verdict = "resume"
    elif verdict == "never":
        (done, forced), said = _freed(case, force=given.force, yes=yes, word=word), _RELEASED
    elif verdict == "happened":
        stored, dropped = _stored(given, about, policy)
        shown = [] if of_message else [f"Response: {operator.described(stored)}"]
        if stored.body:
            shown.append(f"Body: {clean(stored.body.decode(errors='replace')[:SHOWN])}")
        if left := ", ".join(map(clean, undone(operator.recorded_of(case.first)[1], policy))):
            shown.append(f"No retry goes on then. These effects never happen, unless they did already: {left}.")
        what = "value" if of_message else "response"
        _ask(case, policy, *shown, f"Give this {what} to retries from now on?", yes=yes)
        done = records.complete(operator.settler(), case, stored, word, policy)
        if dropped:
            notes.append(f"Headers that this endpoint does not keep, and retries do not get: {', '.join(dropped)}.")
        said = f"Resolved: retries get {stored.status}" + ("." if stored.kept else ", and `response-not-kept`.")
        if of_message:
            said = "Resolved: the next delivery gets " + ("this value." if stored.kept else "no value.")
        if done.settled and operator.is_erased(case):
            said = _ERASED
            notes += [_ERASED] if prints_json() else []
    else:
        _ask(case, policy, "Give the stored response to retries from now on?", yes=yes)
        done = records.complete(operator.settler(), case, None, word, policy)
        said = "Reopened: retries get the stored response."
    return _output(done, _VERBS[verdict or ""], said, forced=forced, notes=notes)


SHOWN: Final = 1000
"""Characters of a body that the question shows."""

_VERBS: Final = {"never": "released", "happened": "completed", "resume": "resumed", "reopen": "reopened"}


def _freed(case: Case, *, force: bool, yes: bool, word: AuditNote) -> tuple[ResolveReport, bool]:
    """Release the key. Return the report, and whether a warning was overruled."""
    against = _warnings(case, force=force)
    _ask(case, operator.policy_for(case.first.record.info), "Let the next retry run?", yes=yes, against=against)
    return records.release(operator.settler(), case, word, forced=bool(against)), bool(against)


def _warnings(case: Case, *, force: bool, steps: bool = True) -> list[str]:
    """Return why the key should not run again. Raises `Refused` for any reason, unless `force` overrules it."""
    against, out = operator.objections(case, steps=steps)
    if against and not force:
        raise Refused(" ".join([*against, "Nothing was changed.", out]))
    return against


def _resumed(case: Case, given: Resolution, *, yes: bool, word: AuditNote) -> tuple[ResolveReport, bool, str]:
    """Settle a step, or let the next retry go on. Return the report, whether a warning was overruled, and what to say."""
    policy = operator.policy_for(case.first.record.info)
    journals, steps = zip(*map(operator.recorded_of, case.found), strict=True)
    settled = [() if given.step_name is None else (given.settled(each, policy),) for each in steps]
    against = _warnings(case, force=given.force, steps=False) if given.verdict == "never" else []
    _ask(case, policy, "Settle this step?" if settled[0] else "Let the next retry go on?", yes=yes, against=against)
    done = records.resume(operator.settler(), case, journals, settled, word)
    settled_ids = {each.step.entry.id for each in settled[0]}
    left = [entry.name for entry in journals[0].entries if entry.in_doubt and entry.id not in settled_ids]
    said = "Resumed: the next retry goes on after the finished steps."
    return done, bool(against), f"Settled. Still in doubt: {', '.join(left)}." if left else said


def _ask(case: Case, policy: Policy, *said: str, yes: bool, against: list[str] | None = None) -> None:
    """Show the record and its worker, and ask for a yes. The question is the last of what is said."""
    if yes:
        return
    lives = records.alive(case.first.record, policy) if against is None else None
    shown = [*facts_of(operator.show_of(case.first, steps=True)), *(against or []), *([lives] if lives else [])]
    try:
        confirm(said[-1], *shown, *said[:-1], yes=False)
    except click.Abort as error:
        if not isinstance(error.__context__, EOFError) or sys.stdin.isatty():
            raise
        say(err=True)
        raise Refused(_NOBODY) from None


def _stored(given: Resolution, about: RequestInfo, policy: Policy) -> tuple[StoredResponse, list[str]]:
    """Return the response that retries will get, and the names of the headers that they will not.

    Of a message it is the value that replays return. Without a file there is none.
    """
    of_message, body = about.method == MESSAGE, None
    if of_message and (given.status is not None or given.content_type is not None or given.headers):
        raise click.UsageError(
            "This record is of a message, which has no status and no headers. Give the value that replays return by "
            "--body-file, as JSON, or leave it out."
        )
    if given.body_file is not None:
        with click.open_file(given.body_file, "rb") as file:
            body = file.read((LONGEST_RESULT if of_message else policy.max_body) + 1)
    if of_message:
        return operator.value_for(about, body, named="--body-file"), []
    if given.status is None:
        raise click.UsageError(_STATUS)
    fields = [(match[1], match[2]) for header in given.headers if (match := _FIELD.fullmatch(header)) is not None]
    return operator.response_for(policy, given.status, body, content_type=given.content_type, fields=fields)


def _output(done: ResolveReport, verb: str, said: str, *, forced: bool, notes: Sequence[str] = ()) -> Output:
    if not done.settled:
        raise Refused(_FASTER)
    left = [_LEFT.format(left=done.left)] if done.left else []
    return Output({"verb": verb, "forced": forced, **asdict(done)}, [said, *left], notes=notes)
