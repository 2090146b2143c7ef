"""Workloads: the lowered kernels of a model, under keys that are stable across builds and models.

A workload is a kernel with normalized names. Its key is the digest of its structure, so two layers with equal shapes
are one workload, in one model or in two. Everything that tuning stores refers to the normalized form (traces name
blocks), and never to the names in a model.

A kernel with dynamic shapes contains the sizes at which it is measured, and its size variables are named in the order
of its shapes. So its key does not depend on a recipe's names of dimensions, but on the tuning sizes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from tvmflow.core.statistics import geometric_means

if TYPE_CHECKING:
    import tvm

# Not part of the key: a kernel's name and its fusion class do not matter for its schedule.
_IGNORED_ATTRIBUTES: Final = ("global_symbol", "op_pattern")
_ROOT: Final = "root"
_CALL_OPERATORS: Final = frozenset(
    {"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"}
)


class Workload(NamedTuple):
    """One kernel of a model.

    Attributes:
        names: The functions of the lowered module that are this workload.
        weight: The number of calls per inference.
        flops: Arithmetic operations per call; for dynamic shapes the geometric mean over the tuning sizes.
        untunable_reason: Why no schedule is searched for it; empty if one is.
        mod: The saved normalized module; empty for a library function that TVM only calls.
        has_dynamic_shape: Whether sizes vary from call to call.
    """

    key: str
    names: tuple[str, ...]
    weight: int
    flops: float
    untunable_reason: str
    mod: str
    has_dynamic_shape: bool = False


# ---------------------------------------------------------------- normalized names


def normalize(function: tvm.tirx.PrimFunc) -> tvm.IRModule:
    """Return a kernel as `main` of its own module, with blocks `b0, b1, …` and variables `v0, v1, …`."""
    import tvm

    from tvmflow.graph.dynamic_shapes import DYNAMIC_SHAPES, TUNED_SIZES
    from tvmflow.graph.ir import load_json

    sizes = _list_kernel_sizes(function)
    for name in (*_IGNORED_ATTRIBUTES, *((DYNAMIC_SHAPES, TUNED_SIZES) if sizes else ())):
        if name in function.attrs:
            function = function.without_attr(name)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    graph = json.loads(tvm.ir.save_json(module))
    nodes: list[dict[str, Any]] = graph["nodes"]
    strings: dict[str, int] = {}

    def string_node(text: str) -> int:
        if text not in strings:
            strings[text] = len(nodes)
            nodes.append({"type": "ffi.String", "data": text})
        return strings[text]

    variables = blocks = 0
    no_span = len(nodes)
    nodes.append({"type": "None"})
    for node in list(nodes):
        # The location in a source file does not matter either.
        if isinstance(node.get("data"), dict) and "span" in node["data"]:
            node["data"]["span"] = no_span
        if node["type"] == "ir.Var":
            node["data"]["name"] = string_node(f"v{variables}")
            variables += 1
        # Other blocks are renamed, except the root, which MetaSchedule finds by its name.
        elif node["type"] == "s_tir.SBlock" and nodes[node["data"]["name_hint"]]["data"] != _ROOT:
            node["data"]["name_hint"] = string_node(f"b{blocks}")
            blocks += 1
    normalized = load_json(json.dumps(graph))
    return _with_sizes(normalized, sizes) if sizes else normalized


# ---------------------------------------------------------------- dynamic shapes


class _KernelSize(NamedTuple):
    """The sizes of a size variable: `decided` for schedule decisions, `tuned` for measurements."""

    decided: int
    tuned: tuple[int, ...]


def _list_kernel_sizes(function: tvm.tirx.PrimFunc) -> list[_KernelSize]:
    """Return the sizes of a kernel's size variables, in order; empty if a variable has none."""
    from tvmflow.graph.dynamic_shapes import DYNAMIC_SHAPES, TUNED_SIZES, list_size_variables

    attributes = function.attrs or {}
    known, tuned = attributes.get(DYNAMIC_SHAPES, {}), attributes.get(TUNED_SIZES, {})
    names = [str(var.name) for var in list_size_variables(function)]
    if not all(name in known and name in tuned for name in names):
        return []
    return [_KernelSize(int(known[name]), tuple(map(int, tuned[name]))) for name in names]


