"""Lends the tests of this folder the stores in `tests/backends.py`."""

from tests.backends import make_store

__all__ = ["make_store"]
