"""Time and size of this library, beside its goals. `python3 run.py bench --help` lists the parts.

Neither the library nor the example imports this. Compare times of one run only: its rounds are interleaved, because the
same machine may be twice as slow an hour later.

The applications: `apps` (bare, and with this library), `by_hand`, `peer`, and `sql_apps` with all of them on SQL.
`harness` times them in one process, `serving` (with `load`) under gunicorn, `server_cost` asks the Redis server, `report`
prints. The parts: `comparison`, `sql`, `features`, `storage`; `profiling`; and `walk`, which counts calls instead of time.
`gate` compares ratios with the committed ones. `page` writes docs/reference/speed.md, with `charts`.
"""
