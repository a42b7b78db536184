"""Verbs that the command line and a console share. They print nothing, ask nothing back, and do not know Flask."""
