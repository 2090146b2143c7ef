"""The kernel of an operator in C: it calls a function with pointers to its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.c_sources import KernelSource, mark_c_source

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
    """Return a kernel that takes inputs, then outputs, and calls a function of a source.

    The function takes a pointer for each input and each output, then, with several tasks, the number of the task as
    int64_t, then the arguments: integers are int64_t in C, others double. The tasks are a parallel loop of calls.
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
