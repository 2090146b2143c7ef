"""Importing checkpoints made by hand: names, refusals, old files, and what may depend on weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.mxnet_runs import (
    array_v2,
    checkpoint,
    compute,
    node,
    params_bytes,
    specs,
    var,
    write_checkpoint,
)
from tests.support.source_files import empty_source_files
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import TensorSpec
from tvmflow.custom_operators.loading import forget_operators
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.mxnet import MxnetCheckpoint
from tvmflow.frontends.mxnet._checkpoint import read_params
from tvmflow.recipe import ModelSource

frontend = FRONTENDS["mxnet"]

Node = dict[str, Any]
DIGITS = Path(__file__).resolve().parents[4] / "recipes" / "models"


def dense_net() -> list[Node]:
    return [
        var("data"),
        var("fc_weight"),
        var("fc_bias"),
        node("FullyConnected", "fc", [0, 1, 2], num_hidden="2"),
        var("softmax_label"),
        node("SoftmaxOutput", "softmax", [3, 4]),
    ]


def weights(seed: int = 0) -> dict[str, Any]:
    draw = np.random.RandomState(seed)
    return {
        "arg:fc_weight": draw.normal(size=(2, 3)).astype("float32"),
        "arg:fc_bias": draw.normal(size=2).astype("float32"),
    }


DATA = (TensorSpec("data", (4, 3), "float32"),)


def test_a_classifier_is_imported_without_its_label(tmp_path: Path) -> None:
    """Inputs come first, then weights; the label is removed; the output has MXNet's name."""
    model = frontend.load(write_checkpoint(tmp_path, dense_net(), [[5, 0, 0]], weights()), DATA)
    main = model.mod["main"]
    assert [var.name for var in main.params] == ["data", "fc_weight", "fc_bias"]
    assert int(main.attrs["num_input"]) == 1
    assert list(model.params) == ["fc_weight", "fc_bias"]
    assert model.outputs == (TensorSpec("softmax_output", (4, 2), "float32"),)

    data = np.random.RandomState(1).normal(size=(4, 3)).astype("float32")
    scores = np.exp(data @ model.params["fc_weight"].T + model.params["fc_bias"])
    [actual] = compute(model, {"data": data})
    np.testing.assert_allclose(actual, scores / scores.sum(1, keepdims=True), rtol=1e-5)


def test_an_input_can_be_bound_to_a_constant(tmp_path: Path) -> None:
    """The library lacks it, and computes with its value."""
    nodes = [var("data"), var("shift"), node("elemwise_add", "sum", [0, 1])]
    files = write_checkpoint(tmp_path, nodes, [[2, 0, 0]], {})
    inputs = (*DATA, TensorSpec("shift", (4, 3), "float32"))
    assert [entry.name for entry in frontend.read_facts(files).inputs] == ["data", "shift"]
    shift = np.arange(12, dtype="float32").reshape(4, 3)
    model = frontend.load(files, inputs, bound={"shift": shift})
    assert model.inputs == DATA
    [actual] = compute(model, {"data": np.ones((4, 3), "float32")})
    np.testing.assert_array_equal(actual, shift + 1)


def test_other_weights_give_the_same_module(tmp_path: Path) -> None:
    """A retrained model has byte-identical IR."""
    import tvm

    saved = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        files = write_checkpoint(folder, dense_net(), [[5, 0, 0]], weights(seed))
        saved.append(tvm.ir.save_json(frontend.load(files, DATA).mod))
    assert saved[0] == saved[1]


def test_retrained_digits_give_the_same_module(tmp_path: Path) -> None:
    """Also for convolutions and batch norms, whose arithmetic on weights stays in the graph."""
    import tvm

    files = checkpoint(DIGITS, "digits", 10)
    retrained = tmp_path / "digits-0011.params"
    weights = read_params(files["params"])
    retrained.write_bytes(
        params_bytes(
            {name: array_v2(weight.array * 0.5 + 0.1, 0) for name, weight in weights.items()}
        )
    )
    inputs = (TensorSpec("data", (1, 1, 8, 8), "float32"),)
    first, second = (
        frontend.load({**files, "params": path}, inputs) for path in (files["params"], retrained)
    )
    assert tvm.ir.save_json(first.mod) == tvm.ir.save_json(second.mod)
    assert not np.array_equal(first.params["conv1_weight"], second.params["conv1_weight"])


