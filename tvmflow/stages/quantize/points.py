"""The layers of a float model that can be quantized, and the tensors that they read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.core.types import Array
from tvmflow.graph import ir, marks
from tvmflow.graph.dynamic_shapes import same_sizes, sizes_of
from tvmflow.graph.ir_operators import (
    GATES,
    NOTHING,
    STATE_STEPS,
    Recurrent,
    RecurrentOperands,
)
from tvmflow.graph.norms import fold_norms
from tvmflow.graph.rewriter import MainRewriter, rewrite_main

_MATMUL: Final = "relax.matmul"
FOLLOWERS: Final = ir.SELECTIONS | ir.operators(
    "add subtract multiply maximum minimum concat mean clip strided_slice split nn.relu",
    "nn.avg_pool2d nn.adaptive_avg_pool2d image.resize2d",
)
"""Operators that read int8 if a layer reads the same tensor as int8: the float tensor is not stored."""

_EPILOGUES: Final = ir.operators(
    "add subtract multiply divide maximum minimum clip sigmoid tanh nn.relu nn.leakyrelu nn.silu",
    "nn.gelu",
)


class FloatModel(NamedTuple):
    """A model with its weights.

    Attributes:
        mod: A Relax function `main` that takes inputs, then weights.
        nodes: The node of the user's model for each binding of `main`; empty if unknown.
        products: The nodes of the layers, by the largest parameter that their weights are computed from. Layers
            that share weights are listed in the order of their bindings.
    """

    mod: tvm.IRModule
    params: Mapping[str, Array]
    nodes: Sequence[str]
    products: Mapping[str, Sequence[str]] = {}

    @property
    def known(self) -> dict[relax.Var, Array]:
        """The weights, by their parameter of `main`."""
        return {var: self.params[str(var.name)] for var in ir.list_weights(self.main)}

    @property
    def main(self) -> relax.Function:
        """The function that computes the outputs."""
        return self.mod["main"]


class Layer(NamedTuple):
    """A convolution, a matmul or a recurrent layer with constant weights.

    Attributes:
        name: The node of the user's model, with a number appended if a node has several layers.
        operator: Its operator: `conv2d`, `depthwise_conv2d`, `matmul`, `lstm`, …
        var: The variable that its result is bound to.
        data: The variable of its input. For a recurrent layer, this is the float result of the input matmul, and
            `weights` are the recurrent weights.
        source: The variable to quantize; `data` is this tensor, or was rearranged from it.
        weights: The expression of its weights, which does not depend on inputs.
        axis: The axis of the weights with one scale per index: the output channels.
    """

    name: str
    operator: str
    var: Any
    data: Any
    source: Any
    weights: Any
    axis: int

    @property
    def is_transposed(self) -> bool:
        """Return whether it is a transposed convolution, whose weights are (in, out, …)."""
        return self.operator.endswith("_transpose")

    @property
    def is_recurrent(self) -> bool:
        """Return whether it is a recurrent layer, whose quantized weights multiply the state."""
        return self.operator in _RECURRENT

    @property
    def multiplies_bytes(self) -> bool:
        """Return whether there are int8 kernels for the shape of its weights; False for recurrent layers."""
        if self.is_recurrent:
            return False
        if self.operator != "matmul":
            return True
        depth, columns = ir.known_shape(self.weights)
        return depth % _TERMS == 0 and (columns > _LANES or columns % _TERMS == 0)


# An int8 dot product instruction adds four products to each of at most 16 accumulators.
_TERMS: Final = 4
_LANES: Final = 16
_RECURRENT: Final = frozenset(kind.lower() for kind in GATES)


class Integers(NamedTuple):
    """The integer types of a target's dot product instructions.

    `dtype` is the dtype of activations: `uint8` for x86-64, `int8` for ARM. `weight_bits` is 7 if the instruction
    adds pairs of products as int16.
    """

    dtype: str
    weight_bits: int = 8


def fold_model(model: FloatModel) -> FloatModel:
    """Fold norms into weights and remove dead code.

    The input matmuls of recurrent layers become separate operators.
    """
    mod = ir.copy_module(model.mod)
    products = _name_products(model)
    marks.mark_bindings(mod)
    mod = split_input_products(fold_norms(mod))
    for transform in (
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
    ):
        mod = transform(mod)
    return FloatModel(mod, model.params, take_nodes(mod, model.nodes), products)


def _name_products(model: FloatModel) -> dict[str, list[str]]:
    """Return the nodes of the layers by the name of their weights, before folding changes nodes."""
    flow = ir.DataFlow(model.main)
    products: dict[str, list[str]] = {}
    for binding, node in zip(ir.list_bindings(model.main.body), model.nodes, strict=False):
        for weights in _list_weights(binding.value, flow):
            products.setdefault(_name_weights(weights, flow), []).append(node)
    return products


def _list_weights(value: Any, flow: ir.DataFlow) -> list[Any]:
    if _is_product(value, flow):
        return [value.args[1]]
    if ir.as_call(value, Recurrent.NAME) is None:
        return []
    operands = RecurrentOperands(*value.args)
    return [operands.weights, operands.recurrent]


def _is_product(value: Any, flow: ir.DataFlow) -> bool:
    return ir.operator_name(value) in ir.WEIGHT_RANKS and flow.is_weight(value.args[1])


def _name_weights(weights: Any, flow: ir.DataFlow) -> str:
    """Return the name of the largest parameter that weights are computed from; empty without one."""
    while isinstance(value := flow.values.get(weights), relax.Call):
        inner = [arg for arg in value.args if isinstance(arg, relax.Var)]
        if not inner:
            return ""
        weights = max(inner, key=lambda var: np.prod(ir.shape_of(var) or (1,)))
    return str(weights.name) if isinstance(weights, relax.Var) else ""


def take_nodes(mod: tvm.IRModule, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the model node of each binding, from the marks that passes kept; remove the marks."""
    taken = marks.take_marks(mod)
    return tuple(nodes[min(own)] if own else "" for own in taken) if nodes else ()


