"""Runs of the float model on calibration data, and statistics of its intermediate tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.compiler import SCHEDULES_VERSION, CpuModel, LibraryForWeights, LoweringOptions, lower
from tvmflow.core.dimensions import largest_shape
from tvmflow.core.errors import StageError
from tvmflow.core.types import Array, Dimension, Json, TensorSpec
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import NoSize, known_sizes, size_text, sizes_of
from tvmflow.runtime.arrays import match_inputs
from tvmflow.runtime.module import Module
from tvmflow.stages.base import describe_signature
from tvmflow.stages.quantize.channels import ChannelSums, Means
from tvmflow.stages.quantize.emulation import Emulation
from tvmflow.stages.quantize.insertion import SWITCHES, DataScale, Quantization, insert
from tvmflow.stages.quantize.points import FloatModel, Integers, Layer
from tvmflow.stages.quantize.ranges import Histogram
from tvmflow.stages.quantize.weights import InputProducts
from tvmflow.targets.host import read_host
from tvmflow.targets.threads import count_usable_cpus
from tvmflow.targets.tvm_target import make_target

_log = logging.getLogger(__name__)

Feed = Mapping[str, Array]

# A CPU with these features has the whole ISA level: x86-64-v3, or x86-64-v4 with `_AVX512` as well.
_AVX2: Final = {"avx2", "fma", "bmi2"}
_AVX512: Final = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The number of float32 lanes of an AVX-512 vector.
_WIDE_LANES: Final = 16
# Kernels are unrolled and vectorized already: a higher level hardly makes them faster, and LLVM compiles at this level
# in 0.7 times the time.
_LITTLE_OPTIMIZED: Final[Mapping[str, Json]] = {"opt-level": 1}
# One library observes tensors of up to this total size; further tensors get further libraries.
_OBSERVED_BYTES: Final = 256 << 20
_OBSERVED: Final = "tvmflow.tapped."
# About this many values of a tensor are sampled for its range, over all batches.
_COUNTED_VALUES: Final = 1 << 21
# About this many values of each channel are sampled for its mean.
_ADDED_POSITIONS: Final = 1 << 15


class Targets(NamedTuple):
    """The targets of the libraries that run a model for calibration.

    Attributes:
        kernels: The target of the kernels, which decides the order of accumulation and thus the computed values.
        code: The target of code generation: the CPU whose instructions are used, and LLVM's optimization options.
    """

    kernels: Mapping[str, Json]
    code: Mapping[str, Json]


def find_targets(built: Mapping[str, Json]) -> Targets:
    """Return the targets of calibration libraries, with the same kernels on every machine.

    Kernels for the local CPU would accumulate in a different order on each machine, so ranges would differ. If
    `built`, the model's TVM target, has AVX-512, kernels use 512-bit vectors. A CPU with only AVX2 computes each
    vector in two halves, with the same bits.
    """
    host = read_host()
    plain: dict[str, Json] = {"kind": "llvm", "mtriple": host.triple}
    if host.arch != "x86_64":
        return Targets(plain, {**plain, **_LITTLE_OPTIMIZED})
    own = "x86-64-v3" if host.flags >= _AVX2 else "x86-64-v2"
    kernels = code = {**plain, "mcpu": own}
    cpu = CpuModel.from_target(built) if built else None
    if own == "x86-64-v3" and cpu is not None and cpu.lanes == _WIDE_LANES:
        kernels = {**plain, "mcpu": "x86-64-v4"}
        code = kernels if host.flags >= _AVX512 else code
    return Targets(kernels, {**code, **_LITTLE_OPTIMIZED})


class Signature:
    """The inputs, outputs and dynamic dimensions of a model, from the document that `import` wrote."""

    def __init__(
        self, document: Mapping[str, Json], target: Mapping[str, Json] = MappingProxyType({})
    ) -> None:
        self._targets = find_targets(target)
        self.inputs = tuple(map(TensorSpec.from_json, document["inputs"]))
        self.outputs = tuple(map(TensorSpec.from_json, document["outputs"]))
        self.dimensions = Dimension.list_of(document)

    def compile(
        self,
        model: FloatModel,
        inputs: Sequence[TensorSpec] = (),
        outputs: Sequence[TensorSpec] = (),
    ) -> Module:
        """Compile a model of this signature with additional inputs and outputs.

        Raises:
            StageError: when it cannot be compiled to a C library.
        """
        return self.compile_for_weights(model, outputs, inputs).module

    def compile_for_weights(
        self,
        model: FloatModel,
        outputs: Sequence[TensorSpec],
        inputs: Sequence[TensorSpec] = (),
    ) -> CompiledModel:
        """Compile a model whose weights can be exchanged; arguments and errors are those of `compile`."""
        all_inputs, all_outputs = (*self.inputs, *inputs), (*self.outputs, *outputs)
        signature = describe_signature(all_inputs, all_outputs, self.dimensions)
        return CompiledModel(model, signature, self._targets)


class CompiledModel:
    """A model compiled once for this machine; its weights can be exchanged for others of equal shape."""

    def __init__(self, model: FloatModel, signature: Mapping[str, Json], targets: Targets) -> None:
        mod = ir.copy_module(model.mod)
        self._signature, self._params = signature, model.params
        target = make_target(targets.kernels)
        self._lowered = lower(mod, target, LoweringOptions())
        scheduled = self._lowered.schedule_untuned(
            model.params, targets.kernels, SCHEDULES_VERSION
        )._replace(target=make_target(targets.code))
        try:
            self._library = LibraryForWeights(scheduled, signature, count_usable_cpus())
        except StageError as error:
            raise StageError(
                f"the model cannot be calibrated: {error.message}",
                fix="leave `quantize` out",
            ) from None
        self.module = Module(self._library.program, signature, {})
        self._room: dict[str, Array] = {}

    def exchange(self, params: Mapping[str, Array]) -> Module:
        """Return the model with other weights, by name; arrays derived from unchanged weights are reused."""
        weights = self._lowered.recompute_weights(params, self._params)
        return Module(self._library.exchange(weights), self._signature, {})

    def call(self, module: Module, feed: Feed) -> dict[str, Array]:
        """Run `module` (the model, or one from `exchange`); observed tensors reuse the last call's memory."""
        names = [spec.name for spec in module.outputs]
        inputs = match_inputs(module.inputs, feed, module)
        # the arrays come from the library itself; checking them would take longer than a small model runs
        arrays = module.program.run(inputs, list(map(self._room.get, names)))
        results = dict(zip(names, arrays, strict=True))
        if not module.dimensions:
            self._room = {name: own for name, own in results.items() if name.startswith(_OBSERVED)}
        return results


