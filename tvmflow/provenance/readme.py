"""The README beside delivered files: what each is for, how to use and how to check them.

It describes inputs and outputs, too.

It says nothing that differs whenever something is measured, so that the same lock file gives the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from tvmflow.core.generated_text import (
    markdown_block,
    markdown_code,
    markdown_text,
    python_string,
    shell_word,
)
from tvmflow.core.types import STATEMENT_SUFFIX, Dimension, Json
from tvmflow.provenance.delivered import BOM_SUFFIX, MEASUREMENTS_SUFFIX
from tvmflow.provenance.lineage import Lineage

_PURPOSES: Final = (
    ("*.lean.tvmflow", "the model without its weights, for Python: `tvmflow.load(FILE, params=…)`"),
    ("*.tvmflow", "the model for Python with tvmflow: `tvmflow.load`"),
    ("*.whl", "the model as a Python package: `pip install`"),
    ("*-cpp", "the model for C++17: a CMake project with a README of its own"),
    ("*-c-library-weights", "the model as a C library, with its weights in a file of their own"),
    ("*-c-library", "the model as a C library: a header, a static and a shared library"),
    ("*-c.tar.gz", "the model in C, to be compiled for its target"),
    ("*.tar.gz", "all other forms of the model in one archive"),
    ("*.tar", "object files, which TVM links when it loads them"),
    ("*-system.*", "a static library for programs with TVM's runtime, and its header"),
    ("*.lean.*", "a library without its weights, for TVM's runtime"),
    ("*.safetensors", "the weights of the library without weights"),
    ("*.params", "the same weights as TVM reads them"),
    ("lib*.a", "object code for your own linker, into a shared library for TVM's runtime"),
    ("*.lib", "object code for your own linker, into a shared library for TVM's runtime"),
    ("*roofline.svg", "the speed of each kernel against what the machine can do, as a picture"),
    ("verify.json", "what the library was compared with, and the verdict"),
    (f"*{STATEMENT_SUFFIX}", "a statement of what these files were made from, which may be signed"),
    (f"*{BOM_SUFFIX}", "a bill of materials in CycloneDX"),
    ("*.so", "a library for TVM's runtime"),
    ("*.dylib", "a library for TVM's runtime"),
    ("*.dll", "a library for TVM's runtime"),
    ("*.wasm", "a library for TVM's runtime"),
)
"""What files of a name are for: of several patterns, the first counts."""

# With more inputs than this, an example makes them in a loop.
_FEW_INPUTS: Final = 3


def make_readme(lineage: Lineage, sidecars: Iterable[str]) -> bytes:
    """Return the README of a delivered target.

    Args:
        lineage: The reproducible files, and the stages behind them.
        sidecars: The names of the other files beside them.

    Raises:
        DamagedBlob: A result is not what it should be.
    """
    names = sorted({name.partition("/")[0] for name, _ in lineage.files} | set(sidecars))
    signature = lineage.signature()
    sections = [
        f"# {lineage.recipe} for {lineage.target}",
        _describe(lineage),
        _describe_tensors(signature),
        _describe_dimensions(signature),
        _describe_files(names, lineage.recipe),
        *_list_examples(names, lineage, signature),
        _describe_check(),
    ]
    return ("\n\n".join(filter(None, sections)) + "\n").encode()


def describe_purpose(name: str) -> str:
    """Return what a delivered file, or folder, of this name is for; empty for an unknown one."""
    return next((text for pattern, text in _PURPOSES if fnmatchcase(name, pattern)), "")


def _describe(lineage: Lineage) -> str:
    number = lineage.exports[0].settings.get("version") if lineage.exports else None
    version = f" {number}" if number else ""
    verdict, _ = lineage.verdict()
    reference = (verdict or {}).get("reference", "")
    text = f"The model {markdown_code(lineage.recipe)}{version}, compiled by tvmflow"
    checked = (
        f", and verified against {markdown_text(reference)}" if reference else ", and not verified"
    )
    license_name = lineage.license()
    terms = f" Its license: {markdown_text(license_name)}." if license_name else ""
    return f"{text}{checked}.{terms}"


def _describe_tensors(signature: Mapping[str, Json]) -> str:
    rows = [
        f"| {kind} | {markdown_code(tensor['name'])} | {_shape(tensor)} | {tensor['dtype']} |"
        for kind, field in (("input", "inputs"), ("output", "outputs"))
        for tensor in signature[field]
    ]
    return "\n".join(["| | name | shape | type |", "|---|---|---|---|", *rows]) if rows else ""


def _describe_files(names: Sequence[str], recipe: str) -> str:
    rows = [f"| {markdown_code(name)} | {describe_purpose(name)} |" for name in names]
    measured = f"`measurements.json` and `{recipe}{MEASUREMENTS_SUFFIX}`"
    return "\n".join(
        [
            "## Files",
            "",
            "| file | purpose |",
            "|---|---|",
            *rows,
            "",
            f"{measured}, where they are beside these: latencies, errors and what measured them. "
            "They differ from run to run; all other files are the same whenever they are built.",
        ]
    )


def _describe_check() -> str:
    return (
        "## Check\n\n"
        "`tvmflow verify .` in this folder compares every file with its statement; "
        "`--trusted KEY.pub` asks for a signature as well. `tvmflow inspect FILE` shows what a file "
        "was made from."
    )


# ---------------------------------------------------------------- examples


def _list_examples(
    names: Sequence[str], lineage: Lineage, signature: Mapping[str, Json]
) -> Iterator[str]:
    recipe = lineage.recipe
    if f"{recipe}.tvmflow" in names:
        code = [
            "import numpy as np, tvmflow",
            "",
            f'model = tvmflow.load("{recipe}.tvmflow")',
            f"outputs = model.run({_feed(signature)})",
        ]
        yield _example("Python", "python", code)
    for name in names:
        if name.endswith(".whl"):
            module = name.partition("-")[0]
            yield _example("As a Python package", "sh", [f"pip install {shell_word(name)}"])
            code = ["import numpy as np", f"import {module}", ""]
            code += [f"model = {module}.load()", f"outputs = model.run({_feed(signature)})"]
            yield markdown_block("python", code)
    if f"{recipe}-cpp" in names:
        code = [
            f"add_subdirectory({recipe}-cpp)",
            f"target_link_libraries(program PRIVATE {recipe}::{recipe})",
        ]
        text = f"`{recipe}-cpp/README.md` has a program.\n"
        yield _example("C++", "cmake", code, text)
    headers = [name for name, _ in lineage.files if fnmatchcase(name, "*-c-library/*.h")]
    for header in headers:
        folder = header.partition("/")[0]
        library = next((n for n, _ in lineage.files if fnmatchcase(n, f"{folder}/*.a")), "")
        if library:
            code = [f"cc -I{folder} program.c {library} -lpthread -lm -o program"]
            yield _example("C", "sh", code, f"`{header}` says how the model is called.\n")


def _example(title: str, language: str, code: Sequence[str], text: str = "") -> str:
    lines = [f"## {title}", "", *([text] if text else []), markdown_block(language, code)]
    return "\n".join(lines)


def _feed(signature: Mapping[str, Json]) -> str:
    """Return an expression for inputs of zeros, the smallest where sizes are open."""
    inputs, dimensions = signature["inputs"], signature.get("dimensions", ())
    if len(inputs) > _FEW_INPUTS and not dimensions:
        return "{tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in model.inputs}"
    least = {entry["name"]: entry["min"] for entry in dimensions}
    entries = (
        f"{python_string(tensor['name'])}: np.zeros({tuple(_extents(tensor, least))}, {tensor['dtype']!r})"
        for tensor in inputs
    )
    return f"{{{', '.join(entries)}}}"


def _extents(tensor: Mapping[str, Json], least: Mapping[str, int]) -> list[int]:
    """Return the extents of a tensor; one for each that is known only when the model runs."""
    sizes = (least.get(size, size) for size in tensor.get("sizes") or tensor["shape"])
    return [size if isinstance(size, int) else 1 for size in sizes]


def _describe_dimensions(signature: Mapping[str, Json]) -> str:
    """Return the sizes that each call chooses; empty for a model of fixed sizes."""
    lines = [
        f"- {markdown_code(entry.name)}: {entry.range_text}"
        for entry in Dimension.list_of(signature)
    ]
    return "\n".join(["Each call chooses the sizes:", "", *lines]) if lines else ""


def _shape(tensor: Mapping[str, Json]) -> str:
    extents = [markdown_text(str(extent)) for extent in tensor.get("sizes") or tensor["shape"]]
    if (axis := tensor.get("bounded_axis")) is not None:
        extents[axis] = f"at most {extents[axis]}"
    return " × ".join(extents) or "a single value"
