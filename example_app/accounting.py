"""Invoices for clients that speak `X-Idempotency-Key`. A key is welcome here, and not required."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, abort

from example_app import simulate
from example_app.auth import caller
from example_app.models import Invoice, db
from example_app.schemas import InvoiceInput, is_text, json_body

accounting = Blueprint("accounting", __name__, url_prefix="/api")


@accounting.post("/invoices")
def create() -> tuple[dict[str, Any], int]:
    wanted = json_body(InvoiceInput())
    simulate.execution_begins()
    invoice = Invoice(tenant=caller().tenant, **wanted)
    db.session.add(invoice)
    db.session.commit()
    return shown(invoice), 201


@accounting.put("/invoices/<invoice_id>")
def replace(invoice_id: str) -> dict[str, Any]:
    wanted = json_body(InvoiceInput())
    invoice = db.session.get(Invoice, invoice_id) if is_text(invoice_id) else None
    if invoice is None or invoice.tenant != caller().tenant:
        abort(404, "You have no such invoice.")
    simulate.execution_begins()
    for name, value in wanted.items():
        setattr(invoice, name, value)
    db.session.commit()
    return shown(invoice)


def shown(invoice: Invoice) -> dict[str, Any]:
    return {
        "id": invoice.id,
        "customer": invoice.customer,
        "amount": invoice.amount,
        "currency": invoice.currency,
    }
