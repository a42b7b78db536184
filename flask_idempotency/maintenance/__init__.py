"""Chores, as plain functions: what each does, never when. Nothing here knows Celery, Flask or a command line.

Each may be run twice at once, be killed at any point and be run again. Each returns a report and raises only when the
store does not answer.
"""
