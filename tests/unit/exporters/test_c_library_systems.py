"""`c-library` for other systems than Linux: what the files export and need; under Wine, Node, WASI and qemu what they compute."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.support import exports
from tests.support.binaries import read_macho, read_pe
from tests.support.exports import Attributes
from tests.support.recipes import ROOT
from tests.unit.exporters.c_programs import PROGRAM, WINE, share_of_right, write_images

pytestmark = pytest.mark.slow

WASM = Attributes("wasm32-wasi", {"mcpu": "generic", "mattr": ["+simd128"], "vector-width": 128})
# The machine that qemu emulates -> its target, and zig's name of its CPU.
BOARDS = {
    "mps2-an500": (
        Attributes("thumbv7em-none-eabihf", {"mcpu": "cortex-m7", "mfloat-abi": "hard"}),
        "cortex_m7+fp_armv8d16sp",
    ),
    "mps3-an547": (
        Attributes("thumbv8.1m.main-none-eabihf", {"mcpu": "cortex-m55", "mfloat-abi": "hard"}),
        "cortex_m55+fp_armv8d16sp",
    ),
}


HEADERS: Final = {"digits.h", "digits-images.h"}


def build(folder: Path, triple: str) -> Path:
    """The folder with the library and its header."""
    return (
        exports.make(folder / "digits", "digits", "c-library", triple=triple).dist
        / "digits-c-library"
    )


def functions(library: Path) -> set[str]:
    """The functions that the header declares."""
    header = (library / "digits.h").read_text()
    return set(re.findall(r"DIGITS_API [\w ]+?\*?(digits_\w+)\(", header))


@pytest.mark.parametrize(
    ("triple", "files"),
    [
        ("x86_64-pc-windows-msvc", {"digits.dll", "digits.lib", "digits_static.lib"}),
        ("aarch64-pc-windows-gnu", {"digits.dll", "libdigits.dll.a", "libdigits.a"}),
    ],
)
def test_windows(tmp_path: Path, triple: str, files: set[str]) -> None:
    """Programs see the header's functions alone, and nothing is needed but what every Windows has."""
    library = build(tmp_path, triple)
    assert {path.name for path in library.iterdir()} == files | HEADERS
    dll = read_pe(library / "digits.dll")
    assert set(dll.exports) == functions(library)
    # of ntdll.dll, only kernels for x86-64 need something
    own = {"ntdll.dll"} if triple.startswith("x86_64") else set()
    assert set(dll.imports) == {"kernel32.dll", "ucrtbase.dll"} | own


@pytest.mark.parametrize(
    "triple",
    ["arm64-apple-macos13", pytest.param("x86_64-apple-macos13", marks=pytest.mark.nightly)],
)
def test_macos(tmp_path: Path, triple: str) -> None:
    """A dylib under its own name that needs the system's library alone."""
    library = build(tmp_path, triple)
    files = {path.name for path in library.iterdir()}
    assert files == {"libdigits.dylib", "libdigits.a", *HEADERS}
    dylib = read_macho(library / "libdigits.dylib")
    assert (dylib.name, dylib.needed) == ("@rpath/libdigits.dylib", ("/usr/lib/libSystem.B.dylib",))
    of_linker = {"___dso_handle", "__mh_dylib_header"}
    assert dylib.exports - of_linker == {f"_{name}" for name in functions(library)}


def test_xcframework(tmp_path: Path) -> None:
    """Xcode finds a library for phones and one for simulators: objects of each name their own system alone."""
    dist = exports.make(
        tmp_path / "digits", "digits", "xcframework", triple="arm64-apple-ios13.0"
    ).dist
    framework = dist / "digits.xcframework"
    listed = plistlib.loads((framework / "Info.plist").read_bytes())["AvailableLibraries"]
    variants = {
        entry["LibraryIdentifier"]: entry.get("SupportedPlatformVariant") for entry in listed
    }
    assert variants == {"ios-arm64": None, "ios-arm64-simulator": "simulator"}
    # LC_BUILD_VERSION: the system (2: iOS, 7: its simulator) and the first version of it
    for folder, system in (("ios-arm64", (2, 13 << 16)), ("ios-arm64-simulator", (7, 14 << 16))):
        archive = (framework / folder / "libdigits.a").read_bytes()
        found = re.findall(rb"\x32\0\0\0[\x18-\x40]\0\0\0(.\0\0\0\0\0.\0)", archive, re.DOTALL)
        assert len(found) == archive.count(b"\xcf\xfa\xed\xfe") >= 3
        assert {struct.unpack("<II", version) for version in found} == {system}
        headers = framework / folder / "Headers/digits"
        assert (headers / "module.modulemap").read_text() == (
            'module DigitsModel {\n  header "digits.h"\n  export *\n}\n'
        )
        assert "digits_run(" in (headers / "digits.h").read_text()


