"""Preprocessing: what an image becomes, and settings that do not fit."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.types import TensorSpec
from tvmflow.runtime import image_files
from tvmflow.runtime.image_files import SUFFIXES, read_files, read_pixels
from tvmflow.runtime.images import ImageMismatch, Preprocessing, crop_offset

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def preprocessing(
    shape: tuple[int, ...] = (1, 3, 224, 224), dtype: str = "float32", **fields: Any
) -> Preprocessing:
    return Preprocessing.of(fields, TensorSpec("data", shape, dtype))


def noise(height: int, width: int, channels: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(height).integers(0, 256, (height, width, channels), np.uint8)


def tensor(entry: Preprocessing, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return entry.tensor([entry.fit(pixels)])


@pytest.mark.parametrize("size", [(375, 500), (500, 333), (256, 257), (80, 60)])
def test_a_classifier_is_given_what_torchvision_gives_it(size: tuple[int, int]) -> None:
    """Resize(256), CenterCrop(224), ToTensor and Normalize of torchvision, on Pillow's image."""
    height, width = size
    short, long = min(size), max(size)
    other = int(256 * long / short)
    new_width, new_height = (256, other) if width <= height else (other, 256)
    pixels = noise(height, width)
    image = Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BILINEAR)
    left, top = round((new_width - 224) / 2.0), round((new_height - 224) / 2.0)
    cropped = np.asarray(image.crop((left, top, left + 224, top + 224)))
    values = cropped.astype("float32") / np.float32(255)
    mean, std = np.array(MEAN, "float32"), np.array(STD, "float32")
    expected = ((values - mean) / std).transpose(2, 0, 1)[None]
    entry = preprocessing(resize=256, crop=224, mean=MEAN, std=STD)
    np.testing.assert_allclose(tensor(entry, pixels), expected, rtol=1e-6, atol=1e-6)


def test_layout_colour_and_dtype_follow_the_input() -> None:
    """NHWC by the place of the channels, BGR as asked for, gray by ITU-R BT.601, integers without a scale."""
    pixels = noise(9, 7)
    channels_last = preprocessing((1, 9, 7, 3), "uint8", colour="BGR")
    np.testing.assert_array_equal(tensor(channels_last, pixels)[0], pixels[:, :, ::-1])
    signed = preprocessing((1, 9, 7, 3), "int8", mean=128)
    np.testing.assert_array_equal(tensor(signed, pixels)[0], (pixels.astype(int) - 128))
    gray = preprocessing((1, 1, 9, 7), "float16", scale=1)
    expected = np.asarray(Image.fromarray(pixels).convert("L"))
    assert tensor(gray, pixels).dtype == np.float16
    np.testing.assert_array_equal(tensor(gray, pixels)[0, 0], expected)
    coloured = preprocessing((1, 3, 9, 7), scale=1)
    np.testing.assert_array_equal(tensor(coloured, pixels[:, :, :1])[0, 2], pixels[:, :, 0])


def test_a_letterbox_keeps_the_aspect_ratio() -> None:
    """Bars above and below of the level that is asked for; the image between them is resized."""
    entry = preprocessing((1, 3, 64, 64), pad=114, scale=1)
    fitted = entry.fit(np.full((30, 60, 3), 200, np.uint8))
    rows = fitted[:, 0, 0]
    assert (rows == [*[114] * 16, *[200] * 32, *[114] * 16]).all()


def test_an_image_smaller_than_its_crop_has_black_borders() -> None:
    """As in torchvision's CenterCrop, where nothing is resized."""
    fitted = preprocessing((1, 1, 4, 4), crop=4).fit(np.full((2, 6, 1), 9, np.uint8))
    assert fitted[:, :, 0].tolist() == [[0] * 4, [9] * 4, [9] * 4, [0] * 4]
    assert [crop_offset(7, 4), crop_offset(9, 4), crop_offset(8, 4)] == [2, 2, 2]


def test_a_batch_is_filled_up_by_its_last_image() -> None:
    """And holds no more than its images."""
    entry = preprocessing((3, 1, 2, 2), scale=1)
    images = [np.full((2, 2, 1), level, np.uint8) for level in (1, 2)]
    assert entry.tensor(images)[:, 0, 0, 0].tolist() == [1, 2, 2]
    with pytest.raises(ImageMismatch, match="4 images are given, and a batch of 'data' has 3"):
        entry.tensor(images * 2)


