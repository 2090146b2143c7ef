"""Growing states are laid out so that a C library appends to them; a virtual machine computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.dynamic_networks import DynamicNetwork, Input, make_network
from tvmflow.compiler.c_program.program import Copy, KernelCall, read_program
from tvmflow.core.types import Dimension
from tvmflow.graph.states import GrowingState, with_states

DIMENSIONS = (Dimension("past", 0, 40), Dimension("seq", 1, 8))
SIZES = [{"past": past, "seq": seq} for past, seq in ((0, 1), (0, 8), (5, 3), (40, 1))]
INPUTS = {"past_key": Input((1, 2, "past", 16)), "key": Input((1, 2, "seq", 16))}


def make_cached(body: Callable[..., Any]) -> DynamicNetwork:
    """Return a model whose first input is a state that becomes its first output."""
    network = make_network(DIMENSIONS, INPUTS, {}, body)
    mod = network.mod
    main = with_states(mod["main"], [GrowingState(0, 0, 2)])
    mod.update_func(mod.get_global_var("main"), main)
    return network


def append(emit: Any, past_key: Any, key: Any) -> list[Any]:
    doubled = emit(relax.op.multiply(key, relax.const(2.0)))
    present = emit(relax.op.concat([past_key, doubled], 2))
    return [present, emit(relax.op.sum(present, 2))]


def expected(past_key: Any, key: Any) -> list[Any]:
    present = np.concatenate([past_key, 2 * key], 2)
    return [present, present.sum(2)]


def test_a_step_copies_only_new_rows() -> None:
    network = make_cached(append)
    program = read_program(network.lower().mod, [])
    (state,) = program.appended
    assert (state.before.index, state.after.resolve().index) == (0, 0)
    assert (state.outer, state.row) == (2, 64)
    copies = [step for step in program.steps if isinstance(step, Copy)]
    assert [(copy.offset, copy.target.resolve()) for copy in copies] == [
        (state.before.size, program.outputs[0])
    ]
    called = {step.kernel for step in program.steps if isinstance(step, KernelCall)}
    assert not any("state" in name or "concat" in name for name in called)


def test_a_virtual_machine_computes_the_same() -> None:
    make_cached(append).agrees(expected, SIZES)


def read_past(emit: Any, past_key: Any, key: Any) -> list[Any]:
    present = emit(relax.op.concat([past_key, key], 2))
    return [present, emit(relax.op.sum(past_key, 2))]


def give_twice(emit: Any, past_key: Any, key: Any) -> list[Any]:
    present = emit(relax.op.concat([past_key, key], 2))
    return [present, present]


def put_before(emit: Any, past_key: Any, key: Any) -> list[Any]:
    present = emit(relax.op.concat([key, past_key], 2))
    return [present, emit(relax.op.sum(present, 2))]


def change(emit: Any, past_key: Any, key: Any) -> list[Any]:
    present = emit(relax.op.concat([past_key, key], 2))
    return [emit(relax.op.multiply(present, relax.const(2.0))), present]


@pytest.mark.parametrize("body", [read_past, give_twice, put_before, change])
def test_other_states_are_left_as_they_are(body: Callable[..., Any]) -> None:
    network = make_cached(body)
    assert not read_program(network.lower().mod, []).appended
