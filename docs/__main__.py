"""Build the documentation site into build/docs: `python3 run.py docs`.

Warnings are errors, and a link to a page or a heading that is not there is a warning. `python3 run.py docs linkcheck`
also follows the links to other sites.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from docs.generate import HERE

SITE = HERE.parent / "build" / "docs"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["linkcheck"]):
        print("run.py docs takes no argument, or linkcheck.", file=sys.stderr)
        return 2
    builder = arguments[0] if arguments else "dirhtml"
    # Every page afresh: a page from an earlier build keeps its old sidebar, and its warnings stay unseen.
    options = ["--fresh-env", "--write-all", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "auto"]
    target = SITE if builder == "dirhtml" else SITE.with_name(builder)
    code = sphinx(["-b", builder, *options, str(HERE), str(target)])
    if code == 0 and builder == "dirhtml":
        print(f"The site is in {shown(target)}/: python3 -m http.server -d {shown(target)}")
    return code


def shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
