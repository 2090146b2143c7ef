"""Compilations beside the usual one: what cannot be compiled that way is a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels import FAST
from tvmflow.errors import StageError
from tvmflow.exporters import EXPORTERS


def parts_with(kernel: Any, dtype: str = "float32") -> Any:
    """A model of one kernel that computes `kernel(element)` of eight numbers."""
    import tvm
    from tvm import relax, te

    from tvmflow.stages import _forms

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
    return _forms.Parts(builder.get(), [], target, "")


def test_every_form_that_an_exporter_names_can_be_compiled() -> None:
    """And none is there for nobody."""
    from tvmflow.stages import _forms

    assert set(_forms.FORMS) == {exporter.FORM for exporter in EXPORTERS.values()} - {""}


def test_a_kernel_that_c_has_no_words_for_is_named(tmp_path: Path) -> None:
    """An instruction that only LLVM knows: what stops it, and what to do instead."""
    from tvm import tirx

    from tvmflow.stages import _forms

    parts = parts_with(lambda value: tirx.call_llvm_pure_intrin("float32", "llvm.fabs", value))
    with pytest.raises(StageError, match="a kernel that TVM cannot write as C: ") as raised:
        _forms.FORMS["c-source"](parts, tmp_path)
    assert "leave c-source out of `outputs`" in raised.value.fix


def test_c_that_no_compiler_takes_is_found_when_it_is_made(tmp_path: Path) -> None:
    """Sorting calls the runtime in a way that TVM has no C for: the kernel and the place are named."""
    from tvm import relax

    from tvmflow.stages import _forms, _lowering

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.sort(x))
        builder.emit_func_output(out)
    target = _lowering.make_target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    parts = _forms.Parts(_lowering.lower(builder.get(), target, FAST), [], target, "")
    with pytest.raises(StageError, match=r"cannot write as C: 'sort', line \d+: ") as raised:
        _forms.FORMS["c-source"](parts, tmp_path)
    assert "leave c-source out of `outputs`" in raised.value.fix


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_absolute_values_are_cs_own(tmp_path: Path, dtype: str) -> None:
    """TVM's C has no word for them."""
    from tvm import tirx

    from tvmflow.stages import _forms

    _forms.FORMS["c-source"](parts_with(lambda value: tirx.abs(value), dtype), tmp_path)
    assert {"float32": " fabsf(", "float64": " fabs("}[dtype] in (tmp_path / "lib0.c").read_text()


def test_an_ordinary_kernel_is_written_as_c(tmp_path: Path) -> None:
    """The same model with plain arithmetic."""
    from tvmflow.stages import _forms

    _forms.FORMS["c-source"](parts_with(lambda value: value * 2), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["devc.c", "lib0.c"]
    assert "__tvm_ffi" in (tmp_path / "lib0.c").read_text()
