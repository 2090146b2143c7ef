"""Images as `verify.data`: which files a plan reads, and what is wrong with them before anything runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.engine import joined_target, plan_of, recipe, target
from tvmflow.core.errors import RecipeError
from tvmflow.core.keys import list_changes
from tvmflow.core.types import InputFile, TensorSpec
from tvmflow.frontends.base import InputRequest, ModelInput, ModelOutput
from tvmflow.planning import prepare
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.prepare import ImageFiles, Signature, list_images, read_signature
from tvmflow.planning.recipes import LoadedRecipe, Pipeline, PlannedRecipe
from tvmflow.store import file_digests
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore

INPUT = {"shape": [1, 3, 8, 8], "image": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with an image each, labels, and files that are not images."""
    for name in ("cat/a.png", "dog/b.jpg"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name)
    (tmp_path / "images/cat/notes.txt").touch()
    (tmp_path / "images/.hidden.png").touch()
    (tmp_path / "labels.txt").write_text("dog\ncat\n")
    return tmp_path


def planned(folder: Path, **fields: Any) -> PlannedRecipe:
    defaults: dict[str, Any] = {
        "inputs": {"data": INPUT},
        "labels": "labels.txt",
        "verify": {"data": "images", "min_accuracy": 0.5},
    }
    made = recipe(**{**defaults, **fields})
    path = folder / "net.yaml"

    def where(*loc: str | int) -> str:
        return f"net.yaml:{'.'.join(map(str, loc))}"

    stages = ("import", "build", "export", "verify")
    loaded = LoadedRecipe(made, path, where, (path,), Pipeline("tune", stages, path))
    model = InputFile("model", f"{folder}/net.onnx", where("model", "onnx"))
    return PlannedRecipe(loaded, stages, (target(),), (model,))


def problem(folder: Path, **fields: object) -> str:
    with pytest.raises(RecipeError) as caught:
        list_images([(planned(folder, **fields), Signature())])
    assert caught.value.exit_code == 2
    (text,) = caught.value.problems
    return text.replace(str(folder), "")


def listed(folder: Path, **fields: object) -> ImageFiles:
    return list_images([(planned(folder, **fields), Signature())])


def test_each_image_is_an_input_of_verify(folder: Path) -> None:
    """By its path in the folder; export reads the labels. A new file changes a folder that the answer depends on."""
    images = listed(folder)
    plan = plan_of(planned(folder)._replace(images=images.files))
    files = {spec.stage: [file.role for file in spec.files] for spec in plan.stages}
    assert files["verify"] == ["model", "data/cat/a.png", "data/dog/b.jpg"]
    assert files["export"] == ["labels"]
    verify = next(spec for spec in plan.stages if spec.stage == "verify")
    assert "pillow" in verify.tools
    assert {folder / "labels.txt", folder / "images", folder / "images/cat"} <= set(images.read)


