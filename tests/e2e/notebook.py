"""Runs notebooks without Jupyter: `python -m tests.e2e.notebook FILE` runs one, and writes its outputs into it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_notebook(path: Path) -> list[str]:
    """Run the cells of a notebook in order, in the current folder, and return what each code cell prints.

    The value of a last line that is an expression is shown, as Jupyter does.
    """
    namespace: dict[str, Any] = {"__name__": "notebook"}
    return [_run_cell("".join(cell["source"]), namespace) for cell in code_cells(path)]


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _run_cell(source: str, namespace: dict[str, Any]) -> str:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            if value is not None:
                print(repr(value))
    return printed.getvalue()


def main(path: Path) -> None:
    """Write the outputs of a notebook into it."""
    notebook = json.loads(path.read_text())
    outputs = iter(run_notebook(path))
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            text = next(outputs).splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": text}
            cell |= {"execution_count": number, "outputs": [stream] if text else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
