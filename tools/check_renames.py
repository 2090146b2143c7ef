"""Finds functions in which a commit gave two variables one name: `python tools/check_renames.py main..HEAD`.

A rename that merges a loop variable with a value before the loop changes results, and no type checker sees it. Compared
are functions whose syntax trees are equal but for names; those that were changed otherwise are not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

Functions = list[ast.FunctionDef | ast.AsyncFunctionDef]


def find_merged(before: str, after: str) -> Iterator[str]:
    """Yield a line for each function of a module in which two names became one."""
    old, new = _functions(before), _functions(after)
    if len(old) != len(new):
        return
    for one, other in zip(old, new, strict=True):
        if _shape(one) != _shape(other):
            continue
        origins: dict[str, str] = {}
        for was, now, line in _names(one, other):
            if origins.setdefault(now, was) != was:
                yield f"{line}: {other.name}: {origins[now]} and {was} became {now}"
                break


def _functions(text: str) -> Functions:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def _shape(node: Any) -> Any:
    """Return a tree without the names and texts in it."""
    if isinstance(node, ast.AST):
        return type(node).__name__, *(_shape(value) for _, value in ast.iter_fields(node))
    if isinstance(node, list):
        return [_shape(value) for value in node]
    return None if isinstance(node, str) else node


def _names(one: Any, other: Any) -> Iterator[tuple[str, str, int]]:
    """Yield the names of two trees of equal shape side by side, with the line in the second."""
    if isinstance(one, ast.Name):
        yield one.id, other.id, other.lineno
    elif isinstance(one, ast.arg):
        yield one.arg, other.arg, other.lineno
    if isinstance(one, ast.AST):
        for (_, value), (_, renamed) in zip(
            ast.iter_fields(one), ast.iter_fields(other), strict=True
        ):
            yield from _names(value, renamed)
    elif isinstance(one, list):
        for value, renamed in zip(one, other, strict=True):
            yield from _names(value, renamed)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    """Print what is found in the commits of a range, and exit with 1 if there is something."""
    count = 0
    for commit in _git("log", "--format=%h", "--reverse", sys.argv[1]).split():
        changed = _git("diff", "--name-status", "-M", f"{commit}^", commit, "--", "*.py")
        for kind, *paths in (line.split("\t") for line in changed.splitlines()):
            if kind[0] not in "MR":
                continue
            before, after = (
                _git("show", f"{commit}^:{paths[0]}"),
                _git("show", f"{commit}:{paths[-1]}"),
            )
            for found in find_merged(before, after):
                count += 1
                print(f"{commit} {paths[-1]}:{found}")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
