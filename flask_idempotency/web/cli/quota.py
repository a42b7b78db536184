"""`flask idempotency quota …`"""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from flask.cli import AppGroup

from flask_idempotency.engine.capabilities import Ledger
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import QuotaSet
from flask_idempotency.engine.quota import LIMITS, MAX_LIMIT, NewKeys, Quota, Usage
from flask_idempotency.operations import TenantUsage, quota_set, quota_show
from flask_idempotency.operations.records import Refused
from flask_idempotency.web.cli.audit import word_of, word_options
from flask_idempotency.web.cli.group import (
    as_json_option,
    built,
    check_layout,
    giving_up,
    pseudonym,
    say,
    settings,
    state,
    table,
    tell,
    tids_by_secret,
)
from flask_idempotency.web.cli.tenant import chosen, tenant_options

_OFF = (
    "Quotas are off in this application, so nothing is counted and no limit holds: set IDEMPOTENCY_QUOTA_* or register "
    "a quota_loader."
)
_DIVIDED = (
    "Each of its {parts} parts has its share of that, rounded up: one that is full refuses, though others are not."
)

quota = AppGroup("quota", help="What tenants have, and what they may have.")


@quota.command("show")
@tenant_options
@click.option("--all", "everybody", is_flag=True, help="All who have a ledger, by what stands for them in the store.")
@as_json_option
def show(tenant: str | None, no_tenant: bool, everybody: bool, as_json: bool) -> None:
    """Say what a tenant has now, and what it may have. Changes nothing.

    An operator's limit (`quota set`) goes before what a quota_loader says, and that before the configuration.
    """
    if everybody == (no_tenant or tenant is not None):
        raise click.UsageError("Say of whom: --tenant T, --no-tenant, or --all.")
    with giving_up(as_json=as_json):
        ledger = _ledger()
        if everybody:
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
    say("\n\n".join(_quota_text(each, configured) for each in shown) or "Nobody has a ledger.")
    if not _counting():
        say(_OFF)


@quota.command("set")
@tenant_options
@click.option("--records", type=click.IntRange(0, MAX_LIMIT), help="Most live records.")
@click.option("--bytes", "byte_count", type=click.IntRange(0, MAX_LIMIT), help="Most bytes of stored answers.")
@click.option("--in-flight", type=click.IntRange(0, MAX_LIMIT), help="Most requests that run at once.")
@click.option("--new-keys", type=click.IntRange(0, MAX_LIMIT), help="Most new keys in each window; needs --per.")
@click.option("--per", type=float, metavar="SECONDS", help="How long such a window is.")
@click.option("--clear", is_flag=True, help="Take back what was set before, all of it.")
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
    """Set limits of one tenant, from its next new key on. Those that are not named stay as they were set before.

    They are kept in the store, and go before what the application's code and configuration say.
    """
    if (new_keys is None) != (per is None):
        raise click.UsageError("--new-keys and --per go together: so many keys in each so many seconds.")
    tenant = chosen(tenant, no_tenant=no_tenant)
    with giving_up(as_json=as_json):
        rate = None if new_keys is None or per is None else NewKeys(new_keys, per)
        try:
            named = Quota(records, byte_count, in_flight, rate)
        except ConfigurationError as error:
            raise Refused(" ".join(error.faults)) from error
        if named.unlimited and not clear:
            raise click.UsageError("Name a limit, or --clear.")
        check_layout()
        limits = quota_set(_ledger(), tids_by_secret(tenant), named, clear=clear)
    told, word = _limits(limits), word_of(actor, reason)
    tell(QuotaSet("", "", tenant=pseudonym(tenant), actor=word.actor, reason=word.reason, limits=told))
    say(json.dumps({"counting": _counting(), "limits": told}) if as_json else _said(limits))


def _ledger() -> Ledger:
    ledger = built().ledger
    if ledger is None:
        raise Refused("The store of this application counts nothing: it has no `ledger`.")
    return ledger


def _counting() -> bool:
    return settings().quota is not None or state().loaders.quota is not None


def _said(limits: Quota) -> str:
    lines = [f"{name}: {_spelled(value)}" for name, value in _limits(limits).items() if value is not None]
    if lines and settings().tenant_shards > 1:
        lines.append(_DIVIDED.format(parts=settings().tenant_shards))
    return "\n".join(
        [*(lines or ["No limits of its own: what the application says holds."]), *([] if _counting() else [_OFF])]
    )


def _limits(quota: Quota | None) -> dict[str, object]:
    """By the names that limits have in answers."""
    return dict(zip(LIMITS, asdict(quota or Quota()).values(), strict=True))


def _used(usage: Usage) -> dict[str, int]:
    return dict(zip(LIMITS, asdict(usage).values(), strict=True))


def _quota_object(shown: TenantUsage) -> dict[str, object]:
    return {"tenant": shown.name, "usage": _used(shown.usage), "limits": _limits(shown.limits)}


def _quota_text(shown: TenantUsage, configured: Quota | None) -> str:
    own, theirs = _limits(shown.limits), _limits(configured)
    rows = [(name, str(used), _spelled(own[name]), _spelled(theirs[name])) for name, used in _used(shown.usage).items()]
    return table((shown.name or "(no tenant)", "has", "set by hand", "configured"), rows)


def _spelled(value: object) -> str:
    match value:
        case None:
            return "-"
        case {"count": count, "seconds": seconds}:
            return f"{count} in {seconds:g} s"
        case _:
            return str(value)
