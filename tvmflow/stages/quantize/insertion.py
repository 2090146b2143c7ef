"""Insertion of quantize/dequantize operators, integer weights and quantized lookup tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.core.types import Array
from tvmflow.graph import ir, marks
from tvmflow.graph.evaluation import evaluate_weight
from tvmflow.graph.ir_operators import RecurrentOperands
from tvmflow.graph.rewriter import MainRewriter, rewrite_main
from tvmflow.stages.quantize.points import (
    FOLLOWERS,
    ROUNDED,
    FloatModel,
    Integers,
    Layer,
    list_joined,
    list_sums,
    take_nodes,
)
from tvmflow.stages.quantize.weights import BlockQuantizedIntegers, Groups, round_groups

SWITCHES: Final = "tvmflow.layers"
"""The additional input of a model with switches: one value per layer, 1 to quantize it, 0 for float."""


class LayerWeights(NamedTuple):
    """The weights of a layer as integers.

    Attributes:
        integers: int8, from -127 to 127; if `bits` is 7, from -64 to 64.
        scales: One float32 scale for each index of the layer's axis.
    """

    integers: Array
    scales: Array
    bits: int = 8

    def pack(self) -> dict[str, Array]:
        """Return the arrays to store in the model, by name."""
        return {"int8": self.integers}

    def to_real(self, axis: int, dtype: Any = np.float32) -> Array:
        """Return the dequantized weights; `axis` is the axis of the scales."""
        shape = [1] * self.integers.ndim
        shape[axis] = -1
        return np.asarray(self.integers.astype(dtype) * self.scales.astype(dtype).reshape(shape))


class DataScale(NamedTuple):
    """The scale and the zero point of a tensor."""

    scale: float
    zero_point: int


@dataclass(frozen=True)
class Quantization:
    """The quantized weights and the quantized tensors of a model.

    Attributes:
        integers: The integer types of data and weights.
        weights: The quantized weights, by the variable of the layer.
        data: The scales of the quantized tensors; other tensors stay float.
        dynamic: Whether each call computes the scales of the layers' inputs, instead of using `data`.
        errors: The error of block-quantized weights, by the variable of the layer.
        corrections: Bias corrections, which are added to results, by the variable of the layer.
        tables: The quantized lookup tables, by the names of their weights.
        states: The recurrent layers whose state is rounded, by their variables.
    """

    integers: Integers
    weights: Mapping[Any, LayerWeights | BlockQuantizedIntegers]
    data: Mapping[Any, DataScale]
    dynamic: bool = False
    errors: Mapping[Any, float] = field(default_factory=dict)
    corrections: Mapping[Any, Array] = field(default_factory=dict)
    tables: Mapping[str, BlockQuantizedIntegers] = field(default_factory=dict)
    states: Collection[Any] = ()

    def has_integer_data(self, layer: Layer) -> bool:
        """Return whether a layer's input is quantized, too, so that it multiplies integers."""
        weights = self.weights.get(layer.var)
        if layer.is_recurrent:
            return weights is not None and layer.var in self.states
        if weights is None or isinstance(weights, BlockQuantizedIntegers):
            return weights is not None and self.dynamic
        return self.dynamic or layer.source in self.data


def read_weights(model: FloatModel, layers: Sequence[Layer]) -> dict[Any, Array]:
    """Return the float weights by layer variable, without weights that cannot be evaluated."""
    flow, known = ir.DataFlow(model.main), model.known
    weights = {}
    for layer in layers:
        array = evaluate_weight(layer.weights, flow, known)
        if array is not None:
            weights[layer.var] = array
    return weights


def round_weights(weights: Array, axis: int, bits: int = 8) -> LayerWeights:
    """Round weights to the nearest int8, with a scale for each index of an axis."""
    most = _LARGEST[bits]
    others = tuple(other for other in range(weights.ndim) if other != axis % weights.ndim)
    largest = np.abs(weights).max(axis=others, initial=0.0).astype(np.float64)
    scales = np.where(largest > 0, largest / most, 1.0).astype(np.float32)
    shape = [-1 if index == axis % weights.ndim else 1 for index in range(weights.ndim)]
    rounded = np.rint(weights / scales.reshape(shape).astype(np.float64))
    return LayerWeights(np.clip(rounded, -most, most).astype(np.int8), scales, bits)


_LARGEST: Final = {8: 127, 7: ir.LARGEST_SEVEN_BIT}
_SMALLEST_NORMAL: Final = 2.0**-126


