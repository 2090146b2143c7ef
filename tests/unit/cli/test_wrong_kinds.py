"""A file of the wrong kind, for every command that takes files: what it is, and what to do with it."""

from __future__ import annotations

import gzip
import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tvmflow.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "recipes" / "models"

FIXES = {
    "ONNX model": "`tvmflow build {path}`",
    "TFLite model": "`tvmflow init {path}`",
    "symbol of an MXNet checkpoint": "`tvmflow build {path}`",
    "archive of torch.export": "`tvmflow build {path}`",
    "recipe": "`tvmflow run {path}`",
    "pipeline": "`tvmflow run {path}`",
    "lock file": "--locked --lock {path}",
    "bundle": "`tvmflow run-model {path}`",
    "wheel": "`pip install {path}`",
    "shared library": "`tvmflow inspect {path}`",
    "trial pack": "`tvmflow records import {path}`",
    "compressed archive": "unpack it",
    "statement of provenance": "`tvmflow inspect {path}`",
    "has arrays (npz)": "`tvmflow run-model BUNDLE {path}`",
    "pickle of PyTorch": "torch.export.save",
    "pointer of Git LFS": "`git lfs pull`",
    "web page": "download the file itself",
    "image": "`tvmflow run-model BUNDLE {path}`",
}
"""What a message calls a kind of file -> a part of its remedy."""

COMMANDS = {
    "run": (["run", "{path}"], {"recipe", "pipeline"}),
    "plan": (["plan", "{path}"], {"recipe", "pipeline"}),
    "explain": (["explain", "{path}", "build"], {"recipe", "pipeline"}),
    "lock": (["lock", "{path}"], {"recipe", "pipeline"}),
    "cache pull": (["cache", "pull", "--remote", "/tmp/none", "{path}"], {"recipe", "pipeline"}),
    "run --pipeline": (["run", "good.yaml", "--pipeline", "{path}"], {"pipeline"}),
    "run --lock": (["run", "good.yaml", "--locked", "--lock", "{path}"], {"lock file"}),
    "diff": (["diff", "{path}", "{path}"], {"lock file"}),
    "run-model": (["run-model", "{path}"], {"bundle"}),
    "run-model --input": (
        ["run-model", "good.tvmflow", "--input", "{path}"],
        {"has arrays (npz)", "image"},
    ),
    "records import": (["records", "import", "{path}"], {"trial pack", "lock file"}),
}
"""The command line of each command that takes a file of one kind, and the kinds that it takes."""

SIDECAR_COMMANDS = ("inspect", "verify", "sign")
"""Commands about delivered files, of which there are many kinds."""


def write_zip(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")


def write(kind: str, folder: Path) -> str:
    """Write a file of a kind and return its name."""
    text = {
        "recipe": "# a network\nname: net\nrecipe: 1\n",
        "pipeline": "pipeline: 1\nname: all\n",
        "lock file": "lock: 1\nmachine: x\n",
        "statement of provenance": '{"payload":"e30=","payloadType":"x"}\n',
        "pointer of Git LFS": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "web page": "\n<!DOCTYPE html><html>",
    }
    names = {
        "archive of torch.export": ["net/models/model.json"],
        "wheel": ["net-1.dist-info/WHEEL"],
    }
    content = {
        "TFLite model": b"\x1c\0\0\0TFL3",
        "shared library": b"\x7fELF\x02\x01",
        "trial pack": gzip.compress(b'{"digest":"0","format":"tvmflow records"}\n'),
        "compressed archive": gzip.compress(b"x"),
        "pickle of PyTorch": b"\x80\x02}q\0.",
        "image": b"\x89PNG\r\n",
    }
    copies = {
        "ONNX model": MODELS / "digits.onnx",
        "symbol of an MXNet checkpoint": MODELS / "digits-symbol.json",
        "bundle": folder / "good.tvmflow",
    }
    path = folder / "file"
    if kind in text:
        path.write_text(text[kind])
    elif kind in names:
        write_zip(path, *names[kind])
    elif kind in content:
        path.write_bytes(content[kind])
    elif kind in copies:
        shutil.copy(copies[kind], path)
    else:
        buffer = io.BytesIO()
        np.savez(buffer, x=np.zeros(1))
        path.write_bytes(buffer.getvalue())
    return path.name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bundle: Path) -> Path:
    """The current folder, with a recipe and a bundle that are good."""
    shutil.copy(small_bundle, tmp_path / "good.tvmflow")
    model = MODELS / "digits.onnx"
    (tmp_path / "good.yaml").write_text(f"recipe: 1\nname: good\nmodel: {{onnx: {model}}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Tried = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Tried:
    """Run a command that must end with exit code 2, and return its message."""

    def run(words: list[str]) -> str:
        code = main(words)
        message = capsys.readouterr().err
        assert code == 2, message
        return message

    return run


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FIXES)
def test_every_command_names_a_file_of_the_wrong_kind(
    folder: Path, refused: Tried, command: str, kind: str
) -> None:
    """By its content: its name says nothing here."""
    words, taken = COMMANDS[command]
    name = write(kind, folder)
    if kind in taken:
        return
    message = refused([word.format(path=name) for word in words])
    assert f"{name} " in message and kind in message
    assert " is expected here" in message
    assert (
        f"fix: {FIXES[kind].format(path=name)}" in message
        or FIXES[kind].format(path=name) in message
    )


@pytest.mark.parametrize("command", SIDECAR_COMMANDS)
@pytest.mark.parametrize("kind", ["ONNX model", "recipe", "pipeline"])
def test_what_is_not_delivered_has_no_statement(
    folder: Path, refused: Tried, command: str, kind: str
) -> None:
    """The commands about delivered files say what to do with a model or a recipe."""
    name = write(kind, folder)
    message = refused([command, name, *(["--key", "k"] if command == "sign" else [])])
    if command != "sign":
        assert kind in message and FIXES[kind].format(path=name) in message


def test_a_model_is_known_by_its_name_where_its_content_does_not_tell(
    folder: Path, refused: Tried
) -> None:
    """A damaged model is still no recipe."""
    (folder / "net.onnx").write_bytes(b"\xff\xfe\0damaged")
    assert "net.onnx is an ONNX model; a recipe is expected here" in refused(["run", "net.onnx"])


def test_a_recipe_with_mistakes_is_still_a_recipe(folder: Path, refused: Tried) -> None:
    """Its mistakes are reported, not its kind."""
    (folder / "r.yaml").write_text("recipe: 1\nname: BAD\n")
    assert "r.yaml:2:7: name:" in refused(["run", "r.yaml"])
