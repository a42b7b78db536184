"""Invoices for clients that speak `X-Idempotency-Key`. A key is optional here.

The views commit by themselves, and a retry runs again what a vanished worker left. So each commit carries a unique marker
of its request: a second run finds it, and changes nothing.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, abort, request
from sqlalchemy.exc import IntegrityError

from example_app import simulate
from example_app.auth import caller
from example_app.models import Invoice, InvoiceMarker, db
from example_app.schemas import InvoiceInput, is_text, json_body
from flask_idempotency import current_claim

accounting = Blueprint("accounting", __name__, url_prefix="/api")


@accounting.post("/invoices")
def create() -> tuple[dict[str, Any], int]:
    wanted = json_body(InvoiceInput())
    simulate.execution_begins()
    invoice = Invoice(tenant=caller().tenant, **wanted)
    db.session.add(invoice)
    return {"id": written_once(invoice, wanted), **wanted}, 201


@accounting.put("/invoices/<invoice_id>")
def replace(invoice_id: str) -> dict[str, Any]:
    wanted = json_body(InvoiceInput())
    invoice = db.session.get(Invoice, invoice_id) if is_text(invoice_id) else None
    if invoice is None or invoice.tenant != caller().tenant:
        abort(404, "You have no such invoice.")
    simulate.execution_begins()
    for name, value in wanted.items():
        setattr(invoice, name, value)
    # Do not return the row after a second run: another request may have replaced the invoice since the first.
    return {"id": written_once(invoice, wanted), **wanted}


def written_once(invoice: Invoice, wanted: dict[str, Any]) -> str:
    """Commit this invoice and the marker of its request, unless an earlier run has. Return the invoice's id.

    A record expires after a day, and a marker does not. So the same key may come with other contents: abort with 422 then,
    because no invoice with these contents was written.
    """
    db.session.flush()
    written, contents = invoice.id, {"request": f"{request.method} {request.path}", **wanted}
    if current_claim:
        reference = current_claim.downstream_key("invoice")
        db.session.add(InvoiceMarker(request=reference, invoice=written, contents=contents))
    try:
        db.session.commit()
    except IntegrityError:
        db.session.rollback()
        earlier = db.session.get(InvoiceMarker, reference) if current_claim else None
        if earlier is None:
            raise
        if earlier.contents != contents:
            abort(422, "This key has already written another invoice. Send a new key.")
        written = earlier.invoice
    return written