def keep_layers(
    model: FloatModel, layers: Sequence[Layer], quantization: Quantization, chosen: Collection[int]
) -> Quantization:
    """Return the quantization restricted to the layers with these indices and the tensors they need."""
    kept = [layers[index] for index in chosen]
    sources = dict.fromkeys(layer.source for layer in kept if layer.source in quantization.data)
    tensors = {*sources, *list_sums(model, kept, sources), *list_joined(model, sources)}
    return replace(
        quantization,
        weights={layer.var: quantization.weights[layer.var] for layer in kept},
        states=frozenset(layer.var for layer in kept if layer.var in quantization.states),
        data={var: scale for var, scale in quantization.data.items() if var in tensors},
        corrections={
            layer.var: quantization.corrections[layer.var]
            for layer in kept
            if layer.var in quantization.corrections
        },
    )


def insert(
    model: FloatModel,
    layers: Sequence[Layer],
    quantization: Quantization,
    *,
    with_switches: bool = False,
) -> FloatModel:
    """Insert `quantization` into a model from `fold_model`: layers with weights in it read integers.

    With switches, each layer is computed in float and in int8, and the last input, `SWITCHES`, selects one result.
    """
    changed = [layer for layer in layers if layer.var in quantization.weights]
    # layers with shared weights share their integers, except where smoothing changed the weights of one
    packs = {layer.var: (layer.name, quantization.weights[layer.var].pack()) for layer in changed}
    params, own = _declare(model, packs, shares=True)
    switches = relax.Var(SWITCHES, relax.TensorType([len(layers)], "float32"))
    mod = add_parameters(model.mod, [switches] if with_switches else [], list(own))
    marks.mark_bindings(mod)
    indices = {layer.var: index for index, layer in enumerate(layers)}
    mod = rewrite_main(
        *(mod, _Inserter, changed, params, quantization, indices),
        switches if with_switches else None,
    )
    made = _replace_weights(model, relax.transform.CanonicalizeBindings()(mod), own)
    return made._replace(mod=ir.mark_seven_bit_weights(made.mod, made.params))


def _declare(
    model: FloatModel, packs: Mapping[Any, tuple[str, Mapping[str, Array]]], *, shares: bool
) -> tuple[dict[Any, list[relax.Var]], dict[relax.Var, Array]]:
    """Declare parameters for packed integers; return them by key, and the array of each parameter.

    Each pack has a name and its arrays; a parameter is named `<pack>.<array>`. If `shares`, equal arrays share one
    parameter.
    """
    names = {str(var.name) for var in model.main.params}
    arrays: dict[relax.Var, Array] = {}
    known: dict[tuple[Any, ...], relax.Var] = {}
    params: dict[Any, list[relax.Var]] = {}
    for key, (name, pack) in packs.items():
        params[key] = []
        for what, array in pack.items():
            content: tuple[Any, ...] = (key, what)
            if shares:
                content = (what, array.dtype.str, array.shape, sha256(array.tobytes()).digest())
            if content not in known:
                kind = relax.TensorType(array.shape, str(array.dtype))
                known[content] = relax.Var(free_name(f"{name}.{what}", names), kind)
                arrays[known[content]] = array
            params[key].append(known[content])
    return params, arrays


def _replace_weights(model: FloatModel, mod: tvm.IRModule, own: Mapping[Any, Array]) -> FloatModel:
    """Return the model of a rewritten module with the weights that it uses, those in `own` included."""
    mod = _remove_unused(mod)
    nodes = take_nodes(mod, model.nodes)
    known = {**model.params, **{str(var.name): array for var, array in own.items()}}
    kept = {str(var.name): known[str(var.name)] for var in ir.list_weights(mod["main"])}
    return FloatModel(mod, kept, nodes)


def free_name(name: str, names: set[str]) -> str:
    """Return `name`, with a number appended if `names` has it already, and add the result to `names`."""
    free, number = name, 1
    while free in names:
        number += 1
        free = f"{name}{number}"
    names.add(free)
    return free


def add_parameters(
    mod: tvm.IRModule, inputs: Sequence[Any], weights: Sequence[Any]
) -> tvm.IRModule:
    """Append inputs and weights to the parameters of a module's `main`."""
    main = mod["main"]
    count = int(main.attrs["num_input"])
    params = [*main.params[:count], *inputs, *main.params[count:], *weights]
    return _with_parameters(mod, params, count + len(inputs))


