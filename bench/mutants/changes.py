"""Small changes of source files, one at a time: what a slip of the hand or a wrong formula would look like.

Changes are found in the syntax tree and made in the text: a changed file differs from its original in one place.
Annotations, docstrings, assertions, and what is raised are left alone: no number depends on them. So are kernels.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("objectives", "ops", "step", "data/encode", "methods")
"""Folders of `src/lowtide` whose files are changed."""
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
OTHER_NAMES = {"min": "max", "amin": "amax", "argmin": "argmax", "minimum": "maximum", "floor": "ceil"}
OTHER_NAMES |= {other: name for name, other in OTHER_NAMES.items()}
OTHER_NAMES |= {"mean": "sum", "nanmean": "nansum", "sum": "mean", "no_grad": "enable_grad", "any": "all", "all": "any"}
COMPILED = "@triton.jit"
"""In files of kernels, whose lines are compiled or interpreted by triton: which tests run them cannot be traced."""
DROPPED = {
    *("abs", "detach", "exp", "log", "sqrt", "square", "neg", "cumsum", "sort", "flip", "contiguous", "clone"),
    *("clamp", "clamp_", "nan_to_num", "masked_fill", "masked_fill_", "unique", "strip", "lower"),
}
"""Methods whose call may be missing."""
WITHOUT_EFFECT = {"strict", "frozen", "kw_only", "repr"}
"""Keywords that refuse or print, and change no number."""
UNORDERED = {"isinstance", "zip", "option"}
"""Functions whose swapped arguments are an error at once, or no change."""


@dataclass(frozen=True)
class Change:
    """One change of one file."""

    path: str
    """Of the file, from the root."""
    kind: str
    first: int
    """The first line of the statement that it is in."""
    last: int
    before: str
    """The changed lines as they are, without their indentation."""
    after: str
    start: int
    """Of what is replaced, in bytes from the beginning of the file."""
    end: int
    text: str
    """What stands there instead."""
    in_function: bool

    @property
    def key(self) -> str:
        """Says which change it is, whatever lines are added above it."""
        return f"{self.path}: {self.before} -> {self.after}"

    def made_in(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def changes_of(path: str, source: str) -> list[Change]:
    """All changes of a file; a few of them are no program any more (see `is_program`)."""
    if COMPILED in source:
        return []
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return list({each.key: each for each in finder.found}.values())


def sample(root: Path, count: int, seed: int) -> list[Change]:
    """So many changes, equally many of each package, at most one a line; the same for the same files and seed, and
    little changed when files change a little."""
    found: list[Change] = []
    for number, package in enumerate(PACKAGES):
        wanted = count // len(PACKAGES) + (number < count % len(PACKAGES))
        files = sorted((root / "src/lowtide" / package).rglob("*.py"))
        all_of = (each for file in files for each in changes_of(str(file.relative_to(root)), file.read_text()))
        found += _first_of(sorted(all_of, key=lambda change: _number(change, seed)), root, wanted)
    return sorted(found, key=lambda change: _number(change, seed))


def _first_of(changes: Iterable[Change], root: Path, count: int) -> list[Change]:
    by_line: dict[tuple[str, int], Change] = {}
    for change in changes:
        place = change.path, change.first
        if (
            len(by_line) < count
            and place not in by_line
            and is_program(change.made_in((root / change.path).read_bytes()))
        ):
            by_line[place] = change
    return list(by_line.values())


def is_program(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _number(change: Change, seed: int) -> str:
    return hashlib.sha256(f"{seed} {change.key}".encode()).hexdigest()


class _Finder(ast.NodeVisitor):
    """Goes through a file and notes what may be changed."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Change] = []
        self.statement: ast.stmt | None = None
        self.functions = 0

    # -- where changes are ---------------------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.keyword) and node.arg in WITHOUT_EFFECT:
            return
        if isinstance(node, ast.stmt):
            before, self.statement = self.statement, node
            self._of_statement(node)
            self.statement = before
        else:
            self._of_expression(node)
            self.generic_visit(node)

    def _of_statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Raise)):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            function = not isinstance(node, ast.ClassDef)
            for each in node.decorator_list:
                self.visit(each)
            if function:
                for default in [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]:
                    self.visit(default)
            self.functions += function
            for each in node.body:
                self.visit(each)
            self.functions -= function
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
            return
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant):
                return
            self._note("a dropped statement", node, "pass")
        if isinstance(node, ast.If) and not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            self._note("a negated condition", node.test, f"not ({self._text(node.test)})")
        if isinstance(node, ast.AugAssign):
            self._of_operator(node.op, node.target, node.value, "=")
        self.generic_visit(node)

    def _of_expression(self, node: ast.AST) -> None:
        match node:
            case ast.BinOp():
                self._of_operator(node.op, node.left, node.right)
                if type(node.op) in (ast.Add, ast.Sub, ast.Mult):
                    self._note("a dropped term", node, f"({self._text(node.left)})")
                if isinstance(node.op, ast.Div):
                    self._note("a denominator", node.right, f"({self._text(node.right)} + 1)")
            case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
                self._note("a sign", node, f"({self._text(node.operand)})")
            case ast.Compare(ops=[operator], comparators=[right]):
                self._of_operator(operator, node.left, right)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self._of_operator(node.op, left, right)
            case ast.IfExp():
                if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
                    self._note("a negated condition", node.test, f"not ({self._text(node.test)})")
            case ast.Constant(value=bool()):
                self._note("a constant", node, str(not node.value))
            case ast.Constant(value=int() | float()):
                self._note(
                    "a constant", node, repr(node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0)
                )
            case ast.Call():
                self._of_call(node)
            case ast.Name(id=name) if name in OTHER_NAMES and isinstance(node.ctx, ast.Load):
                self._note("another function", node, OTHER_NAMES[name])

    def _of_call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            name, receiver = node.func.attr, node.func.value
            if name in OTHER_NAMES:
                self._note("another function", node.func, f"{self._text(receiver)}.{OTHER_NAMES[name]}")
            if name in DROPPED and self._text(receiver) not in ("torch", "math", "F"):
                self._note("a dropped call", node, f"({self._text(receiver)})")
        for keyword in node.keywords:
            if keyword.arg in ("min", "max"):
                start = self._offset(keyword.lineno, keyword.col_offset)
                self._replace("another function", start, start + 3, OTHER_NAMES[keyword.arg])
        if self._text(node.func) in UNORDERED:
            return
        if len(node.args) >= 2 and not any(isinstance(each, (ast.Constant, ast.Starred)) for each in node.args[:2]):
            first, second = node.args[:2]
            between = self.source[self._end(first) : self._start(second)].decode()
            swapped = f"{self._text(second)}{between}{self._text(first)}"
            self._replace("swapped arguments", self._start(first), self._end(second), swapped)

    def _of_operator(self, operator: ast.AST, left: ast.AST, right: ast.AST, after: str = "") -> None:
        if type(operator) not in OPERATORS:
            return
        old, new = OPERATORS[type(operator)]
        begin, end = self._end(left), self._start(right)
        between = self.source[begin:end].decode()
        if between.count(old + after) == 1:
            self._replace("an operator", begin, end, between.replace(old + after, new + after))

    # -- how they are noted --------------------------------------------------------------------------------------------

    def _note(self, kind: str, node: ast.AST, text: str) -> None:
        self._replace(kind, self._start(node), self._end(node), text)

    def _replace(self, kind: str, start: int, end: int, text: str) -> None:
        statement = self.statement
        assert statement is not None, "all expressions are in a statement"
        body = getattr(statement, "body", None)
        header = isinstance(body, list) and body and isinstance(body[0], ast.stmt)
        last = body[0].lineno - 1 if header else statement.end_lineno or statement.lineno
        change = self.source[:start] + text.encode() + self.source[end:]
        begins, ends = self.source.rfind(b"\n", 0, start) + 1, self.source.find(b"\n", end)
        before, after = self.source[begins:ends], change[begins : ends + len(change) - len(self.source)]
        lines = (" ".join(each.decode().split()) for each in (before, after))
        in_function = self.functions > 0
        first = min(statement.lineno, self.source.count(b"\n", 0, start) + 1)
        self.found.append(Change(self.path, kind, first, last, *lines, start, end, text, in_function))

    def _text(self, node: ast.AST) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column
