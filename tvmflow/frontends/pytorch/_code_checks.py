"""Keeps code in archives from being run: what PyTorch evaluates, executes or unpickles while it loads one.

PyTorch evaluates formulas of sizes, writes names into Python code that it executes, imports the modules
that containers name, executes guards, unpickles objects and loads compiled models. `check_graph` accepts
formulas, names and operators of the forms that `torch.export` writes, and `copy_archive` gives PyTorch an
archive that holds the graph that was checked, tensors, and nothing else.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import quoted

DAMAGE: Final = (
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""What zipfile and json raise at damaged files."""

_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Names of parameters are those of modules, which may have any characters between dots.
_PATH: Final = re.compile(r"[^\x00-\x1f\x7f\"'\\]*")
_OPERATOR: Final = re.compile(
    r"torch\.ops(\.\w+)+|torch\.(_?sym_\w+|_check\w*)|(_operator|math)\.\w+", re.ASCII
)
# It opens the file that its argument names, and writes to it.
_FILE_OPERATOR: Final = "torch.ops.aten.from_file"
_FUNCTIONS: Final = frozenset(
    "abs ceiling cos cosh exp floor log log2 sin sinh sqrt tan tanh".split()
)
_FORMULA: Final = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Load, ast.Tuple),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Constant, ast.Name, ast.keyword),
)
_MAX_FORMULA: Final = 10_000
_FACTORY_MODULES: Final = ("builtins", "collections")
# What PyTorch reads beside the graph, in both forms of archives: tensors, their lists, and versions.
_COPIED: Final = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/\w+"
    r"|data/weights/[^/]+|data/constants/(tensor_\w+|[^/]+_constants_config\.json|[^/]+\.pt)"
    r"|data/sample_inputs/[^/]+\.pt|serialized_(state_dict|constants|example_inputs)\.(pt|json)"
)
_PICKLED: Final = re.compile(r"(^|/)data/constants/(custom|opaque)_obj", re.IGNORECASE)


class RunsCode(ValueError):
    """An archive holds what PyTorch would run: the message says where."""


def check_members(names: list[str]) -> None:
    """Check that an archive holds no pickled objects.

    Raises:
        RunsCode: otherwise.
    """
    if pickled := next(filter(_PICKLED.search, names), None):
        raise RunsCode(f"it holds a pickled object, {quoted(pickled)}, which would run code")


def check_graph(document: Mapping[str, Any]) -> None:
    """Check that formulas, names, operators and containers of a graph are what `torch.export` writes.

    Raises:
        RunsCode: for any that could be code.
        AttributeError, LookupError, TypeError, ValueError, RecursionError: for a document of another form.
    """
    module = document["graph_module"]
    for name in document.get("range_constraints") or {}:
        _check_name(name)
    for call in module["module_call_graph"]:
        for kind in ("in_spec", "out_spec"):
            if call["signature"]:
                _check_containers(json.loads(call["signature"][kind]))
    for key, value in _entries({**module, "module_call_graph": []}):
        _check_entry(key, value)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key in a document with its value; metadata of nodes is only shown."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            shown = [(key, entry) for key, entry in value.items() if key != "metadata"]
            yield from shown
            values += [entry for _, entry in shown]
        elif isinstance(value, list):
            values += value


def _check_entry(key: str, value: Any) -> None:
    if key == "expr_str":
        _check_formula(str(value))
    elif key in ("target", "as_operator") and value:
        _check_operator(str(value))
    elif key in ("name", "as_name") and value:
        _check_name(str(value))
    elif key.endswith("_values") and isinstance(value, dict):
        for name in value:
            _check_name(name)
    elif key.endswith("_name") and not _PATH.fullmatch(str(value)):
        raise RunsCode(f"{quoted(str(value))} is no name of a parameter")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RunsCode(f"{quoted(name)} is no name of a value in a graph of torch.export")


def _check_operator(name: str) -> None:
    if not _OPERATOR.fullmatch(name) or name.startswith(_FILE_OPERATOR):
        raise RunsCode(f"{quoted(name)} is no operator that can be imported")


def _check_formula(text: str) -> None:
    """Check that a formula has numbers, symbols and functions alone: PyTorch evaluates it as Python."""
    problem = RunsCode(f"{quoted(text)} is no formula of a size")
    if len(text) > _MAX_FORMULA:
        raise problem
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError):
        raise problem from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            is_safe = name[:1].isupper() or name in _FUNCTIONS
        elif isinstance(node, ast.Name):
            is_safe = not node.id.startswith("__")
        elif isinstance(node, ast.Constant):
            # `Symbol('s0')`, `Integer('3')`
            is_safe = not isinstance(node.value, bytes | str) or (
                isinstance(node.value, str) and re.fullmatch(r"-?\w+", node.value) is not None
            )
        else:
            is_safe = isinstance(node, _FORMULA)
        if not is_safe:
            raise problem


def _check_containers(spec: Any) -> None:
    """Check that the types of containers import no modules, and no members of enumerations."""
    for key, value in _entries([spec]):
        if key == "__enum__":
            raise RunsCode("a key of a dictionary is a member of an enumeration, which is imported")
        if key == "default_factory_module" and value not in _FACTORY_MODULES:
            raise RunsCode(f"a dictionary takes its values from the module {quoted(str(value))}")
        if key == "context" and isinstance(value, str) and value[:1] in ("{", "["):
            _check_containers(json.loads(value))


def copy_archive(path: Path, graph: str, folder: Path) -> Path:
    """Copy what PyTorch is to load of an archive, under a name that it accepts; return the path of the copy.

    Readers of zip files differ in which of several entries of one name they take, and PyTorch loads
    all models, compiled ones too: the copy has each entry once.

    Args:
        path: An archive that was checked.
        graph: The name of its graph in it.
        folder: Where the copy goes.

    Raises:
        ImportFailed: when an entry is damaged.
    """
    copy = folder / "model.pt2"
    try:
        _copy(path, graph, copy)
    except (zipfile.BadZipFile, *DAMAGE) as error:
        text = f"the PyTorch archive cannot be imported: it is damaged ({error})"
        raise ImportFailed(text, fix="save it again, or fetch it again") from error
    return copy


def _copy(path: Path, graph: str, copy: Path) -> None:
    root = graph.rpartition("models/")[0] if "models/" in graph else graph.rpartition("/")[0]
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as copied:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for name, entry in entries.items():
            inner = name.removeprefix(root)
            if name.startswith(root) and _COPIED.fullmatch(inner):
                with archive.open(entry) as source, copied.open(name, "w", force_zip64=True) as out:
                    shutil.copyfileobj(source, out)
        document = json.loads(archive.read(entries[graph]))
        check_graph(document)
        # Python code that compares the sizes of inputs, which are checked here anyway
        copied.writestr(graph, json.dumps({**document, "guards_code": []}))
