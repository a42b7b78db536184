"""The Sentinels that tests rely on do what they are told, or what they prove would be nothing."""

from __future__ import annotations

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
