"""Registration of the tensor intrinsics that recorded schedules name, for one target."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import tvm

from tvmflow.compiler.schedules import dot_products
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for

_PACKAGE: Final = "tvm.s_tir.tensor_intrin"
_DECORATORS: Final = "tvm.tirx.script.parser.entry"


def load_intrinsics(target: Mapping[str, Json]) -> None:
    """Register the tensor intrinsics that schedules for `target` may name, and no others."""
    # TVM's own package imports all its modules, which takes long.
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(Path(tvm.__file__).parent / "s_tir" / "tensor_intrin")]
        sys.modules[_PACKAGE] = package
    with _fast_decorators():
        names = backend_for(target).tensor_intrinsics(target)
        for name in names:
            importlib.import_module(f"{_PACKAGE}.{name}")
        dot_products.register_intrinsics()
        if "x86" in names:
            dot_products.replace_vnni()


@contextlib.contextmanager
def _fast_decorators() -> Iterator[None]:
    """Keep TVM's decorators from reading the source of every caller, which takes 80 % of their time."""
    entry = sys.modules[_DECORATORS]
    original = entry.inspect
    entry.inspect = types.SimpleNamespace(  # type: ignore[attr-defined]
        isfunction=inspect.isfunction, stack=_list_frames
    )
    try:
        yield
    finally:
        entry.inspect = original  # type: ignore[attr-defined]


def _list_frames() -> list[inspect.FrameInfo]:
    """Return the callers as `inspect.stack` does, without their source."""
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in traceback.walk_stack(sys._getframe(1))
    ]
