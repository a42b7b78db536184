"""One application that serves several sites."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask, request

from tests.web.apps import KEY, World, is_replay, new_world

ROUTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by host": ({"host_matching": True, "static_host": "static.test"}, {"host": "<site>.test"}),
    "by subdomain": ({"subdomain_matching": True}, {"subdomain": "<site>"}),
}


def site(world: World, host: str, key: str = "k") -> Any:
    return world.client().post("/", headers={KEY: key}, base_url=f"http://{host}")


@pytest.fixture(params=ROUTING)
def sites(request: pytest.FixtureRequest) -> World:
    of_app, of_rule = ROUTING[request.param]
    # Where it is set, Flask 3.0 matches hosts against it, and not against what was asked for.
    name = None if "host_matching" in of_app else "test"
    world = new_world(Flask("tests.web.hosts", **of_app), config={"SERVER_NAME": name})

    @world.view("/", **of_rule)
    def pay(site: str) -> str:
        world.runs.append(site)
        return f"paid to {site}"

    return world


def test_one_site_is_never_given_the_answer_of_another(sites: World) -> None:
    """Where the host chooses what is run, it is a part of what was asked."""
    site(sites, "a.test")
    other = site(sites, "b.test")

    assert (422, "key-reused") == (other.status_code, other.json["code"])
    assert ["a"] == sites.runs


@pytest.mark.parametrize("again", ("a.test", "A.Test", "a.test:80"))
def test_the_same_site_replays_however_its_name_is_spelt(sites: World, again: str) -> None:
    """Case and the default port do not count."""
    site(sites, "a.test")

    assert is_replay(site(sites, again))
    assert ["a"] == sites.runs


def test_without_host_routing_the_host_does_not_count() -> None:
    """A retry may come in by another name of the same service."""
    world = new_world()
    world.view()(lambda: request.host)
    site(world, "a.test")

    assert is_replay(site(world, "b.test"))
