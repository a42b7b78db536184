"""Names and keys that somebody chose so that they would pass for somebody else's."""

from __future__ import annotations

from base64 import b64encode

from flask import request

from tests.web.apps import is_replay, new_world

RING = {"a": b64encode(b"a" * 32).decode()}

HOSTILE = (
    "a:b", "a", "b:c", "c", "a:b:c", "{a}", "a}{b", "{", "}", "a\0b", "a\0", "\0", "a\r\nb", "a\nb", "a%b", "%00", "%", "*",
    "ä", "a\u0308", "\u202e", "😀", "\ud800", " ", "a ", "None", "x" * 255, "x" * 254,
)  # fmt: skip
"""Each could be taken for two of the others, or for something that a store means by it."""


def test_hostile_tenants_principals_and_keys_never_meet() -> None:
    """Each pair runs once and is replayed to nobody else: through loaders, over HTTP, with encryption and quotas."""
    world = new_world(
        init=False, encryption="required", key_ring=RING, allow_plaintext_transport=True, quota_records=1000
    )
    callers = [(tenant, principal) for tenant in (*HOSTILE, None) for principal in (*HOSTILE[:12], None)]
    world.idempotency.tenant_loader(lambda: callers[int(request.headers["X-Caller"])][0])
    world.idempotency.principal_loader(lambda: callers[int(request.headers["X-Caller"])][1])
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> str:
        world.runs.append(request.headers["X-Caller"])
        return request.headers["X-Caller"]

    def answers() -> list[tuple[str, bool]]:
        sent = [world.post(key="a:b", headers={"X-Caller": str(number)}) for number in range(len(callers))]
        return [(answer.get_data(as_text=True), is_replay(answer)) for answer in sent]

    assert [(str(number), False) for number in range(len(callers))] == answers()
    assert [(str(number), True) for number in range(len(callers))] == answers()
    claims = [call.key for call in world.store.calls if call.verb == "claim"]
    assert (len(callers), len(HOSTILE) + 1) == (len({key.rid for key in claims}), len({key.tid for key in claims}))


def test_hostile_keys_never_meet_either() -> None:
    """Those that a header can carry, bare and quoted."""
    world = new_world()
    keys = [
        f'"{key}"' for key in ("a:b", "a", "b", "{a}", "a}{b", "a%00b", "%", "*", "a,b", "a;b", "x" * 255, "x" * 254)
    ]

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        return str(len(world.runs))

    first = [world.post(key=key).data for key in keys]

    assert len(keys) == len(set(first))
    assert first == [world.post(key=key).data for key in keys]
