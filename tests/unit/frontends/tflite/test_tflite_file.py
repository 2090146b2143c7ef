"""What planning reads of a TFLite file, and what is refused, where and with which sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.recipes import model_problems
from tests.support.tflite_models import Quantized, TfliteBuilder
from tests.unit.frontends.tflite.tflite_cases import CASES, make
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import ModelInput, NotAModel
from tvmflow.frontends.tflite._model import read_model

frontend = FRONTENDS["tflite"]

FILE = Path("net.tflite")
RECIPE = "model: {tflite: net.tflite}\ntargets: [host]\noutputs: [bundle]\n"


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def relu(model: TfliteBuilder, *shape: int, name: str = "image") -> int:
    """Add an input and a RELU of it."""
    return model.result("RELU", [model.input(name, shape)], len(shape))


def test_inputs_are_as_in_the_signature() -> None:
    """Names, dtypes, sizes and order; without a signature names are those of the tensors."""
    model = TfliteBuilder()
    x = model.input("serving_x:0", (-1, 4))
    ids = model.input("serving_ids:0", (2,), "int32")
    y = model.result("RELU", [x], 2)
    model.save(Path(), y, y)
    plain = [
        ModelInput("serving_x:0", "float32", ("", 4)),
        ModelInput("serving_ids:0", "int32", (2,)),
    ]
    FILE.write_bytes(model.build(y, y))
    assert list(frontend.read_facts({"model": FILE}).inputs) == plain
    assert [name for name, _ in read_model(FILE.read_bytes()).outputs] == ["t2", "t2_2"]
    model.signature = ({"ids": ids, "x": x}, {"scores": y})
    FILE.write_bytes(model.build(y))
    assert list(frontend.read_facts({"model": FILE}).inputs) == [
        plain[0]._replace(name="x"),
        plain[1]._replace(name="ids"),
    ]
    assert read_model(FILE.read_bytes()).outputs == [("scores", y)]


def test_sizes_that_are_left_open_are_a_problem_with_what_to_write() -> None:
    model = TfliteBuilder()
    FILE.write_bytes(model.build(relu(model, -1, 8, -1, 3)))
    [text] = model_problems(RECIPE)
    assert text == (
        "r.yaml:1:1: inputs: the model has dynamic dimensions; write this in the recipe, with a number for each SIZE:\n\n"
        "inputs:\n  image: {shape: [1, 8, SIZE, 3]}  # float32, [?, 8, ?, 3]\n\n"
        "or, to let one library serve all sizes, write this, with the maximum for each SIZE:\n\n"
        "dimensions:\n  batch: {max: SIZE}\n  image_2: {max: SIZE}\ninputs:\n"
        "  image: {shape: [batch, 8, image_2, 3]}  # float32, [?, 8, ?, 3]"
    )
    assert model_problems(f"{RECIPE}inputs: {{image: {{shape: [1, 8, 5, 3]}}}}\n") == []
    assert model_problems(f"{RECIPE}inputs: {{image: {{shape: [1, 9, 5, 3]}}}}\n") == [
        "r.yaml:6:25: inputs.image.shape: input 'image' has shape ['?', 8, '?', 3], which [1, 9, 5, 3] does not fit"
    ]


def test_operators_that_are_not_imported_are_named() -> None:
    """Flex operators, custom ones and TFLite's own, before anything runs, and in a downloaded model."""
    model = TfliteBuilder()
    x = model.input("x", (2, 3))
    y = model.result("CUSTOM", [x], 2, custom="FlexErf")
    y = model.result("WHILE", [y], 2)
    FILE.write_bytes(
        model.build(model.result("CUSTOM", [y], 2, custom="TFLite_Detection_PostProcess"))
    )
    text = "tvmflow does not support the TFLite operators CUSTOM FlexErf, CUSTOM TFLite_Detection_PostProcess, WHILE"
    fix = "replace the operator in the model, or end the model before it"
    assert model_problems(RECIPE) == [
        f"r.yaml:3:17: model.tflite: net.tflite cannot be imported: {text}",
        fix,
    ]
    with pytest.raises(ImportFailed) as caught:
        frontend.load({"model": FILE}, ())
    assert (caught.value.message, caught.value.fix, caught.value.exit_code) == (text, fix, 1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a TFLite model: the file is empty"),
        (b"hello, world", "is not a TFLite model: it does not begin as one"),
        (b"\x10\0\0\0TFL3", "is not a TFLite model: it is incomplete"),
        (b"\x80\x02}", "is a pickle of PyTorch"),
        (b"\x89HDF\r\n\x1a\n", "is a Keras model"),
    ],
)
def test_other_files(content: bytes, expected: str) -> None:
    """Each with its place."""
    FILE.write_bytes(content)
    assert model_problems(RECIPE)[0].startswith(f"r.yaml:3:17: model.tflite: net.tflite {expected}")


