"""Small files whose reading would take more memory or time than a machine has, for each kind of model.

`python -m tests.unit.frontends.worst_files FOLDER [CASE…]` writes them, runs `plan`, `init` and `build` on each, and prints size,
peak memory, time and exit code of each command.
"""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.pytorch_archives import LEAF, container, graph

MAX_BYTES: Final = 1 << 30
MAX_SECONDS: Final = 10.0
MEGABYTE: Final = 1 << 20

# ---------------------------------------------------------------- TFLite, by hand: builders share nothing


class _Flat:
    """A FlatBuffer that grows to its end: what a table names must be written after it, and may be named again."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0\0\0\0TFL3")

    def vector(self, code: str, values: Sequence[float]) -> int:
        place = len(self.data)
        self.data += struct.pack(f"<I{len(values)}{code}", len(values), *values)
        return place

    def text(self, value: bytes) -> int:
        place = len(self.data)
        self.data += struct.pack("<I", len(value)) + value + b"\0"
        return place

    def places(self, count: int) -> int:
        """Add a vector of tables, which `point` fills."""
        return self.vector("I", [0] * count)

    def table(self, *fields: int) -> int:
        """Add a table of 32-bit fields by number; those that are 0 are left out. Places are relative: see `point`."""
        size = 4 + 2 * len(fields)
        offsets = [4 + 4 * index if value else 0 for index, value in enumerate(fields)]
        start = len(self.data)
        self.data += struct.pack(f"<HH{len(fields)}H", size, 4 + 4 * len(fields), *offsets)
        place = len(self.data)
        self.data += struct.pack(f"<i{len(fields)}i", place - start, *fields)
        return place

    def point(self, place: int, target: int) -> None:
        """Let a 32-bit field at a place name a table, a vector or a text after it."""
        struct.pack_into("<I", self.data, place, target - place)

    def point_all(self, vector: int, target: int) -> None:
        """Let each entry of a vector name one table."""
        (count,) = struct.unpack_from("<I", self.data, vector)
        places = range(vector + 4, vector + 4 + 4 * count, 4)
        struct.pack_into(f"<{count}I", self.data, vector + 4, *(target - p for p in places))


def _tflite(
    tensors: int = 1, operators: int = 1, outputs: int = 1, *, operands: int = 1, name: bytes = b"n"
) -> bytes:
    """Return a file in which all tensors are one table, and all operators."""
    flat = _Flat()
    root = flat.table(3, 1, 1, 0, 1)
    flat.point(0, root)
    codes, graphs, buffers = (flat.places(1) for _ in range(3))
    for number, place in ((1, codes), (2, graphs), (4, buffers)):
        flat.point(root + 4 + 4 * number, place)
    # RELU is number 19
    flat.point_all(codes, flat.table(19, 0, 0, 19))
    flat.point_all(buffers, flat.table())
    main = flat.table(1, 1, 1, 1)
    flat.point_all(graphs, main)
    all_tensors, all_operators = flat.places(tensors), flat.places(operators)
    for number, place in (
        (0, all_tensors),
        (1, flat.vector("i", [0])),
        (2, flat.vector("i", [0] * outputs)),
        (3, all_operators),
    ):
        flat.point(main + 4 + 4 * number, place)
    tensor = flat.table(1, 0, 0, 1, 1)
    flat.point_all(all_tensors, tensor)
    flat.point(tensor + 4, flat.vector("i", [1] * 8))
    flat.point(tensor + 16, flat.text(name))
    quantization = flat.table(0, 0, 1)
    flat.point(tensor + 20, quantization)
    flat.point(quantization + 12, flat.vector("f", [1.0] * operands))
    operator = flat.table(0, 1, 1)
    flat.point_all(all_operators, operator)
    numbers = flat.vector("i", [0] * operands)
    flat.point(operator + 8, numbers)
    flat.point(operator + 12, numbers)
    return bytes(flat.data)


# ---------------------------------------------------------------- ONNX, by hand: a million messages take helpers minutes


def message(number: int, content: bytes | str) -> bytes:
    """Return a field of protobuf."""
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """Return a number as protobuf has it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _onnx(graph: bytes, more: bytes = b"") -> bytes:
    opset = message(8, varint(2 << 3) + varint(17))
    return varint(1 << 3) + varint(8) + message(7, graph) + opset + more


def _node(operator: str, inputs: Sequence[str], outputs: Sequence[str], *more: bytes) -> bytes:
    names = b"".join(message(1, n) for n in inputs) + b"".join(message(2, n) for n in outputs)
    return names + message(4, operator) + b"".join(more)


