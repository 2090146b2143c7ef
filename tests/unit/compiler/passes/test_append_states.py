"""Growing states are laid out so that a C library appends to them, also in float16 or int8; a virtual machine computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.dynamic_networks import DynamicNetwork, Input, make_network
from tvmflow.compiler.c_program.program import Copy, KernelCall, read_program
from tvmflow.core.types import Dimension
from tvmflow.graph import ir
from tvmflow.graph.states import GrowingState, NotStorable, store_states, with_states
from tvmflow.runtime.arrays import pack_rows, unpack_rows

DIMENSIONS = (Dimension("past", 0, 40), Dimension("seq", 1, 8))
SIZES = [{"past": past, "seq": seq} for past, seq in ((0, 1), (0, 8), (5, 3), (40, 1))]
STATE = GrowingState(0, 0, 2)
INPUTS = {"past_key": Input((1, 2, "past", 16)), "key": Input((1, 2, "seq", 16))}


def make_cached(body: Callable[..., Any]) -> DynamicNetwork:
    """Return a model whose first input is a state that becomes its first output."""
    network = make_network(DIMENSIONS, INPUTS, {}, body)
    mod = network.mod
    main = with_states(mod["main"], [STATE])
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


def store(network: DynamicNetwork, dtype: str = "float16") -> DynamicNetwork:
    """Return a model whose state has another dtype."""
    mod, _ = store_states(network.mod, (), [STATE], dtype)
    stored = Input((1, 2, "past", 20 if dtype == "int8" else 16), dtype=dtype)
    return network._replace(mod=mod, inputs={**network.inputs, "past_key": stored})


def test_rows_are_cast_to_float16_as_they_are_appended() -> None:
    """Bit for bit as NumPy does; everything else reads the rounded rows."""
    network = store(make_cached(append))
    run = network.compile()
    for sizes in SIZES:
        given = network.draw(sizes)
        present, total = run(**given)
        rows = (2 * given["key"]).astype(np.float16)
        wanted = np.concatenate([given["past_key"], rows], 2)
        assert present.dtype == np.float16
        np.testing.assert_array_equal(present, wanted)
        np.testing.assert_allclose(total, wanted.astype(np.float32).sum(2), 2e-5, 2e-5)


def test_a_step_copies_only_new_rows_of_float16() -> None:
    program = read_program(store(make_cached(append)).lower().mod, [])
    (state,) = program.appended
    assert (state.outer, state.row) == (2, 32)
    copies = [step for step in program.steps if isinstance(step, Copy)]
    assert [copy.target.resolve() for copy in copies] == [program.outputs[0]]


def test_casts_have_the_node_of_the_append() -> None:
    network = make_cached(append)
    before = [binding.var for binding in ir.list_bindings(network.mod["main"].body)]
    mod, nodes = store_states(
        network.mod, [f"node {n}" for n in range(len(before))], [STATE], "float16"
    )
    names = [ir.operator_name(b.value) for b in ir.list_bindings(mod["main"].body)]
    assert list(zip(names, nodes, strict=True))[:5] == [
        ("relax.multiply", "node 0"),
        ("relax.astype", "node 1"),
        ("relax.concat", "node 1"),
        ("relax.astype", "node 1"),
        ("relax.sum", "node 2"),
    ]


def score(emit: Any, past_key: Any, key: Any) -> list[Any]:
    """Read the rows of a state as attention does."""
    doubled = emit(relax.op.multiply(key, relax.const(2.0)))
    present = emit(relax.op.concat([past_key, doubled], 2))
    columns = emit(relax.op.permute_dims(present, [0, 1, 3, 2]))
    return [present, emit(relax.op.matmul(key, columns))]


def test_rows_are_quantized_as_they_are_appended() -> None:
    """As NumPy does, up to a rounding of the scale; everything else reads the quantized rows. A row of 0 stays 0."""
    network = store(make_cached(score), "int8")
    run = network.compile()
    for sizes in SIZES:
        drawn = {**make_cached(score).draw(sizes)}
        drawn["key"][:, 0, 0] = 0
        drawn["key"][:, 1, 0] *= 1e-35
        past = pack_rows(drawn["past_key"])
        present, scores = run(past_key=past, key=drawn["key"])
        values, wanted = (
            unpack_rows(present),
            np.concatenate([unpack_rows(past), 2 * drawn["key"]], 2),
        )
        assert present.dtype == np.int8
        np.testing.assert_array_equal(present[:, :, : sizes["past"]], past)
        np.testing.assert_array_equal(values[:, 0, sizes["past"]], 0)
        steps = abs(wanted).max(-1, keepdims=True) / 127
        assert (abs(values - wanted) <= 0.5001 * steps + 1e-30).all()
        expected = drawn["key"] @ values.transpose(0, 1, 3, 2)
        np.testing.assert_allclose(scores, expected, 2e-5, 2e-5)


def test_a_step_copies_only_new_quantized_rows() -> None:
    program = read_program(store(make_cached(score), "int8").lower().mod, [])
    (state,) = program.appended
    assert (state.outer, state.row) == (2, 20)
    copies = [step for step in program.steps if isinstance(step, Copy)]
    assert [copy.target.resolve() for copy in copies] == [program.outputs[0]]


def test_rows_that_attention_does_not_read_whole_cannot_be_int8() -> None:
    """Others, such as a sum, or a reshape that splits rows into heads, would read a float32 copy in each step."""

    def split(emit: Any, past_key: Any, key: Any) -> list[Any]:
        present = emit(relax.op.concat([past_key, key], 2))
        heads = emit(relax.op.reshape(present, (1, 4, -1, 8)))
        return [present, heads]

    for body, reader in ((append, "sum"), (split, "reshape")):
        with pytest.raises(NotStorable) as error:
            store(make_cached(body), "int8")
        assert error.value.input == 0
        assert f"and `{reader}` reads it" in error.value.reason


@pytest.mark.parametrize("body", [read_past, put_before, change])
def test_other_states_cannot_be_float16(body: Callable[..., Any]) -> None:
    with pytest.raises(NotStorable):
        store(make_cached(body))


def test_an_output_beside_the_state_stays_float32() -> None:
    network = store(make_cached(give_twice))
    given = network.draw(SIZES[2])
    stored, present = network.compile()(**given)
    np.testing.assert_array_equal(stored.astype(np.float32), present)
    assert (stored.dtype, present.dtype) == (np.float16, np.float32)