def test_the_shipped_digits_are_recognized() -> None:
    """The imported checkpoint has its accuracy."""
    test_set = np.load(DIGITS / "digits-test.npz")
    feed = {"data": test_set["data"]}
    model = frontend.load(checkpoint(DIGITS, "digits", 10), specs(feed))
    [scores] = compute(model, feed)
    accuracy = (scores.argmax(axis=1) == test_set["label"]).mean()
    assert len(test_set["label"]) == 360
    assert accuracy >= 0.98


def test_fixed_gamma_is_one(tmp_path: Path) -> None:
    """BatchNorm ignores gamma by default; the array in the file is not a parameter."""
    nodes = [
        *map(var, ("data", "bn_gamma", "bn_beta", "bn_moving_mean", "bn_moving_var")),
        node("BatchNorm", "bn", [0, 1, 2, 3, 4], eps="0.5"),
    ]
    params = {
        "arg:bn_gamma": np.full(2, 7, "float32"),
        "arg:bn_beta": np.array([1, 2], "float32"),
        "aux:bn_moving_mean": np.array([3, 4], "float32"),
        "aux:bn_moving_var": np.array([0.5, 3.5], "float32"),
    }
    data = np.arange(4, dtype="float32").reshape(2, 2)
    model = frontend.load(
        write_checkpoint(tmp_path, nodes, [[5, 0, 0]], params), specs({"data": data})
    )
    assert "bn_gamma" not in model.params
    [actual] = compute(model, {"data": data})
    np.testing.assert_allclose(actual, (data - [3, 4]) / np.sqrt([1.0, 4.0]) + [1, 2], rtol=1e-6)


def test_all_unsupported_operators_are_reported_together(tmp_path: Path) -> None:
    """The message names each operator with its nodes."""
    nodes = [
        var("data"),
        node("CTCLoss", "ctc", [0]),
        node("Custom", "mine", [1], op_type="x"),
        node("Custom", "yours", [2], op_type="y"),
    ]
    with pytest.raises(ImportFailed) as caught:
        frontend.load(write_checkpoint(tmp_path, nodes, [[3, 0, 0]], {}), DATA)
    assert "CTCLoss: node 'ctc'" in caught.value.message
    assert "Custom (x): node 'mine'" in caught.value.message
    assert "Custom (y): node 'yours'" in caught.value.message
    assert '@operator(OP_TYPE, domain="mxnet")' in caught.value.fix


