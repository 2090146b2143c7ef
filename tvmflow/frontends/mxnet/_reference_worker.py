"""The reference process of MXNet models: `python -m tvmflow.frontends.mxnet._reference_worker`.

MXNet 1.9 needs NumPy aliases that were removed long ago, reads its settings from the environment,
and may crash, so it does not run in the process that compares.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.frontends._reference_process import Array, LoadedReference, Message, serve


def import_mxnet() -> Any:
    """Return the module `mxnet`, in a process that runs nothing else.

    Raises:
        ImportError: whatever went wrong.
    """
    warnings.simplefilter("ignore")
    for alias in (bool, int, float, complex, object, str):
        if alias.__name__ not in vars(np):
            setattr(np, alias.__name__, alias)
    try:
        import mxnet
    except Exception as error:
        # With an unsuitable NumPy or system library MXNet raises many kinds of errors.
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return mxnet


class _Model(LoadedReference):
    """A checkpoint, bound for the input shapes of a call."""

    def __init__(self, mx: Any, first: Message) -> None:
        self.name = f"MXNet {mx.__version__}"
        if first["operators"]:
            self._register_operators(mx, first)
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
        self._executor = symbol.simple_bind(
            mx.cpu(),
            grad_req="null",
            type_dict={name: dtype for name, dtype in dtypes.items() if name in known},
            **shapes,
            **self._operand_shapes(symbol, weights),
        )
        self._executor.copy_params_from(weights, weights, allow_extra_params=True)
        self._shapes = shapes

    def _operand_shapes(self, symbol: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the shapes of weights where operators of the recipe read some: MXNet cannot infer these."""
        names = symbol.list_arguments() if self.note else ()
        return {name: weights[name].shape for name in names if name in weights}

    def _register_operators(self, mx: Any, first: Message) -> None:
        """Let MXNet compute the recipe's operators by their references."""
        from tvmflow.frontends.mxnet._own_operators import register
        from tvmflow.operators.loading import load_operators

        files = {role: Path(path) for role, path in first["operators"].items()}
        if names := register(mx, Path(first["symbol"]), load_operators(files)):
            self.note = f"the reference of {', '.join(names)} is the numpy function of the recipe"

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
            # MXNet computes asynchronously.
            output.wait_to_read()
        return outputs


if __name__ == "__main__":
    serve(lambda first: _Model(import_mxnet(), first))
