"""The pages that only read."""

from __future__ import annotations

import time

from flask import Response, request

from flask_idempotency.console.access import Stopped
from flask_idempotency.console.visit import Visit
from flask_idempotency.operations.records import RecordFilter, listing
from flask_idempotency.web.operator import recovery, show_of


def unknown(visit: Visit, rest: str) -> Response:
    visit.admit()
    if request.method != "GET":
        raise Stopped(405, "This page takes no form", "Nothing was changed.", headers={"Allow": "GET"})
    raise Stopped(404, "There is no such page", "Start at the overview.")


def overview(visit: Visit) -> str:
    visit.admit_to_all()
    began = time.perf_counter()
    counts = recovery().counts()
    took = time.perf_counter() - began
    return visit.render("overview.html", counts=counts, completed=recovery().about_completed(), took=took)


def records(visit: Visit) -> str:
    visit.admit_to_all()
    found = listing(recovery(), RecordFilter(), limit=50)
    return visit.render("records.html", views=[show_of(each) for each in found.found], ids=found.ids)