def test_unsupported_operators_that_inference_does_not_need_are_ignored(tmp_path: Path) -> None:
    """Nodes that only compute a label are removed."""
    nodes = dense_net()
    nodes[4:] = [
        var("truth"),
        node("Custom", "encoded", [4], op_type="x"),
        node("SoftmaxOutput", "softmax", [3, 5]),
    ]
    model = frontend.load(write_checkpoint(tmp_path, nodes, [[6, 0, 0]], weights()), DATA)
    assert model.outputs[0].name == "softmax_output"


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("Activation", {"act_type": "mish"}, "act_type='mish' is not supported"),
        ("Activation", {"act_type": "relu", "twist": "2"}, "unsupported attributes: twist='2'"),
        ("slice_axis", {"axis": "1", "begin": "x", "end": "2"}, "begin='x' is not an integer"),
        ("slice_axis", {"axis": "3", "begin": "0", "end": "2"}, "axis 3 is out of range"),
        ("slice_axis", {"axis": "1", "begin": "0"}, None),
        ("Reshape", {"shape": "(5, -1)"}, "does not fit data of shape"),
        ("Reshape", {}, "shape is missing"),
        ("Pooling", {"kernel": "(2, 2)"}, "its data has 2 dimensions"),
        ("broadcast_add", {}, "it has 1 input, but input 1 is needed"),
    ],
)
def test_unsupported_attributes_are_named(
    tmp_path: Path, op: str, attrs: dict[str, str], message: str | None
) -> None:
    """Operator, node and attribute are in the message."""
    nodes = [var("data"), node(op, "here", [0], **attrs)]
    files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {})
    if message is None:
        # an attribute that MXNet takes as None
        assert frontend.load(files, DATA).outputs[0].shape == (4, 3)
        return
    with pytest.raises(ImportFailed) as caught:
        frontend.load(files, DATA)
    assert caught.value.message.startswith(f"{op} 'here' cannot be imported: ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (("dat", (4, 3)), "the model has no input 'dat'; did you mean 'data'?"),
        (
            ("softmax_label", (4,)),
            "'softmax_label' of the recipe is not used in inference: remove it",
        ),
    ],
)
def test_unknown_inputs_are_named(
    tmp_path: Path, inputs: tuple[str, tuple[int, ...]], message: str
) -> None:
    """The nearest name is suggested, and missing inputs are listed."""
    files = write_checkpoint(tmp_path, dense_net(), [[5, 0, 0]], weights())
    with pytest.raises(ImportFailed) as caught:
        frontend.load(files, (TensorSpec(*inputs, "float32"),))
    assert message in caught.value.message
    assert "'data' is neither an input of the recipe nor in the checkpoint" in caught.value.message
    assert "data" in caught.value.fix


def test_missing_parameters_are_named(tmp_path: Path) -> None:
    """The nearest name in the file is suggested."""
    params = {name.replace("fc_bias", "fc_bia"): value for name, value in weights().items()}
    files = write_checkpoint(tmp_path, dense_net(), [[5, 0, 0]], params)
    with pytest.raises(ImportFailed, match=r"'fc_bias' is neither .*; did you mean 'fc_bia"):
        frontend.load(files, DATA)


def test_an_input_shape_that_does_not_fit_names_the_parameter(tmp_path: Path) -> None:
    """A wrong shape in the recipe is reported with the weight that it does not fit."""
    files = write_checkpoint(tmp_path, dense_net(), [[5, 0, 0]], weights())
    with pytest.raises(ImportFailed, match=r"'fc_weight' has the shape \(2, 3\), but \(2, 5\)"):
        frontend.load(files, (TensorSpec("data", (4, 5), "float32"),))


