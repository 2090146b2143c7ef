"""Workload keys: the same kernel has the same key everywhere, another kernel another one."""

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
from tvmflow.tuning.workloads import normalize, workload_key

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
    kernels = workloads(model(conv(4), relu, conv(4), relu, conv(4), relu, shape=IMAGE))
    assert [(workload.weight, workload.untunable_reason) for workload in kernels] == [(3, "")]


def test_a_layer_has_one_key_in_every_model() -> None:
    """Earlier layers change its name and its variables, but not its key or its saved form."""
    alone = workloads(model(conv(4), relu, shape=IMAGE))[0]
    behind = workloads(model(conv(4, kernel=1), conv(4), relu, softmax, shape=IMAGE))
    again = next(workload for workload in behind if workload.key == alone.key)
    assert again.mod == alone.mod


def test_a_key_stays_as_ledgers_have_it() -> None:
    """Trials are found by the key that an earlier version gave the kernel."""
    assert (
        workload_key(normalize(scale()))
        == "371459f16279e8b3158e436fe124a7a4b8ade09df35393a9e0f5ffbaabe568c3"
    )


def test_names_in_a_kernel_do_not_change_its_key() -> None:
    """Names of functions, parameters, loops, iterators and blocks are normalized."""
    other = scale(name="f", a="x", b="y", i="k", v="n", block="multiply")
    assert workload_key(normalize(scale())) == workload_key(normalize(other))
    assert tvm.ir.save_json(normalize(scale())) == tvm.ir.save_json(normalize(other))


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
    assert workload_key(normalize(single)) != workload_key(normalize(double))


def test_constants_are_part_of_the_key() -> None:
    """Another scale is another computation, even where the loops are the same."""
    assert workload_key(normalize(scale(2.0))) != workload_key(normalize(scale(2.5)))


def test_which_operand_is_which_is_part_of_the_key() -> None:
    """a - b and b - a differ in nothing but the order of their variables."""
    text = """
def f(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32"), c: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("s"):
            v = T.axis.spatial(8, i)
            c[v] = {} - {}
"""
    forward = normalize(kernel(text.format("a[v]", "b[v]")))
    backward = normalize(kernel(text.format("b[v]", "a[v]")))
    assert workload_key(forward) != workload_key(backward)


def test_normalizing_twice_changes_nothing() -> None:
    """The normalized form is a fixed point, also after saving and loading."""
    once = normalize(lowered(model(conv(4), relu, shape=IMAGE))["fused_conv2d_relu"])
    text = tvm.ir.save_json(once)
    assert tvm.ir.save_json(normalize(once["main"])) == text
    assert workload_key(tvm.ir.load_json(text)) == workload_key(once)


def test_keys_agree_with_tvms_structural_equality() -> None:
    """For all pairs of some tens of kernels: the same key exactly when TVM finds them equal."""
    models = [
        model(conv(out, kernel, stride), *epilogue, shape=(1, channels, 6, 6))
        for out, kernel, stride, channels in itertools.product((2, 3), (1, 3), (1, 2), (2, 3))
        for epilogue in ((), (relu,))
    ] + [model(dense(8), relu, dense(8), softmax), model(softmax, dense(8)), model(dense(8))]
    kernels = [
        normalize(function)
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
kernels = workloads(model(conv(4), relu, conv(4), softmax, shape=(1, 4, 8, 8)))
print(json.dumps([[kernel.key, kernel.mod] for kernel in kernels]))
"""


def test_keys_outlive_processes() -> None:
    """Two processes with other hash seeds give the same keys and the same texts."""
    first_key = workloads(model(conv(4), relu, conv(4), softmax, shape=IMAGE))
    second_key = subprocess.run(
        [sys.executable, "-c", _PRINT_KEYS],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(second_key.stdout) == [[workload.key, workload.mod] for workload in first_key]


def test_kernels_that_cannot_be_tuned_have_a_reason() -> None:
    """A reshape costs nothing in the library; plain loops and unknown shapes cannot be scheduled."""
    kernels = workloads(model(softmax, reshape(256), shape=(16, 16)))
    assert {workload.names: workload.untunable_reason for workload in kernels} == {
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
    assert [workload.untunable_reason for workload in workloads(builder.get())] == [
        "its shapes are known only when it runs"
    ]


def test_flops_are_those_of_one_call() -> None:
    """A 16×16 by 16×8 product multiplies and adds 2,048 times each."""
    kernels = workloads(model(dense(8), shape=(16, 16)))
    assert [workload.flops for workload in kernels] == [2 * 16 * 16 * 8]
