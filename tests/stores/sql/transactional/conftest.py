"""A SQLite file for each test. `on_both` marks the tests of code that differs between databases."""

from __future__ import annotations

import pytest

from tests.stores.sql.conftest import lent_url

database_url = pytest.fixture(params=("sqlite",), name="database_url")(lent_url)
