"""Libraries that return intermediate tensors; inputs of argmax, and ties in them.

The imported model with intermediate tensors as outputs is compiled with the weights of the delivered library, and with
its schedules for all kernels that are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from tvmflow.compiler import LoweredModel, ScheduledModel, load_intrinsics, lower
from tvmflow.core.errors import StageError
from tvmflow.core.types import Array, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import index_inputs, ir
from tvmflow.graph.counts import COUNT_ATTRIBUTES, SIZES_NEEDED
from tvmflow.graph.dynamic_shapes import read_dimensions, with_dimensions
from tvmflow.graph.index_inputs import find_nodes_of
from tvmflow.runtime.module import Module
from tvmflow.runtime.programs import PartProgram
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages.build import BuildSettings, schedule_kernels
from tvmflow.stages.verify.comparison import Tolerance
from tvmflow.stages.verify.inputs import ImportedModel
from tvmflow.stages.verify.libraries import LocalLibrary
from tvmflow.stages.verify_settings import LOCAL, VerifySettings
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.workloads import normalize, workload_key

_log = logging.getLogger(__name__)


def load_inner(
    mod: tvm.IRModule,
    variables: Sequence[Any],
    model: ImportedModel,
    settings: VerifySettings,
    files: Mapping[str, Path],
    dtypes: Sequence[str] = (),
) -> LoadedModel | None:
    """Return a model with variables as additional outputs, restricted to `dtypes`; None if impossible."""
    if settings.quantized:
        return return_inner(mod, variables, model, files, dtypes)
    return load_with_inner(mod, variables, model, settings.model["kind"], files, dtypes)


def load_with_inner(
    mod: tvm.IRModule,
    variables: Sequence[Any],
    model: ImportedModel,
    kind: str,
    files: Mapping[str, Path],
    dtypes: Sequence[str] = (),
) -> LoadedModel | None:
    """Import a model again, with some variables as additional outputs.

    `dtypes` restricts the returned tensors. None if the frontend has no names for the tensors.
    """
    frontend = FRONTENDS[kind]
    tensors = frontend.list_tensors(model.files)
    if not tensors:
        return None
    plain = model.load(kind)
    if not tvm_ffi.structural_equal(plain.mod, mod):
        _log.debug("the model is no longer imported as for this library")
        return None
    nodes = set(find_nodes_of(mod["main"], variables, plain.nodes).values())
    names = tuple(name for name, node in tensors.items() if node in nodes)
    loaded = model.load(kind, names)
    if SIZES_NEEDED in loaded.mod["main"].attrs and SIZES_NEEDED not in mod["main"].attrs:
        raise StageError("sizes of its tensors are known only after a call")
    # rows beyond a data-dependent length are undefined, so such tensors are left out
    kept = tuple(
        spec.name
        for spec in loaded.tensors
        if spec.bounded_axis is None and (not dtypes or spec.dtype in dtypes)
    )
    if kept != tuple(spec.name for spec in loaded.tensors):
        loaded = model.load(kind, kept)
    weights = read_safetensors(files["import/params.safetensors"])
    if not loaded.tensors or not loaded.params.keys() <= weights.keys():
        return None
    return loaded._replace(params={name: weights[name] for name in loaded.params})


def cut_at_inner(loaded: LoadedModel) -> LoadedModel | None:
    """Return a model that reads each intermediate tensor from an additional input; None with control flow.

    Each tensor is then computed from the reference's tensors before it, so errors do not accumulate.
    """
    if not ir.is_straight_line(loaded.mod):
        return None
    main = loaded.mod["main"]
    outputs = ir.list_outputs(main)
    count = len(loaded.outputs)
    inner, counts = outputs[count:][: len(loaded.tensors)], outputs[count + len(loaded.tensors) :]
    inputs_of = {var: relax.Var(f"inner_{index}", var.ty) for index, var in enumerate(inner)}
    computed = {var: relax.Var(f"computed_{index}", var.ty) for index, var in enumerate(inputs_of)}
    bindings = []
    for binding in main.body.blocks[0].bindings:
        var = binding.var
        if var in inputs_of:
            bindings.append(relax.VarBinding(computed[var], binding.value))
            bindings.append(relax.VarBinding(var, inputs_of[var]))
        else:
            bindings.append(binding)
    results = [*outputs[:count], *(computed[var] for var in inner), *counts]
    mod = _make_main(loaded.mod, bindings, results, tuple(inputs_of.values()))
    specs = dict(zip(inputs_of, loaded.tensors, strict=True))
    return loaded._replace(mod=mod, inputs=(*loaded.inputs, *specs.values()))


def return_inner(
    mod: tvm.IRModule,
    variables: Sequence[Any],
    model: ImportedModel,
    files: Mapping[str, Path],
    dtypes: Sequence[str] = (),
) -> LoadedModel | None:
    """Return a model that no framework file has, with some variables as additional outputs.

    `dtypes` restricts the returned tensors. None for models with control flow or dynamic shapes.
    """
    main = mod["main"]
    if not ir.is_straight_line(mod):
        return None
    outputs, count = ir.list_outputs(main), len(model.outputs)
    left = {
        var: f"{ir.operator_name(binding.value).removeprefix('relax.')} {index}"
        for index, binding in enumerate(ir.list_bindings(main.body))
        for var in variables
        if binding.var.same_as(var) and var not in set(outputs)
    }
    shapes = {var: ir.shape_of(var) for var in left}
    if any(shape is None for shape in shapes.values()):
        return None
    specs = {
        var: TensorSpec(name, tuple(shapes[var] or ()), ir.dtype_of(var))
        for var, name in left.items()
    }
    specs = {var: spec for var, spec in specs.items() if not dtypes or spec.dtype in dtypes}
    results = [*outputs[:count], *specs, *outputs[count:]]
    weights = read_safetensors(files["import/params.safetensors"])
    made = _make_main(mod, ir.list_bindings(main.body), results)
    params = [str(var.name) for var in ir.list_weights(made["main"])]
    return LoadedModel(
        mod=made,
        params={name: weights[name] for name in params},
        inputs=tuple(spec for spec in model.inputs if spec.name not in model.bound),
        outputs=model.outputs,
        tensors=tuple(specs.values()),
    )


def _make_main(
    mod: tvm.IRModule, bindings: Sequence[Any], results: Sequence[Any], inputs: Sequence[Any] = ()
) -> tvm.IRModule:
    """Return a module whose `main` has these bindings and results, and additional inputs."""
    main = mod["main"]
    ends = [relax.Var(f"out_{index}", var.ty) for index, var in enumerate(results)]
    bindings = [*bindings, *(relax.VarBinding(*pair) for pair in zip(ends, results, strict=True))]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], relax.Tuple(ends))
    count = int(main.attrs["num_input"])
    params = [*main.params[:count], *inputs, *main.params[count:]]
    made = relax.Function(params, body, body.body.ty, is_pure=True).with_attrs(
        {
            "num_input": count + len(inputs),
            "global_symbol": "main",
            **{name: main.attrs[name] for name in COUNT_ATTRIBUTES if name in main.attrs},
        }
    )
    changed = ir.copy_module(mod)
    changed[mod.get_global_var("main")] = made
    changed = relax.transform.CanonicalizeBindings()(changed)
    return relax.transform.DeadCodeElimination(["main"])(changed)


@dataclass(frozen=True)
class InnerLibrary:
    """A model that also returns intermediate tensors, lowered and scheduled like the delivered one."""

    loaded: LoadedModel
    lowered: LoweredModel
    scheduled: ScheduledModel

    @classmethod
    def schedule(
        cls, loaded: LoadedModel, settings: VerifySettings, files: Mapping[str, Path]
    ) -> InnerLibrary:
        """Lower and schedule a model with the settings and the chosen schedules of `build`."""
        machine = settings.machines[""].tvm
        assert settings.lowering is not None and settings.schedules is not None
        load_intrinsics(machine)
        target = make_target(machine)
        build = BuildSettings(target=machine, schedules=settings.schedules, runtime="", forms=())
        mod = ir.copy_module(loaded.mod)
        if dimensions := read_dimensions(mod["main"]):
            # the lowering depends on the tuning sizes, so set them as the stage `lower` does
            tuned = settings.add_tuning_sizes(dimensions)
            mod.update_func(mod.get_global_var("main"), with_dimensions(mod["main"], tuned))
        lowered = lower(mod, target, settings.lowering)
        scheduled, _ = schedule_kernels(lowered.mod, build, files, must_fit=False)
        weights = lowered.compute_weights(loaded.params)
        return cls(loaded, lowered, ScheduledModel(scheduled, weights, target))

    def load(self, library: LocalLibrary) -> Module:
        """Compile it for this process, with the runtime of `library`."""
        loaded = self.loaded
        return library.load_variant_of(
            self.scheduled,
            loaded.inputs,
            (*loaded.outputs, *loaded.tensors),
            library.module.dimensions,
        )

    def list_shared(self, delivered: tvm.IRModule) -> set[str]:
        """Return the intermediate tensors that the delivered library stores, computed with the same kernels."""
        keys = {
            workload_key(normalize(kernel))
            for kernel in delivered.functions.values()
            if isinstance(kernel, tvm.tirx.PrimFunc)
        }
        lowered, scheduled = self.lowered.mod, self.scheduled.mod
        # counts of data-dependent outputs may follow
        outputs = ir.list_outputs(lowered["main"])[len(self.loaded.outputs) :]
        values = ir.DataFlow(lowered["main"]).values
        shared = set()
        for spec, var in zip(self.loaded.tensors, outputs, strict=False):
            kernels = _list_kernels_before(values, var) or ()
            # If only views (or nothing) compute the tensor, it is a reshaped input, which stays in the caller's
            # memory. Look at the scheduled kernels, like the executor: only these show that a kernel fused from two
            # copies is a view.
            if all(ir.is_view(scheduled[kernel]) for kernel in kernels):
                continue
            if all(workload_key(normalize(lowered[kernel])) in keys for kernel in kernels):
                shared.add(spec.name)
        return shared


def _list_kernels_before(values: Mapping[Any, Any], var: Any) -> set[str] | None:
    """Return all kernels that a variable depends on; None if it depends on a condition."""
    kernels, left, seen = set(), [var], set()
    while left:
        current = left.pop()
        if current in seen or current not in values:
            continue
        seen.add(current)
        value = values[current]
        if isinstance(value, relax.If):
            return None
        if ir.operator_name(value) == "relax.call_tir":
            kernels.add(str(value.args[0].name_hint))
        left += ir.list_variables(value)
    return kernels


def find_in_memory(
    library: LocalLibrary, feed: Mapping[str, Array], tensors: Mapping[str, Array]
) -> set[str]:
    """Run a library, and return the tensors whose bytes are in its memory after any of its kernels."""
    contents = {name: np.ascontiguousarray(array).tobytes() for name, array in tensors.items()}
    seen: set[str] = set()

    def observe(memory: bytes | bytearray) -> None:
        seen.update(n for n, content in contents.items() if n not in seen and content in memory)

    inputs = [np.ascontiguousarray(feed[spec.name]) for spec in library.inputs]
    program = cast(PartProgram, library.module.program)
    for result in program.watch(inputs, observe):
        observe(result.tobytes())
    return seen


# ---------------------------------------------------------------- indices

# The relative rounding error of scores that a kernel computes together with the index.
_ROUNDING: Final = 2.0**-21


class IndexInputs(NamedTuple):
    """The inputs of argmax-like operators of a model.

    Attributes:
        outputs: The names of the outputs that are indices.
        selects: Whether an index selects data that the model returns or computes with.
        loaded: The model with these tensors as additional outputs; None if they cannot be compared.
        reason: The reason why they cannot be compared; empty if they can.
    """

    outputs: tuple[str, ...]
    selects: bool
    loaded: LoadedModel | None
    reason: str = ""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that can be compared; none without `loaded`."""
        return self.loaded.tensors if self.loaded else ()


