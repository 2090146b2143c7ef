"""Faults of a recipe that the header of its model shows: found by planning, with their position in the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from tests.support.onnx_models import classifier, model, value
from tests.support.recipes import input_problems
from tvmflow.core import packages
from tvmflow.core.codec import to_json
from tvmflow.core.errors import RecipeError
from tvmflow.core.packages import NotInstalled
from tvmflow.core.types import Json
from tvmflow.planning.prepare import RunRequest, prepare_run
from tvmflow.planning.recipes import load_recipe
from tvmflow.store.local import LocalStore
from tvmflow.targets.llvm_query import TargetFacts

RECIPE = "recipe: 1\nname: net\nmodel: {onnx: m.onnx}\n"
SYMBOL = {
    "nodes": [
        {"op": "null", "name": "data", "inputs": []},
        {"op": "null", "name": "fc_weight", "inputs": []},
        {"op": "FullyConnected", "name": "fc", "inputs": [[0, 0, 0], [1, 0, 0]]},
    ],
    "heads": [[2, 0, 0]],
}


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def problems(text: str, made: ModelProto | None = None, variant: str = "") -> list[str]:
    """Return the problems of a recipe with this model."""
    if made is not None:
        Path("m.onnx").write_bytes(made.SerializeToString())
    return input_problems(text, variant)


def add(left: str, right: str) -> NodeProto:
    return helper.make_node("Add", [left, right], ["y"])


def two_inputs(*dims: Any, **more: Any) -> ModelProto:
    inputs = [value("left", dims), value("right", dims)]
    return model([add("left", "right")], inputs, [value("y", None)], **more)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (
            "{lefd: {shape: [2, 3]}, right: {shape: [2, 3]}}",
            [
                "r.yaml:4:16: inputs.lefd: the model has no input 'lefd'; did you mean 'left'? (its inputs are left, right)",
                "r.yaml:4:9: inputs: the model has dynamic dimensions; write this in the recipe:\n\n"
                "inputs:\n"
                "  left: {shape: [1, 3]}  # float32, [n, 3]\n"
                "  right: {shape: [2, 3]}  # float32, [n, 3]",
            ],
        ),
        (
            "{left: {shape: [2, 4]}, right: {shape: [2, 3]}}",
            [
                "r.yaml:4:24: inputs.left.shape: input 'left' has shape ['n', 3], which [2, 4] does not fit"
            ],
        ),
        (
            "{left: {shape: [6]}, right: {shape: [2, 3], dtype: int64}}",
            [
                "r.yaml:4:24: inputs.left.shape: input 'left' has shape ['n', 3], which [6] does not fit",
                "r.yaml:4:60: inputs.right.dtype: input 'right' has dtype float32, not int64",
            ],
        ),
        ("{left: {shape: [2, 3]}, right: {shape: [2, 3]}}", []),
    ],
)
def test_inputs_that_do_not_fit_have_their_position(inputs: str, expected: list[str]) -> None:
    """An unknown name with the nearest, a missing input, a wrong shape, rank and dtype."""
    assert problems(f"{RECIPE}inputs: {inputs}\n", two_inputs("n", 3)) == expected


def test_open_dimensions_are_one_problem_with_the_section_to_write() -> None:
    """Without `inputs`, the position is that of the recipe; -1 counts as open, 0 as wrong."""
    text = (
        "r.yaml:1:1: inputs: the model has dynamic dimensions; write this in the recipe:\n\n"
        "inputs:\n  left: {{shape: [1, 3]}}  # float32, [{0}, 3]\n  right: {{shape: [1, 3]}}  # float32, [{0}, 3]\n\n"
        "or, to let one library serve all sizes, write this, with the maximum for each SIZE:\n\n"
        "dimensions:\n  {1}: {{max: SIZE}}\ninputs:\n"
        "  left: {{shape: [{1}, 3]}}  # float32, [{0}, 3]\n  right: {{shape: [{1}, 3]}}  # float32, [{0}, 3]"
    )
    for size, shown, name in (("n", "n", "n"), (-1, "-1", "batch"), (None, "?", "batch")):
        assert problems(RECIPE, two_inputs(size, 3)) == [text.format(shown, name)]
    assert "which is empty" in problems(RECIPE, two_inputs(0, 3))[0]
    assert "more than 2^31 elements" in problems(RECIPE, two_inputs(1 << 40, 3))[0]


def test_dimensions_are_named_like_the_sizes_of_the_model() -> None:
    """As identifiers, each once in whatever case and text in YAML; a size without a name has that of its place."""
    inputs = [
        value("ids", ["batch", "past-seq 1"], "int64"),
        value("mask", ["batch", "PAST_seq_1"], "int64"),
        value("x", ["for", None, "2n", "null"], "int64"),
    ]
    made = model([add("ids", "mask")], inputs, [value("out", None)])
    [problem] = problems(RECIPE, made)
    assert problem.partition("for each SIZE:\n\ndimensions:")[2].splitlines() == [
        "",
        "  batch: {max: SIZE}",
        "  past_seq_1: {max: SIZE}",
        "  PAST_seq_1_2: {max: SIZE}",
        "  for_: {max: SIZE}",
        "  x_1: {max: SIZE}",
        "  size_2n: {max: SIZE}",
        '  "null": {max: SIZE}',
        "inputs:",
        "  ids: {shape: [batch, past_seq_1]}  # int64, [batch, past-seq 1]",
        "  mask: {shape: [batch, PAST_seq_1_2]}  # int64, [batch, PAST_seq_1]",
        '  x: {shape: [for_, x_1, size_2n, "null"]}  # int64, [for, ?, 2n, null]',
    ]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("{left: {shape: [n, 3]}, right: {shape: [n, 3]}}", []),
        (
            "{left: {shape: [n, 3]}, right: {shape: [2, 3]}}",
            [
                "r.yaml:5:48: inputs.right.shape: dimension 0 ('n') of input 'right' is 2, and that of input 'left' is n: "
                "they are one dimension"
            ],
        ),
        (
            "{left: {shape: [3, n]}, right: {shape: [3, n]}}",
            [
                "r.yaml:5:24: inputs.left.shape: input 'left' has shape ['n', 3], which [3, n] does not fit: export it with "
                "dynamic dimensions for `n`",
                "r.yaml:5:48: inputs.right.shape: input 'right' has shape ['n', 3], which [3, n] does not fit: export it "
                "with dynamic dimensions for `n`",
            ],
        ),
    ],
)
def test_dimensions_are_compared_with_those_of_the_model(inputs: str, expected: list[str]) -> None:
    """Sizes with one name are one size, and a fixed one stays fixed."""
    text = f"{RECIPE}dimensions: {{n: {{max: 8}}}}\ninputs: {inputs}\n"
    assert problems(text, two_inputs("n", 3)) == expected


def test_the_section_to_write_has_all_inputs_and_what_the_recipe_says() -> None:
    """Names that YAML would read as something else are in quotes; what must be chosen is not a number."""
    inputs = [
        value("ids", ["batch", "sequence"], "int64"),
        value("y", ["batch", 3, "height", "width"]),
        value("a:b", [4]),
        value("rank?", None),
        value("sr", [], "int64"),
    ]
    made = model([add("y", "a:b")], inputs, [value("out", None)])
    text = f"{RECIPE}inputs: {{sr: {{value: 16000}}, y: {{range: [0, 9], image: {{resize: [8, 8]}}}}}}\n"
    [problem] = problems(text, made)
    head, _, section = problem.partition("\n\n")
    assert head == (
        "r.yaml:4:9: inputs: the model has dynamic dimensions; write this in the recipe, with a number for each SIZE:"
    )
    assert section.splitlines() == [
        "inputs:",
        "  ids: {shape: [1, SIZE]}  # int64, [batch, sequence]",
        '  y: {shape: [1, 3, SIZE, SIZE], range: [0.0, 9.0], image: {"resize": [8, 8]}}  # float32, [batch, 3, height, width]',
        '  "a:b": {shape: [4]}  # float32',
        '  "rank?": {shape: [SIZE]}  # float32, the model does not specify the number of dimensions',
        "  sr: {value: 16000}  # int64",
    ]
    assert problems(RECIPE + section.replace("SIZE", "8"), made) == []
    Path("r.yaml").write_text(RECIPE + section)
    with pytest.raises(RecipeError, match=r"r\.yaml:5:20: inputs.ids.shape.1: must be an integer"):
        load_recipe(Path("r.yaml"))


def test_dtypes_and_fixed_inputs_are_those_of_the_model() -> None:
    """A shape alone is enough for integers, and an input that the model tells all about need not be listed."""
    inputs = [value("left", ["n", 3], "int64"), value("right", [2, 3], "int64")]
    made = model([add("left", "right")], inputs, [value("y", None)])
    assert problems(f"{RECIPE}inputs: {{left: {{shape: [2, 3]}}}}\n", made) == []
    assert problems(f"{RECIPE}inputs: {{left: {{shape: [2, 3]}}, right: {{}}}}\n", made) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("{value: [[1, 2, 3]]}", ""),
        ("{value: 2, shape: [5, 3]}", ""),
        ("{value: 2}", "24: inputs.left.value: input 'left' has shape ['n', 3], and the value has shape []; a number fills the `shape` that stands beside it"),
        ("{value: [1, 2, 3]}", "24: inputs.left.value: input 'left' has shape ['n', 3], and the value has shape [3]"),
        ("{value: 2, shape: [5, 4]}", "34: inputs.left.shape: input 'left' has shape ['n', 3], which [5, 4] does not fit"),
        ("{value: [[1, 2, 3.5]]}", "24: inputs.left.value: input 'left' has dtype int8, whose values are whole numbers, not 3.5"),
        ("{value: [[1, 2, true]]}", "24: inputs.left.value: input 'left' has dtype int8, whose values are whole numbers, not true"),
        ("{value: [[1, 2, 128]]}", "24: inputs.left.value: input 'left' has dtype int8, which cannot hold 128"),
        ("{value: [[1, 2, 3]], dtype: int64}", "44: inputs.left.dtype: input 'left' has dtype int8, not int64"),
    ],
)  # fmt: skip
def test_a_value_must_fit_the_model(spec: str, expected: str) -> None:
    """Its shape, its dtype, and each of its elements."""
    inputs = [
        helper.make_tensor_value_info("left", TensorProto.INT8, ["n", 3]),
        value("right", [3]),
    ]
    made = model([add("left", "right")], inputs, [value("y", None)])
    actual = problems(f"{RECIPE}inputs: {{left: {spec}}}\n", made)
    assert actual == ([f"r.yaml:4:{expected}"] if expected else [])


@pytest.mark.parametrize(
    ("dtype", "wrong", "right"),
    [
        (TensorProto.BOOL, "1", "true"),
        (TensorProto.UINT8, "-1", "255"),
        (TensorProto.INT64, "9223372036854775808", "-9223372036854775808"),
        (TensorProto.FLOAT16, "65505.0", "65504"),
        (TensorProto.FLOAT, "3.5e38", "-3.4e38"),
        (TensorProto.DOUBLE, "true", "1e300"),
    ],
)
def test_the_limits_of_dtypes(dtype: int, wrong: str, right: str) -> None:
    """Booleans are not numbers."""
    inputs = [helper.make_tensor_value_info("left", dtype, []), value("right", [3])]
    made = model([add("left", "right")], inputs, [value("y", None)])
    assert len(problems(f"{RECIPE}inputs: {{left: {{value: {wrong}}}}}\n", made)) == 1
    assert problems(f"{RECIPE}inputs: {{left: {{value: {right}}}}}\n", made) == []


def test_a_library_without_inputs_is_refused() -> None:
    """All that it could compute is a constant."""
    text = f"{RECIPE}inputs: {{left: {{value: 1}}, right: {{value: 1}}}}\n"
    assert problems(text, two_inputs()) == [
        "r.yaml:4:9: inputs: all inputs have a value, which leaves nothing to compute"
    ]


def test_an_input_with_a_default_is_only_one_if_the_recipe_names_it() -> None:
    """Its initializer is the default."""
    weights = {"right": np.ones((2, 3), np.float32)}
    made = two_inputs(2, 3, weights=weights)
    assert problems(RECIPE, made) == []
    assert problems(f"{RECIPE}inputs: {{right: {{}}}}\n", made) == []
    text = f"{RECIPE}inputs: {{rigth: {{}}}}\n"
    assert problems(text, made) == [
        "r.yaml:4:17: inputs.rigth: the model has no input 'rigth' (its inputs are left)"
    ]


def test_a_variant_may_bind_what_the_recipe_does_not_name() -> None:
    """A mistake has its position in the variant."""
    text = f"{RECIPE}variants: {{a: {{inputs: {{left: {{value: 1}}}}}}, b: {{inputs: {{lefd: {{value: 1}}}}}}}}\n"
    assert problems(text, two_inputs(), "a") == []
    [problem] = problems(text, two_inputs(), "b")
    assert problem.startswith("r.yaml:4:64: variants.b.inputs.lefd: the model has no input 'lefd'")


def test_a_variant_is_told_of_its_own_fields() -> None:
    """What it does not set is the recipe's."""
    text = (
        f"{RECIPE}inputs: {{left: {{shape: [2, 3]}}, right: {{shape: [2, 4]}}}}\n"
        "variants:\n  b8: {inputs: {left: {shape: [8]}}}\n"
    )
    assert problems(text, two_inputs("n", 3), "b8") == [
        "r.yaml:6:31: variants.b8.inputs.left.shape: input 'left' has shape ['n', 3], which [8] does not fit",
        "r.yaml:4:48: inputs.right.shape: input 'right' has shape ['n', 3], which [2, 4] does not fit",
    ]


