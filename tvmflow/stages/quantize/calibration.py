"""The float model on calibration data: histograms of its inner tensors, sample by sample."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.compiler import ir, lowering
from tvmflow.compiler.c_program import load_c_library
from tvmflow.compiler.c_program.program import UnsupportedProgram
from tvmflow.compiler.open_sizes import sizes_of
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions
from tvmflow.compiler.quantize.insertion import SWITCHES, Quantization, insert
from tvmflow.compiler.quantize.points import FloatModel, Layer
from tvmflow.compiler.quantize.ranges import Histogram
from tvmflow.compiler.quantize.weights import InputProducts
from tvmflow.core.errors import StageError
from tvmflow.core.types import Dimension, Json, TensorSpec
from tvmflow.runtime.module import Module
from tvmflow.targets.host import read_host
from tvmflow.targets.threads import count_usable_cpus

_log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]

# The features of x86-64-v3 that say which machines have all of them.
_AVX2: Final = {"avx2", "fma", "bmi2"}
# Tensors that are tapped together; those of more have libraries of their own, one after the other.
_TAPPED_BYTES: Final = 256 << 20
_TAPPED: Final = "tvmflow.tapped."


def read_target() -> dict[str, Json]:
    """Return the target of libraries that calibrate: one for all machines of this architecture.

    Code for the CPU at hand would add up in another order on each, and ranges would differ.
    """
    host = read_host()
    target: dict[str, Json] = {"kind": "llvm", "mtriple": host.triple}
    if host.arch == "x86_64":
        target["mcpu"] = "x86-64-v3" if host.flags >= _AVX2 else "x86-64-v2"
    return target


class Signature:
    """The inputs, the outputs and the dimensions of a model, as `import` wrote them."""

    def __init__(self, document: Mapping[str, Json]) -> None:
        self.inputs = tuple(map(TensorSpec.from_json, document["inputs"]))
        self.outputs = tuple(map(TensorSpec.from_json, document["outputs"]))
        self.dimensions = Dimension.list_of(document)

    def compile(
        self,
        model: FloatModel,
        inputs: Sequence[TensorSpec] = (),
        outputs: Sequence[TensorSpec] = (),
    ) -> Module:
        """Compile a model of this signature, and of further inputs and outputs, for this machine.

        Raises:
            StageError: when no C library can compute it.
        """
        signature: dict[str, Json] = {
            "inputs": [spec.to_json() for spec in (*self.inputs, *inputs)],
            "outputs": [spec.to_json() for spec in (*self.outputs, *outputs)],
        }
        if self.dimensions:
            signature["dimensions"] = [entry.to_json() for entry in self.dimensions]
        scheduled = lowering.schedule_untuned(
            ir.copy_module(model.mod),
            model.params,
            read_target(),
            LoweringOptions(),
            SCHEDULES_VERSION,
        )
        try:
            program = load_c_library(scheduled, signature, count_usable_cpus())
        except UnsupportedProgram as error:
            raise StageError(
                f"the model cannot be calibrated: it needs TVM's runtime for {error}",
                fix="leave `quantize` out",
            ) from None
        return Module(program, signature, {})


def collect_histograms(
    model: FloatModel, tensors: Sequence[Any], signature: Signature, batches: Sequence[Feed]
) -> dict[Any, Histogram]:
    """Return the histogram of each tensor over all batches.

    Args:
        model: The float model.
        tensors: Variables of its `main`.
        signature: Its inputs and outputs.
        batches: Its inputs; one at a time is in memory where they are made when they are asked for.
    """
    histograms = {var: Histogram() for var in tensors}
    for var, values in _iterate_values(model, tensors, signature, batches):
        histograms[var].add(values)
    return histograms


def collect_sizes(
    model: FloatModel, axes: Mapping[Any, int], signature: Signature, batches: Sequence[Feed]
) -> dict[Any, Array]:
    """Return the largest absolute value in each channel of each tensor, whose channels are along an axis."""
    largest: dict[Any, Array] = {}
    for var, values in _iterate_values(model, list(axes), signature, batches):
        moved = np.moveaxis(values, axes[var], 0)
        sizes = np.abs(moved.reshape(len(moved), -1)).max(axis=1, initial=0.0)
        largest[var] = np.maximum(largest[var], sizes) if var in largest else sizes
    return largest


def collect_products(
    model: FloatModel,
    tensors: Sequence[Any],
    signature: Signature,
    batches: Sequence[Feed],
    size: int,
) -> dict[Any, InputProducts]:
    """Return the products of each tensor's last axis over all batches, for groups of some size."""
    depths = {var: sizes[-1] for var in tensors if (sizes := sizes_of(var))}
    products = {var: InputProducts(int(depth), size) for var, depth in depths.items()}
    for var, values in _iterate_values(model, list(products), signature, batches):
        products[var].add(values)
    return products


