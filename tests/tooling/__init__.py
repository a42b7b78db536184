"""Promises of the tooling: run.py, the wheel, the direction of imports, the servers for tests."""