def find_index_inputs(
    mod: tvm.IRModule, model: ImportedModel, settings: VerifySettings, files: Mapping[str, Path]
) -> IndexInputs | None:
    """Return the inputs of argmax-like operators; None for a model without such operators."""
    model_indices = index_inputs.find_indices(mod["main"])
    # after the outputs follow the counts of data-dependent outputs
    outputs = tuple(spec.name for n, spec in enumerate(model.outputs) if n in model_indices.outputs)
    if not model_indices.inputs:
        return None
    unloaded = IndexInputs(outputs, model_indices.selects, None)
    if reason := no_inner_reason(settings):
        return unloaded._replace(reason=reason)
    try:
        loaded = load_inner(mod, model_indices.inputs, model, settings, files)
    except StageError as error:
        return unloaded._replace(reason=f"the import cannot return it: {error}")
    if loaded is None and settings.quantized:
        return unloaded._replace(reason="a condition decides on it, or its shape is dynamic")
    if loaded is None:
        name = FRONTENDS[settings.model["kind"]].REFERENCE.name
        return unloaded._replace(reason=f"it has no name by which {name} returns it")
    return unloaded._replace(loaded=loaded)


def no_inner_reason(settings: VerifySettings) -> str:
    """Return why intermediate tensors of a library cannot be compared, or an empty string."""
    if settings.run_on != LOCAL:
        return "the library runs on another machine"
    if settings.lowering is None or len(settings.machines) != 1:
        return "the model is in parts"
    [machine] = settings.machines.values()
    return "" if machine.tvm["kind"] == "llvm" else "the library runs on a GPU"