def _iterate_values(
    model: FloatModel, tensors: Sequence[Any], signature: Signature, batches: Sequence[Feed]
) -> Iterator[tuple[Any, Array]]:
    """Give the values of each tensor for each batch."""
    inputs = {var: str(var.name) for var in model.main.params}
    for var in tensors:
        if (name := inputs.get(var)) is not None:
            for index in range(len(batches)):
                yield var, batches[index][_input_name(model, name, signature)]
    for group in _divide([var for var in tensors if var not in inputs]):
        names = {f"{_TAPPED}{place}": var for place, var in enumerate(group)}
        specs = [_spec_of(name, var) for name, var in names.items()]
        tapped = signature.compile(tap(model, group), outputs=specs)
        for index in range(len(batches)):
            results = tapped.run(dict(batches[index]))
            for name, var in names.items():
                yield var, results[name]


def _input_name(model: FloatModel, name: str, signature: Signature) -> str:
    place = [str(var.name) for var in model.main.params].index(name)
    return signature.inputs[place].name


def _spec_of(name: str, var: Any) -> TensorSpec:
    """Return the description of an inner tensor as an output."""
    shape = ir.shape_of(var)
    if shape is None:
        raise StageError(
            "the model cannot be calibrated: inner tensors have open sizes",
            fix="give its inputs fixed sizes, or leave `quantize` out",
        )
    return TensorSpec(name, shape, ir.dtype_of(var))


def _divide(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield tensors in groups that fit into memory."""
    group: list[Any] = []
    size = 0
    for var in tensors:
        own = 4 * int(np.prod(ir.shape_of(var) or (1,)))
        if group and size + own > _TAPPED_BYTES:
            yield group
            group, size = [], 0
        group.append(var)
        size += own
    if group:
        yield group


def tap(model: FloatModel, tensors: Sequence[Any]) -> FloatModel:
    """Return a model that also returns inner tensors."""
    main = model.main
    outputs = [*ir.list_outputs(main), *tensors]
    bindings = [*main.body.blocks[0].bindings]
    ends = [relax.Var(f"out_{place}", var.ty) for place, var in enumerate(outputs)]
    bindings += [relax.VarBinding(*pair) for pair in zip(ends, outputs, strict=True)]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], relax.Tuple(ends))
    function = relax.Function(list(main.params), body, body.body.ty, is_pure=True)
    mod = ir.copy_module(model.mod)
    mod[model.mod.get_global_var("main")] = function.with_attrs(dict(main.attrs))
    mod = relax.transform.CanonicalizeBindings()(mod)
    return model._replace(mod=relax.transform.DeadCodeElimination(["main"])(mod), nodes=())


class SwitchedModel:
    """A float model, compiled once, whose layers can each be computed with integers instead.

    Integers are emulated by floats: the result is that of the integers but for the order of sums, and the same bits on
    every machine of an architecture.

    Attributes:
        layers: The layers that can be chosen, in order.
    """

    def __init__(
        self,
        model: FloatModel,
        layers: Sequence[Layer],
        quantization: Quantization,
        signature: Signature,
    ) -> None:
        self.layers = tuple(layers)
        both = insert(model, layers, quantization, with_switches=True)
        switches = TensorSpec(SWITCHES, (len(layers),), "float32")
        self._module = signature.compile(both, inputs=[switches])

    def run(self, feed: Feed, chosen: Collection[int]) -> dict[str, Array]:
        """Return the outputs where some layers, by their places in `layers`, are computed with integers."""
        switches = np.zeros(len(self.layers), np.float32)
        switches[list(chosen)] = 1
        return self._module.run({**feed, SWITCHES: switches})
