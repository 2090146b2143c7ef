"""A model through import, build, export and verify in this process, with something that is wrong on the way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
import pytest
import tvm
import tvm_ffi
from safetensors.numpy import load_file, save_file
from tvm import relax, tirx

from tests.support.kernels import host_level
from tvmflow.compiler.lowering import LoweredModel
from tvmflow.core.errors import VerifyFailed
from tvmflow.graph import ir
from tvmflow.recipe import Recipe
from tvmflow.recipe.sections import Verify
from tvmflow.stages import STAGES, build
from tvmflow.stages.base import StageContext
from tvmflow.stages.lower import LOWERED_ROLE
from tvmflow.stages.verify import inner_tensors, latency
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.stages.verify_settings import CheckSettings, InputSettings, VerifySettings
from tvmflow.targets.host import read_host
from tvmflow.targets.resolve import ResolvedTarget

Array = np.ndarray[Any, Any]
Schedule = Callable[..., Any]

_STAGES: Final = ("import", "build", "export", "verify")


class Verified:
    """A model in a folder, each stage run once; `verify` may reject what is made wrong afterwards.

    Args:
        folder: The folder, empty.
        model: The recipe's `model`, with files by role.
        files: These files.
        operators: Files of custom operators by name.
        target: TVM's target; that of this machine's level by default.
        fields: More fields of the recipe.
    """

    def __init__(
        self,
        folder: Path,
        model: Mapping[str, Any],
        files: Mapping[str, Path],
        target: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self._folder, self._files = folder, dict(files)
        self._recipe = Recipe.model_validate(
            {
                "recipe": 1,
                "name": "net",
                "model": dict(model),
                "outputs": ["bundle"],
                "verify": {"repeat": 1},
                **fields,
            }
        )
        device = {"kind": "cpu", "class": "any"}
        flags = tuple(sorted(read_host().flags))
        self._target = ResolvedTarget("host", target or host_level(), 2, flags, device, "")
        self._runs = 0
        self.imported = self._run("import", {})
        if self._recipe.quantize:
            # it takes the place of what was imported
            made = self._run("quantize", self.imported)
            self.imported |= {name.replace("quantize/", "import/"): p for name, p in made.items()}
        self._lowered = self._run("lower", self.imported)

    @property
    def params(self) -> dict[str, Array]:
        """The imported weights by name."""
        return dict(load_file(self.imported["import/params.safetensors"]))

    def deliver(
        self,
        params: Mapping[str, Array] | None = None,
        kernel: Callable[[tvm.IRModule], tvm.IRModule] | None = None,
    ) -> dict[str, Path]:
        """Return the files of `build` and `export`.

        Args:
            params: Other weights than those that were imported.
            kernel: Changes the lowered module before it is scheduled.
        """
        files = {**self.imported, **self._lowered}
        if params is not None:
            path = self._next("params") / "params.safetensors"
            save_file(dict(params), path)
            files["import/params.safetensors"] = path
        with _changed(kernel):
            built = self._run("build", files)
        self.exported = self._run("export", files | built)
        delivered = {"import/params.safetensors": files["import/params.safetensors"]}
        return delivered | built | self.exported

    def verify(
        self,
        params: Mapping[str, Array] | None = None,
        kernel: Callable[[tvm.IRModule], tvm.IRModule] | None = None,
        *,
        is_delivered_only: bool = False,
        replaced: Mapping[str, Path] = MappingProxyType({}),
        of: Verified | None = None,
    ) -> Verdict | VerifyFailed:
        """Build, export and verify a library.

        Args:
            params: Other weights than those that were imported.
            kernel: Changes the lowered module before it is scheduled.
            is_delivered_only: The change is in the delivered library, and in no other one that `verify` builds.
            replaced: Other files than those that were exported.
            of: Another model, whose library is delivered for this one.

        Returns:
            The verdict, or the error with which it rejects the library.
        """
        files = {**self.imported, **self._lowered}
        try:
            files |= {**(of or self).deliver(params, kernel), **replaced}
            if self._recipe.quantize or of:
                # the reference computes with these weights
                files |= self.imported
            with _changed(None if is_delivered_only else kernel), _without_times():
                self._run("verify", files)
        except VerifyFailed as error:
            return error
        return cast(Verdict, self.verdict)

    @property
    def measurements(self) -> Any:
        """What the last `verify` wrote, also of a library that it rejected."""
        path = self._folder / f"{self._runs}-verify" / "out" / "measurements.json"
        return json.loads(path.read_text())

    def _next(self, name: str) -> Path:
        self._runs += 1
        folder = self._folder / f"{self._runs}-{name}"
        folder.mkdir(parents=True)
        return folder

    def _run(self, name: str, files: Mapping[str, Path]) -> dict[str, Path]:
        stage = STAGES[name]
        folder = self._next(name)
        out, work, nothing = folder / "out", folder / "work", folder / "nothing"
        for path in (out, work, nothing):
            path.mkdir()
        inputs = {
            role: path
            for role, path in files.items()
            if role.partition("/")[0] in stage.TRAITS.needs
        }
        inputs |= self._files if stage.TRAITS.reads else {}
        context = StageContext(inputs, out, work, nothing, nothing, lambda event: None)
        settings = stage.settings(self._recipe, None if name == "import" else self._target)
        self.verdict = stage.run(settings, context)
        written = (path for path in out.rglob("*") if path.is_file())
        return {f"{name}/{path.relative_to(out)}": path for path in written}

    def list_kernels(self, *, with_dynamic: bool = False) -> list[str]:
        """Return the names of the kernels that can be made wrong: those that store into results of a known shape.

        Args:
            with_dynamic: Those with results of a dynamic shape, too.
        """
        mod = LoweredModel.read(self._lowered[LOWERED_ROLE]).mod
        return sorted(
            str(var.name_hint)
            for var, function in mod.functions_items()
            if isinstance(function, tirx.PrimFunc)
            and find_result(function, _count_results(mod, var)) is not None
            and (
                with_dynamic
                or all(isinstance(size, tirx.IntImm) for size in function.params[-1].ty.shape)
            )
        )


@contextlib.contextmanager
def _changed(change: Callable[[tvm.IRModule], tvm.IRModule] | None) -> Iterator[None]:
    """Let every module that is scheduled be changed before."""
    schedule = build.schedule_kernels

    def schedule_changed(lowered: tvm.IRModule, *arguments: Any, **options: Any) -> Any:
        return schedule(change(lowered) if change else lowered, *arguments, **options)

    for module in (build, inner_tensors):
        module.schedule_kernels = schedule_changed  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in (build, inner_tensors):
            module.schedule_kernels = schedule  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_times() -> Iterator[None]:
    """Measure no latency: of a library that is wrong nobody wants to know it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "add_latencies", lambda *_: None)
        patch.setattr(latency, "add_reference_time", lambda *_: None)
        yield