def _with_sizes(mod: tvm.IRModule, sizes: Sequence[_KernelSize]) -> tvm.IRModule:
    import tvm

    from tvmflow.graph.dynamic_shapes import list_size_variables, with_tuned_sizes

    function = mod["main"]
    names = [str(var.name) for var in list_size_variables(function)]
    pairs = list(zip(names, sizes, strict=True))
    decided = {name: entry.decided for name, entry in pairs}
    tuned = {name: entry.tuned for name, entry in pairs}
    return tvm.IRModule({"main": with_tuned_sizes(function, decided, tuned)})


def list_measured_sizes(mod: tvm.IRModule) -> list[dict[Any, int]]:
    """Return the values of the size variables for each measurement; `[{}]` if there are none."""
    return list_compared_sizes(mod)[:-1] or [{}]


def list_compared_sizes(mod: tvm.IRModule) -> list[dict[Any, int]]:
    """Return the values of the size variables for each comparison of results; empty for fixed shapes."""
    from tvmflow.graph.dynamic_shapes import list_size_variables

    variables, sizes = list_size_variables(mod["main"]), _list_kernel_sizes(mod["main"])
    columns = zip(*(entry.tuned for entry in sizes), strict=True)
    return [dict(zip(variables, column, strict=True)) for column in columns]


def argument_shapes(
    mod: tvm.IRModule, sizes: Mapping[Any, int]
) -> list[tuple[tuple[int, ...], str] | int]:
    """Return the arguments of a workload: (shape, dtype) for a tensor, an int for a size."""
    import tvm

    from tvmflow.graph.ir import replace_variables

    values = {var: tvm.tirx.IntImm(var.ty.dtype, number) for var, number in sizes.items()}

    def evaluate(extent: Any) -> int:
        if values and not isinstance(extent, int | tvm.tirx.IntImm):
            extent = tvm.sym.Analyzer().simplify(replace_variables(extent, values))
        return int(extent)

    return [
        (tuple(map(evaluate, param.ty.shape)), str(param.ty.dtype.dtype))
        if hasattr(param.ty, "shape")
        else sizes[param]
        for param in mod["main"].params
    ]


def shapes_text(mod: tvm.IRModule) -> tuple[str, ...]:
    """Return readable texts of a workload's tensors, such as `float32[16|128×384]`."""
    points = [argument_shapes(mod, sizes) for sizes in list_measured_sizes(mod)]
    texts = []
    for tensors in zip(*points, strict=True):
        if not isinstance(tensors[0], int):
            axes = zip(*(shape for shape, _ in tensors), strict=True)
            extents = ["|".join(map(str, dict.fromkeys(axis))) for axis in axes]
            texts.append(f"{tensors[0][1]}[{'×'.join(extents)}]")
    return tuple(texts)


def count_operations(mod: tvm.IRModule, sizes: Mapping[Any, int]) -> float:
    """Return TVM's estimate of the arithmetic operations per call; 0 if TVM has no estimate."""
    import tvm

    from tvmflow.graph.ir import replace_variables

    function = mod["main"]
    if sizes:
        values = {var: tvm.tirx.IntImm(var.ty.dtype, number) for var, number in sizes.items()}
        tensors = [param for param in function.params if hasattr(param.ty, "shape")]
        function = tvm.tirx.PrimFunc(tensors, replace_variables(function.body, values))
        mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    try:
        return float(tvm.s_tir.analysis.estimate_tir_flops(mod))
    except (RuntimeError, ValueError, TypeError):
        return 0.0


# ---------------------------------------------------------------- the durable key


