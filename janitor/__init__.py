"""Who sweeps and when: the Celery application, its beat schedule and thin tasks.

What a chore does is a function in `flask_idempotency.maintenance`; code here may
not select, change or delete a record itself, keep state between two tasks, or be
imported by the library. The folder is installed as `flask_idempotency.janitor`,
so imports within it are relative and every task carries an explicit name.

`celery -A flask_idempotency.janitor worker -B` runs it by itself; `tasks.register`
adds it to a Celery application that is there already. Importing this package
imports nothing else, so that only who runs a janitor needs Celery.
"""
