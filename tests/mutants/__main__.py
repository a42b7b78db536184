"""`python -m tests.mutants [names]`: the whole catalogue, or the faults whose names contain one of these."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.copies import ROOT
from tests.mutants.gate import Gate, workers


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in CATALOGUE if not names or any(name in mutant.name for name in names)]
    if not chosen:
        say(f"no fault of the catalogue is named like {' or '.join(names)}")
        return 2
    # So that copies are put away also when run.py or CI ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="idempotency-mutants-") as folder:
        return Gate(ROOT, Path(folder), tell=say).judge(chosen, workers=workers())


def say(line: str) -> None:
    # At once, for whoever reads it through a pipe.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
