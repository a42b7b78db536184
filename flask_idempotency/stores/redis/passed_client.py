"""Send commands through a client that the application passes in, with its retries, routing and instrumentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flask_idempotency.stores.redis.connection import Command, Tries, key_of


class ClientConnection:
    """Send commands to one server through the client of the application, which does not report its retries."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        # NEVER_DECODE returns bytes even if the client has decode_responses=True.
        return self._client.execute_command(*command, NEVER_DECODE=True)

    def pipeline(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        return _piped(self._client, commands)

    pipeline_one_node = pipeline


class ClientClusterConnection(ClientConnection):
    """Send commands to a Cluster through the client of the application, which finds the nodes.

    That client raises built-in errors in cases that it does not handle, such as a node that it does not know yet. This
    class raises `failure` instead. The next call works again.
    """

    def __init__(self, client: Any, *, failure: type[Exception], elsewhere: tuple[type[Exception], ...]) -> None:
        super().__init__(client)
        self._failure = failure
        self._elsewhere = elsewhere

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        with self._converted_errors():
            return super().__call__(*command)

    def pipeline(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        with self._converted_errors():
            return super().pipeline(commands)

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        with self._converted_errors():
            replies = self._pipeline_owner(commands)
            if replies is not None:
                return replies
            # The client follows the redirect of a single command, and then knows the new node.
            super().__call__(*commands[0])
            replies = self._pipeline_owner(commands)
        if replies is None:
            raise self._failure("the key is not on the node that the Cluster names")
        return replies

    def _pipeline_owner(self, commands: Sequence[Command]) -> list[Any] | None:
        """Send to the node that holds the first key. Return None if it holds the key no more, or does not answer."""
        node = self._client.get_node_from_key(key_of(commands[0]))
        try:
            replies = _piped(self._client.get_redis_connection(node), commands)
        except self._elsewhere:
            return None
        return None if isinstance(replies[0], self._elsewhere) else replies

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._failure("the Cluster client failed to route the command") from error


def _piped(client: Any, commands: Sequence[Command]) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command, NEVER_DECODE=True)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies
