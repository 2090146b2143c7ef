"""Kernels that call C functions (`graph.c_calls`): the C sources become part of the kernels' code.

Code generation compiles the C source for the target to LLVM IR, with clang from `ziglang`. LLVM then optimizes kernel
and function together. So every form of library can have such kernels.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.contraction.machine import is_cpu
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.graph.c_calls import SOURCE, KernelSource, list_c_kernels
from tvmflow.graph.ir import operator_name
from tvmflow.targets.linking import compile_c_to_llvm
from tvmflow.targets.tvm_target import cpu_triple

# TVM's own annotation for code that is linked into a kernel (src/target/llvm/codegen_llvm.cc).
_LLVM: Final = "pragma_import_llvm"
_C_KIND: Final = "c"
_LLVM_TYPES: Final = {
    "handle": "ptr",
    "int32": "i32",
    "int64": "i64",
    "float32": "float",
    "float64": "double",
}


def compile_c_sources(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return a module whose kernels carry LLVM IR in place of C.

    StageError if the compiler rejects the source, the source lacks the function, or the target does not support C.
    """
    kernels = list_c_kernels(mod)
    if not kernels:
        return mod
    compiled = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for var, source in kernels:
        if not is_cpu(target):
            is_text = target.kind.name == _C_KIND
            form = "the output c-source" if is_text else f"a target of the kind {target.kind.name}"
            raise StageError(
                f"{source.file} is an operator in C, which {form} cannot hold",
                fix="implement the operator with Relax, TE or TIR, or leave that output or target out",
            )
        functions = _compile(source, cpu_triple(target.export()))
        compiled.update_func(var, _with_llvm(mod[var], source, functions))
    return compiled


def _with_llvm(
    kernel: tirx.PrimFunc, source: KernelSource, functions: SourceFunctions
) -> tirx.PrimFunc:
    """Return a kernel that calls the functions in the LLVM IR; StageError if one is missing or mismatched."""
    # Raised after the traversal, because an exception that a callback raises through TVM's code loses its type.
    problems: list[StageError] = []

    def replace(statement: tirx.AttrStmt) -> tirx.AttrStmt:
        if statement.attr_key != SOURCE:
            return statement
        text = tvm.ir.StringImm(functions.text)
        return tirx.AttrStmt(statement.node, _LLVM, text, statement.body)

    def rename(call: Any) -> Any:
        if operator_name(call) != "tirx.call_extern":
            return call
        name, arguments = call.args[0].value, list(call.args[1:])
        if problem := _find_problem(source, functions, name, arguments):
            problems.append(problem)
            return call
        return tirx.call_extern("void", functions.names[name], *arguments)

    body = tvm_ffi.structural_map(kernel.body, (tirx.AttrStmt, replace))
    body = tvm_ffi.structural_map(body, (tvm.ir.Call, rename))
    if problems:
        raise problems[0]
    return kernel.with_body(body)


def _find_problem(
    source: KernelSource, functions: SourceFunctions, name: str, arguments: Sequence[Any]
) -> StageError | None:
    parameters = functions.parameters.get(name)
    if parameters is None:
        public = ", ".join(functions.names) or "none"
        return StageError(
            f"{source.file} has no function '{name}' (there is {public})",
            fix="define it in that file, without `static`",
        )
    dtypes = (str(getattr(argument.ty, "dtype", "handle")) for argument in arguments)
    types = tuple(_LLVM_TYPES.get(dtype, dtype) for dtype in dtypes)
    if types == parameters:
        return None
    return StageError(
        f"{source.file}: the function '{name}' takes ({', '.join(parameters)}), and the kernel calls it with ({', '.join(types)}), as LLVM names types",
        fix="its parameters are a pointer for each input, then each output, then the `arguments`: int64_t and double",
    )


@functools.lru_cache(maxsize=64)
def _compile(source: KernelSource, triple: str) -> SourceFunctions:
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = Path(scratch), Path(source.file).name
        (folder / name).write_text(source.text)
        text = compile_c_to_llvm(folder, name, triple)
    try:
        return read_functions(text, f"_{digest_of([source.text])[:16]}")
    except UnsupportedFunction as error:
        raise StageError(
            f"{source.file}: {error}, so that it cannot become part of a kernel",
            fix="write it with loops, and with direct calls",
        ) from None


