"""Checkpoints whose sizes stay open: what follows the dimensions, and what is refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dynamic_networks import run_dynamic
from tests.support.mxnet_runs import checkpoint, node, var, write_checkpoint
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import Dimension, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel, ModelInput
from tvmflow.frontends.mxnet._checkpoint import Node, read_shape

frontend = FRONTENDS["mxnet"]

BATCH = Dimension("batch", 1, 6)
H, W = Dimension("h", 7, 40), Dimension("w", 7, 40)
DIGITS = Path(__file__).resolve().parents[4] / "recipes" / "models"
IMAGES = TensorSpec("data", (6, 4, 40, 40), "float32", sizes=("batch", 4, "h", "w"))


def test_a_checkpoint_computes_batches_of_all_sizes() -> None:
    """The trained digits: an image has the same classes in each batch, and the output is open too."""
    spec = TensorSpec("data", (6, 1, 8, 8), "float32", sizes=("batch", 1, 8, 8))
    loaded = frontend.load(checkpoint(DIGITS, "digits", 10), (spec,), dimensions=(BATCH,))
    assert [(entry.shape, entry.sizes) for entry in loaded.outputs] == [((6, 10), ("batch", 10))]
    run = run_dynamic(loaded, (BATCH,))
    images = np.random.default_rng(0).uniform(0, 1, (6, 1, 8, 8)).astype("float32")
    [whole] = run(images)
    assert whole.shape == (6, 10)
    for count in (1, 2, 5):
        [part] = run(images[:count])
        np.testing.assert_allclose(part, whole[:count], rtol=1e-5, atol=1e-6)


def load(folder: Path, op: str, *dimensions: Dimension, **attrs: str) -> LoadedModel:
    """Import one operator of dynamic images; its output has the name `it_output`."""
    nodes = [var("data"), node(op, "it", [0], **attrs)]
    files = write_checkpoint(folder, nodes, [[1, 0, 0]], {})
    return frontend.load(files, (IMAGES,), dimensions=dimensions or (BATCH, H, W))


@pytest.mark.parametrize(
    ("op", "attrs", "sizes"),
    [
        ("Flatten", {}, ("batch", "h * w * 4")),
        ("Pooling", {"kernel": "(2, 2)", "stride": "(2, 2)"}, ("batch", 4, "h // 2", "w // 2")),
        ("Pooling", {"global_pool": "True", "pool_type": "avg"}, ("batch", 4, 1, 1)),
        ("Reshape", {"shape": "(0, 2, -1, 0)"}, ("batch", 2, "h * 2", "w")),
        ("slice_axis", {"axis": "2", "begin": "1", "end": "-1"}, ("batch", 4, "h - 2", "w")),
        ("SwapAxis", {"dim1": "0", "dim2": "3"}, ("w", 4, "h", "batch")),
        ("UpSampling", {"scale": "2", "sample_type": "nearest"}, ("batch", 4, "h * 2", "w * 2")),
        ("_contrib_arange_like", {"axis": "3"}, ("w",)),
        ("depth_to_space", {"block_size": "2"}, ("batch", 1, "h * 2", "w * 2")),
    ],
)
def test_sizes_of_results_follow(
    tmp_path: Path, op: str, attrs: dict[str, str], sizes: tuple[Any, ...]
) -> None:
    assert load(tmp_path, op, **attrs).outputs[0].sizes == sizes


@pytest.mark.parametrize(
    ("op", "attrs", "problem"),
    [
        ("shape_array", {}, "batch, h, w have no fixed size, and it needs one; its input 'data' has the shape [batch, 4, h, w]"),
        ("topk", {"k": "2", "axis": "3"}, "w has no fixed size"),
        ("SliceChannel", {"axis": "2", "num_outputs": "2"}, "h has no fixed size"),
        ("slice_axis", {"axis": "2", "begin": "9", "end": "None"}, "its slice of axis 2 may be empty, or is not known, for some sizes of h; raise `min`"),
        ("space_to_depth", {"block_size": "2"}, "h may not be a multiple of 2; set `multiple_of`"),
        ("Pooling", {"kernel": "(2, 2)", "stride": "(2, 2)", "pool_type": "avg", "pooling_convention": "full"}, "let them be multiples of 2 (`multiple_of`)"),
        ("Reshape", {"shape": "(7, -1)"}, "shape=(7, -1) does not fit"),
    ],
)  # fmt: skip
def test_what_cannot_follow_is_named(
    tmp_path: Path, op: str, attrs: dict[str, str], problem: str
) -> None:
    """The node, the dimension, and what to do."""
    with pytest.raises(ImportFailed) as refused:
        load(tmp_path, op, **attrs)
    assert f"{op} 'it' cannot be imported: " in refused.value.message
    assert problem in refused.value.message
    assert "write numbers in place of `dimensions`" in refused.value.fix


def test_multiples_let_more_follow(tmp_path: Path) -> None:
    even = [Dimension(name, 8, 40, 2) for name in ("h", "w")]
    loaded = load(tmp_path, "space_to_depth", BATCH, *even, block_size="2")
    assert loaded.outputs[0].sizes == ("batch", 16, "h // 2", "w // 2")


def test_unknown_sizes_of_a_symbol_are_read() -> None:
    """0, or -1 where shapes are NumPy's; a hostile text is not a shape."""
    for text, dims in (
        ("(0, 3, 8L, 8)", ("", 3, 8, 8)),
        ("[-1, 3]", ("", 3)),
        ("(1,", None),
        ("(" * 500, None),
        ("('a', 3)", None),
        ("", None),
    ):
        assert read_shape(Node("null", "data", {"__shape__": text}, ())) == dims


def test_a_new_recipe_knows_the_batch_that_a_symbol_leaves_open(tmp_path: Path) -> None:
    nodes = [{**var("data"), "attrs": {"__shape__": "(0, 4)"}}, node("relu", "it", [0])]
    files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {})
    assert frontend.list_dynamic_inputs(files) == [ModelInput("data", dims=("", 4))]
    assert frontend.read_facts(files).inputs == (ModelInput("data", is_required=False),)


def test_a_new_recipe_suggests_the_states_of_recurrent_layers(tmp_path: Path) -> None:
    """Those that `RNN` begins with and returns; an intermediate tensor and a length of sequences are none."""
    names = ("x", "parameters", "begin", "cell", "lengths")
    nodes = [
        *(var(name) for name in names),
        node("RNN", "lstm", [0, 1, 2, 3], mode="lstm", state_outputs="True"),
        node("RNN", "gru", [[5, 0, 0], 1, [5, 1, 0], 4], mode="gru", state_outputs="True"),
    ]
    heads = [[6, 0, 0], [6, 1, 0], [5, 2, 0], [5, 1, 0]]
    files = write_checkpoint(tmp_path, nodes, heads, {})
    assert frontend.read_facts(files).states == {
        "begin": "lstm_state_output",
        "cell": "lstm_statecell_output",
    }
