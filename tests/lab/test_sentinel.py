"""The Sentinels that tests rely on do what they are told, or what they prove would be nothing."""

from __future__ import annotations

import pytest

from tests.lab.programs import REDIS_KINDS
from tests.lab.sentinel import SentinelRig


def test_a_lagging_heir_lacks_the_last_write_when_it_is_promoted(sentinel_rig: SentinelRig) -> None:
    """And has everything that was written before it lagged."""
    primary, heir = sentinel_rig.primary, sentinel_rig.replicas[0]
    with sentinel_rig.client(decode_responses=True) as client:
        client.set("key", "early")
        heir.has_all_of(primary)

        heir.lag()
        client.set("key", "late")
        primary.kill()
        promoted = sentinel_rig.fail_over()

        assert promoted is heir
        assert client.get("key") == "early"


@pytest.mark.slow
@pytest.mark.parametrize("redis_kind", REDIS_KINDS[:1], indirect=True)
def test_a_silent_primary_is_replaced_and_the_next_test_finds_all_whole(sentinel_rig: SentinelRig) -> None:
    """By the Sentinels' own doing, with one of them silent as well: two are enough."""
    primary, heir = sentinel_rig.primary, sentinel_rig.replicas[0]

    sentinel_rig.sentinels[0].pause()
    primary.pause()
    sentinel_rig.counts_as_down(primary)
    sentinel_rig.promoted(heir)
    with sentinel_rig.client() as client:
        client.set("key", "value")
    sentinel_rig.mend()

    assert sentinel_rig.primary is heir
    assert all(replica.in_step() for replica in sentinel_rig.replicas)
    assert [node.told("DBSIZE") for node in sentinel_rig.nodes] == [0, 0, 0]