def test_weights_are_no_inputs() -> None:
    """Up to IR version 3 they are listed as such."""
    made = classifier()
    made.graph.input.append(value("w", [6, 3, 3, 3]))
    assert problems(RECIPE, made) == []
    assert problems(f"{RECIPE}inputs: {{data: {{shape: [1, 3, 8, 8]}}}}\n", made) == []


def test_more_inputs_than_any_model_has_are_one_problem() -> None:
    """Neither the message nor the search for similar names goes through all of them."""
    made = two_inputs(2, 3)
    made.graph.input.extend([value(f"i{n}", [1]) for n in range(10_000)])
    text = f"{RECIPE}inputs: {{lefd: {{shape: [2, 3]}}}}\n"
    assert problems(text, made) == [
        "r.yaml:4:9: inputs: the model has 10,002 inputs, and tvmflow imports at most 10,000"
    ]


def test_an_input_name_cannot_write_to_the_terminal() -> None:
    """It is quoted, escaped and short."""
    name = "\x1b[2J" + "n" * 50_000
    made = model([add(name, name)], [value(name, ["n"])], [value("y", None)])
    [problem] = problems(RECIPE, made)
    assert problem.replace("\n", "").isprintable()
    assert len(problem) < 600


UNSUPPORTED_NAMES = {
    "x\n#include <cstdlib>": "has the control character U+000A in its name",
    "x\0": "has the control character U+0000 in its name",
    "x\u2028": "has the control character U+2028 in its name",
    "x" * 65_000: "has a name of 65,000 characters, more than 500",
    "": "has an empty name",
}