def test_a_damaged_symbol_is_rejected(tmp_path: Path) -> None:
    """Text that is not a symbol, and nodes that read later nodes."""
    files = write_checkpoint(tmp_path, dense_net(), [[5, 0, 0]], weights())
    deep, infinite = "[" * 100_000, '{"nodes": [], "heads": [[Infinity, 0]]}'
    for text in (
        "",
        "[]",
        deep,
        infinite,
        '{"nodes": []}',
        '{"nodes": [{"op": "null"}], "heads": [[0, 0]]}',
    ):
        files["symbol"].write_text(text)
        with pytest.raises(ImportFailed, match="is not an MXNet symbol"):
            frontend.load(files, DATA)
    forward = [var("data"), node("relu", "r", [2]), node("relu", "s", [0])]
    files = write_checkpoint(tmp_path, forward, [[1, 0, 0]], {})
    with pytest.raises(ImportFailed, match="reads a node that does not precede it"):
        frontend.load(files, DATA)


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        (
            node("_arange", "many", [], start="0", stop="1e12"),
            "makes a constant of 1,000,000,000,000",
        ),
        (node("_arange", "many", [], start="0", stop="4", step="0"), "its step is 0"),
        (node("_eye", "many", [], N="1000000"), "makes a constant of 1,000,000,000,000 elements"),
        (
            node("_zeros", "many", [], shape="(1048576, 1048576)"),
            "its result has 1,099,511,627,776 elements",
        ),
        (node("_zeros", "many", [], shape="(" * 500 + ")" * 500), "is not a tuple of integers"),
        (
            node("tile", "many", [0], reps="(1048576, 1048576)"),
            "its result has 13,194,139,533,312 elements",
        ),
        (
            node("_contrib_arange_like", "many", [0], repeat=str(1 << 33)),
            "makes a constant of 8,589,934,592 elements",
        ),
    ],
)
def test_a_few_numbers_do_not_fill_the_memory(operator: Node, text: str, tmp_path: Path) -> None:
    """The node that would is named."""
    files = write_checkpoint(tmp_path, [var("data"), operator], [[1, 0, 0]], {})
    with pytest.raises(ImportFailed) as caught:
        frontend.load(files, DATA if operator["inputs"] else ())
    assert f"{operator['op']} 'many' cannot be imported" in caught.value.message
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("operator", "shape", "text"),
    [
        (
            node("_contrib_AdaptiveAvgPooling2D", "many", [0], output_size="(1048576, 1048576)"),
            (1, 1, 6, 6),
            "its result has 1,099,511,627,776 elements, and the limit is 2,147,483,648",
        ),
        (
            node("take", "many", [0, 0]),
            (2, 1 << 20),
            "its result has 2,199,023,255,552 elements",
        ),
        (
            node("Pooling", "many", [0], pool_type="avg", kernel="(2, 2)", pad="(65536, 65536)"),
            (1, 1, 6, 6),
            "makes a constant of 17,181,179,929 elements",
        ),
        (
            node("Pooling", "many", [0], pool_type="avg", kernel="(9, 2)", pad="(0, 4294967296)"),
            (1, 1, 6, 6),
            "makes a constant of 8,589,934,597 elements",
        ),
        (
            node("_contrib_MultiBoxPrior", "many", [0]),
            (1, 1, 32768, 32768),
            "makes a constant of 4,294,967,296 elements",
        ),
    ],
)
def test_large_windows_and_lookups_do_not_fill_the_memory(
    operator: Node, shape: tuple[int, ...], text: str, tmp_path: Path
) -> None:
    """Results and constants are counted before they are made."""
    files = write_checkpoint(tmp_path, [var("data"), operator], [[1, 0, 0]], {})
    with pytest.raises(ImportFailed) as caught:
        frontend.load(files, (TensorSpec("data", shape, "float32"),))
    assert f"{operator['op']} 'many' cannot be imported" in caught.value.message
    assert text in caught.value.message


def test_a_large_result_of_a_custom_operator_is_refused(tmp_path: Path) -> None:
    """The message names the node."""
    path = tmp_path / "enlarge.py"
    path.write_text(
        "from tvm import relax\n"
        "from tvmflow.custom_operators import operator\n"
        "@operator('enlarge', domain='mxnet')\n"
        "def enlarge(node, x):\n"
        "    return relax.op.broadcast_to(x, (65536, 65536, 4, 3))\n"
    )
    nodes = [var("data"), node("Custom", "own", [0], op_type="enlarge")]
    files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {})
    try:
        with pytest.raises(ImportFailed) as caught:
            frontend.load({**files, "operator:enlarge.py": path}, DATA)
    finally:
        forget_operators()
    assert caught.value.message == (
        "Custom 'own' cannot be imported: its result has 51,539,607,552 elements, and the limit is 2,147,483,648"
    )


def test_an_output_that_an_operator_does_not_have_is_refused(tmp_path: Path) -> None:
    """Whether or not MXNet has names for the others."""
    for operator in ("make_loss", "relu"):
        nodes = [var("data"), node(operator, "last", [0])]
        files = write_checkpoint(tmp_path, nodes, [[1, 2, 0]], {})
        with pytest.raises(ImportFailed, match="its output 2 is not supported"):
            frontend.load(files, DATA)


def test_names_are_shown_escaped_and_short(tmp_path: Path) -> None:
    """Operator, node and attribute may command the terminal, or fill it."""
    name = "\x1b[2J\r\u202e" + "n" * 50_000
    for wrong in (node(name, name, [0]), node("tile", name, [0], reps=name), var(name)):
        files = write_checkpoint(tmp_path, [var("data"), wrong], [[1, 0, 0]], {})
        with pytest.raises(ImportFailed) as caught:
            frontend.load(files, DATA)
        assert "\\x1b[2J\\r\\u202ennn" in str(caught.value)
        assert str(caught.value).replace("\n", "").isprintable()
        assert len(str(caught.value)) < 1000


