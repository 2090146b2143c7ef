"""Every regular expression reads text that somebody else may have written: none takes a quadratic time."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import tvmflow
from tests.support.syntax_trees import parse_files

_SIZE = 100_000
# All of them take two seconds on a quiet machine, a quadratic one more than ten alone.
_CPU_SECONDS = 10
# The slowest one first: of those that are used, it is tried.
_METHODS = ("sub", "findall", "finditer", "split", "search", "fullmatch", "match")
_CHILD = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_SECONDS}, {_CPU_SECONDS}))
count = 0
for place, text, flags, method, units in json.load(sys.stdin):
    print(place, flush=True)
    pattern = re.compile(text, flags)
    for unit in units:
        hostile = unit * ({_SIZE} // len(unit))
        call = getattr(pattern, method)
        found = call("", hostile) if method == "sub" else call(hostile)
        if method == "finditer":
            all(True for _ in found)
    count += 1
print(count)
"""


def _flags(call: ast.Call) -> int:
    names = [node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)]
    values = [getattr(re, name, 0) for name in names if name.isupper()]
    return sum({int(value) for value in values if isinstance(value, re.RegexFlag)})


def _list_patterns() -> list[tuple[str, str, int, str, list[str]]]:
    """Return place, text, flags, slowest method and hostile texts of each expression in the package."""
    found = []
    root = Path(tvmflow.__file__).parent
    calls = [f"re.{method}(" for method in ("compile", *_METHODS)]
    for path, tree in parse_files(root.rglob("*.py"), *calls).items():
        source = path.read_text()
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="re"), attr=method),
                    args=[ast.Constant(value=str() as text), *_],
                ) if method == "compile" or method in _METHODS:
                    methods = [method]
                    if method == "compile":
                        name = _name_of(tree, node)
                        methods = [used for used in _METHODS if f"{name}.{used}(" in source]
                    literals = {char for char in text if not char.isalnum()}
                    units = ["a", "0", " ", "a ", "a.", "\n", "\u00e9", *sorted(literals)]
                    place = f"{path.relative_to(root)}:{node.lineno}"
                    used = methods[0] if methods else "fullmatch"
                    found.append((place, text, _flags(node), used, units))
    return found


def _name_of(tree: ast.AST, call: ast.Call) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is call:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            return getattr(target, "id", "")
    return "?"


def test_no_pattern_takes_a_quadratic_time() -> None:
    """100,000 characters that it likes or dislikes, under a limit of CPU time."""
    patterns = _list_patterns()
    assert len(patterns) > 100
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHILD],
        input=json.dumps(patterns),
        capture_output=True,
        text=True,
    )
    *_, last = done.stdout.split()
    assert last == str(len(patterns)), f"{last} takes too long: {done.stderr}"
