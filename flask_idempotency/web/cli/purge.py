"""`flask idempotency purge`"""

from __future__ import annotations

import json
import logging
from typing import Final

import click
from flask.cli import with_appcontext

from flask_idempotency.operations import shred as shred_keys
from flask_idempotency.web.cli.group import Refused, as_json_option, built, giving_up, pseudonym, settings, tids
from flask_idempotency.web.cli.tenant import chosen, tenant_options

_log = logging.getLogger("flask_idempotency")

_WHAT: Final = (
    "Every stored answer of this tenant becomes unreadable, for good. Its records stay: a retry gets 410 and is not run "
    "again, until its time is over."
)
_BACKUPS: Final = (
    "Backups made before hold the same data keys, wrapped by the ring: to make those unreadable too, rotate to a new key of "
    "the ring and destroy the old one. After restoring such a backup, purge again."
)


@click.command("purge")
@tenant_options
@click.option("--shred", is_flag=True, help="Destroy the data keys of the tenant's answers.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
@with_appcontext
def purge(tenant: str | None, no_tenant: bool, shred: bool, yes: bool, as_json: bool) -> None:
    """Erase the answers of one tenant, by destroying the keys that they are encrypted with.

    Asks first. Safe to run again.
    """
    tenant = chosen(tenant, no_tenant=no_tenant)
    if not shred:
        raise click.UsageError("Say how: --shred destroys the keys that the answers are encrypted with.")
    with giving_up(as_json=as_json):
        data_keys = built().data_keys
        if settings().encryption == "off":
            raise Refused(
                "Encryption is off, so there are no data keys to destroy: set IDEMPOTENCY_ENCRYPTION to on for what is stored "
                "from now on. Plain answers end with their `keep`."
            )
        if data_keys is None:
            raise Refused("The store of this application keeps no data keys, so nothing in it can be shredded.")
        if not yes:
            click.echo(_WHAT, err=True)
            click.confirm("Destroy its data keys?", abort=True, err=True)
        destroyed = shred_keys(data_keys, tids(tenant))
    _log.warning(
        "the answers of a tenant were erased by hand",
        extra={"event": "purged", "tenant": pseudonym(tenant), "data_keys": destroyed},
    )
    if as_json:
        click.echo(json.dumps({"data_keys": destroyed}))
    else:
        click.echo(f"Data keys destroyed: {destroyed}. {_WHAT}\n{_BACKUPS}")