def test_a_key_has_one_digest_for_all_images(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With their number; reports say so, and not which of ten thousand is another one."""
    state = PlanState(LocalStore(str(tmp_path_factory.mktemp("store"))))

    def inputs() -> dict[str, str]:
        plan = plan_of(planned(folder)._replace(images=listed(folder).files))
        verify = next(spec for spec in plan.stages if spec.stage == "verify")
        files = tuple(file for file in verify.files if file.role != "model")
        return PlanState(state.store).digest_files(verify._replace(files=files))

    before = inputs()
    assert list(before) == ["data/2 files"]
    Image.new("L", (8, 8)).save(folder / "images/cat/a.png")
    changed = inputs()
    assert list(changed) == list(before) and changed != before
    Image.new("L", (9, 9)).save(folder / "images/cat/c.png")
    more = inputs()
    assert list(more) == ["data/3 files"]
    (folder / "images/cat/c.png").unlink()
    assert inputs() == changed
    preimage = {"stage": "verify", "version": 1, "settings": {}, "tools": {}, "machine": "m"}
    keys = [{**preimage, "inputs": entry} for entry in (before, changed, more)]
    assert list_changes(keys[0], keys[1]) == ["2 files of data changed"]
    assert list_changes(keys[1], keys[2]) == ["2 files and 3 files of data changed"]
    Path(folder / "images/dog/b.jpg").unlink()
    gone = InputFile("data/dog/b.jpg", "", "net.yaml:verify.data", folder=f"{folder}/images")
    spec = plan_of(planned(folder)).stages[-1]._replace(files=(gone,))
    with pytest.raises(RecipeError, match=r"verify\.data: .*b\.jpg: No such file"):
        state.digest_files(spec)


@pytest.mark.slow
def test_ten_thousand_images_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later plans read one note in place of their content."""
    names = [f"{number % 10}/{number:05}.png" for number in range(10_000)]
    for label in range(10):
        (tmp_path / "images" / str(label)).mkdir(parents=True)
    for name in names:
        (tmp_path / "images" / name).write_bytes(name.encode())
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)
    store = LocalStore(str(tmp_path / "store"))
    store.create()
    first = FileDigests(store).digest_folder(str(tmp_path / "images"), names)
    monkeypatch.setattr(file_digests, "hash_file", None)
    assert FileDigests(store).digest_folder(str(tmp_path / "images"), names) == first
    assert len(list(store.notes.list("stats"))) == 1


def test_recipes_without_images_read_what_they_did(folder: Path) -> None:
    """Neither files nor tools nor settings are new."""
    plan = plan_of(
        planned(folder, inputs={"data": {"shape": [1, 3, 8, 8]}}, labels=None, verify={})
    )
    export, verify = plan.stages[-2:]
    assert not export.files and "inputs" not in export.settings
    assert verify.settings["inputs"] == {"data": {}} and "pillow" not in verify.tools


def test_a_table_names_images_and_their_classes(folder: Path) -> None:
    """It is read itself, too."""
    (folder / "test.csv").write_text("file,label\nimages/cat/a.png,cat\nimages/cat/a.png,cat\n")
    fields = {"verify": {"data": "test.csv"}}
    plan = plan_of(planned(folder, **fields)._replace(images=listed(folder, **fields).files))
    roles = [file.role for file in plan.stages[-1].files]
    assert roles == ["model", "data", "data/images/cat/a.png"]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("name,label\n", "must begin with the line file,label"),
        ("file,label\na.png\n", "line 2 is not file,label"),
        ("file,label\n", "has no images"),
        ("file,label\nimages/cat/b.png,cat\n", "there is no file /images/cat/b.png"),
        (
            "file,label\nimages/cat/a.png,cut\n",
            "no label names the class 'cut'; did you mean 'cat'",
        ),
    ],
)
def test_a_wrong_table_is_an_error(folder: Path, table: str, text: str) -> None:
    """With its position in the recipe, and the line in the table."""
    (folder / "test.csv").write_text(table)
    message = problem(folder, verify={"data": "test.csv"})
    assert message.startswith("net.yaml:verify.data: verify.data: test.csv: ") and text in message


def test_wrong_folders_are_errors(folder: Path) -> None:
    """No images, no classes where accuracy needs them, a class without a label, an image beside the classes."""
    (folder / "images/bird").mkdir()
    Image.new("L", (8, 8)).save(folder / "images/bird/c.png")
    assert "no label names the class 'bird'" in problem(folder)
    (folder / "images/c.png").touch()
    assert "has folders of classes, and 'c.png' is in none" in problem(folder)
    (folder / "flat").mkdir()
    fields = {"verify": {"data": "flat", "min_accuracy": 0.5}}
    assert "flat: has no images (.bmp, " in problem(folder, **fields)
    (folder / "flat/a.png").touch()
    assert "has no folders of classes, which verify.min_accuracy needs" in problem(folder, **fields)
    assert "flat/a.png cannot be read as an image" in problem(folder, verify={"data": "flat"})
    Image.new("L", (8, 8)).save(folder / "flat/a.png")
    assert listed(folder, verify={"data": "flat"}).files == {"flat": ("a.png",)}