class ModelObserver:
    """A float model that also returns intermediate tensors, compiled once.

    Tensors are observed in groups of limited size. Each group has its own library, and only one library is kept.

    Args:
        tensors: Variables of its `main`.
        emulation: The same model with parameters that emulate integers; `emulate` needs it.
    """

    def __init__(
        self,
        model: FloatModel,
        tensors: Sequence[Any],
        signature: Signature,
        emulation: Emulation | None = None,
    ) -> None:
        self._model, self._signature = model, signature
        self._observed = model if emulation is None else emulation.model
        self._inputs = {var: str(var.name) for var in model.main.params}
        watched = [var for var in tensors if var not in self._inputs]
        self._groups = [*_divide(watched, signature.dimensions)] or [[]]
        # at most one library, by the index of its group; observers from `follow` share it
        self._held: dict[int, CompiledModel] = {}
        self._origins: dict[Any, tuple[Any, Array | None]] = {}

    def follow(self, origins: Mapping[Any, tuple[Any, Array | None]]) -> ModelObserver:
        """Return an observer for a rewritten model with the same outputs, which shares the library.

        `origins` maps each tensor of the rewritten model to a tensor of this model and to factors. The rewritten
        tensor is this model's tensor times the factors; None stands for no factors.
        """
        following = copy(self)
        following._origins = dict(origins)
        return following

    def run(self, feed: Feed) -> dict[str, Array]:
        """Return the outputs of the model."""
        library = self._find_library()
        return self._run(library, library.module, feed)

    def emulate(self, params: Mapping[str, Array]) -> Callable[[Feed], dict[str, Array]]:
        """Return a function that computes the outputs with weights from `Emulation.find_weights`."""
        library = self._find_library()
        return partial(self._run, library, library.exchange(params))

    def _run(self, library: CompiledModel, module: Module, feed: Feed) -> dict[str, Array]:
        results = library.call(module, feed)
        return {spec.name: results[spec.name] for spec in self._signature.outputs}

    def iterate_values(
        self, tensors: Collection[Any], batches: Sequence[Feed]
    ) -> Iterator[tuple[Any, Array]]:
        """Yield (tensor, values) for each tensor and batch; values are valid until the next call."""
        wanted = {}
        for var in tensors:
            origin, factors = self._origins.get(var, (var, None))
            wanted[origin] = var, factors
        for origin, values in self._iterate(wanted, batches):
            var, factors = wanted[origin]
            yield var, values if factors is None else values * factors

    def _iterate(
        self, tensors: Collection[Any], batches: Sequence[Feed]
    ) -> Iterator[tuple[Any, Array]]:
        for var in tensors:
            if (name := self._inputs.get(var)) is not None:
                position = [str(var.name) for var in self._model.main.params].index(name)
                own = self._signature.inputs[position].name
                for index in range(len(batches)):
                    yield var, batches[index][own]
        for number, group in enumerate(self._groups):
            names = {name: var for name, var in _name_tensors(group) if var in tensors}
            if not names:
                continue
            library = self._compile(number)
            for index in range(len(batches)):
                results = library.call(library.module, batches[index])
                for name, var in names.items():
                    yield var, results[name]

    def _find_library(self) -> CompiledModel:
        """Return the kept library, or compile one: every library computes the model's outputs."""
        return next(iter(self._held.values()), None) or self._compile(0)

    def _compile(self, index: int) -> CompiledModel:
        if index not in self._held:
            self._held.clear()
            group = self._groups[index]
            specs = [
                _spec_of(name, var, self._signature.dimensions)
                for name, var in _name_tensors(group)
            ]
            observed = observe(self._observed, group)
            self._held[index] = self._signature.compile_for_weights(observed, specs)
        return self._held[index]


