"""C libraries of dynamic shape: exact at every size in any order, in memory that grows with the sizes."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.support.c_library import CLibrary, buffer_of
from tests.support.dynamic_programs import (
    DIMENSIONS,
    Built,
    DynamicModel,
    build,
    compile_objects,
    describe,
    draw_network,
)
from tests.support.exports import Array
from tests.support.seeds import seeds
from tvmflow.compiler.c_program.c_code import KernelTraits, generate_code
from tvmflow.compiler.c_program.program import (
    UnsupportedProgram,
    find_runtime,
    list_kernel_calls,
    plan_memory,
    read_program,
)
from tvmflow.core.errors import StageError
from tvmflow.core.types import Dimension
from tvmflow.graph.dynamic_shapes import with_dimensions
from tvmflow.runtime.c_loader import Buffer, Options
from tvmflow.targets import c_runtime, linking

WRONG_COUNT, WRONG_SIZE, NO_MEMORY, WRONG_DIMENSION = 4, 65536, 8, 18
BATCH, SEQ = 0, 1
ORDER = (16, 96, 4, 32, 2, 94)

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class DynamicLibrary(CLibrary):
    """A library with dimensions."""

    def set_dimension(self, dimension: int, size: int) -> int:
        return int(
            self.function("set_dimension")(
                self.context, ctypes.c_size_t(dimension), ctypes.c_int64(size)
            )
        )

    def set_shape(self, place: int, *shape: int) -> int:
        sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        place_, rank = ctypes.c_size_t(place), ctypes.c_size_t(len(shape))
        return int(self.function("set_input_shape")(self.context, place_, sizes, rank))

    def shape(self, direction: str, place: int, rank: int) -> tuple[int, ...]:
        sizes = (ctypes.c_int64 * max(rank, 1))()
        function = self.function(f"{direction}_shape")
        assert function(self.context, ctypes.c_size_t(place), sizes) == 0
        return tuple(sizes[:rank])

    def bytes(self, direction: str, place: int) -> int:
        size = ctypes.c_size_t()
        function = self.function(f"{direction}_bytes")
        assert function(self.context, ctypes.c_size_t(place), ctypes.byref(size)) == 0
        return size.value

    def call(self, model: DynamicModel, inputs: list[Array], offset: int = 0) -> list[Array]:
        """Return the outputs for inputs, whose shapes choose the dimensions."""
        for place, array in enumerate(inputs):
            assert self.set_shape(place, *array.shape) == 0
            assert self.bytes("input", place) == array.nbytes
        shapes = [self.shape("output", i, len(spec.shape)) for i, spec in enumerate(model.outputs)]
        memory = [np.empty(4 * int(np.prod(shape)) + 64 + offset, np.uint8) for shape in shapes]
        results = []
        for place, (raw, shape) in enumerate(zip(memory, shapes, strict=True)):
            begin = -raw.ctypes.data % 64 + offset
            size = self.bytes("output", place)
            results.append(raw[begin : begin + size].view(np.float32).reshape(shape))
        status = self.run_buffers(list(map(buffer_of, inputs)), list(map(buffer_of, results)))
        assert status == 0, self.function("message")(status)
        return results


class Counted:
    """Memory of a test's own for a context, which is counted.

    Attributes:
        calls: How often memory was asked for.
        bytes: The bytes of each block that the context has.
        limit: The bytes of the largest block that there is memory for.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.limit = 1 << 40
        self.bytes: dict[int, int] = {}
        self._blocks: dict[int, Any] = {}
        self.allocate, self.release = ALLOCATE(self._allocate), RELEASE(self._release)

    def options(self, threads: int) -> Options:
        options = Options(abi=1, threads=threads)
        options.allocate = ctypes.cast(self.allocate, ctypes.c_void_p)
        options.release = ctypes.cast(self.release, ctypes.c_void_p)
        return options

    def _allocate(self, _user: Any, size: int, alignment: int) -> int | None:
        self.calls += 1
        if size > self.limit:
            return None
        block = bytearray(size + alignment)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        address += -address % alignment
        self._blocks[address], self.bytes[address] = block, size
        return address

    def _release(self, _user: Any, address: int) -> None:
        del self._blocks[address], self.bytes[address]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """One random network of attention, dense layers and pooling."""
    return build(draw_network(4), tmp_path_factory.mktemp("open"))


