"""Operators of transformers that ONNX Runtime's optimizer makes give its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.kernels import outputs
from tests.support.onnx_models import Array, agree, draw, load, model
from tvmflow.core.errors import ImportFailed

Feed = dict[str, Array]
F, INT, I32 = np.float32, np.int64, np.int32

X, SKIP = draw(2, 5, 16), draw(2, 5, 16, seed=1)
SCALE, SHIFT = {"scale": draw(16, seed=2)}, {"shift": draw(16, seed=3)}
QKV: Feed = {"w": draw(16, 48) * 0.3, "b": draw(48)}
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], I32)
LONGER: Feed = {"k": draw(2, 7, 16, seed=6), "v": draw(2, 7, 16, seed=7)}
ANGLES: Feed = {"cos": draw(12, 4), "sin": draw(12, 4, seed=1)}
STEPS = np.arange(10).reshape(2, 5).astype(INT)


def fused(
    operator: str, feed: Feed, constants: Feed, order: str, results: str = "y", **attributes: Any
) -> tuple[onnx.ModelProto, Feed]:
    """Return a model of one node; `-` in the order of operands, or in the results, is one that is left out."""
    names, outputs = (
        ["" if name == "-" else name for name in text.split()] for text in (order, results)
    )
    made = model(
        [helper.make_node(operator, names, outputs, domain="com.microsoft", **attributes)],
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feed.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs if name],
        constants,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
    )
    return made, feed


def attention(more: Feed, order: str, results: str = "y", **attributes: Any) -> Any:
    return fused(
        "Attention", {"x": X} | more, QKV, f"x w b {order}", results, num_heads=4, **attributes
    )


def heads(more: Feed, order: str, results: str = "y", **attributes: Any) -> Any:
    constants = {"b": QKV["b"]} if "b" in order.split() else {}
    feed = {"x": X} | more
    return fused(
        "MultiHeadAttention", feed, constants, f"x {order}", results, num_heads=4, **attributes
    )


def rotary(x: Array, steps: Array, **attributes: Any) -> Any:
    return fused("RotaryEmbedding", {"x": x, "p": steps}, ANGLES, "x p cos sin", **attributes)


def grouped(
    past: int, order: str = "", more: Feed | None = None, batch: int = 1, **attributes: Any
) -> Any:
    """Return attention of four heads that share two, whose rotary positions have tables.

    ONNX Runtime takes several new tokens of one sequence, or one of each of several.
    """
    steps = 5 if batch == 1 else 1
    cached = {"pk": draw(batch, 2, past, 16), "pv": draw(batch, 2, past, 16, seed=8)}
    new = {"k": draw(batch, steps, 32), "v": draw(batch, steps, 32, seed=6)}
    sizes = {"n": np.full((batch, 1), past + steps - 1, I32), "t": np.array([past + steps], I32)}
    feed = {"q": draw(batch, steps, 64, seed=4)} | new | cached | sizes
    order = order or "q k v pk pv n t cos sin"
    tables = {"cos": draw(30, 8), "sin": draw(30, 8, seed=1)}
    constants = {name: table for name, table in tables.items() if name in order.split()}
    feed = {name: array for name, array in feed.items() if name in order.split()} | (more or {})
    heads = {"num_heads": 4, "kv_num_heads": 2}
    return fused("GroupQueryAttention", feed, constants, order, "y nk nv", **heads, **attributes)


CASES: dict[str, Any] = {
    "grouped heads": lambda: grouped(3, do_rotary=1),
    "grouped heads of a prompt": lambda: grouped(0, "q k v - - n t cos sin", do_rotary=1),
    "grouped heads of two sequences": lambda: grouped(3, batch=2, do_rotary=1),
    "grouped heads without positions": lambda: grouped(3, "q k v pk pv n t", scale=0.3),
    "grouped heads, neighbours turned": lambda: grouped(6, do_rotary=1, rotary_interleaved=1),
    "grouped heads with a window": lambda: grouped(6, do_rotary=1, local_window_size=4),
    "grouped heads with capped scores": lambda: grouped(6, softcap=0.7),
    "grouped heads in one tensor": lambda: grouped(
        3, "x - - pk pv n t cos sin", {"x": draw(1, 5, 128)}, do_rotary=1
    ),
    "grouped heads with a bias": lambda: grouped(
        3, "q k v pk pv n t - - - r", {"r": draw(1, 4, 5, 8)}
    ),
    "sum and norm": lambda: fused(
        "SkipLayerNormalization", {"x": X, "s": SKIP}, SCALE | SHIFT | {"b": SHIFT["shift"]},
        "x s scale shift b", "y - - total", epsilon=1e-5,
    ),
    "sum, mean and deviation": lambda: fused(
        "SkipLayerNormalization", {"x": X, "s": SKIP}, SCALE, "x s scale", "y mean deviation total"
    ),
    "norm without shift": lambda: fused(
        "SkipLayerNormalization", {"x": X, "s": SKIP[0]}, SCALE, "x s scale"
    ),
    "embeddings and their sum": lambda: fused(
        "EmbedLayerNormalization", {"i": MASK + 3}, {"w": draw(9, 16), "p": draw(8, 16)} | SCALE | SHIFT,
        "i - w p - scale shift", "y n total",
    ),
    "mask of each sequence": lambda: attention({"m": MASK}, "m"),
    "mask of other numbers": lambda: attention({"m": MASK * 3 - 1}, "m"),
    "lengths of embeddings": lambda: fused(
        "EmbedLayerNormalization",
        {"i": MASK + 3, "m": MASK * 2 - 1},
        {"w": draw(9, 16), "p": draw(8, 16)} | SCALE | SHIFT,
        "i - w p - scale shift m", "y n",
    ),
    "mask of rows": lambda: attention({"m": np.tril(np.ones((2, 5, 5), I32))}, "m", scale=0.3),
    "lengths": lambda: attention({"m": np.array([4, 3], I32)}, "m"),
    "ends and starts": lambda: attention({"m": np.array([4, 3, 1, 0], I32)}, "m"),
    "keys before": lambda: attention(
        {"p": draw(2, 2, 4, 3, 4)}, "- p", "y z", unidirectional=1
    ),
    "cross attention": lambda: heads(
        LONGER | {"m": np.array([[1] * 5 + [0] * 2, [1] * 7], I32), "r": draw(1, 4, 5, 7)}, "k v b m r"
    ),
    "more keys than queries": lambda: heads(LONGER, "k v", unidirectional=1),
    "fewer keys than queries": lambda: heads(
        {"k": X[:, :3], "v": SKIP[:, :3]}, "k v", unidirectional=1
    ),
    "keys as heads": lambda: heads({"k": draw(2, 4, 7, 4), "v": draw(2, 4, 7, 4, seed=3)}, "k v"),
    "heads before": lambda: heads(
        {"k": X * 0.5, "v": SKIP, "pk": draw(2, 4, 3, 4), "pv": draw(2, 4, 3, 4, seed=8)},
        "k v - - - pk pv", "y nk nv", unidirectional=1, scale=0.4,
    ),
    "halves are turned": lambda: rotary(draw(2, 2, 5, 8), np.array([3], INT)),
    "neighbours are turned": lambda: rotary(draw(2, 5, 16), STEPS, interleaved=1),
    "a part is turned": lambda: rotary(
        draw(2, 5, 32), STEPS, num_heads=2, rotary_embedding_dim=8
    ),
    "old name of a product": lambda: fused(
        "TransposeMatMul", {"x": draw(3, 4), "z": draw(5, 4)}, {}, "x z", transB=1
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_fused_operators_agree_with_onnx_runtime(case: str, tmp_path: Path) -> None:
    """Also results that are only read in training or decoding."""
    made, feed = CASES[case]()
    agree(made, tmp_path, feed)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: attention({}, "", do_rotary=1), "it has do_rotary, which is not supported"),
        (
            lambda: attention({"m": np.ones((2, 1, 5, 5), I32)}, "m"),
            r"a mask of shape \[2, 1, 5, 5\] is not supported",
        ),
        (lambda: heads({"k": draw(2, 5, 4, 2, 4)}, "k"), "in one tensor are not supported"),
    ],
)
def test_other_forms_of_attention_are_refused(make: Any, reason: str, tmp_path: Path) -> None:
    """The message names the operator and what it has."""
    with pytest.raises(ImportFailed, match=f"Attention .* cannot be imported: .*{reason}"):
        load(make()[0], tmp_path)


def test_padded_sequences_are_refused_when_the_model_runs(tmp_path: Path) -> None:
    """Grouped heads whose cache is longer than `seqlens_k` says."""
    made, feed = grouped(3, do_rotary=1)
    loaded = load(made, tmp_path, feed)
    feed["n"] -= 1
    with pytest.raises(ValueError, match="has an index out of range"):
        outputs(loaded, feed)
