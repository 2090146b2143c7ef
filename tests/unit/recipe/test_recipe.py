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
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Dimension
from tvmflow.frontends.base import InputRequest
from tvmflow.frontends.mxnet import MxnetCheckpoint
from tvmflow.planning.recipes import PipelineFile, load_pipeline, load_recipe
from tvmflow.recipe import (
    BuildTarget,
    DimensionSpec,
    InputSpec,
    Kernels,
    ModelSource,
    Recipe,
    Remote,
    StateSpec,
    TargetSpec,
    Tune,
    Verify,
    json_schema,
)
from tvmflow.recipe._model_fields import DTYPES
from tvmflow.recipe.sections import STRATEGIES
from tvmflow.targets.presets import NAMES

SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
SHIPPED_PIPELINES = sorted((ROOT / "pipelines").glob("*.yaml"))


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
    for name in ("digits-symbol.json", "digits-0010.params", "digits-test.npz", "digits.onnx"):
        (tmp_path / "models" / name).touch()
    return tmp_path / "digits.yaml"


def load(content: str | bytes) -> Recipe:
    return load_recipe(write(Path("r.yaml"), content)).recipe


# ---------------------------------------------------------------- meaning


def test_three_fields_are_enough() -> None:
    """All other fields have defaults: this machine, no search, a bundle, verified on random inputs."""
    loaded = load("recipe: 1\nname: net\nmodel: {onnx: m.onnx}\n")
    assert loaded == Recipe(recipe=1, name="net", model=ModelSource(onnx="m.onnx"))
    assert loaded.inputs == {}
    assert loaded.targets == (TargetSpec(name="host", preset="host"),)
    assert loaded.outputs == ("bundle",)
    assert loaded.pipeline == "tune"
    assert loaded.tune.model_dump() == {
        "trials": 0,
        "minutes": None,
        "deliver_every": None,
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
        "choices": True,
        "min_coverage": None,
        "min_speedup": None,
    }
    assert loaded.verify.model_dump() == {
        "against": "reference",
        "data": None,
        "label": "label",
        "rtol": None,
        "atol": None,
        "min_accuracy": None,
        "max_latency": None,
        "max_memory": None,
        "max_size": None,
        "max_vs": {},
        "samples": 3,
        "seed": 0,
        "repeat": 10,
        "compare": (),
        "run_on": "auto",
    }


def test_every_field_is_read() -> None:
    """Each value is the one in the file."""
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
    loaded = load(text)
    assert loaded.model.kind == "mxnet"
    assert loaded.inputs == {
        "data": InputSpec(shape=(2, 3), dtype="uint8", range=(0.0, 255.0)),
        "on top": InputSpec(shape=()),
    }
    assert [target.name for target in loaded.targets] == ["x86-64-v3", "edge"]
    assert [target.tvm_target() for target in loaded.targets] == [
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"},
        {"kind": "llvm", "mcpu": "cortex-a72", "num-cores": 4, "keys": ["arm_cpu"]},
    ]
    assert loaded.tune == Tune(
        trials=1000, strategy="replay-trace", cost_model="mlp", trial_timeout_s=5.0
    )
    assert loaded.verify == Verify(
        data="data.npz", label="y", rtol=0.01, atol=0.001, min_accuracy=1.0
    )


def test_a_state_is_an_output_or_a_mapping() -> None:
    text = """
        recipe: 1
        name: cached
        model: {onnx: m.onnx}
        state:
          past.*: present.*
          h: {output: hn}
          keys.*: {output: new_keys.*, dtype: float16}
    """
    assert load(text).state == {
        "past.*": StateSpec(output="present.*"),
        "h": StateSpec(output="hn"),
        "keys.*": StateSpec(output="new_keys.*", dtype="float16"),
    }


def test_host_has_no_tvm_target_until_it_is_detected() -> None:
    """`host`, and the preset `host` under another name, are this machine."""
    assert TargetSpec(name="host", preset="host").tvm_target() is None
    assert load(edited(("- host", "- {name: here, preset: host}"))).targets == (
        TargetSpec(name="here", preset="host"),
    )