@pytest.mark.parametrize(("name", "problem"), UNSUPPORTED_NAMES.items())
def test_names_that_no_generated_code_holds_are_refused(name: str, problem: str) -> None:
    """Of inputs and of outputs, which become code and comments in C."""
    end = f"{problem}: rename it where the model is exported"
    of_input = model([add(name, name)], [value(name, [2])], [value("y", None)])
    [text] = problems(RECIPE, of_input)
    assert text.startswith("r.yaml:1:1: inputs") and text.endswith(end) and text.isprintable()
    of_output = model(
        [helper.make_node("Relu", ["x"], [name])], [value("x", [2])], [value(name, None)]
    )
    [text] = problems(RECIPE, of_output)
    assert text.startswith("r.yaml:3:8: model: the model's output '") and text.endswith(end)
    assert text.isprintable() and len(text) < 400


@pytest.mark.parametrize("place", ["input", "output"])
def test_names_that_are_not_unicode_are_refused(place: str) -> None:
    """Protobuf does not check that strings are text."""
    content = two_inputs(2, 3).SerializeToString()
    content = content.replace(*((b"left", b"l\xff\xfet") if place == "input" else (b"y", b"\xff")))
    Path("m.onnx").write_bytes(content)
    [text] = problems(RECIPE)
    assert f"the model's {place} '" in text and "\\udcff" in text
    assert "has a name that is not Unicode: rename it where the model is exported" in text


