"""The contract that we ship for stores."""

from __future__ import annotations

import importlib
from pkgutil import iter_modules

from _pytest.assertion.rewrite import AssertionRewritingHook

from flask_idempotency.testing import contract


def test_failing_assertions_show_the_compared_values() -> None:
    """Pytest rewrites the assertions of every module of the contract."""
    modules = [importlib.import_module(f"{contract.__name__}.{each.name}") for each in iter_modules(contract.__path__)]

    assert 15 == len(modules)
    assert [] == [module for module in modules if not isinstance(module.__loader__, AssertionRewritingHook)]