def _remove_unused(mod: tvm.IRModule) -> tvm.IRModule:
    main = mod["main"]
    used = {
        var for binding in ir.list_bindings(main.body) for var in ir.list_variables(binding.value)
    } | set(ir.list_variables(main.body.body))
    count = int(main.attrs["num_input"])
    params = [*main.params[:count], *(var for var in main.params[count:] if var in used)]
    return _with_parameters(mod, params, count)


def _with_parameters(mod: tvm.IRModule, params: Sequence[Any], inputs: int) -> tvm.IRModule:
    main = mod["main"]
    attrs = {**dict(main.attrs), "num_input": inputs}
    changed = relax.Function(list(params), main.body, main.ret_ty, main.is_pure).with_attrs(attrs)
    made = ir.copy_module(mod)
    made.update_func(made.get_global_var("main"), changed)
    return made


class LayerRewriter(MainRewriter):
    """Rewrites layers, and lets `FOLLOWERS` read the replacements from `replace`."""

    def __init__(self, mod: tvm.IRModule, layers: Mapping[Any, Any]) -> None:
        super().__init__(mod)
        self._layers = {self.flow.values[var]: layer for var, layer in layers.items()}

    def rewrite_layer(self, call: relax.Call, rewritten: relax.Call, layer: Any) -> Any:
        """Return the replacement of a layer; `rewritten` is its call with new arguments."""
        raise NotImplementedError

    def replace(self, var: Any) -> Any:
        """Return what `FOLLOWERS` read in place of a tensor; None to keep the tensor."""

    def visit_call_(self, call: relax.Call) -> Any:
        """Rewrite one call."""
        rewritten = super().visit_call_(call)
        if (layer := self._layers.get(call)) is not None:
            return self.rewrite_layer(call, rewritten, layer)
        if ir.operator_name(call) not in FOLLOWERS:
            return rewritten
        pairs = zip(call.args, rewritten.args, strict=True)
        arguments = [self._follow(*pair) for pair in pairs]
        return relax.Call(rewritten.op, arguments, rewritten.attrs, rewritten.ty_args)

    def _follow(self, original: Any, argument: Any) -> Any:
        if isinstance(original, relax.Tuple):
            pairs = zip(original.fields, argument.fields, strict=True)
            return relax.Tuple([self._follow(*pair) for pair in pairs])
        var = self.flow.resolve(original)
        replaced = self.replace(var) if isinstance(var, relax.Var) else None
        return argument if replaced is None else replaced


