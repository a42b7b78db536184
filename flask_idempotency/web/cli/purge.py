"""`flask idempotency purge`"""

from __future__ import annotations

import json
import logging
from typing import Final

import click
from flask.cli import with_appcontext

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.operations import holds_sealed
from flask_idempotency.operations import shred as shred_keys
from flask_idempotency.web.cli.group import Refused, as_json_option, built, giving_up, pseudonym, settings, tids
from flask_idempotency.web.cli.tenant import chosen, tenant_options

_log = logging.getLogger("flask_idempotency")

_WHAT: Final = (
    "Every encrypted answer of this tenant becomes unreadable, for good. Its records stay: a retry gets 410 and is not run "
    "again, until its time is over. Answers that were stored in plain are not given any more either, and stay readable for "
    "whoever reads the store until `flask idempotency rotate` has wiped them or their time is over."
)
_BACKUPS: Final = (
    "Backups made before hold the same data keys, wrapped by the ring: to make those unreadable too, rotate to a new key of "
    "the ring and destroy the old one. After restoring such a backup, purge again."
)
_SECRETS: Final = (
    "Secrets looked under: {secrets}. What was claimed under any other has data keys of its own, which are still there: if "
    "another secret was in use within the last `keep`, list it in IDEMPOTENCY_SECRET here and purge again."
)
_NO_CACHE: Final = (
    "IDEMPOTENCY_REDIS_URL is not set here, so no cache was told: if other hosts have one, purge again where it is set. Until "
    "then it goes on replaying encrypted answers for up to a minute, and plain ones to their end."
)


@click.command("purge")
@tenant_options
@click.option("--shred", is_flag=True, help="Destroy the data keys of the tenant's answers.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
@with_appcontext
def purge(tenant: str | None, no_tenant: bool, shred: bool, yes: bool, as_json: bool) -> None:
    """Erase the answers of one tenant, by destroying the keys that they are encrypted with.

    Run it where every secret is listed that was in use within the last `keep`, for a tenant has other data keys under each;
    and where IDEMPOTENCY_REDIS_URL is set, if any host has it, for the cache must be told.

    Asks first. Exits with 2 when nobody can tell whether all of it is done. Safe to run again.
    """
    tenant = chosen(tenant, no_tenant=no_tenant)
    if not shred:
        raise click.UsageError("Say how: --shred destroys the keys that the answers are encrypted with.")
    with giving_up(as_json=as_json):
        data_keys, whom = built().data_keys, tids(tenant)
        if data_keys is None:
            raise Refused("The store of this application keeps no data keys, so nothing in it can be shredded.")
        if settings().key_ring is None and not holds_sealed(data_keys, whom):
            raise Refused(
                "There is no key ring here and no data key of this tenant in the store, so nothing of it is encrypted: set "
                "IDEMPOTENCY_ENCRYPTION to on for what is stored from now on. Plain answers end with their `keep`."
            )
        if not yes:
            click.echo(_WHAT, err=True)
            click.confirm("Destroy its data keys?", abort=True, err=True)
        try:
            destroyed = shred_keys(data_keys, whom)
        except StoreUnavailable:
            _log.warning(
                "the answers of a tenant were to be erased by hand, and nobody can tell whether all of them are",
                extra={"event": "purge-unfinished", "tenant": pseudonym(tenant)},
            )
            raise
    _log.warning(
        "the answers of a tenant were erased by hand",
        extra={"event": "purged", "tenant": pseudonym(tenant), "data_keys": destroyed},
    )
    untold = built().schema is not None and settings().redis_url is None
    if as_json:
        click.echo(json.dumps({"data_keys": destroyed, "secrets": len(whom), "cache_unknown": untold}))
    else:
        said = (_WHAT, _SECRETS.format(secrets=len(whom)), *((_NO_CACHE,) if untold else ()), _BACKUPS)
        click.echo("\n".join((f"Data keys destroyed: {destroyed}.", *said)))
