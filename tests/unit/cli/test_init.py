"""`tvmflow init`: the recipe of a model, which is a good one as it stands; and what `build` refuses."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.support.hostile_names import CARRIED, TEXTS
from tests.support.hub import serving_hub
from tests.support.web import serving
from tvmflow.cli.main import main
from tvmflow.core.errors import UsageError
from tvmflow.core.generated_text import find_name_problem
from tvmflow.frontends.base import ModelInput
from tvmflow.planning.new_recipe import Choices, Model, name_of, write_recipe
from tvmflow.planning.recipes import LoadedRecipe, load_recipe
from tvmflow.recipe import Recipe
from tvmflow.recipe.yaml_files import parse_yaml, validate
from tvmflow.targets.backends.cuda.gpu import Gpu, GpuDetection
from tvmflow.targets.host import Host

MODELS = Path(__file__).resolve().parents[3] / "recipes" / "models"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two forms of one model, on a machine without a GPU."""
    for name in ("digits.onnx", "digits-symbol.json", "digits-0010.params"):
        shutil.copy(MODELS / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tvmflow.planning.new_recipe.detect_gpu", lambda: GpuDetection(None))
    return tmp_path


def write_dynamic_model(path: Path) -> None:
    """Write a model whose batch and length are open."""
    ids, out = (
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length", 4])
        for name in ("ids", "out")
    )
    graph = helper.make_graph([helper.make_node("Identity", ["ids"], ["out"])], "g", [ids], [out])
    onnx.save(helper.make_model(graph, ir_version=8), str(path))


def loaded(name: str) -> LoadedRecipe:
    return load_recipe(Path(name))


def test_the_recipe_of_a_model_is_complete(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its inputs are the model's, the next commands can be pasted, and editors find the schema."""
    assert main(["init", "digits.onnx"]) == 0
    recipe = loaded("digits.tvmflow.yaml").recipe
    assert recipe.model.onnx == "digits.onnx"
    assert recipe.inputs["data"].shape == (1, 1, 8, 8)
    assert [target.name for target in recipe.targets] == ["host"]
    assert recipe.tune.minutes == 5
    first = Path("digits.tvmflow.yaml").read_text().partition("\n")[0]
    assert re.fullmatch(r"# yaml-language-server: \$schema=https://\S+/recipe\.schema\.json", first)
    out = capsys.readouterr().out
    assert "tvmflow plan digits.tvmflow.yaml " in out and "tvmflow run digits.tvmflow.yaml " in out


def test_a_folder_without_a_project_becomes_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And init says so; in a project, or for a recipe elsewhere, nothing is marked."""
    assert main(["init", "digits.onnx", "--output", "below/net.yaml"]) == 0
    assert not Path("tvmflow.toml").exists()
    assert loaded("below/net.yaml").recipe.model.onnx == "../digits.onnx"
    assert main(["init", "digits.onnx"]) == 0
    assert "tvmflow.toml: this folder is now the root of a project" in capsys.readouterr().out
    Path("tvmflow.toml").unlink()
    Path(".git").mkdir()
    assert main(["init", "digits.onnx", "--force"]) == 0
    assert not Path("tvmflow.toml").exists()


def test_a_recipe_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless that is requested."""
    Path("digits.tvmflow.yaml").write_text("mine")
    assert main(["init", "digits.onnx"]) == 2
    assert "digits.tvmflow.yaml exists" in capsys.readouterr().err
    assert Path("digits.tvmflow.yaml").read_text() == "mine"
    assert main(["init", "digits.onnx", "--stdout"]) == 0
    assert "recipe: 1\nname: digits\n" in capsys.readouterr().out
    assert main(["init", "digits.onnx", "--force"]) == 0
    assert loaded("digits.tvmflow.yaml").recipe.name == "digits"


def test_a_checkpoint_of_mxnet_has_its_last_epoch_and_no_weights_as_inputs(folder: Path) -> None:
    """Its shapes are the user's, who alone knows them."""
    words = ["init", "digits-symbol.json", "--shape", "data=1,1,8,8", "--minutes", "0"]
    assert main([*words, "--target", "cortex-a72"]) == 0
    recipe = loaded("digits.tvmflow.yaml").recipe
    assert (recipe.model.mxnet.prefix, recipe.model.mxnet.epoch) == ("digits", 10)
    assert {name: spec.shape for name, spec in recipe.inputs.items()} == {"data": (1, 1, 8, 8)}
    assert recipe.tune.trials == 0
    assert [target.name for target in recipe.targets] == ["cortex-a72"]


def test_dynamic_shapes_are_to_be_filled_in(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the line; a batch is 1."""
    write_dynamic_model(folder / "Ids Model.onnx")
    assert main(["init", "Ids Model.onnx"]) == 0
    text = Path("ids-model.tvmflow.yaml").read_text()
    assert "  ids: {shape: [1, SIZE, 4]}  # int64, [batch, length, 4]\n" in text
    number = text[: text.index("ids: {")].count("\n") + 1
    out = capsys.readouterr().out
    assert f"a number in place of each SIZE (ids-model.tvmflow.yaml:{number})" in out
    sentence = (
        "the batch size is dynamic in the model and 1 here: ids ['batch', 'length', 4]; "
        "for another one: --shape ids=8,SIZE,4"
    )
    assert out.count(sentence) == 1
    assert main(["plan", "ids-model.tvmflow.yaml"]) == 2
    assert f"ids-model.tvmflow.yaml:{number}:" in capsys.readouterr().err
    assert main(["init", "Ids Model.onnx", "--force", "--shape", "ids=2,16,4"]) == 0
    assert loaded("ids-model.tvmflow.yaml").recipe.inputs["ids"].shape == (2, 16, 4)
    assert "batch size" not in capsys.readouterr().out


def test_sizes_stay_open_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest sizes are to be filled in; the names are those of the model."""
    write_dynamic_model(folder / "ids.onnx")
    assert main(["init", "ids.onnx", "--open"]) == 0
    path = Path("ids.tvmflow.yaml")
    text = path.read_text()
    assert "write the largest size in place of each SIZE" in text
    assert "dimensions:\n  batch: {max: SIZE}\n  length: {max: SIZE}\ninputs:\n" in text
    assert "  ids: {shape: [batch, length, 4]}  # int64, [batch, length, 4]\n" in text
    capsys.readouterr()
    assert main(["plan", str(path)]) == 2
    assert "dimensions.length.max: must be an integer" in capsys.readouterr().err
    path.write_text(text.replace("SIZE}", "64}"))
    assert [d.max for d in loaded(str(path)).recipe.list_dimensions()] == [64, 64]
    assert main(["init", "ids.onnx", "--shape", "ids=1,2,4", "--open", "--stdout"]) == 2
    assert "--open and --shape exclude each other" in capsys.readouterr().err


def test_a_checkpoint_leaves_its_batch_open(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MXNet's files rarely have the shapes of inputs: what else to write is somebody's to say."""
    assert main(["init", "digits-symbol.json", "--open", "--stdout"]) == 0
    text = capsys.readouterr().out
    assert "dimensions:\n  batch: {max: SIZE}\ninputs:\n" in text
    assert (
        "  data: {shape: [batch, SIZE]}  # float32, the model does not specify the number" in text
    )


def test_build_names_the_options_that_set_dynamic_shapes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is run before they are known."""
    write_dynamic_model(folder / "ids.onnx")
    assert main(["build", "ids.onnx"]) == 2
    assert "with a number for each SIZE: --shape ids=1,SIZE,4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.onnx"], "there is no file gone.onnx"),
        (["digits.onnx", "--shape", "date=1,1,8,8"], "the model has no input 'date'; did you mean 'data'?"),
        (["digits.onnx", "--shape", "data=1,3,8,8"], "[1, 3, 8, 8] does not fit"),
        (["digits.onnx", "--target", "hots"], "there is no such target; did you mean 'host'?"),
        (["digits.onnx", "--shape", "data"], "'data' is not a shape such as data=1,3,224,224"),
        (["https://example.org/net.bin"], "does not say what kind of model this is"),
        (["digits-0010.params"], "name the symbol: PREFIX-symbol.json"),
    ],
)  # fmt: skip
def test_mistakes_have_a_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["init", *words]) == 2
    err = capsys.readouterr().err
    assert (message in err and "fix: " in err) or message.startswith("there is no file")
    assert not Path("digits.tvmflow.yaml").exists()