def multiplies_integers(mod: tvm.IRModule) -> bool:
    """Return whether a model is quantized already: a layer reads a dequantized non-input tensor."""
    main = mod["main"]
    flow = ir.DataFlow(main)
    inputs = set(main.params[: int(main.attrs["num_input"])])
    for value in flow.values.values():
        if ir.operator_name(value) not in ir.WEIGHT_RANKS:
            continue
        for operand in value.args[:2]:
            source = _find_source(flow.resolve(operand), flow)
            real = flow.find_call(source, "relax.dequantize")
            if real is not None and real.args[0] not in inputs:
                return True
    return False


def list_layers(model: FloatModel) -> tuple[Layer, ...]:
    """Return the layers of a model without control flow, in the order of their bindings."""
    flow = ir.DataFlow(model.main)
    layers: list[Layer] = []
    nodes = {name: iter(own) for name, own in model.products.items()}
    seen: dict[str, int] = {}
    for binding in ir.list_bindings(model.main.body):
        call = binding.value
        operator = ir.operator_name(call)
        weights = find_state_weights(call, flow)
        is_recurrent = weights is not None
        if not is_recurrent:
            if not _is_product(call, flow):
                continue
            weights = call.args[1]
        node = next(nodes.get(_name_weights(weights, flow), iter(())), "")
        if not (ir.is_float32(weights) if is_recurrent else _is_layer(call, operator, flow)):
            continue
        kind = operator.rpartition(".")[2]
        if is_recurrent:
            kind = Recurrent.read(call).kind.lower()
        elif operator != _MATMUL and int(call.attrs.groups) > 1:
            kind = f"{'depthwise' if ir.is_depthwise(call) else 'grouped'}_{kind}"
        base = node or kind
        seen[base] = seen.get(base, 0) + 1
        data = flow.resolve(call.args[0])
        layers.append(
            Layer(
                name=base if seen[base] == 1 and node else f"{base}#{seen[base]}",
                operator=kind,
                var=binding.var,
                data=data,
                source=_find_source(data, flow),
                weights=weights,
                axis=int(operator == _MATMUL or operator in ir.TRANSPOSED_CONVOLUTIONS),
            )
        )
    return tuple(layers)


