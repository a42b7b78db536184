"""Invoices for clients that speak `X-Idempotency-Key`. A key is welcome here, and not required.

The views commit by themselves, and each write can be repeated: so a retry takes over what a vanished worker left. An
invoice carries a marker that is unique, so the retry finds the invoice instead of making another one.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, abort
from sqlalchemy.exc import IntegrityError

from example_app import simulate
from example_app.auth import caller
from example_app.models import Invoice, db
from example_app.schemas import InvoiceInput, is_text, json_body
from flask_idempotency import current_claim

accounting = Blueprint("accounting", __name__, url_prefix="/api")


@accounting.post("/invoices")
def create() -> tuple[dict[str, Any], int]:
    wanted = json_body(InvoiceInput())
    simulate.execution_begins()
    # The same in every attempt at this key, and another one for every other key.
    marker = current_claim.downstream_key("invoice") if current_claim else None
    invoice = Invoice(marker=marker, tenant=caller().tenant, **wanted)
    db.session.add(invoice)
    try:
        db.session.commit()
    except IntegrityError:
        db.session.rollback()
        made = db.session.scalar(db.select(Invoice).filter_by(marker=marker)) if marker else None
        if made is None:
            raise
        invoice = made
    return shown(invoice), 201


@accounting.put("/invoices/<invoice_id>")
def replace(invoice_id: str) -> dict[str, Any]:
    # Needs no marker: the same values once more make no difference.
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
