"""The reference process of MXNet models: `python -m tvmflow.frontends.mxnet._reference_worker`.

A separate process, because MXNet 1.9 needs removed NumPy aliases, reads its settings from the environment, and may
crash.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import quoted
from tvmflow.core.types import Array
from tvmflow.custom_operators.definition import Node, Operator, Tensor
from tvmflow.frontends._reference_process import LoadedReference, Message, check_reference, serve
from tvmflow.frontends.mxnet._checkpoint import (
    DOMAIN,
    count_outputs,
    custom_attributes,
    find_operator,
    read_symbol,
)

if TYPE_CHECKING:
    from tvmflow.custom_operators.loading import Operators


def import_mxnet() -> Any:
    """Import and return `mxnet`, with NumPy's removed aliases; ImportError for any error."""
    warnings.simplefilter("ignore")
    for alias in (bool, int, float, complex, object, str):
        if alias.__name__ not in vars(np):
            setattr(np, alias.__name__, alias)
    try:
        import mxnet
    except Exception as error:
        # With an incompatible NumPy or system library, MXNet raises many kinds of errors.
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return mxnet


class _Model(LoadedReference):
    """A checkpoint whose executor is bound to the input shapes of a call."""

    def __init__(self, mx: Any, first: Message) -> None:
        self.name = f"MXNet {mx.__version__}"
        if first["operators"]:
            from tvmflow.custom_operators.loading import load_operators

            files = {role: Path(path) for role, path in first["operators"].items()}
            if names := _register(mx, Path(first["symbol"]), load_operators(files)):
                self.note = (
                    f"the reference of {', '.join(names)} is the numpy function of the recipe"
                )
        symbol = mx.sym.load(first["symbol"])
        if first["tensors"]:
            inner = symbol.get_internals()
            symbol = mx.sym.Group([symbol, *(inner[name] for name in first["tensors"])])
        weights = {
            name.removeprefix("arg:").removeprefix("aux:"): value
            for name, value in mx.nd.load(first["params"]).items()
        }
        dtypes = {name: np.dtype(value.dtype).name for name, value in weights.items()}
        dtypes.update({spec["name"]: spec["dtype"] for spec in first["inputs"]})
        known = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
        shapes = {spec["name"]: tuple(spec["shape"]) for spec in first["inputs"]}
        # MXNet cannot infer the shapes of weights that custom operators read.
        read = symbol.list_arguments() if self.note else ()
        operands = {name: weights[name].shape for name in read if name in weights}
        self._executor = symbol.simple_bind(
            mx.cpu(),
            grad_req="null",
            type_dict={name: dtype for name, dtype in dtypes.items() if name in known},
            **shapes,
            **operands,
        )
        self._executor.copy_params_from(weights, weights, allow_extra_params=True)
        self._shapes = shapes

    def run(self, arrays: Mapping[str, Array]) -> list[Array]:
        return [output.asnumpy() for output in self.prepare(arrays)()]

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], list[Any]]:
        shapes = {name: value.shape for name, value in arrays.items()}
        if shapes != self._shapes:
            self._executor = self._executor.reshape(
                partial_shaping=True, allow_up_sizing=True, **shapes
            )
            self._shapes = shapes
        for name, value in arrays.items():
            self._executor.arg_dict[name][:] = value
        return self._call

    def _call(self) -> list[Any]:
        outputs: list[Any] = self._executor.forward(is_train=False)
        for output in outputs:
            # MXNet executes asynchronously.
            output.wait_to_read()
        return outputs


# ---------------------------------------------------------------- custom operators
# NumPy references, registered as custom operators of MXNet.


def _register(mx: Any, symbol: Path, operators: Operators) -> list[str]:
    """Register the reference of each used custom operator with MXNet; return the operators' names."""
    graph = read_symbol(symbol)
    arities: dict[Operator, tuple[int, int]] = {}
    for index, node in enumerate(graph.nodes):
        operator = find_operator(node, operators)
        if operator is None:
            continue
        check_reference(operator, quoted(node.name), "MXNet")
        outputs = max(count_outputs(graph, index), arities.get(operator, (0, 0))[1])
        count = len(node.inputs)
        if arities.get(operator, (count, 0))[0] != count:
            raise StageError(
                f"nodes of the type {operator.name} have different numbers of inputs, which the reference cannot have",
                fix="disable the comparison with `verify: {against: none}`",
            )
        arities[operator] = count, outputs
    for operator, (inputs, outputs) in arities.items():
        _register_one(mx, operator, operators, inputs, outputs)
    return [str(operator) for operator in arities]


def _register_one(
    mx: Any, operator: Operator, operators: Operators, inputs: int, count: int
) -> None:
    def compute(attributes: dict[str, str], arrays: Sequence[Array]) -> list[Array]:
        specs = [Tensor(array.shape, str(array.dtype)) for array in arrays]
        described = Node(
            operator=operator.name,
            domain=DOMAIN,
            version=1,
            attributes=custom_attributes(attributes),
            inputs=tuple(specs),
            outputs=count,
        )
        assert operator.reference is not None
        results = operators.call(operator, operator.reference, described, *arrays)
        results = results if isinstance(results, list | tuple) else [results]
        return [np.asarray(result) for result in results[:count]]

    class Computed(mx.operator.CustomOp):  # type: ignore[misc]
        def __init__(self, attributes: dict[str, str]) -> None:
            super().__init__()
            self._attributes = attributes

        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            del is_train, aux
            results = compute(self._attributes, [data.asnumpy() for data in in_data])
            for target, kind, result in zip(out_data, req, results, strict=True):
                self.assign(target, kind, mx.nd.array(result, dtype=target.dtype))

    class Properties(mx.operator.CustomOpProp):  # type: ignore[misc]
        def __init__(self, **attributes: str) -> None:
            super().__init__(need_top_grad=False)
            self._attributes = attributes

        def list_arguments(self) -> list[str]:
            return [f"data{number}" for number in range(inputs)]

        def list_outputs(self) -> list[str]:
            return ["output"] if count == 1 else [f"output{number}" for number in range(count)]

        def infer_shape(self, in_shape: Any) -> tuple[Any, Any, Any]:
            """Return the shapes of inputs, outputs and states, by computing the results for zeros."""
            zeros = [np.zeros(shape, np.float32) for shape in in_shape]
            results = compute(self._attributes, zeros)
            return in_shape, [list(result.shape) for result in results], []

        def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Computed:
            del ctx, in_shapes, in_dtypes
            return Computed(self._attributes)

    mx.operator.register(operator.name)(Properties)


if __name__ == "__main__":
    serve(lambda first: _Model(import_mxnet(), first))
