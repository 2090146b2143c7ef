"""`wheel`: pip takes it, and what it installs runs without tvmflow."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.support import exports
from tests.support.exports import MODELS, VERSION, Exported
from tests.support.validation import check_bom
from tvmflow.exporters import wheel
from tvmflow.exporters.exporter import BuiltModel, ExportRequest
from tvmflow.runtime.bundles import read_bundle
from tvmflow.targets.tvm_target import cpu_triple

# Stands before everything else in a process that must do without tvmflow.
_NO_TVMFLOW = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tvmflow":
            raise ModuleNotFoundError(f"tvmflow is not installed: {name}")

sys.meta_path.insert(0, Refuse())
"""


def request_for(
    name: str = "digits", triple: str = "x86_64-linux-gnu", kind: str = "llvm"
) -> ExportRequest:
    return ExportRequest(name, VERSION, "host", kind, triple)


@pytest.fixture(scope="module")
def file(exported: Exported) -> Path:
    (path,) = exported.dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(file, tmp_path_factory.mktemp("site"))


def install(file: Path, folder: Path) -> Path:
    """The wheel unpacked, as an installer does, with tvmflow made impossible to import."""
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    (folder / "sitecustomize.py").write_text(_NO_TVMFLOW)
    return folder


def python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=site,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bill_of_materials_is_inside(file: Path) -> None:
    """Where PEP 770 puts it: every file with its digest, and the runtime that is copied."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if "/sboms/" in name)
        assert re.fullmatch(r"digits_model-[\d.]+\.dist-info/sboms/digits\.cdx\.json", name)
        text = archive.read(name).decode()
        document = json.loads(text)
        model, (runtime,) = document["metadata"]["component"], document["components"]
        listed = {
            entry["name"]: entry["hashes"][0]["content"]
            for entry in (*model["components"], *runtime["components"])
        }
        packaged = {entry for entry in archive.namelist() if ".dist-info/" not in entry}
        assert listed.keys() == packaged
        for entry, digest in listed.items():
            assert hashlib.sha256(archive.read(entry)).hexdigest() == digest
    assert model["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    assert runtime["purl"].startswith("pkg:pypi/tvmflow@")
    assert runtime["licenses"] == [{"expression": "Apache-2.0"}]
    check_bom(text)


def test_the_record_has_every_file_and_its_digest(file: Path) -> None:
    """As pip checks it: base64 of the sha256, and the size."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        (record,) = (name for name in names if name.endswith("/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert [row[0] for row in rows] == names
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            assert (digest, int(size)) == (f"sha256={encoded.rstrip('=')}", len(content))
        assert rows[-1] == [record, "", ""]


def test_it_requires_numpy_alone(file: Path) -> None:
    """Its library needs nothing of TVM; Pillow, for files of images, is an extra."""
    assert fields_of(file) == [
        "Name: digits-model",
        f"Version: {VERSION}",
        "Requires-Dist: numpy >=1.26",
        'Requires-Dist: pillow >=9.5; extra == "images"',
    ]


def fields_of(file: Path) -> list[str]:
    """The name, the version and the requirements of a wheel."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    fields = metadata.partition("\n\n")[0].splitlines()
    return [f for f in fields if f.startswith(("Name", "Version", "Requires-Dist"))]


def test_with_the_virtual_machine_it_requires_its_tvm(vm_bundle: Path, tmp_path: Path) -> None:
    """The minor version that the library was built with; the runtime's modules are inside, and it runs."""
    content = read_bundle(vm_bundle)
    manifest = {**content.manifest, "tvmflow": "0.1"}
    request = request_for("small")._replace(triple=cpu_triple(manifest["target"]["tvm"]))
    wheel.export(
        BuiltModel(request, vm_bundle, {}, content.signature, manifest, vm_bundle, {}), tmp_path
    )
    (file,) = tmp_path.glob("*.whl")
    minor = ".".join(manifest["tvm"].split(".")[:2])
    assert fields_of(file) == [
        "Name: small-model",
        f"Version: {VERSION}",
        f"Requires-Dist: apache-tvm =={minor}.*",
        "Requires-Dist: numpy >=1.26",
    ]
    code = (
        "import sys, numpy as np, small_model as m\n"
        "print((m.run(np.ones((2, 3), 'float32'))['twice'] == 2).all())\n"
        "print([name for name in ('tvmflow', 'tvm') if name in sys.modules])\n"
    )
    done = python(install(file, tmp_path / "site"), "-c", code)
    assert (done.stdout.splitlines(), done.returncode) == (["True", "[]"], 0), done.stderr


