"""Whether a server or a proxy gives up before a payment does."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.checks.naming import some

LEAST_LEASE_SECONDS: Final = 6.0
"""Renewed every two seconds: shorter ones are lost to a pause of a virtual machine or a slow minute of the store."""

_ONE_AT_A_TIME: Final = frozenset({"sync", "gunicorn.workers.sync.SyncWorker"})


class Endpoint(NamedTuple):
    """What is guarded, and how."""

    name: str
    policy: Policy


def gunicorn_timeout(command_line: str) -> float | None:
    """After how many seconds these arguments of gunicorn have a worker killed in the middle of a request.

    Infinite where it is never: only workers that do one thing at a time are silent while they do it. None: the arguments
    do not say, and a configuration file may.
    """
    said = dict(_options(command_line))
    worker = said.get("worker-class")
    if worker is not None and worker not in _ONE_AT_A_TIME:
        return inf
    if worker is None and said.get("threads", "1") != "1":
        return inf  # gunicorn takes threads for a wish to have gthread
    try:
        seconds = float(said["timeout"])
    except (KeyError, ValueError):
        return None
    return seconds or inf


_SHORT: Final = {"-t": "timeout", "-k": "worker-class"}


def _options(command_line: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(command_line)
    except ValueError:  # a quotation mark is missing: gunicorn will not start with it either
        return
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            yield name, value if separator else following
        elif word[:2] in _SHORT:
            yield _SHORT[word[:2]], word[2:].removeprefix("=") or following


def worker_timeout(endpoints: Iterable[Endpoint], *, seconds: float | None) -> list[Finding]:
    """Whether a worker is killed while a view may still run. `seconds` is None where nobody has said after which time."""
    if seconds is None:
        text = "Nobody has said after how many seconds a worker is killed that is still at work."
        remedy = (
            "Pass --worker-timeout, or set IDEMPOTENCY_WORKER_TIMEOUT, to gunicorn's --timeout or uWSGI's harakiri; to 0 if "
            "nothing kills them."
        )
        return [Finding("worker-timeout", Verdict.UNKNOWN, text, remedy)]
    cut = [each for each in endpoints if seconds < each.policy.max_runtime]
    if not cut:
        return [Finding("worker-timeout", Verdict.FINE, "No worker is killed while a view may still run.")]
    grave = [each for each in cut if each.policy.effects in ("plain", "marked")]
    longest = max(each.policy.max_runtime for each in cut)
    text = f"Workers are killed after {seconds:g} s, and views may run for {longest:g} s (max_runtime): "
    text += (
        f"what is killed in the middle leaves an outcome that nobody knows. So it is for {_named(grave)}."
        if grave
        else f"what is killed in the middle is begun anew by its retry. So it is for {_named(cut)}."
    )
    remedy = (
        "Give workers longer than max_runtime (gunicorn's --timeout), or lower IDEMPOTENCY_MAX_RUNTIME to what a view really "
        "takes, below that timeout."
    )
    return [Finding("worker-timeout", Verdict.FAULT if grave else Verdict.ADVICE, text, remedy)]


def proxy_timeout(endpoints: Iterable[Endpoint], *, seconds: float | None) -> list[Finding]:
    """Whether a proxy gives up on a duplicate that waits for the first one's answer."""
    waiting = [each for each in endpoints if each.policy.in_flight == "wait"]
    if not waiting:
        return [Finding("proxy-timeout", Verdict.FINE, "No duplicate waits for the first one's answer.")]
    if seconds is None:
        text = "Nobody has said after how many seconds a proxy gives up on a request."
        remedy = (
            "Pass --proxy-timeout, or set IDEMPOTENCY_PROXY_TIMEOUT, to nginx's proxy_read_timeout or its like; to 0 if "
            "nothing gives up."
        )
        return [Finding("proxy-timeout", Verdict.UNKNOWN, text, remedy)]
    late = [each for each in waiting if seconds <= each.policy.wait]
    if not late:
        return [Finding("proxy-timeout", Verdict.FINE, "Proxies wait for longer than duplicates do.")]
    text = (
        f"A proxy gives up after {seconds:g} s, and duplicates wait for up to {max(each.policy.wait for each in late):g} s: "
        f"their callers get a 504 of the proxy's, and not our answer. So it is for {_named(late)}."
    )
    remedy = "Lower IDEMPOTENCY_WAIT below the proxy's timeout, or raise that (nginx's proxy_read_timeout)."
    return [Finding("proxy-timeout", Verdict.ADVICE, text, remedy)]


def lease(endpoints: Iterable[Endpoint]) -> list[Finding]:
    """Whether leases survive a bad moment."""
    short = [each for each in endpoints if each.policy.lease < LEAST_LEASE_SECONDS]
    if not short:
        return [Finding("lease", Verdict.FINE, "Leases are long enough to be renewed in time.")]
    least = min(each.policy.lease for each in short)
    text = (
        f"A lease of {least:g} s is renewed every {least / 3:.1f} s: one pause of the host or the store is enough to lose it "
        f"in the middle of the work. So it is for {_named(short)}."
    )
    return [Finding("lease", Verdict.ADVICE, text, "Set IDEMPOTENCY_LEASE to 30, or leave it away.")]


def _named(endpoints: Sequence[Endpoint]) -> str:
    return some([each.name for each in endpoints])