class _Inserter(LayerRewriter):
    """Rewrites layers, and operators that share a tensor with them, to read quantized tensors."""

    def __init__(
        self,
        mod: tvm.IRModule,
        layers: Collection[Layer],
        params: Mapping[Any, Any],
        quantization: Quantization,
        indices: Mapping[Any, int],
        switches: Any,
    ) -> None:
        super().__init__(mod, {layer.var: layer for layer in layers})
        self._params, self._quantization = params, quantization
        self._indices, self._switches = indices, switches
        self._converted: dict[Any, Any] = {}
        self._moved: dict[Any, Any] = {}
        self._dynamic: dict[Any, tuple[Any, Any]] = {}

    def replace(self, var: Any) -> Any:
        is_data = self._switches is None and var in self._quantization.data
        return self._convert(var) if is_data else None

    def rewrite_layer(self, call: relax.Call, rewritten: relax.Call, layer: Layer) -> Any:
        if layer.is_recurrent:
            return self._rewrite_recurrent(rewritten, layer)
        data, factor = rewritten.args[0], None
        is_grouped = isinstance(self._quantization.weights[layer.var], BlockQuantizedIntegers)
        if self._quantization.dynamic and not is_grouped:
            data, factor = self._convert_dynamically(layer.data)
        elif layer.source in self._quantization.data:
            is_direct = layer.source.same_as(layer.data)
            # without switches, operators that rearrange data already read integers, like their source
            data = self._move(layer.data) if is_direct or self._switches is not None else data
        real = self._convert_weights(layer)
        product = relax.Call(call.op, [data, real], call.attrs, call.ty_args)
        if factor is not None:
            product = relax.op.multiply(self.emit(product), factor)
        if (correction := self._quantization.corrections.get(layer.var)) is not None:
            product = relax.op.add(self.emit(product), relax.const(correction, "float32"))
        if self._switches is None:
            return product
        own = self._switch(layer)
        difference = relax.op.subtract(self.emit(product), exact := self.emit(rewritten))
        return relax.op.add(exact, self.emit(relax.op.multiply(self.emit(difference), own)))

    def _switch(self, layer: Layer) -> Any:
        """Emit a layer's switch, of shape (1,): 1 for integers, 0 for float."""
        index = self._indices[layer.var]
        return self.emit(relax.op.strided_slice(self._switches, [0], [index], [index + 1]))

    def _rewrite_recurrent(self, rewritten: relax.Call, layer: Layer) -> Any:
        operands = RecurrentOperands(*rewritten.args)
        weights, rounding = self._convert_weights(layer), operands.rounding
        is_rounded = layer.var in self._quantization.states
        if self._switches is not None:
            own = self._switch(layer)
            other = self.emit(relax.op.subtract(relax.const(1.0, "float32"), own))
            parts = ((weights, own), (operands.recurrent, other))
            weights = relax.op.add(*(self.emit(relax.op.multiply(*part)) for part in parts))
            weights = self.emit(weights)
            rounding = self.emit(relax.op.concat([other, own], 0)) if is_rounded else rounding
        elif is_rounded:
            rounding = relax.const(ROUNDED)
        operands = operands._replace(recurrent=weights, rounding=rounding)
        return relax.Call(rewritten.op, list(operands), rewritten.attrs, rewritten.ty_args)

    def _convert_weights(self, layer: Layer) -> Any:
        weights, params = self._quantization.weights[layer.var], self._params[layer.var]
        if isinstance(weights, BlockQuantizedIntegers):
            operator = replace(weights.operator, rounds_data=self._quantization.dynamic)
            return self.emit(relax.op.permute_dims(self.emit(operator.call(*params))))
        scales = relax.const(weights.scales, "float32")
        zeros = relax.const(np.zeros(weights.scales.shape, np.int8), "int8")
        return self.emit(relax.op.dequantize(params[0], scales, zeros, axis=layer.axis))

    def _move(self, var: Any) -> Any:
        """Emit the dequantized values of a quantized tensor, or of a tensor rearranged from it."""
        if var in self._quantization.data:
            return self._convert(var)
        if var not in self._moved:
            call = self.flow.values[var]
            source = self.flow.resolve(call.args[0])
            rest = [self.visit_expr(argument) for argument in call.args[1:]]
            moved = relax.Call(call.op, [self._move(source), *rest], call.attrs, call.ty_args)
            self._moved[var] = self.emit(moved)
        return self._moved[var]

    def _convert_dynamically(self, var: Any) -> tuple[Any, Any]:
        """Emit integers minus their zero point, and their scale, like ONNX's DynamicQuantizeLinear."""
        if var not in self._dynamic:
            op, emit = relax.op, self.emit
            zero, steps = relax.const(0.0, "float32"), relax.const(255.0, "float32")
            data = self.visit_expr(var)
            high = emit(op.maximum(zero, emit(op.max(data))))
            low = emit(op.minimum(zero, emit(op.min(data))))
            scale = emit(op.divide(emit(op.subtract(high, low)), steps))
            # the range is empty if all values are 0
            scale = emit(op.maximum(scale, relax.const(_SMALLEST_NORMAL, "float32")))
            middle = emit(op.subtract(zero, emit(op.divide(low, scale))))
            middle = self.cast(emit(op.round(emit(op.clip(middle, 0, 255)))), "uint8")
            integers = emit(op.quantize(data, scale, middle, axis=0, out_dtype="uint8"))
            real = op.dequantize(integers, relax.const(1.0, "float32"), middle, axis=0)
            self._dynamic[var] = emit(real), scale
        return self._dynamic[var]

    def _convert(self, var: Any) -> Any:
        """Emit a tensor's quantized and dequantized values; a second call returns the same variable."""
        if var not in self._converted:
            scale, zero_point = self._quantization.data[var]
            dtype = self._quantization.integers.dtype
            parameters = (relax.const(scale, "float32"), relax.const(zero_point, dtype))
            data = self.visit_expr(var)
            integers = self.emit(relax.op.quantize(data, *parameters, axis=-1, out_dtype=dtype))
            self._converted[var] = self.emit(relax.op.dequantize(integers, *parameters, axis=-1))
        return self._converted[var]


# ---------------------------------------------------------------- tables
# Lookup tables, such as word embeddings.

_TAKE: Final = "relax.take"
_SHAPE_OF: Final = "relax.shape_of"
_BITS: Final = 8
# Kernels read rows in words of this many bytes.
_WORD: Final = 4
_RANK: Final = 2
# Tables with values of at least this magnitude stay float: near float32's limit, a scale rounded to bfloat16 may give infinity.
_MOST: Final = 2.0**127


