"""The work of a janitor as plain functions: no schedule, no Celery, no Flask."""
