"""Workloads: the lowered kernels of a model under durable keys.

A workload is a kernel with normalized names. Its key is the digest of its structure, so two
layers of one shape are one workload, in one model or in two. Everything that tuning stores
(traces refer to blocks by name) is about the normalized form, never about the model's own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import tvm

# The name of a kernel and the class that fusion gave it do not matter for its schedule.
_IGNORED_ATTRIBUTES: Final = ("global_symbol", "op_pattern")
_ROOT: Final = "root"
_CALL_OPERATORS: Final = frozenset(
    {"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"}
)
_log = logging.getLogger(__name__)


class Workload(NamedTuple):
    """One kernel of a model.

    Attributes:
        key: The durable key.
        names: The functions of the lowered module that share it.
        weight: Calls in one inference.
        flops: Arithmetic operations of one call.
        untunable_reason: The reason why no schedule is searched for it; otherwise empty.
        mod: The saved normalized module; empty for a library function that TVM only calls.
    """

    key: str
    names: tuple[str, ...]
    weight: int
    flops: float
    untunable_reason: str
    mod: str


# ---------------------------------------------------------------- normalized names


def normalize(function: tvm.tirx.PrimFunc) -> tvm.IRModule:
    """Return a kernel as `main` of its own module, with blocks `b0, b1, …` and variables `v0, v1, …`."""
    import tvm

    for name in _IGNORED_ATTRIBUTES:
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
        # The place of a kernel in a source file does not matter either.
        if isinstance(node.get("data"), dict) and "span" in node["data"]:
            node["data"]["span"] = no_span
        if node["type"] == "ir.Var":
            node["data"]["name"] = string_node(f"v{variables}")
            variables += 1
        # MetaSchedule finds the outermost block by its name.
        elif node["type"] == "s_tir.SBlock" and nodes[node["data"]["name_hint"]]["data"] != _ROOT:
            node["data"]["name_hint"] = string_node(f"b{blocks}")
            blocks += 1
    return tvm.ir.load_json(json.dumps(graph))


# ---------------------------------------------------------------- the durable key


def workload_key(mod: tvm.IRModule) -> str:
    """Return the sha256 (hex) of the structure of a normalized module's `main`.

    Two kernels have the same key exactly when TVM's structural equality holds for them. TVM's
    own structural hash is no durable key: it is defined for one build and one process.
    """
    with _deep_recursion():
        return _Digester().function(mod["main"])


def family_key(mod: tvm.IRModule) -> str:
    """Return the sha256 (hex) of a workload's structure without its numbers: the same for all shapes."""
    with _deep_recursion():
        return _FamilyDigester().function(mod["main"])