def collect_histograms(
    observer: ModelObserver, tensors: Sequence[Any], batches: Sequence[Feed]
) -> dict[Any, Histogram]:
    """Return each tensor's histogram over all batches; large tensors are sampled at even steps."""
    histograms = {var: Histogram() for var in tensors}
    batch_counts = dict.fromkeys(histograms, 0)
    for var, values in observer.iterate_values(histograms, batches):
        step = _choose_step(values.size * len(batches), _COUNTED_VALUES)
        histograms[var].add_some(values, batch_counts[var] % step, step)
        batch_counts[var] += 1
    return histograms


def _choose_step(available: int, wanted: int) -> int:
    """Return the sampling stride: odd, so that it is not a multiple of an even size, as most are."""
    return available // wanted | 1


def collect_sizes(
    observer: ModelObserver, axes: Mapping[Any, int], batches: Sequence[Feed]
) -> dict[Any, Array]:
    """Return the largest absolute value of each channel; `axes` holds the channel axis of each tensor."""
    largest: dict[Any, Array] = {}
    for var, values in observer.iterate_values(axes, batches):
        moved = np.moveaxis(values, axes[var], 0)
        sizes = np.abs(moved.reshape(len(moved), -1)).max(axis=1, initial=0.0)
        largest[var] = np.maximum(largest[var], sizes) if var in largest else sizes
    return largest


def collect_products(
    observer: ModelObserver, tensors: Sequence[Any], batches: Sequence[Feed], size: int
) -> dict[Any, InputProducts]:
    """Return the Hessian of each tensor's last axis over all batches, for groups of `size`."""
    depths = {var: sizes[-1] for var in tensors if (sizes := sizes_of(var))}
    products = {var: InputProducts(int(depth), size) for var, depth in depths.items()}
    for var, values in observer.iterate_values(products, batches):
        products[var].add(values)
    return products


