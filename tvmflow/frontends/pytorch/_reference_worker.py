"""The reference process of PyTorch archives: `python -m tvmflow.frontends.pytorch._reference_worker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmflow.frontends._frames import Array, Message, serve
from tvmflow.frontends.pytorch._archive import copy_for_pytorch, read_archive
from tvmflow.frontends.pytorch._program import import_torch, open_program


class _Program:
    """The program of an archive, run operator by operator as PyTorch does by default."""

    def __init__(self, torch: Any, first: Message) -> None:
        self.name = f"PyTorch {torch.__version__}"
        self.note = ""
        self._torch = torch
        torch.set_num_threads(first["threads"])
        archive = Path(first["archive"])
        copy = copy_for_pytorch(archive, Path(first["scratch"]))
        program = open_program(str(copy), read_archive(archive).containers, first["tensors"])
        self._module = program.module()
        self._spec = program.call_spec.in_spec
        self._arguments = [
            (spec.arg.name, getattr(spec.arg, "value", None))
            for spec in program.graph_signature.input_specs
            if spec.kind.name == "USER_INPUT"
        ]

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        outputs = self.prepare(arrays)()
        return [output.numpy() for output in outputs]

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], Sequence[Any]]:
        from torch.utils import _pytree as pytree

        tensors = {name: self._torch.from_numpy(array) for name, array in arrays.items()}
        values = [tensors.get(name, constant) for name, constant in self._arguments]
        positional, by_name = pytree.tree_unflatten(values, self._spec)

        def infer() -> Sequence[Any]:
            with self._torch.inference_mode():
                outputs: Sequence[Any] = self._module(*positional, **by_name)
                return outputs

        return infer


if __name__ == "__main__":
    serve(lambda first: _Program(import_torch(), first))
