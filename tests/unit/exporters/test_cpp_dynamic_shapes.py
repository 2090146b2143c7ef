"""`cpp` of a model of dynamic shape: its header and its tools take any sizes, and name those that are wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image
from tvm import relax, tirx

import tvmflow
from tests.support import dynamic_programs, exports
from tests.support.dynamic_programs import DIMENSIONS, DynamicBundles, DynamicModel
from tests.support.exports import Array
from tests.unit.exporters.cpp_projects import PROGRAMS, run
from tvmflow.core.types import Json
from tvmflow.exporters import cpp
from tvmflow.exporters.cpp import Library
from tvmflow.exporters.exporter import BuiltModel, ExportRequest
from tvmflow.graph.dynamic_shapes import with_dimensions
from tvmflow.runtime.bundles import read_bundle
from tvmflow.runtime.images import Preprocessing
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel

SIZES: Final = ((1, 16), (6, 96), (1, 4), (2, 32), (6, 2), (1, 16), (3, 94))


@pytest.fixture(scope="module")
def bundle(dynamic_bundles: DynamicBundles) -> Path:
    """A random network of dynamic shape."""
    return dynamic_bundles.doubling


def export(
    folder: Path, signature: dict[str, Json], objects: Path, manifest: dict[str, Json]
) -> Path:
    """The project of a compiled model."""
    triple = str(exports.target().tvm["mtriple"])
    request = ExportRequest("net", "1.0", "host", "llvm", triple)
    request = request._replace(has_images="images" in manifest)
    assert cpp.unsupported_reason(request) == ""
    forms = {cpp.FORM: {path.name: path for path in objects.iterdir() if path.is_file()}}
    described = {"target": {"features": []}, **manifest}
    built = BuiltModel(request, folder / "none", forms, signature, described, folder / "none", {})
    cpp.export(built, folder)
    return folder / "net-cpp"


@pytest.fixture(scope="module")
def project(
    dynamic_bundles: DynamicBundles, bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Its project."""
    objects = dynamic_bundles.objects(bundle)
    found = read_bundle(bundle)
    return export(tmp_path_factory.mktemp("cpp"), dict(found.signature), objects, {})


