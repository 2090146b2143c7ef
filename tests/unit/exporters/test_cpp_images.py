"""Images in C++ projects: the bits of the inputs are those of Python, and files are read as Pillow reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tvmflow
from tests.support import exports
from tests.support.exports import MODELS, Exported
from tests.support.images import INPUTS
from tests.unit.exporters.cpp_projects import PROGRAMS, project_of, run
from tvmflow.exporters import c_library, cpp
from tvmflow.exporters.cpp import Library
from tvmflow.runtime.image_files import read_pixels
from tvmflow.runtime.images import Preprocessing
from tvmflow.runtime.labels import format_predictions, predictions_json
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel

# compiling the program with all of its inputs takes a minute
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def preprocess(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with the preprocessing of all these inputs, without their models."""
    folder = tmp_path_factory.mktemp("preprocess")
    (folder / "include").mkdir()
    for name in ("npz.hpp", "image_file.hpp"):
        shutil.copy(cpp.FOLDER / name, folder)
    source = Path(shutil.copy(PROGRAMS / "preprocess.cpp", folder))
    for name, (spec, fields) in INPUTS.items():
        output = {"name": "scores", "shape": [1, 2], "dtype": "float32"}
        signature = {"inputs": [spec.to_json()], "outputs": [output]}
        model = DescribedModel(name, signature, (), "x86_64-linux-gnu")
        manifest = {"images": {"data": fields}}
        headers = {
            f"{name}.h": c_runtime.write_header(model),
            f"{name}.hpp": cpp.write_header(model, [Library(model)]),
            f"{name}-images.h": c_library.write_image_header(model, manifest),
            f"{name}-images.hpp": cpp.write_images_header(model, manifest),
        }
        for file, text in headers.items():
            (folder / "include" / file).write_text(text)
    return exports.compile_cpp(source, folder / "run", folder)


@pytest.mark.parametrize(("height", "width"), [(8, 9), (61, 40), (37, 150), (1, 1), (200, 301)])
def test_inputs_have_the_bits_of_python(
    preprocess: Path, tmp_path: Path, height: int, width: int
) -> None:
    """Every layout, colour and dtype, resized up and down, cropped and padded; noise and edges, gray and colours."""
    rng = np.random.default_rng(height)
    noise = rng.integers(0, 256, (height, width, 3), np.uint8)
    for number, pixels in enumerate(
        (noise, np.where(noise > 127, 255, 0).astype("u1"), noise[:, :, 0])
    ):
        path = tmp_path / f"{number}.{'ppm' if number else 'png'}"
        Image.fromarray(pixels).save(path)
        done = run(preprocess, path, tmp_path / "out.npz")
        assert (done.returncode, done.stderr) == (0, "")
        with np.load(tmp_path / "out.npz") as arrays:
            for name, (spec, fields) in INPUTS.items():
                entry = Preprocessing.of(fields, spec)
                expected = entry.tensor([entry.fit(read_pixels(pixels))])
                np.testing.assert_array_equal(arrays[name], expected, err_msg=name)


