"""Libraries with code for several levels of CPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tvm import relax

from tests.support import tuning
from tests.support.c_library import Array, CLibrary
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.c_program import compile_program
from tvmflow.compiler.c_program.c_kernels import SharedLayout
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.types import TensorSpec
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel, isa_levels
from tvmflow.targets.c_runtime.isa_levels import IsaLevelCode
from tvmflow.targets.features import isa_level_config
from tvmflow.targets.tvm_target import make_target

SHAPE = (1, 3, 20, 20)
FEATURES: Mapping[str, tuple[str, ...]] = {
    "x86-64-v2": ("sse4_2",),
    "x86-64-v3": ("sse4_2", "avx2", "fma"),
    "x86-64-v4": ("sse4_2", "avx2", "fma", "avx512f", "avx512bw"),
}


class Built(NamedTuple):
    """A library of all levels, and one of each.

    Attributes:
        joined: The library of all levels.
        single: The library of each level alone.
        header: The header of the library of all levels.
        weights: The bytes of the weights of the library of all levels, and of the largest of one.
        model: The library of all levels as it describes itself.
    """

    joined: Path
    single: Mapping[str, Path]
    header: str
    weights: tuple[int, int]
    model: DescribedModel


def make_model() -> Any:
    """Convolutions of all kinds, whose channels do not fill whole blocks of 16, and a matrix product."""

    def depthwise(value: Any, weight: Any) -> Any:
        channels = int(value.ty.shape[1])
        kernel = weight((channels, 1, 3, 3))
        return relax.op.nn.conv2d(value, kernel, groups=channels, padding=1)

    def strided(value: Any, weight: Any) -> Any:
        return relax.op.nn.conv2d(value, weight((72, int(value.ty.shape[1]), 3, 3)), strides=2)

    # the second convolution of 3×3 is one of Winograd's
    layers = [tuning.conv(56), tuning.relu, tuning.conv(64), depthwise, strided, tuning.relu]
    pooled = [lambda value, _: relax.op.mean(value, [2, 3]), tuning.dense(120)]
    return tuning.model(*layers, tuning.conv(88, 1), *pooled, shape=SHAPE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The libraries, compiled from the same weights."""
    folder = tmp_path_factory.mktemp("levels")
    mod, random = make_model(), np.random.default_rng(0)
    params = {
        str(var.name): random.standard_normal([int(n) for n in var.ty.shape], np.float32)
        for var in mod["main"].params[1:]
    }
    signature = {
        "inputs": [TensorSpec("data", SHAPE, "float32").to_json()],
        "outputs": [TensorSpec("scores", (1, 120), "float32").to_json()],
    }
    described = DescribedModel("net", signature, (), "x86_64-linux-gnu")
    compiled, single = {}, {}
    for level in FEATURES:
        target = isa_level_config({}, level)
        options = LoweringOptions(shares_weights=True)
        lowered = lowering.lower(mod, make_target(target), options)
        scheduled = schedules.schedule_untuned(lowered.mod, target, 1).mod
        weights = lowered.compute_weights(params)
        for is_isa_level in (True, False):
            objects = folder / f"{level}-{is_isa_level}"
            objects.mkdir()
            compile_program(
                ScheduledModel(scheduled, weights, make_target(target)),
                f"{level.replace('-', '_')}_",
                objects,
                is_isa_level=is_isa_level,
            )
            files = {path.name: path for path in objects.iterdir()}
            if is_isa_level:
                compiled[level] = files
            else:
                single[level] = folder / f"{level}.so"
                c_runtime.link(described, files, single[level])
                constants = files[c_runtime.CONSTANTS].stat().st_size
    joined = folder / "joined"
    joined.mkdir()
    files = isa_levels.join_constants(compiled, c_runtime.PROGRAM, c_runtime.CONSTANTS, joined)
    codes = tuple(IsaLevelCode(name, features) for name, features in FEATURES.items())
    model = described._replace(levels=codes)
    c_runtime.link(model, files, folder / "net.so", folder / "net.a", folder / "net.h")
    return Built(
        joined=folder / "net.so",
        single=single,
        header=(folder / "net.h").read_text(),
        weights=(files[c_runtime.CONSTANTS].stat().st_size, constants),
        model=model,
    )


def level_of(library: CLibrary) -> str:
    """The level of a library's context."""
    function = library.function("level")
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return str(function(library.context).decode())