@pytest.mark.skipif(WINE is None, reason="needs Wine")
@pytest.mark.parametrize("library", ["digits.dll", "libdigits.a"])
def test_a_program_for_windows_names_the_digits(tmp_path: Path, library: str) -> None:
    """With the DLL and with the static library, without TVM: 360 images under Wine."""
    folder = build(tmp_path, "x86_64-w64-windows-gnu")
    (folder / "main.c").write_text(PROGRAM)
    labels = write_images(folder)
    file = "libdigits.dll.a" if library == "digits.dll" else library
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]
    subprocess.run([*command, "main.c", file, "-o", "main.exe"], cwd=folder, check=True)
    environment = {**os.environ, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    done = subprocess.run(
        [str(WINE), "main.exe", "images"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert share_of_right(done.stdout, labels) >= 0.95


@pytest.fixture(scope="module")
def wasm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library for WebAssembly, with images."""
    folder = exports.link_c_library(tmp_path_factory.mktemp("wasm"), WASM)
    write_images(folder)
    return folder


NODE = """
import { load } from "./digits.js";
import { readFile } from "node:fs/promises";

const model = await load();
const { buffer, byteOffset, length } = await readFile("images");
const images = new Float32Array(buffer, byteOffset, length / 4);
for (let at = 0; at < images.length; at += 64) {
  const { softmax_output: scores } = model.run({ data: images.subarray(at, at + 64) });
  console.log(scores.indexOf(Math.max(...scores)));
}
const errors = [{}, { data: new Float32Array(63) }, { data: images.subarray(0, 64), more: 1 }].map((values) => {
  try {
    return model.run(values);
  } catch (error) {
    return error.message;
  }
});
model.destroy();
console.error(JSON.stringify([model.inputs, model.outputs, ...errors]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_javascript_names_the_digits(wasm: Path) -> None:
    """With tensors by name; wrong ones are refused with their names."""
    (wasm / "main.mjs").write_text(NODE)
    done = subprocess.run(
        ["node", "main.mjs"], cwd=wasm, capture_output=True, text=True, check=True
    )
    assert share_of_right(done.stdout, write_images(wasm)) >= 0.95
    lines = done.stderr.splitlines()
    assert json.loads(lines[-1]) == [
        [{"name": "data", "dtype": "float32", "shape": [1, 1, 8, 8], "bytes": 256}],
        [{"name": "softmax_output", "dtype": "float32", "shape": [1, 10], "bytes": 40}],
        "input data must be a Float32Array of 64 elements",
        "input data must be a Float32Array of 64 elements",
        "the model has no input more",
    ]


def test_wasi_names_the_digits(wasm: Path) -> None:
    """Under a runtime that is not a browser's; the module needs its clock alone."""
    wasmtime = pytest.importorskip("wasmtime")
    store = wasmtime.Store(wasmtime.Engine())
    store.set_wasi(wasmtime.WasiConfig())
    linker = wasmtime.Linker(store.engine)
    linker.define_wasi()
    module = wasmtime.Module.from_file(store.engine, str(wasm / "digits.wasm"))
    assert [item.name for item in module.imports] == ["clock_time_get"]
    exported = linker.instantiate(store, module).exports(store)
    memory = exported["memory"]

    def call(name: str, *arguments: int) -> int:
        return int(exported[name](store, *arguments))

    exported["_initialize"](store)
    place = call("malloc", 1024)
    assert call("digits_create", 0, place) == 0
    context = int.from_bytes(memory.read(store, place, place + 4), "little")
    data, scores, buffers = place + 64, place + 512, place + 8
    memory.write(store, struct.pack("<4I", data, 256, scores, 40), buffers)
    images, labels = exports.held_out()
    named = []
    for image in images.astype("float32"):
        memory.write(store, image.tobytes(), data)
        assert call("digits_run", context, buffers, 1, buffers + 8, 1) == 0
        values = memory.read(store, scores, scores + 40)
        named.append(int(np.frombuffer(values, "float32").argmax()))
    assert call("digits_destroy", context) == 0
    assert float(np.mean(np.array(named) == labels)) >= 0.95


def test_ios(tmp_path: Path) -> None:
    """A static library whose objects are for iOS; it has not been run."""
    library = exports.link_c_library(tmp_path, Attributes("arm64-apple-ios13.0", {}))
    assert {path.name for path in library.iterdir()} == {"libdigits.a", "digits.h"}
    content = (library / "libdigits.a").read_bytes()
    # LC_BUILD_VERSION, its size, iOS
    versions = re.findall(rb"\x32\0\0\0\x18\0\0\0(.)\0\0\0", content)
    assert len(versions) >= 3 and set(versions) == {b"\x02"}


@pytest.mark.skipif(shutil.which("qemu-system-arm") is None, reason="needs qemu-system-arm")
@pytest.mark.parametrize(
    ("board", "weights"), [*((board, []) for board in BOARDS), ("mps2-an500", ["digits.weights"])]
)
def test_a_microcontroller_names_the_digits(tmp_path: Path, board: str, weights: list[str]) -> None:
    """Without a system, a heap and a C library: 360 images, in memory of the size that the header has."""
    target, cpu = BOARDS[board]
    library = exports.link_c_library(tmp_path, target, is_without_weights=bool(weights))
    assert {path.name for path in library.iterdir()} == {"libdigits.a", "digits.h", *weights}
    labels = write_images(library)
    for file in (ROOT / "tests" / "support" / "microcontroller").iterdir():
        shutil.copyfile(file, library / file.name)
    options = ["-target", "thumb-freestanding-eabihf", f"-mcpu={cpu}", "-O", "ReleaseSmall"]
    options += ["-fcompiler-rt", "-fstrip", "-fentry=start", "-I.", "-T", "link.ld"]
    # the file of the weights is part of the program, and stays in flash
    options += ["-DWEIGHTS"] if weights else []
    files = ["main.c", "libdigits.a", "-femit-bin=digits.elf"]
    command = [sys.executable, "-m", "ziglang", "build-exe", *options, *files]
    subprocess.run(command, cwd=library, check=True)
    devices = ["-nographic", "-monitor", "none", "-serial", "none"]
    host = ["-semihosting-config", "enable=on,target=native"]
    done = subprocess.run(
        ["qemu-system-arm", "-M", board, *devices, *host, "-kernel", "digits.elf"],
        cwd=library,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    *named, last = (done.stdout + done.stderr).splitlines()
    assert last == "done"
    assert share_of_right("\n".join(named), labels) >= 0.95
