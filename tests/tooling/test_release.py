"""What a release publishes, and the workflow that publishes it."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from docs.public import names
from requirements import lock, release
from tests.tooling.wheels import sources

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
ANYWHERE = Path("unused")


@pytest.mark.soak
def test_a_release_has_its_files_and_knows_its_types(tmp_path: Path) -> None:
    """With the tools of a release, which it installs: 300 MB, among them pyright."""
    out, tree = tmp_path / "dist", tmp_path / "tree"
    out.mkdir()
    tree.mkdir()

    told = release.release(sources(tree), out)

    sdist, wheel = sorted(out.glob("flask_idempotency-*"), key=lambda path: path.suffix)
    bill = json.loads((out / "sbom.cdx.json").read_text(encoding="utf-8"))
    subject = bill["metadata"]["component"]
    assert 3 == len(list(out.iterdir())), told
    assert ("flask-idempotency", "library", wheel.name.split("-")[1]) == tuple(
        subject[each] for each in ("name", "type", "version")
    )
    assert {path.name: sha256(path.read_bytes()).hexdigest() for path in (sdist, wheel)} == {
        each["name"]: each["hashes"][0]["content"] for each in subject["components"]
    }
    assert {"Flask", "redis", "SQLAlchemy", "celery", "cryptography"} <= {each["name"] for each in bill["components"]}
    assert str(tmp_path) not in json.dumps(bill)
    with pytest.raises(release.NotReady, match="is not empty"):
        release.release(tree, out)


def known_to_pyright(monkeypatch: pytest.MonkeyPatch, part: float, *, without: str = "") -> None:
    """Let pyright answer so: it knows every public name, without this one."""
    symbols = [
        {"name": f"{where}.{name}", "isTypeKnown": name != without, "isTypeAmbiguous": False} for where, name in names()
    ]
    answer = json.dumps({"typeCompleteness": {"completenessScore": part, "symbols": symbols}})
    monkeypatch.setattr(release, "run", lambda *command, **options: answer)


def test_a_public_name_of_unknown_type_stops_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    known_to_pyright(monkeypatch, 0.999, without="LeaseLost")

    with pytest.raises(release.NotReady, match=r"type of flask_idempotency\.LeaseLost"):
        release.check_types(ANYWHERE, ANYWHERE)


def test_too_many_internal_names_of_unknown_type_stop_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    known_to_pyright(monkeypatch, 0.9899)
    with pytest.raises(release.NotReady, match=r"98\.99% of the names, and must know 99%"):
        release.check_types(ANYWHERE, ANYWHERE)

    known_to_pyright(monkeypatch, 0.99)
    assert 0.99 == release.check_types(ANYWHERE, ANYWHERE)


def test_another_version_than_the_tag_stops_a_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tag on the wrong commit would publish the last version under the next one's notes."""
    built: Any = lambda tools, source, out: out / "flask_idempotency-0.1.0-py3-none-any.whl"  # noqa: E731
    monkeypatch.setattr(release, "environment", lambda *arguments: ANYWHERE)
    monkeypatch.setattr(release, "build", built)

    with pytest.raises(release.NotReady, match=r"The tag is v0\.2\.0, and setup\.py has version 0\.1\.0"):
        release.release(ROOT, tmp_path, tag="v0.2.0")


def test_a_command_that_fails_stops_a_release_with_what_it_wrote() -> None:
    with pytest.raises(release.NotReady, match=r"sh failed:\nwhy"):
        release.run("sh", "-c", "echo why >&2; exit 3")


def test_constraints_have_every_pin_and_no_extra() -> None:
    """pip refuses a constraint with an extra."""
    lines = release.constraints().splitlines()

    assert len(lines) > 100
    assert [line for line in lines if not re.match(r"[\w.-]+==\S+(?:; .+)?$", line)] == []
    assert [line for line in lines if line.startswith("psycopg==")] != []


def test_the_workflow_needs_no_secret_and_lets_only_one_job_publish() -> None:
    assert "secrets." not in WORKFLOW
    assert "password" not in WORKFLOW
    assert WORKFLOW.count("id-token: write") == 1
    assert WORKFLOW.index("  publish:") < WORKFLOW.index("id-token: write")
    assert re.search(r"^permissions: \{\}$", WORKFLOW, re.MULTILINE)
    assert "attestations: true" in WORKFLOW


def test_the_workflow_takes_actions_by_their_commit() -> None:
    actions = re.findall(r"uses: \S+?@(\S+)", WORKFLOW)

    assert len(actions) == 7
    assert [action for action in actions if not re.fullmatch(r"[0-9a-f]{40}", action)] == []


def test_only_the_repository_that_the_package_names_publishes() -> None:
    (repository,) = re.findall(r'^REPOSITORY = "https://github\.com/(.+)"$', SETUP, re.MULTILINE)

    assert f"if: github.repository == '{repository}'" in WORKFLOW
    assert f"https://github.com/{repository}/security/advisories/new" in (ROOT / "SECURITY.md").read_text("utf-8")


def test_the_tools_of_a_release_are_those_that_the_tests_build_with() -> None:
    pins = {
        path: dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text("utf-8"), re.MULTILINE))
        for path in (release.TOOLS, lock.ALL)
    }

    assert {"build", "setuptools", "wheel", "cyclonedx-bom", "pyright"} <= pins[release.TOOLS].keys()
    for name in ("build", "setuptools", "wheel"):
        assert pins[release.TOOLS][name] == pins[lock.ALL][name]
