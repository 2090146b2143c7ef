"""Copies an archive for PyTorch: one graph that holds no code, and tensors.

`torch.export.load` trusts its file. It evaluates formulas of sizes as Python, calls what an operator
names, runs the code of guards, unpickles constants, imports modules that a container names, and loads compiled libraries
(read in PyTorch 2.13: `_export/serde/serialize.py`, `export/pt2_archive/_package.py`, `export/_unlift.py`,
`utils/_pytree.py`). What an archive of a stranger must not do is refused here by what a graph may hold. PyTorch gets a
copy with nothing else in it, so that it cannot find other files than were checked.
"""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tvmflow.core.formatting import quoted
from tvmflow.frontends.base import NotAModel

# ---------------------------------------------------------------- what a graph may hold

# Names of values become names of variables in code that PyTorch generates.
_VALUE: Final = re.compile(r"\w*")
# Names of weights, modules and classes: nothing that ends a string or a line.
_NAME: Final = re.compile(r"[\w.@:/+<> -]*")
_OPERATOR: Final = re.compile(
    r"torch\.ops\.(aten|prims|torchvision|quantized_decomposed|onnx|onnx_symbolic)\._?[a-zA-Z0-9]\w*\.[a-zA-Z]\w*"
    r"|torch\.ops\.aten\.__i?(and|or|xor|lshift|rshift)__\.[a-zA-Z]\w*"
    r"|torch\.ops\.higher_order\.(cond|map|map_impl|scan|while_loop|associative_scan|invoke_subgraph"
    r"|wrap_with_set_grad_enabled|wrap_with_autocast|auto_functionalized|auto_functionalized_v2)"
    r"|torch\._?sym_\w+|torch\._C\._set_grad_enabled"
    r"|math\.[a-z]\w*"
    r"|_operator\.(abs|add|and_|eq|floordiv|ge|getitem|gt|invert|le|lshift|lt|mod|mul|ne|neg|not_|or_|pos|pow"
    r"|rshift|sub|truediv|xor)"
)
# It maps a file, and makes it where there is none.
_REFUSED_OPERATOR: Final = "torch.ops.aten.from_file."
# A formula of sizes, as sympy writes it: nothing but these functions is called, and nothing has attributes.
_FORMULA_PART: Final = re.compile(
    r"'[\w.+-]*'|[A-Za-z]\w*|\d+(?:\.\d*)?(?:e[+-]?\d+)?|!=|[-+*/%<>=~&|,() ]"
)
_CALLEE: Final = re.compile(r"(\w+|\)) *\(")
_FUNCTIONS: Final = frozenset(
    "Abs Add And CeilDiv CeilToInt CleanDiv Eq Equality Float FloatPow FloatTrueDiv FloorDiv FloorToInt Ge "
    "GreaterThan Gt Identity IntTrueDiv Integer IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod "
    "ModularIndexing Mul Ne Not Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt "
    "StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where Xor ceiling floor "
    "sqrt".split()
)


def check_graph(document: Mapping[str, Any]) -> None:
    """Check that nothing in a graph is code to PyTorch.

    Raises:
        NotAModel: when something is, or may be.
    """
    for key, text in _texts("", document):
        _RULES.get(key, _check_name)(text)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Give each string of a document with the name of its field, and the names of fields as names."""
    pending = [(key, value)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            # names of modules and places in the code of the model, as text
            fields = {} if key == "metadata" else value
            yield from (("", str(name)) for name in fields)
            pending += fields.items()
        elif isinstance(value, list):
            pending += ((key, entry) for entry in value)
        elif isinstance(value, str):
            yield key, value


def _check_name(text: str) -> None:
    if not _NAME.fullmatch(text):
        raise NotAModel(f"its graph has the name {quoted(text)}, which PyTorch does not make")


def _check_value(text: str) -> None:
    if not _VALUE.fullmatch(text):
        raise NotAModel(f"its graph has a value with the name {quoted(text)}")


def _check_operator(text: str) -> None:
    if not _OPERATOR.fullmatch(text) or text.startswith(_REFUSED_OPERATOR):
        raise NotAModel(
            f"its graph calls {quoted(text)}, which is no operator that tvmflow lets PyTorch run"
        )


def _check_formula(text: str) -> None:
    if _FORMULA_PART.sub("", text) or not _FUNCTIONS.issuperset(_CALLEE.findall(text)):
        raise NotAModel(f"its graph has the size {quoted(text)}, which is no formula")


def _check_structure(text: str) -> None:
    """Check how inputs or outputs are nested: PyTorch imports what an enumeration and a `defaultdict` name."""
    pending = [json.loads(text)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            module = value.get("default_factory_module", "builtins")
            if "__enum__" in value or module not in ("builtins", "collections"):
                raise NotAModel("its inputs or outputs name a class that PyTorch would import")
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            # the keys of a dictionary are JSON in a string
            with contextlib.suppress(ValueError):
                pending.append(json.loads(value))


def _accept(text: str) -> None:
    """Accept text that PyTorch only compares, or passes to an operator."""


_RULES: Final[Mapping[str, Callable[[str], None]]] = {
    "as_name": _check_value,
    "name": _check_value,
    "as_operator": _check_operator,
    "target": _check_operator,
    "expr_str": _check_formula,
    "in_spec": _check_structure,
    "out_spec": _check_structure,
    "as_string": _accept,
    "as_strings": _accept,
    "torch_version": _accept,
    # left out of the copy
    "guards_code": _accept,
}

# ---------------------------------------------------------------- what an archive may hold

# Files beside the graph of a name, by their paths below the folder that PyTorch puts all of them into: tensors,
# and what they are called. Constants of other names are objects.
_FILES: Final = (
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|\.format_version"
    r"|\.storage_alignment|data/weights/[\w.-]+|data/constants/(tensor_\w+|{name}_constants_config\.json|{name}\.pt)"
    r"|data/sample_inputs/{name}\.pt|serialized_(state_dict|constants|example_inputs)\.(pt|json)"
)
_BLOCK_BYTES: Final = 1 << 20


def copy_archive(path: Path, graph: str, document: Mapping[str, Any], copy: Path) -> None:
    """Write a copy of an archive that PyTorch may load.

    Args:
        path: The archive.
        graph: The name of its graph.
        document: That graph, which was checked.
        copy: The copy.
    """
    inside = PurePosixPath(graph)
    folder = inside.parents[1] if inside.parent.name == "models" else inside.parent
    files = re.compile(_FILES.format(name=re.escape(inside.stem)))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as output:
        for entry in archive.infolist():
            name = PurePosixPath(entry.filename)
            if entry.filename == graph:
                output.writestr(graph, json.dumps({**document, "guards_code": []}))
            elif name.is_relative_to(folder) and files.fullmatch(str(name.relative_to(folder))):
                with archive.open(entry) as source, output.open(entry.filename, "w") as target:
                    while block := source.read(_BLOCK_BYTES):
                        target.write(block)