def old_batch_norm() -> list[Node]:
    """As MXNet 0.8 wrote it: `param`, entries of two numbers, no auxiliary states."""
    return [
        {"op": "null", "name": "data", "param": {}, "inputs": []},
        {"op": "null", "name": "bn_gamma", "param": {}, "inputs": []},
        {"op": "null", "name": "bn_beta", "param": {}, "inputs": []},
        {
            "op": "BatchNorm",
            "name": "bn",
            "param": {"eps": "0.25", "fix_gamma": "False", "momentum": "0.9"},
            "attr": {"weight_lr_mult": "2", "note": "the user's"},
            "inputs": [[0, 0], [1, 0], [2, 0]],
            "backward_source_id": -1,
        },
        {"op": "_MulScalar", "name": "twice", "param": {"scalar": "2"}, "inputs": [[3, 0]]},
    ]


def test_files_of_version_0_8_are_upgraded(tmp_path: Path) -> None:
    """Omitted auxiliary states have MXNet's default names."""
    nodes = old_batch_norm()
    params = {
        "arg:bn_gamma": np.full(2, 3, "float32"),
        "arg:bn_beta": np.full(2, 1, "float32"),
        "aux:bn_moving_mean": np.full(2, 5, "float32"),
        "aux:bn_moving_var": np.full(2, 2, "float32"),
    }
    files = write_checkpoint(tmp_path, nodes, [[4, 0]], params, version=None)
    data = np.arange(6, dtype="float32").reshape(3, 2)
    model = frontend.load(files, specs({"data": data}))
    assert model.outputs[0].name == "twice_output"
    [actual] = compute(model, {"data": data})
    np.testing.assert_allclose(actual, 2 * ((data - 5) / 1.5 * 3 + 1), rtol=1e-6)


def test_argmax_of_old_files_is_over_all_axes(tmp_path: Path) -> None:
    """Before 0.9.5, axis -1 meant no axis."""
    shapes = {}
    for version in (904, 10901):
        nodes = [var("data"), node("argmax", "best", [0], axis="-1")]
        files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {}, version=version)
        shapes[version] = frontend.load(files, DATA).outputs[0].shape
    assert shapes == {904: (1,), 10901: (4,)}


def test_equal_scores_keep_their_order(tmp_path: Path) -> None:
    """Sorting is stable in both directions, so that results are the same on every machine."""
    nodes = [var("data"), node("argsort", "order", [0], is_ascend="0")]
    data = np.random.RandomState(2).randint(0, 3, (3, 50)).astype("float32")
    files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {})
    [actual] = compute(frontend.load(files, specs({"data": data})), {"data": data})
    np.testing.assert_array_equal(actual, np.argsort(-data, axis=1, kind="stable"))


def source(prefix: str, epoch: int) -> ModelSource:
    return ModelSource(mxnet=MxnetCheckpoint(prefix=prefix, epoch=epoch))


def where(*path: str) -> str:
    return f"recipe.yaml:{len(path)}:1"


def test_the_files_of_a_checkpoint() -> None:
    """Prefix and epoch name two files, from the recipe's folder."""
    actual = frontend.files(source("models/digits", 10), DIGITS.parent, where, empty_source_files())
    assert {file.role: Path(file.path).name for file in actual} == {
        "symbol": "digits-symbol.json",
        "params": "digits-0010.params",
    }


def test_empty_and_invalid_parameter_files(tmp_path: Path) -> None:
    """An empty file is valid for a graph without weights, other bytes are not."""
    nodes = [var("data"), node("relu", "r", [0])]
    files = write_checkpoint(tmp_path, nodes, [[1, 0, 0]], {})
    assert files["params"].read_bytes() == params_bytes({})
    assert frontend.load(files, DATA).params == {}
    files["params"].write_bytes(b"garbage")
    with pytest.raises(ImportFailed, match=r"not a \.params file"):
        frontend.load(files, DATA)
