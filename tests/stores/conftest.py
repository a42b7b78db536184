"""Lends the tests of this folder the stores in `tests/backends.py`."""

from tests.backends import clusters, make_store

__all__ = ["clusters", "make_store"]
