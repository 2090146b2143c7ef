"""The reference process of TFLite models: `python -m tvmflow.frontends.tflite._reference_worker`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tvmflow.frontends._frames import Array, Message, serve


class _Interpreter:
    """LiteRT on the CPU.

    Inner tensors are only there where no delegate computes several operators at once; latency is
    that of the interpreter as programs use it.
    """

    def __init__(self, first: Message) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        self.name = f"LiteRT {importlib.metadata.version('ai-edge-litert')}"
        self.note = ""
        self._inputs: dict[str, int] = first["inputs"]
        self._results: list[int] = first["results"]
        options: dict[str, Any] = {}
        if first["has_inner_tensors"]:
            options = {
                "experimental_preserve_all_tensors": True,
                "experimental_op_resolver_type": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            }
        self._interpreter: Any = Interpreter(
            model_path=first["model"], num_threads=first["threads"], **options
        )
        for name, shape in first["shapes"].items():
            self._interpreter.resize_tensor_input(self._inputs[name], shape)
        self._interpreter.allocate_tensors()

    def run(self, arrays: Mapping[str, Array]) -> list[Array]:
        self.prepare(arrays)()
        return [np.array(self._interpreter.get_tensor(number)) for number in self._results]

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        for name, array in arrays.items():
            self._interpreter.set_tensor(self._inputs[name], array)
        invoke: Callable[[], object] = self._interpreter.invoke
        return invoke


if __name__ == "__main__":
    serve(_Interpreter)