@pytest.mark.parametrize(
    "name", ["/model/Conv_output_0:0", "a b", "名前", 'é"*/ /* ??/ `|\\', "\u200f"]
)
def test_unusual_names_are_no_problem(name: str) -> None:
    made = model([add(name, name)], [value(name, [2])], [value(f"{name}2", None)])
    assert problems(RECIPE, made) == []


def test_names_of_mxnet_models_are_checked() -> None:
    """Half a character is a string of JSON, and a variable that is not a weight is an input."""
    recipe = "recipe: 1\nname: net\nmodel: {mxnet: {prefix: m, epoch: 0}}\n"
    nodes: list[dict[str, object]] = json.loads(json.dumps(SYMBOL["nodes"]))
    nodes[-1]["name"] = "fc\n"
    Path("m-symbol.json").write_text(json.dumps({**SYMBOL, "nodes": nodes}))
    Path("m-0000.params").touch()
    assert problems(f"{recipe}inputs: {{data: {{shape: [1, 4]}}}}\n") == [
        "r.yaml:3:8: model: the model's output 'fc\\n' has the control character U+000A in its name: "
        "rename it where the model is exported"
    ]


def test_the_inputs_of_an_mxnet_model() -> None:
    """Only its variables can be inputs; shapes are known to the import."""
    recipe = "recipe: 1\nname: net\nmodel: {mxnet: {prefix: m, epoch: 0}}\n"
    Path("m-symbol.json").write_text(json.dumps(SYMBOL))
    Path("m-0000.params").touch()
    assert problems(f"{recipe}inputs: {{data: {{shape: [1, 4]}}}}\n") == []
    assert problems(f"{recipe}inputs: {{data: {{dtype: uint8}}}}\n") == [
        "r.yaml:4:9: inputs: the model has dynamic dimensions; write this in the recipe, with a number for each SIZE:\n\n"
        "inputs:\n  data: {shape: [SIZE], dtype: uint8}  # uint8, the model does not specify the number of dimensions\n\n"
        "or, to let one library serve all sizes, write this, with the maximum for each SIZE:\n\n"
        "dimensions:\n  batch: {max: SIZE}\ninputs:\n"
        "  data: {shape: [batch, SIZE], dtype: uint8}  # uint8, the model does not specify the number of dimensions"
    ]
    assert problems(f"{recipe}inputs: {{dat: {{shape: [1, 4]}}}}\n") == [
        "r.yaml:4:15: inputs.dat: the model has no input 'dat'; did you mean 'data'?"
    ]
    for content, reason in (
        ("", "JSONDecodeError"),
        ("[" * 100_000, "it is nested too deep"),
        ('{"nodes": [], "heads": []}', "the symbol has no outputs"),
    ):
        Path("m-symbol.json").write_text(content)
        with pytest.raises(RecipeError) as caught:
            problems(f"{recipe}inputs: {{data: {{shape: [1, 4]}}}}\n")
        assert caught.value.problems[0].startswith("r.yaml:3:25: model.mxnet.prefix: m-symbol.json")
        assert reason in caught.value.problems[0]


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field in protobuf's wire format."""
    size, left = b"", len(content)
    while left > 0x7F:
        size, left = size + bytes([left & 0x7F | 0x80]), left >> 7
    return bytes([number << 3 | 2]) + size + bytes([left]) + content


