"""Draws graphs: choices that can be replayed and shrunk, values, nodes, and what is wrapped around them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]

OPSETS: Final = (20, 22, 24, 21, 18, 17, 13)
"""The first is the usual one; operators that are newer have models of their own opset."""

_NARROW: Final = ("bfloat16", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")
_DTYPES: Final[Mapping[str, str]] = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{
        f"tensor({name})": name
        for name in "float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
    },
    **{f"tensor({name.replace('_', '')})": name for name in _NARROW},
}
_FIRST_OPSETS: Final = {
    (schema.name, schema.domain): schema.since_version
    for schema in sorted(
        onnx.defs.get_all_schemas_with_history(), key=lambda entry: -entry.since_version
    )
    if schema.domain == ""
}
_SPECIAL: Final = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -7e4, 1.0, -1e20)

_WITHOUT_NAN: Final = frozenset(
    "ArgMax ArgMin Clip GlobalMaxPool HardSigmoid HardSwish Hardmax Max MaxPool Min ReduceMax ReduceMin Relu "
    "ThresholdedRelu".split()
)
"""Operators whose results of NaN differ from ONNX Runtime's, as documented in `docs/precision.md`."""


class Rejected(Exception):
    """Choices that make no valid graph."""


class Draw:
    """Integers from a seed, or from a list that is replayed; 0 is always the plainest choice."""

    def __init__(self, seed: int, replayed: Sequence[int] | None = None) -> None:
        self._random = random.Random(seed)
        self._replayed = replayed
        self.choices: list[int] = []

    def below(self, count: int) -> int:
        """Return an integer from 0 to `count` - 1."""
        if count < 1:
            raise Rejected("nothing to choose from")
        place = len(self.choices)
        if self._replayed is None:
            drawn = self._random.randrange(count)
        else:
            drawn = self._replayed[place] % count if place < len(self._replayed) else 0
        self.choices.append(drawn)
        return drawn

    def chance(self, percent: int) -> bool:
        """Return True in so many of 100 cases."""
        return self.below(100) >= 100 - percent

    def choice(self, options: Sequence[Any]) -> Any:
        """Return one of the options; the first is the plainest."""
        return options[self.below(len(options))]

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def subset(self, options: Sequence[Any]) -> list[Any]:
        """Return some of the options, in their order."""
        return [option for option in options if self.chance(50)]

    def permutation(self, count: int) -> list[int]:
        left = list(range(count))
        return [left.pop(self.below(len(left))) for _ in range(count)]


class Value(NamedTuple):
    """A tensor of a graph: its name, and an array of its shape and dtype."""

    name: str
    array: Array

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    @property
    def rank(self) -> int:
        return self.array.ndim


NO_VALUE: Final = Value("", np.zeros(0))
"""An optional operand that is left out."""


class Case(NamedTuple):
    """A model, its inputs, and what it is a case of.

    Attributes:
        operator: The operator.
        model: The model, with dimensions in place of some sizes.
        feeds: Inputs, each of other sizes where the shapes are dynamic.
        dimensions: The least and the largest size of each dimension.
        features: What else it has: "dynamic", "function", "If", …
        attributes: The names of the operator's attributes that are set.
    """

    operator: str
    model: onnx.ModelProto
    feeds: list[Feed]
    dimensions: Mapping[str, tuple[int, int]]
    features: tuple[str, ...]
    attributes: frozenset[str]


