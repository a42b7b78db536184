"""A test sees the log lines of its own, whatever an earlier test of the process did to logging."""

from __future__ import annotations

import logging

import pytest

from tests.conftest import reset_logging


def test_an_earlier_test_silences_none_of_our_loggers(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("flask_idempotency")
    log.disabled, log.propagate = True, False
    logging.getLogger().setLevel(logging.CRITICAL)

    reset_logging()
    log.warning("heard")

    assert "heard" in caplog.text
