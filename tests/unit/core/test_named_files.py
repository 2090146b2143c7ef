"""Files that a recipe names: what is in their place, told without opening what could block."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmflow.core.named_files import find_invalid_name, is_file, missing_file_text, obstacle


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_text("a model")


def _bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)


OTHERS: dict[str, tuple[Callable[[str], object], str]] = {
    "named pipe": (os.mkfifo, "is a named pipe, not a file"),
    "folder": (os.mkdir, "is a folder, not a file"),
    "socket": (_bind, "is a socket, not a file"),
    "device": (lambda path: Path(path).symlink_to("/dev/zero"), "is a device, not a file"),
    "loop": (
        lambda path: Path(path).symlink_to(path),
        "is a symbolic link that leads back to itself",
    ),
    "link to nowhere": (
        lambda path: Path(path).symlink_to("gone/\x1b[2J"),
        "is a symbolic link to gone/\\x1b[2J, which does not exist",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_is_named(kind: str) -> None:
    """A file of the same name is never suggested in its place."""
    make, text = OTHERS[kind]
    make("fifo.onnx")
    assert not is_file(Path("fifo.onnx"))
    assert obstacle(Path("fifo.onnx")) == text
    assert missing_file_text(Path("fifo.onnx")) == f"fifo.onnx {text}"


def test_a_path_through_a_file() -> None:
    """The part that is in the way is named."""
    path = Path("model.onnx") / "model.onnx"
    assert missing_file_text(path) == (
        "model.onnx/model.onnx cannot exist: model.onnx is not a folder"
    )


def test_a_file_that_does_not_exist_has_a_suggestion() -> None:
    """It is not an obstacle, and neither is a name that no file can have."""
    assert missing_file_text(Path("modle.onnx")) == (
        "there is no file modle.onnx; did you mean 'model.onnx'?"
    )
    assert not is_file(Path("modle.onnx"))
    assert obstacle(Path("a\0b")) == obstacle(Path("modle.onnx")) == ""
    assert not is_file(Path("a\0b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission() -> None:
    """It exists, and cannot be read."""
    Path("model.onnx").chmod(0)
    assert obstacle(Path("model.onnx")) == "cannot be read: Permission denied"


def test_a_file_and_a_link_to_it() -> None:
    Path("link.onnx").symlink_to("model.onnx")
    assert is_file(Path("model.onnx"))
    assert is_file(Path("link.onnx"))


@pytest.mark.parametrize(
    "names",
    [
        ["../a"], ["a/../b"], ["/a"], ["a//b"], ["."], ["a/"], [""], ["a\\b"], ["a:b"], ["a\n"],
        ["con"], ["AUX.txt"], ["x/Nul.tar.gz"], ["com1"], ["LPT9.h"], ["CON .txt"], ["com¹"], ["conin$"],
        ["a."], ["a "], ["x./y"], ["a" * 256], ["txt.\u202eexe"], ["a\u200b"], ["a\ufeff"], ["\ud800"],
        ["a\u2028b"], ["a\xa0b"], ["a", "A"], ["a", "a"], ["a/b", "A"], ["a/b", "A/c"], ["a/b", "a/B"],
        ["\u00e4", "a\u0308"], ["stra\u00dfe", "STRASSE"], ["\u212a", "k"], ["a", "b/c", "B"],
    ],
)  # fmt: skip
def test_names_that_no_folder_may_get(names: list[str]) -> None:
    """They lead elsewhere, name a device, are the same on some file system, or are shown otherwise."""
    assert find_invalid_name(names) in names


def test_names_that_a_folder_may_get() -> None:
    """Of every alphabet, also those that begin like a device."""
    names = [
        "a/b.c",
        "a/c",
        "console",
        "com10",
        "aux-1.txt",
        "モデル.onnx",
        "modèle v2.onnx",
        ".hidden",
    ]
    assert find_invalid_name(names) is None
