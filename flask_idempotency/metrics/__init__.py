"""Events and store calls as Prometheus counts them. Needs `prometheus_client`: pip install 'flask-idempotency[metrics]'.

Nothing here serves `/metrics`, and nothing here can be labelled with what a client sends: every label has a fixed set of
values, and what is not in it is `other`. What a scrape asks the store, it asks once in ten seconds.
"""

from flask_idempotency.metrics.gauges import gauges_of
from flask_idempotency.metrics.meter import Meter

__all__ = ["Meter", "gauges_of"]