def _is_layer(call: Any, operator: str, flow: ir.DataFlow) -> bool:
    data, weights = call.args[:2]
    return (
        all(map(ir.is_float32, (call, data, weights)))
        and not flow.is_weight(data)
        and len(ir.shape_of(weights) or ()) == ir.WEIGHT_RANKS[operator]
        and sizes_of(data) is not None
        and (
            operator == _MATMUL
            or _has_kernels(call, is_transposed=operator in ir.TRANSPOSED_CONVOLUTIONS)
        )
    )


def _has_kernels(call: Any, *, is_transposed: bool) -> bool:
    if not is_transposed:
        return ir.has_default_layouts(call)
    is_dense = int(call.attrs.groups) == 1 and all(int(step) == 1 for step in call.attrs.dilation)
    return is_dense and ir.has_default_layouts(call, "IO")


def _find_source(data: Any, flow: ir.DataFlow) -> Any:
    """Return the float tensor that `data` was rearranged from; `data` itself if it was not."""
    while True:
        value: Any = flow.values.get(data)
        if ir.operator_name(value) not in ir.SELECTIONS or not ir.is_float32(value.args[0]):
            return data
        data = flow.resolve(value.args[0])


def list_sums(
    model: FloatModel, layers: Sequence[Layer], integers: Collection[Any]
) -> tuple[Any, ...]:
    """Return further tensors to quantize: operands of additions that would be stored as float.

    If results of two layers are added, fusion keeps one of them in registers and stores the other in memory.
    """
    flow = ir.DataFlow(model.main)
    positions = {var: index for index, var in enumerate(flow.values)}
    computed = {layer.var for layer in layers}
    found: list[Any] = []
    for value in flow.values.values():
        if ir.operator_name(value) != "relax.add" or not ir.is_float32(value):
            continue
        operands = list(map(flow.resolve, value.args))
        left, right = map(sizes_of, operands)
        if left is None or right is None or not same_sizes(left, right):
            continue
        if any(var in integers or var in found for var in operands):
            continue
        if all(_is_result(var, flow, computed) for var in operands):
            found.append(max(operands, key=positions.__getitem__))
    return tuple(found)


def list_joined(model: FloatModel, integers: Collection[Any]) -> dict[Any, Any]:
    """Return the parts of quantized concatenations that nothing else reads, with the concatenation.

    The parts get the scale of the concatenation, so their integers can be concatenated.
    """
    flow = ir.DataFlow(model.main)
    joined = {}
    for var, value in flow.values.items():
        if ir.operator_name(value) != "relax.concat" or var not in integers:
            continue
        parts = value.args[0]
        parts = parts if isinstance(parts, relax.Tuple) else flow.values.get(parts)
        if not isinstance(parts, relax.Tuple):
            continue
        fields = list(map(flow.resolve, parts.fields))
        if all(flow.value_if_used_once(part) is not None for part in fields) and not any(
            part in integers or flow.is_weight(part) for part in fields
        ):
            joined.update(dict.fromkeys(fields, var))
    return joined


def _is_result(var: Any, flow: ir.DataFlow, computed: Collection[Any]) -> bool:
    """Return whether a tensor is the result of a layer, after elementwise operators that fuse with it."""
    while var not in computed:
        value: Any = flow.values.get(var)
        if ir.operator_name(value) not in _EPILOGUES:
            return False
        data = [arg for arg in value.args if isinstance(arg, relax.Var) and not flow.is_weight(arg)]
        if len(data) != 1:
            return False
        var = flow.resolve(data[0])
    return True


