"""Workloads: the lowered kernels of a model, under names that outlive processes, models and renamings.

A workload is a kernel with its names normalised. Its key is the digest of its structure, so
two layers of one shape are one workload, in one model or in two. Everything that tuning
stores (traces refer to blocks by name) is about the normalised form, never the model's own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import relax

# What a kernel is called and how fusion classified it say nothing about how to schedule it.
_ATTRIBUTES_THAT_DO_NOT_MATTER: Final = ("global_symbol", "op_pattern")
_ROOT: Final = "root"


class Workload(NamedTuple):
    """One kernel of a model: `weight` calls of it per inference, `flops` operations each.

    `names` are the functions of the lowered module that share it. `reason` says why no search
    applies to it, and is empty when one does. `mod` is the normalised module, as TVM saves it,
    and is empty for what is not a kernel of ours at all.
    """

    key: str
    names: tuple[str, ...]
    weight: int
    flops: float
    reason: str
    mod: str


# ---------------------------------------------------------------- names that do not matter


def normalised(function: tvm.tirx.PrimFunc) -> tvm.IRModule:
    """The kernel as `main` of a module of its own, with blocks `b0, b1, …` and variables `v0, v1, …`."""
    for name in _ATTRIBUTES_THAT_DO_NOT_MATTER:
        if name in function.attrs:
            function = function.without_attr(name)
    named = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    graph = json.loads(tvm.ir.save_json(named))
    nodes: list[dict[str, Any]] = graph["nodes"]
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        if text not in strings:
            strings[text] = len(nodes)
            nodes.append({"type": "ffi.String", "data": text})
        return strings[text]

    variables = blocks = 0
    nowhere = len(nodes)
    nodes.append({"type": "None"})
    for node in list(nodes):
        # where a kernel was written down says nothing about it either
        if isinstance(node.get("data"), dict) and "span" in node["data"]:
            node["data"]["span"] = nowhere
        if node["type"] == "ir.Var":
            node["data"]["name"] = string(f"v{variables}")
            variables += 1
        # MetaSchedule looks for the outermost block by its name
        elif node["type"] == "s_tir.SBlock" and nodes[node["data"]["name_hint"]]["data"] != _ROOT:
            node["data"]["name_hint"] = string(f"b{blocks}")
            blocks += 1
    return tvm.ir.load_json(json.dumps(graph))


# ---------------------------------------------------------------- the durable key


def workload_key(mod: tvm.IRModule) -> str:
    """The sha256 (hex) of the structure of a normalised module's `main`.

    Two kernels have one key exactly when TVM's structural equality holds for them. TVM's own
    structural hash is no durable key: it is defined for one build of one process.
    """
    with _deep_recursion():
        return _Digester().function(mod["main"])


def family_key(mod: tvm.IRModule) -> str:
    """The sha256 (hex) of a workload's structure with all numbers taken out: one for an operator in all its shapes."""
    with _deep_recursion():
        return _FamilyDigester().function(mod["main"])


