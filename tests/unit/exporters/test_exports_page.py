"""docs/exports.md: its examples work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import tvmflow
from tests.support import exports, pages
from tests.support.exports import Exported, package_folder
from tests.support.pages import Block, commands
from tests.support.recipes import ROOT
from tvmflow.exporters import EXPORTERS
from tvmflow.stages import export

PATH = Path("docs/exports.md")
PAGE = (ROOT / PATH).read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """Return the code blocks of a language on the page."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def console_blocks() -> list[Block]:
    """Return the blocks with commands on the page."""
    return [block for block in pages.blocks(PATH) if block.kind == "console"]


@pytest.fixture
def folder(exported: Exported, tmp_path: Path) -> Path:
    """A folder with `dist` as the page has it, and inputs."""
    (tmp_path / "dist" / "digits").mkdir(parents=True)
    (tmp_path / "dist" / "digits" / "host").symlink_to(exported.dist)
    np.savez(tmp_path / "input.npz", data=exports.held_out()[0])
    return tmp_path


def environment(folder: Path, *compilers: str) -> dict[str, str]:
    where = {"TVM": str(package_folder("tvm")), "FFI": str(package_folder("tvm_ffi"))}
    return {**exports.compiler(folder / "bin", *compilers), **where}


def test_every_form_has_its_row_and_its_files() -> None:
    """The table names each output and all that it writes."""
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", PAGE, re.MULTILINE))
    assert sorted(rows) == sorted(EXPORTERS)
    request = export.make_request(exports.recipe(), exports.target())
    for output, cell in rows.items():
        shown = [name.rstrip("/") for name in re.findall(r"`([^`]+)`", cell)]
        patterns = [re.sub("<[a-z]+>", ".*", re.escape(name)) for name in shown]
        files = EXPORTERS[output].files(request)
        for name in files:
            assert any(re.match(pattern, name) for pattern in patterns), (output, name)
        for pattern in patterns:
            assert any(re.match(pattern, name) for name in files), (output, pattern)


def test_the_python_on_it_runs(folder: Path, exported: Exported) -> None:
    """Each piece, with no names of another and the wheel's package on the path, gives the model's scores for zeros."""
    (wheel,) = exported.dist.glob("*.whl")
    # as pip installs it
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    code = (
        "import sys; import numpy\n"
        "for index, piece in enumerate(sys.argv[1:]):\n"
        "    names = {}; exec(piece, names); numpy.save(f'{index}.npy', names['scores'])\n"
    )
    paths = os.pathsep.join([str(ROOT), str(folder / "site")])
    words = {**os.environ, "PYTHONPATH": paths}
    pieces = blocks("python")
    subprocess.run([sys.executable, "-c", code, *pieces], cwd=folder, env=words, check=True)
    module = tvmflow.load(exported.dist / "digits.tvmflow")
    zeros = np.zeros((1, 1, 8, 8), "float32")
    expected = module.run({"data": zeros})["softmax_output"]
    assert len(pieces) == 5
    for index in range(len(pieces)):
        np.testing.assert_array_equal(np.load(folder / f"{index}.npy"), expected)


@pytest.mark.slow
def test_the_programs_on_it_compile_and_run(folder: Path, exported: Exported) -> None:
    """Both pieces of C, both of C++, and the commands that link static and system libraries."""
    program, _, weights = blocks("c")
    interface, system = blocks("cpp")
    words = environment(folder, "cc", "c++")
    (folder / "program.c").write_text(program)
    (folder / "program.cpp").write_text(system)
    (folder / "interface.cpp").write_text(interface)
    shown = [command.line for block in console_blocks() for command in commands(block)]
    compiled = [line for line in shown if line.startswith(("cc ", "c++ "))]
    assert len(compiled) == 4
    for line in compiled:
        subprocess.run(["sh", "-ec", line], cwd=folder, env=words, check=True)
    without_weights = exported.dist / "digits-c-library-weights"
    (folder / "weights.c").write_text(
        '#include <stdio.h>\n#include "digits.h"\nint main(void) {\ndigits_context *context = NULL;\n'
        f"{weights}return status != DIGITS_OK || digits_destroy(context);\n}}\n"
    )
    flags = [f"-I{without_weights}", str(without_weights / "libdigits.a"), "-lm", "-lpthread"]
    compiler = ["cc", "weights.c", *flags, "-o", "weights"]
    subprocess.run(compiler, cwd=folder, env=words, check=True)
    (folder / "digits.weights").symlink_to(without_weights / "digits.weights")
    for name in ("program", "interface", "classify", "weights"):
        assert subprocess.run([folder / name], cwd=folder, check=False).returncode == 0
    import tvm

    library = tvm.runtime.load_module(str(folder / "mine.so"))
    np.testing.assert_array_equal(exports.scores_of(library), exports.reference(exported))