def load(built: Built, threads: int = 1, options: Options | None = None) -> DynamicLibrary:
    library = DynamicLibrary(built.library, "net", threads)
    assert library.status == 0
    if options is not None:
        assert library.function("destroy")(library.context) == 0
        assert library.create(options) == 0
    return library


@pytest.mark.parametrize("seed", seeds(2, 12, 80))
def test_random_networks_agree_with_the_virtual_machine(seed: int, tmp_path: Path) -> None:
    """To the last bit, at sizes in any order, with one thread and with two, and with any alignment."""
    made = build(draw_network(seed), tmp_path)
    libraries = [load(made), load(made, threads=2)]
    chooser = random.Random(seed)
    for seq in (*ORDER, *(2 * chooser.randint(1, 48) for _ in range(3))):
        sizes = {"batch": chooser.randint(1, 6), "seq": seq}
        inputs = made.model.draw(sizes, seed)
        expected = made.run_machine(inputs)
        for library in libraries:
            for offset in (0, 4):
                actual = library.call(made.model, inputs, offset)
                assert [array.shape for array in actual] == made.model.shapes(sizes)
                for one, other in zip(actual, expected, strict=True):
                    np.testing.assert_array_equal(one, other)


def test_memory_grows_with_the_sizes(built: Built) -> None:
    """Nothing is allocated in a call of sizes that were there before, nor for smaller ones."""
    memory = Counted()
    library = load(built, 1, memory.options(1))
    context = sum(memory.bytes.values())
    assert memory.calls == 1 and context < 8_000
    used = {}
    for seq in (2, 16, 96):
        library.call(built.model, built.model.draw({"batch": 1, "seq": seq}))
        used[seq] = sum(memory.bytes.values()) - context
    assert used[2] <= used[16] / 4 < used[96] / 20
    calls = memory.calls
    for seq in (16, 96, 2, 64):
        library.call(built.model, built.model.draw({"batch": 1, "seq": seq}))
    assert memory.calls == calls
    assert library.function("destroy")(library.context) == 0
    assert not memory.bytes


def test_a_context_without_memory_can_be_used_with_smaller_sizes(built: Built) -> None:
    memory = Counted()
    library = load(built, 1, memory.options(1))
    small, large = (built.model.draw({"batch": 1, "seq": seq}) for seq in (4, 96))
    expected = library.call(built.model, small)
    memory.limit = 20_000
    assert library.set_shape(0, *large[0].shape) == 0
    outputs = [np.zeros(shape, np.float32) for shape in built.model.shapes({"batch": 1, "seq": 96})]
    run = library.run_buffers
    assert run(list(map(buffer_of, large)), list(map(buffer_of, outputs))) == NO_MEMORY
    again = library.call(built.model, small)
    assert all(map(np.array_equal, again, expected))


