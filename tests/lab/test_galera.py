"""The nodes of Galera that tests rely on do what they are told, or what they prove would be nothing."""

from __future__ import annotations

import pymysql
import pytest

from tests.lab.galera import GaleraCluster, GaleraNode


def insert(node: GaleraNode, name: str, number: int) -> None:
    connection = pymysql.connect(host="127.0.0.1", port=node.port, user="root", database=name, autocommit=True)
    with connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (%s)", (number,))


def rows_at(node: GaleraNode, name: str) -> list[int]:
    connection = pymysql.connect(host="127.0.0.1", port=node.port, user="root", database=name)
    with connection, connection.cursor() as cursor:
        cursor.execute("SET wsrep_sync_wait = 1")
        cursor.execute("SELECT n FROM t ORDER BY n")
        return [number for (number,) in cursor.fetchall()]


def test_a_killed_node_and_one_that_was_cut_off_have_what_the_others_have_committed(galera: GaleraCluster) -> None:
    first, second, third = galera.nodes
    with galera.database() as name:
        first.execute(f"CREATE TABLE {name}.t (n INT PRIMARY KEY)")
        insert(second, name, 1)
        second.kill()
        insert(third, name, 2)
        galera.mend()
        third.isolate()
        with pytest.raises(pymysql.OperationalError, match="1047"):
            insert(third, name, 3)
        insert(first, name, 4)
        galera.mend()

        assert [[1, 2, 4]] * 3 == [rows_at(node, name) for node in galera.nodes]
