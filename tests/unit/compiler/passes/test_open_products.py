"""Products of an open number of rows get the kernels that those of a fixed number have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.kernels import LEVELS_HERE, level
from tests.support.open_networks import Input, OpenNetwork, make_network, make_weights
from tvmflow.core.types import Dimension

SEQ = Dimension("seq", 1, 512)
BATCH = Dimension("batch", 1, 16)
LENGTHS = (1, 7, 16, 37, 64, 131)


def make_dense(columns: int) -> OpenNetwork:
    """Return a product with weights, a bias and a ReLU, of open batch and length."""

    def body(emit: Any, x: Any, w: Any, b: Any) -> Any:
        return emit(relax.op.nn.relu(emit(relax.op.add(emit(relax.op.matmul(x, w)), b))))

    weights = make_weights(w=[40, columns], b=[columns])
    return make_network((BATCH, SEQ), {"x": Input(("batch", "seq", 40))}, weights, body)


@pytest.mark.parametrize("columns", [64, 29])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_weights_are_packed_whatever_the_number_of_rows(mcpu: str, columns: int) -> None:
    network = make_dense(columns)
    assert any("dense_pack" in name for name in network.list_kernels(level(mcpu)))
    network.agrees(
        lambda x, w, b: np.maximum(x @ w + b, 0),
        [{"batch": batch, "seq": seq} for batch in (1, 3) for seq in LENGTHS],
        level(mcpu),
    )
