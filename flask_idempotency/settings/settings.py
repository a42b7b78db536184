"""Everything one application configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from flask_idempotency.engine.policy import Override, Policy
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store
from flask_idempotency.schema import DOCS_URL, MEMORY

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs a package that is optional

REDIS_SCHEMES = ("redis:", "rediss:", "unix:", "redis+", "rediss+")

StoreChoice: TypeAlias = "str | Store | Callable[[], Store]"
Encryption: TypeAlias = Literal["off", "on", "required"]


@dataclass(frozen=True, slots=True)
class FormerIdentity:
    """What was otherwise in the identity of keys, until a change. None: it was as it is now."""

    namespace: str | None = None
    tenant: Literal[False] | Callable[[], str | None] | None = None
    """False: there was no loader. Else the loader that there was."""
    principal: Literal[False] | tuple[str, ...] | Callable[[], str | None] | None = None
    """As `tenant`; or the extensions that named callers."""

    @property
    def coarse(self) -> bool:
        """Whether the former names may stand for several callers of today."""
        return self.tenant is not None or self.principal is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """Frozen, and never shown whole: it holds secrets. `secrets` has the newest first."""

    store: StoreChoice = field(repr=False)
    namespace: str
    secrets: tuple[bytes, ...] = field(repr=False)
    policy: Policy
    redis_url: str | None = field(default=None, repr=False)
    claim_strategy: str | None = None
    docs_url: str = DOCS_URL
    former_identity: FormerIdentity | None = None
    """Under which names keys are claimed besides, for one `keep` after a change."""
    allow_anonymous: bool | None = None
    """None: requests without credentials only."""
    credential_headers: tuple[str, ...] = ()
    """What counts as credentials besides `web.principals`."""
    max_waiters: int = 2
    quota: Quota | None = None
    """What each tenant may have, unless something says otherwise of one. None: nothing is counted."""
    store_id: str | None = None
    after_loss: Literal["refuse", "hold", "run"] = "refuse"
    loss_hold: float = 60.0
    key_clock_skew: float | None = 5.0
    """What becomes of keys that a Redis does not know after it has lost its memory: see `stores.redis.memory`."""
    of_memory: tuple[str, ...] = ()
    """Those of these that were configured."""
    replicas: int = 0
    """How many replicas of a Redis must have each claim and each answer before it counts."""
    tenant_shards: int = 1
    """Over how many parts the keys of each tenant are spread."""
    encryption: Encryption = "off"
    key_ring: KeyProvider | None = field(default=None, repr=False)
    """Also without encryption it may be there: what was sealed before still opens."""
    compression: str | None = "zlib"
    hashed_names: bool = False
    """Whether records name tenants and principals by what leads back to nobody."""
    plaintext_transport: bool = False
    """Whether `required` leaves it to others how the store is reached."""
    reap_every: float | None = 10.0
    expire_every: float | None = 60.0
    rotate_every: float | None = 86400.0
    reconcile_every: float | None = 86400.0
    heartbeat_every: float | None = 30.0
    """Of chores that are done by themselves, in seconds. None: this one is not."""
    expire_rate: int = 10_000
    worker_timeout: float | None = None
    proxy_timeout: float | None = None
    """When servers and proxies give up, in seconds. None: nobody has said."""
    broker_url: str | None = field(default=None, repr=False)
    metrics: bool = False
    guard: Literal["all", "chosen"] = "all"
    enabled: bool = True
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Where each value of `written` was written, by its name."""
    written: Override = field(default_factory=dict, repr=False)
    """What the application wrote of `policy`: the rest are defaults, and what its profile brings."""
    warnings: tuple[str, ...] = ()
    """What is allowed and unwise, one sentence each, for whoever starts the application to log."""

    @property
    def of_application(self) -> bool:
        """Whether the store is the database that Flask-SQLAlchemy keeps for the application."""
        return isinstance(self.store, str) and self.store.startswith("flask-sqlalchemy:")

    @property
    def may_be_joint(self) -> bool:
        """Whether the store may turn out to be in the database of the application's own session."""
        return not str(self.store).startswith((MEMORY, *REDIS_SCHEMES))
