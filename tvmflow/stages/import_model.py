"""`import`: convert a framework's model to Relax, its weights, and a signature."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import Field

from tvmflow.core import fork_server_process
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import omits_empty, without_empty
from tvmflow.core.dimensions import WrongSize, evaluate_shape, largest_shape, list_names
from tvmflow.core.errors import ImportFailed
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import excerpt, names_text, quoted
from tvmflow.core.generated_text import find_name_problem
from tvmflow.core.memory import CpuTimeExceeded, limit_cpu_time
from tvmflow.core.types import Dimension, Json, Size, State, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import DYNAMIC_FIX, InputRequest, LoadedModel
from tvmflow.frontends.inputs import DEFAULT_DTYPE, array_of, check_inputs, resolve_inputs
from tvmflow.frontends.states import list_growing, pair_states, store_states
from tvmflow.recipe import Recipe
from tvmflow.stages.base import (
    Settings,
    StageContext,
    StageSettings,
    StageTraits,
    no_files,
    no_lines,
)
from tvmflow.stages.images import LABELS, UNKEYED_LABELS, read_labels
from tvmflow.targets.resolve import PartitionedTarget

if TYPE_CHECKING:
    import numpy as np
    import tvm

NAME: Final = "import"
TRAITS: Final = StageTraits(
    version=29,
    scope="model",
    reads=("model", "operators", UNKEYED_LABELS),
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    weights=("params.safetensors",),
)
deliveries = no_files
describe = explain = no_lines

MODEL: Final = "model.json"
PARAMS: Final = "params.safetensors"
SIGNATURE: Final = "signature.json"
# The limit on CPU time, because a model file is not trusted. The stage's own timeout is longer, for machines that
# have other work, too.
_MIN_CPU_S: Final = 900
_BYTES_PER_S: Final = 1 << 20
# The prefixes of operators that move a window over data.
_WINDOWS: Final = ("relax.nn.conv", "relax.nn.avg_pool", "relax.nn.max_pool")

# The values of `multiple_of` to suggest: downsampling factors of networks whose skip connections need equal sizes.
_MULTIPLES: Final = (2, 4, 8, 16, 32, 64)
_MAX_MINIMA: Final = 4

OF_STATES: Final = ("states", "model")
"""Additional fields in the signature of a model with states: the states, and the digest of its files."""

NODES: Final = "nodes.json"
"""For each binding of `main`, its node in the user's model; only for reports, without effect on code."""


class InputSettings(Settings):
    """What the recipe says about an input of the model."""

    shape: tuple[Size, ...] | None = None
    dtype: str | None = None
    value: Json = None


class DimensionSettings(Settings):
    """The range of a dynamic dimension; tuning sizes do not affect the imported model."""

    min: int
    max: int
    multiple_of: int = 1


class ImportSettings(StageSettings):
    """The model's kind (not its path), inputs, dimensions, and the tensors at which it is cut.

    `state` holds the output of each state, and `state_dtype` its dtype, where that is not the model's.
    """

    model: dict[str, Json]
    inputs: dict[str, InputSettings]
    tensors: tuple[str, ...] = ()
    dimensions: dict[str, DimensionSettings] = Field(default={})
    state: dict[str, str] = Field(default={})
    state_dtype: dict[str, str] = Field(default={})


def settings(recipe: Recipe, target: PartitionedTarget | None) -> ImportSettings:
    """Return what the imported model depends on, besides the content of its files."""
    return ImportSettings(
        model={"kind": recipe.model.kind},
        # an input without a shape gets its dtype from the model
        inputs={
            name: InputSettings(
                shape=spec.shape,
                dtype=spec.dtype or (None if spec.shape is None else DEFAULT_DTYPE),
                value=spec.value,
            )
            for name, spec in recipe.inputs.items()
        },
        tensors=target.cut_tensors if target else (),
        dimensions={
            entry.name: DimensionSettings.model_validate(entry)
            for entry in recipe.list_dimensions()
        },
        state={name: spec.output for name, spec in recipe.state.items()},
        state_dtype={name: spec.dtype for name, spec in recipe.state.items() if spec.dtype},
    )