def test_without_labels_classes_are_indices(folder: Path) -> None:
    """A folder with another name needs `labels`."""
    assert "the class 'cat' is not an index, and there are no labels" in problem(
        folder, labels=None
    )
    (folder / "images/cat").rename(folder / "images/1")
    (folder / "images/dog").rename(folder / "images/0")
    assert listed(folder, labels=None).files["images"] == ("0/b.jpg", "1/a.png")


def test_names_of_classes_are_names_that_code_holds(folder: Path) -> None:
    """The C++ project and the wheel have them."""
    (folder / "labels.txt").write_text(f"dog\n{'t' * 501}\n")
    text = problem(folder, verify={})
    assert "labels: labels.txt cannot be read: its line 2 ('ttt" in text
    assert text.endswith("has a name of 501 characters, more than 500")


def test_images_need_an_input_that_takes_them(folder: Path) -> None:
    """The message names the field."""
    message = problem(folder, inputs={"data": {"shape": [1, 3, 8, 8]}})
    assert "images are for one input, and no input of the recipe has `image`" in message


def test_labels_are_read_when_a_run_is_planned(folder: Path) -> None:
    """So that a damaged file is named before anything is built."""
    (folder / "labels.txt").write_text("dog\n\ncat\n")
    message = problem(folder)
    assert message == (
        "net.yaml:labels: labels: labels.txt cannot be read: its line 2 is empty: write one name per line"
    )


def test_without_pillow_images_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setattr(prepare, "is_pillow_installed", lambda: False)
    assert "pip install 'tvmflow[images]'" in problem(folder)


