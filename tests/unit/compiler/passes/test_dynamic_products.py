"""Products of a dynamic number of rows get the kernels that those of a fixed number have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.dynamic_networks import DynamicNetwork, Input, make_network, make_weights
from tests.support.kernels import DOT_TARGETS, FAST, LEVELS_HERE, dot_target, level
from tvmflow.core.types import Dimension
from tvmflow.graph import ir
from tvmflow.targets.host import read_host

SEQ = Dimension("seq", 1, 512)
BATCH = Dimension("batch", 1, 16)
LENGTHS = (1, 7, 16, 37, 64, 131)


def make_dense(columns: int) -> DynamicNetwork:
    """Return a product with weights, a bias and a ReLU, of dynamic batch and length."""

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


HEADS, DEPTH = 3, 20


def split_heads(emit: Any, x: Any, order: list[int]) -> Any:
    """Return (batch, length, heads · depth) with the heads before the length."""
    batch, length, _ = x.ty.shape.values
    shape = relax.ShapeExpr([batch, length, HEADS, DEPTH])
    return emit(relax.op.permute_dims(emit(relax.op.reshape(x, shape)), order))


def attend(q: Any, k: Any, v: Any, mask: Any = 0.0) -> Any:
    """Return the reference of attention."""
    q, k, v = (x.reshape(*x.shape[:2], HEADS, DEPTH).swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / np.float32(DEPTH**0.5) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ v
    return mixed.swapaxes(1, 2).reshape(mixed.shape[0], mixed.shape[2], HEADS * DEPTH)


def make_attention(inputs: dict[str, Input], dimensions: tuple[Dimension, ...]) -> DynamicNetwork:
    """Return attention over inputs q, k, v, and a mask where there is one."""

    def body(emit: Any, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        query, value = (split_heads(emit, x, [0, 2, 1, 3]) for x in (q, v))
        scores = emit(relax.op.matmul(query, split_heads(emit, k, [0, 2, 3, 1])))
        scores = emit(relax.op.divide(scores, relax.const(DEPTH**0.5, "float32")))
        if mask is not None:
            scores = emit(relax.op.add(scores, mask))
        mixed = emit(relax.op.matmul(emit(relax.op.nn.softmax(scores, -1)), value))
        mixed = emit(relax.op.permute_dims(mixed, [0, 2, 1, 3]))
        return emit(relax.op.reshape(mixed, relax.ShapeExpr(list(q.ty.shape.values))))

    return make_network(dimensions, inputs, {}, body)


@pytest.mark.parametrize("mask", [None, ("batch", 1, 1, "keys"), ("seq", "keys"), ("keys",)])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_attention_of_dynamic_lengths_on_both_sides(mcpu: str, mask: Any) -> None:
    keys = Dimension("keys", 1, 300)
    width = HEADS * DEPTH
    inputs = {
        "q": Input(("batch", "seq", width)),
        "k": Input(("batch", "keys", width)),
        "v": Input(("batch", "keys", width)),
    }
    if mask:
        inputs["mask"] = Input(mask)
    network = make_attention(inputs, (BATCH, SEQ, keys))
    assert "attention" in network.list_kernels(level(mcpu))
    pairs = [(1, 1), (1, 37), (16, 16), (37, 3), (131, 131), (5, 257)]
    sizes = [{"batch": n, "seq": q, "keys": k} for n in (1, 3) for q, k in pairs]
    network.agrees(attend, sizes, level(mcpu))


def test_attention_of_one_dynamic_length() -> None:
    """Queries, keys and values are one tensor, whose length is also that of the causal mask."""
    width = HEADS * DEPTH
    inputs = {name: Input((1, "seq", width)) for name in "qkv"}
    network = make_attention({**inputs, "mask": Input((1, 1, "seq", "seq"))}, (SEQ,))
    assert "attention" in network.list_kernels()
    network.agrees(attend, [{"seq": seq} for seq in LENGTHS])


@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min, -1e9])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_keys_that_a_mask_hides_are_not_read(mcpu: str, hidden: float) -> None:
    """Values of keys that no query sees are NaN; a query that sees none has equal weights, or NaN."""
    keys, width = Dimension("keys", 1, 600), HEADS * DEPTH
    inputs = {
        "q": Input((1, "seq", width)),
        "k": Input((1, "keys", width)),
        "v": Input((1, "keys", width)),
        "mask": Input(("seq", "keys")),
    }
    run = make_attention(inputs, (SEQ, keys)).compile(level(mcpu))
    rng = np.random.default_rng(0)
    for queries, past, unseen, window, blind in [
        (37, 0, 0, 600, ()),
        (40, 90, 401, 600, ()),
        (24, 3, 300, 600, (7, 23)),
        (24, 500, 0, 40, ()),
        (3, 530, 60, 40, ()),
        (1, 500, 0, 30, ()),
    ]:
        seen = past + queries
        q, k, v = (
            rng.standard_normal((1, length, width), dtype=np.float32)
            for length in (queries, seen + unseen, seen + unseen)
        )
        positions, own = np.arange(seen + unseen)[None], np.arange(past, seen)[:, None]
        is_seen = (positions <= own) & (positions > own - window)
        mask = np.where(is_seen, 0, hidden).astype(np.float32)
        mask[list(blind)] = hidden
        with np.errstate(invalid="ignore"):
            expected = attend(q, k, v, mask)
        if hidden < -1e30 and not blind:
            v[:, seen + 192 :] = np.nan
            v[:, : max(0, past - window - 192)] = np.nan
        (actual,) = run(q=q, k=k, v=v, mask=mask)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=f"{past}")


def make_grouped_attention(groups: int) -> tuple[DynamicNetwork, Any]:
    """Return attention of four heads that share the keys of some groups, and its reference."""
    heads, depth, past = 4, 32, Dimension("keys", 1, 2000)

    def body(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        keys = k.ty.shape.values[2]
        wide = relax.ShapeExpr([1, groups, heads // groups, keys, depth])
        whole = relax.ShapeExpr([1, heads, keys, depth])

        def repeat(x: Any) -> Any:
            expanded = emit(relax.op.broadcast_to(emit(relax.op.expand_dims(x, 2)), wide))
            return emit(relax.op.reshape(expanded, whole))

        columns = emit(relax.op.permute_dims(repeat(k), [0, 1, 3, 2]))
        scores = emit(relax.op.matmul(q, columns))
        scores = emit(relax.op.multiply(scores, relax.const(depth**-0.5, "float32")))
        weights = emit(relax.op.nn.softmax(emit(relax.op.add(scores, mask)), -1))
        return emit(relax.op.matmul(weights, repeat(v)))

    def reference(q: Any, k: Any, v: Any, mask: Any) -> Any:
        k, v = (x.repeat(heads // groups, 1) for x in (k, v))
        scores = q @ k.swapaxes(2, 3) * np.float32(depth**-0.5) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v

    inputs = {
        "q": Input((1, heads, "seq", depth)),
        "k": Input((1, groups, "keys", depth)),
        "v": Input((1, groups, "keys", depth)),
        "mask": Input((1, 1, "seq", "keys")),
    }
    return make_network((SEQ, past), inputs, {}, body), reference


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_few_queries_of_grouped_heads_read_keys_where_they_are(mcpu: str, groups: int) -> None:
    """Up to four queries: a step of a decoder, whose heads share keys; more queries pack them.

    With one group, cores divide the keys, and with four the groups.
    """
    network, reference = make_grouped_attention(groups)
    target = {**level(mcpu), "num-cores": 4}
    assert "attention" in network.list_kernels(target)
    sizes = [(1, 1), (1, 128), (2, 129), (3, 7), (4, 1000), (5, 1000), (1, 1999)]
    network.agrees(reference, [{"seq": q, "keys": k} for q, k in sizes], target)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_steps_of_a_decoder_read_no_keys_outside_the_window(mcpu: str, groups: int) -> None:
    network, reference = make_grouped_attention(groups)
    run = network.compile({**level(mcpu), "num-cores": 4})
    for seq, keys, window in [(1, 1500, 300), (4, 1999, 17), (2, 130, 128), (6, 1500, 300)]:
        feed = network.draw({"seq": seq, "keys": keys})
        position, own = np.arange(keys), np.arange(keys - seq, keys)[:, None]
        is_seen = (position <= own) & (position > own - window)
        feed["mask"] = np.where(is_seen, 0, -np.inf).astype(np.float32)[None, None]
        expected = reference(**feed)
        feed["v"][:, :, : max(0, keys - seq - window - 256)] = np.nan
        (actual,) = run(**feed)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=f"{keys}")


def test_products_of_computed_matrices() -> None:
    """Scores without a softmax behind them; the number of columns is that of keys."""
    keys = Dimension("keys", 1, 300)
    inputs = {"q": Input(("batch", "seq", 60)), "k": Input(("batch", "keys", 60))}

    def body(emit: Any, q: Any, k: Any) -> Any:
        query, key = split_heads(emit, q, [0, 2, 1, 3]), split_heads(emit, k, [0, 2, 3, 1])
        return emit(relax.op.matmul(query, key))

    def reference(q: Any, k: Any) -> Any:
        query, key = (x.reshape(*x.shape[:2], HEADS, DEPTH).swapaxes(1, 2) for x in (q, k))
        return query @ key.swapaxes(2, 3)

    network = make_network((BATCH, SEQ, keys), inputs, {}, body)
    assert "batched_matmul" in network.list_kernels()
    sizes = [(1, 1, 1), (2, 37, 16), (3, 16, 37), (1, 131, 131)]
    network.agrees(reference, [dict(zip(("batch", "seq", "keys"), n, strict=True)) for n in sizes])


@pytest.mark.parametrize("flag", DOT_TARGETS)
def test_bytes_are_multiplied_by_dot_products(flag: str) -> None:
    """A quantized layer of a dynamic number of rows."""
    rng = np.random.default_rng(3)
    integers = rng.integers(-127, 128, (40, 48)).astype(np.int8)

    def body(emit: Any, x: Any, w: Any) -> Any:
        scale, zero = relax.const(0.05, "float32"), relax.const(3, "uint8")
        data = emit(relax.op.quantize(x, scale, zero, -1, "uint8"))
        data = emit(relax.op.dequantize(data, scale, zero))
        scales, zeros = (
            relax.const(np.full(48, 0.01, np.float32)),
            relax.const(np.zeros(48, np.int8)),
        )
        weights = emit(relax.op.dequantize(w, scales, zeros, 1))
        return emit(relax.op.nn.relu(emit(relax.op.matmul(data, weights))))

    def reference(x: Any, w: Any) -> Any:
        data = (np.clip(np.rint(x / np.float32(0.05)) + 3, 0, 255) - 3).astype(np.int32)
        return np.maximum((data @ w.astype(np.int32)) * np.float32(0.05 * 0.01), 0)

    network = make_network((BATCH, SEQ), {"x": Input(("batch", "seq", 40))}, {"w": integers}, body)
    target = dot_target(flag)
    assert any("quantized_dense" in name for name in network.list_kernels(target))
    sizes = [{"batch": batch, "seq": seq} for batch in (1, 2) for seq in LENGTHS]
    network.agrees(reference, sizes, target, tolerance=1e-4)


def take_thirds(emit: Any, x: Any) -> list[Any]:
    """Return queries, keys and values of one product, by indices, as PyTorch's vision transformers do."""
    batch, length, _ = x.ty.shape.values
    parts = emit(relax.op.reshape(x, relax.ShapeExpr([batch, length, 3, HEADS, DEPTH])))
    parts = emit(relax.op.permute_dims(parts, [2, 0, 3, 1, 4]))
    return [emit(relax.op.take(parts, relax.const(n, "int64"), 0)) for n in range(3)]