def collect_means(
    observer: ModelObserver,
    scales: Mapping[tuple[Any, int], DataScale],
    integers: Integers,
    batches: Sequence[Feed],
) -> dict[tuple[Any, int], Means]:
    """Return the per-channel means of tensors, by (tensor, channel axis).

    Large channels are sampled at even steps.
    """
    sums = {key: ChannelSums(key[1], scale, integers) for key, scale in scales.items()}
    batch_counts = dict.fromkeys((var for var, _ in scales), 0)
    for var, values in observer.iterate_values(batch_counts, batches):
        for (other, axis), own in sums.items():
            if other.same_as(var):
                positions = values.size // values.shape[axis] * len(batches)
                step = _choose_step(positions, _ADDED_POSITIONS)
                own.add(values, batch_counts[var] % step, step)
        batch_counts[var] += 1
    return {key: own.read_means() for key, own in sums.items()}


def _name_tensors(group: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{_OBSERVED}{index}", var) for index, var in enumerate(group)]


def _spec_of(name: str, var: Any, dimensions: Sequence[Dimension]) -> TensorSpec:
    """Return the spec of an intermediate tensor that becomes an output; StageError if its size is unknown."""
    try:
        sizes = tuple(map(size_text, known_sizes(var)))
    except NoSize as error:
        raise StageError(
            f"the model cannot be calibrated: the size of an intermediate tensor is not known, because {error}",
            fix="give its inputs fixed sizes, or leave out `data` with `activations: none`",
        ) from error
    shape = largest_shape(sizes, dimensions)
    return TensorSpec(name, shape, ir.dtype_of(var), sizes=() if sizes == shape else sizes)


def _divide(tensors: Sequence[Any], dimensions: Sequence[Dimension]) -> Iterator[list[Any]]:
    """Yield groups of tensors of at most `_OBSERVED_BYTES` together; a larger tensor has its own group."""
    group: list[Any] = []
    size = 0
    for var in tensors:
        own = _spec_of("", var, dimensions).bytes
        if group and size + own > _OBSERVED_BYTES:
            yield group
            group, size = [], 0
        group.append(var)
        size += own
    if group:
        yield group


def observe(model: FloatModel, tensors: Sequence[Any]) -> FloatModel:
    """Return the model with `tensors` as additional outputs."""
    main = model.main
    outputs = [*ir.list_outputs(main), *tensors]
    bindings = [*main.body.blocks[0].bindings]
    ends = [relax.Var(f"out_{index}", var.ty) for index, var in enumerate(outputs)]
    bindings += [relax.VarBinding(*pair) for pair in zip(ends, outputs, strict=True)]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], relax.Tuple(ends))
    function = relax.Function(list(main.params), body, body.body.ty, is_pure=True)
    mod = ir.copy_module(model.mod)
    mod[model.mod.get_global_var("main")] = function.with_attrs(dict(main.attrs))
    mod = relax.transform.CanonicalizeBindings()(mod)
    return model._replace(mod=relax.transform.DeadCodeElimination(["main"])(mod), nodes=())


class SwitchedModel:
    """A model with each layer in float and in int8; each call computes the int8 ranges.

    Float arithmetic emulates the integers. Results differ from the quantized library only by the order of accumulation,
    and have the same bits on every machine of an architecture. The model is compiled at the first call of `choose`.
    """

    def __init__(
        self,
        model: FloatModel,
        layers: Sequence[Layer],
        quantization: Quantization,
        signature: Signature,
    ) -> None:
        self._model, self._layers, self._quantization = model, layers, quantization
        self._signature = signature

    @cached_property
    def _module(self) -> Module:
        both = insert(self._model, self._layers, self._quantization, with_switches=True)
        switches = TensorSpec(SWITCHES, (len(self._layers),), "float32")
        return self._signature.compile(both, inputs=[switches])

    def choose(self, chosen: Collection[int]) -> Callable[[Feed], dict[str, Array]]:
        """Return a function that computes the outputs with the layers of these indices quantized."""
        switches = np.zeros(len(self._layers), np.float32)
        switches[list(chosen)] = 1
        return lambda feed: self._module.run({**feed, SWITCHES: switches})
