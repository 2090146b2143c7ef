"""TVM's tensor instructions, which schedules name: registered for one target, and quickly."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import tvm

from tvmflow.targets.gpu import CUDA
from tvmflow.values import Json

_PACKAGE: Final = "tvm.s_tir.tensor_intrin"
_DECORATORS: Final = "tvm.tirx.script.parser.entry"
# Which of TVM's modules of tensor instructions the schedules of an architecture, or of a GPU, may name.
# The package imports all of them, which takes long.
_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "x86_64": ("x86",),
    "i686": ("x86",),
    "aarch64": ("arm_cpu",),
    "arm64": ("arm_cpu",),
    "arm": ("arm_cpu",),
    "armv7l": ("arm_cpu",),
    "riscv64": ("riscv_cpu",),
    "hexagon": ("hexagon",),
    CUDA: (CUDA,),
}


def load_intrinsics(target: Mapping[str, Json]) -> None:
    """Register the tensor instructions that schedules for `target` may name, and no others."""
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(Path(tvm.__file__).parent / "s_tir" / "tensor_intrin")]
        sys.modules[_PACKAGE] = package
    arch = str(target.get("mtriple") or os.uname().machine).partition("-")[0]
    names = _MODULES.get(CUDA if target["kind"] == CUDA else arch, ())
    if all(f"{_PACKAGE}.{name}" in sys.modules for name in names):
        return
    with _quick_decorators():
        for name in names:
            __import__(f"{_PACKAGE}.{name}")


@contextlib.contextmanager
def _quick_decorators() -> Iterator[None]:
    """TVM's decorators look at the source of every caller: four fifths of the time, and for classes alone."""
    entry = sys.modules[_DECORATORS]
    before = entry.inspect
    entry.inspect = types.SimpleNamespace(  # type: ignore[attr-defined]
        isfunction=inspect.isfunction, stack=_stack
    )
    try:
        yield
    finally:
        entry.inspect = before  # type: ignore[attr-defined]


def _stack() -> list[inspect.FrameInfo]:
    """The callers as `inspect.stack` has them, without a line of their source."""
    found = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(
            inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
        )
        frame = frame.f_back
    return found