def test_settings_survive_the_manifest() -> None:
    """All that was a default is written out."""
    entry = preprocessing(resize=[240, 230], crop=224, interpolation="bicubic", mean=0.5)
    fields = entry.to_json()
    assert fields["mean"] == [0.5] * 3 and fields["layout"] == "NCHW" and fields["colour"] == "RGB"
    assert Preprocessing.of(fields, entry.input) == entry


@pytest.mark.parametrize(
    ("shape", "fields", "field", "text"),
    [
        ((1, 784), {}, "", "images are for inputs with 4 dimensions"),
        ((1, 4, 8, 8), {}, "", "no dimension for channels in the shape [1, 4, 8, 8] is 1 or 3"),
        ((1, 3, 8, 3), {}, "layout", "fits NCHW and NHWC: set layout"),
        ((1, 3, 8, 8), {"layout": "NHWC"}, "layout", "NHWC gives 8 channels"),
        ((1, 1, 8, 8), {"colour": "BGR"}, "colour", "BGR has 3 channels, and the input has 1"),
        ((1, 3, 8, 8), {"mean": [0, 0]}, "mean", "2 numbers for an input with 3 channels"),
        ((1, 3, 8, 8), {"mean": [123, 117, 104]}, "mean", "set scale: 1"),
        ((1, 3, 8, 8), {"scale": 0}, "scale", "scale must not be 0"),
        ((1, 3, 8, 8), {"std": 0}, "std", "std must be above 0"),
        ((1, 3, 8, 8), {"resize": 8}, "resize", "add crop: [8, 8], or write resize: [8, 8]"),
        ((1, 3, 8, 8), {"resize": [9, 9]}, "resize", "gives 9x9, and the input takes 8x8"),
        ((1, 3, 8, 8), {"crop": 9}, "crop", "gives 9x9, and the input takes 8x8"),
        ((1, 3, 8, 8), {"crop": 8, "resize": 7}, "resize", "is smaller than crop, 8x8"),
        ((1, 3, 8, 8), {"crop": 8, "pad": 0}, "crop", "an image that is padded is not cropped"),
        ((1, 3, 8, 8), {"pad": 256}, "pad", "pad must be a level from 0 to 255"),
        ((1, 3, 8, 8), {"resize": 1 << 40}, "resize", "resize must be from 1 to 32768"),
        ((1, 3, 8, 8), {"blur": 1}, "blur", "blur is unknown"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    shape: tuple[int, ...], fields: dict[str, Any], field: str, text: str
) -> None:
    """With the field, for its position in the recipe."""
    with pytest.raises(ImageMismatch) as caught:
        preprocessing(shape, **fields)
    assert text in str(caught.value) and caught.value.field == field


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_of_8_bits_is_read(tmp_path: Path, mode: str) -> None:
    """Gray as one channel, anything else as RGB; transparency is left out. Arrays and images of Pillow are the same."""
    image = Image.fromarray(noise(5, 4)).convert(mode)
    expected = np.asarray(image.convert("L" if mode in ("1", "L", "LA") else "RGB"))
    np.testing.assert_array_equal(read_pixels(image).squeeze(), expected)
    np.testing.assert_array_equal(read_pixels(expected).squeeze(), expected)
    if mode not in ("CMYK", "YCbCr"):
        image.save(tmp_path / "x.png")
        np.testing.assert_array_equal(read_pixels(tmp_path / "x.png").squeeze(), expected)


def test_photographs_are_turned_upright(tmp_path: Path) -> None:
    """By the orientation that a camera notes."""
    pixels = noise(4, 6)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    np.testing.assert_array_equal(read_pixels(tmp_path / "x.png"), np.rot90(pixels, -1))


def test_what_is_no_image_is_an_error(tmp_path: Path) -> None:
    """Other depths, damaged and missing files, arrays of other shapes: each is named."""
    Image.fromarray(np.zeros((2, 2), np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(_png(noise(40, 40))[:200])
    wrong = {
        tmp_path / "deep.png": "has the mode I;16, more than 8 bits for a channel",
        tmp_path / "text.png": "text.png cannot be read as an image",
        tmp_path / "cut.png": "cut.png cannot be read as an image",
        tmp_path / "none.png": "there is no file",
    }
    with pytest.raises(BundleError) as caught:
        read_files(wrong, lambda pixels: pixels)
    assert all(text in caught.value.message for text in wrong.values())
    for value in (np.zeros((2, 2)), np.zeros((2, 2, 2), np.uint8), np.zeros((0, 2), np.uint8), 7):
        with pytest.raises(BundleError):
            read_pixels(value)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n%%EOF\n"


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Ghostscript, first on PATH: the file that it writes when it is started."""
    trace, folder = tmp_path / "gs-was-started", tmp_path / "bin"
    folder.mkdir()
    program = folder / "gs"
    program.write_text(f"#!/bin/sh\ntouch {trace}\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    # Pillow asks for it once
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return trace


def test_no_file_starts_another_program(tmp_path: Path, ghostscript: Path) -> None:
    """EPS under the name of any image is not read as one, nor an EPS that a program has opened lazily."""
    paths = [tmp_path / f"x{suffix}" for suffix in sorted(SUFFIXES)]
    for path in paths:
        path.write_bytes(EPS)
    with pytest.raises(BundleError) as caught:
        read_files(paths, lambda pixels: pixels)
    assert caught.value.message.count("it is none of BMP, GIF, JPEG, PNG") == len(paths)
    with Image.open(paths[0]) as opened, pytest.raises(BundleError, match="is an EPS file"):
        read_pixels(opened)
    assert not ghostscript.exists()
    # the stand-in is what Pillow would start
    with Image.open(paths[0]) as opened, pytest.raises(OSError):
        opened.load()
    assert ghostscript.exists()


def test_images_are_opened_in_one_place() -> None:
    """Where decoders and limits are named; wheels have a copy of it."""
    folder = Path(image_files.__file__).parents[1]
    opening = [p for p in folder.rglob("*") if p.is_file() and b"Image.open" in p.read_bytes()]
    assert [p.name for p in opening if p.suffix != ".pyc"] == ["image_files.py"]


@pytest.mark.parametrize(
    ("suffix", "place", "size"),
    [
        ("bmp", 18, struct.pack("<2i", 70_000, 1_000)),
        ("pgm", 3, b"70000 1000 255\n"),
        ("png", 16, struct.pack(">2I", 70_000, 1_000)),
    ],
)
def test_images_that_would_fill_the_memory_are_refused(
    tmp_path: Path, suffix: str, place: int, size: bytes
) -> None:
    """By the size that the file says, before anything is decoded."""
    path = tmp_path / f"x.{suffix}"
    Image.new("L", (1, 1)).save(path)
    content = path.read_bytes()
    content = content[:place] + size + content[place + len(size) :]
    if suffix == "png":
        content = content[:29] + struct.pack(">I", zlib.crc32(content[12:29])) + content[33:]
    path.write_bytes(content)
    with pytest.raises(BundleError, match="has 70000 x 1000 pixels, and the limits are"):
        read_pixels(path)


def test_a_thin_image_is_not_resized_beyond_memory(tmp_path: Path) -> None:
    """The shorter side becomes 256, the other one 256 times 60,000."""
    Image.new("L", (1, 60_000)).save(tmp_path / "x.png")
    pixels = read_pixels(tmp_path / "x.png")
    with pytest.raises(BundleError, match="would have 256 x 15360000 when it is resized"):
        preprocessing(resize=256, crop=224).fit(pixels)
    assert preprocessing(resize=[224, 224]).fit(pixels).shape == (224, 224, 3)
    Image.new("L", (1, 70_000)).save(tmp_path / "x.png")
    with pytest.raises(BundleError, match="has 1 x 70000 pixels, and the limits are"):
        read_pixels(tmp_path / "x.png")


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    from io import BytesIO

    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def test_without_pillow_files_are_an_error_and_arrays_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the command that installs it."""
    Image.fromarray(noise(2, 2)).save(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(EnvironmentProblem, match="Pillow, which decodes images") as caught:
        read_pixels(tmp_path / "x.png")
    assert "pip install pillow" in caught.value.fix and caught.value.exit_code == 4
    assert read_pixels(noise(2, 2)).shape == (2, 2, 3)
