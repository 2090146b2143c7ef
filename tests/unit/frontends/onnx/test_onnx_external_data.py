"""External data of ONNX models: only files of the model's own folder are read, and only what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.onnx_models import model, value
from tests.support.source_files import empty_source_files
from tvmflow.core.errors import ImportFailed, RecipeError
from tvmflow.core.types import InputFile
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.onnx.onnx_frontend import OnnxSource

frontend = FRONTENDS["onnx"]

SECRET = np.arange(4, dtype=np.float32).tobytes()


def made(location: str, **position: str) -> bytes:
    """Return a model that adds a weight of 4 floats, whose data is at this location."""
    add = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    built = model([add], [value("x", [4])], [value("y", None)])
    weight = built.graph.initializer.add(name="w", data_type=1, dims=[4])
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, text in {"location": location, **position}.items():
        weight.external_data.add(key=key, value=text)
    return bytes(built.SerializeToString())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder `project` beside a file that no model may read."""
    (tmp_path / "secret").write_bytes(SECRET)
    project = tmp_path / "project"
    project.mkdir()
    return project


def list_files(folder: Path, name: str = "m.onnx") -> tuple[InputFile, ...]:
    return frontend.files(
        OnnxSource(onnx=name), folder, lambda *loc: "r.yaml:3:9", empty_source_files()
    )


def load(folder: Path) -> np.ndarray:  # type: ignore[type-arg]
    files = {file.role: Path(file.path) for file in list_files(folder)}
    return frontend.load(files, ()).params["w"]


def refusal(folder: Path, location: str) -> str:
    (folder / "m.onnx").write_bytes(made(location))
    with pytest.raises(RecipeError) as caught:
        list_files(folder)
    assert caught.value.fix
    [problem] = caught.value.problems
    assert problem.startswith(f"r.yaml:3:9: model.onnx: {folder / 'm.onnx'} ")
    return problem


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "a/../../secret", ""])
def test_a_path_out_of_the_folder_is_refused(location: str, folder: Path) -> None:
    """Whether the file exists or not."""
    assert "refers to data outside its folder" in refusal(folder, location)


def test_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    """The file itself, a folder on the way, and a link to a link."""
    (folder / "w.bin").symlink_to(folder.parent / "secret")
    (folder / "more").symlink_to("w.bin")
    (folder / "sub").symlink_to(folder.parent)
    for location in ("w.bin", "more", "sub/secret", "sub/missing"):
        assert "refers to data outside its folder" in refusal(folder, location)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop", "nothing"])
def test_what_is_no_file_is_named(kind: str, folder: Path) -> None:
    """Nothing is opened that would block or never end."""
    path = folder / "w.bin"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    text = {
        "fifo": "which is a named pipe, not a file",
        "folder": "which is a folder, not a file",
        "loop": "which is a symbolic link that leads back to itself",
        "device": "refers to data outside its folder",
        "nothing": "which does not exist",
    }
    assert text[kind] in refusal(folder, "w.bin")


def test_links_within_the_folder_are_followed(folder: Path) -> None:
    """Also a model and its data that both lead to one other folder, as in the caches of download tools."""
    (folder / "data").mkdir()
    (folder / "data" / "real").write_bytes(SECRET)
    (folder / "w.bin").symlink_to("data/real")
    (folder / "m.onnx").write_bytes(made("w.bin"))
    np.testing.assert_array_equal(load(folder), np.frombuffer(SECRET, np.float32))
    snapshot = folder.parent / "snapshot"
    snapshot.mkdir()
    for name in ("m.onnx", "w.bin"):
        (snapshot / name).symlink_to(folder / name)
    np.testing.assert_array_equal(load(snapshot), np.frombuffer(SECRET, np.float32))


@pytest.mark.parametrize(
    ("position", "text"),
    [
        ({"offset": "8"}, "the constant 'w' has 8 bytes of data, and needs 16"),
        ({"offset": "17"}, "it would be -1 bytes from byte 17, and the file has 16 bytes"),
        ({"offset": "-4"}, "it would be 20 bytes from byte -4"),
        ({"length": "99999999999999999999"}, "it would be 99999999999999999999 bytes"),
        ({"length": "-1"}, "it would be -1 bytes"),
        ({"length": "0x10"}, "the data of 'w' has the position offset None, length 0x10"),
        ({"offset": "\x1b[2J" + "9" * 5000}, "the data of 'w' has the position offset \\x1b[2J99"),
    ],
)
def test_a_position_outside_the_file_is_refused(
    position: dict[str, str], text: str, folder: Path
) -> None:
    """Nothing is allocated for a length that the file does not have."""
    (folder / "w.bin").write_bytes(SECRET)
    (folder / "m.onnx").write_bytes(made("w.bin", **position))
    with pytest.raises(ImportFailed) as caught:
        load(folder)
    assert text in caught.value.message
    assert len(caught.value.message) < 500


def test_a_part_of_a_file_is_read(folder: Path) -> None:
    (folder / "w.bin").write_bytes(b"1234" + SECRET + b"5678")
    (folder / "m.onnx").write_bytes(made("w.bin", offset="4", length="16"))
    np.testing.assert_array_equal(load(folder), np.frombuffer(SECRET, np.float32))


def test_a_downloaded_model_has_no_other_files(folder: Path) -> None:
    """The message says what to do instead."""
    (folder / "m.onnx").write_bytes(made("w.bin"))
    with pytest.raises(
        ImportFailed, match=r"is in another file, 'w\.bin', which the recipe does not name"
    ):
        frontend.load({"model": folder / "m.onnx"}, ())