def split_thirds(emit: Any, x: Any) -> list[Any]:
    """Return the same by a split of the last axis."""
    parts = emit(relax.op.split(x, 3, -1))
    return [split_heads(emit, emit(relax.TupleGetItem(parts, n)), [0, 2, 1, 3]) for n in range(3)]


def slice_thirds(emit: Any, x: Any) -> list[Any]:
    """Return the same by slices of the last axis."""
    width = HEADS * DEPTH
    return [
        split_heads(
            emit,
            emit(relax.op.strided_slice(x, [2], [n * width], [(n + 1) * width])),
            [0, 2, 1, 3],
        )
        for n in range(3)
    ]


@pytest.mark.parametrize("length", ["seq", 33])
@pytest.mark.parametrize("split", [take_thirds, split_thirds, slice_thirds])
def test_attention_reads_its_operands_from_one_product(split: Any, length: Any) -> None:
    """With a boolean mask over the keys, and weights that are NaN replaced."""

    def body(emit: Any, x: Any, mask: Any) -> Any:
        query, key, value = split(emit, x)
        batch, length, _ = x.ty.shape.values
        query = emit(relax.op.multiply(query, relax.const(DEPTH**-0.5, "float32")))
        scores = emit(relax.op.matmul(query, emit(relax.op.permute_dims(key, [0, 1, 3, 2]))))
        shape = relax.ShapeExpr([batch, 1, length, length])
        added = emit(relax.op.broadcast_to(mask, shape))
        weights = emit(relax.op.nn.softmax(emit(relax.op.add(scores, added)), -1))
        zero, isnan = relax.const(0.0, "float32"), emit(relax.op.isnan(weights))
        mixed = emit(relax.op.matmul(emit(relax.op.where(isnan, zero, weights)), value))
        mixed = emit(relax.op.permute_dims(mixed, [0, 2, 1, 3]))
        return emit(relax.op.reshape(mixed, relax.ShapeExpr([batch, length, HEADS * DEPTH])))

    width = HEADS * DEPTH
    inputs = {"x": Input(("batch", length, 3 * width)), "mask": Input(("batch", 1, 1, length))}
    network = make_network((BATCH, SEQ), inputs, {}, body)
    assert network.list_kernels() == ["attention", "reshape"]
    sizes = [{"batch": n, "seq": seq} for n, seq in ((1, 1), (2, 37), (5, 16), (1, 131))]

    def reference(x: Any, mask: Any) -> Any:
        q, k, v = np.split(x, 3, -1)
        return attend(q, k, v, mask)

    network.agrees(reference, sizes)


