"""One server of several, and what a test does to it. Its rig knows which ones these are and what they are to each other."""

from __future__ import annotations

from typing import Any

from redis.backoff import NoBackoff
from redis.retry import Retry

from example_app.demo.servers import RedisServer
from tests.lab.redis import connect
from tests.tooling.processes import eventually

WRONG_PASSWORD = "nobody asked for one"


class Node:
    """A server, and a line to it that nothing under test uses."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        # Once more, on a new connection: the one in the pool may lead to the process before this one.
        # And names of keys are any bytes.
        retry, errors = Retry(NoBackoff(), 1), "surrogateescape"
        self.client: Any = connect(server.url, decode_responses=True, encoding_errors=errors, retry=retry)
        self.paused = False
        self.lagging = False

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def awake(self) -> bool:
        """Whether it can be expected to answer."""
        return self.server.running and not self.paused

    def told(self, *command: Any) -> Any:
        """What it answers to this command."""
        return self.client.execute_command(*command)

    def kill(self) -> None:
        """Dead at once. What it knew is gone, unless it was started to keep it."""
        self.server.kill()
        self.paused = False

    def restart(self) -> None:
        """Back at the same address, whether it was running or not. It dies with the thread that calls this."""
        self.server.restart()
        self.paused = self.lagging = False

    def pause(self) -> None:
        """Silent from now on: it accepts connections, and answers none of them."""
        self.server.pause()
        self.paused = True

    def resume(self) -> None:
        self.server.resume()
        self.paused = False

    def lag(self) -> None:
        """From now on this replica gets nothing more from its primary. It lives, answers, votes, and can be promoted.

        SIGSTOP would not do: the kernel takes the writes in for it, and it finds them there when it wakes up.
        """
        self.lagging = True
        self.client.config_set("masterauth", WRONG_PASSWORD)  # so its primary refuses it when it connects again
        self.told("CLIENT KILL", "TYPE", "master")
        assert eventually(lambda: self.replication["master_link_status"] == "down"), "it is still connected"

    def catch_up(self) -> None:
        """The end of `lag`. Returns when it has all that its primary has."""
        self.stop_lagging()
        assert eventually(self.in_step), "it never caught up"

    def stop_lagging(self) -> None:
        """It may have its primary's writes again, if it is still a replica."""
        self.client.config_set("masterauth", "")
        self.lagging = False

    def in_step(self) -> bool:
        """Whether it hears its primary, and has finished copying what that one had."""
        told = self.replication
        return bool(
            told["role"] == "slave" and told["master_link_status"] == "up" and not told["master_sync_in_progress"]
        )

    @property
    def replication(self) -> dict[str, Any]:
        told: dict[str, Any] = self.client.info("replication")
        return told

    def has_all_of(self, primary: Node) -> None:
        """Wait until this replica has everything that was written to its primary so far."""
        written = primary.replication["master_repl_offset"]
        assert eventually(lambda: self.in_step() and self.replication["slave_repl_offset"] >= written), "it lags"

    def stop(self) -> None:
        self.client.close()
        self.server.stop()