def test_images_of_a_model_in_parts_belong_to_the_whole(folder: Path) -> None:
    """The stage that joins the parts reads the labels, and knows the preprocessing; no part does."""
    parts = [
        {"name": "first", "preset": "x86-64-v2", "until": ["middle"]},
        {"name": "second", "preset": "x86-64-v2"},
    ]
    entry = planned(folder, targets=[{"name": "split", "parts": parts}])
    plan = plan_of(entry._replace(targets=(joined_target(),), images=listed(folder).files))
    specs = {spec.id.partition(":")[2]: spec for spec in plan.stages}
    assert [file.role for file in specs["join/split"].files] == ["labels"]
    assert specs["join/split"].settings["inputs"] == {"data": {"image": {}}}
    assert not specs["export/split.first"].files
    assert "inputs" not in specs["export/split.first"].settings
    assert "data/cat/a.png" in [file.role for file in specs["verify/split"].files]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x08\x07\x12\x07pytorch", "is an ONNX model; give an npz file (`numpy.savez("),
        (b"\x89PNG\r\n\x1a\n", "is an image; give an npz file"),
        (b"\x93NUMPY\x01\x00", "is not an npz file; give an npz file"),
        (b"", "is not an npz file; give an npz file"),
        (b"PK\x03\x04", "is a damaged archive: its list of files, at the end, is missing or wrong; copy"),
        (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS: the content is not there; fetch it"),
    ],
)  # fmt: skip
def test_a_file_without_arrays_is_refused_before_anything_is_built(
    content: bytes, text: str, folder: Path
) -> None:
    """With what it is and what to do; verify would say it only when the library was built."""
    (folder / "data.npz").write_bytes(content)
    message = problem(folder, verify={"data": "data.npz"})
    assert message.startswith(f"net.yaml:verify.data: verify.data: data.npz: {text}")


def test_an_npz_file_is_no_list_of_images(folder: Path) -> None:
    """A pipeline without verify does not look at it."""
    np.savez(folder / "data.npz", data=np.zeros((1, 3, 8, 8)))
    assert listed(folder, verify={"data": "data.npz"}).files == {}
    (folder / "data.npz").write_bytes(b"no arrays")
    compiled = planned(folder, verify={"data": "data.npz"})._replace(stages=("import", "build"))
    assert list_images([(compiled, Signature())]).files == {}


FLOATS = Signature((TensorSpec("data", (2, 3, 8, 8), "float32"),))
FIT = {"data": np.zeros((5, 3, 8, 8), "float32"), "label": np.arange(5)}


@pytest.mark.parametrize(
    ("arrays", "fields", "text"),
    [
        ({"date": FIT["data"]}, {}, "there is no array 'data' (there are ['date'])"),
        ({"data": np.zeros((5, 3, 8, 9), "float32")}, {}, "'data' has shape (5, 3, 8, 9)"),
        ({"data": np.zeros((5, 3, 8, 8), "uint8")}, {}, "'data' is uint8, the model takes float32"),
        ({"data": FIT["data"]}, {}, "verify.min_accuracy is set and there is no array 'label'"),
        ({"data": FIT["data"], "label": np.arange(4)}, {}, "has 5 samples and 4 labels"),
        (FIT, {"quantize": {"samples": 6}}, "it has 5 samples, and quantize.samples asks for 6"),
        (
            {"data": FIT["data"]},
            {"verify": {"data": "data.npz"}, "quantize": {"max_accuracy_drop": 1}},
            "quantize.max_accuracy_drop is set and there is no array 'label'",
        ),
    ],
)
def test_arrays_that_do_not_fit_the_model_are_found_in_planning(
    arrays: dict[str, Any], fields: dict[str, Any], text: str, folder: Path
) -> None:
    """By the heads of their files: verify would say it when the library is tuned and built."""
    np.savez(folder / "data.npz", **arrays)
    fields = {"verify": {"data": "data.npz", "min_accuracy": 0.5}, **fields}
    with pytest.raises(RecipeError) as caught:
        list_images([(planned(folder, **fields), FLOATS)])
    assert text in caught.value.problems[0]
    np.savez(folder / "data.npz", **FIT)
    fields.pop("quantize", None)
    assert list_images([(planned(folder, **fields), FLOATS)]).files == {}


def test_labels_and_images_that_do_not_fit_the_model_are_found_in_planning(folder: Path) -> None:
    """Five scores for two names, scores that are integers, and an input beside that for images."""

    def problem_of(signature: Signature) -> str:
        with pytest.raises(RecipeError) as caught:
            list_images([(planned(folder), signature)])
        return "".join(caught.value.problems)

    assert problem_of(Signature(scores=TensorSpec("y", (1, 5), "float32"))) == (
        "net.yaml:labels: labels: labels.txt does not fit the model: there are 2 names, and 5 scores for a sample: "
        "the output 'y' is float32[1, 5]"
    )
    assert "scores are floating-point" in problem_of(
        Signature(scores=TensorSpec("y", (1, 2), "int64"))
    )
    inputs = tuple(TensorSpec(name, (1, 3, 8, 8), "float32") for name in ("data", "state"))
    assert "the model has the further input state" in problem_of(Signature(inputs))


@pytest.mark.parametrize(
    ("shape", "dims", "scores"),
    [
        ((4, 3, 8, 8), ("n", 5), (1, 5)),
        ((4, 3, 8, 8), (1, "", 5), None),
        ((1, 3, 9, 9), (1, 5), None),
        ((1, 3, 8, 8), None, None),
    ],
)
def test_scores_are_known_where_the_inputs_are_those_of_the_file(
    shape: tuple[int, ...], dims: tuple[int | str, ...] | None, scores: tuple[int, ...] | None
) -> None:
    """Another batch changes no scores; other sizes may."""
    signature = read_signature(
        [ModelInput("data", "float32", (1, 3, 8, 8))],
        [ModelOutput("y", "float32", dims)],
        [InputRequest("data", shape)],
    )
    assert (signature.scores and signature.scores.shape) == scores


def test_a_table_is_read_however_it_was_written(folder: Path) -> None:
    """With a byte order mark, quotes, and the ends of lines of other systems."""
    table = folder / "list.csv"
    lines = ["file,label", '"images/cat/a.png",cat', "images/dog/b.jpg , dog"]
    for end in ("\n", "\r\n", "\r"):
        table.write_bytes("\ufeff".encode() + end.join(lines).encode())
        images = listed(folder, verify={"data": "list.csv"})
        assert images.files == {"list.csv": ("images/cat/a.png", "images/dog/b.jpg")}


HEAD = b"file,label\n"
TABLES = {
    b"": "must begin with the line file,label",
    b"\0" * 5000: "must begin with the line file,label",
    HEAD: "has no images",
    HEAD + b'"images/cat/a.png,cat\nimages/cat/a.png,cat\n': "line 2 is not file,label",
    HEAD + b"images/cat/a.png,cat,dog\n": "line 2 is not file,label",
    HEAD + b"images/cat/a.png\n": "line 2 is not file,label",
    HEAD + b"images/cat/a.png\0,cat\n": r"there is no file /images/cat/a.png\x00",
    HEAD + b"images/cat,cat\n": "images/cat is a folder, not a file",
    HEAD + b"x" * 200_000 + b",cat\n": "is not a table: field larger than field limit (131072)",
    HEAD + b"y" * 5000 + b".png,cat\n": "File name too long",
    HEAD + "images/cat/a.png,é\n".encode("latin-1"): "is not a table: it is not text in UTF-8",
    HEAD + b"images/\x1b[2J.png,cat\n": r"there is no file /images/\x1b[2J.png",
    HEAD + b"images/cat/a.png,=cmd\x1b\n": r"no label names the class '=cmd\x1b'",
}


@pytest.mark.parametrize("table", TABLES, ids=TABLES.values())
def test_a_table_from_anybody_is_refused_with_a_short_sentence(folder: Path, table: bytes) -> None:
    """Its bytes are shown as text, and never all of them."""
    (folder / "list.csv").write_bytes(table)
    text = problem(folder, verify={"data": "list.csv"})
    assert TABLES[table] in text
    assert len(text) < 400
    assert text.isprintable()


@pytest.mark.parametrize("labels", ["labels.txt", None])
def test_of_many_wrong_classes_the_first_are_shown(folder: Path, labels: str | None) -> None:
    """A table with the labels of another data set: a sentence, and soon."""
    rows = [f"images/cat/a.png,wrong{number}" for number in range(20_000)]
    (folder / "list.csv").write_text("\n".join(["file,label", *rows]))
    started = time.monotonic()
    text = problem(folder, labels=labels, verify={"data": "list.csv"})
    assert "the class 'wrong0'" in text
    assert text.endswith("and 19,990 classes more") or text.endswith("and 19990 classes more")
    assert time.monotonic() - started < 10


def test_an_index_of_thousands_of_digits_is_none(folder: Path) -> None:
    """Python converts no integer of that many digits."""
    (folder / "list.csv").write_text(f"file,label\nimages/cat/a.png,{'9' * 5000}\n")
    text = problem(folder, labels=None, verify={"data": "list.csv"})
    assert "is not an index, and there are no labels" in text
    assert len(text) < 400


@pytest.mark.faults
def test_a_table_of_a_million_lines(folder: Path) -> None:
    """Each file is looked for once."""
    rows = b"images/cat/a.png,cat\nimages/dog/b.jpg,dog\n" * 500_000
    (folder / "list.csv").write_bytes(b"file,label\n" + rows)
    started = time.process_time()
    images = listed(folder, verify={"data": "list.csv"})
    assert len(images.files["list.csv"]) == 1_000_000
    assert time.process_time() - started < 20


def test_a_folder_that_contains_itself_is_listed_once(folder: Path) -> None:
    """Links to a folder above it, which would double the images with each step."""
    for name in ("x", "y", "z"):
        (folder / "images/cat" / name).symlink_to(folder / "images")
    images = listed(folder)
    assert images.files == {"images": ("cat/a.png", "dog/b.jpg")}
