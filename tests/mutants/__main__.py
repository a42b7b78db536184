"""`python3 run.py mutants [names] [--since COMMIT] [--at-most N]`: the whole catalogue, or a part of it."""

from __future__ import annotations

import argparse
import hashlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import CATALOGUE, FILES, Mutant, parse, sources
from tests.mutants.copies import ROOT
from tests.mutants.gate import Gate, workers


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.py mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only the faults whose names contain one of these")
    parser.add_argument("--since", metavar="COMMIT", help="only the faults in files that changed since this commit")
    parser.add_argument("--at-most", type=int, metavar="N", help="only N of them, which differ from commit to commit")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in CATALOGUE if not options.names or any(name in mutant.name for name in options.names)]
    if not chosen:
        say(f"no fault of the catalogue is named like {' or '.join(options.names)}")
        return 2
    if options.since:
        chosen = changed_since(options.since, chosen)
    if options.at_most is not None:
        chosen = sample(chosen, options.at_most)
    # pytest and its servers end with the gate.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="idempotency-mutants-") as folder:
        return Gate(ROOT, Path(folder), tell=say).judge(chosen, workers=workers())


def changed_since(commit: str, mutants: Sequence[Mutant]) -> list[Mutant]:
    """Return the mutants whose entry, file or test is not as it was in that commit."""
    changed = set(git("diff", "--name-only", "--no-renames", commit).splitlines())
    entries = git("ls-tree", "-r", "--name-only", commit, *(str(file.relative_to(ROOT)) for file in FILES)).splitlines()
    before = {mutant for file in entries for mutant in parse(git("show", f"{commit}:{file}"))}
    known, found = sources(ROOT), []
    for mutant in mutants:
        files = {str(path.relative_to(ROOT)) for path, _ in mutant.places(known)}
        tests = {test.partition("::")[0] for test in mutant.killed_by}
        if mutant not in before or (files | tests) & changed:
            found.append(mutant)
    return found


def sample(mutants: Sequence[Mutant], size: int) -> list[Mutant]:
    """Return as many of these mutants, the same ones whenever these files are tested."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    tree = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    return sorted(mutants, key=lambda mutant: hashlib.sha256((tree + mutant.name).encode()).digest())[:size]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def say(line: str) -> None:
    # At once, because the output may go through a pipe.
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
