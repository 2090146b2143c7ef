"""Kernels in C: a kernel calls a function, whose source it carries; its code becomes part of the kernel's.

The source is an annotation of the kernel (`mark_c_source`) up to code generation, which compiles it
for the target by clang (from `ziglang`) to LLVM's IR. LLVM then optimizes kernel and function as one,
so that every form of library, and whatever else compiles kernels, has them as it has any other.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.targets.linking import compile_c_to_llvm
from tvmflow.targets.llvm_text import SourceFunctions, UnsupportedFunction, read_functions
from tvmflow.targets.tvm_target import cpu_triple

_SOURCE: Final = "tvmflow_c_source"
# TVM's own annotation for code that is linked into a kernel (src/target/llvm/codegen_llvm.cc).
_LLVM: Final = "pragma_import_llvm"
_CPU_KIND: Final = "llvm"
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


def compile_c_sources(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Return a module whose kernels carry LLVM's IR in place of C.

    Args:
        mod: A module, in which hardly any kernel carries C.
        target: The target.

    Raises:
        StageError: the compiler rejects the source, it lacks the function, or the target has no use for C.
    """
    changed = {}
    for var, function in mod.functions_items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        compiler = _KernelCompiler(target)
        body = tvm_ffi.structural_map(function.body, (tirx.AttrStmt, compiler.compile))
        if compiler.functions is not None:
            body = tvm_ffi.structural_map(body, (tvm.ir.Call, compiler.rename))
            changed[var] = function.with_body(body)
    if changed:
        mod = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
        for var, function in changed.items():
            mod.update_func(var, function)
    return mod


class _KernelCompiler:
    """Compiles the source of one kernel; `functions` are those of its source, or None."""

    def __init__(self, target: tvm.target.Target) -> None:
        self._target = target
        self._file = ""
        self.functions: SourceFunctions | None = None

    def compile(self, statement: tirx.AttrStmt) -> tirx.AttrStmt:
        """Return the annotation with LLVM's IR in place of C."""
        if statement.attr_key != _SOURCE:
            return statement
        source = KernelSource(*json.loads(statement.value.value))
        if self._target.kind.name != _CPU_KIND:
            form = (
                "the output c-source"
                if self._target.kind.name == "c"
                else f"a target of the kind {self._target.kind.name}"
            )
            raise StageError(
                f"{source.file} is an operator in C, which {form} cannot hold",
                fix="implement the operator with TE, TIR or operators of Relax, or leave that output or target out",
            )
        self._file = source.file
        self.functions = _compile(source, cpu_triple(self._target.export()))
        text = tvm.ir.StringImm(self.functions.text)
        return tirx.AttrStmt(statement.node, _LLVM, text, statement.body)

    def rename(self, call: Any) -> Any:
        """Return a call of a function in the source by its name in LLVM's IR."""
        assert self.functions is not None
        if getattr(call.op, "name", "") != "tirx.call_extern":
            return call
        name, arguments = call.args[0].value, list(call.args[1:])
        parameters = self.functions.parameters.get(name)
        if parameters is None:
            public = ", ".join(self.functions.names) or "none"
            raise StageError(
                f"{self._file} has no function '{name}' (there is {public})",
                fix="define it in that file, without `static`",
            )
        types = tuple(_llvm_type(argument) for argument in arguments)
        if types != parameters:
            raise StageError(
                f"{self._file}: the function '{name}' takes ({', '.join(parameters)}), and the kernel calls it with ({', '.join(types)}), as LLVM names types",
                fix="its parameters are a pointer for each input, then each output, then the `arguments`: int64_t and double",
            )
        return tirx.call_extern("void", self.functions.names[name], *arguments)


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
