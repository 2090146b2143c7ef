"""Workload keys: the same kernel has one key anywhere, another kernel another one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tvm
import tvm_ffi

from tests.support.tuning import conv, dense, lowered, model, relu, reshape, softmax, workloads
from tvmflow.tuning.workloads import normalised, workload_key

IMAGE = (1, 4, 8, 8)


def key(*layers: Callable[[Any, Any], Any], shape: tuple[int, ...] = IMAGE) -> str:
    """The key of the heaviest kernel of a model."""
    return workloads(model(*layers, shape=shape))[0].key


def kernel(script: str) -> tvm.tirx.PrimFunc:
    return tvm.script.from_source("@T.prim_func(s_tir=True)\n" + script.strip())


SCALE = """
def {name}({a}: T.Buffer((8,), "float32"), {b}: T.Buffer((8,), "float32")):
    for {i} in range(8):
        with T.sblock("{block}"):
            {v} = T.axis.spatial(8, {i})
            {b}[{v}] = {a}[{v}] * T.float32({constant}) + {a}[{v}]
"""


def scale(constant: float = 2.0, **names: str) -> tvm.tirx.PrimFunc:
    plain = {"name": "scale", "a": "a", "b": "b", "i": "i", "v": "v", "block": "scale"}
    return kernel(SCALE.format(**{**plain, **names}, constant=constant))


def test_two_layers_of_one_shape_are_one_workload() -> None:
    """Their calls add up, whatever the layers and their tensors are called."""
    found = workloads(model(conv(4), relu, conv(4), relu, conv(4), relu, shape=IMAGE))
    assert [(each.weight, each.reason) for each in found] == [(3, "")]


def test_a_layer_has_one_key_in_every_model() -> None:
    """What stands before a layer changes its name and its variables, and not its key or its text."""
    alone = workloads(model(conv(4), relu, shape=IMAGE))[0]
    behind = workloads(model(conv(4, kernel=1), conv(4), relu, softmax, shape=IMAGE))
    again = next(each for each in behind if each.key == alone.key)
    assert again.mod == alone.mod


def test_no_name_in_a_kernel_matters() -> None:
    """Function, parameters, loops, iterators and blocks may be called anything."""
    other = scale(name="f", a="x", b="y", i="k", v="n", block="multiply")
    assert workload_key(normalised(scale())) == workload_key(normalised(other))
    assert tvm.ir.save_json(normalised(scale())) == tvm.ir.save_json(normalised(other))


@pytest.mark.parametrize(
    "other",
    [
        key(conv(4), relu, shape=(1, 4, 8, 9)),
        key(conv(5), relu),
        key(conv(4, stride=2), relu),
        key(conv(4, kernel=1), relu),
        key(conv(4)),
        key(conv(4), lambda value, _: tvm.relax.op.sigmoid(value)),
    ],
    ids=["input", "channels", "stride", "kernel", "no epilogue", "epilogue"],
)
def test_another_computation_has_another_key(other: str) -> None:
    """Shapes, strides and what is fused behind an operator are part of the workload."""
    assert other != key(conv(4), relu)


def test_the_type_of_the_data_is_part_of_the_key() -> None:
    """The same loops over other numbers are another workload."""
    single = scale()
    double = kernel(
        SCALE.format(name="f", a="a", b="b", i="i", v="v", block="s", constant=2.0).replace(
            "float32", "float64"
        )
    )
    assert workload_key(normalised(single)) != workload_key(normalised(double))


def test_constants_are_part_of_the_key() -> None:
    """Another scale is another computation, even where the loops are the same."""
    assert workload_key(normalised(scale(2.0))) != workload_key(normalised(scale(2.5)))


def test_which_operand_is_which_is_part_of_the_key() -> None:
    """a - b and b - a differ in nothing but the order of their variables."""
    text = """
def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32"), c: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("s"):
            v = T.axis.spatial(8, i)
            c[v] = {} - {}
"""
    forward = normalised(kernel(text.format("a[v]", "b[v]")))
    backward = normalised(kernel(text.format("b[v]", "a[v]")))
    assert workload_key(forward) != workload_key(backward)


def test_normalising_twice_changes_nothing() -> None:
    """The normalised form is a fixed point, and so is saving and loading it."""
    once = normalised(lowered(model(conv(4), relu, shape=IMAGE))["fused_conv2d_relu"])
    text = tvm.ir.save_json(once)
    assert tvm.ir.save_json(normalised(once["main"])) == text
    assert workload_key(tvm.ir.load_json(text)) == workload_key(once)


def test_keys_agree_with_tvms_structural_equality() -> None:
    """Over all pairs of some tens of kernels: one key exactly when TVM calls them equal."""
    models = [
        model(conv(out, kernel, stride), *epilogue, shape=(1, channels, 6, 6))
        for out, kernel, stride, channels in itertools.product((2, 3), (1, 3), (1, 2), (2, 3))
        for epilogue in ((), (relu,))
    ] + [model(dense(8), relu, dense(8), softmax), model(softmax, dense(8)), model(dense(8))]
    kernels = [
        normalised(function)
        for mod in models
        for _, function in sorted(lowered(mod).functions_items(), key=lambda item: str(item[0]))
        if isinstance(function, tvm.tirx.PrimFunc)
    ]
    assert len(kernels) > 30
    keys = [workload_key(mod) for mod in kernels]
    for (one, first), (two, second) in itertools.combinations(zip(keys, kernels, strict=True), 2):
        assert (one == two) == tvm_ffi.structural_equal(first, second)
    assert len(set(keys)) < len(keys)


_PRINT_KEYS = """
import json
from tests.support.tuning import conv, model, relu, softmax, workloads
found = workloads(model(conv(4), relu, conv(4), softmax, shape=(1, 4, 8, 8)))
print(json.dumps([[each.key, each.mod] for each in found]))
"""


def test_keys_outlive_processes() -> None:
    """Two processes with other hash seeds give the same keys and the same texts."""
    ours = workloads(model(conv(4), relu, conv(4), softmax, shape=IMAGE))
    theirs = subprocess.run(
        [sys.executable, "-c", _PRINT_KEYS],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(theirs.stdout) == [[each.key, each.mod] for each in ours]


def test_what_no_search_applies_to_says_why() -> None:
    """A reshape costs nothing in the library; plain loops and unknown shapes cannot be scheduled."""
    found = workloads(model(softmax, reshape(256), shape=(16, 16)))
    assert {each.names: each.reason for each in found} == {
        ("softmax",): "",
        ("reshape",): "it only renames a shape, which costs nothing in the library",
    }


def test_shapes_that_are_known_at_run_time_are_not_searched() -> None:
    """A kernel with a symbolic extent is listed with the reason."""
    batch = tvm.tirx.Var("n", "int64")
    builder = tvm.relax.BlockBuilder()
    data = tvm.relax.Var("data", tvm.relax.TensorType((batch, 8), "float32"))
    with builder.function("main", [data], attrs={"num_input": 1}):
        with builder.dataflow():
            value = builder.emit_output(builder.emit(tvm.relax.op.nn.relu(data)))
        builder.emit_func_output(value)
    assert [each.reason for each in workloads(builder.get())] == [
        "its shapes are known only when it runs"
    ]


def test_flops_are_those_of_one_call() -> None:
    """A 16×16 by 16×8 product multiplies and adds 2,048 times each."""
    found = workloads(model(dense(8), shape=(16, 16)))
    assert [each.flops for each in found] == [2 * 16 * 16 * 8]
