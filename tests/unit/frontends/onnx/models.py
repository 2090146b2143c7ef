"""ONNX models that several test modules import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax

from tests.support.kernels import host_level
from tests.support.onnx_models import (
    Array,
    frontend,
    model,
    open_session,
    save,
    value,
)
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.dimensions import evaluate_shape
from tvmflow.core.types import Dimension, Size, TensorSpec
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph.dynamic_shapes import with_dimensions
from tvmflow.targets.tvm_target import make_target

BATCH = Dimension("batch", 1, 8)


def load_dynamic(
    made: onnx.ModelProto, folder: Path, dimensions: Sequence[Dimension]
) -> LoadedModel:
    """Import a model with the dimensions that its inputs name."""
    largest = {entry.name: entry.max for entry in dimensions}
    specs = []
    for entry in made.graph.input:
        kind = entry.type.tensor_type
        sizes: tuple[Size, ...] = tuple(d.dim_param or d.dim_value for d in kind.shape.dim)
        dtype = str(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        is_dynamic = any(isinstance(size, str) for size in sizes)
        shape = evaluate_shape(sizes, largest)
        specs.append(TensorSpec(entry.name, shape, dtype, sizes=sizes if is_dynamic else ()))
    loaded = frontend.load(save(made, folder), tuple(specs), dimensions=dimensions)
    main = loaded.mod.get_global_var("main")
    loaded.mod.update_func(main, with_dimensions(loaded.mod[main], dimensions))
    return loaded


def compile_dynamic(loaded: LoadedModel) -> Callable[..., Any]:
    library = (
        lowering.lower(loaded.mod, make_target(host_level()), LoweringOptions())
        .schedule_untuned(loaded.params, host_level(), 1)
        .compile()
    )
    machine = relax.VirtualMachine(library, tvm.cpu())
    return lambda *arrays: machine["main"](*map(tvm.runtime.tensor, arrays))


def agree_at(
    made: onnx.ModelProto,
    folder: Path,
    dimensions: Sequence[Dimension],
    sizes: Sequence[Mapping[str, int]],
) -> LoadedModel:
    """Compile a model once; at all sizes its outputs, and the shapes that are said of them, are those of ONNX Runtime."""
    loaded = load_dynamic(made, folder, dimensions)
    run, session = compile_dynamic(loaded), open_session(made)
    random = np.random.default_rng(0)
    for known in sizes:
        feed = {}
        for spec in loaded.inputs:
            shape = evaluate_shape(spec.sizes or spec.shape, known)
            if spec.dtype == "float32":
                feed[spec.name] = random.normal(size=shape).astype(np.float32)
            else:
                feed[spec.name] = random.integers(0, 2, shape).astype(spec.dtype)
        result = run(*feed.values())
        results = [result] if hasattr(result, "numpy") else list(result)
        for spec, actual, expected in zip(
            loaded.outputs, results, session.run(None, feed), strict=True
        ):
            assert evaluate_shape(spec.sizes or spec.shape, known) == expected.shape
            np.testing.assert_allclose(
                actual.numpy(), expected, rtol=1e-4, atol=1e-4, err_msg=spec.name
            )
    return loaded


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


STATES = {"LSTM": ("hidden", "cell"), "GRU": ("hidden",), "RNN": ("hidden",)}


def layer(
    kind: str,
    *,
    steps: int = 4,
    batch: int = 1,
    size: int = 3,
    hidden: int = 7,
    lengths: list[int] | None = None,
    bias: bool = True,
    states: bool = True,
    peepholes: bool = False,
    dtype: str = "float32",
    lengths_are_input: bool = False,
    used: tuple[str, ...] = (),
    **attributes: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return a model of one layer, and inputs for it.

    Args:
        lengths_are_input: The lengths are an input, not a constant.
        used: The outputs of the layer that the model has; empty for all.
    """
    random = np.random.default_rng(0)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    is_batch_first = attributes.get("layout", 0)

    def draw(*shape: int) -> Any:
        return (random.normal(size=shape) / hidden**0.5).astype(dtype)

    gates, weights, feed = GATES[kind] * hidden, {}, {}
    feed["x"] = draw(*((batch, steps) if is_batch_first else (steps, batch)), size)
    weights["w"] = draw(directions, gates, size)
    weights["r"] = draw(directions, gates, hidden)
    if bias:
        weights["bias"] = draw(directions, 2 * gates)
    if lengths:
        (feed if lengths_are_input else weights)["lengths"] = np.array(lengths, np.int32)
    for name in STATES[kind] if states else ():
        outer = (batch, directions) if is_batch_first else (directions, batch)
        feed[name] = draw(*outer, hidden)
    if peepholes:
        weights["peepholes"] = draw(directions, 3 * hidden)
    operands = ("x", "w", "r", "bias", "lengths", "hidden", "cell", "peepholes")
    names = [name if name in weights or name in feed else "" for name in operands]
    while not names[-1]:
        names.pop()
    results = ["y", *(f"last_{name}" for name in STATES[kind])]
    used = used or tuple(results)
    made = [name if name in used else "" for name in results]
    node = helper.make_node(kind, names, made, hidden_size=hidden, **attributes)
    inputs = [value(name, array.shape, str(array.dtype)) for name, array in feed.items()]
    outputs = [value(name, None, dtype) for name in results if name in used]
    return model([node], inputs, outputs, weights, opset=14), feed


Feed = dict[str, Array]


def single(
    operator: str, feed: Feed, constants: Feed | None = None, opset: int = 19, **attributes: Any
) -> tuple[onnx.ModelProto, Feed]:
    """Return a model of one node, which reads the feed and then the constants; empty arrays are missing operands."""
    constants = constants or {}
    names = [name if array.size else "" for name, array in (feed | constants).items()]
    outputs = attributes.pop("outputs", 1)
    results = [f"y{n}" for n in range(outputs)]
    made = model(
        [helper.make_node(operator, names, results, **attributes)],
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feed.items()
        ],
        [value(name, None) for name in results],
        {name: array for name, array in constants.items() if array.size},
        opset=opset,
    )
    made.ir_version = 10
    for output in made.graph.output:
        output.ClearField("type")
    return made, feed
