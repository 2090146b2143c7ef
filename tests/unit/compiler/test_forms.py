"""The forms in which a model is compiled; a model that has no such form is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.core.errors import StageError
from tvmflow.exporters import EXPORTERS


def inputs_with(kernel: Any, dtype: str = "float32") -> Any:
    """Return a model of one kernel that computes `kernel(element)` of eight numbers."""
    import tvm
    from tvm import relax, te

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8,), dtype))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit_te(
                lambda t: te.compute(t.shape, lambda i: kernel(t[i])),
                x,
                primfunc_name_hint="kernel",
            )
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    return ScheduledModel(builder.get(), [], target)


def test_forms_are_those_that_exporters_need() -> None:
    """Each form has an exporter, and the other way round; `web` has one more for GPUs."""
    from tvmflow.compiler import forms
    from tvmflow.targets import form_names

    needed = {exporter.FORM for exporter in EXPORTERS.values()} - {""}
    assert set(forms.FORMS) == {*needed, form_names.WEBGPU}


def test_a_kernel_that_cannot_be_written_as_c_is_reported(tmp_path: Path) -> None:
    """An intrinsic of LLVM has no C; the message says what to do instead."""
    from tvm import tirx

    from tvmflow.compiler import forms

    inputs = inputs_with(lambda value: tirx.call_llvm_pure_intrin("float32", "llvm.fabs", value))
    with pytest.raises(StageError, match="a kernel that TVM cannot write as C: ") as raised:
        forms.compile_form("c-source", inputs, tmp_path)
    assert "leave c-source out of `outputs`" in raised.value.fix


def test_invalid_c_is_reported_when_it_is_generated(tmp_path: Path) -> None:
    """TVM writes the runtime calls of sorting as invalid C; the message names the kernel and the line."""
    from tvm import relax

    from tvmflow.compiler import forms
    from tvmflow.targets.tvm_target import make_target

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.sort(x))
        builder.emit_func_output(out)
    target = make_target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    inputs = ScheduledModel(relax.transform.LegalizeOps()(builder.get()), [], target)
    with pytest.raises(StageError, match=r"cannot write as C: 'sort', line \d+: ") as raised:
        forms.compile_form("c-source", inputs, tmp_path)
    assert "leave c-source out of `outputs`" in raised.value.fix


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_absolute_values_call_the_c_library(tmp_path: Path, dtype: str) -> None:
    """TVM's C code generator has no operator for them."""
    from tvm import tirx

    from tvmflow.compiler import forms

    forms.compile_form("c-source", inputs_with(lambda value: tirx.abs(value), dtype), tmp_path)
    assert {"float32": " fabsf(", "float64": " fabs("}[dtype] in (tmp_path / "lib0.c").read_text()


def test_a_kernel_with_plain_arithmetic_is_written_as_c(tmp_path: Path) -> None:
    """There is one file with kernels and one with the model."""
    from tvmflow.compiler import forms

    forms.compile_form("c-source", inputs_with(lambda value: value * 2), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["devc.c", "lib0.c"]
    assert "__tvm_ffi" in (tmp_path / "lib0.c").read_text()