@omits_empty("tensors", "bound", "dimensions")
class ImportFacts(NamedTuple):
    """The facts of a model, or of a part of one.

    Attributes:
        weight_bytes: The size of the weights in bytes; None if another version did not record it.
        operators: The count of calls of each TVM operator.
        nodes: The node of the user's model for each binding of `main`.
        tensors: The intermediate tensors at which the model can be cut.
        bound: The constant inputs, with their values.
    """

    weights: int = 0
    weight_bytes: int | None = None
    operators: Mapping[str, int] = MappingProxyType({})
    nodes: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()
    bound: tuple[Json, ...] = ()
    dimensions: tuple[Dimension, ...] = ()


def run(settings: ImportSettings, context: StageContext) -> ImportFacts:
    """Import the model, and write it in several files, so that a later stage can depend on only some."""
    seconds = (
        _MIN_CPU_S
        + sum(path.stat().st_size for path in context.inputs.values() if path.is_file())
        // _BYTES_PER_S
    )
    if fork_server_process.is_child:
        limit_cpu_time(seconds)
    try:
        return _import(settings, context)
    except CpuTimeExceeded:
        raise ImportFailed(
            f"importing the model takes more than {seconds} s of CPU time, the limit for its size",
            fix="export the model again, with fewer operators and simpler shapes",
        ) from None


def _import(settings: ImportSettings, context: StageContext) -> ImportFacts:
    entries = sorted(settings.dimensions.items())
    dimensions = tuple(Dimension(name, e.min, e.max, e.multiple_of) for name, e in entries)
    try:
        loaded, constants = _load(settings, dimensions, context.inputs)
    except ImportFailed as error:
        if DYNAMIC_FIX not in error.fix:
            raise
        advice = _advise_sizes(settings, dimensions, context.inputs, error.message)
        raise ImportFailed(error.message, fix=advice + error.fix) from error
    if LABELS in context.inputs:
        # check labels now: `export` would reject them only after the search
        read_labels(context.inputs[LABELS], loaded.outputs[0])
    if dimensions:
        from tvmflow.graph.dynamic_shapes import with_dimensions

        main = loaded.mod.get_global_var("main")
        loaded.mod.update_func(main, with_dimensions(loaded.mod[main], dimensions))
    _check_sizes(loaded.mod, loaded.nodes)
    more: dict[str, Json] = {}
    own = {state.input: state for state in loaded.states}
    if patterns := {**{name: state.output for name, state in own.items()}, **settings.state}:
        dtypes = settings.state_dtype
        paired = pair_states(patterns, loaded.inputs, loaded.outputs, dimensions, dtypes)
        states = [s._replace(initial=own[s.input].initial) if s.input in own else s for s in paired]
        loaded = store_states(loaded, states)
        _add_states(loaded, states)
        files = {role: hash_file(path) for role, path in context.inputs.items() if path.is_file()}
        listed = [without_empty(state._asdict(), ["stored_as"]) for state in states]
        more = {"states": listed, "model": digest_of(files)}
    signature = {"inputs": loaded.inputs, "outputs": loaded.outputs}
    if settings.tensors:
        signature["tensors"] = loaded.tensors
    return write_model(
        context.out,
        loaded.mod,
        loaded.params,
        signature=signature,
        nodes=loaded.nodes,
        constants=constants,
        dimensions=dimensions,
        more=more,
    )


