"""What a recipe means: defaults, the forms in which things can be said, places, pipelines, the schema."""

from __future__ import annotations

import json
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.support.recipes import RECIPE, ROOT, edited, lay_out, write
from tvmflow import exporters, frontends, recipe, stages
from tvmflow.errors import RecipeError
from tvmflow.recipe import (
    InputSpec,
    Kernels,
    Machine,
    ModelSource,
    MxnetSource,
    PipelineFile,
    Recipe,
    Remote,
    TargetSpec,
    Tune,
    Verify,
    json_schema,
    load_pipeline,
    load_recipe,
)
from tvmflow.recipe._model import DTYPES
from tvmflow.recipe._pipelines import REQUIRES
from tvmflow.recipe._work import STRATEGIES
from tvmflow.targets._presets import PRESETS

SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the recipe names, which is also the current one."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A place for recipes beside which the files of the digits are."""
    (tmp_path / "models").mkdir()
    for name in ("digits-symbol.json", "digits-0010.params", "digits-test.npz"):
        (tmp_path / "models" / name).touch()
    return tmp_path / "digits.yaml"


def load(content: str | bytes) -> Recipe:
    return load_recipe(write(Path("r.yaml"), content)).recipe


# ---------------------------------------------------------------- meaning


def test_a_recipe_of_three_fields_is_enough() -> None:
    """Everything else has a default: this machine, no search, a bundle, verified on random inputs."""
    found = load("recipe: 1\nname: net\nmodel: {onnx: m.onnx}\n")
    assert found == Recipe(recipe=1, name="net", model=ModelSource(onnx="m.onnx"))
    assert found.inputs == {}
    assert found.targets == (TargetSpec(name="host", preset="host"),)
    assert found.outputs == ("bundle",)
    assert found.pipeline == "tune"
    assert found.tune.model_dump() == {
        "trials": 0,
        "minutes": None,
        "trials_per_task": None,
        "patience": None,
        "min_gain": 0.01,
        "only": (),
        "skip": (),
        "seed": 0,
        "strategy": "evolutionary",
        "cost_model": "xgb",
        "number": 0,
        "repeat": 3,
        "min_repeat_ms": 40,
        "trial_timeout_s": 30.0,
        "flush_cache": False,
        "finalists": 3,
        "min_coverage": None,
        "min_speedup": None,
    }
    assert found.verify.model_dump() == {
        "against": "reference",
        "data": None,
        "label": "label",
        "rtol": None,
        "atol": None,
        "min_accuracy": None,
        "samples": 3,
        "seed": 0,
        "repeat": 10,
        "run_on": "auto",
    }


def test_a_recipe_that_says_everything() -> None:
    """Each value arrives as it was written."""
    text = """
        recipe: 1
        name: all.of-it_1
        model:
          mxnet: {prefix: net, epoch: 3}
        inputs:
          data: {shape: [2, 3], dtype: uint8, range: [0, 255]}
          on top: {shape: []}
        targets:
          - x86-64-v3
          - {name: edge, tvm: {kind: llvm, mcpu: cortex-a72, num-cores: 4, keys: [arm_cpu]}, num_cores: 4}
        tune: {trials: 1_000, strategy: replay-trace, cost_model: mlp, trial_timeout_s: 5}
        outputs: [shared-library, bundle]
        verify: {data: data.npz, label: y, rtol: 1e-2, atol: 1E-3, min_accuracy: 1}
        pipeline: compile
    """
    found = load(text)
    assert found.model.kind == "mxnet"
    assert found.inputs == {
        "data": InputSpec(shape=(2, 3), dtype="uint8", range=(0.0, 255.0)),
        "on top": InputSpec(shape=()),
    }
    assert [target.name for target in found.targets] == ["x86-64-v3", "edge"]
    assert [target.tvm_mapping() for target in found.targets] == [
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"},
        {"kind": "llvm", "mcpu": "cortex-a72", "num-cores": 4, "keys": ["arm_cpu"]},
    ]
    assert found.tune == Tune(
        trials=1000, strategy="replay-trace", cost_model="mlp", trial_timeout_s=5.0
    )
    assert found.verify == Verify(
        data="data.npz", label="y", rtol=0.01, atol=0.001, min_accuracy=1.0
    )