class _Digester:
    """Digests a TVM object by reflection: every field that structural equality compares.

    A variable is digested as its index in the order of first use. A shared sub-expression gives
    the same digest as one that is written twice.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._variable_types: list[bytes] = []
        self._digests: dict[int, bytes] = {}

    def function(self, function: tvm.tirx.PrimFunc) -> str:
        structure = self._digest(function)
        return hashlib.sha256(structure + b"".join(self._variable_types)).hexdigest()

    def _digest(self, value: Any) -> bytes:
        import tvm_ffi

        is_object = isinstance(value, tvm_ffi.Object)
        if is_object and not isinstance(value, tvm_ffi.Array | tvm_ffi.Map):
            return self._object_digest(value)
        if isinstance(value, Mapping):
            items = sorted((self._digest(key), self._digest(entry)) for key, entry in value.items())
            return _hashed(b"map", *(part for item in items for part in item))
        if isinstance(value, str) or not isinstance(value, Sequence):
            return _hashed(_type_name(value), str(value).encode())
        return _hashed(b"list", *[self._digest(entry) for entry in value])

    def _object_digest(self, value: Any) -> bytes:
        import tvm

        handle = value.__chandle__()
        handle = handle if isinstance(handle, int) else handle.value
        if handle in self._digests:
            return self._digests[handle]
        if isinstance(value, tvm.ir.Var):
            # Set before its type is digested: a shape may mention the variable itself.
            self._digests[handle] = _hashed(b"variable", str(len(self._numbers)).encode())
            index = self._numbers[handle] = len(self._numbers)
            self._variable_types.append(b"")
            self._variable_types[index] = self._digest(value.ty)
        elif isinstance(value, tvm.ir.Op):
            self._digests[handle] = _hashed(b"operator", value.name.encode())
        elif isinstance(value, tvm.runtime.Tensor):
            array = value.numpy()
            self._digests[handle] = _hashed(
                b"tensor", str(value.dtype).encode(), str(array.shape).encode(), array.tobytes()
            )
        else:
            parts = [type(value).__tvm_ffi_type_info__.type_key.encode()]
            for name, getter in _fields(type(value)):
                parts += [name, self._digest(getter(value))]
            self._digests[handle] = _hashed(*parts)
        return self._digests[handle]


class _FamilyDigester(_Digester):
    """Digests everything but integers: extents, strides, offsets."""

    def _digest(self, value: Any) -> bytes:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return _hashed(b"int") if is_number else super()._digest(value)


def _fields(kind: Any) -> list[tuple[bytes, Any]]:
    """Return name and getter of each reflected field that structural equality compares."""
    fields = []
    info = kind.__tvm_ffi_type_info__
    while info is not None:
        fields += [
            (field.name.encode(), field.getter)
            for field in info.fields
            if field.c_structural_eq != "ignore"
        ]
        info = info.parent_type_info
    return fields


def _type_name(value: Any) -> bytes:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind.__name__.encode()
    return b"none" if value is None else b"other"


def _hashed(*parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.sha256(framed).digest()


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
    """Return the kernels that a lowered module calls, those with most work per inference first.

    Two functions with one key are one workload, with the sum of their calls.
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
    """Return how often each kernel or library function is called in one inference."""
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
    """Return one called function as a workload of its own."""
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
    return Workload(
        key=workload_key(mod),
        names=(name,),
        weight=calls,
        flops=_estimate_flops(mod),
        untunable_reason=_untunable_reason(function, mod),
        mod=tvm.ir.save_json(mod),
    )


def _estimate_flops(mod: tvm.IRModule) -> float:
    """Return TVM's estimate of the arithmetic operations of one call; 0 where it has none."""
    import tvm

    try:
        return float(tvm.s_tir.analysis.estimate_tir_flops(mod))
    except (RuntimeError, ValueError, TypeError):
        return 0.0


def _untunable_reason(function: tvm.tirx.PrimFunc, mod: tvm.IRModule) -> str:
    """Return why no schedule is searched for a kernel; an empty string when one is."""
    from tvm import relax

    if function.attrs.get("tirx.is_scheduled", False):
        return "it comes with a schedule"
    if not _has_static_shapes(function):
        return "its shapes are known only when it runs"
    if relax.analysis.has_reshape_pattern(function):
        return "it only renames a shape, which costs nothing in the library"
    blocks = _list_blocks(mod)
    if not any(block.name_hint != _ROOT for block in blocks):
        return "it is written as plain loops, which a schedule cannot move"
    if not any(block.iter_vars for block in blocks):
        return "it only calls a library function"
    return ""


def _list_blocks(mod: tvm.IRModule) -> list[Any]:
    import tvm
    import tvm_ffi

    blocks: list[Any] = []
    tvm_ffi.structural_walk(mod["main"].body, (tvm.s_tir.SBlock, blocks.append))
    return blocks


def _has_static_shapes(function: tvm.tirx.PrimFunc) -> bool:
    import tvm

    return all(
        hasattr(variable.ty, "shape")
        and all(isinstance(extent, int | tvm.tirx.IntImm) for extent in variable.ty.shape)
        for variable in function.params
    )