def test_wrong_sizes_have_a_status_and_change_nothing(built: Built) -> None:
    """The text names the dimension and its range."""
    library = load(built)
    get = library.function("get_dimension")
    get.restype = ctypes.c_int64
    assert [get(library.context, ctypes.c_size_t(i)) for i in range(3)] == [1, 2, -1]
    assert library.set_dimension(SEQ, 16) == 0
    for size in (0, -2, 3, 98, 2**63 - 1, -(2**63), 2**32 + 16):
        assert library.set_dimension(SEQ, size) == WRONG_DIMENSION
        assert library.set_shape(0, 1, size, 24) == WRONG_DIMENSION
    assert library.set_shape(0, 7, 16, 24) == WRONG_DIMENSION
    assert library.set_shape(0, 1, 16, 25) == WRONG_SIZE
    assert library.set_shape(0, 1, 16) == WRONG_SIZE
    assert library.set_shape(2, 1, 16, 24) == WRONG_COUNT
    assert library.set_dimension(2, 1) == library.set_dimension(2**64 - 1, 1) == WRONG_COUNT
    assert library.shape("input", 0, 3) == (1, 16, 24)
    message = library.function("message")(WRONG_DIMENSION).decode()
    assert message.endswith("batch is 1 to 6; seq is 2 to 96, multiples of 2")
    inputs = built.model.draw({"batch": 1, "seq": 16})
    outputs = [np.zeros(shape, np.float32) for shape in built.model.shapes({"batch": 1, "seq": 16})]
    buffers = list(map(buffer_of, inputs)), list(map(buffer_of, outputs))
    assert library.run_buffers(*buffers) == 0
    shorter = Buffer(inputs[0].ctypes.data, inputs[0].nbytes - 96)
    assert library.run_buffers([shorter, buffers[0][1]], buffers[1]) == WRONG_SIZE
    assert library.set_dimension(SEQ, 18) == 0
    assert library.run_buffers(*buffers) == WRONG_SIZE
    text = library.function("message")(WRONG_SIZE).decode()
    assert (
        text
        == "input 'x' has another size than float32 [batch, seq, 24], by the sizes that were chosen"
    )


def test_the_description_has_dynamic_shapes(built: Built) -> None:
    (x,) = load(built).tensors("inputs", 1)
    assert (x.shape[: x.rank], x.bytes) == ([-1, -1, 24], 4 * 6 * 96 * 24)
    header = (built.folder / "net.h").read_text()
    assert "#define NET_DIMENSIONS 2\n#define NET_DIMENSION_BATCH 0\n" in header
    assert "NET_WRONG_DIMENSION = 18" in header and "seq is 2 to 96, multiples of 2" in header


PROGRAM = r"""
#include "net.h"
#include <stdio.h>
#include <stdlib.h>
int main(void) {
  net_context *context;
  const int64_t sizes[] = {16, 96, 4, 2, 30};
  net_options options = {.abi = NET_ABI, .threads = 2};
  if (net_create(&options, &context) != NET_OK) return 1;
  for (int i = 0; i < 5; ++i) {
    net_buffer in[NET_INPUTS], out[NET_OUTPUTS];
    int64_t shape[8];
    if (net_set_dimension(context, NET_DIMENSION_SEQ, sizes[i]) != NET_OK) return 2;
    if (net_set_dimension(context, NET_DIMENSION_BATCH, 1 + i) != NET_OK) return 2;
    for (size_t k = 0; k < NET_INPUTS; ++k) {
      if (net_input_bytes(context, k, &in[k].bytes) != NET_OK) return 3;
      in[k].data = calloc(in[k].bytes, 1);
    }
    for (size_t k = 0; k < NET_OUTPUTS; ++k) {
      if (net_output_bytes(context, k, &out[k].bytes) != NET_OK) return 3;
      if (net_output_shape(context, k, shape) != NET_OK || shape[0] != 1 + i) return 4;
      out[k].data = malloc(out[k].bytes);
    }
    if (net_run(context, in, NET_INPUTS, out, NET_OUTPUTS) != NET_OK) return 5;
    for (size_t k = 0; k < NET_INPUTS; ++k) free(in[k].data);
    for (size_t k = 0; k < NET_OUTPUTS; ++k) free(out[k].data);
  }
  if (net_set_dimension(context, NET_DIMENSION_SEQ, INT64_MAX) != NET_WRONG_DIMENSION) return 6;
  printf("%s, %d dimensions\n", net_dimensions()[1].name, NET_DIMENSIONS);
  return net_destroy(context);
}
"""


def test_a_program_in_c_runs_it_under_sanitizers(built: Built, tmp_path: Path) -> None:
    """And compilers have nothing to say about the code."""
    objects = built.folder / "objects"
    program = {c_runtime.PROGRAM: objects / c_runtime.PROGRAM}
    c_runtime.write_sources(built.described, program, tmp_path)
    (tmp_path / "net.h").write_text((built.folder / "net.h").read_text())
    (tmp_path / "main.c").write_text(PROGRAM)
    compiled = [str(path) for path in objects.glob("*.o")]
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-type-limits"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = ["main.c", c_runtime.SOURCE, *compiled]
    command = ["gcc", *flags, *sanitizers, *sources, "-o", "program", "-lm", "-pthread"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "seq, 2 dimensions\n", "")