def test_it_runs_without_tvmflow(site: Path, exported: Exported) -> None:
    """Load, signature, run; neither tvmflow nor the compiler is imported."""
    np.save(site / "images.npy", exports.held_out()[0])
    code = (
        "import sys, numpy as np, digits_model as d\n"
        "model = d.load()\n"
        "print(model, [s.name for s in model.inputs], model.outputs[0].shape, model.manifest['version'])\n"
        "images = np.load('images.npy')\n"
        "outputs = [model.run({'data': x[None]})['softmax_output'] for x in images]\n"
        "np.save('scores.npy', np.concatenate(outputs))\n"
        "assert (d.run({'data': images[:1]})['softmax_output'] == outputs[0]).all()\n"
        "try:\n    d.run({})\nexcept d.BundleError as error:\n    print(error.message)\n"
        "print([name for name in ('tvmflow', 'tvm', 'tvm_ffi', 'safetensors') if name in sys.modules])\n"
    )
    done = python(site, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "digits (data: float32[1, 1, 8, 8]) -> (softmax_output: float32[1, 10])"
        f" ['data'] (1, 10) {VERSION}",
        "input 'data' is missing",
        "[]",
    ]
    np.testing.assert_array_equal(np.load(site / "scores.npy"), exports.reference(exported))


def test_it_is_a_command_too(site: Path, exported: Exported) -> None:
    """`python -m`: several images in one array; mistakes are messages with an exit code."""
    images, labels = exports.held_out()
    np.savez(site / "in.npz", data=images, label=labels)
    done = python(site, "-m", "digits_model", "in.npz", "out.npz")
    assert (done.returncode, done.stderr) == (0, "")
    with np.load(site / "out.npz") as archive:
        np.testing.assert_array_equal(archive["softmax_output"], exports.reference(exported))
    np.savez(site / "bad.npz", data=images[0, 0])
    (site / "torn.npz").write_bytes(b"PK\x03\x04")
    for words, code, sentence in (
        ((), 2, "usage: python -m digits_model input.npz output.npz"),
        (("bad.npz", "out.npz"), 1, "'data' has shape (8, 8), the model takes (1, 1, 8, 8)"),
        (("gone.npz", "out.npz"), 1, "there is no file gone.npz"),
        (("in.npz", "no/out.npz"), 1, "no/out.npz cannot be written: No such file or directory"),
        (("torn.npz", "out.npz"), 1, "torn.npz is not an npz file"),
    ):
        done = python(site, "-m", "digits_model", *words)
        assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr


def test_as_a_command_it_names_the_digits_in_images(site: Path) -> None:
    """With their probabilities; a file that is not an image is a message."""
    seven = MODELS / "digits-images/seven/0.png"
    done = python(site, "-m", "digits_model", str(seven))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "probabilities: the output 'softmax_output'",
        f"{seven}:",
        "  100.00%  seven",
    ]
    done = python(site, "-m", "digits_model", "gone.png")
    assert done.returncode == 1 and "there is no file gone.png" in done.stderr
    program = "import digits_model as m; print(m.load().labels[7], m.load().images['data'].size)"
    assert python(site, "-c", program).stdout == "seven (8, 8)\n"


def test_as_a_command_it_runs_part_of_a_batch_and_writes_an_output_called_file(
    site: Path, file_bundle: Path, tmp_path: Path
) -> None:
    """What fills up the last batch is not among the outputs, whatever these are called."""
    shutil.copytree(site, tmp_path / "site")
    shutil.copyfile(file_bundle, tmp_path / "site/digits_model/model.tvmflow")
    x = np.arange(15, dtype="float32").reshape(5, 3)
    np.savez(tmp_path / "site/x.npz", x=x)
    done = python(tmp_path / "site", "-m", "digits_model", "x.npz", "y.npz")
    assert (done.returncode, done.stderr) == (0, "")
    with np.load(tmp_path / "site/y.npz") as outputs:
        np.testing.assert_array_equal(outputs["file"], x + 1)
        np.testing.assert_array_equal(outputs["twice"], x * 2)


def test_its_errors_bear_the_name_of_the_package(site: Path) -> None:
    """A program catches `Error`; the text says what the model takes, and no module of the copied runtime."""
    program = "import digits_model as m\ntry: m.run({'date': 1})\nexcept m.Error as e: print(m.load())\nm.run([])"
    done = python(site, "-c", program)
    shown = "digits (data: float32[1, 1, 8, 8]) -> (softmax_output: float32[1, 10])"
    assert done.stdout == f"{shown}\n"
    [text] = re.findall(r"^digits_model\.BundleError: .*\n.*", done.stderr, re.MULTILINE)
    assert text.endswith(f"this model takes {shown}") and "_tvmflow" not in text


