"""Many processes of many threads, one key."""

from __future__ import annotations

import multiprocessing

from example_app.demo.servers import RedisServer
from tests.stores.contenders import contend

PROCESSES, THREADS, ROUNDS = 4, 8, 40


def test_of_all_processes_threads_exactly_one_is_granted(redis_server: RedisServer) -> None:
    """In every round one claim is granted, and everybody else hears of it or of its answer."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES * THREADS), context.Queue()
    processes = [
        context.Process(target=contend, args=(redis_server.url, ROUNDS, THREADS, barrier, results))
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    gathered = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(60)

    wins = sorted(win for won, _ in gathered for win in won)
    outcomes = [outcome for _, seen in gathered for outcome in seen]
    assert [number for number, _ in wins] == list(range(ROUNDS))
    assert len(outcomes) == PROCESSES * THREADS * ROUNDS
    assert set(outcomes) == {"Claimed", "InFlight", "Replayed"}
    assert sorted(fence for _, fence in wins) == [fence for _, fence in wins]