def test_attention_of_flattened_rows_and_heads() -> None:
    """Rows are (batch · length), and matrices (batch · heads), as exporters of `bmm` write them."""
    width = HEADS * DEPTH

    def body(emit: Any, x: Any, w: Any) -> Any:
        batch, length, _ = x.ty.shape.values
        rows = emit(relax.op.reshape(x, relax.ShapeExpr([batch * length, width])))
        rows = emit(relax.op.matmul(rows, w))

        def matrices(begin: int, order: list[int], shape: list[Any]) -> Any:
            part = emit(relax.op.strided_slice(rows, [1], [begin * width], [(begin + 1) * width]))
            part = emit(relax.op.reshape(part, relax.ShapeExpr([batch, length, HEADS, DEPTH])))
            part = emit(relax.op.permute_dims(part, order))
            return emit(relax.op.reshape(part, relax.ShapeExpr([batch * HEADS, *shape])))

        query, value = (matrices(n, [0, 2, 1, 3], [length, DEPTH]) for n in (0, 2))
        key = matrices(1, [0, 2, 3, 1], [DEPTH, length])
        scores = emit(relax.op.matmul(query, key))
        scores = emit(relax.op.divide(scores, relax.const(DEPTH**0.5, "float32")))
        mixed = emit(relax.op.matmul(emit(relax.op.nn.softmax(scores, -1)), value))
        mixed = emit(relax.op.reshape(mixed, relax.ShapeExpr([batch, HEADS, length, DEPTH])))
        mixed = emit(relax.op.permute_dims(mixed, [0, 2, 1, 3]))
        return emit(relax.op.reshape(mixed, relax.ShapeExpr([batch, length, width])))

    weights = make_weights(w=[width, 3 * width])
    network = make_network((BATCH, SEQ), {"x": Input(("batch", "seq", width))}, weights, body)
    assert {"attention", "dense_pack"} <= set(network.list_kernels())
    sizes = [{"batch": n, "seq": seq} for n, seq in ((1, 1), (2, 37), (5, 16), (1, 131))]

    def reference(x: Any, w: Any) -> Any:
        q, k, v = np.split(x @ w, 3, -1)
        return attend(q, k, v)

    network.agrees(reference, sizes, tolerance=1e-4)


def test_bfloat16() -> None:
    """Rounded numbers are multiplied by the kernel that instructions fit."""
    network = make_dense(64)
    options = replace(FAST, precision="bfloat16")
    names = ir.list_kernels(network.lower(bfloat16_target(), options).mod)
    assert any("bfloat16_dense_pack" in name for name in names), names
    network.agrees(
        lambda x, w, b: np.maximum(x @ w + b, 0),
        [{"batch": 2, "seq": seq} for seq in LENGTHS],
        bfloat16_target(),
        tolerance=5e-2,
        options=options,
    )


def bfloat16_target() -> dict[str, Any]:
    """Return a target with products of bfloat16; skip the test on a machine that lacks them."""
    if "avx512_bf16" not in read_host().flags:
        pytest.skip("this machine lacks avx512_bf16")
    return {**level("x86-64-v4"), "mattr": ["+avx512bf16"]}


def test_the_kernels_are_those_of_a_fixed_length() -> None:
    width = HEADS * DEPTH
    lists = [
        make_attention(
            {name: Input((1, length, width)) for name in "qkv"}, dimensions
        ).list_kernels()
        for length, dimensions in (("seq", (SEQ,)), (37, ()))
    ]
    assert lists == [["attention", "reshape"]] * 2
