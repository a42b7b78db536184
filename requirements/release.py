"""Build what a release publishes: `.venv/bin/python -m requirements.release [--tag v1.2.3]`, into dist/.

* the sdist, and the wheel that is built from it, with the pinned setuptools;
* `sbom.cdx.json`: the wheel with all its extras in the versions that requirements.txt pins, as CycloneDX;
* before both, the check that type checkers know the types of the wheel's names: see `LEAST_KNOWN`.

It publishes nothing: .github/workflows/release.yml does. With `--tag`, it fails if the tag names another version than setup.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from docs.public import names
from requirements.lock import ALL, HERE

ROOT: Final = HERE.parent
TOOLS: Final = HERE / "release-tools.txt"
PACKAGE: Final = "flask_idempotency"

LEAST_KNOWN: Final = 0.99
"""The least part of the names without an underscore that pyright must know the type of. Of public names it is every one."""


class NotReady(Exception):
    """What would be published is not as it should be."""


def environment(folder: Path, *requirements: str) -> Path:
    """Make a virtual environment with these packages, and return the folder of its programs."""
    venv.EnvBuilder(symlinks=True, clear=True).create(folder)
    # run.py puts pip into .venv only if the interpreter behind it has none.
    pip = sys.executable if importlib.util.find_spec("pip") else str(Path(sys.executable).resolve())
    options = ["-qq", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:"]
    run(pip, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", *options, *requirements)
    return folder / "bin"


def run(*command: str, path: Path | None = None, expected: tuple[int, ...] = (0,)) -> str:
    """Run a command without what would let packages of ours in, and return what it printed."""
    outside = {name: each for name, each in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if path is not None:
        outside["PATH"] = f"{path}{os.pathsep}{outside.get('PATH', '')}"
    # pyright takes the first package of the name that it finds, and in a checkout that would be the sources.
    done = subprocess.run(command, cwd=tempfile.gettempdir(), env=outside, capture_output=True, text=True, check=False)
    if done.returncode not in expected:
        raise NotReady(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def constraints() -> str:
    """Return the pins of requirements.txt as constraints, which name no extra."""
    lines = [line.partition("#")[0].strip() for line in ALL.read_text(encoding="utf-8").splitlines()]
    return "".join(re.sub(r"\[.*?\]", "", line) + "\n" for line in lines if "==" in line)


def build(tools: Path, source: Path, out: Path) -> Path:
    """Build the sdist and from it the wheel, and return the wheel."""
    run(str(tools / "python"), "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    (wheel,) = out.glob("*.whl")
    return wheel


def unknown_types(tools: Path, installed: Path) -> tuple[float, list[str]]:
    """Return the part of the names of the installed wheel that pyright knows the type of, and the public ones it does not."""
    # It exits with 1 if it does not know one.
    printed = run(
        *(str(tools / "pyright"), "--verifytypes", PACKAGE, "--ignoreexternal", "--outputjson"),
        path=installed,
        expected=(0, 1),
    )
    found: dict[str, Any] = json.loads(printed)["typeCompleteness"]
    known = {each["name"] for each in found["symbols"] if each["isTypeKnown"] and not each["isTypeAmbiguous"]}
    return found["completenessScore"], [name for name in map(".".join, names()) if name not in known]


def check_types(tools: Path, installed: Path) -> float:
    """Return the part of the names whose type pyright knows. Raise NotReady if it is too small, or misses a public name."""
    part, unknown = unknown_types(tools, installed)
    if unknown:
        raise NotReady(f"pyright does not know the type of {', '.join(unknown)}. Annotate what they consist of.")
    if part < LEAST_KNOWN:
        raise NotReady(f"pyright knows the type of {part:.2%} of the names, and must know {LEAST_KNOWN:.0%}.")
    return part


def sbom(tools: Path, installed: Path, published: list[Path]) -> dict[str, Any]:
    """Return the bill of materials of an environment that has the wheel. The wheel is its subject, with both files' digests."""
    printed = run(
        *(str(tools / "cyclonedx-py"), "environment", "--spec-version", "1.6", "--output-reproducible"),
        str(installed / "python"),
    )
    bill: dict[str, Any] = json.loads(printed)
    (ours,) = (each for each in bill["components"] if each["name"] == "flask-idempotency")
    bill["components"].remove(ours)
    files = [
        {
            "type": "file",
            "name": path.name,
            "bom-ref": path.name,
            "hashes": [{"alg": "SHA-256", "content": sha256(path.read_bytes()).hexdigest()}],
        }
        for path in sorted(published)
    ]
    # Where it was built says nothing about what is in it.
    ours.pop("externalReferences", None)
    bill["metadata"]["component"] = {**ours, "type": "library", "components": files}
    return bill


def release(source: Path, out: Path, *, tag: str | None = None) -> str:
    """Build everything into this folder, and return one line about it."""
    if list(out.glob("*")):
        raise NotReady(f"{out} is not empty. Remove what is in it: what is published must come from this build alone.")
    with tempfile.TemporaryDirectory() as work:
        tools = environment(Path(work) / "tools", "--requirement", str(TOOLS))
        wheel = build(tools, source, out)
        version = wheel.name.split("-")[1]
        if tag is not None and tag != f"v{version}":
            raise NotReady(
                f"The tag is {tag}, and setup.py has version {version}. Tag the commit that sets the version."
            )
        pins = Path(work) / "constraints.txt"
        pins.write_text(constraints(), encoding="utf-8")
        installed = environment(Path(work) / "user", "--constraint", str(pins), f"{wheel}[all]")
        part = check_types(tools, installed)
        bill = sbom(tools, installed, list(out.glob("*")))
        (out / "sbom.cdx.json").write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    packages = len(bill["components"])
    return f"{PACKAGE} {version}: types of {part:.1%} of its names are known, {packages} packages in sbom.cdx.json"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="the tag that this release has: v and the version")
    try:
        print(release(ROOT, ROOT / "dist", tag=parser.parse_args().tag))
    except NotReady as error:
        sys.exit(f"release: {error}")