class Graph:
    """A graph that is being drawn.

    Args:
        draw: The choices.
        operator: The operator.
        domain: Its domain.
    """

    def __init__(self, draw: Draw, operator: str, domain: str = "") -> None:
        self.draw = draw
        self.operator, self.domain = operator, domain
        self.opset = draw.choice(OPSETS) if draw.chance(40) else OPSETS[0]
        if (operator, domain) in _FIRST_OPSETS:
            self.opset = max(self.opset, _FIRST_OPSETS[operator, domain])
            self.schema = onnx.defs.get_schema(operator, self.opset, "")
        self.inputs: Feed = {}
        self.constants: Feed = {}
        self.nodes: list[onnx.NodeProto] = []
        self.outputs: list[str] = []
        self.free: list[str] = []
        self.attributes: set[str] = set()
        # How wild values are: mostly plain ones, normally distributed, large, or special ones.
        self.wildness = draw.choice((0, 0, 0, 1, 2))
        self.result: Array = np.zeros(0, np.float32)
        self.rng = np.random.default_rng(draw.below(1 << 16))

    # ------------------------------------------------------------ shapes and dtypes

    def since(self, opset: int) -> bool:
        return self.opset >= opset

    def allowed(self, variable: str) -> list[str]:
        """Return the dtypes that the schema allows for a type variable, or for a type."""
        for constraint in self.schema.type_constraints:
            if constraint.type_param_str == variable:
                names = list(constraint.allowed_type_strs)
                break
        else:
            names = [variable]
        return [dtype for name, dtype in _DTYPES.items() if name in names]

    def dtype(self, variable: str = "T", among: str = "") -> str:
        """Return a dtype that the schema allows: often float32, seldom one that few libraries have."""
        allowed = self.allowed(variable)
        if among:
            allowed = [name for name in allowed if name in among.split()]
        common = [name for name in allowed if name not in _NARROW]
        if not common or (len(common) < len(allowed) and self.draw.chance(4)):
            common = allowed
        usual = [n for n in ("float32", "int64", "uint8", "bool") if n in common][:1]
        return str(self.draw.choice(common if not usual or self.draw.chance(50) else usual))

    def size(self, low: int = 1, high: int = 6) -> int:
        """Return a size: seldom 0 or one of several vectors."""
        if self.draw.chance(4):
            return int(self.draw.choice((17, 33, 64)))
        if low <= 1 and self.draw.chance(2):
            return 0
        return self.draw.between(low, high)

    def shape(self, low: int = 0, high: int = 4) -> list[int]:
        """Return a shape of some rank."""
        rank = self.draw.choice([n for n in (2, 1, 3, 4, 0, 5) if low <= n <= high])
        return [self.size() for _ in range(rank)]

    def axis(self, rank: int, *, low: int = 0) -> int:
        """Return an axis, which may count from the end."""
        if rank <= low:
            raise Rejected("no axis")
        axis = self.draw.between(low, rank - 1)
        return axis - rank if self.draw.chance(40) else axis

    def broadcast(self, shape: Sequence[int]) -> list[int]:
        """Return a shape that broadcasts to another one."""
        kept = [1 if self.draw.chance(25) else n for n in shape]
        return kept[self.draw.between(1, len(kept)) :] if kept and self.draw.chance(25) else kept

    # ------------------------------------------------------------ values

    def numbers(self, shape: Sequence[int], dtype: str, *, tame: bool = False) -> Array:
        """Return values of a dtype; special ones where the graph is to have them."""
        rng, wildness = self.rng, 0 if tame else self.wildness
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        if np.issubdtype(_np(dtype), np.integer) or dtype in ("int4", "uint4"):
            is_signed = not dtype.startswith("uint")
            if wildness == 2 and dtype not in ("int4", "uint4"):
                info = np.iinfo(_np(dtype))
                wild: Any = rng.integers(
                    info.min, info.max, tuple(shape), _np(dtype), endpoint=True
                )
                return np.asarray(wild)
            return rng.integers(-7 if is_signed else 0, 8, shape).astype(_np(dtype))
        values = rng.standard_normal(shape) * (1 if wildness == 0 else 4)
        if wildness == 0 and self.draw.chance(20):
            values = np.round(values * 2) / 2
        if wildness == 2:
            places = rng.random(shape) < 0.4
            special = _SPECIAL[self.operator in _WITHOUT_NAN :]
            values = np.where(places, rng.choice(special, shape), values)
        with np.errstate(all="ignore"):
            return np.asarray(values).astype(_np(dtype))

    def tensor(
        self,
        shape: Sequence[int],
        dtype: str,
        *,
        values: Any = None,
        constant: bool | None = None,
        tame: bool = False,
    ) -> Value:
        """Add an input or a constant.

        Args:
            shape: The shape.
            dtype: The dtype.
            values: The values; by default random ones.
            constant: Whether it is constant; drawn if it is None.
            tame: Whether special values are left out.
        """
        is_free = values is None and not tame
        if values is None:
            values = self.numbers(shape, dtype, tame=tame)
        array = np.asarray(values).astype(_np(dtype)).reshape(shape)
        if constant is None:
            constant = self.draw.chance(20)
        name = f"x{len(self.inputs) + len(self.constants)}"
        if constant:
            self.constants[name] = array
            return Value(name, array)
        self.inputs[name] = array
        if is_free and dtype in ("float32", "float16", "float64"):
            self.free.append(name)
        return Value(name, array)

    def ints(self, values: Sequence[int] | int, dtype: str = "int64") -> Value:
        """Add an operand that says how: mostly a constant."""
        constant = not self.draw.chance(6)
        return self.tensor(np.shape(values), dtype, values=values, constant=constant)

    def indices(self, shape: Sequence[int], size: int, dtype: str = "int64") -> Value:
        """Add valid indices of an axis, some of them negative."""
        if size == 0 and np.prod(shape):
            raise Rejected("no index is valid")
        low = -size if self.draw.chance(40) else 0
        values = self.rng.integers(low, max(size, 1), shape)
        return self.tensor(shape, dtype, values=values)

    def unique_rows(self, count: int, sizes: Sequence[int]) -> Array:
        """Return distinct index rows."""
        every = int(np.prod(sizes))
        if count > every:
            raise Rejected("too few places")
        places = self.rng.permutation(every)[:count]
        return np.stack(np.unravel_index(places, sizes), -1) if sizes else np.zeros((count, 0))

    # ------------------------------------------------------------ nodes

    def node(self, *inputs: Value, outputs: int = 1, **attributes: Any) -> list[str]:
        """Add the graph's operator, and return its results; attributes that are None are left out."""
        names = [value.name for value in inputs]
        while names and not names[-1]:
            names.pop()
        kept = {name: value for name, value in attributes.items() if value is not None}
        if hasattr(self, "schema"):
            kept = {name: v for name, v in kept.items() if name in self.schema.attributes}
        self.attributes |= set(kept)
        results = [f"y{n}" for n in range(outputs)]
        self.nodes.append(
            helper.make_node(self.operator, names, results, domain=self.domain, **kept)
        )
        self.outputs = results
        return results

    def then(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Add another operator, whose results become those of the graph."""
        index = len(self.nodes)
        self.outputs = [f"v{index}_{n}" for n in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), self.outputs, **attributes))
        return self.outputs

    def maybe(self, value: Any, percent: int = 50) -> Any:
        """Return a value, or None."""
        return value if self.draw.chance(percent) else None


def _np(dtype: str) -> Any:
    return np.dtype(getattr(ml_dtypes, dtype) if dtype in _NARROW else dtype)


def element_type(array: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


# ---------------------------------------------------------------- around the operator


def finish(graph: Graph) -> Case:
    """Return the case: with nodes around the operator, in a function or a body, with dynamic shapes."""
    draw, features = graph.draw, []
    nodes, outputs = list(graph.nodes), list(graph.outputs)
    if graph.free and draw.chance(25):
        features.append("computed input")
        name = draw.choice(graph.free)
        has_nan = np.isnan(graph.inputs[name].astype(np.float64)).any()
        before = draw.choice(("Neg", "Abs") if has_nan else ("Neg", "Abs", "Relu"))
        nodes = [_renamed(node, {name: f"{name}_c"}) for node in nodes]
        nodes.insert(0, helper.make_node(before, [name], [f"{name}_c"]))
    functions: list[onnx.FunctionProto] = []
    wrapper = draw.choice(("", "If", "Loop", "Scan", "function")) if draw.chance(20) else ""
    if wrapper:
        wrapped = _WRAPPERS[wrapper](graph, nodes, outputs, functions)
        if wrapped is not None:
            nodes, outputs = wrapped
            features.append(wrapper)
    if draw.chance(15) and not wrapper:
        nodes += [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
            for name, array in graph.constants.items()
        ]
        order = len(graph.constants)
        nodes, graph.constants = nodes[-order:] + nodes[:-order] if order else nodes, {}
    initializers = [numpy_helper.from_array(v, name) for name, v in graph.constants.items()]
    inputs = [
        helper.make_tensor_value_info(name, element_type(array), array.shape)
        for name, array in graph.inputs.items()
    ]
    made = helper.make_model(
        helper.make_graph(nodes, "g", inputs, [], initializers),
        opset_imports=[helper.make_opsetid("", graph.opset)]
        + [helper.make_opsetid(d, 1) for d in sorted({n.domain for n in nodes} - {""})],
        functions=functions,
    )
    if functions:
        domains = {n.domain for f in functions for n in f.node} - {""}
        known = {entry.domain for entry in made.opset_import}
        made.opset_import.extend(helper.make_opsetid(d, 1) for d in domains - known)
    made.ir_version = 10
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    if graph.domain or "Simplified" in graph.operator:
        # ONNX knows no types of these
        for output in made.graph.output:
            output.type.tensor_type.elem_type = element_type(graph.result)
    else:
        made = onnx.shape_inference.infer_shapes(made)
        for output in made.graph.output:
            output.type.tensor_type.ClearField("shape")
        del made.graph.value_info[:]
    feeds, dimensions = [dict(graph.inputs)], dict[str, tuple[int, int]]()
    if graph.inputs and draw.chance(30):
        features.append("dynamic")
        feeds, dimensions = _make_dynamic(graph, made)
    return Case(
        graph.operator, made, feeds, dimensions, tuple(features), frozenset(graph.attributes)
    )


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto.FromString(node.SerializeToString())
    copy.input[:] = [names.get(name, name) for name in node.input]
    return copy


def _body(name: str, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[str]) -> Any:
    return helper.make_graph(
        list(nodes), name, list(inputs), [onnx.ValueInfoProto(name=o) for o in outputs]
    )


def _in_branches(graph: Graph, nodes: Any, outputs: Any, _: Any) -> Any:
    """Put the nodes into one branch of an If, and their results again in the other."""
    condition = graph.tensor([], "bool", constant=False, values=graph.draw.chance(50))
    results = [f"if_{name}" for name in outputs]
    bodies = {}
    for branch in ("then", "else"):
        renamed = []
        for node in nodes:
            copy = _renamed(node, {n: f"{branch}_{n}" for m in nodes for n in m.output})
            copy.output[:] = [f"{branch}_{name}" if name else "" for name in node.output]
            renamed.append(copy)
        bodies[f"{branch}_branch"] = _body(branch, renamed, [], [f"{branch}_{o}" for o in outputs])
    return [helper.make_node("If", [condition.name], results, **bodies)], results


def _in_loop(graph: Graph, nodes: Any, outputs: Any, _: Any) -> Any:
    """Put the nodes into the body of a Loop, which stacks their results."""
    count = graph.ints(graph.draw.between(1, 3))
    inputs = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
    ]
    go = helper.make_node("Identity", ["go"], ["go_on"])
    body = _body("body", [go, *nodes], inputs, ["go_on", *outputs])
    results = [f"loop_{name}" for name in outputs]
    true = graph.tensor([], "bool", values=True, constant=True)
    return [helper.make_node("Loop", [count.name, true.name], results, body=body)], results


def _in_scan(graph: Graph, nodes: Any, outputs: Any, _: Any) -> Any:
    """Put the nodes into the body of a Scan over a stack of one input."""
    if not graph.free:
        return None
    name = graph.draw.choice(graph.free)
    one = graph.inputs[name]
    graph.inputs[name] = np.stack([np.roll(one, n) for n in range(graph.draw.between(1, 3))])
    inner = helper.make_tensor_value_info(f"{name}_s", element_type(one), one.shape)
    renamed = [_renamed(node, {name: f"{name}_s"}) for node in nodes]
    body = _body("body", renamed, [inner], outputs)
    results = [f"scan_{o}" for o in outputs]
    return [helper.make_node("Scan", [name], results, body=body, num_scan_inputs=1)], results


def _in_function(graph: Graph, nodes: Any, outputs: Any, functions: Any) -> Any:
    """Put the nodes into a function of the model, with one attribute as its own, which may be a default."""
    read = dict.fromkeys(name for node in nodes for name in node.input if name)
    made = {name for node in nodes for name in node.output}
    inputs = [name for name in read if name not in made]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    attributes = nodes[-1].attribute
    given: list[Any] = []
    defaults: list[Any] = []
    if len(attributes) and attributes[-1].type != onnx.AttributeProto.GRAPH:
        moved = attributes.pop()
        reference = attributes.add(name=moved.name, type=moved.type, ref_attr_name="a")
        assert reference.ref_attr_name
        own = onnx.AttributeProto.FromString(moved.SerializeToString())
        own.name = "a"
        (defaults if graph.draw.chance(50) else given).append(own)
    opsets = [helper.make_opsetid("", graph.opset)]
    opsets += [helper.make_opsetid(d, 1) for d in sorted({n.domain for n in nodes} - {""})]
    functions.append(
        helper.make_function(
            "local",
            "F",
            inputs,
            list(outputs),
            nodes,
            opsets,
            attributes=[a.name for a in given],
            attribute_protos=defaults,
        )
    )
    results = [f"call_{name}" for name in outputs]
    call = helper.make_node("F", inputs, results, domain="local")
    call.attribute.extend(given)
    return [call], results


_WRAPPERS: Final[Mapping[str, Any]] = {
    "If": _in_branches,
    "Loop": _in_loop,
    "Scan": _in_scan,
    "function": _in_function,
}


def _make_dynamic(graph: Graph, made: onnx.ModelProto) -> tuple[list[Feed], Any]:
    """Make some axes of the inputs dynamic; equal sizes become one dimension.

    Returns:
        Inputs of the sizes that were drawn, and of smaller and larger ones with the same values; and
        the least and the largest size of each dimension.
    """
    draw, dimensions = graph.draw, {}
    names: dict[int, str] = {}
    # ONNX Runtime has one pixel of windows that are larger than the data
    reach = max(
        (max(a.ints) for n in graph.nodes for a in n.attribute if a.name == "kernel_shape"),
        default=1,
    )
    for value in made.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            size = dim.dim_value
            if size > 0 and (size in names or draw.chance(50)):
                names.setdefault(size, f"d{size}")
                # 1 and 2 are often other axes that happen to be as long
                dim.dim_param = names[size]
                dimensions[names[size]] = (min(reach, size), size + 4)
    feeds = [dict(graph.inputs)]
    rng = np.random.default_rng(draw.below(1 << 16))
    for _ in range(3 if dimensions else 0):
        chosen = {
            name: int(rng.integers(low, high + 1)) for name, (low, high) in dimensions.items()
        }
        feed = {}
        for value in made.graph.input:
            dims = value.type.tensor_type.shape.dim
            shape = [chosen.get(d.dim_param, d.dim_value) for d in dims]
            old = graph.inputs[value.name].reshape(-1)
            many = int(np.prod(shape))
            if many and not old.size:
                continue
            feed[value.name] = (old[rng.integers(0, old.size, many)] if many else old[:0]).reshape(
                shape
            )
        if len(feed) == len(graph.inputs):
            feeds.append(feed)
    return feeds, dimensions