def test_each_level_computes_what_its_own_library_does(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, from weights that lie in other blocks; by itself, a context has the best level."""
    feed: dict[str, Array] = {"data": np.random.default_rng(1).random(SHAPE, np.float32)}
    ran = []
    for level, single in built.single.items():
        monkeypatch.setenv("NET_LEVEL", level)
        library = CLibrary(built.joined, "net")
        if library.status == 19:
            continue
        assert level_of(library) == level
        ran.append(level)
        [scores] = library.run(feed)
        [expected] = CLibrary(single, "net").run(feed)
        assert np.abs(expected).max() > 0.1
        assert np.array_equal(scores, expected)
    assert ran
    monkeypatch.setenv("NET_LEVEL", "")
    assert level_of(CLibrary(built.joined, "net")) == ran[-1]


def test_an_unknown_level_is_an_error_that_names_the_levels(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header has the code."""
    monkeypatch.setenv("NET_LEVEL", "x86-64-v5")
    library = CLibrary(built.joined, "net")
    assert library.status == 19
    assert library.function("message")(19).decode() == (
        "NET_LEVEL in the environment names no level that this library and this CPU have; "
        "the library has x86-64-v2, x86-64-v3, x86-64-v4"
    )
    assert "NET_WRONG_LEVEL = 19" in built.header


def test_each_feature_is_asked_for_once(built: Built) -> None:
    """A level has those of the levels before it; one that the first level needs is told by its name."""
    code = isa_levels.write_code("net", built.model.levels, 0, False, "x86_64-linux-gnu")
    assert '#define TF_FEATURES "sse4_2", ' in code
    assert 'tf_features1[] = {"avx2", "fma", NULL}' in code


def test_weights_are_stored_once(built: Built) -> None:
    """But those of the first layer, whose inputs fill no block."""
    joined, single = built.weights
    assert joined < 1.15 * single


def test_weights_of_ragged_channels_fit_all_levels() -> None:
    """Levels do not divide channels each as its own lanes would have it."""
    mod = tuning.model(tuning.conv(37, 5), shape=(1, 19, 9, 9))
    weight = mod["main"].params[1]
    array = np.random.default_rng(0).standard_normal([int(n) for n in weight.ty.shape], np.float32)
    shapes = set()
    for level in FEATURES:
        target = make_target(isa_level_config({}, level))
        lowered = lowering.lower(mod, target, LoweringOptions(shares_weights=True))
        (packed,) = lowered.compute_weights({str(weight.name): array})
        layout = SharedLayout.of(np.asarray(packed))
        # those of the widest vectors are stored as they are
        shapes.add(tuple(packed.shape) if layout is None else layout.shared_shape)
    assert shapes == {(3, 2, 5, 5, 16, 16)}


@pytest.mark.parametrize(
    ("shape", "shared"),
    [
        ((6, 4, 3, 3, 8, 8), (3, 2, 3, 3, 16, 16)),
        ((5, 3, 1, 1, 8, 8), (3, 4, 1, 1, 8, 16)),
        ((4, 4, 5, 1, 3, 4, 4), (4, 4, 2, 1, 4, 4, 16)),
        ((9, 3, 3, 8), (5, 3, 3, 16)),
    ],
)
def test_places_are_those_of_wider_blocks(shape: tuple[int, ...], shared: tuple[int, ...]) -> None:
    """Each element has one place, and what is around all of them is 0."""
    array = np.arange(1, 1 + np.prod(shape), dtype=np.int64).reshape(shape)
    layout = SharedLayout.of(array)
    assert layout is not None
    stored = layout.store(array)
    assert stored.shape == shared == layout.shared_shape
    assert sorted(stored[stored != 0]) == sorted(array.ravel())
    last = tuple(n - 1 for n in shape)
    assert stored[tuple(layout.stored_index(last))] == array[last]


PRINT_VARIABLE = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define TF(name) net_##name
#define TF_FEATURES
#define TF_LEVEL_VARIABLE "NET_LEVEL"
#include "cpu.c"
int main(void) { return puts(tf_environment(TF_LEVEL_VARIABLE) ? "read" : "ignored") < 0; }
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs of several users")
def test_programs_with_more_rights_than_their_user_ignore_the_environment() -> None:
    """Its user must not choose which code runs, nor which files are read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        program, source = folder / "program", folder / "program.c"
        source.write_text(PRINT_VARIABLE)
        runtime = Path(c_runtime.__file__).parent
        subprocess.run(["cc", "-Werror", "-I", runtime, source, "-o", program], check=True)
        found = []
        for owner, mode in ((0, 0o755), (0, 0o4755), (1234, 0o4755), (1235, 0o4755)):
            os.chown(program, owner, owner)
            program.chmod(mode)
            done = subprocess.run(
                [program], env={"NET_LEVEL": "x"}, user=1235, capture_output=True, text=True
            )
            found.append(done.stdout.strip())
        assert found == ["read", "ignored", "ignored", "read"]
