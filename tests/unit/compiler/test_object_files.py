"""Object files with weights that were written to them directly are those that TVM writes, in every ELF format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmflow.compiler import forms, lowering
from tvmflow.graph import ir
from tvmflow.targets.tvm_target import make_target

TRIPLES = {
    "x86_64-unknown-linux-gnu": {},
    "aarch64-unknown-linux-gnu": {},
    "riscv64-unknown-linux-gnu": {"mattr": ["+m", "+a", "+f", "+d"], "mabi": "lp64d"},
    "armv7a-unknown-linux-gnueabihf": {},
    "aarch64-linux-android": {},
}
SYMBOL = b"__tvm_ffi__library_bin"


def weighted(weights: list[np.ndarray[Any, Any]]) -> tvm.IRModule:
    """Return a lowered model that returns the sum of an input and each weight, and one weight as it is."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    parameters = [
        relax.Var(f"w{index}", relax.TensorType(array.shape, str(array.dtype)))
        for index, array in enumerate(weights)
    ]
    with builder.function("main", [x, *parameters], attrs={"num_input": 1}):
        with builder.dataflow():
            outputs = [
                builder.emit_output(
                    relax.op.add(builder.emit(relax.op.astype(parameter, "float32")), x)
                )
                for parameter in parameters
            ]
        builder.emit_func_output([*outputs, parameters[-1]])
    return relax.transform.LegalizeOps()(builder.finalize())


def random_weights(seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, ...]] = [(3,), (1,), (5, 3), (2, 1, 3), (), (70, 3), (0, 3)]
    dtypes = ["float32", "float16", "int8", "uint8", "int64", "bool", "float64", "int32"]
    return [
        np.asarray(rng.standard_normal(shape) * 50).astype(dtypes[rng.integers(len(dtypes))])
        for shape in (shapes[index] for index in rng.permutation(len(shapes)))
    ]


def blob_of(path: Path) -> bytes:
    """Return the data behind the symbol of an ELF object, found by its tables."""
    content = path.read_bytes()
    is_64 = content[4] == 2
    sections_at = struct.unpack_from("<Q" if is_64 else "<I", content, 40 if is_64 else 32)[0]
    size, count = struct.unpack_from("<HH", content, 58 if is_64 else 46)
    layout = "<IIQQQQIIQQ" if is_64 else "<10I"
    sections = [struct.unpack_from(layout, content, sections_at + n * size) for n in range(count)]

    def data(section: tuple[int, ...]) -> bytes:
        return content[section[4] : section[4] + section[5]]

    [symbols] = [section for section in sections if section[1] == 2]
    names = data(sections[symbols[6]])
    for entry in struct.iter_unpack("<IBBHQQ" if is_64 else "<IIIBBH", data(symbols)):
        name, section, value, length = (
            (entry[0], entry[3], entry[4], entry[5])
            if is_64
            else (entry[0], entry[5], entry[1], entry[2])
        )
        if names[name:].split(b"\0")[0] == SYMBOL:
            return data(sections[section])[value : value + length]
    raise AssertionError("there is no such symbol")


@pytest.mark.parametrize("triple", TRIPLES)
def test_the_data_is_what_tvm_writes(triple: str, tmp_path: Path) -> None:
    """For each machine, the object has the same header, symbol and data as TVM's, weights of all types included."""
    weights = random_weights(len(triple))
    check_data(weighted(weights), weights, triple, tmp_path)


def test_a_model_may_have_no_weights(tmp_path: Path) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        builder.emit_func_output(builder.emit(relax.op.add(x, x)))
    mod = relax.transform.LegalizeOps()(builder.finalize())
    check_data(mod, [], "x86_64-unknown-linux-gnu", tmp_path)


@pytest.mark.parametrize("prefix", ["", "net_"])
def test_a_model_may_have_no_kernels(prefix: str, tmp_path: Path) -> None:
    """Its data is an object file, too, for the target's system."""
    builder = relax.BlockBuilder()
    with builder.function("main", [], attrs={"num_input": 0}):
        builder.emit_func_output(builder.emit(relax.const(np.ones(3, np.float32))))
    mod, triple = builder.finalize(), "aarch64-unknown-linux-gnu"
    target = make_target({"kind": "llvm", "mtriple": triple})
    compiled = lowering.ScheduledModel(mod, [], target).compile()
    forms.copy_objects_of(mod, compiled, target, tmp_path, prefix)
    assert [path.name for path in tmp_path.iterdir()] == ["devc.o"]
    content = (tmp_path / "devc.o").read_bytes()
    assert (content[:4], content[18:20]) == (b"\x7fELF", struct.pack("<H", 183))


def check_data(
    mod: tvm.IRModule, weights: list[np.ndarray[Any, Any]], triple: str, folder: Path
) -> None:
    target = make_target({"kind": "llvm", "mtriple": triple, **TRIPLES[triple]})
    actual, expected = folder / "actual", folder / "expected"
    actual.mkdir()
    expected.mkdir()
    forms.write_object_files(lowering.ScheduledModel(mod, weights, target), actual)
    compiled = lowering.ScheduledModel(mod, weights, target).compile()
    forms.export_object_files(compiled, expected)
    assert blob_of(actual / "devc.o") == blob_of(expected / "devc.o")
    header, expected_header = ((folder / "devc.o").read_bytes() for folder in (actual, expected))
    flags = slice(48, 52) if header[4] == 2 else slice(36, 40)
    assert (header[:20], header[flags]) == (expected_header[:20], expected_header[flags])


def test_the_number_of_cores_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled by as many threads as there are cores, and all kernels are there."""
    mod, weights = weighted(random_weights(1)), random_weights(1)
    target = make_target({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu"})
    made = []
    for cores in (1, 3):
        monkeypatch.setattr(forms, "count_usable_cpus", lambda cores=cores: cores)
        folder = tmp_path / str(cores)
        folder.mkdir()
        forms.write_object_files(lowering.ScheduledModel(mod, weights, target), folder)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1]
    code = b"".join(content for name, content in made[0].items() if name.startswith("lib"))
    assert len(made[0]) > 2
    assert all(f"__tvm_ffi_{name}\0".encode() in code for name in ir.list_kernels(mod))
