"""`import` refuses a model whose tensors cannot have the sizes that the inputs give them."""

from __future__ import annotations

from typing import Any

import pytest

from tvmflow.core.errors import ImportFailed
from tvmflow.stages import import_model


def convolution(width: int) -> Any:
    """A window of 3 over rows of a width."""
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 2, width), "float32"))
    weight = relax.Var("w", relax.TensorType((4, 2, 3), "float32"))
    with builder.function("main", [x, weight], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.conv1d(x, weight))
        builder.emit_func_output(out)
    return builder.get()


def test_a_window_that_is_larger_than_its_input_is_named() -> None:
    with pytest.raises(
        ImportFailed, match=r"the result of a conv1d would have the shape \[1, 4, -1\]"
    ):
        import_model._check_sizes(convolution(1))
    import_model._check_sizes(convolution(3))