def test_it_has_the_modules_that_its_runtime_imports_when_they_are_used() -> None:
    """`Model.session` imports that of sessions, which wheels once lacked."""
    copied = {
        path.relative_to(wheel.PACKAGE).as_posix() for path in wheel.list_modules(for_vm=True)
    }
    imports = re.compile(r"^\s+from tvmflow\.(runtime\.\w+) import", re.MULTILINE)
    for path in (wheel.PACKAGE / name for name in copied if name.startswith("runtime/")):
        for module in imports.findall(path.read_text()):
            assert f"{module.replace('.', '/')}.py" in copied, path


def test_nothing_in_it_imports_tvmflow(site: Path) -> None:
    """The wheel has every module that its modules import: a new dependency of the runtime must be added to `_COPIED`."""
    for module in (site / "digits_model").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) tvmflow\b", module.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("triple", "tag"),
    [
        ("x86_64-linux-gnu", "manylinux_2_27_x86_64"),
        ("aarch64-linux-gnu", "manylinux_2_27_aarch64"),
        ("armv7a-linux-gnueabihf", "manylinux_2_27_armv7l"),
        ("aarch64-linux-musl", "musllinux_1_2_aarch64"),
        ("arm64-apple-macos13", "macosx_11_0_arm64"),
        ("x86_64-pc-windows-msvc", "win_amd64"),
    ],
)
def test_its_name_says_where_it_installs(triple: str, tag: str) -> None:
    """As Python's packaging tags platforms."""
    assert wheel.files(request_for(triple=triple)) == (
        f"digits_model-{VERSION}-py3-none-{tag}.whl",
    )


@pytest.mark.parametrize(
    ("name", "module", "stem"),
    [
        ("res-net.2", "res_net_2_model", "res_net_2_model"),
        ("3d", "m3d_model", "m3d_model"),
        ("a--b", "a__b_model", "a_b_model"),
    ],
)
def test_a_name_becomes_a_module(name: str, module: str, stem: str) -> None:
    """Importable, and in the file's name as pip spells it."""
    assert wheel.module_name(name) == module
    assert module.isidentifier()
    assert wheel.files(request_for(name))[0].startswith(f"{stem}-{VERSION}-py3-")


def test_platforms_without_wheels_are_named() -> None:
    """Python has no name for them."""
    assert wheel.unsupported_reason(request_for(triple="wasm32-unknown-emscripten")) == (
        "there are no wheels for 'wasm32-unknown-emscripten'"
    )
    assert wheel.unsupported_reason(request_for(kind="metal")) == (
        "its kind is metal, not llvm or cuda or opencl"
    )
    assert wheel.unsupported_reason(request_for(kind="cuda")) == ""
    assert wheel.unsupported_reason(request_for()) == ""


@pytest.mark.slow
def test_pip_installs_it(file: Path, site: Path, tmp_path: Path) -> None:
    """Into a folder of its own, beside the TVM that is there; and takes it away again without a word missing."""
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--no-index"]
    done = subprocess.run(
        [*install, "--target", str(tmp_path), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "sitecustomize.py").write_text(_NO_TVMFLOW)
    np.savez(tmp_path / "in.npz", data=exports.held_out()[0])
    done = python(tmp_path, "-m", "digits_model", "in.npz", "out.npz")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as archive:
        assert exports.accuracy(archive["softmax_output"]) >= 0.95
    shown = python(
        tmp_path, "-c", "import importlib.metadata as m; print(m.version('digits-model'))"
    )
    assert shown.stdout.strip() == VERSION


def test_every_module_that_the_loader_imports_is_in_a_wheel() -> None:
    """What its modules import at their beginning is copied, and what that imports."""
    package = Path(wheel.__file__).parent.parent
    reached, queue = set(), [package / "runtime" / "loading.py", package / "runtime" / "samples.py"]
    while queue:
        path = queue.pop()
        if path in reached:
            continue
        reached.add(path)
        for name in re.findall(r"^from tvmflow\.([\w.]+) import", path.read_text(), re.MULTILINE):
            module = package / name.replace(".", "/")
            queue.append(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"))
    assert sorted(reached - set(wheel.SOURCES)) == []
    assert package / "core" / "signing.py" in reached
