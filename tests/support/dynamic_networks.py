"""Small networks with dynamic shapes, in Relax, compiled once and run at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx

from tests.support.kernels import FAST, host_level, reference_target
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.dimensions import evaluate_shape
from tvmflow.core.types import Dimension, Size
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import with_dimensions
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]
Emit = Callable[[Any], Any]


class Input(NamedTuple):
    """An input: its sizes, and its dtype."""

    sizes: Sequence[Size]
    dtype: str = "float32"


class DynamicNetwork(NamedTuple):
    """A model with dynamic shapes.

    Attributes:
        mod: The module, as a frontend gives it.
        inputs: Its inputs by name.
        weights: Its weights by name.
    """

    mod: tvm.IRModule
    inputs: Mapping[str, Input]
    weights: Mapping[str, Array]

    def draw(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
        """Return random inputs for some sizes of the dimensions."""
        rng = np.random.default_rng(seed)
        return {
            name: _draw(rng, evaluate_shape(entry.sizes, sizes), entry.dtype)
            for name, entry in self.inputs.items()
        }

    def lower(
        self, target: Mapping[str, Any] | None = None, options: LoweringOptions = FAST
    ) -> lowering.LoweredModel:
        """Return the lowered model, by default for the highest level of this machine."""
        mapping = reference_target(target or host_level(), options)
        return lowering.lower(self.mod, make_target(mapping), options)

    def list_kernels(self, target: Mapping[str, Any] | None = None) -> list[str]:
        """Return the names of its kernels."""
        return ir.list_kernels(self.lower(target).mod)

    def compile(
        self, target: Mapping[str, Any] | None = None, options: LoweringOptions = FAST
    ) -> Callable[..., list[Array]]:
        """Return the compiled model: a function of its inputs. Its kernels have no schedules of rules."""
        mapping = reference_target(target or host_level(), options)
        library = (
            lowering.lower(self.mod, make_target(mapping), options)
            .schedule_untuned(self.weights, mapping, 0)
            .compile()
        )
        machine = relax.VirtualMachine(library, tvm.cpu())

        def run(**feed: Array) -> list[Array]:
            result = machine["main"](*(tvm.runtime.tensor(feed[name]) for name in self.inputs))
            tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
            return [tensor.numpy() for tensor in tensors]

        return run

    def agrees(
        self,
        reference: Callable[..., Array | Sequence[Array]],
        all_sizes: Iterable[Mapping[str, int]],
        target: Mapping[str, Any] | None = None,
        tolerance: float = 2e-5,
        options: LoweringOptions = FAST,
    ) -> None:
        """Compare it at some sizes with a function of numpy, which gets the weights too."""
        run = self.compile(target, options)
        for sizes in all_sizes:
            feed = self.draw(sizes)
            expected = reference(**feed, **self.weights)
            expected = [expected] if isinstance(expected, np.ndarray) else list(expected)
            for actual, wanted in zip(run(**feed), expected, strict=True):
                assert actual.shape == wanted.shape, sizes
                np.testing.assert_allclose(
                    actual, wanted, rtol=tolerance, atol=tolerance, err_msg=str(sizes)
                )


def run_dynamic(loaded: LoadedModel, dimensions: Sequence[Dimension]) -> Callable[..., list[Array]]:
    """Compile an imported model as a recipe does; a function of arrays in the order of its inputs."""
    main = loaded.mod.get_global_var("main")
    loaded.mod.update_func(main, with_dimensions(loaded.mod[main], dimensions))
    library = (
        lowering.lower(loaded.mod, make_target(host_level()), FAST)
        .schedule_untuned(loaded.params, host_level(), 1)
        .compile()
    )
    machine = relax.VirtualMachine(library, tvm.cpu())

    def run(*arrays: Array) -> list[Array]:
        values = (tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays)
        result = machine["main"](*values)
        tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
        return [tensor.numpy() for tensor in tensors]

    return run


def make_network(
    dimensions: Sequence[Dimension],
    inputs: Mapping[str, Input],
    weights: Mapping[str, Array],
    body: Callable[..., Any],
) -> DynamicNetwork:
    """Return a model.

    Args:
        dimensions: The dimensions.
        inputs: The inputs by name.
        weights: The weights by name.
        body: Takes `emit`, which binds an expression, and all inputs and weights by name. It returns
            the output, or a list of them.
    """
    symbols: dict[Size, Any] = {entry.name: tirx.Var(entry.name, "int64") for entry in dimensions}
    params = [
        relax.Var(name, relax.TensorType([symbols.get(n, n) for n in entry.sizes], entry.dtype))
        for name, entry in inputs.items()
    ]
    params += [
        relax.Var(name, relax.TensorType(list(array.shape), str(array.dtype)))
        for name, array in weights.items()
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params, attrs={"num_input": len(inputs)}):
        with builder.dataflow():
            result = body(builder.emit, **{str(param.name): param for param in params})
            fields = result if isinstance(result, list) else [result]
            outputs = [builder.emit_output(field) for field in fields]
        builder.emit_func_output(relax.Tuple(outputs) if isinstance(result, list) else outputs[0])
    mod = builder.get()
    mod.update_func(mod.get_global_var("main"), with_dimensions(mod["main"], dimensions))
    return DynamicNetwork(mod, inputs, weights)


def dynamic_rows(*tune_at: int) -> DynamicNetwork:
    """Return a product of a dynamic number of rows, up to 40, with a matrix of 16×32."""
    return make_network(
        [Dimension("rows", 1, 40, 1, tune_at)],
        {"x": Input(("rows", 16))},
        make_weights(w=(16, 32)),
        lambda emit, x, w: emit(relax.op.matmul(x, w)),
    )


def make_weights(**shapes: Sequence[int]) -> dict[str, Array]:
    """Return random weights of float32 by name."""
    rng = np.random.default_rng(7)
    return {name: _draw(rng, shape, "float32") / 4 for name, shape in shapes.items()}


def _draw(rng: Any, shape: Sequence[int], dtype: str) -> Array:
    if np.issubdtype(np.dtype(dtype), np.integer):
        drawn: Array = rng.integers(0, 100, shape).astype(dtype)
        return drawn
    array: Array = rng.standard_normal(shape).astype(dtype)
    return array
