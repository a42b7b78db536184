"""Read each sentence of advice from the code that says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import flask_idempotency

PACKAGE: Final = Path(flask_idempotency.__file__).parent

SPEAKERS: Final = (
    "consumers.celery",
    "operations.admin",
    "operations.doctor",
    "operations.examination",
    "operations.identity",
    "operations.report",
    "stores.memory.admin",
    "stores.redis.admin.health",
    "stores.sql.admin.health",
    "stores.tiered",
    "web.doctor",
    "web.unreached",
)
"""The modules that advise. A test looks for `Finding`s and `Suggestion`s in every other one."""

ELSEWHERE: Final = frozenset(
    {
        "status.remedy",  # `operations.admin`, whose sentences are read there
        "each.remedy",  # `operations.identity`, the same
        "cure",  # `web.unreached`, the same
        "error.remedy or _REACH",  # a key service's own: see `codec.key_services`
        "f'{_counted(number, what)} {reason}'",  # each reason is read where it stands
        "remedy",  # of `schema_check`, `Run flask idempotency db upgrade` or a statement of the database
        "remedies[0]",
        "' '.join(remedies)",
        "' '.join(dict.fromkeys(remedies))",
        "f'{remedy[0].upper()}{remedy[1:]}.'",
        "f'{found.remedy}; or, if something else protects the connection, set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True.'",
    }
)
"""Remedies that other modules word, which say what the tables of a database or its connection need."""


class Speaker:
    """One module, and the sentences of advice in it. `{}` stands for what is filled in."""

    def __init__(self, name: str) -> None:
        self._returned = name in ("operations.admin", "operations.identity")
        self._module = import_module(f"flask_idempotency.{name}")
        source = Path(str(self._module.__file__)).read_text(encoding="utf-8")
        self._tree = ast.parse(source)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}

    def sentences(self) -> Iterator[str]:
        """Yield each sentence. Raises `AssertionError` for advice that it cannot read."""
        for node in ast.walk(self._tree):
            said = self._advice(node)
            if said is not None:
                texts = [text for text in self._texts(said, self._function(node)) if text.strip("{}. ")]
                known = ast.unparse(said) in ELSEWHERE or isinstance(said, ast.Constant)
                assert texts or known, f"line {said.lineno}: {ast.unparse(said)}"
                yield from texts

    def _advice(self, node: ast.AST) -> ast.expr | None:
        match node:
            case ast.Call(func=ast.Name(id="Finding"), args=[_, _, _, remedy]):
                return remedy
            case ast.Call(func=ast.Name(id="_advice"), args=[_, remedy]):
                return remedy
            case ast.Call(func=ast.Name(id="Suggestion"), args=[_, _, reason]):
                return reason
            case ast.Tuple(elts=[ast.Starred(value=ast.Tuple()), reason]):  # the counted ones of a report
                return reason
            case ast.Tuple(elts=[verdict, _, remedy]) if "Verdict" in ast.dump(verdict):
                return remedy
            case ast.Yield(value=ast.Tuple(elts=[ast.Constant(value=bool()), _, remedy])):
                return remedy
            case ast.Return(value=ast.Tuple(elts=[_, ast.Name() | ast.JoinedStr() | ast.Constant() as remedy])):
                return remedy if self._returned else None
        return None

    def _function(self, node: ast.AST) -> ast.AST | None:
        while node in self._parents and not isinstance(node, ast.FunctionDef):
            node = self._parents[node]
        return node if isinstance(node, ast.FunctionDef) else None

    def _texts(self, node: ast.expr, function: ast.AST | None) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return ["".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in values)]
            case ast.IfExp(body=body, orelse=otherwise):
                return [*self._texts(body, function), *self._texts(otherwise, function)]
            case ast.BinOp(left=left, right=right):
                # The beginning of a reason is counted, and its end says what to do.
                return [f"{a}{b}" for a in self._texts(left, function) or ["{}"] for b in self._texts(right, function)]
            case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
                return self._assigned(name, function)
        return []

    def _assigned(self, name: str, function: ast.AST | None) -> list[str]:
        values = [
            each.value
            for scope in (function, None)
            for each in (ast.walk(scope) if scope is not None else ast.iter_child_nodes(self._tree))
            if isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign)
            and each.value is not None
            and ast.unparse(each.targets[0] if isinstance(each, ast.Assign) else each.target) == name
        ]
        texts = [text for value in values for text in self._texts(value, None if value is function else function)]
        if not values and isinstance(imported := getattr(self._module, name, None), str):
            return [imported]
        return texts