def test_a_deeply_nested_model_is_refused() -> None:
    """Reading its header needs no more stack than protobuf's own readers."""
    graph = b""
    for _ in range(1000):
        # GraphProto.node, NodeProto.attribute, AttributeProto.g
        graph = field(1, field(5, field(6, graph)))
    Path("m.onnx").write_bytes(field(7, graph))
    with pytest.raises(RecipeError, match="it is nested more than 100 levels deep"):
        problems(RECIPE)


def test_a_model_with_fixed_shapes_needs_no_inputs() -> None:
    """As before: the recipe may leave them out."""
    assert problems(RECIPE, two_inputs(2, 3)) == []


def test_preprocessing_is_checked_with_the_shape_that_the_model_tells() -> None:
    """The recipe need not repeat it; a variant has the position of what it says itself."""
    made = two_inputs(1, 3, 8, 8)
    inputs = "inputs:\n  left: {image: {crop: 9}}\n"
    text = "inputs.left.image.crop: gives 9x9, and the input takes 8x8"
    assert problems(RECIPE + inputs, made) == [f"r.yaml:5:24: {text}"]
    inputs = "inputs: {left: {image: {mean: 128}}}\n"
    assert "set scale: 1" in problems(RECIPE + inputs, made)[0]
    assert problems(RECIPE + "inputs: {left: {image: {}}}\n", made) == []


def test_packages_are_identified_before_llvm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM is loaded for the question while planning goes on; one that is missing is not a problem there."""
    order: list[str] = []

    def identify(name: str) -> str:
        order.append(name)
        if name == "ziglang":
            raise NotInstalled(name)
        return "1+0"

    def query(targets: Sequence[Json]) -> list[Json]:
        order.append("LLVM")
        facts = TargetFacts("x86_64-linux-gnu", "x86-64-v2", "x86_64", ("sse4.2",))
        return [to_json(facts) for _ in targets]

    monkeypatch.setattr(packages, "identity", identify)
    Path("m.onnx").write_bytes(classifier().SerializeToString())
    Path("r.yaml").write_text(RECIPE)
    store = LocalStore(str(Path("store").absolute()))
    plan = prepare_run(RunRequest(("r.yaml",)), store, None, query).plan
    tools = {tool for spec in plan.stages for tool in spec.tools}
    assert "ziglang" in tools
    assert tools == set(order[: order.index("LLVM")])