def _one_kernel(size: Any, dimensions: tuple[Dimension, ...]) -> tvm.IRModule:
    """A model that is one row of a size."""
    x = relax.Var("x", relax.TensorType([size], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.multiply(x, x))
        builder.emit_func_output(relax.Tuple([output]))
    mod = builder.get()
    main = mod["main"].with_attr("num_input", 1)
    mod.update_func(mod.get_global_var("main"), with_dimensions(main, dimensions))
    return relax.transform.LegalizeOps()(mod)


def test_sizes_that_are_no_dimensions_need_the_virtual_machine() -> None:
    """A variable of another name, or of the name alone."""
    known, other = tirx.Var("seq", "int64"), tirx.Var("other", "int64")
    assert find_runtime(_one_kernel(known, DIMENSIONS), "auto") == ("c", "")
    runtime, reason = find_runtime(_one_kernel(other, DIMENSIONS), "auto")
    assert (runtime, reason) == ("vm", "shapes that are known only when it runs")
    with pytest.raises(UnsupportedProgram, match="known only when it runs"):
        read_program(_one_kernel(known, ()), [])


def test_more_memory_than_addresses_is_refused() -> None:
    """When it is built, with the dimension that is too large."""
    seq = tirx.Var("seq", "int64")
    program = read_program(_one_kernel(seq, (Dimension("seq", 1, 2**30),)), [])
    plan_memory(program)
    (kernel,) = list_kernel_calls(program.steps)
    traits = {kernel: KernelTraits("k", (), 0, ("n0",))}
    assert "TF_LARGEST_TENSORS 8589934592u" in generate_code(program, traits, "net_", 64)
    with pytest.raises(StageError, match=r"programs of 32 bits .* because of seq"):
        generate_code(program, traits, "net_", 32)


def test_models_of_fixed_sizes_have_no_dimensions() -> None:
    """Their interface has none of the functions."""
    described = c_runtime.DescribedModel(
        "net", {"inputs": [], "outputs": []}, (), "x86_64-linux-gnu"
    )
    header = c_runtime.write_header(described)
    assert "dimension" not in header.lower() and "%" not in header


@pytest.mark.parametrize(
    "triple",
    [
        "x86_64-pc-windows-gnu",
        "wasm32-wasi",
        "thumbv7em-none-eabihf",
        "armv7-linux-gnueabihf",
        "arm64-apple-macos13",
    ],
)
def test_other_systems_compile_the_code(built: Built, tmp_path: Path, triple: str) -> None:
    """Without a warning, also where nothing is allocated after `create`."""
    program = built.folder / "objects" / c_runtime.PROGRAM
    described = built.described._replace(triple=triple)
    c_runtime.write_sources(described, {c_runtime.PROGRAM: program}, tmp_path)
    linking.compile_c(tmp_path, c_runtime.SOURCE, "model.o", triple)
    header = (tmp_path / "library.h").read_text()
    assert ("NET_MEMORY_BYTES" in header) == triple.startswith("thumb")


NODE = """
import { load } from "./net.js";
const model = await load();
const results = [];
for (const [batch, seq] of [[1, 16], [6, 96], [1, 4], [2, 32], [1, 16]]) {
  model.setDimensions({ batch, seq });
  const values = model.inputs.map((tensor) => Float32Array.from({ length: tensor.bytes / 4 }, (_, i) => (i % 13) / 13 - 0.5));
  const outputs = model.run({ x: values[0], y: values[1] });
  results.push([model.outputs.map((tensor) => tensor.shape), [...outputs.out1]]);
}
const errors = [{ seq: 15 }, { seq: 98 }, { other: 1 }, { batch: NaN }].map((sizes) => {
  try {
    return model.setDimensions(sizes);
  } catch (error) {
    return error.message;
  }
});
model.destroy();
console.log(JSON.stringify([model.dimensions, results, errors]));
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_javascript_chooses_dimensions(built: Built, tmp_path: Path) -> None:
    """The outputs are those of this machine's library, up to roundings."""
    wasm = {
        "kind": "llvm",
        "mtriple": "wasm32-wasi",
        "mcpu": "generic",
        "mattr": ["+simd128"],
        "vector-width": 128,
    }
    described = built.described._replace(triple="wasm32-wasi")
    compiled, _ = compile_objects(built.model, tmp_path, wasm)
    c_runtime.link(described, compiled, tmp_path / "net.wasm", tmp_path / "libnet.a")
    (tmp_path / "net.js").write_text(c_runtime.write_loader(described))
    (tmp_path / "main.mjs").write_text(NODE)
    done = subprocess.run(["node", "main.mjs"], cwd=tmp_path, capture_output=True, check=True)
    dimensions, results, errors = json.loads(done.stdout)
    assert dimensions[1] == {"name": "seq", "min": 2, "max": 96, "multipleOf": 2, "size": 16}
    library = load(built)
    for (batch, seq), (shapes, values) in zip(
        ((1, 16), (6, 96), (1, 4), (2, 32), (1, 16)), results, strict=True
    ):
        sizes = {"batch": batch, "seq": seq}
        assert list(map(tuple, shapes)) == built.model.shapes(sizes)
        inputs = [
            ((np.arange(array.size) % 13) / 13 - 0.5).astype("float32").reshape(array.shape)
            for array in built.model.draw(sizes)
        ]
        expected = library.call(built.model, inputs)[1]
        np.testing.assert_allclose(np.reshape(values, expected.shape), expected, 1e-4, 1e-5)
    assert errors == [
        "the dimension seq is 15, and its sizes are 2 to 96, multiples of 2",
        "the dimension seq is 98, and its sizes are 2 to 96, multiples of 2",
        "the model has no dimension other",
        "the dimension batch is NaN, and its sizes are 1 to 6",
    ]


def make_condition() -> DynamicModel:
    """A model that joins its input with itself, or with its negative, by the sign of its mean."""
    batch, seq = (tirx.Var(entry.name, "int64") for entry in DIMENSIONS)
    x = relax.Var("x", relax.TensorType([batch, seq, 24], "float32"))
    y = relax.Var("y", relax.TensorType([batch, 24], "float32"))
    joined = relax.TensorType([batch, seq * 2, 24], "float32")
    first, second = relax.Var("first", joined), relax.Var("second", joined)
    negative = relax.Var("negative", x.ty)
    steps = [
        relax.VarBinding(negative, relax.op.negative(x)),
        relax.VarBinding(second, relax.op.concat([negative, x], 1)),
    ]
    same = [relax.VarBinding(first, relax.op.concat([x, x], 1))]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        mean = builder.emit(relax.op.mean(x))
        positive = builder.emit(relax.op.greater(mean, relax.const(np.float32(0))))
        sides = [
            relax.SeqExpr([relax.BindingBlock(bindings)], result)
            for bindings, result in ((same, first), (steps, second))
        ]
        chosen = builder.emit(relax.If(positive, *sides))
        total = builder.emit(relax.op.add(chosen, chosen))
        builder.emit_func_output(relax.Tuple([total, builder.emit(relax.op.mean(x, 1))]))
    mod = builder.get()
    main = mod["main"].with_attr("num_input", 2)
    mod.update_func(mod.get_global_var("main"), with_dimensions(main, DIMENSIONS))
    return describe(mod)


def test_conditions_have_dynamic_shapes(tmp_path: Path) -> None:
    """Both sides write the same memory."""
    made = build(make_condition(), tmp_path)
    library = load(made, threads=2)
    for number, seq in enumerate(ORDER):
        inputs = made.model.draw({"batch": 2, "seq": seq}, number)
        inputs[0] += (-1) ** number
        actual, expected = library.call(made.model, inputs), made.run_machine(inputs)
        assert all(map(np.array_equal, actual, expected))
