"""Commands about one tenant: erase its responses (`purge`), show and set its limits (`quota`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from flask_idempotency.cli import Commands, cli
from flask_idempotency.cli.context import Output, chosen, confirm, prints_json, tenant_options, word_options
from flask_idempotency.cli.output import Line, Style, Styled, short_name, table
from flask_idempotency.cli.progress import Counts, show_progress
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import QuotaSet
from flask_idempotency.engine.model import MAX_LIMIT
from flask_idempotency.engine.quota import LIMITS, NewKeys, Quota
from flask_idempotency.operations.admin import TenantUsage, quota_set, quota_show
from flask_idempotency.operations.records import AuditNote, Refused
from flask_idempotency.web import operator
from flask_idempotency.web.purge import SHREDDED, WIPED, Purge, cache_unknown, check_purge, purge_text


@cli.command("purge")
@tenant_options
@click.option("--shred", is_flag=True, help="Only destroy the data keys, without a scan of every response.")
@word_options(required=True)
def purge(tenant: str | None, no_tenant: bool, shred: bool, yes: bool, word: AuditNote) -> Output:
    """Erase the responses of one tenant, for good.

    Destroys the tenant's data keys, and wipes its stored responses. Its records stay: a retry gets 410 and does not run
    again. You confirm first. Safe to interrupt and to run again. Exits with 2 if it is unknown whether all of it is done.

    Run it where every secret is listed that was in use within the last `keep` or `remember`: a tenant has other data keys
    under each. If any host has IDEMPOTENCY_REDIS_URL, run it where that is set, so that the cache is invalidated too.

    \b
    Example:
      $ flask idempotency purge --tenant acme --reason "contract ended"
    """
    tenant = chosen(tenant, no_tenant=no_tenant)
    whom = operator.tids(tenant)
    check_purge(whom, shred=shred)
    question, text = ("Destroy its data keys?", SHREDDED) if shred else ("Erase its responses?", WIPED)
    confirm(question, text, yes=yes)
    # Without a quota the store does not count what the tenant has.
    ledger = operator.built().ledger if operator.counting() else None
    with Purge(tenant, word) as erased:
        erased.shred(whom)
        if not shred:
            with show_progress(
                "responses",
                total=lambda: None if ledger is None else sum(ledger.usage(tid).records for tid in whom),
                as_json=prints_json(),
                so_far=erased.so_far,
            ) as progress:
                erased.wipe(whom, on_progress=progress)
                progress.counts = Counts(erased.wiped, erased.passed_over)
    unknown, secrets = cache_unknown(), len(operator.settings().secrets)
    wiped = {"wiped": erased.wiped, "condemned": erased.condemned, "still_open": erased.still_open}
    return Output(
        {"data_keys": erased.data_keys, "secrets": secrets, "cache_unknown": unknown, **({} if shred else wiped)},
        purge_text(erased, shred=shred, secrets=secrets, cache_unknown=unknown),
    )


# `flask idempotency quota …`

_DIVIDED = (
    "Each of its {parts} parts has a share of that, rounded up: a full part refuses, even if others are not full."
)

quota: Final = Commands("quota", help="Show and set the limits of a tenant.")
cli.add_command(quota)


@quota.command("show")
@tenant_options
@click.option("--all", "every_tenant", is_flag=True, help="Every tenant with a ledger, by its id in the store.")
def show(tenant: str | None, no_tenant: bool, every_tenant: bool) -> Output:
    """Show the usage and the limits of a tenant.

    Read-only. An operator's limit (`quota set`) overrides that of a quota_loader, which overrides the configuration.

    \b
    Example:
      $ flask idempotency quota show --tenant acme
    """
    if every_tenant == (no_tenant or tenant is not None):
        raise click.UsageError("Name the tenant: --tenant T, --no-tenant, or --all.")
    ledger, configured = operator.ledger_of(), operator.settings().quota
    if every_tenant:
        shown = [quota_show(ledger, [[tid]], name=tid.hex()) for tid in sorted(ledger.tenants())]
    else:
        shown = [quota_show(ledger, operator.tids_by_secret(tenant), name=tenant)]
    found = {
        "counting": operator.counting(),
        "configured": _limits(configured),
        "tenants": [{"tenant": each.name, "usage": _used(each), "limits": _limits(each.limits)} for each in shown],
    }
    lines, theirs = list[Line](), _limits(configured)
    for each in shown:
        own = _limits(each.limits)
        rows = (
            {"limit": limit, "has": str(used), "set by hand": _shown(own[limit]), "configured": _shown(theirs[limit])}
            for limit, used in _used(each).items()
        )
        lines += ["", Styled(short_name(each.name or "(no tenant)"), Style.HEAD), *table(rows)]
    return Output(found, [*(lines[1:] or ["No tenant has a ledger."]), *_not_counting()])


def _not_counting() -> list[str]:
    return [] if operator.counting() else [operator.NOT_COUNTING]


@quota.command("set")
@tenant_options
@click.option("--records", type=click.IntRange(0, MAX_LIMIT), help="Most live records.")
@click.option("--bytes", type=click.IntRange(0, MAX_LIMIT), help="Most bytes of stored responses.")
@click.option("--in-flight", type=click.IntRange(0, MAX_LIMIT), help="Most requests that run at once.")
@click.option("--new-keys", type=click.IntRange(0, MAX_LIMIT), help="Most new keys in each window; needs --per.")
@click.option("--per", type=float, metavar="SECONDS", help="The length of each window.")
@click.option("--clear", is_flag=True, help="Remove all limits that were set before.")
@word_options(required=False)
def set_(
    tenant: str | None,
    no_tenant: bool,
    new_keys: int | None,
    per: float | None,
    clear: bool,
    word: AuditNote,
    **most: int | None,
) -> Output:
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
    rate = None if new_keys is None or per is None else NewKeys(new_keys, per)
    try:
        named = Quota(**most, new_keys=rate)
    except ConfigurationError as error:
        raise Refused(" ".join(error.faults)) from error
    if named.unlimited and not clear:
        raise click.UsageError("Name a limit, or --clear.")
    operator.check_layout()
    now_set = _limits(quota_set(operator.ledger_of(), operator.tids_by_secret(tenant), named, clear=clear))
    operator.publish(QuotaSet("", "", **asdict(word), tenant=operator.pseudonym(tenant), limits=now_set))
    lines = [f"{name}: {_shown(value)}" for name, value in now_set.items() if value is not None]
    if lines and operator.settings().tenant_shards > 1:
        lines.append(_DIVIDED.format(parts=operator.settings().tenant_shards))
    none = "No limits set here: those of the application hold."
    return Output({"counting": operator.counting(), "limits": now_set}, [*(lines or [none]), *_not_counting()])


def _limits(quota: Quota | None) -> dict[str, object]:
    """Return limits by their names in the output."""
    return dict(zip(LIMITS, asdict(quota or Quota()).values(), strict=True))


def _used(shown: TenantUsage) -> dict[str, int]:
    return dict(zip(LIMITS, asdict(shown.usage).values(), strict=True))


def _shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case {"count": count, "seconds": seconds}:
            return f"{count} in {seconds:g} s"
        case _:
            return str(value)
