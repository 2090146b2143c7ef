"""The process in which MXNet runs: `python -m tvmflow.frontends.mxnet._reference_worker`, see `_frames.serve`.

MXNet 1.9 needs NumPy aliases that were removed long ago, reads its settings from the environment,
and may crash; none of that may touch the user's process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tvmflow.frontends._frames import Array, Message, serve


def import_mxnet() -> Any:
    """The module `mxnet`, in a process that runs nothing else. Raises ImportError, whatever went wrong."""
    warnings.simplefilter("ignore")
    for alias in (bool, int, float, complex, object, str):
        if alias.__name__ not in vars(np):
            setattr(np, alias.__name__, alias)
    try:
        import mxnet
    except Exception as error:
        # with a NumPy or a system library that it cannot work with, MXNet raises whatever comes
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return mxnet


class _Model:
    """A checkpoint, bound for fixed input shapes."""

    def __init__(self, mx: Any, first: Message) -> None:
        self.version: str = mx.__version__
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
        )
        self._executor.copy_params_from(weights, weights, allow_extra_params=True)
        self._feeds = {name: self._executor.arg_dict[name] for name in shapes}

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        outputs = self.prepare(arrays)()
        return {str(index): value.asnumpy() for index, value in enumerate(outputs)}

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], list[Any]]:
        for name, value in arrays.items():
            self._feeds[name][:] = value
        return self._call

    def _call(self) -> list[Any]:
        outputs: list[Any] = self._executor.forward(is_train=False)
        for output in outputs:
            # MXNet computes while Python goes on
            output.wait_to_read()
        return outputs


if __name__ == "__main__":
    serve(lambda first: _Model(import_mxnet(), first))
