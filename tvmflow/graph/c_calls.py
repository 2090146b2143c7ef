"""Kernels that call a C function: each carries the function's source as an annotation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.graph import ir

SOURCE: Final = "tvmflow_c_source"
"""The annotation of a kernel with the source of its functions."""


class KernelSource(NamedTuple):
    """A C file: its name, for messages, and its text."""

    file: str
    text: str


def mark_c_source(body: Any, source: KernelSource) -> Any:
    """Annotate a statement with the source of the functions that it calls by `call_extern`."""
    note = tvm.ir.StringImm(json.dumps(source))
    return tirx.AttrStmt(tvm.ir.StringImm("kernel"), SOURCE, note, body)


def find_c_source(function: tirx.PrimFunc) -> KernelSource | None:
    """Return the C source in a kernel's annotation; None if it has none."""
    statements = ir.find_nodes(function.body, tirx.AttrStmt)
    notes = [statement.value.value for statement in statements if statement.attr_key == SOURCE]
    return KernelSource(*json.loads(notes[0])) if notes else None


def list_c_kernels(mod: tvm.IRModule) -> list[tuple[tvm.ir.GlobalVar, KernelSource]]:
    """Return the kernels of a module that have C sources, with the sources."""
    sources = ((var, find_c_source(kernel)) for var, kernel in ir.kernels_of(mod).items())
    return [(var, source) for var, source in sources if source is not None]


Spec = tuple[Sequence[int], str]
"""Shape and dtype of a tensor."""


def c_kernel(
    source: KernelSource,
    function: str,
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    arguments: Sequence[float],
    tasks: int,
) -> tirx.PrimFunc:
    """Return a kernel that takes inputs, then outputs, and calls a function of a C source.

    The function takes a pointer for each input and each output, then the arguments: int64_t for integers, double for
    others. With several tasks, a parallel loop calls it, and the task's index (int64_t) precedes the arguments.
    """
    values = [
        tirx.const(value, "int64" if isinstance(value, int) else "float64") for value in arguments
    ]

    def body(tensors: Sequence[Any], results: Sequence[Any]) -> Any:
        pointers = [tensor.data for tensor in (*tensors, *results)]
        with IRBuilder() as builder:
            if tasks == 1:
                T.evaluate(tirx.call_extern("void", function, *pointers, *values))
            else:
                with T.parallel(0, tasks) as task:
                    number = tirx.Cast("int64", task)
                    T.evaluate(tirx.call_extern("void", function, *pointers, number, *values))
            return mark_c_source(builder.get(), source)

    tensors = [
        te.placeholder(tuple(shape), dtype, f"input{index}")
        for index, (shape, dtype) in enumerate(inputs)
    ]
    shapes, dtypes = zip(*outputs, strict=True)
    results = te.extern(
        [tuple(shape) for shape in shapes], tensors, body, dtype=list(dtypes), name=function
    )
    results = results if isinstance(results, list) else [results]
    return te.create_prim_func([*tensors, *results])