def list_clear_indices(
    indices: IndexInputs, expected: Sequence[Mapping[str, Array]], tolerance: Tolerance
) -> tuple[str, ...]:
    """Return the index outputs for which more inputs may be drawn: none if ties would look like errors."""
    names = [spec.name for spec in indices.tensors]
    if names:
        is_clear = all(find_index(output, names, expected) for output in indices.outputs)
    else:
        # only float32 scores (which have `of_slice`) are seldom equal
        is_clear = tolerance.of_slice > 0
    return indices.outputs if is_clear and not indices.selects else ()


class Index(NamedTuple):
    """An argmax or argmin of `tensor` along an axis."""

    tensor: str
    axis: int
    is_largest: bool


def find_index(
    name: str, tensors: Iterable[str], expected: Sequence[Mapping[str, Array]]
) -> Index | None:
    """Find, by the reference's values, which tensor an output is the argmax or argmin of, if any."""
    for tensor in tensors:
        for axis in range(expected[0][tensor].ndim):
            for is_largest in (True, False):
                index = Index(tensor, axis, is_largest)
                if all(_is_index_of(batch[name], batch[tensor], index) for batch in expected):
                    return index
    return None


def _is_index_of(indices: Array, scores: Array, index: Index) -> bool:
    positions = _read_positions(indices, scores, index.axis)
    if positions is None:
        return False
    best = _best(scores, index, positions.shape[index.axis])
    return bool(np.array_equal(np.take_along_axis(scores, positions, index.axis), best))