# ---------------------------------------------------------------- what is wrong


def negate_largest(params: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Return weights, of which the largest of one tensor is negated."""
    weights = params[name].copy()
    place = int(np.argmax(np.abs(weights.astype(np.float64))))
    flat = weights.reshape(-1)
    flat[place] = -max(flat[place], -127) if weights.dtype == np.int8 else -flat[place]
    return {**params, name: weights}


def spoil_kernel(name: str) -> Callable[[tvm.IRModule], tvm.IRModule]:
    """Return what makes a kernel with this name wrong: one slice of its first result is negated, or larger where it has integers."""

    def apply(mod: tvm.IRModule) -> tvm.IRModule:
        changed = ir.copy_module(mod)
        for var, function in mod.functions_items():
            if var.name_hint == name:
                changed[var] = _spoil(function, _count_results(mod, var))
        return changed

    return apply


def _count_results(mod: tvm.IRModule, kernel: tvm.ir.GlobalVar) -> int:
    """Return how many results a kernel has, by a call of it; a model may read the first alone."""
    for value in ir.DataFlow(mod["main"]).values.values():
        if ir.operator_name(value) == "relax.call_tir" and value.args[0].same_as(kernel):
            return len(value.ty.fields) if isinstance(value.ty, relax.TupleType) else 1
    return 1


def find_result(function: tirx.PrimFunc, results: int) -> Any:
    """Return the first result of a kernel that it stores into; None for one that writes through pointers."""
    stored = [store.buffer for store in ir.find_nodes(function.body, tirx.BufferStore)]
    params = function.params[-results:]
    return next((p for p in params if any(buffer.same_as(p) for buffer in stored)), None)


def change_result(
    name: str, change: Callable[[Any, Sequence[Any], Sequence[Any]], Any]
) -> Callable[[tvm.IRModule], tvm.IRModule]:
    """Return what changes each value that a kernel stores into its result.

    Args:
        name: The kernel.
        change: Returns a value in place of one, from that, its indices and the shape of the result.
    """

    def apply(mod: tvm.IRModule) -> tvm.IRModule:
        changed = ir.copy_module(mod)
        for var, function in mod.functions_items():
            if var.name_hint == name:
                result = find_result(function, _count_results(mod, var))
                assert result is not None
                changed[var] = _change_stores(function, result, change)
        return changed

    return apply


def _change_stores(
    function: tirx.PrimFunc,
    result: Any,
    change: Callable[[Any, Sequence[Any], Sequence[Any]], Any],
) -> tirx.PrimFunc:
    def rewrite(store: Any) -> Any:
        if not store.buffer.same_as(result):
            return store
        value = change(store.value, store.indices, result.ty.shape)
        return tirx.BufferStore(store.buffer, value, store.indices)

    body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, rewrite))
    assert not body.same_as(function.body)
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _spoil(function: tirx.PrimFunc, results: int) -> tirx.PrimFunc:
    result = find_result(function, results)
    assert result is not None
    dtype = str(result.ty.dtype.dtype)
    is_integer = dtype.startswith(("int", "uint"))
    place = 0 if is_integer else min(1, int(result.ty.shape[-1]) - 1)
    # A kernel that rounds to bytes may be one step off anyway.
    step = 40 if dtype.endswith("int8") else 1

    def rewrite(store: Any) -> Any:
        if not store.buffer.same_as(result):
            return store
        is_spoiled = store.indices[-1] == place
        if is_integer:
            value = store.value + tirx.Select(
                is_spoiled, tirx.const(step, dtype), tirx.const(0, dtype)
            )
        else:
            sign = tirx.Select(is_spoiled, tirx.const(-1.0, dtype), tirx.const(1.0, dtype))
            value = store.value * sign
        return tirx.BufferStore(store.buffer, value, store.indices)

    body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, rewrite))
    assert not body.same_as(function.body)
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def settings(ranges: dict[str, Any] | None = None, **checks: Any) -> VerifySettings:
    made = CheckSettings(**{**Verify().model_dump(), "data": False, **checks})
    inputs = {name: InputSettings(range=range_) for name, range_ in (ranges or {}).items()}
    return VerifySettings.model_construct(verify=made, inputs=inputs)
