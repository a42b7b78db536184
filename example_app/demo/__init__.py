"""The demo of the example service: processes, client, scenarios and report. `python3 run.py demo` starts it."""