@pytest.fixture(scope="module")
def tool(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its command line tool, compiled."""
    return exports.program_of(project, tmp_path_factory.mktemp("tool") / "run")


def feed(batch: int, seq: int) -> dict[str, Array]:
    rng = np.random.default_rng(batch * 1000 + seq)
    return {
        "x": rng.standard_normal((batch, seq, 24), dtype=np.float32),
        "y": rng.standard_normal((batch, 24), dtype=np.float32),
    }


def test_the_tool_gives_what_python_gives(tool: Path, bundle: Path, tmp_path: Path) -> None:
    """Sizes are those of the arrays; of raw values, those of another array or of the command line."""
    module = tvmflow.load(bundle)
    for batch, seq in SIZES:
        given = feed(batch, seq)
        expected = module.run(given)
        np.savez(tmp_path / "in.npz", **given)
        np.savez(tmp_path / "y.npz", y=given["y"])
        for name, values in given.items():
            values.tofile(tmp_path / f"{name}.bin")
        raw = [f"{name}={tmp_path / name}.bin" for name in given]
        sizes = ["--size", f"seq={seq}"]
        for words in (
            [tmp_path / "in.npz"],
            [*sizes, raw[0], tmp_path / "y.npz"],
            [*sizes, "--size", f"batch={batch}", *raw],
        ):
            done = run(tool, *words, tmp_path / "out.npz")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            with np.load(tmp_path / "out.npz") as arrays:
                assert set(arrays.files) == set(expected)
                for name, values in expected.items():
                    np.testing.assert_array_equal(arrays[name], values, strict=True)
            (tmp_path / "out.npz").unlink()


def shaped(*shapes: tuple[int, ...]) -> dict[str, Array]:
    return {
        name: np.zeros(shape, "float32") for name, shape in zip(("x", "y"), shapes, strict=False)
    }


FITTING: Final = shaped((2, 32, 24), (2, 24))


@pytest.mark.parametrize(
    ("arrays", "words", "sentence"),
    [
        (
            shaped((2, 98, 24), (2, 24)),
            [],
            "the dimension seq is 98, and its sizes are 2 to 96, multiples of 2",
        ),
        (
            shaped((2, 33, 24), (2, 24)),
            [],
            "the dimension seq is 33, and its sizes are 2 to 96, multiples",
        ),
        (shaped((0, 32, 24), (0, 24)), [], "the dimension batch is 0, and its sizes are 1 to 6"),
        (shaped((2, 32, 24), (3, 24)), [], "the dimension batch has two sizes: size 0 of input"),
        (shaped((2, 32, 25), (2, 24)), [], "size 2 of input 'x' is 25, and the model's is 24"),
        (shaped((2, 32), (2, 24)), [], "input 'x' is float32 [batch, seq, 24]: a shape of 3 sizes"),
        (shaped((2, 32, 24)), [], "there is no array for the input y: float32 [2, 24]"),
        (FITTING, ["--size", "seq=30"], "--size says that seq is 30, and the arrays have 32"),
        (FITTING, ["--size", "length=30"], "there is no dimension 'length' (there is 'batch'"),
        (FITTING, ["--size", "seq"], "--size takes DIMENSION=SIZE, such as batch=3, not 'seq'"),
        (FITTING, ["--size", f"seq={'9' * 30}"], "--size takes DIMENSION=SIZE"),
        (
            FITTING,
            ["--size", "seq=98"],
            "the dimension seq is 98, and its sizes are 2 to 96, multiples of 2",
        ),
        ({}, ["x={folder}/long.bin", "y={folder}/y.bin"], "has values for larger sizes: choose"),
        ({}, ["x={folder}/odd.bin", "y={folder}/y.bin"], "x: float32 [1, 2, 24] takes 192"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    tool: Path, tmp_path: Path, arrays: dict[str, Array], words: list[str], sentence: str
) -> None:
    for name, count in (("long", 96), ("odd", 7), ("y", 24)):
        (tmp_path / f"{name}.bin").write_bytes(bytes(4 * count))
    np.savez(tmp_path / "in.npz", **arrays)
    formatted = [word.format(folder=tmp_path) for word in words]
    done = run(tool, *formatted, tmp_path / "in.npz", tmp_path / "out.npz")
    assert (done.returncode, sentence in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "out.npz").exists()


MISUSES: Final = [
    "18 net: the dimension seq is 98, and its sizes are 2 to 96, multiples of 2",
    "18 net: the dimension batch is 0, and its sizes are 1 to 6",
    "18 net: the dimension seq is 33, and its sizes are 2 to 96, multiples of 2",
    "18 net: the dimension seq is -4, and its sizes are 2 to 96, multiples of 2",
    "-1 net: there is no dimension 'length' (there is 'batch', 'seq')",
    "4 net: there is no dimension 2 (there are 2, counted from 0)",
    "18 net: the dimension seq is 7, and its sizes are 2 to 96, multiples of 2",
    "65536 net: the dimension batch has two sizes: size 0 of input 'y' is 3, and size 0 of input 'x' is 2",
    "65536 net: size 2 of input 'x' is 25, and the model's is 24",
    "65536 net: input 'y' is float32 [batch, 24]: a shape of 2 sizes, not 3",
    "-1 net: there is no input 'z' (there is 'x', 'y')",
    "65536 net: input 'x' is float32 [1, 34, 24]: 816 values, not 768",
    "65536 net: output 'out0' is float32 [1, 64, 24]: 1536 values, not 1537",
    "7 net: the model is in use by another thread: make one for each thread",
    "1 net: this model was moved to another variable",
    "1 net: this model was moved to another variable",
]


def check_outputs(path: Path, bundle: Path) -> None:
    """Compare the outputs that `dynamic_shapes.cpp` wrote with those of Python, bit for bit."""
    values, place, module = np.fromfile(path, "float32"), 0, tvmflow.load(bundle)

    def fill(*shape: int) -> Array:
        return ((np.arange(np.prod(shape)) % 13) / 16 - 0.5).astype("float32").reshape(shape)

    for batch, seq in SIZES:
        outputs = module.run({"x": fill(batch, seq, 24), "y": fill(batch, 24)})
        for expected in (outputs["out0"], outputs["out1"]):
            found = values[place : place + expected.size]
            np.testing.assert_array_equal(found, expected.ravel())
            place += expected.size
    assert place == values.size


def test_a_program_takes_sizes_in_any_order(project: Path, bundle: Path, tmp_path: Path) -> None:
    """In its memory and in the model's; sizes that were seen allocate nothing, and misuses are errors."""
    program = exports.compile_cpp(PROGRAMS / "dynamic_shapes.cpp", tmp_path / "run", project)
    done = run(program, tmp_path / "outputs")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == MISUSES
    check_outputs(tmp_path / "outputs", bundle)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs GNU's compiler")
def test_the_compiler_of_the_system_has_no_complaint(
    project: Path, bundle: Path, tmp_path: Path
) -> None:
    """Under the address and undefined-behaviour sanitizers; warnings are errors."""
    flags = "-std=c++17 -g -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    libraries = [str(project / "lib" / "libnet.a"), "-lpthread"]
    for source in (PROGRAMS / "dynamic_shapes.cpp", project / "main.cpp"):
        command = ["g++", *flags.split(), *sanitizers, f"-I{project / 'include'}", str(source)]
        subprocess.run([*command, *libraries, "-o", str(tmp_path / source.stem)], check=True)
    done = run(tmp_path / "dynamic_shapes", tmp_path / "outputs")
    assert (done.returncode, done.stderr) == (0, "")
    check_outputs(tmp_path / "outputs", bundle)
    np.savez(tmp_path / "in.npz", **feed(3, 38))
    done = run(tmp_path / "main", tmp_path / "in.npz", tmp_path / "out.npz")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "triple", ["aarch64-linux-gnu", "arm-linux-gnueabihf", "x86_64-windows-gnu", "aarch64-macos"]
)
def test_other_systems_compile_it(project: Path, tmp_path: Path, triple: str) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", "-target", triple, "-std=c++17", "-O0"]
    flags = ["-Wall", "-Wextra", "-Wconversion", "-Werror", f"-I{project / 'include'}", "-c"]
    output = ["-o", str(tmp_path / "main.o")]
    subprocess.run([*command, *flags, str(project / "main.cpp"), *output], check=True)