# ---------------------------------------------------------------- recurrent layers
# The matmul of the inputs of all steps becomes a separate operator, which is quantized like any other. The
# recurrent weights become int8 with a scale for each unit of each gate. If the CPU has int8 dot products, the state
# is quantized, too: in most layers it lies between -1 and 1, so its scale is known.

EXACT: Final = np.array([1, 0], np.float32)
"""The operand `rounding` of a recurrent layer that keeps its state float."""
ROUNDED: Final = np.array([0, 1], np.float32)
"""The operand `rounding` of a recurrent layer that rounds its state to int8."""

LARGEST_STATE: Final = 1 + 0.5 / STATE_STEPS
"""The largest initial state to quantize: clipping it to 1 costs no more than rounding does."""

# Operators that only rearrange or repeat their first operand.
_COPIES: Final = ir.operators("broadcast_to reshape permute_dims expand_dims squeeze")
# Activation functions with results between 0 and 1 (`_SHARES`), and between -1 and 1 (`_BOUNDED`).
_SHARES: Final = frozenset({"sigmoid", "hardsigmoid"})
_BOUNDED: Final = _SHARES | {"tanh", "softsign"}


def split_input_products(mod: tvm.IRModule) -> tvm.IRModule:
    """Move the input matmuls of recurrent layers with constant weights into separate operators."""
    if not ir.calls_operator(mod, Recurrent.NAME):
        return mod
    return rewrite_main(mod, _Splitter)


def find_state_weights(call: Any, flow: ir.DataFlow) -> Any:
    """Return the constant recurrent weights of a call whose input matmul was split off; None otherwise."""
    if ir.as_call(call, Recurrent.NAME) is None:
        return None
    operands = RecurrentOperands(*call.args)
    is_split = isinstance(operands.weights, relax.Tuple) and flow.is_weight(operands.recurrent)
    return operands.recurrent if is_split else None


def has_bounded_state(call: Any) -> bool:
    """Return whether a state that starts between -1 and 1 stays in this range."""
    operator = Recurrent.read(call)
    for functions in operator.activations:
        names = [function.name for function in functions]
        gates, results = names[:-1], names[-1:]
        if operator.kind == "LSTM":
            # an LSTM's hidden state is its output gate times the last activation
            gates, results = names[:1], names[2:]
        if not (_SHARES.issuperset(gates) and _BOUNDED.issuperset(results)):
            return False
    return True


def find_initial_state(call: Any, flow: ir.DataFlow) -> Any:
    """Return the tensor with a layer's initial hidden state; None for zeros."""
    hidden = flow.resolve(RecurrentOperands(*call.args).hidden)
    while (value := flow.find_call(hidden, *_COPIES)) is not None:
        hidden = flow.resolve(value.args[0])
    return None if isinstance(hidden, relax.Tuple) else hidden


class _Splitter(MainRewriter):
    OPERATORS = (Recurrent.NAME,)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        known = RecurrentOperands(*call.args)
        weights = (known.weights, known.recurrent)
        if not all(self.flow.is_weight(own) and ir.is_float32(own) for own in weights):
            return None
        operands = RecurrentOperands(*rewritten.args)
        of_inputs, of_state = (self._flatten(w) for w in (operands.weights, operands.recurrent))
        product = relax.op.matmul(operands.x, self.emit(relax.op.permute_dims(of_inputs)))
        operands = operands._replace(x=self.emit(product), weights=NOTHING, recurrent=of_state)
        return relax.Call(call.op, list(operands), call.attrs, call.ty_args)

    def _flatten(self, weights: Any) -> Any:
        directions, rows, size = ir.known_shape(weights)
        return self.reshape(weights, [directions * rows, size])
