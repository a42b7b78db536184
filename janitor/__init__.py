"""Who sweeps and when: the Celery application, its beat schedule and thin tasks.

What a chore does is a function in `flask_idempotency.maintenance`; code here may
not select, change or delete a record itself, keep state between two tasks, or be
imported by the library. The folder is installed as `flask_idempotency.janitor`,
so imports within it are relative and every task carries an explicit name.

The tasks are not there yet: in this release nothing sweeps, and a quarantined key stays so.
"""
