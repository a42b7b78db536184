"""Faults seeded in the package. A named test must notice each, or it guards less than it seems to.

`python3 run.py mutants` puts every fault of the catalogue, one at a time, into a private copy of the repository, and
runs the tests that must fail then.
"""
