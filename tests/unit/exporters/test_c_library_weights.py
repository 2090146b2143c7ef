"""`c-library-weights`: libraries without weights, which map a file of them or take its content from memory."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pytest

from tests.support import exports
from tests.support.c_library import CLibrary
from tests.support.exports import Array, Exported
from tests.unit.exporters.c_programs import EMPTY, WINE, share_of_right, write_images
from tvmflow.exporters import EXPORTERS
from tvmflow.exporters.c_library import write_library
from tvmflow.runtime.c_loader import Options
from tvmflow.stages import export
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import weights
from tvmflow.targets.linking import compile_c, find_data, write_data

# The numbers in the header.
ABI: Final = 0x10001
WRONG_VERSION: Final = 2
NO_WEIGHTS, WRONG_WEIGHTS, SHORT_WEIGHTS, UNREADABLE_WEIGHTS, MISPLACED_WEIGHTS = range(12, 17)


class WeightsOptions(Options):
    """`NAME_options` of the header."""

    _fields_: ClassVar[Any] = (
        ("weights_file", ctypes.c_char_p),
        ("weights", ctypes.c_void_p),
        ("weights_bytes", ctypes.c_size_t),
    )


def mapped(path: Path) -> WeightsOptions:
    """Options with a file."""
    return WeightsOptions(abi=ABI, threads=1, weights_file=str(path).encode())


def in_memory(content: Array, size: int | None = None) -> WeightsOptions:
    """Options with the content of a file."""
    size = content.nbytes if size is None else size
    return WeightsOptions(abi=ABI, threads=1, weights=content.ctypes.data, weights_bytes=size)


def place(content: bytes, offset: int = 0) -> Array:
    """Return bytes in memory, so many bytes after a multiple of 64."""
    memory = np.zeros(len(content) + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    memory[begin : begin + len(content)] = np.frombuffer(content, np.uint8)
    return memory[begin : begin + len(content)]


@pytest.fixture(scope="module")
def folder(exported: Exported) -> Path:
    """The folder with libraries, header and weights."""
    return exported.dist / "digits-c-library-weights"


@pytest.fixture
def library(folder: Path) -> Iterator[CLibrary]:
    """The library without a context; it is freed in the end."""
    library = CLibrary(folder / "libdigits.so", "digits")
    assert library.status == WRONG_VERSION  # the options are those of a library with weights
    yield library
    assert library.function("destroy")(library.context) == 0


def scores_of(library: CLibrary) -> Array:
    images = exports.held_out()[0]
    return np.concatenate([library.run({"data": x[None]})[0] for x in images])


def mappings(path: Path) -> list[dict[str, int]]:
    """What the kernel counts of each mapping of a file in this process, in KiB."""
    entries = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    return [
        {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", entry, re.M)}
        for entry in entries
        if str(path) in entry
    ]


def test_it_gives_the_scores_of_the_bundle(
    exported: Exported, folder: Path, library: CLibrary
) -> None:
    """To the last bit, from a file and from memory."""
    expected = exports.reference(exported)
    file = folder / "digits.weights"
    assert library.create(mapped(file)) == 0
    np.testing.assert_array_equal(scores_of(library), expected)
    assert library.function("destroy")(library.context) == 0
    content = place(file.read_bytes())
    assert library.create(in_memory(content)) == 0
    np.testing.assert_array_equal(scores_of(library), expected)


def test_the_weights_are_in_their_file_alone(exported: Exported, folder: Path) -> None:
    """As a library with weights has them; the libraries are small."""
    constants = (folder / "digits.weights").read_bytes()[weights.BEGIN :]
    whole, without = (
        (exported.dist / name / "libdigits.so").read_bytes()
        for name in ("digits-c-library", "digits-c-library-weights")
    )
    assert constants in whole
    assert constants[:1024] not in without
    assert len(without) < len(whole) - 0.9 * len(constants)
    assert constants[:1024] not in (folder / "libdigits.a").read_bytes()


def test_contexts_share_one_mapped_file(folder: Path, library: CLibrary, tmp_path: Path) -> None:
    """No page of it belongs to a context alone, and none is left in the end."""
    file = tmp_path / "digits.weights"
    file.write_bytes((folder / "digits.weights").read_bytes())
    image = {"data": np.zeros((1, 1, 8, 8), "float32")}
    other = CLibrary(folder / "libdigits.so", "digits")
    for context in (library, other):
        assert context.create(mapped(file)) == 0
        context.run(image)
    both = mappings(file)
    assert len(both) == 2
    for counts in both:
        assert counts["Rss"] >= 32
        assert counts["Shared_Clean"] + counts["Shared_Dirty"] == counts["Rss"]
        assert counts["Anonymous"] == 0
    assert other.function("destroy")(other.context) == 0
    assert len(mappings(file)) == 1
    library.run(image)


def test_wrong_weights_have_their_status(folder: Path, library: CLibrary, tmp_path: Path) -> None:
    """Each with a sentence of its own; no file stays mapped, and the right weights work afterwards."""
    content = (folder / "digits.weights").read_bytes()
    other = bytearray(content)
    other[40] ^= 1  # in the digest, as another model of the same size has it
    newer = content[:16] + b"\2" + content[17:]
    files = {
        "empty": (b"", SHORT_WEIGHTS),
        "head": (content[:63], SHORT_WEIGHTS),
        "page": (content[: weights.BEGIN], SHORT_WEIGHTS),
        "truncated": (content[:-1], SHORT_WEIGHTS),
        "other": (bytes(other), WRONG_WEIGHTS),
        "newer": (newer, WRONG_WEIGHTS),
        "text": (b"weights\n" * 1000, WRONG_WEIGHTS),
        "longer": (content + b"more", 0),
    }
    for name, (changed, status) in files.items():
        path = tmp_path / name
        path.write_bytes(changed)
        assert library.create(mapped(path)) == status, name
        assert len(mappings(path)) == (status == 0)
        assert library.function("destroy")(library.context) == 0
        memory = place(changed + b"\0")
        assert library.create(in_memory(memory, len(changed))) == status, name
        assert library.function("destroy")(library.context) == 0
    right, askew = place(content), place(content, 4)
    both = in_memory(right)
    both.weights_file = str(folder / "digits.weights").encode()
    for options, status in (
        (None, NO_WEIGHTS),
        (WeightsOptions(abi=ABI), NO_WEIGHTS),
        (WeightsOptions(abi=ABI, weights_bytes=len(content)), NO_WEIGHTS),
        (mapped(tmp_path / "missing"), UNREADABLE_WEIGHTS),
        (mapped(tmp_path), UNREADABLE_WEIGHTS),
        (mapped(Path()), UNREADABLE_WEIGHTS),
        (both, MISPLACED_WEIGHTS),
        (in_memory(askew), MISPLACED_WEIGHTS),
    ):
        assert library.create(options) == status
        assert library.context.value is None
    assert library.create(in_memory(right)) == 0
    messages = [library.function("message")(status) for status in range(-1, 19)]
    assert len(set(messages)) == 18 and messages[0] == messages[-1] == b"unknown error"


def test_a_weights_file_that_is_no_regular_file_is_refused(
    library: CLibrary, tmp_path: Path
) -> None:
    """At once: opening a named pipe does not wait for somebody who writes to it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    statuses: list[int] = []
    thread = threading.Thread(
        target=lambda: statuses.append(library.create(mapped(pipe))), daemon=True
    )
    thread.start()
    thread.join(10)
    if thread.is_alive():
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        pytest.fail("create waits for the named pipe")
    assert statuses == [UNREADABLE_WEIGHTS]
    for special in ("/dev/null", "/dev/zero", tmp_path):
        assert library.create(mapped(Path(special))) == UNREADABLE_WEIGHTS
        assert library.context.value is None
    assert b"a pipe" in library.function("message")(UNREADABLE_WEIGHTS)