def test_inputs_have_the_largest_sizes_of_their_dimensions() -> None:
    """A variant has dimensions of its own, and only those that its inputs have in their shapes."""
    recipe = load("""\
recipe: 1
name: net
model: {onnx: m.onnx}
dimensions:
  seq: {max: 512, multiple_of: 8, tune_at: [128, 16]}
  batch: {max: 4}
inputs:
  ids: {shape: [batch, seq], dtype: int64}
  scale: {shape: [3]}
variants:
  open: {}
  short: {dimensions: {seq: {max: 64}}}
  fixed: {inputs: {ids: {shape: [1, 16]}}}
""")
    batch = Dimension("batch", 1, 4)
    seq = Dimension(name="seq", min=8, max=512, multiple_of=8, tune_at=(16, 128))
    assert recipe.for_variant("open").list_dimensions() == [batch, seq]
    assert recipe.for_variant("short").list_dimensions() == [batch, Dimension("seq", 1, 64)]
    assert recipe.for_variant("fixed").list_dimensions() == []
    ids = InputRequest(
        name="ids",
        shape=(4, 512),
        dtype="int64",
        sizes=("batch", "seq"),
        dimensions=(batch, seq),
    )
    assert recipe.list_requests() == [ids, InputRequest("scale", (3,))]
    fixed = InputRequest("ids", (1, 16), "int64")
    assert recipe.for_variant("fixed").list_requests()[0] == fixed


def test_the_tvm_target_is_a_copy() -> None:
    """Changing it changes neither the preset nor the recipe."""
    target = TargetSpec(name="a", preset="x86-64-v3")
    mapping = target.tvm_target()
    assert mapping is not None
    mapping["mcpu"] = "other"
    assert target.tvm_target() != mapping


def test_urls_and_digests() -> None:
    """The case of a digest does not matter."""
    url = f"https://example.org/m.onnx\n  sha256: {'AB' * 32}"
    loaded = load(edited(("m.onnx", url))).model
    assert (loaded.kind, loaded.sha256) == ("onnx", "ab" * 32)


@pytest.mark.parametrize(
    "same",
    [
        "# a comment\n" + RECIPE.replace("\n", "   # why\n"),
        "%YAML 1.1\n---\n" + RECIPE + "...\n",
        "\ufeff" + RECIPE,
        RECIPE.replace("\n", "\r\n"),
        RECIPE.rstrip("\n"),
        edited(("trials: 4", "'trials': 0x4"), ("net", '"net"'), ("tune\n", ">-\n  tune\n")),
        edited(("{shape: [1, 3, 8, 8], dtype: float32}", "\n    dtype: float32\n    shape:\n    - 1\n    - 3\n    - 8\n    - 8")),
        edited(("1.0e-3", "1e-3")),
        edited(("1.0e-3", ".1E-2")),
        edited(("rtol: 1.0e-3", "rtol: 0.001\n  min_accuracy: ~\n  label: label")),
        "\n".join(["pipeline: tune", *RECIPE.splitlines()[6:-1], *RECIPE.splitlines()[:6]]),
        edited(("net", "&n net"), ("data: {shape", "data: &d {shape"), ("[bundle]", "&o [bundle]")),
        json.dumps({
            "recipe": 1, "name": "net", "model": {"onnx": "m.onnx"},
            "inputs": {"data": {"shape": [1, 3, 8, 8], "dtype": "float32"}}, "tune": {"trials": 4},
            "verify": {"data": "data.npz", "rtol": 0.001},
        }),
    ],
)  # fmt: skip
def test_equivalent_yaml_gives_the_same_recipe(same: str) -> None:
    """Comments, order, quotes, line ends, styles and anchors do not matter; JSON is accepted too."""
    assert load(same) == load(RECIPE)


def test_an_alias_has_the_value_of_its_anchor() -> None:
    """Values may be shared within a recipe."""
    text = edited(
        ("data: {shape: [1, 3, 8, 8], dtype: float32}", "data: &in {shape: [1, 3]}\n  more: *in")
    )
    assert load(text).inputs["more"] == load(text).inputs["data"] == InputSpec(shape=(1, 3))


def test_recipes_are_frozen() -> None:
    """A loaded recipe cannot be changed."""
    with pytest.raises(ValueError, match="frozen"):
        load(RECIPE).name = "other"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_recipes_are_valid(path: Path, digits: Path) -> None:
    """Their pipelines are valid too, and their names are those of their files."""
    for name in ("squeezenet1.1-symbol.json", "squeezenet1.1-0000.params", "resnet18.pt2"):
        (digits.parent / "models" / name).touch()
    for name in ("digits.onnx", "digits-labels.txt", "bev_pool.onnx", "bev_pool.npz"):
        shutil.copy(ROOT / "recipes/models" / name, digits.parent / "models")
    shutil.copytree(ROOT / "recipes/models/digits-images", digits.parent / "models/digits-images")
    shutil.copytree(ROOT / "recipes/ops", digits.parent / "ops")
    copied = digits.parent / path.name
    shutil.copy(path, copied)
    loaded = load_recipe(copied)
    assert path.stem.startswith(loaded.recipe.name)
    assert loaded.read == (copied, loaded.pipeline.path)


