"""Commands about one tenant: erase its responses (`purge`), show and set its limits (`quota`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import click
from flask.cli import AppGroup

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import as_json_option, chosen, exit_on_error, tenant_options, word_of, word_options
from flask_idempotency.cli.output import Column, Table, say
from flask_idempotency.cli.progress import Counts, show_progress
from flask_idempotency.engine.capabilities import Ledger
from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError
from flask_idempotency.engine.events import QuotaSet, TenantErased
from flask_idempotency.engine.quota import LIMITS, MAX_LIMIT, NewKeys, Quota, Usage
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.rotate import still_open, wipe, wipe_condemned, wipe_steps
from flask_idempotency.operations.admin import TenantUsage, holds_sealed, quota_set, quota_show
from flask_idempotency.operations.admin import shred as shred_keys
from flask_idempotency.operations.records import AuditNote, Refused
from flask_idempotency.web.operator import (
    built,
    check_layout,
    policy_for,
    pseudonym,
    publish,
    settings,
    state,
    tids,
    tids_by_secret,
)

_STAYS: Final = "Its records stay: until they expire, a retry gets 410 and does not run again."
_SHREDDED: Final = (
    f"Every encrypted response of this tenant becomes unreadable, for good. {_STAYS} No retry gets a plain response either. "
    "Plain responses stay readable in the store until they expire, or until `flask idempotency purge` without --shred or "
    "`flask idempotency rotate` wipes them."
)
_WIPED: Final = (
    f"Every response of this tenant is erased, for good: encrypted ones become unreadable, and all of them are wiped from the "
    f"store, plain ones too. {_STAYS}"
)
_BACKUPS: Final = (
    "Backups made before hold the same data keys, wrapped by the ring: to make those unreadable too, rotate to a new key of "
    "the ring and destroy the old one. After restoring such a backup, purge again."
)
_PLAIN_BACKUPS: Final = (
    "Plain responses can be read in backups for as long as you keep those, and in the files of a database until it has removed "
    "the old versions of rows (VACUUM) and its logs."
)
_SECRETS: Final = (
    "Secrets searched: {secrets}. Keys that were claimed under another secret have other data keys, which are still there: if "
    "another secret was in use within the last `keep`, list it in IDEMPOTENCY_SECRET here and purge again."
)
_NO_CACHE: Final = (
    "IDEMPOTENCY_REDIS_URL is not set here, so no cache was invalidated, and other hosts have one: purge again where it is "
    "set. Until then the cache replays encrypted responses for up to a minute, and plain ones until they expire."
)
_OPEN: Final = (
    "Uses of keys without a response so far: {still_open}. No retry gets a response that a late worker stores, but a plain one "
    "can be read in the store: purge again when these requests have ended."
)
_NOT_SEARCHED: Final = (
    "This store cannot be searched for unfinished records: it still holds responses that no worker could open, and plain ones "
    "that late workers store can be read in it. Purge again when all running requests have ended."
)


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge did. None: not requested, or this store cannot do it or tell."""

    data_keys: int
    wiped: int | None = None
    condemned: int | None = None
    still_open: int | None = None


