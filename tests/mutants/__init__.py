"""Faults seeded in our own code, each of them noticed by a named test.

A test that no fault makes red guards nothing. `python3 run.py mutants` applies every fault of the catalogue, one at a
time, to a private copy of the repository and runs the tests that must fail for it.
"""