@pytest.fixture(scope="module")
def tool(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command line tool for images, compiled."""
    project = project_of(exported)
    path = tmp_path_factory.mktemp("cpp") / "image"
    return exports.compile_cpp(project / "image.cpp", path, project)


def test_the_tool_names_digits_as_python_does(
    tool: Path, exported: Exported, tmp_path: Path
) -> None:
    """The shipped images: the same classes with the same probabilities, and the same outputs."""
    module = tvmflow.load(exported.dist / "digits.tvmflow")
    assert module.classes is not None and module.classes.activation == "softmax"
    for path in sorted((MODELS / "digits-images").glob("*/0.png")):
        done = run(tool, path, tmp_path / "out.npz")
        predictions = predictions_json([str(path)], module.classify([path]))
        lines = list(format_predictions(predictions))
        assert done.stdout.splitlines() == [
            "probabilities: the output 'softmax_output'",
            *lines[1:],
        ]
        with np.load(tmp_path / "out.npz") as arrays:
            expected = module.run(module.preprocess(path))["softmax_output"]
            np.testing.assert_array_equal(arrays["softmax_output"], expected)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA"])
def test_png_files_are_read_as_pillow_reads_them(
    preprocess: Path, tmp_path: Path, mode: str
) -> None:
    """Filters and blocks of every kind: photographs, noise that is stored as it is, and one colour."""
    y, x = np.mgrid[:90, :120]
    smooth = np.stack([x * 2, y * 2, (x * y) % 256], axis=2).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    spec, fields = INPUTS["cropped"][0], INPUTS["cropped"][1]
    entry = Preprocessing.of(fields, spec)
    for pixels in (smooth, noise, np.full((90, 120, 3), 7, np.uint8)):
        for level in (0, 1, 9):
            image = Image.fromarray(pixels).convert(mode)
            image.save(tmp_path / "x.png", compress_level=level)
            done = run(preprocess, tmp_path / "x.png", tmp_path / "out.npz")
            assert (done.returncode, done.stderr) == (0, "")
            with np.load(tmp_path / "out.npz") as arrays:
                expected = entry.tensor([entry.fit(read_pixels(tmp_path / "x.png"))])
                np.testing.assert_array_equal(arrays["cropped"], expected)


def finds_stb_image() -> bool:
    """Whether the compiler of the programs finds stb_image.h."""
    headers = ("stb_image.h", "stb/stb_image.h")
    conditions = " && ".join(f'!__has_include("{name}")' for name in headers)
    command = ["g++", "-E", "-x", "c++", "-"]
    text = f"#if {conditions}\n#error\n#endif\n"
    return (
        shutil.which("g++") is not None
        and not subprocess.run(
            command, input=text.encode(), capture_output=True, check=False
        ).returncode
    )


@pytest.mark.skipif(not finds_stb_image(), reason="needs stb_image.h (Debian: libstb-dev)")
def test_bmp_gif_and_jpeg_are_read_by_stb_image(preprocess: Path, tmp_path: Path) -> None:
    """Decoders of JPEG round differently: its levels are within 3 of Pillow's, and damaged files are refused."""
    y, x = np.mgrid[:64, :48]
    image = Image.fromarray(np.stack([x * 4, y * 3, x + y], axis=2).astype(np.uint8))
    for kind, mode, tolerance in (
        ("bmp", "RGB", 0),
        ("gif", "P", 0),
        ("jpeg", "L", 3),
        ("jpeg", "RGB", 3),
        ("jpeg", "CMYK", 3),
    ):
        path = tmp_path / f"x.{kind}"
        image.convert(mode).save(path)
        done = run(preprocess, path, tmp_path / "out.npz")
        assert (done.returncode, done.stderr) == (0, "")
        with np.load(tmp_path / "out.npz") as arrays:
            levels = np.moveaxis(read_pixels(path), 2, 0)
            assert np.abs(arrays["letterbox"][0] - levels).max() <= tolerance, (kind, mode)
        path.write_bytes(path.read_bytes()[:300])
        done = run(preprocess, path, tmp_path / "out.npz")
        assert done.returncode == 0 or "cannot be read as an image" in done.stderr


def test_files_that_cannot_be_read_have_messages(preprocess: Path, tmp_path: Path) -> None:
    """Other depths, interlaced, cut and damaged files: never a crash."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 30, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "good.png")
    good = (tmp_path / "good.png").read_bytes()
    Image.fromarray(noise[:, :, 0].astype("<u2") * 256).save(tmp_path / "deep.png")
    files = {
        "none.png": None,
        "deep.png": (tmp_path / "deep.png").read_bytes(),
        "x.webp": b"RIFF\4\0\0\0WEBP",
        "cut.png": good[: len(good) // 2],
        "damaged.png": good[:200] + bytes([good[200] ^ 1]) + good[201:],
        "short.ppm": b"P6 4 4 255\n1234",
        "empty.png": b"",
    }
    texts = {
        "none.png": "there is no file",
        "deep.png": "it has 16 bits for a channel: save it with 8",
        "x.webp": "PNG, PGM or PPM",
        "cut.png": "it ends too early",
        "damaged.png": "it is damaged",
        "short.ppm": "it has too few pixels",
        "empty.png": "PNG, PGM or PPM",
    }
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        done = run(preprocess, tmp_path / name, tmp_path / "out.npz")
        assert done.returncode == 1 and texts[name] in done.stderr, (name, done.stderr)


def test_damaged_streams_end_in_a_message(preprocess: Path, tmp_path: Path) -> None:
    """Also where the digest of a chunk is right: each byte of the compressed data in turn."""
    import zlib

    header = b"IHDR" + bytes([0, 0, 0, 6, 0, 0, 0, 5, 8, 2, 0, 0, 0])
    rows = b"".join(bytes([row % 5]) + bytes(range(row, row + 18)) for row in range(5))
    stream = zlib.compress(rows, 9)
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(stream)
        damaged[rng.integers(2, len(stream))] ^= 1 << rng.integers(0, 8)
        chunks = (header, b"IDAT" + bytes(damaged), b"IEND")
        png = b"\x89PNG\r\n\x1a\n" + b"".join(
            (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
            for chunk in chunks
        )
        (tmp_path / "x.png").write_bytes(png)
        done = run(preprocess, tmp_path / "x.png", tmp_path / "out.npz")
        assert done.returncode in (0, 1), done.stderr
        assert done.returncode == 0 or "cannot be read as an image" in done.stderr


def test_a_project_without_images_has_no_files_for_them(exported: Exported) -> None:
    """And with them, CMake builds the tool."""
    from tvmflow.exporters.exporter import ExportRequest

    request = ExportRequest("net", "0", "host", "llvm", "x86_64-linux-gnu")
    added = set(cpp.files(request._replace(has_images=True))) - set(cpp.files(request))
    names = ("image.cpp", "image_file.hpp", "include/net-images.h", "include/net-images.hpp")
    assert added == {f"net-cpp/{name}" for name in names}
    assert (
        "add_executable(digits_image image.cpp)"
        in (project_of(exported) / "CMakeLists.txt").read_text()
    )