def test_the_example_of_the_readme_is_a_program(project: Path, tmp_path: Path) -> None:
    text = (project / "README.md").read_text()
    source = tmp_path / "program.cpp"
    source.write_text(text.partition("```cpp\n")[2].partition("```")[0])
    done = run(exports.compile_cpp(source, tmp_path / "run", project))
    assert (done.returncode, done.stderr) == (0, "")
    assert "--size batch=3" in text and "//@" not in text


def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    """Dimensions with the names of keywords, and tensors with those that end strings and comments."""
    name = 'a"b\\*/ ??/\n#error @NAME@ //@all\n'
    signature: dict[str, Any] = {
        "dimensions": [
            {"name": word, "min": 1, "max": 4, "multiple_of": 1} for word in ("class", "int")
        ],
        "inputs": [
            {"name": name, "dtype": "float32", "shape": [4, 4], "sizes": ["class", "int"]},
            {"name": "scalar", "dtype": "float32", "shape": []},
        ],
        "outputs": [
            {
                "name": f"{name}2",
                "dtype": "int64",
                "shape": [4],
                "sizes": ["class * int // 4"],
                "bounded_axis": 0,
            }
        ],
    }
    triple = str(exports.target().tvm["mtriple"])
    model = DescribedModel("net", signature, (), triple)
    request = ExportRequest("net", "1", "host", "llvm", triple)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "net.h").write_text(c_runtime.write_header(model))
    header = cpp.write_header(model, [Library(model)])
    (tmp_path / "include" / "net.hpp").write_text(header)
    shutil.copyfile(cpp.FOLDER / "npz.hpp", tmp_path / "npz.hpp")
    values = cpp._describe(model, [Library(model)], request)
    program = cpp.render_template("main.cpp", values, has_dimensions=True)
    (tmp_path / "main.cpp").write_text(program)
    assert cpp._find_errors(tmp_path, request) == []


def draw_classifier() -> DynamicModel:
    """A classifier of a batch of images of 8x8 pixels."""
    batch = tirx.Var(DIMENSIONS[0].name, "int64")
    image = relax.Var("x", relax.TensorType([batch, 1, 8, 8], "float32"))
    weight = np.random.default_rng(0).standard_normal((64, 10), dtype=np.float32)
    builder = relax.BlockBuilder()
    with builder.function("main", [image]):
        with builder.dataflow():
            flat = builder.emit(relax.op.reshape(image, [batch, 64]))
            product = builder.emit(relax.op.matmul(flat, relax.const(weight)))
            scores = builder.emit_output(relax.op.nn.softmax(product))
        builder.emit_func_output(relax.Tuple([scores]))
    mod = builder.get()
    main = mod["main"].with_attr("num_input", 1)
    mod.update_func(mod.get_global_var("main"), with_dimensions(main, DIMENSIONS[:1]))
    return dynamic_programs.describe(mod)._replace(dimensions=DIMENSIONS[:1])


@pytest.mark.slow
def test_the_tool_for_images_takes_a_batch_of_dynamic_size(tmp_path: Path) -> None:
    """The smallest batch; a program fills one of any size."""
    built = dynamic_programs.build(draw_classifier(), tmp_path)
    signature = built.model.signature
    labels = {"names": [f"class {i}" for i in range(10)], "activation": "softmax", "sha256": ""}
    manifest: dict[str, Any] = {"images": {"x": {"mean": 0.5}}, "labels": labels}
    project = export(tmp_path, signature, tmp_path / "objects", manifest)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    expected = Preprocessing.of(manifest["images"]["x"], built.model.inputs[0])
    [one] = [expected.fit(pixels[:, :, None])]
    tensor = expected.tensor([one])[:1]
    scores = built.run_machine([tensor])[0]
    tool = exports.compile_cpp(project / "image.cpp", tmp_path / "image", project)
    done = run(tool, tmp_path / "x.png", tmp_path / "out.npz")
    assert (done.returncode, done.stderr) == (0, "")
    with np.load(tmp_path / "out.npz") as arrays:
        np.testing.assert_array_equal(arrays["out0"], scores, strict=True)
    program = exports.compile_cpp(PROGRAMS / "dynamic_images.cpp", tmp_path / "batch", project)
    (tmp_path / "pixels").write_bytes(pixels.tobytes())
    done = run(program, tmp_path / "pixels")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "4 net: a batch has 3 images, counted from 0",
        "65536 net: input 'x' is float32 [2, 1, 8, 8]: 128 values, not 191",
    ]