def _load(
    settings: ImportSettings, dimensions: Sequence[Dimension], files: Mapping[str, Path]
) -> tuple[LoadedModel, list[Json]]:
    frontend = FRONTENDS[settings.model["kind"]]
    requests = [_request_of(name, spec, dimensions) for name, spec in settings.inputs.items()]
    inputs = frontend.read_facts(files).inputs
    check_inputs(inputs, requests)
    specs = resolve_inputs(inputs, requests)
    values = {name: spec.value for name, spec in settings.inputs.items() if spec.value is not None}
    bound = [spec for spec in specs if spec.name in values]
    arrays = {spec.name: array_of(spec, values[spec.name]) for spec in bound}
    # in a part, tensors of data-dependent shape are returned as they are, not padded and counted
    loaded = frontend.load(
        files, specs, settings.tensors, arrays, dimensions, counts_rows=not settings.tensors
    )
    return loaded, [{**spec.to_json(), "value": values[spec.name]} for spec in bound]


def _advise_sizes(
    settings: ImportSettings,
    dimensions: Sequence[Dimension],
    files: Mapping[str, Path],
    message: str,
) -> str:
    """Return the advice of a `min` or `multiple_of` with which the import succeeds; may be empty."""

    def is_possible(tried: Sequence[Dimension]) -> bool:
        try:
            _load(settings, tried, files)
        except ImportFailed:
            return False
        return True

    # sizes in the error message are candidates for `min`: min(n, 5) is constant from n = 5 on
    sizes = sorted({int(number) for number in re.findall(r"\b\d{1,6}\b", message)})
    for size in sizes[:_MAX_MINIMA]:
        for index, entry in enumerate(dimensions):
            raised = -(-size // entry.multiple_of) * entry.multiple_of
            if entry.min < raised < entry.max:
                changed = entry._replace(min=raised)
                if is_possible([*dimensions[:index], changed, *dimensions[index + 1 :]]):
                    return (
                        f"set `min: {raised}` for {entry.name} under `dimensions`, "
                        "with which it can be imported; or "
                    )
    for step in _MULTIPLES:
        entries = list(filter(None, (_by_multiples(entry, step) for entry in dimensions)))
        if len(entries) < len(dimensions) or not is_possible(entries):
            continue
        for index, entry in enumerate(dimensions):
            without = [*entries[:index], entry, *entries[index + 1 :]]
            if is_possible(without):
                entries = without
        names = [e.name for e, was in zip(entries, dimensions, strict=True) if e != was]
        return (
            f"add `multiple_of: {step}` to {names_text(names)} under `dimensions`, "
            "with which it can be imported; or "
        )
    return ""


def _by_multiples(dimension: Dimension, step: int) -> Dimension | None:
    """Restrict a dimension to multiples of `step`; None if fewer than two sizes are left."""
    step = math.lcm(step, dimension.multiple_of)
    least, largest = -(-dimension.min // step) * step, dimension.max // step * step
    return Dimension(dimension.name, least, largest, step) if least < largest else None


def _add_states(loaded: LoadedModel, states: Sequence[State]) -> None:
    from tvmflow.graph.states import with_states

    growing = list_growing(states, loaded.inputs, loaded.outputs)
    main = loaded.mod.get_global_var("main")
    loaded.mod.update_func(main, with_states(loaded.mod[main], growing))


def _request_of(name: str, spec: InputSettings, dimensions: Sequence[Dimension]) -> InputRequest:
    names = {entry for size in spec.shape or () for entry in list_names(size)}
    used = tuple(entry for entry in dimensions if entry.name in names)
    return InputRequest(
        name=name,
        shape=None if spec.shape is None else largest_shape(spec.shape, used),
        dtype=None if spec.dtype == DEFAULT_DTYPE else spec.dtype,
        value=spec.value,
        sizes=spec.shape or () if used else (),
        dimensions=used,
    )


def _check_sizes(mod: tvm.IRModule, nodes: Sequence[str] = ()) -> None:
    """Check that no size is negative, and that no window is larger than its padded data."""
    from tvmflow.graph import ir
    from tvmflow.graph.dynamic_shapes import read_dimensions

    dimensions = read_dimensions(mod["main"])
    extremes = [{d.name: d.min for d in dimensions}, {d.name: d.max for d in dimensions}]
    bindings = ir.list_bindings(mod["main"].body)
    for binding, node in zip(bindings, nodes or [""] * len(bindings), strict=True):
        operator = ir.operator_name(binding.value)
        for known in extremes if dimensions else [{}]:
            text = (
                f" at {', '.join(f'{name} = {size}' for name, size in known.items())}"
                if known
                else ""
            )
            shape = _shape_at(binding.var, known)
            is_window = operator.startswith(_WINDOWS) and bool(shape) and shape[0] > 0
            if min(shape, default=0) < 0 or (is_window and 0 in shape[2:]):
                index = f" (node {excerpt(node)})" if node else ""
                raise ImportFailed(
                    f"the inputs are too small for the model: the result of a {operator.rpartition('.')[2]}{index} "
                    f"would have the shape {list(shape)}{text}",
                    fix="set a larger `min` under `dimensions` in the recipe"
                    if text
                    else "set larger shapes under `inputs` in the recipe",
                )


def _shape_at(var: Any, known: Mapping[str, int]) -> tuple[int, ...]:
    """Return a tensor's shape at some sizes of the dimensions; empty if it also depends on other values."""
    from tvmflow.graph import ir
    from tvmflow.graph.dynamic_shapes import NoSize, size_text, sizes_of

    if not known:
        return ir.shape_of(var) or ()
    try:
        return evaluate_shape(tuple(map(size_text, sizes_of(var) or ())), known)
    except (NoSize, WrongSize):
        return ()


def write_model(
    out: Path,
    mod: tvm.IRModule,
    params: Mapping[str, np.ndarray[Any, Any]],
    signature: Mapping[str, Sequence[TensorSpec]],
    nodes: Sequence[str],
    constants: Sequence[Json] = (),
    dimensions: Sequence[Dimension] = (),
    more: Mapping[str, Json] = MappingProxyType({}),
) -> ImportFacts:
    """Write a model's IR, its weights, its signature and the names of its nodes, and return its facts.

    `main` of `mod` takes inputs, then weights. `nodes` names the source-model node of each of its bindings. `tensors`
    in the signature are intermediate tensors that `main` also returns; the model can be cut at them. `more` holds
    further fields for the signature.

    Raises:
        ImportFailed: if a tensor's name cannot be used in generated code.
    """
    import numpy as np
    import tvm
    from safetensors.numpy import save_file

    from tvmflow.graph.operands import name_checked_nodes

    for kind, specs in signature.items():
        _check_names(kind.removesuffix("s"), specs)
    document = {kind: [spec.to_json() for spec in specs] for kind, specs in signature.items()}
    if constants:
        document["bound"] = list(constants)
    if dimensions:
        document["dimensions"] = [entry.to_json() for entry in dimensions]
    document.update(more)
    (out / MODEL).write_text(tvm.ir.save_json(name_checked_nodes(mod, nodes)))
    # safetensors writes memory as it is: a transposed array must be made contiguous
    save_file({name: np.asarray(array, order="C") for name, array in params.items()}, out / PARAMS)
    (out / SIGNATURE).write_text(json.dumps(document, indent=1, sort_keys=True))
    (out / NODES).write_text(json.dumps(nodes, indent=0))
    return ImportFacts(
        weights=len(params),
        weight_bytes=sum(array.nbytes for array in params.values()),
        operators=_count_operators(mod),
        nodes=tuple(nodes),
        bound=tuple(constants),
        dimensions=tuple(dimensions),
        **{kind: tuple(specs) for kind, specs in signature.items()},
    )


def _check_names(kind: str, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        if problem := find_name_problem(spec.name):
            raise ImportFailed(
                f"the model's {kind} {quoted(spec.name)} {problem}",
                fix="rename it where the model is exported",
            )


def _count_operators(mod: tvm.IRModule) -> dict[str, int]:
    from tvm import relax

    from tvmflow.graph import ir

    calls = Counter(
        ir.operator_name(binding.value).removeprefix("relax.")
        for function in mod.functions.values()
        if isinstance(function, relax.Function)
        for binding in ir.list_bindings(function.body)
    )
    return {name: count for name, count in sorted(calls.items()) if name}