TRUNCATES: Final = """
import ctypes, os, sys

from tvmflow.runtime.c_loader import Buffer, Options

library, file = ctypes.CDLL(sys.argv[1]), sys.argv[2]

class WeightsOptions(Options):
    _fields_ = [("weights_file", ctypes.c_char_p), ("weights", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

context = ctypes.c_void_p()
options = WeightsOptions(abi=0x10001, threads=1, weights_file=file.encode())
assert library.digits_create(ctypes.byref(options), ctypes.byref(context)) == 0
image, scores = (ctypes.c_float * 64)(), (ctypes.c_float * 10)()
buffers = [Buffer(ctypes.addressof(tensor), ctypes.sizeof(tensor)) for tensor in (image, scores)]
arguments = [item for buffer in buffers for item in (ctypes.byref(buffer), ctypes.c_size_t(1))]
assert library.digits_run(context, *arguments) == 0
print("ran", flush=True)
os.truncate(file, 0)
library.digits_run(context, *arguments)
print("ran again")
"""


def test_a_weights_file_may_be_replaced_by_a_rename_and_not_be_truncated(
    folder: Path, library: CLibrary, tmp_path: Path
) -> None:
    """As the header says, with the two remedies: a program that maps a file dies when others make it shorter."""
    file, other = tmp_path / "digits.weights", tmp_path / "other.weights"
    content = (folder / "digits.weights").read_bytes()
    image = {"data": np.ones((1, 1, 8, 8), "float32")}
    file.write_bytes(content)
    assert library.create(mapped(file)) == 0
    [expected] = library.run(image)
    other.write_bytes(b"")
    other.replace(file)
    np.testing.assert_array_equal(library.run(image)[0], expected)

    file.write_bytes(content)
    in_turn = place(file.read_bytes())
    assert library.function("destroy")(library.context) == 0
    assert library.create(in_memory(in_turn)) == 0
    os.truncate(file, 0)
    np.testing.assert_array_equal(library.run(image)[0], expected)

    file.write_bytes(content)
    command = [sys.executable, "-c", TRUNCATES, str(folder / "libdigits.so"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGBUS, "ran\n", "")
    header = " ".join((folder / "digits.h").read_text().replace("\n   *", "").split())
    assert "replace it by a rename only" in header
    assert "ends the program with SIGBUS" in header
    assert "read it, and give its content below" in header


def write_constants(exported: Exported, path: Path, change: int) -> None:
    """Write the object file of the digits' weights, with a change of the first byte."""
    compiled = exported.folder / "build" / "c-library"
    begin, size = find_data(compiled / c_runtime.CONSTANTS)
    content = bytearray((compiled / c_runtime.CONSTANTS).read_bytes()[begin : begin + size])
    content[0] ^= change
    write_data(path, compiled / "kernels0.o", "digits_weights", [bytes(content)])


def test_a_library_refuses_the_weights_of_another_build(
    exported: Exported, folder: Path, library: CLibrary, tmp_path: Path
) -> None:
    """The same constants give the same bytes; one other bit gives another file, of the same size."""
    for name, change, status in (("same", 0, 0), ("other", 1, WRONG_WEIGHTS)):
        write_constants(exported, tmp_path / "constants.o", change)
        weights.write_weights(tmp_path / "constants.o", tmp_path / name)
        assert library.create(mapped(tmp_path / name)) == status
    same, other = ((tmp_path / name).read_bytes() for name in ("same", "other"))
    assert same == (folder / "digits.weights").read_bytes()
    assert len(same) == len(other) and sum(x != y for x, y in zip(same, other, strict=True)) > 16


SYSTEMS: Final = {
    "x86_64-pc-windows-msvc": {"net.dll", "net.lib", "net_static.lib"},
    "aarch64-w64-windows-gnu": {"net.dll", "libnet.dll.a", "libnet.a"},
    "arm64-apple-macos13": {"libnet.dylib", "libnet.a"},
    "arm64-apple-ios13.0": {"libnet.a"},
    "armv7-linux-gnueabihf": {"libnet.so", "libnet.a"},
    "wasm32-wasi": {"libnet.a"},
    "thumbv7em-none-eabihf": {"libnet.a"},
}


@pytest.mark.parametrize("triple", SYSTEMS)
def test_every_system_has_the_same_weights(tmp_path: Path, triple: str) -> None:
    """Read from objects of each format; the libraries are linked, and only programs with files map them."""
    (tmp_path / c_runtime.PROGRAM).write_text(EMPTY)
    (tmp_path / "code.c").write_text("int code;\n")
    compile_c(tmp_path, "code.c", "code.o", triple)
    pieces = [b"\1\2\3", bytes(range(256)) * 1000, b"\4"]
    constants = tmp_path / c_runtime.CONSTANTS
    write_data(constants, tmp_path / "code.o", "empty_weights", iter(pieces))
    tensor = {"dtype": "float32", "shape": [2]}
    none = {"name": "none", "dtype": "float32", "shape": [0]}
    tensors = [none, {"name": "two", **tensor}]
    head = weights.write_weights(constants, tmp_path / "weights")
    content = (tmp_path / "weights").read_bytes()
    assert content.startswith(head) and content[weights.BEGIN :] == b"".join(pieces)

    signature = {"inputs": tensors, "outputs": tensors}
    model = c_runtime.DescribedModel("net", signature, (), triple, head)
    request = export.make_request(exports.recipe("net"), exports.target(triple))
    exporter = EXPORTERS["c-library-weights"]
    names = {Path(name).name for name in exporter.files(request)}
    assert names == {"net.h", "net-images.h", "net.weights", *SYSTEMS[triple]}
    files = c_runtime.LibraryFiles.of("net", triple)
    files = c_runtime.LibraryFiles(*(file if file in names else "" for file in files))
    compiled = {c_runtime.PROGRAM: tmp_path / c_runtime.PROGRAM}
    header = tmp_path / files.header
    write_library(model, compiled, files, tmp_path, tmp_path)
    assert SYSTEMS[triple] <= {path.name for path in tmp_path.iterdir()}
    is_mapped = not triple.startswith(("wasm", "thumb"))
    assert ("weights_file;" in header.read_text()) == is_mapped
    assert "const void *weights;" in header.read_text()


PROGRAM: Final = """
#include <stdio.h>
#include "digits.h"

static _Alignas(64) unsigned char content[1 << 17];

static int create(const char *file, digits_context **context) {
  const digits_options options = {.abi = DIGITS_ABI, .weights_file = file};
  return digits_create(&options, context);
}

int main(void) {
  static float data[64], scores[10];
  digits_context *contexts[2];
  FILE *file = fopen("digits.weights", "rb");
  const size_t bytes = fread(content, 1, sizeof content, file);
  fclose(file);
  if (create("missing.weights", contexts) != DIGITS_UNREADABLE_WEIGHTS) return 1;
  if (create("short.weights", contexts) != DIGITS_SHORT_WEIGHTS) return 2;
  if (create("empty.weights", contexts) != DIGITS_SHORT_WEIGHTS) return 3;
  if (create("images", contexts) != DIGITS_WRONG_WEIGHTS) return 4;
  if (create("ä.weights", contexts) != DIGITS_OK) return 5;
  const digits_options options = {.abi = DIGITS_ABI, .weights = content, .weights_bytes = bytes};
  if (digits_create(&options, contexts + 1) != DIGITS_OK) return 6;
  FILE *images = fopen("images", "rb");
  for (int image = 0; fread(data, sizeof data, 1, images) == 1; ++image) {
    digits_buffer input = {data, sizeof data}, output = {scores, sizeof scores};
    if (digits_run(contexts[image % 2], &input, 1, &output, 1) != DIGITS_OK) return 7;
    int best = 0;
    for (int label = 1; label < 10; ++label) if (scores[label] > scores[best]) best = label;
    printf("%d\\n", best);
  }
  for (int i = 0; i < 2; ++i) if (digits_destroy(contexts[i]) != DIGITS_OK) return 8;
  /* Windows keeps files that are in use. */
  return remove("short.weights") | remove("empty.weights");
}
"""


@pytest.mark.slow
@pytest.mark.skipif(WINE is None, reason="needs Wine")
def test_a_program_for_windows_maps_the_weights(tmp_path: Path) -> None:
    """Under Wine: 360 images, by a file whose name is not ASCII and by memory in turn; files are free afterwards."""
    triple = "x86_64-w64-windows-gnu"
    made = exports.make(tmp_path / "digits", "digits", "c-library-weights", triple=triple)
    folder = made.dist / "digits-c-library-weights"
    labels = write_images(folder)
    content = (folder / "digits.weights").read_bytes()
    for name, size in (("ä", len(content)), ("short", len(content) - 1), ("empty", 0)):
        (folder / f"{name}.weights").write_bytes(content[:size])
    (folder / "main.c").write_text(PROGRAM)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]
    files = ["main.c", "libdigits.dll.a", "-o", "main.exe"]
    subprocess.run([*command, *files], cwd=folder, check=True)
    environment = {**os.environ, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
    # file names that are not ASCII
    environment["LC_ALL"] = "C.UTF-8"
    done = subprocess.run(
        [str(WINE), "main.exe"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert share_of_right(done.stdout, labels) >= 0.95