def _value(name: str) -> bytes:
    # float32 of one dimension of size 4
    shape = message(2, message(1, varint(1 << 3) + varint(4)))
    return message(1, name) + message(2, message(1, varint(1 << 3) + varint(1) + shape))


def _relu(*more: bytes) -> bytes:
    """Return a graph that is right but for what is added to it."""
    node = message(1, _node("Relu", ["x"], ["y"]))
    return node + message(11, _value("x")) + message(12, _value("y")) + b"".join(more)


def _laughs(levels: int, calls: int) -> bytes:
    """Return functions of which each calls the one before it several times."""
    opset = message(9, varint(2 << 3) + varint(17)) + message(9, message(1, "f"))
    made = b""
    for level in range(levels):
        operator, domain = (f"f{level - 1}", message(7, "f")) if level else ("Relu", b"")
        names = ["x", *(f"t{n}" for n in range(calls - 1)), "y"]
        nodes = b"".join(
            message(7, _node(operator, [a], [b], domain)) for a, b in itertools.pairwise(names)
        )
        head = message(1, f"f{level}") + message(4, "x") + message(5, "y")
        made += message(25, head + nodes + opset + message(10, "f"))
    node = message(1, _node(f"f{levels - 1}", ["x"], ["y"], message(7, "f")))
    signature = message(11, _value("x")) + message(12, _value("y"))
    return _onnx(node + signature, made + message(8, message(1, "f") + varint(2 << 3) + varint(1)))


def _nested(levels: int) -> bytes:
    inner = message(1, _node("Relu", ["x"], ["z"]))
    for _ in range(levels):
        inner = message(1, message(5, message(1, "then_branch") + message(6, inner)))
    return _onnx(_relu(inner))


# ---------------------------------------------------------------- archives of PyTorch, and MXNet


def _pt2(path: Path, *content: tuple[str, int], tail: str = "", **more: bytes) -> None:
    """Write an archive with texts that are repeated, which deflate well."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("net/models/model.json", "w", force_zip64=True) as stream:
            for text, count in content:
                block = max(1, MEGABYTE // len(text))
                for _ in range(count // block):
                    stream.write((text * block).encode())
                stream.write((text * (count % block)).encode())
            stream.write(tail.encode())
        for name, data in more.items():
            archive.writestr(f"net/data/weights/{name}", data)


def _pt2_weights(path: Path) -> None:
    """Write a right graph, and weights that are all zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/models/model.json", json.dumps(graph()))
        with archive.open("net/data/weights/weight_0", "w", force_zip64=True) as stream:
            for _ in range(900):
                stream.write(bytes(MEGABYTE))


def _pt2_names(path: Path) -> None:
    """Write outputs of which each has a long key before its own."""
    leaves = container("builtins.list", None, *[LEAF] * 10_000)
    spec = container("builtins.dict", ["k" * 400_000], leaves)
    _pt2(path, (json.dumps(graph(out_spec=spec)), 1))


def _symbol(nodes: str) -> bytes:
    return f'{{"nodes": [{nodes}], "arg_nodes": [0], "heads": [[0, 0, 0]]}}'.encode()


_VARIABLE: Final = '{"op": "null", "name": "data", "inputs": []}'


def _write(content: Callable[[], bytes]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content())

    return write


class Case(NamedTuple):
    """A file: the end of its name, the field of a recipe that names it, and what writes it.

    Attributes:
        is_slow: It takes seconds to write, or to refuse.
    """

    suffix: str
    field: str
    write: Callable[[Path], None]
    is_slow: bool = False


