"""Which tenant a command is about. Having none is not the same as a name, and never the default."""

from __future__ import annotations

import click

from flask_idempotency.web.cli.group import CommandT


def tenant_options(command: CommandT) -> CommandT:
    """`--tenant T`, or `--no-tenant` for those that a tenant_loader names None, and for applications without one."""
    for option in (
        click.option("--no-tenant", is_flag=True, help="Those who have no tenant: everybody, without a tenant_loader."),
        click.option("--tenant", metavar="T", help="The tenant, as the tenant_loader names it."),
    ):
        command = option(command)
    return command


def chosen(tenant: str | None, *, no_tenant: bool) -> str | None:
    """The tenant that was named, or None for none."""
    if no_tenant == (tenant is not None) or tenant == "":
        raise click.UsageError("Say of whom: --tenant T, or --no-tenant.")
    return tenant
