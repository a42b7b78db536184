"""Time and size of this library, beside the budgets of SPEC section 14. `python3 run.py bench --help` lists the parts.

Neither the library nor the example imports this. Compare times of one run only: its rounds are interleaved, because the
same machine may be twice as slow an hour later.

`apps` and `sql_apps` are the applications, `harness` times them, `report` prints. The others are the parts: `paths`,
`serving` (with `load`), `sql`, `features`, `storage`; and `walk`, which counts calls instead of time.
"""
