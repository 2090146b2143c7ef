"""The rank of the tile that the rule takes for a kernel among the tiles that fit, all of them timed.

    python benchmarks/kernels/tile_ranks.py [--number N] [--seed N] [--first TILES] [--seconds S] [--mcpu LEVEL]
                                            [--kind conv|product|depthwise|int8] [--all]

Random matmuls and convolutions of the sizes that networks have are lowered and scheduled with each of the
first tiles of the rule, and timed interleaved with one thread. Printed are the time of the rule's tile, that of the
fastest, and their ratio; at the end, for how many the rule's is within 5 % of the fastest. With `--all`, each tile is
printed with its time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ |= {"TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}

import numpy as np  # noqa: E402  TVM reads the environment when it is loaded
import operators  # noqa: E402
import tvm  # noqa: E402

from tests.support import onnx_models  # noqa: E402
from tvmflow.compiler import lowering  # noqa: E402
from tvmflow.compiler.contraction import candidates  # noqa: E402
from tvmflow.compiler.contraction.machine import CpuModel  # noqa: E402
from tvmflow.compiler.options import LoweringOptions  # noqa: E402
from tvmflow.compiler.schedules import register_tiles  # noqa: E402
from tvmflow.compiler.schedules.rules import list_unscheduled  # noqa: E402
from tvmflow.targets.tvm_target import make_target  # noqa: E402
from tvmflow.tuning import measure  # noqa: E402

_ROWS: Final = (8, 16, 31, 49, 50, 64, 100, 128, 196, 197, 256, 257, 384, 512)
_DEPTHS: Final = (64, 96, 128, 192, 256, 320, 384, 512, 576, 768, 1024, 1536, 2048, 3072)
_COLUMNS: Final = (*_DEPTHS, 97, 104, 257, 312, 400, 509, 1000, 1021)
_CHANNELS: Final = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 728, 1024)
_IMAGES: Final = (7, 8, 10, 14, 16, 19, 20, 28, 32, 37, 40, 56, 64, 80, 112)
_TAPS: Final = (1, 1, 1, 3, 3, 5)
_DEPTHWISE_TAPS: Final = (3, 3, 3, 5, 5, 7)
_KINDS: Final = ("product", "conv", "depthwise", "int8")
_MIN_WORK: Final = 1 << 20
_MAX_WORK: Final = 1 << 27
_CLOSE: Final = 1.05


class Problem(NamedTuple):
    """A product (rows, depth, columns) of float32 or int8, or a convolution (inputs, outputs, size, taps, stride)."""

    kind: str
    sizes: tuple[int, ...]

    @property
    def work(self) -> int:
        """The number of multiplications."""
        if self.kind in ("product", "int8"):
            return math.prod(self.sizes)
        inputs, outputs, size, taps, stride = self.sizes
        inputs = 1 if self.kind == "depthwise" else inputs
        return inputs * outputs * (size // stride) ** 2 * taps**2

    def case(self) -> operators.Case:
        """Return the model."""
        if self.kind in ("product", "int8"):
            rows, depth, columns = self.sizes
            if self.kind == "int8":
                return operators.quantized("MatMul", (rows, depth), co=columns, largest=63)
            return operators.matmul((rows, depth), (depth, columns))
        inputs, outputs, size, taps, stride = self.sizes
        return operators.conv(
            inputs,
            outputs,
            size,
            size,
            kernel=taps,
            pads=[taps // 2] * 4,
            strides=[stride] * 2,
            group=inputs if self.kind == "depthwise" else 1,
        )


def draw(kind: str, random: np.random.Generator) -> Problem:
    """Return a problem that takes neither too long nor no time."""
    while True:
        if kind in ("product", "int8"):
            sizes = [random.choice(each) for each in (_ROWS, _DEPTHS, _COLUMNS)]
        else:
            taps = _DEPTHWISE_TAPS if kind == "depthwise" else _TAPS
            sizes = [
                random.choice(each) for each in (_CHANNELS, _CHANNELS, _IMAGES, taps, (1, 1, 2))
            ]
            sizes[1] = sizes[0] if kind == "depthwise" else sizes[1]
        problem = Problem(kind, tuple(map(int, sizes)))
        if _MIN_WORK <= problem.work <= _MAX_WORK:
            return problem


class Tile(NamedTuple):
    """A tile of a kernel, and the call that computes the kernel with it."""

    tile: candidates.Tile
    call: Any
    arguments: list[Any]


def list_tiles(problem: Problem, target: dict[str, Any], first: int) -> list[Tile]:
    """Return the first tiles of the contraction; none if the rule does not fit it."""
    cpu = CpuModel.from_target(target)
    assert cpu is not None, "the rules know the CPU"
    with tempfile.TemporaryDirectory() as folder:
        mod = onnx_models.load(problem.case().model(), Path(folder)).mod
    lowered = lowering.lower(mod, make_target(target), LoweringOptions())
    kernels = [
        tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        for var, function in list_unscheduled(lowered.mod)
        if "dense" in var.name_hint or "conv" in var.name_hint
    ]
    tiles: list[Tile] = []
    for kernel in kernels:
        arguments = measure.make_arguments(kernel)
        for tile, schedule in itertools.islice(register_tiles.generate_tiled(kernel, cpu), first):
            built = measure.build(schedule.mod, target)
            tiles.append(Tile(tile, built["main"], arguments))
    return tiles


def find_minima(tiles: list[Tile], seconds: float) -> list[float]:
    """Return the least CPU time of each; the calls are interleaved."""
    minima = [math.inf] * len(tiles)
    for each in tiles:
        each.call(*each.arguments)
    end = time.process_time() + seconds * len(tiles)
    while time.process_time() < end:
        for place, each in enumerate(tiles):
            each.call(*each.arguments)
            before = time.process_time()
            each.call(*each.arguments)
            minima[place] = min(minima[place], time.process_time() - before)
    return minima


def main() -> None:
    """Print a line for each problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--mcpu")
    parser.add_argument("--kind", choices=_KINDS, action="append")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    target = operators.find_target(options.mcpu)
    random = np.random.default_rng(options.seed)
    ratios = []
    for kind, _ in zip(itertools.cycle(options.kind or _KINDS), range(options.number)):
        problem = draw(kind, random)
        tiles = list_tiles(problem, target, options.first)
        if not tiles:
            continue
        minima = find_minima(tiles, options.seconds)
        best = min(range(len(tiles)), key=minima.__getitem__)
        ratios.append(minima[0] / minima[best])
        speed = 2 * problem.work / minima[0] / 1e9
        name = f"{problem.kind} {'x'.join(map(str, problem.sizes))}"
        chosen, fastest = tiles[0].tile, tiles[best].tile
        print(
            f"{name:30} {_describe(chosen):14} {minima[0] * 1e6:8.0f} µs {speed:6.1f} GFLOPS   "
            f"{_describe(fastest):14} {minima[best] * 1e6:8.0f} µs   {ratios[-1]:.2f}",
            flush=True,
        )
        if options.all:
            for tile, least in sorted(zip(tiles, minima, strict=True), key=lambda pair: pair[1]):
                print(f"    {_describe(tile.tile):16} {least * 1e6:8.0f} µs")
    close = sum(ratio <= _CLOSE for ratio in ratios)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"within 5 % of the fastest: {close} of {len(ratios)}; mean ratio {mean:.3f}")


def _describe(tile: candidates.Tile) -> str:
    order = "w" if tile.weights_outside else "d"
    rows = f" {tile.window_rows} rows" if tile.window_rows else ""
    return f"{tile.shape.vectors}x{tile.shape.rows} {order}{rows}"


if __name__ == "__main__":
    main()