# ---------------------------------------------------------------- llvm text
# TVM's code generator copies each function into the kernel that calls it, and the kernels of one object file may use
# different C files. So each name gets a suffix for its file. Functions that call themselves or whose address is taken
# cannot be copied, and are refused.

_DEFINITION: Final = re.compile(
    r"^define (?P<linkage>.*?)@(?P<name>[\w$.]+)\((?P<parameters>.*)\)", re.MULTILINE
)
_VARIABLE: Final = re.compile(
    r"^@(?P<name>[\w$.]+) = (?P<linkage>.*?)(?=global |constant )", re.MULTILINE
)
_SYMBOL: Final = re.compile(r"@([\w$.]+)")
_CALL: Final = re.compile(r"\bcall [^@]*@([\w$.]+)\(")
_ATTRIBUTES: Final = re.compile(r"^attributes #\d+ = .*$", re.MULTILINE)
# Attributes for CPU and features, which the kernel decides, and for debuggers.
_ATTRIBUTE_WITH_VALUE: Final = re.compile(r' "[\w.-]+"="[^"]*"')
_MODULE_METADATA: Final = re.compile(r"^!llvm\..*\n", re.MULTILINE)


class SourceFunctions(NamedTuple):
    """The functions of a C file as LLVM IR.

    Attributes:
        text: The IR, with a suffix for the file on the names of functions and variables.
        names: The C name of each function that other files can call -> its name in the IR.
        parameters: The C name of each such function -> the LLVM types of its parameters.
    """

    text: str
    names: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]


class UnsupportedFunction(ValueError):
    """A C function cannot become part of a kernel; the message says why."""


def read_functions(text: str, suffix: str) -> SourceFunctions:
    """Return the functions in a C file's unoptimized LLVM IR, with a suffix appended to all names.

    UnsupportedFunction if a function calls itself, or its address is taken.
    """
    functions = {match["name"]: match for match in _DEFINITION.finditer(text)}
    _check_calls(text, functions)
    public = {
        name: match
        for name, match in functions.items()
        if "internal" not in match["linkage"].split()
    }
    variables = {match["name"] for match in _VARIABLE.finditer(text)}
    own = {*functions, *variables}
    text = _MODULE_METADATA.sub("", text)
    text = _ATTRIBUTES.sub(lambda match: _ATTRIBUTE_WITH_VALUE.sub("", match[0]), text)
    text = _VARIABLE.sub(_make_internal, text)
    text = _SYMBOL.sub(lambda match: f"{match[0]}{suffix}" if match[1] in own else match[0], text)
    return SourceFunctions(
        text,
        {name: f"{name}{suffix}" for name in public},
        {name: tuple(_list_types(match["parameters"])) for name, match in public.items()},
    )


def _make_internal(match: re.Match[str]) -> str:
    """Return the beginning of a variable's definition with internal linkage."""
    words = match["linkage"].split()
    if "external" in words or "private" in words or "internal" in words:
        return match[0]
    kept = " ".join(word for word in words if word not in ("dso_local", "common", "hidden"))
    return f"@{match['name']} = internal {f'{kept} ' if kept else ''}"


def _list_types(parameters: str) -> Iterator[str]:
    """Yield the type of each parameter: the first word between top-level commas."""
    depth, start = 0, 0
    for index, character in enumerate(f"{parameters},"):
        depth += (character in "({[<") - (character in ")}]>")
        if character == "," and depth == 0:
            if piece := parameters[start:index].strip():
                yield piece.split()[0]
            start = index + 1


def _check_calls(text: str, functions: Mapping[str, re.Match[str]]) -> None:
    """Raise UnsupportedFunction if a function calls itself or its address is taken."""
    callees: dict[str, set[str]] = {name: set() for name in functions}
    caller = ""
    for line in text.splitlines():
        if match := _DEFINITION.match(line):
            caller = match["name"]
            continue
        if line == "}":
            caller = ""
        called = set(_CALL.findall(line)) & functions.keys()
        used = set(_SYMBOL.findall(line.partition("(")[2] if called else line)) & functions.keys()
        for name in sorted(used - called):
            raise UnsupportedFunction(f"the address of the function {name} is taken")
        if caller:
            callees[caller] |= called
    for name in functions:
        reached = set(callees[name])
        while found := set().union(*(callees[callee] for callee in reached)) - reached:
            reached |= found
        if name in reached:
            raise UnsupportedFunction(f"the function {name} calls itself")
