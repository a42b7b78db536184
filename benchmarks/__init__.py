"""How fast and how small we are, against what SPEC section 14 allows. `python3 run.py bench --help` says how to ask.

Nothing here is imported by the library, its tests of behaviour or the example. Times are only ever compared within one
run: rounds are interleaved, because the same machine is twice as slow an hour later.
"""