@pytest.mark.parametrize(
    ("target", "outputs", "run_on", "against"),
    [
        ("raspberry-pi-4", ("bundle",), "qemu", "reference"),
        ("mali", ("bundle",), "auto", "none"),
        ("x86-64-windows", ("bundle",), "auto", "none"),
        ("cortex-m7", ("c-library",), "auto", "none"),
        ("browser", ("web",), "chromium", "reference"),
    ],
)
def test_a_target_that_this_machine_does_not_run_is_built_all_the_same(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    outputs: tuple[str, ...],
    run_on: str,
    against: str,
) -> None:
    """It is not tuned here, has an output that its system loads, and is verified where an emulator is installed."""
    host = Host("x86_64", "", frozenset(), 2)
    monkeypatch.setattr("tvmflow.planning.new_recipe.read_host", lambda: host)
    monkeypatch.setattr("tvmflow.planning.new_recipe.find_qemu", lambda _: Path("qemu"))
    monkeypatch.setattr("tvmflow.planning.new_recipe.find_chromium", lambda: "chromium")
    assert main(["init", "digits.onnx", "--target", "host", "--target", target]) == 0
    recipe = loaded("digits.tvmflow.yaml").recipe
    assert [entry.name for entry in recipe.targets] == ["host", target]
    here, there = recipe.for_target("host"), recipe.for_target(target)
    assert (here.tune.minutes, here.outputs, here.verify.against) == (5, ("bundle",), "reference")
    assert (there.tune.trials, tuple(there.outputs)) == (0, outputs)
    assert (there.verify.run_on, there.verify.against) == (run_on, against)

    monkeypatch.setattr("tvmflow.planning.new_recipe.find_qemu", lambda _: None)
    monkeypatch.setattr("tvmflow.planning.new_recipe.find_chromium", lambda: None)
    assert main(["init", "digits.onnx", "--force", "--target", target]) == 0
    assert loaded("digits.tvmflow.yaml").recipe.for_target(target).verify.against == "none"