class Table(NamedTuple):
    """A lookup table: the node of its first lookup (or the parameter), and the name of its parameter."""

    name: str
    weights: str


def list_tables(model: FloatModel) -> tuple[Table, ...]:
    """Return the lookup tables that can be quantized, in the order of their first lookups."""
    flow = ir.DataFlow(model.main)
    weights = {var: str(var.name) for var in ir.list_weights(model.main)}
    bindings = ir.list_bindings(model.main.body)
    # the nodes may be unknown
    nodes = [*model.nodes, *[""] * len(bindings)]
    others: set[Any] = set(ir.list_variables(model.main.body.body))
    found: dict[Any, str] = {}
    for binding, node in zip(bindings, nodes, strict=False):
        read = ir.list_variables(binding.value)
        if ir.operator_name(binding.value) == _SHAPE_OF:
            # to support negative indices, importers read the table's size; it is constant
            continue
        if (var := _find_table(binding.value, weights)) is not None:
            is_known = flow.is_weight(binding.value.args[1])
            others |= {var} if is_known else set()
            found.setdefault(var, node)
            read = [other for other in read if not other.same_as(var)]
        others |= set(read)
    return tuple(
        Table(node or weights[var], weights[var])
        for var, node in found.items()
        if var not in others and _is_accurate_in_8_bits(model.params[weights[var]])
    )


def round_tables(model: FloatModel, tables: Collection[Table]) -> dict[str, BlockQuantizedIntegers]:
    """Quantize tables to 8 bits with per-row scales; return them by the name of their parameter."""
    rounded = {}
    for table in tables:
        weights = model.params[table.weights]
        size = -(-weights.shape[1] // _WORD) * _WORD
        rounded[table.weights] = round_groups(weights, Groups(_BITS, size))
    return rounded


def insert_tables(model: FloatModel, tables: Mapping[str, BlockQuantizedIntegers]) -> FloatModel:
    """Return a model whose gathers read quantized tables; keys are names of the replaced weights."""
    if not tables:
        return model
    packs = {name: (name, table.pack()) for name, table in tables.items()}
    params, own = _declare(model, packs, shares=False)
    mod = add_parameters(model.mod, [], list(own))
    marks.mark_bindings(mod)
    return _replace_weights(model, rewrite_main(mod, _TableRewriter, tables, params), own)


class _TableRewriter(MainRewriter):
    OPERATORS = (_TAKE, _SHAPE_OF)

    def __init__(
        self,
        mod: tvm.IRModule,
        tables: Mapping[str, BlockQuantizedIntegers],
        params: Mapping[str, Sequence[Any]],
    ) -> None:
        super().__init__(mod)
        self._tables, self._params = tables, params
        self._real = self.new_memo()

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        name = str(call.args[0].name) if isinstance(call.args[0], relax.Var) else ""
        if (table := self._tables.get(name)) is None:
            return None
        if ir.operator_name(call) == _SHAPE_OF:
            return relax.ShapeExpr(ir.known_shape(call.args[0]))
        if name not in self._real:
            self._real[name] = self.emit(table.operator.call(*self._params[name]))
        arguments = [self._real[name], rewritten.args[1]]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)


def _find_table(value: Any, weights: Collection[Any]) -> Any:
    """Return the table whose rows a gather reads; None if the value is not such a gather."""
    if ir.operator_name(value) != _TAKE or value.attrs.axis is None or int(value.attrs.axis):
        return None
    table = value.args[0]
    if not ir.is_float32(table) or table not in weights:
        return None
    shape = ir.known_shape(table)
    # a row of one value needs as much memory as its scale
    return table if len(shape) == _RANK and shape[1] > 1 else None


def _is_accurate_in_8_bits(table: Array) -> bool:
    """Return whether rounding each row to 8 bits keeps at least half of its nonzero values.

    False for attention masks, whose large values stand for infinity: the step becomes larger than most values.
    """
    sizes = np.abs(table)
    largest = sizes.max(axis=1, keepdims=True, initial=0.0)
    if not (largest < _MOST).all():
        return False
    is_lost = (sizes > 0) & (sizes * np.float32(2**_BITS - 2) < largest)
    counts = np.count_nonzero(is_lost, axis=1), np.count_nonzero(sizes, axis=1)
    return bool((2 * counts[0] <= counts[1]).all())
