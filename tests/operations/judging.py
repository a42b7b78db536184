"""What a check has said."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flask_idempotency.engine.capabilities import Finding, Verdict

MENDS = re.compile(r"`flask idempotency \w+|`celery |IDEMPOTENCY_\w+|`timedatectl|@idempotent|@idempotency\.|Report it")


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict of findings that are all of one check. Those that are not fine name a command or a setting."""
    every = list(findings)
    assert every
    for finding in every:
        assert finding.text.endswith(".")
        assert bool(finding.remedy) is (finding.verdict is not Verdict.FINE)
        assert not finding.remedy or MENDS.search(finding.remedy), finding.remedy
    order = (Verdict.FAULT, Verdict.UNKNOWN, Verdict.ADVICE, Verdict.FINE)
    return min((finding.verdict for finding in every), key=order.index)