@pytest.mark.parametrize("path", SHIPPED_PIPELINES, ids=lambda path: path.stem)
def test_the_shipped_pipelines_are_valid(path: Path) -> None:
    """Each has the name of its file, and the recipes that it names exist."""
    pipeline = load_pipeline(str(path))
    assert pipeline.name == path.stem
    assert all((path.parent / recipe).is_file() for recipe in pipeline.recipes)


# ---------------------------------------------------------------- places


def test_where_returns_the_position_of_a_value() -> None:
    """`where` counts from 1; for a missing value it returns the position of the enclosing one."""
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


def test_the_shipped_pipelines() -> None:
    """`tune` has every stage, `compile` those without search; both are found from any folder."""
    assert load_pipeline("tune").stages == stages.pipeline_stages()
    assert load_pipeline("compile").stages == ("import", "build", "export", "verify")


def test_a_pipeline_of_the_user(folder: Path) -> None:
    """The folder `pipelines` in the current folder comes first; a path starts at the recipe's folder."""
    own = "pipeline: 1\nname: mine\nstages: [import, build]\n"
    (folder / "pipelines").mkdir()
    write(folder / "pipelines" / "mine.yaml", own)
    assert load_pipeline("mine").stages == ("import", "build")
    (folder / "sub").mkdir()
    lay_out(folder / "sub")
    write(folder / "sub" / "own.yaml", own)
    path = write(folder / "sub" / "r.yaml", edited(("pipeline: tune", "pipeline: own.yaml")))
    loaded = load_recipe(path)
    assert loaded.pipeline[:3] == ("mine", ("import", "build"), folder / "sub" / "own.yaml")
    assert loaded.read == (path, folder / "sub" / "own.yaml")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("stages: [build]", "3:10: stages.0: 'build' needs 'import' before it"),
        ("stages: [import, export]", "3:18: stages.1: 'export' needs 'build' before it"),
        ("stages: [import, build, build]", "3:25: stages.2: 'build' is listed twice"),
        (
            "stages: [import, build, extract_tasks]",
            "3:18: stages.1: 'build' needs 'extract_tasks' before it",
        ),
        ("stages: [import, pick_best]", "3:18: stages.1: 'pick_best' needs 'tune' before it"),
        (
            "stages: [imprt]",
            "3:10: stages.0: 'imprt' is not a stage; did you mean 'import'? "
            "(valid: build, export, extract_tasks, import, pick_best, tune, verify)",
        ),
        (
            "stages: []",
            "3:9: stages: must be a list with at least one item, such as [import, build, export], "
            "not an empty list",
        ),
        (
            "stages: import",
            "3:9: stages: must be a list, such as [import, build, export], not the string 'import'",
        ),
        ("stage: [import]", "3:1: stage: unknown field; did you mean 'stages'?"),
        ("stages: [import]\npipeline: 1", "4:1: pipeline: duplicate field; first defined in line 1"),
    ],
)  # fmt: skip
def test_wrong_pipelines(content: str, problem: str) -> None:
    """Mistakes in a pipeline have positions in its own file, also when a recipe names it."""
    write(Path("p.yaml"), f"pipeline: 1\nname: p\n{content}\n")
    path = write(Path("r.yaml"), edited(("pipeline: tune", "pipeline: p.yaml")))
    for attempt in (lambda: load_pipeline("p.yaml"), lambda: load_recipe(path)):
        with pytest.raises(RecipeError) as caught:
            attempt()
        assert f"p.yaml:{problem}" in caught.value.problems
        assert {entry.partition(":")[0] for entry in caught.value.problems} == {"p.yaml"}


@pytest.mark.parametrize("name", ["no-such", "no/such", "../compile", "n\0", "x" * 5000])
def test_unknown_pipelines(name: str) -> None:
    """The message lists the pipelines that exist."""
    with pytest.raises(
        RecipeError,
        match=r"there is no pipeline .* \(there are compile, fanout, release, retune, tune\)",
    ):
        load_pipeline(name)
    with pytest.raises(RecipeError, match="there is no file"):
        load_pipeline(f"{name}.yaml")


# ---------------------------------------------------------------- one truth


def test_names_in_recipes_are_those_of_the_registries() -> None:
    """Outputs, stages and frontends each have one list of names."""
    assert set(recipe.OUTPUT_NAMES) == set(exporters.EXPORTERS)
    assert set(frontends.FRONTENDS) == set(ModelSource.model_fields) - {"sha256", "files"}
    assert {name: entry.KIND for name, entry in frontends.FRONTENDS.items()} == {
        name: name for name in frontends.FRONTENDS
    }


