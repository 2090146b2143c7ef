"""`c-library` for other systems than Linux: what the files export and need, and the DLL under Wine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import exports
from tests.support.binaries import read_macho, read_pe
from tests.unit.exporters.test_c_library import PROGRAM

pytestmark = pytest.mark.slow

WINE = shutil.which("wine64", path=os.pathsep.join((os.environ["PATH"], "/usr/lib/wine")))


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
        ("x86_64-pc-windows-msvc", {"digits.dll", "digits.lib", "digits_static.lib", "digits.h"}),
        ("aarch64-pc-windows-gnu", {"digits.dll", "libdigits.dll.a", "libdigits.a", "digits.h"}),
    ],
)
def test_windows(tmp_path: Path, triple: str, files: set[str]) -> None:
    """Programs see the header's functions alone, and nothing is needed but what every Windows has."""
    library = build(tmp_path, triple)
    assert {path.name for path in library.iterdir()} == files
    dll = read_pe(library / "digits.dll")
    assert set(dll.exports) == functions(library)
    assert set(dll.imports) == {"kernel32.dll", "ntdll.dll", "ucrtbase.dll"}


@pytest.mark.parametrize("triple", ["arm64-apple-macos13", "x86_64-apple-macos13"])
def test_macos(tmp_path: Path, triple: str) -> None:
    """A dylib under its own name that needs the system's library alone."""
    library = build(tmp_path, triple)
    assert {path.name for path in library.iterdir()} == {
        "libdigits.dylib",
        "libdigits.a",
        "digits.h",
    }
    dylib = read_macho(library / "libdigits.dylib")
    assert (dylib.name, dylib.needed) == ("@rpath/libdigits.dylib", ("/usr/lib/libSystem.B.dylib",))
    listed = {name[1:] for name in dylib.exports if name.startswith("_digits")}
    assert listed == functions(library)


@pytest.mark.skipif(WINE is None, reason="needs Wine")
@pytest.mark.parametrize("library", ["digits.dll", "libdigits.a"])
def test_a_program_for_windows_names_the_digits(tmp_path: Path, library: str) -> None:
    """With the DLL and with the static library, without TVM: 360 images under Wine."""
    folder = build(tmp_path, "x86_64-w64-windows-gnu")
    images, labels = exports.held_out()
    (folder / "main.c").write_text(PROGRAM)
    (folder / "images").write_bytes(images.astype("float32").tobytes())
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
    named = np.array(list(map(int, done.stdout.split())))
    assert float(np.mean(named == labels)) >= 0.95
