"""Names and labels of all metrics: bounded, and as Prometheus wants them."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry

from flask_idempotency.metrics import FAMILIES, GAUGES, OTHER, Family, made_in

UNITS = ("_seconds", "_bytes")


def test_a_name_is_prefixed_and_a_histogram_names_its_unit() -> None:
    for family in FAMILIES.values():
        assert re.fullmatch(r"idempotency_[a-z_]+", family.exposed), family
        assert bool(family.buckets) is family.name.endswith(UNITS), family
        assert family.help.endswith("."), family


def test_no_label_names_a_tenant_or_an_endpoint() -> None:
    """Neither tenants nor endpoints: a series for each of them is what brings a Prometheus down."""
    labels = {label for family in FAMILIES.values() for label in family.labels}
    labels |= {label for _, names in GAUGES.values() for label in names}

    assert not labels & {"tenant", "principal", "operation", "endpoint", "record", "key", "path", "error"}


def test_an_application_has_a_bounded_number_of_series() -> None:
    """If everything that can happen has happened. Histograms have one for each of their buckets."""
    series = sum(
        len(family.every()) * (len(family.buckets) + 3 if family.buckets else 1) for family in FAMILIES.values()
    )
    without_calls = series - len(FAMILIES["store_call_duration_seconds"].every()) * 15

    assert (True, True) == (without_calls < 605, series < 1500)


def test_an_unknown_label_value_becomes_other() -> None:
    """A release that says something new adds no series."""
    family = Family("test", "Test.", {"cause": ("error", OTHER)})

    assert [("error",), (OTHER,)] == [family.folded((said,)) for said in ("error", "k-1234")]


def test_only_the_name_of_a_step_may_be_any() -> None:
    """An endpoint lists its steps by name, so the code bounds them. A client sends none of them."""
    open_labels = {
        (name, label) for name, family in FAMILIES.items() for label, known in family.labels.items() if not known
    }

    assert {("steps", "step")} == open_labels
    assert ("charge", OTHER, OTHER) == FAMILIES["steps"].folded(("charge", "k-1234", OTHER))


def test_two_applications_share_the_metrics_of_a_registry() -> None:
    """Made twice, they would be refused by name."""
    registry = CollectorRegistry()

    assert made_in(registry) is made_in(registry)
    assert made_in(registry) is not made_in(CollectorRegistry())