def test_host_has_no_mapping_until_it_is_looked_up() -> None:
    """The word `host` and the preset `host` under another name are this machine."""
    assert TargetSpec(name="host", preset="host").tvm_mapping() is None
    assert load(edited(("- host", "- {name: here, preset: host}"))).targets == (
        TargetSpec(name="here", preset="host"),
    )


def test_a_mapping_given_out_is_a_copy() -> None:
    """Changing it changes neither the preset nor the recipe."""
    target = TargetSpec(name="a", preset="x86-64-v3")
    mapping = target.tvm_mapping()
    assert mapping is not None
    mapping["mcpu"] = "other"
    assert target.tvm_mapping() != mapping


def test_urls_and_digests() -> None:
    """A URL is one, a path is not; capitals in a digest do not matter."""
    url = f"https://example.org/m.onnx\n  sha256: {'AB' * 32}"
    found = load(edited(("m.onnx", url))).model
    assert (found.kind, found.is_url, found.sha256) == ("onnx", True, "ab" * 32)
    assert not load(RECIPE).model.is_url


@pytest.mark.parametrize(
    "same",
    [
        "# a comment\n" + RECIPE.replace("\n", "   # why\n"),
        "%YAML 1.1\n---\n" + RECIPE + "...\n",
        "\ufeff" + RECIPE,
        RECIPE.replace("\n", "\r\n"),
        RECIPE.rstrip("\n"),
        edited(("trials: 4", "'trials': 0x4"), ("net", '"net"'), ("tune\n", ">-\n  tune\n")),
        edited(("{shape: [1, 3, 8, 8], dtype: float32}", "\n    shape:\n    - 1\n    - 3\n    - 8\n    - 8")),
        edited(("1.0e-3", "1e-3")),
        edited(("1.0e-3", ".1E-2")),
        edited(("rtol: 1.0e-3", "rtol: 0.001\n  min_accuracy: ~\n  label: label")),
        "\n".join(["pipeline: tune", *RECIPE.splitlines()[6:-1], *RECIPE.splitlines()[:6]]),
        edited(("net", "&n net"), ("data: {shape", "data: &d {shape"), ("[bundle]", "&o [bundle]")),
        json.dumps({
            "recipe": 1, "name": "net", "model": {"onnx": "m.onnx"},
            "inputs": {"data": {"shape": [1, 3, 8, 8]}}, "tune": {"trials": 4},
            "verify": {"data": "data.npz", "rtol": 0.001},
        }),
    ],
)  # fmt: skip
def test_how_it_is_written_does_not_matter(same: str) -> None:
    """Comments, order, quotes, line ends, styles and anchors give the same recipe; so does JSON."""
    assert load(same) == load(RECIPE)


def test_an_alias_is_what_its_anchor_is() -> None:
    """Values may be shared; a mistake in one is placed where it stands."""
    text = edited(
        ("data: {shape: [1, 3, 8, 8], dtype: float32}", "data: &in {shape: [1, 3]}\n  more: *in")
    )
    assert load(text).inputs["more"] == load(text).inputs["data"] == InputSpec(shape=(1, 3))


def test_recipes_do_not_change() -> None:
    """A loaded recipe is frozen."""
    with pytest.raises(ValueError, match="frozen"):
        load(RECIPE).name = "other"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_correct(path: Path, digits: Path) -> None:
    """So are their pipelines; their names are those of their files."""
    for name in ("squeezenet1.1-symbol.json", "squeezenet1.1-0000.params"):
        (digits.parent / "models" / name).touch()
    copied = digits.parent / path.name
    shutil.copy(path, copied)
    found = load_recipe(copied)
    assert path.stem.startswith(found.recipe.name)
    assert found.read == (copied, found.pipeline.path)


