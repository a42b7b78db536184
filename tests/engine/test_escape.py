"""What an error message says of a URL: where the store is, and nothing that may be a piece of a password."""

from __future__ import annotations

from urllib.parse import quote

from hypothesis import example, given
from hypothesis import strategies as st

from flask_idempotency.engine.passwords import without_password

SHOWN = (
    ("redis://host:6379/0", "redis://host:6379/0"),
    ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
    ("redis://bob:s3cret@host:6379/0", "redis://bob:***@host:6379/0"),
    ("redis://bob:s3@cret@host:6379/0", "redis://bob:***@host:6379/0"),
    ("redis://bob:s3/cret@host:6379/0", "redis://***@host:6379/0"),
    ("redis://bob:4444/cret@host/0", "redis://***@host/0"),
    ("redis://bob:s3/c@ret@host:6379/0", "redis://***@host:6379/0"),
    ("redis://bob:s3?cret@host:6379/0", "redis://***"),
    ("redis://bob:s3#cret@host:6379/0", "redis://***"),
    ("redis://s3cret@host/0", "redis://***@host/0"),
    ("redis://bob:s3cret", "redis://***"),
    ("redis://bob:s3cret/0", "redis://***"),
    ("redis://bob:s3cret@host:port/0", "redis://bob:***@***"),
    ("redis://host?db=1&password=s3cret&ssl_cert_reqs=none", "redis://host?db=1&password=***&ssl_cert_reqs=none"),
    ("redis://host?password=s3cret&db=1", "redis://host?password=***&***"),
    ("redis://:s3cr@host?db=et", "redis://:***@host?db=***"),
    ("redis://:s3cr@host/et", "redis://:***@host/***"),
    ("redis://host?password=s3&cret", "redis://host?password=***&***"),
    ("redis://host?password=s3&cret=1", "redis://host?password=***&***"),
    ("redis://host?p%61ssword=s3cret", "redis://host?p%61ssword=***"),
    ("redis://host?password=s3@cret", "redis://***"),
    ("redis://host/0#s3cret", "redis://host/0#***"),
    ("unix://:s3cret@/run/redis.sock?db=1", "unix://:***@/run/redis.sock?db=1"),
    ("redis+sentinel://:s3cret@a:1,b:2/main/0?sentinel_password=x", "redis+sentinel://:***@a:1,b:2/main/0?sentinel_password=***"),
    ("rediss://bob:s3cret@[::1]:6379/0", "rediss://bob:***@[::1]:6379/0"),
    ("postgresql+psycopg://bob@host/shop", "postgresql+psycopg://bob@host/shop"),
    ("postgresql://bob:s3cret@host/shop?sslpassword=x&sslmode=require", "postgresql://bob:***@host/shop?sslpassword=***&sslmode=require"),
    ("postgresql://host/shop?access_token=x&api_key=y", "postgresql://host/shop?access_token=***&***"),
    ("mysql://bob:s3cr@t/x@db.example:3306/shop", "mysql://***@db.example:3306/shop"),
    ("sqlite:////var/lib/records.db", "sqlite:////var/lib/records.db"),
    ("redis://bo\x1bb:s3cret@host/0", "redis://***:***@host/0"),
    ("redis://host/\x1b[2J", "redis://host/***"),
    ("s3cret", "***"),
    ("s3cret@host", "***"),
    ("s3 cret://host", "***"),
    ("", "***"),
)  # fmt: skip


def test_only_the_password_is_hidden_where_that_is_sure() -> None:
    assert [] == [(url, shown, without_password(url)) for url, shown in SHOWN if without_password(url) != shown]


PASSWORDS = st.text(st.sampled_from("Zq%:/@?#&=[],. \n\x1b"), min_size=1, max_size=12).map(lambda text: f"XX{text}XX")


@example(password="XX&Z=1", form="{scheme}://host/0?password={password}", scheme="redis")
@given(
    PASSWORDS,
    st.sampled_from(("{scheme}://bob:{password}@host:6379/0", "{scheme}://:{password}@host/0?db=1", "{scheme}://host/0?password={password}")),
    st.sampled_from(("redis", "postgresql+psycopg", "redis+cluster", "mysql")),
)  # fmt: skip
def test_no_piece_of_a_password_is_shown(password: str, form: str, scheme: str) -> None:
    for written in (password, quote(password, safe="")):
        shown = without_password(form.format(scheme=scheme, password=written))
        assert not {"X", "Z", "q"} & set(shown.replace(scheme, ""))
