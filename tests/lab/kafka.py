"""A Kafka of one's own: librdkafka's mock cluster, in the process that makes it. Other processes reach it by its address."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Final, Self

import confluent_kafka
from confluent_kafka import cimpl

PARTITIONS: Final = 4
"""Of each topic. The first message makes a topic."""
PATIENCE_SECONDS: Final = 60


class KafkaCluster:
    """One broker in memory, which ends with this object."""

    def __init__(self) -> None:
        # The first address is never used: the client gets that of the mock.
        self._owner = confluent_kafka.Producer(
            {"bootstrap.servers": "localhost:1", "test.mock.num.brokers": 1, "log_level": 0}
        )
        brokers = self._owner.list_topics(timeout=PATIENCE_SECONDS).brokers.values()
        self.address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        _hurry(self._owner)
        self._producer = confluent_kafka.Producer({"bootstrap.servers": self.address, "log_level": 0})

    def produce(self, topic: str, value: bytes, *, message_id: str | None = None, partition: int = 0) -> None:
        """Send a message, and wait until the cluster has it."""
        headers: Any = [] if message_id is None else [("message-id", message_id.encode())]
        self._producer.produce(topic, value, partition=partition, headers=headers)
        assert self._producer.flush(PATIENCE_SECONDS) == 0

    def committed(self, topic: str, group: str, partition: int = 0) -> int:
        """Return the offset that this group has committed. A negative number: none."""
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self.address, "group.id": group, "log_level": 0})
        try:
            place = confluent_kafka.TopicPartition(topic, partition)
            offset: int = consumer.committed([place], timeout=PATIENCE_SECONDS)[0].offset
            return offset
        finally:
            consumer.close()

    def stop(self) -> None:
        # The cluster ends with the last reference to its owner.
        del self._producer, self._owner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _hurry(owner: confluent_kafka.Producer) -> None:
    """Let groups begin at once. The mock waits three seconds for more members, as brokers do."""
    library = ctypes.PyDLL(cimpl.__file__)
    library.rd_kafka_handle_mock_cluster.restype = ctypes.c_void_p
    library.rd_kafka_handle_mock_cluster.argtypes = [ctypes.c_void_p]
    handle = ctypes.c_void_p.from_address(id(owner) + object.__basicsize__).value
    cluster = library.rd_kafka_handle_mock_cluster(handle)
    library.rd_kafka_mock_group_initial_rebalance_delay_ms.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 100)