def workload_key(mod: tvm.IRModule) -> str:
    """Return the sha256 (hex) of the structure of a normalized module's `main`.

    Two kernels have the same key exactly if TVM's structural equality holds for them. TVM's own structural hash is
    not stable: it is valid only for one build and one process.
    """
    with _deep_recursion():
        return _Digester().function(mod["main"])


class _Digester:
    """Digests a TVM object by reflection: all fields that structural equality compares.

    A variable is digested as its index in the order of first use. A shared subexpression has the same digest as two
    equal ones.
    """

    def __init__(self) -> None:
        self._count = 0
        self._variable_types: list[bytes] = []
        self._digests: dict[int, bytes] = {}

    def function(self, function: tvm.tirx.PrimFunc) -> str:
        structure = self._digest(function)
        return hashlib.sha256(structure + b"".join(self._variable_types)).hexdigest()

    def _digest(self, value: Any) -> bytes:
        kind = cast(Hashable, type(value))
        form = _form_of(kind)
        if form == "object":
            handle = value.__chandle__()
            handle = handle if isinstance(handle, int) else handle.value
            digest = self._digests.get(handle)
            return self._object_digest(value, handle) if digest is None else digest
        if form == "list":
            # a slice of a TVM array is a Python list, which is faster to read
            return _hashed(b"list", *[self._digest(entry) for entry in value[:]])
        if form == "map":
            items = sorted((self._digest(key), self._digest(entry)) for key, entry in value.items())
            return _hashed(b"map", *(part for item in items for part in item))
        return _hashed_text(_type_name(kind), str(value))

    def _object_digest(self, value: Any, handle: int) -> bytes:
        import tvm

        if isinstance(value, tvm.ir.Var):
            index, self._count = self._count, self._count + 1
            # Store the digest before the type is digested, because a shape may contain the variable itself.
            digest = self._digests[handle] = _hashed_text(b"variable", str(index))
            self._variable_types.append(b"")
            self._variable_types[index] = self._digest(value.ty)
        elif isinstance(value, tvm.ir.Op):
            digest = _hashed_text(b"operator", value.name)
        elif isinstance(value, tvm.runtime.Tensor):
            array = value.numpy()
            digest = _hashed(
                b"tensor", str(value.dtype).encode(), str(array.shape).encode(), array.tobytes()
            )
        else:
            start, fields = _fields(cast(Hashable, type(value)))
            parts = [start]
            for name, getter in fields:
                parts += (name, self._digest(getter(value)))
            digest = hashlib.sha256(b"".join(parts)).digest()
        self._digests[handle] = digest
        return digest


# Cached: a kernel has thousands of values, but few types.
@functools.cache
def _form_of(kind: Any) -> Literal["object", "list", "map", "text"]:
    import tvm_ffi

    if issubclass(kind, tvm_ffi.Object) and not issubclass(kind, tvm_ffi.Array | tvm_ffi.Map):
        return "object"
    if issubclass(kind, Mapping):
        return "map"
    return "list" if issubclass(kind, Sequence) and not issubclass(kind, str) else "text"


@functools.cache
def _fields(kind: Any) -> tuple[bytes, list[tuple[bytes, Any]]]:
    """Return the prefix of an object's digest, and the prefix and getter of each field to compare."""
    info = kind.__tvm_ffi_type_info__
    start = _framed(info.type_key.encode())
    # the length prefix of every digest
    length = _framed(bytes(hashlib.sha256().digest_size))[:_LENGTH_BYTES]
    fields = []
    while info is not None:
        fields += [
            (_framed(field.name.encode()) + length, field.getter)
            for field in info.fields
            if field.c_structural_eq != "ignore"
        ]
        info = info.parent_type_info
    return start, fields


@functools.cache
def _type_name(kind: Any) -> bytes:
    for known in (bool, int, float, str):
        if issubclass(kind, known):
            return known.__name__.encode()
    return b"none" if kind is type(None) else b"other"


_LENGTH_BYTES: Final = 8


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(_LENGTH_BYTES, "little") + part


def _hashed(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(map(_framed, parts))).digest()


