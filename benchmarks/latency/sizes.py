"""One library for many sizes beside libraries of one size each, ONNX Runtime and OpenVINO.

    python benchmarks/latency/sizes.py [--net NAME ...] [--threads N] [--rounds N] [--fixed N] [--json FILE]

Each network is built once with dynamic dimensions, untuned, and called at twelve sizes interleaved with
the peers, whose models leave the same sizes open; at `--fixed` of the sizes, evenly spread (all: 12),
also with a library that was built for that size alone. The table shows latencies in ms, that of the
open library relative to its fixed one and to the faster peer (below 1: faster), the memory that its
process had at most, and the largest difference to ONNX Runtime; then geometric means, and how long
the open library took to build beside a fixed one. OpenVINO comes with `pip install -e .[bench]`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _nets
import numpy as np
import onnx
from _runtimes import OPEN_OPENVINO, build, compare
from history import record

_LENGTHS: Final = (1, 7, 16, 37, 64, 100, 128, 200, 256, 331, 384, 512)
_BATCHES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16)
_FRAMES: Final = (16, 50, 101, 200, 333, 500, 750, 1000, 1500, 2000, 2501, 3000)
_SIDES: Final = (96, 112, 128, 160, 192, 203, 224, 256, 288, 320, 359, 384)
_PEERS: Final = ("ort", OPEN_OPENVINO)


class Case(NamedTuple):
    """A network with dynamic shapes.

    Attributes:
        make: Returns the network.
        shape: The sizes of its input `x`, some of them names of dimensions.
        sizes: The sizes at which it is called: for each name as many as there are calls.
    """

    make: Callable[[], onnx.ModelProto]
    shape: tuple[int | str, ...]
    sizes: Mapping[str, Sequence[int]]

    def dimensions(self) -> dict[str, dict[str, int]]:
        """Return the recipe's `dimensions`."""
        return {name: {"min": min(row), "max": max(row)} for name, row in self.sizes.items()}

    def shape_at(self, index: int) -> list[int]:
        """Return the shape of the input of a call."""
        return [self.sizes[s][index] if isinstance(s, str) else s for s in self.shape]


CASES: Final[Mapping[str, Case]] = {
    "bert": Case(lambda: _nets.encoder(layers=3, width=768), (1, "seq", 768), {"seq": _LENGTHS}),
    "minilm": Case(_nets.encoder, (1, "seq", 384), {"seq": _LENGTHS}),
    "minilm-batch": Case(
        _nets.encoder,
        ("batch", "seq", 384),
        {"batch": (1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 4, 8), "seq": (*_LENGTHS[:8], 211, 128, 97, 32)},
    ),
    "vit": Case(_nets.vision_transformer, ("batch", 3, 224, 224), {"batch": _BATCHES}),
    "resnet50": Case(_nets.resnet50, ("batch", 3, 224, 224), {"batch": _BATCHES}),
    "mobilenet": Case(
        _nets.mobilenet, (1, 3, "h", "w"), {"h": _SIDES, "w": (*_SIDES[3:], *_SIDES[:3])}
    ),
    "lstm": Case(_nets.lstm, ("steps", 1, 80), {"steps": _LENGTHS}),
    "whisper": Case(_nets.whisper_encoder, (1, 80, "frames"), {"frames": _FRAMES}),
    "detector": Case(
        _nets.detector, (1, 3, "h", "w"), {"h": _SIDES, "w": (*_SIDES[5:], *_SIDES[:5])}
    ),
}
"""The networks; all have seeded weights."""


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Build a network and call it at all sizes; return the rows, and the seconds of both builds."""
    case = CASES[name]
    path = folder / f"{name}.onnx"
    onnx.save(_nets.dynamic_shapes(case.make(), {"x": case.shape}), path)
    own = folder / "open"
    own.mkdir()
    opened, seconds = build(
        path, own, "trials: 0", folder / "log",
        inputs={"x": {"shape": list(case.shape)}}, dimensions=case.dimensions(),
    )  # fmt: skip
    count = len(next(iter(case.sizes.values())))
    with_fixed = {index * count // args.fixed for index in range(args.fixed)}
    peers = [peer for peer in _PEERS if importlib.util.find_spec(_module(peer))]
    rows, fixed_seconds = [], []
    for index in range(count):
        shape = case.shape_at(index)
        libraries = {
            **{peer: (str(path), peer) for peer in peers},
            "open": (str(path), str(opened)),
        }
        if index in with_fixed:
            own = folder / f"fixed{index}"
            own.mkdir()
            bundle, took = build(
                path, own, "trials: 0", folder / "log", inputs={"x": {"shape": shape}}
            )
            fixed_seconds.append(took)
            libraries["fixed"] = (str(path), str(bundle))
        feed = {"x": np.random.default_rng(index).standard_normal(shape, dtype=np.float32)}
        result = compare(libraries, feed, args.rounds, args.threads)
        rows.append({"shape": shape, **result})
        _show(name, rows[-1])
    return {"rows": rows, "seconds": seconds, "fixed_seconds": min(fixed_seconds, default=None)}


def _module(peer: str) -> str:
    return "onnxruntime" if peer == "ort" else "openvino"


def _ratios(row: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return the latency of the open library relative to the fixed one, if there is one, and to the faster peer."""
    ms = row["ms"]
    fixed = ms["open"] / ms["fixed"] if "fixed" in ms else None
    return fixed, ms["open"] / min(ms[peer] for peer in _PEERS if peer in ms)


