"""`python3 run.py weight`: how heavy the package is. `python3 run.py check` fails if a measure or a room is above its limit.

A room is a package or module directly below `flask_idempotency`. Its limit stands in `weight.toml`, in lines of code: without
docstrings, comments and blank lines. A change that needs more raises the limit in the same commit and gives the reason there.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "flask_idempotency"
LIMITS: Final = Path(__file__).with_name("weight.toml")

SHARED_LINES: Final = 6
_NO_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)

# What a worker with a Redis URL loads, and for how long.
_APPLICATION: Final = """
import sys, time
import flask, redis, cryptography
began, before = time.perf_counter(), set(sys.modules)
from flask_idempotency import Idempotency
app = flask.Flask("shop")
app.testing = True
time.sleep = lambda _: None  # between the tries to connect
Idempotency(app, store="redis://127.0.0.1:1", secret="s-9f2c47d1e8b35a60")
print(time.perf_counter() - began, *(sys.modules[name].__file__ for name in set(sys.modules) - before
      if name.partition(".")[0] == "flask_idempotency"))
"""
_TRIES: Final = 5


def code_lines(source: str) -> list[int]:
    """Return the numbers of the lines that hold code: no docstring, no comment, not blank."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    held = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return sorted(held - texts)


def sources(package: Path = PACKAGE) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}


def rooms(files: Mapping[Path, str], package: Path = PACKAGE) -> Counter[str]:
    """Return the lines of code of each room."""
    found: Counter[str] = Counter()
    for path, source in files.items():
        found[path.relative_to(package).parts[0].removesuffix(".py")] += len(code_lines(source))
    return found


def limits() -> dict[str, dict[str, int]]:
    """Return the limits of `measures`, of the `walk` of a request, and of `rooms` in lines of code."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8"))


def faults(found: Mapping[str, int], most: Mapping[str, int]) -> list[str]:
    """Return what is over its limit, has none, or has one and is not there."""
    return [
        *(
            f"{name}: {found[name]}, and the limit is {most[name]}"
            for name in found.keys() & most.keys()
            if found[name] > most[name]
        ),
        *(f"{name} has no limit" for name in found.keys() - most.keys()),
        *(f"{name} has a limit, and is not there" for name in most.keys() - found.keys()),
    ]


def private_functions(files: Mapping[Path, str]) -> tuple[int, int]:
    """Return how many functions have a private name, and how many of those stand in one other place of the package."""
    defined: list[str] = []
    used: Counter[str] = Counter()
    for source in files.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.append(node.name)
            elif isinstance(node, ast.Attribute | ast.Name):
                used[node.attr if isinstance(node, ast.Attribute) else node.id] += 1
    private = [name for name in defined if name.startswith("_") and not name.startswith("__")]
    return len(defined), sum(used[name] == 1 for name in private)


def shared_places(files: Mapping[Path, str]) -> int:
    """Return how many pairs of places share six lines of code or more. Imports do not count."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, source in files.items():
        lines = source.splitlines()
        code = [lines[number - 1].strip() for number in code_lines(source)]
        for at in range(len(code) - SHARED_LINES + 1):
            window = tuple(code[at : at + SHARED_LINES])
            if not any(re.match(r"(from|import)\b|[\w, ]+,$|\)$", line) for line in window[:2]):
                places[window].append((path, at))
    pairs = {
        (one, other)
        for found in places.values()
        for number, one in enumerate(found)
        for other in found[number + 1 :]
        if found[0] != other
    }
    # A longer stretch counts once, at its beginning.
    return sum(((a, x - 1), (b, y - 1)) not in pairs for (a, x), (b, y) in pairs)


def too_complex(limit: int) -> int:
    """Return how many functions have a cyclomatic complexity above this, as Ruff counts it."""
    command = ["ruff", "check", "--select", "C901", "--config", f"lint.mccabe.max-complexity={limit}"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:], "--output-format", "concise", str(PACKAGE)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.count(" C901 ")


def loaded(*, tries: int = _TRIES) -> tuple[int, int, float]:
    """Return how many of our modules `Idempotency(app)` on Redis loads, their lines, and the milliseconds of both.

    Not those of Flask, redis-py and cryptography.
    """
    found = [
        subprocess.run([sys.executable, "-c", _APPLICATION], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(tries)
    ]
    files = found[0][1:]
    lines = sum(Path(file).read_text(encoding="utf-8").count("\n") for file in files)
    return len(files), lines, min(float(each[0]) for each in found) * 1000


def documentation() -> int:
    """Return the number of words outside code blocks."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    words = 0
    for page in pages:
        text = re.sub(r"^( *)(```+|~~~+).*?^\1\2\s*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        words += sum(1 for word in text.split() if re.search(r"\w", word))
    return words


def measures(files: Mapping[Path, str]) -> Iterator[tuple[str, int]]:
    """Yield each measure with what it is now, in the order of `weight.toml`."""
    yield "lines of code", sum(rooms(files).values())
    yield "lines of code without testing", sum(rooms(files).values()) - rooms(files)["testing"]
    modules, lines, _ = loaded(tries=1)
    yield "modules that Idempotency(app) on Redis loads", modules
    yield "lines of these modules", lines
    functions, once = private_functions(files)
    yield "private functions that are used once, of a thousand", round(once / functions * 1000)
    yield "functions with a complexity above 20", too_complex(20)
    yield "functions with a complexity above 10", too_complex(10)
    yield "pairs of places that share six lines", shared_places(files)
    yield "words of documentation outside code blocks", documentation()


def main(arguments: Sequence[str]) -> int:
    files = sources()
    most = limits()
    found, held = dict(measures(files)), rooms(files)
    if arguments == ["--check"]:
        for fault in (wrong := [*faults(found, most["measures"]), *faults(held, most["rooms"])]):
            print(f"{fault}: see {LIMITS.relative_to(ROOT)}")  # noqa: T201
        return 1 if wrong else 0
    for name, number in found.items():
        print(f"{name:54} {number:6,} of {most['measures'].get(name, 0):,}")  # noqa: T201
    print(f"{'milliseconds for these modules':54} {loaded()[2]:6.0f}")  # noqa: T201
    for room, number in held.most_common():
        print(f"  {room:52} {number:6,} of {most['rooms'].get(room, 0):,}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