def test_a_file_of_another_frontend_is_recognized() -> None:
    """In both directions, with the field to write."""
    model = TfliteBuilder()
    Path("m.tflite").write_bytes(model.build(relu(model, 2)))
    rest = "targets: [host]\noutputs: [bundle]\n"
    for kind in ("onnx", "pytorch"):
        text, fix = model_problems(f"model: {{{kind}: m.tflite}}\n{rest}")
        assert text.endswith(f"model.{kind}: m.tflite is a TFLite model")
        assert fix == "name it with `tflite:`"
    Path("m.onnx").write_bytes(b"\x08\x08hello")
    assert model_problems(f"model: {{tflite: m.onnx}}\n{rest}") == [
        "r.yaml:3:17: model.tflite: m.onnx is an ONNX model",
        "name it with `onnx:`",
    ]


def test_a_missing_file_and_one_digest_too_many() -> None:
    """Each with its place."""
    model = TfliteBuilder()
    Path("nat.tflite").write_bytes(model.build(relu(model, 2)))
    assert model_problems(RECIPE) == [
        "r.yaml:3:17: model.tflite: there is no file net.tflite; did you mean 'nat.tflite'?"
    ]
    FILE.write_bytes(Path("nat.tflite").read_bytes())
    pinned = RECIPE.replace("net.tflite}", f"net.tflite, files: {{a: {'a' * 64}}}}}")
    assert model_problems(pinned) == [
        "r.yaml:3:36: model.files: a TFLite model is one file; its digest is `sha256`"
    ]


def _hybrid(model: TfliteBuilder) -> int:
    other = model.constant(np.zeros((2, 3)), "int8", Quantized(0.1))
    return model.result("ADD", [model.input("x", (2, 3)), other], 2, "Add")


def _sparse(model: TfliteBuilder) -> int:
    weights = model.tensor((4, 3), data=bytes(48), is_sparse=True, name="w")
    return model.result(
        "FULLY_CONNECTED", [model.input("x", (2, 3)), weights, -1], 2, "FullyConnected"
    )


def _dynamic_shape(model: TfliteBuilder) -> int:
    x, shape = model.input("x", (2, 3)), model.input("shape", (2,), "int32")
    return model.result("RESHAPE", [x, shape], 2, "Reshape")


def _symmetric(model: TfliteBuilder) -> int:
    widths = model.integers([[1, 1], [1, 1]])
    return model.result("MIRROR_PAD", [model.input("x", (2, 3)), widths], 2, "MirrorPad", Mode=1)


def _batch_dims(model: TfliteBuilder) -> int:
    indices = model.integers([[0], [1]])
    x = model.input("x", (2, 3))
    return model.result("GATHER", [x, indices], 2, "Gather", Axis=1, BatchDims=1)


def _wrong_axis(model: TfliteBuilder) -> int:
    x = model.input("x", (2, 3))
    return model.result("CONCATENATION", [x, x], 2, "Concatenation", Axis=7)


def _wrong_shape(model: TfliteBuilder) -> int:
    return model.result("RESHAPE", [model.input("x", (2, 3)), model.integers([4])], 1, "Reshape")


def _sign_bit(model: TfliteBuilder) -> int:
    x = model.input("x", (2, 3))
    return model.result("ADD", [x, x], 2, "Add", FusedActivationFunction=5)


def _broadcast_error(model: TfliteBuilder) -> int:
    return model.result(
        "ADD", [model.input("x", (2, 3)), model.constant(np.zeros(4, "f"))], 2, "Add"
    )


def _huge(model: TfliteBuilder) -> int:
    repeats = model.integers([1 << 30, 1 << 10])
    return model.result("TILE", [model.input("x", (2, 3)), repeats], 2)


def _no_stride(model: TfliteBuilder) -> int:
    weights = model.constant(np.ones((4, 3, 3, 3), np.float32))
    operands = [model.input("x", (1, 4, 4, 3)), weights]
    return model.result("CONV_2D", operands, 4, "Conv2D", StrideW=0, StrideH=1)


def _slice_beyond_its_axis(model: TfliteBuilder) -> int:
    bounds = [model.integers([0, 1]), model.integers([2, 3])]
    return model.result("SLICE", [model.input("x", (2, 3)), *bounds], 2, "Slice")


def _uneven_split(model: TfliteBuilder) -> int:
    axis, x = model.integers([1]), model.input("x", (2, 3))
    parts = [model.tensor((2, 1)), model.tensor((2, 1))]
    model.add("SPLIT", [axis, x], parts, "Split", NumSplits=2)
    return model.result("ADD", parts, 2, "Add")


def _lacks_an_operand(model: TfliteBuilder) -> int:
    return model.result("ADD", [model.input("x", (2, 3))], 2)