def _show(name: str, row: Mapping[str, Any]) -> None:
    ms = row["ms"]
    fixed, peer = _ratios(row)
    cells = [
        f"{ms[label]:>9.3f}" if label in ms else f"{'-':>9}" for label in ("open", "fixed", *_PEERS)
    ]
    shape = "x".join(map(str, row["shape"]))
    ratio = f"{fixed:>6.2f}" if fixed else f"{'-':>6}"
    print(
        f"{name:<14} {shape:<16} {' '.join(cells)} {ratio} {peer:>6.2f}"
        f" {row['bytes']['open'] / 1e6:>7.0f}   {row['error']['open']:.1e}",
        flush=True,
    )


def summarize(results: Mapping[str, Any]) -> None:
    """Print geometric means and the largest ratio of each network, and of all."""
    print(f"\n{'':<14} {'/ fixed':>8} {'largest':>8} {'/ peer':>8} {'largest':>8}   build, s")
    everything: dict[int, list[float]] = {0: [], 1: []}
    for name, result in results.items():
        pairs = [_ratios(row) for row in result["rows"]]
        cells = []
        for at in (0, 1):
            ratios = [pair[at] for pair in pairs if pair[at] is not None]
            everything[at] += ratios
            cells += [_mean(ratios), f"{max(ratios):>8.2f}" if ratios else f"{'-':>8}"]
        builds = f"{result['seconds']:.1f}"
        if result["fixed_seconds"]:
            builds += f" (fixed {result['fixed_seconds']:.1f})"
        print(f"{name:<14} {' '.join(cells)}   {builds}")
    print(f"{'all':<14} {_mean(everything[0])} {'':>8} {_mean(everything[1])}")


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):>8.2f}" if ratios else f"{'-':>8}"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--net", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fixed", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"{'':<14} {'x':<16} {'open, ms':>9} {'fixed':>9} {'ORT':>9} {'OpenVINO':>9} {'/fixed':>6} {'/peer':>6}"
        f" {'MB':>7}   error"
    )
    results = {}
    for name in args.net:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, Path(folder), args)
    summarize(results)
    record(
        f"sizes, {args.threads} threads",
        {
            name: statistics.geometric_mean([_ratios(row)[1] for row in result["rows"]])
            for name, result in results.items()
        },
    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
