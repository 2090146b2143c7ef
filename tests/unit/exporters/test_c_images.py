"""Images in C: the inputs have the bits of Python, and what is not an image is refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import tvmflow
from tests.support.exports import MODELS, Exported
from tests.support.images import INPUTS
from tvmflow.core.errors import BundleError
from tvmflow.exporters import EXPORTERS, c_library
from tvmflow.exporters.exporter import ExportRequest
from tvmflow.runtime.image_files import read_pixels
from tvmflow.runtime.images import Preprocessing
from tvmflow.targets.c_runtime import DescribedModel

OK, NO_IMAGE, TOO_LARGE, NO_MEMORY, NO_INPUT = range(5)
LABELS: Final = ["cat", 'a"b\\', "??/ */ %s \u00e4\u732b"]

Call = Callable[..., int]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The headers of all these models in one library, which also checks for undefined behaviour."""
    folder = tmp_path_factory.mktemp("images")
    source = []
    for name, (spec, fields) in INPUTS.items():
        output = {"name": "scores", "shape": [1, 3], "dtype": "float32"}
        signature = {"inputs": [output, spec.to_json()], "outputs": [output]}
        model = DescribedModel(name, signature, (), "x86_64-linux-gnu")
        labels = {"names": LABELS, "activation": "", "sha256": ""}
        text = c_library.write_image_header(model, {"images": {"data": fields}, "labels": labels})
        (folder / c_library.image_header_name(name)).write_text(text, encoding="utf-8")
        source.append(
            f'#include "{name}-images.h"\n'
            f"int call_{name}(const uint8_t *pixels, size_t height, size_t width, size_t channels,"
            " size_t row_bytes, size_t input, size_t place, void *values) {\n"
            f"  const {name}_pixels image = {{pixels, height, width, channels, row_bytes}};\n"
            f"  return {name}_preprocess(&image, input, place, values);\n}}\n"
            f"const char *error_{name}(int status) {{ return {name}_preprocess_error(status); }}\n"
            f"const char *label_{name}(size_t i) {{ return {name}_labels[i]; }}\n"
        )
    (folder / "all.c").write_text("".join(source))
    options = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-O0"]
    command = [sys.executable, "-m", "ziglang", "cc", *options, "-shared", "-fPIC"]
    subprocess.run([*command, "all.c", "-o", "all.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


def call(library: Any, name: str, *words: Any) -> int:
    """Call the preprocessing: pixels, height, width, channels, bytes of a row, input, place, values."""
    pixels, *sizes, values = words
    numbers = [ctypes.c_size_t(size) for size in sizes]
    addresses = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (pixels, values)]
    return int(getattr(library, f"call_{name}")(addresses[0], *numbers, addresses[1]))


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_have_the_bits_of_python(library: Any, name: str) -> None:
    """Smaller and larger images, a pixel wide, a pixel high; gray, RGB and RGBA; rows with padding."""
    spec, fields = INPUTS[name]
    entry = Preprocessing.of(fields, spec)
    rng = np.random.default_rng(0)
    sizes = [(8, 9), (61, 40), (37, 150), (1, 1), (200, 301), (1, 77), (90, 1), (*entry.size,)]
    for height, width in sizes:
        for channels in (1, 3, 4):
            padded = rng.integers(0, 256, (height, width + 2, channels), np.uint8)
            padded = np.where(padded > 127, 255, 0).astype("u1") if width % 2 else padded
            pixels = padded[:, :width]
            expected = entry.tensor([entry.fit(read_pixels(np.ascontiguousarray(pixels)))])
            values = np.zeros_like(expected)
            for place in range(len(values)):
                arguments = (padded, height, width, channels, padded.strides[0], 1, place, values)
                assert call(library, name, *arguments) == OK
            np.testing.assert_array_equal(values, expected, err_msg=f"{pixels.shape}")


def test_what_is_no_image_is_refused(library: Any) -> None:
    """Without a read: sizes that overflow, too; a long thin image as in Python, and inputs that there are not."""
    values = np.zeros((2, 3, 28, 28), "float32")
    pixels = np.zeros(12, np.uint8)
    most = 2**64 - 1
    refused = [
        (NO_IMAGE, (None, 2, 2, 3, 0, 1, 0, values)),
        *((NO_IMAGE, (pixels, *sizes, 0, 1, 0, values)) for sizes in ((0, 2, 3), (2, 0, 3))),
        *((NO_IMAGE, (pixels, 2, 2, channels, 0, 1, 0, values)) for channels in (0, 2, 5, most)),
        (NO_IMAGE, (pixels, 2, 2, 3, 5, 1, 0, values)),
        *((NO_IMAGE, (pixels, *sizes, 3, 0, 1, 0, values)) for sizes in ((most, 2), (2, most))),
        (NO_IMAGE, (pixels, 2**32, 2**32, 1, 0, 1, 0, values)),
        (NO_IMAGE, (pixels, 2, 2, 3, most, 1, 0, values)),
        (TOO_LARGE, (pixels, 2**41, 1, 1, 0, 1, 0, values)),
        (TOO_LARGE, (pixels, 1, 2**19, 1, 0, 1, 0, values)),
        (NO_INPUT, (pixels, 2, 2, 3, 0, 0, 0, values)),
        (NO_INPUT, (pixels, 2, 2, 3, 0, most, 0, values)),
        (NO_INPUT, (pixels, 2, 2, 3, 0, 1, 2, values)),
        (NO_INPUT, (pixels, 2, 2, 3, 0, 1, 0, None)),
    ]
    for status, words in refused:
        assert call(library, "classifier", *words) == status, words[1:-1]
    assert not values.any()
    with pytest.raises(BundleError, match="the limit is 268,435,456 pixels"):
        spec, fields = INPUTS["classifier"]
        Preprocessing.of(fields, spec).fit(np.zeros((1, 2**19, 1), np.uint8))
    error = library.error_classifier
    error.restype = ctypes.c_char_p
    assert b"268,435,456 pixels" in error(TOO_LARGE) and error(99) == b"unknown error"


def test_labels_are_the_names_of_the_classes(library: Any) -> None:
    """With quotes, what C reads as other characters, and letters of other scripts; NULL ends them."""
    library.label_half.restype = ctypes.c_char_p
    names = [library.label_half(place) for place in range(len(LABELS) + 1)]
    assert names == [*(label.encode() for label in LABELS), None]


@pytest.mark.parametrize("output", ["c-library", "c-library-weights"])
def test_models_without_images_have_no_header_for_them(output: str) -> None:
    """And one that takes images has no other file besides."""
    request = ExportRequest("net", "0", "host", "llvm", "x86_64-linux-gnu")
    files = EXPORTERS[output].files
    added = set(files(request._replace(has_images=True))) - set(files(request))
    assert added == {f"net-{output}/net-images.h"}


PROGRAM: Final = """\
#include <stdio.h>
#include "digits.h"
#include "digits-images.h"

int main(int count, char **words) {
  static uint8_t pixels[1 << 16];
  static float input[64], scores[10];
  FILE *file = count == 4 ? fopen(words[1], "rb") : NULL;
  digits_pixels image = {pixels, 0, 0, 3, 0};
  digits_context *context;
  digits_buffer in = {input, sizeof input}, out = {scores, sizeof scores};
  size_t best = 0, i;
  if (!file || !fread(pixels, 1, sizeof pixels, file)) return 1;
  image.height = (size_t)atoi(words[2]);
  image.width = (size_t)atoi(words[3]);
  if (digits_preprocess(&image, DIGITS_INPUT_DATA, 0, input) != DIGITS_PREPROCESS_OK) return 2;
  if (digits_create(NULL, &context) != DIGITS_OK || digits_run(context, &in, 1, &out, 1) != DIGITS_OK) return 3;
  for (i = 0; i < DIGITS_LABELS; ++i) if (scores[i] > scores[best]) best = i;
  printf("%s %a\\n", digits_labels[best], scores[best]);
  return digits_destroy(context);
}
"""


def test_a_program_names_digits_as_python_does(exported: Exported, tmp_path: Path) -> None:
    """With the delivered headers and the static library."""
    delivered = exported.dist / "digits-c-library"
    (tmp_path / "program.c").write_text(PROGRAM)
    options = ["-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{delivered}"]
    command = [sys.executable, "-m", "ziglang", "cc", *options, "program.c"]
    command += [str(delivered / "libdigits.a"), "-lm", "-lpthread", "-o", "program"]
    subprocess.run(command, cwd=tmp_path, check=True)
    module = tvmflow.load(exported.dist / "digits.tvmflow")
    for path in sorted((MODELS / "digits-images").glob("*/0.png")):
        pixels = read_pixels(path)
        rgb = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels
        (tmp_path / "pixels").write_bytes(rgb.tobytes())
        sizes = [str(size) for size in rgb.shape[:2]]
        program = [str(tmp_path / "program"), str(tmp_path / "pixels"), *sizes]
        shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()
        [[best, *_]] = module.classify([path])
        assert (shown[0], float.fromhex(shown[1])) == (best.label, best.probability)
