"""What the package is and needs. Tool settings are in pyproject.toml, pins for development in requirements.txt."""

from pathlib import Path

from setuptools import find_packages, setup

# The folder janitor/ stands at the top of the repository but is installed inside our own package:
# as a top-level `janitor` it would overwrite pyjanitor, which owns that name.
JANITOR = [f"flask_idempotency.{name}" for name in find_packages(include=["janitor", "janitor.*"])]

# No floor of an extra has a known advisory. Those without a comment are the lowest that have what is used here.
EXTRAS = {
    "redis": ["redis>=6.4,<9"],  # PYSEC-2023-312 names what is before 6.2
    "sql": ["flask-sqlalchemy>=3.1,<4", "SQLAlchemy>=2.0.23,<2.2"],
    "postgresql": ["flask-sqlalchemy>=3.1,<4", "SQLAlchemy>=2.0.23,<2.2", "psycopg[binary]>=3.2.1,<4"],
    "mysql": ["flask-sqlalchemy>=3.1,<4", "SQLAlchemy>=2.0.23,<2.2", "PyMySQL>=1.1.1,<2"],  # before: CVE-2024-36039
    "crypto": ["cryptography>=50"],  # CVE-2026-69247 (GHSA-g6cj-pr64-35w5); before: CVE-2026-39892, CVE-2026-26007
    # kombu's transport for Redis imports packaging, and requires it with an extra of its own only.
    "celery": ["celery>=5.6.3,<6", "packaging>=23"],
    "rabbitmq": ["pika>=1.3,<2"],
    "kafka": ["confluent-kafka>=2.6,<3"],
    "aws": ["cryptography>=50", "boto3>=1.34,<2"],
    "gcp": ["cryptography>=50", "google-auth>=2.29,<3", "requests>=2.33,<3"],
    "cli": [],  # no longer needed: kept, so that requirements that name it install
    "zstd": ["backports.zstd>=1; python_version < '3.14'"],
    "speed": ["orjson>=3.11.6,<4"],  # CVE-2025-67221 (GHSA-hx9q-6w63-j58v)
    "openapi": ["apispec>=6.4,<7"],
    "client": [
        "httpx>=0.27,<1",
        "requests>=2.33,<3",  # CVE-2026-25645 (GHSA-9wx4-h78v-vm56); before: CVE-2024-47081
        "urllib3>=2.7,<3",  # CVE-2026-44431, CVE-2026-44432; before: CVE-2026-21441, CVE-2025-66471, CVE-2025-66418
    ],
    "metrics": ["prometheus_client>=0.20,<1"],
    # Its instruments are those of the Prometheus metrics, whose module needs that library.
    "otel": ["opentelemetry-api>=1.30,<2", "prometheus_client>=0.20,<1"],
}

SITE = "https://flask-idempotency.readthedocs.io"
REPOSITORY = "https://github.com/flask-idempotency/flask-idempotency"

setup(
    name="flask-idempotency",
    version="0.1.0",
    description="Makes unsafe Flask endpoints safe to retry: one key, one effect, the same answer",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the flask_idempotency contributors",
    url=SITE,
    project_urls={
        "Documentation": SITE,
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{SITE}/changelog/",
        "Security": f"{SITE}/security/",
    },
    keywords=[
        *("flask", "idempotency", "idempotent", "idempotency-key", "retry", "exactly-once", "payments", "rest-api"),
        *("redis", "valkey", "postgresql", "mysql", "sqlalchemy", "celery", "outbox", "inbox", "webhooks", "rfc9457"),
    ],
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["flask_idempotency", "flask_idempotency.*"]), *JANITOR],
    package_dir={"flask_idempotency.janitor": "janitor"},
    package_data={
        "": ["py.typed", "lua/*.lua", "lua/lib/*.lua", "*.schema.json", "browser/*.js"],
        "flask_idempotency.console": ["static/*", "templates/*.html"],
    },
    # Found even where the application cannot start: the first key of a ring is made before there is a ring.
    entry_points={"flask.commands": ["idempotency = flask_idempotency.cli:cli"]},
    install_requires=["flask>=3.0,<4", "marshmallow>=3.20,<5"],
    extras_require={**EXTRAS, "all": sorted({requirement for extra in EXTRAS.values() for requirement in extra})},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Framework :: Flask",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Internet :: WWW/HTTP :: WSGI",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
)