def _unwritten(model: TfliteBuilder) -> int:
    return model.result("RELU", [model.tensor((2, 3), name="state")], 2)


LACKS = "tvmflow does not import the TFLite operator"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            _hybrid,
            "the TFLite operator ADD has data in float32 and integers with a scale (tensor 't2')",
        ),
        (_sparse, "tensor 'w' has sparse values, which tvmflow does not import"),
        (
            _dynamic_shape,
            f"{LACKS} RESHAPE with operand 1 that is computed when the model runs (tensor 't2')",
        ),
        (_symmetric, f"{LACKS} MIRROR_PAD with mode SYMMETRIC (tensor 't2')"),
        (_batch_dims, f"{LACKS} GATHER with batch_dims (tensor 't2')"),
        (_wrong_axis, f"{LACKS} CONCATENATION with axis 7 of 2 (tensor 't1')"),
        (_wrong_shape, f"{LACKS} RESHAPE of shape [2, 3] to [4] (tensor 't2')"),
        (_sign_bit, f"{LACKS} ADD with activation 5 (tensor 't1')"),
        (_broadcast_error, "ADD (tensor 't2') cannot be imported: "),
        (
            _no_stride,
            "CONV_2D (tensor 't2') cannot be imported: there is no conversion of it for its attributes and the "
            "operands [1, 4, 4, 3]",
        ),
        (
            _lacks_an_operand,
            "ADD (tensor 't1') cannot be imported: there is no conversion of it for its attributes and the operands "
            "[2, 3]",
        ),
        (
            _slice_beyond_its_axis,
            f"{LACKS} SLICE of 3 entries from 1 along an axis of 3 (tensor 't3')",
        ),
        (_uneven_split, f"{LACKS} SPLIT of 3 entries to 2 outputs (tensor 't2')"),
        (
            _huge,
            "TILE (tensor 't2') cannot be imported: its result has 6,597,069,766,656 elements, "
            "and the limit is 2,147,483,648",
        ),
        (_unwritten, "tensor 'state' is read before anything computes it"),
    ],
)
def test_what_the_import_refuses(build: Any, sentence: str) -> None:
    """With the operator and the tensor, and exit code 1."""
    model = TfliteBuilder()
    FILE.write_bytes(model.build(build(model)))
    with pytest.raises(ImportFailed) as caught:
        frontend.load({"model": FILE}, ())
    assert caught.value.message.startswith(sentence)
    assert caught.value.exit_code == 1


def test_a_tensor_that_the_model_does_not_have() -> None:
    """With the nearest name."""
    model = TfliteBuilder()
    x, inner = model.input("x", (2,)), model.tensor((2,), name="relu_1")
    model.add("RELU", [x], [inner])
    FILE.write_bytes(model.build(model.result("EXP", [inner], 1)))
    with pytest.raises(
        ImportFailed, match="the model has no tensor 'relu_2'; did you mean 'relu_1'"
    ):
        frontend.load({"model": FILE}, (), ("relu_2",))


def test_weights_are_parameters_and_new_ones_give_the_same_module() -> None:
    """Also where they are transposed for ONNX."""
    import tvm

    modules = []
    for factor in (1.0, 2.0):
        model = TfliteBuilder()
        x = model.input("x", (1, 6, 6, 3))
        weights = model.constant(np.full((4, 3, 3, 3), factor, np.float32))
        bias = model.constant(np.full(4, factor, np.float32))
        fields: dict[str, Any] = {"Padding": 0, "StrideH": 1, "StrideW": 1}
        FILE.write_bytes(
            model.build(model.result("CONV_2D", [x, weights, bias], 4, "Conv2D", **fields))
        )
        loaded = frontend.load({"model": FILE}, ())
        assert {array.shape for array in loaded.params.values()} == {(4, 3, 3, 3), (4,)}
        modules.append(loaded.mod)
    tvm.ir.assert_structural_equal(*modules)


def test_integer_weights_of_float_data_stay_integers() -> None:
    """As the converter's default optimization makes them: they are parameters of int8, whatever their size."""
    model = TfliteBuilder()
    weights = model.constant(np.ones((4, 3)), "int8", Quantized([0.1, 0.2, 0.3, 0.4], [0] * 4))
    x = model.input("x", (2, 3))
    FILE.write_bytes(
        model.build(model.result("FULLY_CONNECTED", [x, weights, -1], 2, "FullyConnected"))
    )
    loaded = frontend.load({"model": FILE}, ())
    assert [(array.dtype, array.shape) for array in loaded.params.values()] == [("int8", (3, 4))]