# ---------------------------------------------------------------- places


def test_places_are_those_of_values() -> None:
    """`where` counts from 1; of what is not there it gives the place of what surrounds it."""
    where = load_recipe(write(Path("r.yaml"), RECIPE)).where
    assert where() == "r.yaml:1:1"
    assert where("name") == "r.yaml:2:7"
    assert where("model", "onnx") == "r.yaml:4:9"
    assert where("model", "sha256") == "r.yaml:4:3"
    assert where("inputs", "data", "shape", 2) == "r.yaml:6:24"
    assert where("targets", 0) == "r.yaml:8:5"
    assert where("targets", 7, "tvm") == "r.yaml:8:3"
    assert where("no", "such", "thing") == "r.yaml:1:1"


# ---------------------------------------------------------------- pipelines


def test_the_pipelines_that_ship() -> None:
    """`tune` has every stage, `compile` those without search; both are found from any folder."""
    assert load_pipeline("tune").stages == recipe.STAGE_NAMES
    assert load_pipeline("compile").stages == ("import", "build", "export", "verify")


def test_a_pipeline_of_ones_own(folder: Path) -> None:
    """A folder `pipelines` beside the command comes first; a path starts at the recipe's folder."""
    mine = "pipeline: 1\nname: mine\nstages: [import, build]\n"
    (folder / "pipelines").mkdir()
    write(folder / "pipelines" / "mine.yaml", mine)
    assert load_pipeline("mine").stages == ("import", "build")
    (folder / "sub").mkdir()
    lay_out(folder / "sub")
    write(folder / "sub" / "own.yaml", mine)
    path = write(folder / "sub" / "r.yaml", edited(("pipeline: tune", "pipeline: own.yaml")))
    found = load_recipe(path)
    assert found.pipeline[:3] == ("mine", ("import", "build"), folder / "sub" / "own.yaml")
    assert found.read == (path, folder / "sub" / "own.yaml")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("stages: [build]", "3:10: stages.0: 'build' needs 'import' before it"),
        ("stages: [import, export]", "3:18: stages.1: 'export' needs 'build' before it"),
        ("stages: [import, build, build]", "3:25: stages.2: 'build' stands twice"),
        ("stages: [import, pick_best]", "3:18: stages.1: 'pick_best' needs 'tune' before it"),
        (
            "stages: [imprt]",
            "3:10: stages.0: 'imprt' is not a stage; did you mean 'import'? "
            "(there are build, export, extract_tasks, import, pick_best, tune, verify)",
        ),
        (
            "stages: []",
            "3:9: stages: must be a list of at least one, such as [import, build, export], "
            "not an empty list",
        ),
        (
            "stages: import",
            "3:9: stages: must be a list, such as [import, build, export], not the text 'import'",
        ),
        ("stage: [import]", "3:1: stage: there is no such field; did you mean 'stages'?"),
        ("stages: [import]\npipeline: 1", "4:1: pipeline: stands here a second time (first in line 1)"),
    ],
)  # fmt: skip
def test_wrong_pipelines(content: str, problem: str) -> None:
    """A pipeline's mistakes have places in its own file, also when a recipe names it."""
    write(Path("p.yaml"), f"pipeline: 1\nname: p\n{content}\n")
    path = write(Path("r.yaml"), edited(("pipeline: tune", "pipeline: p.yaml")))
    for attempt in (lambda: load_pipeline("p.yaml"), lambda: load_recipe(path)):
        with pytest.raises(RecipeError) as caught:
            attempt()
        assert f"p.yaml:{problem}" in caught.value.problems
        assert {each.partition(":")[0] for each in caught.value.problems} == {"p.yaml"}


@pytest.mark.parametrize("name", ["no-such", "no/such", "../compile", "n\0", "x" * 5000])
def test_no_such_pipeline(name: str) -> None:
    """Those that there are are named."""
    with pytest.raises(
        RecipeError,
        match=r"there is no pipeline .* \(there are compile, fanout, release, retune, tune\)",
    ):
        load_pipeline(name)
    with pytest.raises(RecipeError, match="there is no file"):
        load_pipeline(f"{name}.yaml")


