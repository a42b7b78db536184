"""`python -m tests.lint_lua`: run luacheck on each script as Redis gets it, and on each library alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flask_idempotency.stores.redis import scripts

ROOT = Path(__file__).parents[1]
LUA = Path(scripts.__file__).with_name("lua")

INCLUDED = "-- luacheck: push ignore 211 221 43. 631\n{}-- luacheck: pop\n"
"""A library may offer functions that this script does not call, and its parameters may have names of the script's locals."""


def main() -> int:
    luacheck = shutil.which("luacheck")
    if luacheck is None:
        sys.stderr.write("luacheck is missing: install the Debian package lua-check\n")
        return 1 if os.environ.get("CI") else 0
    with tempfile.TemporaryDirectory(prefix="idempotency-lua-") as folder:
        for path in sorted(LUA.glob("**/*.lua")):
            name = path.relative_to(LUA).with_suffix("").as_posix()
            text = scripts.expand(name, frame=INCLUDED)
            if name.startswith("lib/"):
                # No includer is there: a name that the library does not define is undefined here.
                text = f"-- luacheck: ignore 211 221 43.\n{text}"
            expanded = Path(folder, f"{name}.lua")
            expanded.parent.mkdir(exist_ok=True)
            expanded.write_text(text)
        options = ["--config", str(ROOT / ".luacheckrc"), "--no-color", "--quiet"]
        return subprocess.run([luacheck, *options, "."], cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
