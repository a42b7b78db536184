"""Schedule the janitor's tasks: the Celery application, its beat schedule and thin tasks.

The work of a task is a function in `flask_idempotency.maintenance`. Code here must not select, change or delete a record
itself, or keep state between two tasks, and the library must not import it. The folder is installed as
`flask_idempotency.janitor`, so imports within it are relative and every task has an explicit name.

`celery -A flask_idempotency.janitor worker -B` runs it alone; `tasks.register` adds it to your Celery application.
Importing this package imports no other module, so only a process that runs a janitor needs Celery.
"""