# ---------------------------------------------------------------- one truth


def test_names_are_those_of_the_registries() -> None:
    """What a recipe may name is what there is."""
    assert set(recipe.OUTPUT_NAMES) == set(exporters.EXPORTERS)
    assert tuple(stages.STAGES) == recipe.STAGE_NAMES
    assert set(frontends.FRONTENDS) == set(ModelSource.model_fields) - {"sha256"}
    assert {name: each.KIND for name, each in frontends.FRONTENDS.items()} == {
        name: name for name in frontends.FRONTENDS
    }


def test_a_pipeline_must_have_what_its_stages_need() -> None:
    """What a stage requires is among what it reads, and comes before it; `build` does without tuning."""
    for name, required in REQUIRES.items():
        needs = set(stages.STAGES[name].NEEDS)
        before = set(recipe.STAGE_NAMES[: recipe.STAGE_NAMES.index(name)])
        assert needs <= before
        if name == "build":
            assert required == ("import",)
        else:
            assert needs <= _with_all_before(required)
            assert set(required) <= needs


def _with_all_before(names: tuple[str, ...]) -> set[str]:
    before = (_with_all_before(REQUIRES[name]) for name in names)
    return set(names).union(*before)


def test_reading_a_recipe_loads_no_framework() -> None:
    """`plan` answers before TVM would have been loaded."""
    heavy = ("tvm", "tvm_ffi", "numpy", "onnx", "onnxruntime", "mxnet", "doit", "hypothesis")
    script = (
        "import sys; from pathlib import Path; from tvmflow.recipe import load_recipe, json_schema;"
        "load_recipe(Path(sys.argv[1])); json_schema();"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    digits = str(ROOT / "recipes" / "digits.yaml")
    done = subprocess.run(
        [sys.executable, "-c", script, digits], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- schema


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema."""
    if isinstance(schema, dict):
        yield schema
        for part in schema.values():
            yield from _objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _objects(part)


def test_the_schema_describes_every_field() -> None:
    """Editors show a sentence for each; unknown fields are mistakes; all references lead somewhere."""
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["recipe", "name", "model"]
    parts = [schema, *schema["$defs"].values()]
    assert len(parts) == 14
    for part in parts:
        assert part["type"] == "object"
        assert part["additionalProperties"] is False
        for name, field in part["properties"].items():
            assert field["description"].endswith("."), name
            assert ("default" in field) != (name in part.get("required", ())), name
    references = {each["$ref"] for each in _objects(schema) if "$ref" in each}
    assert references == {f"#/$defs/{name}" for name in schema["$defs"]}


def test_the_defaults_in_the_schema_are_correct() -> None:
    """A recipe that writes every default out is the recipe that leaves them away."""
    fields = json_schema()["properties"]
    defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
    shortest = {"recipe": 1, "name": "net", "model": {"onnx": "m.onnx"}}
    assert Recipe.model_validate({**shortest, **defaults}) == Recipe.model_validate(shortest)


def test_the_schema_knows_the_words() -> None:
    """Whatever has to be one of several words is listed, so that editors can complete it."""
    schema = json_schema()
    listed = [set(each["enum"]) for each in _objects(schema) if "enum" in each]
    for words in (
        set(recipe.OUTPUT_NAMES),
        set(DTYPES),
        set(STRATEGIES),
        set(PRESETS),
        {"reference", "none"},
        {"xgb", "mlp", "random"},
    ):
        assert words in listed
    one_word, fields = schema["properties"]["targets"]["items"]["anyOf"]
    assert set(one_word["enum"]) == set(PRESETS)
    assert fields == {"$ref": "#/$defs/TargetSpec"}


@pytest.mark.parametrize(
    "part",
    [
        Recipe,
        ModelSource,
        MxnetSource,
        InputSpec,
        TargetSpec,
        Remote,
        Kernels,
        Tune,
        Verify,
        PipelineFile,
    ],
)
def test_examples_in_the_language_are_correct(part: type[BaseModel]) -> None:
    """Whatever a message proposes (`write recipe: 1`, `such as [1, 3, 224, 224]`) is itself accepted."""
    fields = part.model_fields
    examples = {name: field.examples[0] for name, field in fields.items() if field.examples}
    required = {name: examples[name] for name, field in fields.items() if field.is_required()}
    # a target is a name and a machine
    required |= {"preset": "x86-64-v3", "num_cores": 4} if issubclass(part, Machine) else {}
    # a pipeline's own recipes, and what is only for those
    alone = {name: examples[name] for name in ("recipes",) if part is PipelineFile}
    required |= (
        {**alone, "stages": ["import", "extract_tasks", "tune", "build", "export"]} if alone else {}
    )
    for name, value in examples.items():
        if alone and name == "stages":
            continue
        without = {"tvm": {"preset"}, "parts": {"preset", "num_cores"}}.get(name, set())
        given = {**required, name: value}
        part.model_validate({key: each for key, each in given.items() if key not in without})


# ---------------------------------------------------------------- whatever comes

ODD: list[str] = [
    "", "~", "yes", "-1", "0", "1e999", ".nan", "0x", "08", "1:30", "2024-01-01", "=", "<<", "[]", "{}",
    "[[]]", "- ", "? ", ": ", "!!int x", "!!python/name:os.system", "!<x> 1", "&a", "*a", "&a [*a]",
    "|", ">", "'", '"', '"\\ud800"', '"\\0"', "%", "@", "`", "\t", "\x00", "\x85", "\u2028", "\ufeff", "é", "😀",
    "a" * 300, "9" * 200, "---", "...", "\r", "../..", "/", "x://y", "{a: {b: [1, ~, .inf]}}", "[host, host]",
]  # fmt: skip


def _mutated(draw: st.DrawFn, text: str) -> str:
    lines = text.splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    odd = draw(
        st.one_of(st.sampled_from(ODD), st.text(max_size=4), st.sampled_from(string.punctuation))
    )
    kind = draw(
        st.sampled_from(["drop", "twice", "insert", "scalar", "name", "character", "indent"])
    )
    line = lines[at]
    if kind == "character":
        column = draw(st.integers(0, len(line)))
        lines[at] = line[:column] + odd + line[column + draw(st.integers(0, 2)) :]
    else:
        lines[at] = {
            "drop": "",
            "twice": line * 2,
            "insert": f"{odd}\n{line}",
            "scalar": re.sub(r"(?<=: )[^{\[\n][^,}\n]*", lambda _: odd, line, count=1),
            "name": re.sub(r"\w+(?=:)", lambda _: odd, line, count=1),
            "indent": " " * draw(st.integers(0, 5)) + line,
        }[kind]
    return "".join(lines)


@st.composite
def almost_recipes(draw: st.DrawFn) -> bytes:
    """The recipe of the digits after one to four accidents."""
    text = (ROOT / "recipes" / "digits.yaml").read_text(encoding="utf-8")
    for _ in range(draw(st.integers(1, 4))):
        text = _mutated(draw, text) or "\n"
    return text.encode("utf-8", "surrogatepass")


@settings(
    max_examples=1000,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(almost_recipes())
def test_whatever_comes_is_a_recipe_or_told(digits: Path, content: bytes) -> None:
    """Any accident gives a recipe or problems that each begin with a place inside the file."""
    path = write(digits, content)
    lines = len(re.split(rb"\r\n|[\r\n]|\xc2\x85|\xe2\x80[\xa8\xa9]", content))
    try:
        load_recipe(path)
    except RecipeError as error:
        assert error.problems
        for problem in error.problems:
            start, line, column, text = problem.split(":", 3)
            assert (start, text[:1]) == (str(path), " ")
            assert 1 <= int(line) <= lines
            assert int(column) >= 1
            assert problem.isprintable()