def test_a_bound_input_is_gone() -> None:
    """What depends on it alone is computed at import."""
    model = TfliteBuilder()
    x, n = model.input("x", (2, 3)), model.input("n", (2,), "int32")
    FILE.write_bytes(model.build(model.result("RESHAPE", [x, n], 2, "Reshape")))
    specs = (TensorSpec("n", (2,), "int32"), TensorSpec("x", (2, 3), "float32"))
    loaded = frontend.load({"model": FILE}, specs, bound={"n": np.array([3, 2], np.int32)})
    assert [spec.name for spec in loaded.inputs] == ["x"]
    assert [spec.shape for spec in loaded.outputs] == [(3, 2)]


def test_no_transposition_is_between_layers() -> None:
    """Convolutions have channels first in ONNX, and so has what is between them: only the ends are reordered."""
    from tvm import relax

    model = TfliteBuilder()
    fields: dict[str, Any] = {"Padding": 0, "StrideH": 1, "StrideW": 1}
    x = model.input("x", (1, 8, 8, 3))
    widths = model.integers([[0, 0], [1, 1], [1, 1], [0, 0]])
    for channels, inner in ((8, 3), (8, 8)):
        x = model.result("PAD", [x, widths], 4)
        weights = [
            model.constant(np.ones(s, np.float32)) for s in ((channels, 3, 3, inner), channels)
        ]
        x = model.result("CONV_2D", [x, *weights], 4, "Conv2D", **(fields | {"Padding": 1}))
        x = model.result("ADD", [x, model.constant(np.ones(8, np.float32))], 4, "Add")
        x = model.result("HARD_SWISH", [x], 4)
    FILE.write_bytes(model.build(x))
    names: list[str] = []
    main = frontend.load({"model": FILE}, ()).mod["main"]
    relax.analysis.post_order_visit(
        main,
        lambda e: (
            names.append(e.op.name) if isinstance(e, relax.Call) and hasattr(e.op, "name") else None
        ),
    )
    assert names.count("relax.permute_dims") == 2
    assert not [name for name in names if "pad" in name or "call_tir" in name]


def test_damaged_files_are_refused() -> None:
    """Nothing but the one error, whatever bytes are changed or missing."""
    source = random.Random(0)
    files = [make(name, 0).data for name in list(CASES)[::25]]
    for _ in range(3000):
        data = bytearray(source.choice(files))
        for _ in range(3):
            data[source.randrange(len(data))] = source.choice((0, 1, 127, 255))
        try:
            read_model(bytes(data[: source.choice((len(data), source.randrange(len(data))))]))
        except NotAModel as error:
            assert str(error)


def _count(model: TfliteBuilder, initial: Any) -> bytes:
    """Return a model that adds its input to a variable."""
    x, handle = model.input("x", (1, 4)), model.handle("sum", initial)
    y = model.result("ADD", [x, model.read(handle, (1, 4))], (1, 4), "Add")
    model.assign(handle, y)
    return model.build(y)


def test_variables_are_inputs_and_outputs() -> None:
    """By their names, with the initial values; one that is bound to a value is none."""
    initial = np.arange(4, dtype=np.float32).reshape(1, 4)
    FILE.write_bytes(_count(TfliteBuilder(), initial))
    facts = frontend.read_facts({"model": FILE})
    assert facts.inputs[1] == ModelInput("sum", "float32", (1, 4))
    assert [output.name for output in facts.outputs] == ["t4", "sum.next"]
    loaded = frontend.load({"model": FILE}, ())
    [state] = loaded.states
    assert (state.input, state.output) == ("sum", "sum.next")
    assert state.content(16) == initial.tobytes()
    assert not frontend.load({"model": FILE}, (), bound={"sum": initial}).states


@pytest.mark.parametrize(
    ("count", "shape", "message"),
    [
        (
            20000,
            (1, 20000),
            "has 80,000 bytes of initial values that are not all 0, and the limit is 65,536",
        ),
        (4, (1, 5), "the variable 'sum' has 20 bytes, and begins with 16"),
    ],
)
def test_initial_values_that_no_library_can_have(
    count: int, shape: tuple[int, int], message: str
) -> None:
    model = TfliteBuilder()
    handle = model.handle("sum", np.ones((1, count), np.float32))
    model.set_shape(handle + 1, shape)
    read = model.read(handle, shape)
    model.assign(handle, model.input("x", shape))
    FILE.write_bytes(model.build(read))
    with pytest.raises(ImportFailed, match=message):
        frontend.load({"model": FILE}, ())


def test_an_operator_on_something_else_than_a_variable_is_told() -> None:
    model = TfliteBuilder()
    FILE.write_bytes(model.build(model.read(model.input("x", (1, 4)), (1, 4))))
    with pytest.raises(
        ImportFailed, match="tvmflow does not support the TFLite operators READ_VARIABLE"
    ):
        frontend.read_facts({"model": FILE})