@cli.command("purge")
@tenant_options
@click.option("--shred", is_flag=True, help="Only destroy the data keys, without a scan of every response.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@word_options(required=True)
@as_json_option
def purge(tenant: str | None, no_tenant: bool, shred: bool, yes: bool, actor: str, reason: str, as_json: bool) -> None:
    """Erase the responses of one tenant, for good.

    Destroys the tenant's data keys, and wipes its stored responses. Its records stay: a retry gets 410 and does not run
    again. You confirm first. Safe to interrupt and to run again. Exits with 2 if it is unknown whether all of it is done.

    Run it where every secret is listed that was in use within the last `keep`: a tenant has other data keys under each. If
    any host has IDEMPOTENCY_REDIS_URL, run it where that is set, so that the cache is invalidated too.

    \b
    Example:
      $ flask idempotency purge --tenant acme --reason "contract ended"
    """
    tenant = chosen(tenant, no_tenant=no_tenant)
    with exit_on_error(as_json=as_json):
        whom = tids(tenant)
        _check(whom, shred=shred)
        if not yes:
            say(_SHREDDED if shred else _WIPED, err=True)
            click.confirm("Destroy its data keys?" if shred else "Erase its responses?", abort=True, err=True)
        erased = _Erasing(tenant, word_of(actor, reason), as_json=as_json).run(whom, shred=shred)
    cache_unknown, secrets = _cache_unknown(), len(settings().secrets)
    if as_json:
        say(json.dumps(_purge_object(erased, shred=shred, secrets=secrets, cache_unknown=cache_unknown)))
    else:
        say("\n".join(_purge_text(erased, shred=shred, secrets=secrets, cache_unknown=cache_unknown)))


def _cache_unknown() -> bool:
    """Return whether there may be a cache that this host cannot invalidate. True also if that is unknown."""
    parts = built()
    if parts.schema is None or settings().redis_url is not None:
        return False
    try:
        return parts.cache_marker is None or parts.cache_marker.has_cache()
    except IdempotencyError:  # the responses are erased by now, and the operator must see that
        return True


def _responses_of(whom: Sequence[bytes]) -> int | None:
    """Return how many records the tenant has. None: no quota applies, so the store does not count them."""
    ledger = built().ledger
    return sum(ledger.usage(tid).records for tid in whom) if ledger is not None and _counting() else None


def _check(whom: Sequence[bytes], *, shred: bool) -> None:
    check_layout()
    parts = built()
    if parts.data_keys is None:
        raise Refused("The store of this application keeps no data keys, so nothing in it can be erased.")
    if not shred and parts.responses is None:
        raise Refused("This store cannot list its responses, so they cannot be wiped. See --shred.")
    if shred and settings().key_ring is None and not holds_sealed(parts.data_keys, whom):
        raise Refused(
            "There is no key ring here and no data key of this tenant in the store, so none of its responses is encrypted: "
            "purge without --shred, which wipes plain responses; and set IDEMPOTENCY_ENCRYPTION to on for later responses."
        )


class _Erasing:
    """One run. It publishes its audit event also when it is interrupted."""

    def __init__(self, tenant: str | None, word: AuditNote, *, as_json: bool) -> None:
        self._tenant = pseudonym(tenant)
        self._word = word
        self._as_json = as_json
        self._data_keys = 0
        self._wiped = 0

    def run(self, whom: Sequence[bytes], *, shred: bool) -> PurgeReport:
        try:
            erased = self._erase(whom, shred=shred)
        except BaseException:  # Ctrl-C too: what was erased until then is gone
            self._publish(finished=False)
            raise
        self._publish(finished=True)
        return erased

    def _erase(self, whom: Sequence[bytes], *, shred: bool) -> PurgeReport:
        parts = built()
        if parts.data_keys is not None:
            self._data_keys = shred_keys(parts.data_keys, whom)
        if shred or parts.responses is None:
            return PurgeReport(self._data_keys)
        # Count first: a response that completes after this is erased already, and the scan meets it or it is among these.
        running = None if parts.recovery is None else still_open(parts.recovery, whom)
        condemned = None
        with show_progress(
            "responses", total=partial(_responses_of, whom), as_json=self._as_json, so_far=self._so_far
        ) as progress:
            drain = Batcher(batch=500, budget=float("inf"), on_progress=progress)
            report = wipe(parts.responses, whom, drain=drain, on_progress=self._count)
            if parts.recovery is not None:
                before = self._wiped
                condemned = wipe_condemned(
                    parts.recovery,
                    whom,
                    keep_of=lambda about: policy_for(about).keep,
                    on_progress=lambda wiped: self._count(before + wiped),
                )
            if parts.journals is not None:
                so_far = self._wiped
                wipe_steps(parts.journals, whom, on_progress=lambda wiped: self._count(so_far + wiped))
            progress.counts = Counts(self._wiped, report.passed_over)
        return PurgeReport(self._data_keys, self._wiped, condemned, running)

    def _count(self, wiped: int) -> None:
        self._wiped = wiped

    def _so_far(self) -> str:
        return f"Data keys destroyed: {self._data_keys:,}. Responses wiped: {self._wiped:,}."

    def _publish(self, *, finished: bool) -> None:
        publish(
            TenantErased(
                record="",
                operation="",
                tenant=self._tenant,
                actor=self._word.actor,
                reason=self._word.reason,
                data_keys=self._data_keys,
                wiped=self._wiped,
                finished=finished,
            )
        )


def _purge_object(erased: PurgeReport, *, shred: bool, secrets: int, cache_unknown: bool) -> dict[str, object]:
    wiped = {"wiped": erased.wiped, "condemned": erased.condemned, "still_open": erased.still_open}
    return {
        "data_keys": erased.data_keys,
        "secrets": secrets,
        "cache_unknown": cache_unknown,
        **({} if shred else wiped),
    }


def _purge_text(erased: PurgeReport, *, shred: bool, secrets: int, cache_unknown: bool) -> list[str]:
    said = [f"Data keys destroyed: {erased.data_keys}."]
    if not shred:
        said[0] += f" Responses wiped: {erased.wiped}."
    said += [_SHREDDED if shred else _WIPED, _SECRETS.format(secrets=secrets)]
    if not shred and erased.still_open is None:
        said.append(_NOT_SEARCHED)
    elif erased.still_open:
        said.append(_OPEN.format(still_open=erased.still_open))
    if cache_unknown:
        said.append(_NO_CACHE)
    return [*said, _BACKUPS, *([] if shred else [_PLAIN_BACKUPS])]


# `flask idempotency quota …`

_OFF = (
    "Quotas are off in this application, so it counts no keys and no limit holds: set IDEMPOTENCY_QUOTA_* or register "
    "a quota_loader."
)
_DIVIDED = (
    "Each of its {parts} parts has a share of that, rounded up: a full part refuses, even if others are not full."
)

quota = AppGroup("quota", help="Show and set the limits of a tenant.")
cli.add_command(quota)


@quota.command("show")
@tenant_options
@click.option("--all", "every_tenant", is_flag=True, help="Every tenant with a ledger, by its id in the store.")
@as_json_option
def show(tenant: str | None, no_tenant: bool, every_tenant: bool, as_json: bool) -> None:
    """Show the usage and the limits of a tenant.

    Read-only. An operator's limit (`quota set`) overrides that of a quota_loader, which overrides the configuration.

    \b
    Example:
      $ flask idempotency quota show --tenant acme
    """
    if every_tenant == (no_tenant or tenant is not None):
        raise click.UsageError("Name the tenant: --tenant T, --no-tenant, or --all.")
    with exit_on_error(as_json=as_json):
        ledger = _ledger()
        if every_tenant:
            shown = [quota_show(ledger, [[tid]], name=tid.hex()) for tid in sorted(ledger.tenants())]
        else:
            shown = [quota_show(ledger, tids_by_secret(tenant), name=tenant)]
    configured = settings().quota
    if as_json:
        say(
            json.dumps(
                {"counting": _counting(), "configured": _limits(configured), "tenants": list(map(_quota_object, shown))}
            )
        )
        return
    for number, each in enumerate(shown):
        say(*[""] * (number > 0), _quota_table(each, configured))
    if not shown:
        say("No tenant has a ledger.")
    if not _counting():
        say(_OFF)


@quota.command("set")
@tenant_options
@click.option("--records", type=click.IntRange(0, MAX_LIMIT), help="Most live records.")
@click.option("--bytes", "byte_count", type=click.IntRange(0, MAX_LIMIT), help="Most bytes of stored responses.")
@click.option("--in-flight", type=click.IntRange(0, MAX_LIMIT), help="Most requests that run at once.")
@click.option("--new-keys", type=click.IntRange(0, MAX_LIMIT), help="Most new keys in each window; needs --per.")
@click.option("--per", type=float, metavar="SECONDS", help="The length of each window.")
@click.option("--clear", is_flag=True, help="Remove all limits that were set before.")
@word_options(required=False)
@as_json_option
def set_(
    tenant: str | None,
    no_tenant: bool,
    records: int | None,
    byte_count: int | None,
    in_flight: int | None,
    new_keys: int | None,
    per: float | None,
    clear: bool,
    actor: str,
    reason: str,
    as_json: bool,
) -> None:
    """Set limits of one tenant, from its next new key on.

    Changes the limits in the store. They override the application's code and configuration. Limits that you do not name stay
    as they were set before.

    \b
    Example:
      $ flask idempotency quota set --tenant acme --records 100000
    """
    if (new_keys is None) != (per is None):
        raise click.UsageError("--new-keys and --per go together: a number of keys in each window of seconds.")
    tenant = chosen(tenant, no_tenant=no_tenant)
    with exit_on_error(as_json=as_json):
        rate = None if new_keys is None or per is None else NewKeys(new_keys, per)
        try:
            named = Quota(records, byte_count, in_flight, rate)
        except ConfigurationError as error:
            raise Refused(" ".join(error.faults)) from error
        if named.unlimited and not clear:
            raise click.UsageError("Name a limit, or --clear.")
        check_layout()
        limits = quota_set(_ledger(), tids_by_secret(tenant), named, clear=clear)
    now_set, word = _limits(limits), word_of(actor, reason)
    publish(QuotaSet("", "", tenant=pseudonym(tenant), actor=word.actor, reason=word.reason, limits=now_set))
    say(json.dumps({"counting": _counting(), "limits": now_set}) if as_json else _limits_text(limits))


def _ledger() -> Ledger:
    ledger = built().ledger
    if ledger is None:
        raise Refused("The store of this application does not count: it has no `ledger`.")
    return ledger


def _counting() -> bool:
    return settings().quota is not None or state().loaders.quota is not None


def _limits_text(limits: Quota) -> str:
    lines = [f"{name}: {_shown(value)}" for name, value in _limits(limits).items() if value is not None]
    if lines and settings().tenant_shards > 1:
        lines.append(_DIVIDED.format(parts=settings().tenant_shards))
    return "\n".join(
        [*(lines or ["No limits set here: those of the application hold."]), *([] if _counting() else [_OFF])]
    )


def _limits(quota: Quota | None) -> dict[str, object]:
    """Return limits by their names in the output."""
    return dict(zip(LIMITS, asdict(quota or Quota()).values(), strict=True))


def _used(usage: Usage) -> dict[str, int]:
    return dict(zip(LIMITS, asdict(usage).values(), strict=True))


def _quota_object(shown: TenantUsage) -> dict[str, object]:
    return {"tenant": shown.name, "usage": _used(shown.usage), "limits": _limits(shown.limits)}


def _quota_table(shown: TenantUsage, configured: Quota | None) -> Table:
    own, theirs = _limits(shown.limits), _limits(configured)
    rows = [(name, str(used), _shown(own[name]), _shown(theirs[name])) for name, used in _used(shown.usage).items()]
    head = (shown.name or "(no tenant)", "has", "set by hand", "configured")
    return Table(tuple(map(Column, head)), tuple(rows))


def _shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case {"count": count, "seconds": seconds}:
            return f"{count} in {seconds:g} s"
        case _:
            return str(value)
