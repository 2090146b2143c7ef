"""A C library, built in this process and called through ctypes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tests.support import exports
from tests.support.exports import Exported
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.c_program import compile_program
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.options import LoweringOptions
from tvmflow.frontends.base import LoadedModel
from tvmflow.runtime.c_loader import Buffer, Options, Tensor
from tvmflow.targets import c_runtime, form_names
from tvmflow.targets.c_runtime import DescribedModel
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]


class CLibrary:
    """A loaded library, and a context of it.

    Args:
        path: The shared library.
        name: The prefix of its functions.
        threads: The threads of the context.
    """

    def __init__(self, path: Path, name: str, threads: int = 2) -> None:
        self._library = ctypes.CDLL(str(path))
        self._name = name
        for function in ("inputs", "outputs"):
            self.function(function).restype = ctypes.POINTER(Tensor)
        for function in ("message", "kernel_name"):
            self.function(function).restype = ctypes.c_char_p
        self.context = ctypes.c_void_p()
        self.status = self.create(Options(abi=1, threads=threads))

    def function(self, name: str) -> Any:
        """A function of the library."""
        return getattr(self._library, f"{self._name}_{name}")

    def create(self, options: Options | None) -> int:
        """Make the context, and return what the library returns."""
        pointer = ctypes.byref(options) if options else None
        return int(self.function("create")(pointer, ctypes.byref(self.context)))

    def tensors(self, direction: str, count: int) -> list[Tensor]:
        """The description of `inputs` or `outputs`."""
        described = self.function(direction)()
        return [described[index] for index in range(count)]

    def run_buffers(self, inputs: list[Buffer], outputs: list[Buffer]) -> int:
        """Call `run` as it is, and return what it returns."""
        in_buffers = (Buffer * len(inputs))(*inputs)
        out_buffers = (Buffer * len(outputs))(*outputs)
        sizes = (ctypes.c_size_t(len(inputs)), ctypes.c_size_t(len(outputs)))
        return int(self.function("run")(self.context, in_buffers, sizes[0], out_buffers, sizes[1]))

    def run(self, feed: Mapping[str, Array], outputs: int = 1, offset: int = 0) -> list[Array]:
        """Return the outputs; all tensors begin `offset` bytes after a multiple of 64."""
        inputs = self.tensors("inputs", len(feed))
        arguments = [_place(np.ascontiguousarray(feed[t.name.decode()]), offset) for t in inputs]
        described = self.tensors("outputs", outputs)
        results = [
            _place(np.zeros(tensor.shape[: tensor.rank], tensor.dtype.decode()), offset)
            for tensor in described
        ]
        status = self.run_buffers(list(map(buffer_of, arguments)), list(map(buffer_of, results)))
        assert status == 0, self.function("message")(status)
        return results


class BuiltTwice(NamedTuple):
    """A model, compiled untuned from the same kernels for both executors.

    Attributes:
        model: The model.
        library: The shared library with the prefix `net`.
        executable: What TVM's virtual machine runs.
    """

    model: LoadedModel
    library: Path
    executable: relax.VMExecutable

    @classmethod
    def build(
        cls,
        model: LoadedModel,
        target: Mapping[str, Any],
        folder: Path,
        options: LoweringOptions | None = None,
    ) -> BuiltTwice:
        """Compile a model in a folder."""
        tvm_target = make_target(target)
        lowered = lowering.lower(model.mod, tvm_target, options or LoweringOptions())
        mod = schedules.schedule_untuned(lowered.mod, target, 1).mod
        weights = lowered.compute_weights(model.params)
        objects = folder / "objects"
        objects.mkdir()
        compile_program(ScheduledModel(mod, weights, tvm_target), "net_", objects)
        signature = {
            direction: [spec.to_json() for spec in getattr(model, direction)]
            for direction in ("inputs", "outputs")
        }
        described = DescribedModel("net", signature, (), str(target["mtriple"]))
        library = folder / "libnet.so"
        c_runtime.link(described, {path.name: path for path in objects.iterdir()}, library)
        return cls(model, library, lowering.ScheduledModel(mod, weights, tvm_target).compile())

    def run(self, feed: Mapping[str, Array]) -> tuple[list[Array], list[Array]]:
        """Return the outputs of the C library and of the virtual machine."""
        values = [np.asarray(feed[spec.name], order="C") for spec in self.model.inputs]
        machine = relax.VirtualMachine(self.executable, tvm.cpu())
        result = machine["main"](*map(tvm.runtime.tensor, values))
        tensors = [result] if hasattr(result, "numpy") else list(result)
        outputs = CLibrary(self.library, "net").run(feed, len(self.model.outputs))
        return outputs, [tensor.numpy() for tensor in tensors]


def buffer_of(array: Array) -> Buffer:
    """An array as the library takes it."""
    return Buffer(array.ctypes.data, array.nbytes)


def _place(array: Array, offset: int) -> Array:
    """Return a copy of an array, so many bytes after a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    placed: Array = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def divide_loops(program: str) -> str:
    """Return the C code of a model with all parallel loops divided into 64 tasks, however short they are."""
    program, calls = re.subn(r"TF_CALL\((\d+), \d+,", r"TF_CALL(\1, 64,", program)
    program, limits = re.subn(r"(#define TF_MOST_TASKS) \d+u", r"\1 64u", program)
    assert calls and limits == 1
    return program


def write_parallel_sources(exported: Exported, folder: Path) -> list[Path]:
    """Write the C code of a model all of whose parallel loops are divided, however short; return its other objects."""
    built = exports.built_of(exported, exports.recipe(), exports.target())
    form = built.forms[form_names.C_LIBRARY]
    (folder / "parallel.c").write_text(divide_loops(form[c_runtime.PROGRAM].read_text()))
    c_runtime.write_sources(built.c_model, {c_runtime.PROGRAM: folder / "parallel.c"}, folder)
    return [path for path in form.values() if path.suffix == ".o"]


def link_parallel(exported: Exported, folder: Path) -> Path:
    """Return a shared library of a model all of whose parallel loops are divided, however short."""
    objects = write_parallel_sources(exported, folder)
    built = exports.built_of(exported, exports.recipe(), exports.target())
    compiled = {path.name: path for path in (*objects, folder / c_runtime.PROGRAM)}
    library = folder / "libdigits.so"
    c_runtime.link(built.c_model, compiled, library, folder / "libdigits.a", folder / "digits.h")
    return library