def test_a_gpu_is_a_target_beside_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset of its architecture."""
    detection = GpuDetection(Gpu("NVIDIA H200", "sm_90", 13000))
    monkeypatch.setattr("tvmflow.planning.new_recipe.detect_gpu", lambda: detection)
    model = Model("n", "onnx", {"onnx": "n.onnx"}, (ModelInput("x", "float32", (1, 2)),), 1)
    assert "  - host\n  - cuda-sm90\n" in write_recipe(model, Choices()).text


@pytest.mark.parametrize(("size", "minutes"), [(1000, 5), (50 << 20, 15), (500 << 20, 30)])
def test_the_budget_grows_with_the_model(size: int, minutes: int) -> None:
    """Unless the user chose one."""
    model = Model("n", "onnx", {"onnx": "n.onnx"}, (), size)
    assert f"  minutes: {minutes} " in write_recipe(model, Choices(targets=("host",))).text
    chosen = write_recipe(model, Choices(targets=("host",), minutes=7)).text
    assert "  minutes: 7 " in chosen


@pytest.mark.parametrize(
    "name",
    ["😀", "名前", "é" * 200, 'a"b\\c', "\u00a0\u3000\u200f", "- x: #", "null", "1e3", "\u202ex"],
)
def test_inputs_have_any_name(name: str, folder: Path) -> None:
    """The recipe reads as the model's names, however YAML would read them."""
    x = helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("out", TensorProto.FLOAT, [2, 3])
    graph = helper.make_graph([helper.make_node("Relu", [name], ["out"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, ir_version=8), "odd.onnx")
    assert main(["init", "odd.onnx"]) == 0
    assert list(loaded("odd.tvmflow.yaml").recipe.inputs) == [name]


def test_an_input_that_cannot_be_compiled_is_not_blamed_on_options(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--shape` is to be corrected only where there is one."""
    x = helper.make_tensor_value_info("x", TensorProto.STRING, [2])
    y = helper.make_tensor_value_info("y", TensorProto.STRING, [2])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, ir_version=8), "text.onnx")
    assert main(["init", "text.onnx"]) == 2
    err = capsys.readouterr().err
    assert "input 'x' has dtype string" in err and "--shape" not in err


# ---------------------------------------------------------------- addresses


def test_a_model_on_a_web_server_is_pinned_with_all_its_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their digests are computed and written; each file is downloaded once, also for the plan of the recipe."""
    model = onnx.load("digits.onnx")
    onnx.save(model, "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0)
    content, weights = Path("net.onnx").read_bytes(), Path("net.bin").read_bytes()
    with serving(content) as web:
        web.others = {"/net.bin": weights}
        assert main(["init", web.url, "--store", "s", "--output", "net.yaml"]) == 0
        source = loaded("net.yaml").recipe.model
        assert source.onnx == web.url
        assert source.sha256 == hashlib.sha256(content).hexdigest()
        assert source.files == {"net.bin": hashlib.sha256(weights).hexdigest()}
        assert main(["plan", "net.yaml", "--store", "s"]) == 0
        assert len(web.requests) == 2
        web.statuses = [404]
        assert main(["init", f"{web.url}/gone.onnx", "--store", "s"]) == 2
        assert "404" in capsys.readouterr().err


def test_a_model_on_the_hub_is_pinned_by_the_commit_of_its_branch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the branch is named or not; what the Hub does not have is an error."""
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    with serving_hub() as hub:
        hub.files = {"onnx/net.onnx": Path("digits.onnx").read_bytes()}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for address in (hub.address("onnx/net.onnx", ""), hub.address("onnx/net.onnx", "main")):
            assert main(["init", address, "--store", "s", "--force"]) == 0
            source = loaded("net.tvmflow.yaml").recipe.model
            assert (source.onnx, source.sha256) == (hub.address("onnx/net.onnx"), None)
        assert main(["init", hub.address("onnx/gone.onnx", ""), "--store", "s"]) == 2
        assert "no file 'onnx/gone.onnx'" in capsys.readouterr().err
        hub.statuses = [500] * 20
        assert main(["init", hub.address("onnx/other.onnx", "v2"), "--store", "s"]) == 4


def test_a_checkpoint_at_an_address_says_what_to_write(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A web server lists no files, so that nobody knows its epochs."""
    assert main(["init", "https://example.org/net-symbol.json", "--store", "s"]) == 2
    err = capsys.readouterr().err
    assert "the epochs of this checkpoint, cannot be listed" in err
    assert "{mxnet: {prefix: ADDRESS, epoch: N}}" in err


# ---------------------------------------------------------------- code that makes a model


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (["nets.small:make"], "nets.small:make is code that makes a model, and runs only on request",
         "write its archive: `tvmflow init nets.small:make --archive FILE.pt2`"),
        (["digits.onnx", "--archive", "net.pt2"], "digits.onnx is not a PACKAGE.MODULE:FUNCTION",
         "leave --archive out for a model that is a file"),
        (["nets:make", "--archive", "net.onnx"], "--archive net.onnx: the name does not end in .pt2",
         "write --archive net.pt2"),
        (["nets:make", "--archive", "old.pt2"], "old.pt2 exists", "replace it with --force"),
        (["nets:make", "--archive", "new.pt2", "--output", "mine.yaml"], "mine.yaml exists", "replace it with --force"),
    ],
)  # fmt: skip
def test_code_runs_only_on_request(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str, fix: str
) -> None:
    """And for an archive that may be written; a process cannot be started in this test."""
    Path("old.pt2").touch()
    Path("mine.yaml").touch()
    assert main(["init", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and f"fix: {fix}" in err


def test_a_file_with_the_name_of_a_factory_is_a_model(folder: Path) -> None:
    Path("digits.onnx").rename("nets:make")
    assert main(["init", "nets:make"]) == 0
    assert loaded("nets-make.tvmflow.yaml").recipe.model.onnx == "nets:make"


def test_the_model_is_never_replaced_by_its_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with --force either."""
    content = Path("digits.onnx").read_bytes()
    assert main(["init", "digits.onnx", "--force", "--output", "digits.onnx"]) == 2
    assert "digits.onnx is read by this command and would be lost" in capsys.readouterr().err
    assert Path("digits.onnx").read_bytes() == content


def test_sizes_are_open_where_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of inputs are neither sizes nor comments."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("SIZE", [2]), ("#", ["batch", "length"]), ("shape: [SIZE]", [3]))
    ]
    nodes = [helper.make_node("Identity", [spec.name], [f"{spec.name}2"]) for spec in inputs]
    outputs = [helper.make_tensor_value_info(f"{i.name}2", TensorProto.FLOAT, None) for i in inputs]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, ir_version=8), "odd.onnx")
    assert main(["init", "odd.onnx"]) == 0
    lines = Path("odd.tvmflow.yaml").read_text().splitlines()
    (number,) = (
        at for at, line in enumerate(lines, 1) if line.startswith('  "#": {shape: [1, SIZE]}')
    )
    assert f"in place of each SIZE (odd.tvmflow.yaml:{number})" in capsys.readouterr().out


@settings(max_examples=25)
@given(
    names=st.lists(TEXTS | CARRIED.map(lambda name: name * 200), min_size=1, max_size=4),
    stem=TEXTS | st.just("\udcff"),
    dims=st.lists(st.integers(1, 9) | TEXTS, max_size=3),
)
def test_a_recipe_is_refused_or_can_be_read(
    names: list[str], stem: str, dims: list[int | str]
) -> None:
    """Whatever inputs, their sizes and the file of the model are called."""
    inputs = tuple(ModelInput(name, "float32", tuple(dims)) for name in dict.fromkeys(names))
    source = {"onnx": f"{stem}.onnx"}
    try:
        recipe = write_recipe(Model(name_of(f"{stem}.onnx"), "onnx", source, inputs, 1), Choices())
    except UsageError as error:
        hostile = any(map(find_name_problem, names)) or not stem.isprintable()
        assert hostile and str(error)
        return
    filled = (
        re.sub(r"\bSIZE\b(?=[^\n]*\]})", "7", recipe.text) if recipe.unsized_lines else recipe.text
    )
    document = parse_yaml(Path("recipe"), filled)
    read, problems = validate(document, Recipe)
    if not recipe.unsized_lines:
        assert read is not None and not problems
        assert set(read.inputs) == set(names) and read.model.onnx == f"{stem}.onnx"
    assert set(document.value["inputs"]) == set(names)


@pytest.mark.slow
def test_more_inputs_than_a_recipe_has_values_are_refused() -> None:
    """`plan` could not read the recipe."""
    inputs = tuple(ModelInput(f"input{index}", "float32", (1, 2, 3)) for index in range(9_000))
    with pytest.raises(UsageError, match=r"its recipe would not be valid: .*more than 40000 names"):
        write_recipe(Model("net", "onnx", {"onnx": "net.onnx"}, inputs, 1), Choices())


@pytest.mark.parametrize("name", ["a\nb.onnx", "\u202ea.onnx", "#.onnx", "- a: b.onnx", "名.onnx"])
def test_files_of_models_have_any_name(name: str, folder: Path) -> None:
    """The recipe names the file as it is."""
    shutil.copy("digits.onnx", name)
    assert main(["init", name, "--output", "odd.yaml"]) == 0
    assert loaded("odd.yaml").recipe.model.onnx == name


def test_a_file_whose_name_is_no_text_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """YAML is text."""
    name = os.fsdecode(b"\xff.onnx")
    shutil.copy("digits.onnx", name)
    assert main(["init", name, "--output", "odd.yaml"]) == 2
    assert not Path("odd.yaml").exists()
    assert (
        "its name is not Unicode, as paths in a recipe are\n  fix: rename the file"
        in capsys.readouterr().err
    )
