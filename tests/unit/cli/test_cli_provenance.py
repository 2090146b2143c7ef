"""`inspect`, `verify`, `sign` and `keygen` on the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.provenance import MODEL, TRIAL, World, describe
from tvmflow.cli import main
from tvmflow.cli.provenance import _format_findings
from tvmflow.core import signing
from tvmflow.runtime.bundles import LIBRARY_FORMAT
from tvmflow.runtime.statements import Finding, SignedStatement


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = World(tmp_path_factory.mktemp("world"))
    world.deliver()
    return world.folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "host"))


class Command:
    """Runs commands; `out` and `err` are the output of the last one."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str | Path) -> int:
        code = main.main([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        assert "bug in tvmflow" not in self.err
        return code

    def json(self, *arguments: str | Path) -> Any:
        self(*arguments, "--json")
        return json.loads(self.out)


@pytest.fixture
def tvmflow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in (signing.KEY_VARIABLE, signing.TRUSTED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return Command(capsys)


def test_a_folder_is_signed_with_a_new_key_and_verified(
    tvmflow: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed file is named, and the exit code is 3."""
    key = tmp_path / "keys" / "release"
    assert tvmflow("keygen", key) == 0
    public = signing.load_public_keys(key.with_name("release.pub"))[0]
    assert public.id in tvmflow.out and f"TVMFLOW_SIGNING_KEY={key}" in tvmflow.out
    assert tvmflow("keygen", key) == 2

    assert tvmflow("verify", folder, "--trusted", key.parent) == 3
    assert "it is not signed" in tvmflow.out
    assert tvmflow("sign", folder, "--key", key) == 0
    assert tvmflow("verify", folder, "--trusted", key.parent) == 0
    assert "9 of 9 are good, signed by" in tvmflow.out
    monkeypatch.setenv(signing.TRUSTED_VARIABLE, str(key.with_name("release.pub")))
    monkeypatch.setenv(signing.KEY_VARIABLE, str(key))
    before = (folder / "net.intoto.jsonl").read_bytes()
    assert tvmflow("sign", folder) == 0
    assert (folder / "net.intoto.jsonl").read_bytes() == before

    (folder / "net.so").write_bytes(b"evil")
    assert tvmflow("verify", folder / "net.tvmflow", folder / "net.so") == 3
    assert "1 of 2 are good" in tvmflow.out
    result = tvmflow.json("verify", folder)
    assert not result["good"]
    (bad,) = [file for file in result["files"] if not file["good"]]
    assert bad["path"] == str(folder / "net.so")
    assert bad["trusted"] == [public.id]


def test_a_bundle_is_shown_with_its_content_and_its_lineage(tvmflow: Command, folder: Path) -> None:
    assert tvmflow("inspect", folder / "net.tvmflow") == 0
    for text in (
        "net.tvmflow: a bundle",
        "inputs     x float32[1, 3]",
        "net.intoto.jsonl, not signed",
        f"source     model  {MODEL}",
        "passed against ONNX Runtime 1.0, accuracy 0.9700, largest error 1e-07, 20 µs per call",
        "kernels    3 (2 tuned)",
        f"trial {TRIAL.id[:12]}",
        "2026-01-02T03:04:05",
        "untuned 3 µs",
        "as delivered, not signed",
    ):
        assert text in tvmflow.out
    about = tvmflow.json("inspect", folder / "net.tvmflow")
    assert about["content"]["model"].keys() == {"ir_sha256", "weights_sha256"}
    assert about["provenance"]["kernels"][0]["record"]["trial"] == TRIAL.id


def write_bundle(path: Path, **changes: Any) -> Path:
    inputs = [{"name": name, "shape": [1, 3, 224, 224], "dtype": "float32"} for name in ("a", "b")]
    files = {
        "signature.json": json.dumps({"inputs": inputs, "outputs": []}).encode(),
        "library.so": b"x",
    }
    manifest = {
        "bundle": LIBRARY_FORMAT,
        "name": "net",
        "version": "0",
        "library": "library.so",
        "target": {"name": "host"},
        "files": describe(files),
        **changes,
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_what_becomes_of_an_image_is_shown(tvmflow: Command, tmp_path: Path) -> None:
    """For each input that takes images, with the names of the classes; programs get all of it as JSON."""
    images = {
        "a": {"resize": 256, "crop": 224, "mean": [0.485, 0.456, 0.406], "std": [0.2, 0.3, 0.4]},
        "b": {"pad": 114, "colour": "BGR", "scale": 1, "std": 127.5},
    }
    labels = {"names": list("zyxwvut"), "activation": "softmax", "sha256": "ab" * 32}
    bundle = write_bundle(tmp_path / "net.tvmflow", images=images, labels=labels)
    tvmflow("inspect", bundle)
    assert [
        line for line in tvmflow.out.splitlines() if line.startswith(("  image", "  labels"))
    ] == [
        "  image      a: shorter side resized to 256 (bilinear), center crop 224x224, RGB in NCHW",
        "  image      a: (level / 255 - [0.485, 0.456, 0.406]) / [0.2, 0.3, 0.4]",
        "  image      b: resized to 224x224 (bilinear), with bars of level 114, BGR in NCHW",
        "  image      b: level / 127.5",
        "  labels     7 classes: z, y, x, w, v and 2 more",
    ]
    content = tvmflow.json("inspect", bundle)["content"]
    assert content["labels"] == labels
    assert content["images"]["b"]["std"] == [127.5] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("images", {"c": {}}),
        ("images", {"a": {"resize": -1}}),
        ("images", {"a": 3}),
        ("images", []),
        ("labels", {"names": "zero"}),
        ("labels", 3),
    ],
)
def test_damaged_preprocessing_is_shown_as_bad(
    tvmflow: Command, tmp_path: Path, field: str, value: Any
) -> None:
    tvmflow("inspect", write_bundle(tmp_path / "net.tvmflow", **{field: value}))
    assert "BAD        its preprocessing or its labels are damaged: " in tvmflow.out


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("net.so", "a shared library"),
        ("verify.json", "a verdict"),
        ("measurements.json", "a verdict"),
        ("net.cdx.json", "a bill of materials, CycloneDX 1.6"),
        ("net.intoto.jsonl", "statements of provenance"),
        ("roofline.svg", "a file"),
    ],
)
def test_every_other_file_is_recognized_by_its_digest(
    tvmflow: Command, folder: Path, name: str, kind: str
) -> None:
    assert tvmflow("inspect", folder / name) == 0
    assert f"{name}: {kind}" in tvmflow.out and "about      net for host" in tvmflow.out
    assert tvmflow.json("inspect", folder / name)["path"] == str(folder / name)


def test_a_folder_is_shown_by_its_statements(tvmflow: Command, folder: Path) -> None:
    assert tvmflow("inspect", folder.parent) == 0
    assert "net.so" in tvmflow.out and "about      net for host" in tvmflow.out


def test_a_moved_file_is_shown_with_the_statement_of_the_option(
    tvmflow: Command, folder: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / "model.so"
    moved.parent.mkdir()
    shutil.copy(folder / "net.so", moved)
    assert tvmflow("inspect", moved, "--provenance", folder / "net.intoto.jsonl") == 0
    assert "delivered as net.so, not signed" in tvmflow.out
    assert tvmflow("verify", moved, "--provenance", folder / "net.intoto.jsonl") == 0


def test_a_changed_file_is_shown_as_bad(tvmflow: Command, folder: Path) -> None:
    (folder / "net.so").write_bytes(b"\x7fELF evil")
    assert tvmflow("inspect", folder / "net.so") == 0
    assert "BAD        it is not the file that was delivered" in tvmflow.out


def test_files_of_others_are_errors(tvmflow: Command, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.so"
    stranger.write_bytes(b"\x7fELF stranger")
    assert tvmflow("inspect", stranger) == 2
    assert "is a shared library or an object file (ELF), and no statement" in tvmflow.err
    torn = tmp_path / "torn.tvmflow"
    torn.write_bytes(b"PK\x03\x04torn")
    assert tvmflow("inspect", torn) == 2
    assert "it is damaged" in tvmflow.err
    (tmp_path / "x.json").write_text("[" * 100_000)
    assert tvmflow("inspect", tmp_path / "x.json") == 2
    for command in ("inspect", "verify"):
        assert tvmflow(command, tmp_path / "nothing") == 2
        assert "there is no file" in tvmflow.err
    os.mkfifo(tmp_path / "pipe.so")
    assert tvmflow("inspect", tmp_path / "pipe.so") == 2
    assert "is not a file" in tvmflow.err
    (tmp_path / "empty").mkdir()
    assert tvmflow("inspect", tmp_path / "empty") == 2
    assert "holds no statement of provenance" in tvmflow.err


def test_control_characters_in_names_do_not_reach_the_terminal(
    tvmflow: Command, folder: Path
) -> None:
    (folder / "evil\x1b[2J\n.so").write_bytes(b"x")
    assert tvmflow("verify", folder) == 3
    assert "\x1b" not in tvmflow.out
    assert len(tvmflow.out.splitlines()) == 11


def test_only_statements_can_be_signed(tvmflow: Command, tmp_path: Path, folder: Path) -> None:
    signing.generate_key(tmp_path / "key")
    path = tmp_path / "any.intoto.jsonl"
    path.write_text("{}")
    assert tvmflow("sign", path, "--key", tmp_path / "key") == 2
    assert "holds no statement that can be signed: it is not an envelope" in tvmflow.err
    path.write_text("")
    assert tvmflow("sign", path, "--key", tmp_path / "key") == 2
    assert tvmflow("sign", folder) == 2
    assert "there is no key to sign with" in tvmflow.err


def test_an_unusable_signing_key_is_reported_before_the_run(
    tvmflow: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(signing.KEY_VARIABLE, str(tmp_path / "nobody"))
    assert tvmflow("run", tmp_path / "no-recipe.yaml", "--store", tmp_path / "store") == 2
    assert "there is no key" in tvmflow.err


def test_inspect_and_verify_import_no_framework(folder: Path) -> None:
    heavy = ("tvm", "tvm_ffi", "numpy", "onnx", "mxnet", "torch", "doit")
    code = (
        "import sys; from tvmflow.cli import main as cli; "
        f"assert cli.main(['verify', {str(folder)!r}]) == cli.main(['inspect', {str(folder / 'net.tvmflow')!r}]) == 0; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_the_same_of_all_files_is_said_once(tmp_path: Path) -> None:
    """That nobody has checked the signature, and whose it is."""
    assert main.main(["keygen", str(tmp_path / "key"), "-q"]) == 0
    (key,) = signing.load_public_keys(tmp_path / "key.pub")
    unchecked = SignedStatement(tmp_path, None, ("b" * 64,), ())
    trusted = unchecked._replace(trusted=(key,))
    for signed in (unchecked, trusted):
        findings = [
            Finding(Path(f"{n}.so"), True, f"as delivered, {signed.signature}", signed)
            for n in range(26)
        ]
        lines = list(_format_findings(findings))
        assert lines[0] == "ok   0.so   as delivered"
        assert lines[-1] == f"26 of 26 are good, {signed.signature}"
        assert "\n".join(lines).count(signed.signature) == 1
    mixed = [
        Finding(Path("a.so"), True, f"as delivered, {signed.signature}", signed)
        for signed in (unchecked, trusted)
    ]
    assert "not checked" in next(iter(_format_findings(mixed)))
