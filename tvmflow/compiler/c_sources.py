"""Kernels in C: a kernel calls a function, whose source it carries; its code becomes part of the kernel's.

The source is an annotation of the kernel (`mark_c_source`) up to code generation, which compiles it
for the target by clang (from `ziglang`) to LLVM's IR. LLVM then optimizes kernel and function as one,
so that every form of library, and whatever else compiles kernels, has them as it has any other.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.cpu_model import is_cpu
from tvmflow.compiler.ir import find_nodes, operator_name
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.targets.linking import compile_c_to_llvm
from tvmflow.targets.llvm_text import SourceFunctions, UnsupportedFunction, read_functions
from tvmflow.targets.tvm_target import cpu_triple

_SOURCE: Final = "tvmflow_c_source"
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


class KernelSource(NamedTuple):
    """A file of C: its name, for messages, and its text."""

    file: str
    text: str


def mark_c_source(body: Any, source: KernelSource) -> Any:
    """Return a statement with the source of the functions that it calls by `call_extern`."""
    note = tvm.ir.StringImm(json.dumps(source))
    return tirx.AttrStmt(tvm.ir.StringImm("kernel"), _SOURCE, note, body)


def find_c_source(function: tirx.PrimFunc) -> KernelSource | None:
    """Return the source that a kernel carries, or None."""
    statements = find_nodes(function.body, tirx.AttrStmt)
    notes = [statement.value.value for statement in statements if statement.attr_key == _SOURCE]
    return KernelSource(*json.loads(notes[0])) if notes else None


def list_c_kernels(mod: tvm.IRModule) -> list[tuple[tvm.ir.GlobalVar, KernelSource]]:
    """Return the kernels of a module that carry C, with their sources."""
    sources = (
        (var, find_c_source(function))
        for var, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc)
    )
    return [(var, source) for var, source in sources if source is not None]


def compile_c_sources(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return a module whose kernels carry LLVM's IR in place of C.

    Args:
        mod: A module, in which hardly any kernel carries C.
        target: The target.

    Raises:
        StageError: the compiler rejects the source, it lacks the function, or the target has no use for C.
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
    """Return a kernel that calls its functions in LLVM's IR.

    Raises:
        StageError: the source lacks a function, or that takes other parameters.
    """
    # An error in a callback would cross TVM's code, and lose its type.
    problems: list[StageError] = []

    def replace(statement: tirx.AttrStmt) -> tirx.AttrStmt:
        if statement.attr_key != _SOURCE:
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
    """Return what is wrong with a call of a function of the source, or None."""
    parameters = functions.parameters.get(name)
    if parameters is None:
        public = ", ".join(functions.names) or "none"
        return StageError(
            f"{source.file} has no function '{name}' (there is {public})",
            fix="define it in that file, without `static`",
        )
    types = tuple(_llvm_type(argument) for argument in arguments)
    if types == parameters:
        return None
    return StageError(
        f"{source.file}: the function '{name}' takes ({', '.join(parameters)}), and the kernel calls it with ({', '.join(types)}), as LLVM names types",
        fix="its parameters are a pointer for each input, then each output, then the `arguments`: int64_t and double",
    )


def _llvm_type(argument: Any) -> str:
    dtype = getattr(argument.ty, "dtype", "handle")
    return _LLVM_TYPES.get(str(dtype), str(dtype))


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