CASES: Final[Mapping[str, Case]] = {
    "tflite-shared-tensors": Case(
        ".tflite", "tflite", _write(lambda: _tflite(tensors=100_000, operands=10_000))
    ),
    "tflite-shared-operators": Case(
        ".tflite", "tflite", _write(lambda: _tflite(operators=100_000, operands=10_000))
    ),
    "tflite-shared-names": Case(
        ".tflite", "tflite", _write(lambda: _tflite(tensors=100_000, name=b"n" * 65_000))
    ),
    "tflite-equal-outputs": Case(
        ".tflite", "tflite", _write(lambda: _tflite(outputs=10_000, name=b"n" * 65_000))
    ),
    "onnx-nodes": Case(".onnx", "onnx", _write(lambda: _onnx(_relu(b"\x0a\0" * 1_000_000)))),
    "onnx-attributes": Case(
        ".onnx", "onnx", _write(lambda: _onnx(_relu(message(1, b"\x2a\0" * 1_000_000)))), True
    ),
    "onnx-nodes-of-a-function": Case(
        ".onnx", "onnx", _write(lambda: _onnx(_relu(), message(25, b"\x3a\0" * 1_000_000)))
    ),
    "onnx-sparse": Case(".onnx", "onnx", _write(lambda: _onnx(_relu(b"\x7a\0" * 1_000_000))), True),
    "onnx-values": Case(".onnx", "onnx", _write(lambda: _onnx(_relu(b"\x6a\0" * 2_100_000))), True),
    "onnx-functions": Case(".onnx", "onnx", _write(lambda: _laughs(30, 4))),
    "onnx-nested": Case(".onnx", "onnx", _write(lambda: _nested(5_000))),
    "pt2-graph": Case(
        ".pt2", "pytorch", lambda p: _pt2(p, ("[", 1), ("[],", 300 * MEGABYTE), tail="0]"), True
    ),
    "pt2-lists": Case(
        ".pt2", "pytorch", lambda p: _pt2(p, ("[", 1), ("[],", 20 * MEGABYTE), tail="0]"), True
    ),
    "pt2-deep": Case(".pt2", "pytorch", lambda p: _pt2(p, ("[", MEGABYTE))),
    "pt2-weights": Case(".pt2", "pytorch", _pt2_weights, True),
    "pt2-names": Case(".pt2", "pytorch", _pt2_names, True),
    "mxnet-nodes": Case(
        "-symbol.json", "mxnet", _write(lambda: _symbol(",".join([_VARIABLE] * 100_001)))
    ),
    "mxnet-deep": Case(
        "-symbol.json",
        "mxnet",
        _write(lambda: _symbol('{"op": "null", "name": "x", "attrs": ' + '{"a":' * 500_000)),
    ),
    "mxnet-lists": Case(
        "-symbol.json",
        "mxnet",
        _write(lambda: _symbol(f"{_VARIABLE}, {'[],' * 20 * MEGABYTE} 0")),
        True,
    ),
    "mxnet-params": Case("-0000.params", "mxnet", _write(lambda: _params())),
}
"""The files by name."""


def _params() -> bytes:
    """Return parameters of which there are said to be many, all without a value."""
    count = 50_000
    return struct.pack("<QQQ", 0x112, 0, 1 << 60) + struct.pack("<II", 0xF993FAC8, 0) * count


def write_case(name: str, folder: Path) -> Path:
    """Write a case and a recipe for it into an empty folder; return the file that a command names."""
    case = CASES[name]
    case.write(folder / f"net{case.suffix}")
    model = f"net{case.suffix}"
    if case.field == "mxnet":
        model = "net-symbol.json"
        for path, content in (
            (folder / model, _symbol(_VARIABLE)),
            (folder / "net-0000.params", struct.pack("<4Q", 0x112, 0, 0, 0)),
        ):
            if not path.exists():
                path.write_bytes(content)
    value = "{prefix: net, epoch: 0}" if case.field == "mxnet" else model
    lines = ["recipe: 1", "name: net", f"model: {{{case.field}: {value}}}"]
    lines += ["targets: [host]", "outputs: [c-library]"]
    lines += ["inputs: {data: {shape: [4]}}"] if case.field == "mxnet" else []
    (folder / "r.yaml").write_text("\n".join(lines) + "\n")
    return folder / model


# ---------------------------------------------------------------- figures


class Ended(NamedTuple):
    """The end of a command: its exit code, its seconds of CPU time, the peak of its largest process, what it printed."""

    code: int
    seconds: float
    peak_bytes: int
    text: str


def run_command(folder: Path, *words: str) -> Ended:
    """Run tvmflow in a folder, for at most two minutes and with little more memory than it may take."""
    measure = (
        "import os, resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(used.ru_maxrss, used.ru_utime + used.ru_stime, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", measure, "timeout", "-s", "KILL", "120"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tvmflow", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    *lines, last = (done.stdout + done.stderr).strip().splitlines()
    peak, seconds = last.split()
    return Ended(done.returncode, float(seconds), int(peak) << 10, "\n".join(lines))


def commands_for(model: Path) -> dict[str, list[str]]:
    """Return the commands that read a model."""
    return {
        "plan": ["plan", "r.yaml"],
        "init": ["init", model.name, "--stdout"],
        "build": ["build", model.name],
    }


def main(folder: str, *names: str) -> None:
    """Print a table of what each command takes for each case."""
    for name in names or CASES:
        place = Path(folder, name)
        place.mkdir(parents=True)
        model = write_case(name, place)
        size = (place / f"net{CASES[name].suffix}").stat().st_size
        for command, words in commands_for(model).items():
            ended = run_command(place, *words)
            last = ended.text.splitlines()[0][:150] if ended.text else ""
            print(
                f"{name:26} {size / 1e6:7.2f} MB  {command:5}  {ended.peak_bytes / 1e6:7.0f} MB  "
                f"{ended.seconds:6.1f} s  exit {ended.code}  {last}",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
