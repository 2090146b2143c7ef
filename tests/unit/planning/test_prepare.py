"""Faults of a recipe that the header of its model shows: found by planning, with their position in the recipe."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, NodeProto, helper

from tests.support.onnx_models import classifier, model, value
from tests.support.source_files import empty_source_files
from tvmflow.core.errors import RecipeError
from tvmflow.frontends import FRONTENDS
from tvmflow.planning.planned_recipe import PlannedRecipe
from tvmflow.planning.prepare import _list_input_problems
from tvmflow.planning.recipes import load_recipe

RECIPE = "recipe: 1\nname: net\nmodel: {onnx: m.onnx}\n"
SYMBOL = {
    "nodes": [
        {"op": "null", "name": "data", "inputs": []},
        {"op": "null", "name": "fc_weight", "inputs": []},
        {"op": "FullyConnected", "name": "fc", "inputs": [[0, 0, 0], [1, 0, 0]]},
    ],
    "heads": [[2, 0, 0]],
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems(text: str, made: ModelProto | None = None, variant: str = "") -> list[str]:
    """Return the problems of a recipe with this model."""
    if made is not None:
        Path("m.onnx").write_bytes(made.SerializeToString())
    Path("r.yaml").write_text(text)
    loaded = load_recipe(Path("r.yaml"))
    source = loaded.recipe.model
    files = FRONTENDS[source.kind].files(
        source, Path(), partial(loaded.where, "model"), empty_source_files()
    )
    return list(_list_input_problems(PlannedRecipe(loaded, (), (), files, variant)))


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
                "r.yaml:4:16: inputs.lefd: the model has no input 'lefd'; did you mean 'left'?",
                "r.yaml:4:9: inputs: the model's input 'left' is missing (float32, ['n', 3])",
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


def test_a_free_dimension_needs_a_size() -> None:
    """Without `inputs`, the position is that of the recipe; -1 counts as free, 0 as wrong."""
    text = "r.yaml:1:1: inputs.{}.shape: input '{}' has no fixed shape: it is {}; set the size of dimension 0 in the recipe"
    for size, shown in (("n", "['n', 3]"), (-1, "[-1, 3]"), (None, "['?', 3]")):
        expected = [text.format(name, name, shown) for name in ("left", "right")]
        assert problems(RECIPE, two_inputs(size, 3)) == expected
    assert "which is empty" in problems(RECIPE, two_inputs(0, 3))[0]
    assert "more than 2^31 elements" in problems(RECIPE, two_inputs(1 << 40, 3))[0]


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
    assert problem.isprintable()
    assert len(problem) < 600


def test_the_inputs_of_an_mxnet_model() -> None:
    """Only its variables can be inputs; shapes are known to the import."""
    recipe = "recipe: 1\nname: net\nmodel: {mxnet: {prefix: m, epoch: 0}}\n"
    Path("m-symbol.json").write_text(json.dumps(SYMBOL))
    Path("m-0000.params").touch()
    assert problems(f"{recipe}inputs: {{data: {{shape: [1, 4]}}}}\n") == []
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
