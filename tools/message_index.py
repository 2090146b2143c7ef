"""Error messages with their fixes as a page of the site, read from where the source raises them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import errors
from tvmflow.core.errors import EXIT_CODES, EXIT_FAILED

_PACKAGE: Final = Path(__file__).resolve().parent.parent / "tvmflow"
_INTRODUCTION: Final = """\
# Messages

All error messages of tvmflow with their fixes, by exit code and in alphabetical order. `…` stands for names and numbers: search the page for a few words of your message. [Troubleshooting](troubleshooting.md) begins with the exit code.

A message about a recipe begins with file, line, column and field. Messages that a model, a framework or the operating system words are not listed.
"""
_UNKNOWN: Final = "…"
_FIELD_ERROR: Final = "field_error"
_RELEVANT: Final = re.compile(r"\bfix=|field_error\(|^class \w+\(\w*(Error|Problem|Failed)\b", re.M)
"""What a module has that raises errors, or that has a class of them."""
_MIN_LETTERS: Final = 5
"""A message with fewer letters of its own says nothing that could be searched for."""


_SAID: Final = "what the message says after `fix:`"


class Message(NamedTuple):
    """What is said, and what helps; the exit code of a run that ends with it."""

    text: str
    fix: str
    exit_code: int


def list_messages() -> list[Message]:
    """Return every message of the package that has a fix."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(_PACKAGE.rglob("*.py"))]
    trees = [ast.parse(source) for source in sources if _RELEVANT.search(source)]
    codes = _read_exit_codes(trees)
    messages = {message for tree in trees for message in _Reader(tree, codes).list_messages()}
    return sorted(messages, key=lambda m: (m.exit_code, _words(m.text).lower(), m))


def _words(text: str) -> str:
    return re.sub(r"^[^\w]+", "", text)


def _read_exit_codes(trees: list[ast.Module]) -> dict[str, int]:
    """Return the exit code of every class of errors."""
    codes = {"TvmflowError": EXIT_FAILED}
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    while True:
        known = len(codes)
        for node in classes:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            if node.name not in codes and (base := next(filter(codes.__contains__, bases), "")):
                codes[node.name] = next(_own_code(node), codes[base])
        if len(codes) == known:
            return codes


def _own_code(node: ast.ClassDef) -> Iterator[int]:
    for line in node.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_code":
            yield getattr(errors, ast.unparse(line.value))


class _Reader(ast.NodeVisitor):
    """The messages of one module; names stand for the text that they are given once."""

    def __init__(self, tree: ast.Module, codes: Mapping[str, int]) -> None:
        self._tree, self._codes = tree, codes
        self._scopes: list[dict[str, str]] = []
        self._messages: list[Message] = []

    def list_messages(self) -> list[Message]:
        """Return the messages."""
        self._enter(self._tree)
        return self._messages

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Read a function with the names that it assigns."""
        self._enter(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Keep what an error is made with."""
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        fixes = [keyword.value for keyword in node.keywords if keyword.arg == "fix"]
        if not node.args:
            return
        if name == _FIELD_ERROR:
            text, _, fix = self._text(node.args[0]).partition("; ")
            self._keep(text, fix, errors.EXIT_USAGE)
        elif fixes and name in self._codes:
            self._keep(self._text(node.args[0]), self._text(fixes[0]), self._codes[name])

    def _enter(self, node: ast.Module | ast.FunctionDef) -> None:
        values: dict[str, list[ast.expr]] = {}
        for line in ast.walk(node) if isinstance(node, ast.FunctionDef) else node.body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                values.setdefault(line.targets[0].id, []).append(line.value)
            elif (
                isinstance(line, ast.AnnAssign) and line.value and isinstance(line.target, ast.Name)
            ):
                values.setdefault(line.target.id, []).append(line.value)
        self._scopes.append({})
        for name, given in values.items():
            self._scopes[-1][name] = self._text(given[0]) if len(given) == 1 else _UNKNOWN
        self.generic_visit(node)
        self._scopes.pop()

    def _text(self, node: ast.expr) -> str:
        """Return the text of an expression, with `…` for what only a run knows."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        if isinstance(node, ast.IfExp):
            choices = [self._text(node.body), self._text(node.orelse)]
            return " / ".join(dict.fromkeys(filter(None, choices)))
        if isinstance(node, ast.Name):
            return next((s[node.id] for s in reversed(self._scopes) if node.id in s), _UNKNOWN)
        return _UNKNOWN

    def _keep(self, text: str, fix: str, exit_code: int) -> None:
        text, fix = (re.sub(r"…(?: ?…)+", _UNKNOWN, " ".join(t.split())) for t in (text, fix))
        if fix and sum(map(str.isalpha, text)) >= _MIN_LETTERS:
            known = fix if any(map(str.isalpha, fix)) else _SAID
            self._messages.append(Message(text, known, exit_code))


def messages_page() -> str:
    """Return the index of messages as Markdown."""
    parts, messages = [_INTRODUCTION], list_messages()
    for code in sorted({message.exit_code for message in messages}):
        rows = [
            f"| {_escape(message.text)} | {_escape(message.fix)} |"
            for message in messages
            if message.exit_code == code
        ]
        head = f"## Exit code {code}\n\n{EXIT_CODES[code].capitalize()}.\n\n| message | what to do |\n|---|---|"
        parts.append("\n".join([head, *rows]) + "\n")
    return "\n".join(parts)


def _escape(text: str) -> str:
    """Return text as Markdown shows it; what stands in backticks is code already."""
    outside = text.split("`")
    outside[::2] = [re.sub(r"([\\*_<\[\]])", r"\\\1", part) for part in outside[::2]]
    return "`".join(outside).replace("|", "\\|")