@functools.lru_cache(maxsize=1 << 16)
def _hashed_text(name: bytes, text: str) -> bytes:
    """Return the digest of a named text; cached, because kernels have few different texts."""
    return _hashed(name, text.encode())


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Raise the recursion limit for deeply nested expressions, such as a concatenation of 100 tensors."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


# ---------------------------------------------------------------- the workloads of a model


def extract_workloads(lowered: tvm.IRModule) -> list[Workload]:
    """Return the kernels that a lowered module calls; the most work per inference first.

    Functions with equal keys are one workload, whose calls are added.
    """
    workloads: dict[str, Workload] = {}
    for name, calls in sorted(_count_calls(lowered).items()):
        workload = _workload(lowered, name, calls)
        if workload.key in workloads:
            first = workloads[workload.key]
            workload = first._replace(
                names=(*first.names, name), weight=first.weight + workload.weight
            )
        workloads[workload.key] = workload
    return sorted(
        workloads.values(), key=lambda workload: (-workload.weight * workload.flops, workload.key)
    )


def _count_calls(lowered: tvm.IRModule) -> dict[str, int]:
    import tvm
    from tvm import relax

    counts: dict[str, int] = {}

    def count(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            callee = expr.args[0] if expr.op.name in _CALL_OPERATORS else None
            name = getattr(callee, "name_hint", None) or getattr(callee, "global_symbol", None)
            if name is not None:
                counts[str(name)] = counts.get(str(name), 0) + 1

    for _, function in lowered.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, count)
    return counts


def _workload(lowered: tvm.IRModule, name: str, calls: int) -> Workload:
    import tvm

    functions = {var.name_hint: function for var, function in lowered.functions_items()}
    function = functions.get(name)
    if not isinstance(function, tvm.tirx.PrimFunc):
        key = hashlib.sha256(f"extern:{name}".encode()).hexdigest()
        return Workload(
            key=key,
            names=(name,),
            weight=calls,
            flops=0.0,
            untunable_reason="a library function that TVM only calls",
            mod="",
        )
    mod = normalize(function)
    flops = [count_operations(mod, sizes) for sizes in list_measured_sizes(mod)]
    return Workload(
        key=workload_key(mod),
        names=(name,),
        weight=calls,
        flops=geometric_means([[value] for value in flops])[0] if all(flops) else 0.0,
        untunable_reason=_untunable_reason(function, mod),
        mod=tvm.ir.save_json(mod),
        has_dynamic_shape=bool(list_compared_sizes(mod)),
    )


def _untunable_reason(function: tvm.tirx.PrimFunc, mod: tvm.IRModule) -> str:
    from tvmflow.graph import ir

    if ir.is_scheduled(function):
        return "it comes with a schedule"
    if not _has_static_shapes(function) and not list_compared_sizes(mod):
        return "its shapes are known only when it runs"
    if ir.is_view(function):
        return "it only renames a shape, which costs nothing in the library"
    blocks = _list_blocks(mod["main"])
    if not any(block.name_hint != _ROOT for block in blocks):
        return "it is written as plain loops, which a schedule cannot move"
    if not any(block.iter_vars for block in blocks):
        return "it only calls a library function"
    # TVM's search fails when it moves a block that is read at constant indices
    names = {block.name_hint for block in _list_blocks(function)}
    if not names.isdisjoint(ir.WINOGRAD_COLUMNS):
        return "its transforms read constant indices, which TVM's search cannot move"
    return ""


def _list_blocks(function: tvm.tirx.PrimFunc) -> list[Any]:
    import tvm
    import tvm_ffi

    blocks: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tvm.s_tir.SBlock, blocks.append))
    return blocks


def _has_static_shapes(function: tvm.tirx.PrimFunc) -> bool:
    import tvm

    return all(
        hasattr(variable.ty, "shape")
        and all(isinstance(extent, int | tvm.tirx.IntImm) for extent in variable.ty.shape)
        for variable in function.params
    )