def test_a_pipeline_must_list_what_its_stages_need() -> None:
    """What a stage requires is among what it reads, and comes before it; `build` does without tuning."""
    names = stages.pipeline_stages()
    for name in names:
        needs = {need for need in stages.STAGES[name].TRAITS.needs if need in names}
        assert needs <= set(names[: names.index(name)])
        assert set(stages.required_stages(name)) <= needs
    assert stages.required_stages("build") == ("import",)
    assert stages.required_stages("verify") == ("import", "build", "export")


def test_reading_a_recipe_imports_no_framework() -> None:
    """`plan` answers before TVM could be imported."""
    heavy = (
        "tvm",
        "tvm_ffi",
        "numpy",
        "onnx",
        "onnxruntime",
        "mxnet",
        "torch",
        "doit",
        "hypothesis",
    )
    script = (
        "import sys; from pathlib import Path; from tvmflow.planning.recipes import load_recipe;"
        "from tvmflow.recipe import json_schema;"
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
    """Each field has a description, unknown fields are rejected, and all references resolve."""
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["recipe", "name", "model"]
    parts = [schema, *schema["$defs"].values()]
    assert len(parts) == 19
    for part in parts:
        assert part["type"] == "object"
        assert part["additionalProperties"] is False
        for name, field in part["properties"].items():
            assert field["description"].endswith("."), name
            assert ("default" in field) != (name in part.get("required", ())), name
    references = {entry["$ref"] for entry in _objects(schema) if "$ref" in entry}
    assert references == {f"#/$defs/{name}" for name in schema["$defs"]}


def test_the_defaults_in_the_schema_are_correct() -> None:
    """A recipe with every default written out equals the recipe without them."""
    fields = json_schema()["properties"]
    defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
    shortest = {"recipe": 1, "name": "net", "model": {"onnx": "m.onnx"}}
    assert Recipe.model_validate({**shortest, **defaults}) == Recipe.model_validate(shortest)


def test_the_schema_lists_all_choices() -> None:
    """Fields with a fixed set of values list them, so that editors can complete them."""
    schema = json_schema()
    listed = [set(entry["enum"]) for entry in _objects(schema) if "enum" in entry]
    for words in (
        set(recipe.OUTPUT_NAMES),
        set(DTYPES),
        set(STRATEGIES),
        set(NAMES),
        {"reference", "none"},
        {"xgb", "mlp", "random"},
    ):
        assert words in listed
    one_word, fields = schema["properties"]["targets"]["items"]["anyOf"]
    assert set(one_word["enum"]) == set(NAMES)
    assert fields == {"$ref": "#/$defs/TargetSpec"}


@pytest.mark.parametrize(
    "part",
    [
        Recipe,
        ModelSource,
        MxnetCheckpoint,
        DimensionSpec,
        InputSpec,
        TargetSpec,
        Remote,
        Kernels,
        Tune,
        Verify,
        PipelineFile,
    ],
)
def test_examples_of_fields_are_valid(part: type[BaseModel]) -> None:
    """What a message suggests (`write recipe: 1`, `such as [1, 3, 224, 224]`) is accepted."""
    fields = part.model_fields
    examples = {name: field.examples[0] for name, field in fields.items() if field.examples}
    required = {name: examples[name] for name, field in fields.items() if field.is_required()}
    # a target is a name and a machine
    required |= {"preset": "x86-64-v3", "threads": 4} if issubclass(part, BuildTarget) else {}
    # a pipeline's own recipes, and what is only for those
    alone = {name: examples[name] for name in ("recipes",) if part is PipelineFile}
    required |= (
        {**alone, "stages": ["import", "extract_tasks", "tune", "build", "export"]} if alone else {}
    )
    for name, value in examples.items():
        if alone and name == "stages":
            continue
        without = {"tvm": {"preset"}, "parts": {"preset", "threads"}}.get(name, set())
        fields_of_part = {**required, name: value}
        if part is Recipe and name == "dimensions":
            # which an input must have in its shape
            fields_of_part["inputs"] = {"x": {"shape": [*value]}}
        part.model_validate({k: v for k, v in fields_of_part.items() if k not in without})


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
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(almost_recipes())
def test_any_text_is_a_recipe_or_a_list_of_problems(digits: Path, content: bytes) -> None:
    """Random changes give a valid recipe, or problems that each begin with a position in the file."""
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


def test_checks_are_on_or_off(tmp_path: Path) -> None:
    """In the words of people, which YAML reads as true or false; other fields take true or false alone."""
    words = {"off": False, "on": True, "false": False, "true": True}
    for word, value in words.items():
        path = write(tmp_path / "r.yaml", f"{RECIPE}checks: {word}\n")
        lay_out(tmp_path)
        assert load_recipe(path).recipe.checks is value
    assert Recipe.model_fields["checks"].default is True