class _Digester:
    """Digests a TVM object by reflection: every field that structural equality looks at.

    Variables stand for themselves by the order in which they are first met. A sub-expression
    that is shared gives what it would give if it were written twice.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._variable_types: list[bytes] = []
        self._known: dict[int, bytes] = {}

    def function(self, function: tvm.tirx.PrimFunc) -> str:
        structure = self._of(function)
        return hashlib.sha256(structure + b"".join(self._variable_types)).hexdigest()

    def _of(self, value: Any) -> bytes:
        if isinstance(value, tvm.runtime.Object) and not isinstance(
            value, tvm_ffi.Array | tvm_ffi.Map
        ):
            return self._of_object(value)
        if isinstance(value, Mapping):
            items = sorted((self._of(key), self._of(entry)) for key, entry in value.items())
            return _hashed(b"map", *(part for item in items for part in item))
        if isinstance(value, str) or not isinstance(value, Sequence):
            return _hashed(_kind(value), str(value).encode())
        return _hashed(b"list", *[self._of(entry) for entry in value])

    def _of_object(self, value: Any) -> bytes:
        handle = value.__chandle__()
        handle = handle if isinstance(handle, int) else handle.value
        if handle in self._known:
            return self._known[handle]
        if isinstance(value, tvm.ir.Var):
            # known before its type is looked at: a shape may mention the variable itself
            self._known[handle] = _hashed(b"variable", str(len(self._numbers)).encode())
            place = self._numbers[handle] = len(self._numbers)
            self._variable_types.append(b"")
            self._variable_types[place] = self._of(value.ty)
        elif isinstance(value, tvm.ir.Op):
            self._known[handle] = _hashed(b"operator", value.name.encode())
        elif isinstance(value, tvm.runtime.Tensor):
            array = value.numpy()
            self._known[handle] = _hashed(
                b"tensor", str(value.dtype).encode(), str(array.shape).encode(), array.tobytes()
            )
        else:
            parts = [type(value).__tvm_ffi_type_info__.type_key.encode()]
            for name, getter in _fields(type(value)):
                parts += [name, self._of(getter(value))]
            self._known[handle] = _hashed(*parts)
        return self._known[handle]


class _FamilyDigester(_Digester):
    """Digests everything but whole numbers: extents, strides, offsets."""

    def _of(self, value: Any) -> bytes:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return _hashed(b"int") if is_number else super()._of(value)


def _fields(kind: Any) -> list[tuple[bytes, Any]]:
    """Name and getter of each reflected field that structural equality does not ignore."""
    found = []
    info = kind.__tvm_ffi_type_info__
    while info is not None:
        found += [
            (field.name.encode(), field.getter)
            for field in info.fields
            if field.c_structural_eq != "ignore"
        ]
        info = info.parent_type_info
    return found


def _kind(value: Any) -> bytes:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind.__name__.encode()
    return b"none" if value is None else b"other"


def _hashed(*parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.sha256(framed).digest()


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Room for expressions that nest deeply, such as a concatenation of a hundred tensors."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


# ---------------------------------------------------------------- the workloads of a model


def workloads_of(lowered: tvm.IRModule) -> list[Workload]:
    """The kernels that a lowered module calls, those with most work per inference first.

    Two functions with one key are one workload, with the sum of their calls.
    """
    found: dict[str, Workload] = {}
    for name, calls in sorted(_calls(lowered).items()):
        workload = _workload(lowered, name, calls)
        if workload.key in found:
            first = found[workload.key]
            workload = first._replace(
                names=(*first.names, name), weight=first.weight + workload.weight
            )
        found[workload.key] = workload
    return sorted(found.values(), key=lambda each: (-each.weight * each.flops, each.key))


def _calls(lowered: tvm.IRModule) -> dict[str, int]:
    """How often each kernel, or function from elsewhere, is called in one inference."""
    counts: dict[str, int] = {}

    def count(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            callee = expr.args[0] if expr.op.name in _CALLS else None
            name = getattr(callee, "name_hint", None) or getattr(callee, "global_symbol", None)
            if name is not None:
                counts[str(name)] = counts.get(str(name), 0) + 1

    for _, function in lowered.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, count)
    return counts


_CALLS: Final = frozenset({"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"})


def _workload(lowered: tvm.IRModule, name: str, calls: int) -> Workload:
    """One called function as a workload of its own."""
    functions = {var.name_hint: function for var, function in lowered.functions_items()}
    function = functions.get(name)
    if not isinstance(function, tvm.tirx.PrimFunc):
        key = hashlib.sha256(f"extern:{name}".encode()).hexdigest()
        return Workload(key, (name,), calls, 0.0, "a library function that TVM only calls", "")
    mod = normalised(function)
    return Workload(
        workload_key(mod),
        (name,),
        calls,
        _flops(mod),
        _why_not(function, mod),
        tvm.ir.save_json(mod),
    )


def _flops(mod: tvm.IRModule) -> float:
    """TVM's estimate of the arithmetic operations of one call; 0 where it has none."""
    try:
        return float(tvm.s_tir.analysis.estimate_tir_flops(mod))
    except (RuntimeError, ValueError, TypeError):
        return 0.0


def _why_not(function: tvm.tirx.PrimFunc, mod: tvm.IRModule) -> str:
    """Why no schedule is searched for a kernel; empty when one is."""
    if function.attrs.get("tirx.is_scheduled", False):
        return "it comes with a schedule"
    if not _is_static(function):
        return "its shapes are known only when it runs"
    if relax.analysis.has_reshape_pattern(function):
        return "it only renames a shape, which costs nothing in the library"
    blocks = _blocks(mod)
    if not any(block.name_hint != _ROOT for block in blocks):
        return "it is written as plain loops, which a schedule cannot move"
    if not any(block.iter_vars for block in blocks):
        return "it only calls a library function"
    return ""


def _blocks(mod: tvm.IRModule) -> list[Any]:
    found: list[Any] = []

    def keep(block: Any) -> None:
        found.append(block)

    tvm_ffi.structural_walk(mod["main"].body, (tvm.s_tir.SBlock, keep))
    return found


def _is_static(function: tvm.tirx.PrimFunc) -> bool:
    return all(
        hasattr(variable.ty, "shape")
        and all(isinstance(extent, int | tvm.tirx.IntImm) for extent in variable.ty.shape)
        for variable in function.params
    )