def _read_positions(indices: Array, scores: Array, axis: int) -> Array | None:
    """Reshape indices for `take_along_axis`; None if they cannot be indices along the axis."""
    length = scores.shape[axis]
    others = scores.size // length if length else 0
    if length < 2 or not others or not indices.size or indices.size % others:
        return None
    shape = (*scores.shape[:axis], indices.size // others, *scores.shape[axis + 1 :])
    if [n for n in shape if n > 1] != [n for n in indices.shape if n > 1]:
        return None
    positions: Array = np.asarray(indices).astype(np.int64).reshape(shape)
    is_within = (positions == indices.reshape(shape)) & (positions >= 0) & (positions < length)
    return positions if bool(is_within.all()) else None


def _best(scores: Array, index: Index, count: int) -> Array:
    """Return the `count` largest or smallest elements along an axis, the best one first."""
    ordered = np.sort(scores, axis=index.axis)
    if index.is_largest:
        ordered = np.flip(ordered, axis=index.axis)
    return np.take(ordered, range(count), axis=index.axis)


def settle_ties(
    actual: Array,
    expected: Array,
    own: Mapping[str, Array],
    right: Mapping[str, Array],
    index: Index,
) -> Array:
    """Replace indices by the reference's where they are right for the library's own scores, `own`."""
    if np.array_equal(actual, expected):
        return actual
    scores = own[index.tensor]
    positions = _read_positions(actual, scores, index.axis)
    if (
        positions is None
        or not (np.diff(np.sort(positions, axis=index.axis), axis=index.axis) > 0).all()
    ):
        return actual
    best = _best(scores, index, positions.shape[index.axis]).astype(np.float64)
    chosen = np.take_along_axis(scores, positions, index.axis).astype(np.float64)
    errors = np.abs(scores.astype(np.float64) - right[index.tensor].astype(np.float64))
    allowed = 2 * errors.max() + _ROUNDING * np.abs(best).max()
    is_tie = (np.abs(chosen - best) <= allowed).reshape(actual.shape)
    return np.where(is_tie, expected, actual)
