"""The commands by which an operator resolves a key: `release` and `resolve`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from typing import Final

import click
from flask import current_app

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import (
    as_json_option,
    built,
    exit_on_error,
    paragraph,
    policies,
    say,
    settings,
    settler,
    show_of,
    word_of,
    word_options,
)
from flask_idempotency.cli.record_options import STDIN, RecordOptions, find_record, naming_options
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.records import (
    Case,
    Refused,
    ResolveReport,
    alive,
    check_quarantined,
    complete,
    release,
    release_warnings,
    reopen,
    way_out,
)
from flask_idempotency.web.janitor import policy_of, result_of

_FASTER: Final = "Another process resolved it first, or its worker has just renewed its lease. Nothing was changed."
_LEFT: Final = (
    "Records of the same use under other secrets that changed during this command, and stay as they are: {left}."
)
_CACHED: Final = (
    "It holds an answer, and other hosts have a cache that would go on giving it: IDEMPOTENCY_REDIS_URL is not set here, so "
    "that cannot be told. Nothing was changed. Do this where it is set as it is for the web hosts; --force does not help. If "
    "no host has a cache any more, see `A cache that is gone` in docs/operations.md."
)
_NOBODY: Final = (
    "Standard input held the key, or is at its end, so the question has no reply. Nothing was changed. Add --yes to skip "
    "the question."
)
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*([ -~]*)")

_force = click.option("--force", is_flag=True, help="Even if its worker may run, or its work was done.")
_yes = click.option("--yes", is_flag=True, help="Do not ask.")


@cli.command("release")
@naming_options
@_force
@_yes
@word_options(required=True)
@as_json_option
def release_command(named: RecordOptions, force: bool, yes: bool, actor: str, reason: str, as_json: bool) -> None:
    """Release a key that is in progress or quarantined: its next retry runs.

    Refused, with exit code 1, while its worker may still run, or if its work was done. --force overrules both; the audit
    event says so. With effects "deduplicated" and "transactional" a worker counts as gone when it has not renewed its lease
    for three leases. Asks first.
    """
    with exit_on_error(as_json=as_json):
        case = find_record(named, whole=True)
        _check_cache(case)
        done, forced = _freed(case, force=force, yes=yes, actor=actor, reason=reason)
    _say(done, "released", "Released: the next retry runs.", as_json=as_json, forced=forced)


@dataclass(frozen=True, slots=True)
class GivenResponse:
    """The response as the operator gave it."""

    status: int | None
    body_file: str | None
    content_type: str | None
    headers: tuple[str, ...] = field(repr=False)

    @property
    def anything(self) -> bool:
        return self.status is not None or self.body_file is not None or bool(self.content_type or self.headers)


@cli.command("resolve")
@naming_options
@click.option("--never-happened", "verdict", flag_value="never", help="No work was done: its next retry runs.")
@click.option(
    "--happened", "verdict", flag_value="happened", help="The work was done: retries get the response that you give."
)
@click.option("--reopen", "verdict", flag_value="reopen", help="Its response could not be opened, and can be now.")
@click.option("--status", type=click.IntRange(200, 599), help="The status of the response.")
@click.option(
    "--body-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Its body; - reads standard input. Without: none.",
)
@click.option("--content-type", metavar="TYPE", help="The type of the body; by default that of the application.")
@click.option(
    "--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="One of its headers; may be repeated."
)
@_force
@_yes
@word_options(required=True)
@as_json_option
def resolve_command(
    named: RecordOptions,
    verdict: str | None,
    status: int | None,
    body_file: str | None,
    content_type: str | None,
    headers: tuple[str, ...],
    force: bool,
    yes: bool,
    actor: str,
    reason: str,
    as_json: bool,
) -> None:
    """Resolve a quarantined key, once you have found out what happened.

    --never-happened releases it, and is refused as `release` is. With --happened retries get --status, the body and the
    headers as if the view had returned them; without a body, `response-not-kept` with that status. --reopen is for records
    that were quarantined for a missing key of the ring, for example. Asks first.
    """
    given = GivenResponse(status, body_file, content_type, headers)
    _check(verdict, given, named, force=force, yes=yes)
    word = word_of(actor, reason)
    forced = False
    dropped: list[str] = []
    with exit_on_error(as_json=as_json):
        case = find_record(named, whole=True)
        check_quarantined(case)
        _check_cache(case)
        policy = policy_of(policies(), case.first.record.info)
        match verdict:
            case "never":
                done, forced = _freed(case, force=force, yes=yes, actor=actor, reason=reason)
                said = "Released: the next retry runs."
            case "happened":
                result, dropped = _result(given, policy)
                _ask(case, policy, "Have retries answered with this from now on?", yes=yes)
                done = complete(settler(), case, result, word, keep=policy.keep)
                said = f"Resolved: retries get {result.status}" + ("." if result.kept else ", and `response-not-kept`.")
            case _:
                _ask(case, policy, "Have retries answered with what it holds from now on?", yes=yes)
                done = reopen(settler(), case, word, keep=policy.keep)
                said = "Reopened: retries get its answer."
        _check_done(done)
    if dropped:
        say(f"Not kept, because this endpoint keeps no such headers: {', '.join(dropped)}.", err=True)
    verb = {"never": "released", "happened": "completed"}.get(verdict or "", "reopened")
    _say(done, verb, said, as_json=as_json, forced=forced)


def _check(verdict: str | None, given: GivenResponse, named: RecordOptions, *, force: bool, yes: bool) -> None:
    if verdict is None:
        raise click.UsageError("Say what happened: --never-happened, --happened, or --reopen.")
    if (given.status is not None) != (verdict == "happened") or (given.anything and verdict != "happened"):
        raise click.UsageError("--happened needs the --status of the response, and only it takes a response.")
    if given.content_type is not None and given.body_file is None:
        raise click.UsageError("--content-type goes with --body-file.")
    if force and verdict != "never":
        raise click.UsageError("--force goes with --never-happened.")
    if given.body_file == STDIN and (named.key == STDIN or not yes):
        raise click.UsageError("Standard input is one thing: the key, the body, or a yes. See --yes.")
    if any(_FIELD.fullmatch(header) is None for header in given.headers):
        raise click.UsageError("--header takes one 'Name: value', in ASCII.")
    if any(header.lower().startswith(("content-type:", "content-length:")) for header in given.headers):
        raise click.UsageError("The type of a body is given by --content-type, and its length is known.")


def _check_cache(case: Case) -> None:
    """Raise `Refused` if only another host can invalidate the cached response of this case."""
    cache_marker = built().cache_marker
    if cache_marker is None or settings().redis_url is not None:
        return
    if any(found.record.payload is not None for found in case.found) and cache_marker.has_cache():
        raise Refused(_CACHED)


def _freed(case: Case, *, force: bool, yes: bool, actor: str, reason: str) -> tuple[ResolveReport, bool]:
    about = case.first.record.info
    policy = policy_of(policies(), about)
    known = about.operation in current_app.view_functions
    against = release_warnings(case, policy, known=known)
    if against and not force:
        raise Refused(" ".join([*against, "Nothing was changed.", way_out(case, policy, known=known)]))
    _ask(case, policy, "Let its next retry run?", yes=yes, against=against)
    done = release(settler(), case, word_of(actor, reason), forced=bool(against))
    _check_done(done)
    return done, bool(against)


def _ask(case: Case, policy: Policy, question: str, *, yes: bool, against: list[str] | None = None) -> None:
    """Show the record and its worker, and ask for a yes."""
    if yes:
        return
    lives = alive(case.first.record, policy) if against is None else None
    say("\n".join([paragraph(show_of(case.first)), *(against or []), *([lives] if lives else [])]), err=True)
    if not _confirmed(question):
        raise click.Abort


def _confirmed(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        say(err=True)
        raise Refused(_NOBODY) from None


def _check_done(done: ResolveReport) -> None:
    if not done.settled:
        raise Refused(_FASTER)


def _result(given: GivenResponse, policy: Policy) -> tuple[StoredResponse, list[str]]:
    """Return the response that retries will get, and the names of the headers that they will not."""
    fields = [match.group(1, 2) for header in given.headers if (match := _FIELD.fullmatch(header)) is not None]
    body = None if given.body_file is None else _read(given.body_file, most=policy.max_body + 1)
    response = current_app.response_class(body or b"", status=given.status)
    if given.content_type is not None:
        response.content_type = given.content_type
    elif body is None:
        del response.headers["Content-Type"]
    for name, value in fields:
        response.headers.add(name, value)
    result = result_of(current_app, response, policy)
    kept = {name.lower() for name, _ in result.metadata}
    dropped = [name for name, _ in fields if name.lower() not in kept]
    return (result.without_body() if body is None and result.status not in (204, 304) else result), dropped


def _read(path: str, *, most: int) -> bytes:
    with click.open_file(path, "rb") as file:
        body: bytes = file.read(most)
        return body


def _say(done: ResolveReport, verb: str, said: str, *, as_json: bool, forced: bool) -> None:
    if as_json:
        say(json.dumps({"verb": verb, "forced": forced, **asdict(done)}))
        return
    say("\n".join([said, *([_LEFT.format(left=done.left)] if done.left else [])]))
