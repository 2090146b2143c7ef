"""C libraries with one thread and two, one model and two side by side, against ONNX Runtime.

    python benchmarks/latency/c_threads.py LIBRARY=MODEL.onnx ...

Each library is a `lib<name>.so` of the output `c-library`. Every figure is from a process of its own, in
turns; latencies are medians in µs:

- `T=1`, `T=2`: calls in a row with one thread and with two;
- `T=1 rest`, `T=2 rest`: calls after 5 ms of rest;
- `2x1`, `2x2`: two threads of the process call a context each, with one thread and with two: the
  slower one's latency, relative to that of one model alone with as many threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tvmflow.runtime.arrays import allocate_aligned
from tvmflow.runtime.c_loader import NativeProgram

_TURN_S: Final = 0.25
_RESTS: Final = 40
_REST_S: Final = 0.005
# Inputs whose shapes a model leaves open: those of silero-vad. Others have length 1 along every axis.
_OPEN_SHAPES: Final = {"input": [1, 576], "state": [2, 1, 128]}
COLUMNS: Final = ("T=1", "T=2", "T=1 rest", "T=2 rest", "2x1", "2x2")

Call = Callable[[], Any]


def open_library(path: Path, threads: int) -> Call:
    """Return what calls a C library with zeros."""
    program = NativeProgram(path, path.stem.removeprefix("lib"), threads)
    sides = [list(map(allocate_aligned, specs)) for specs in (program.inputs, program.outputs)]
    return lambda: program.run(*sides)


def open_onnxruntime(path: Path, threads: int) -> Call:
    """Return what calls ONNX Runtime with zeros."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    dtypes = {"tensor(float)": "float32", "tensor(int64)": "int64"}
    feed = {
        value.name: np.zeros(
            value.shape
            if all(isinstance(extent, int) for extent in value.shape)
            else _OPEN_SHAPES.get(value.name, [1] * len(value.shape)),
            dtypes[value.type],
        )
        for value in session.get_inputs()
    }
    return lambda: session.run(None, feed)


def open_model(path: Path, threads: int) -> Call:
    """Return what calls a model."""
    return (open_onnxruntime if path.suffix == ".onnx" else open_library)(path, threads)


def time_calls(call: Call, seconds: float = _TURN_S) -> float:
    """Return the median latency of calls in a row, in µs."""
    samples = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        call()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1e6


def time_after_rests(call: Call) -> float:
    """Return the median latency of calls after rests, in µs."""
    samples = []
    for _ in range(_RESTS):
        time.sleep(_REST_S)
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1e6


def time_side_by_side(calls: list[Call]) -> float:
    """Return the median latency of the slower of two that are called at once, in µs."""
    results = [0.0, 0.0]

    def work(index: int) -> None:
        results[index] = time_calls(calls[index])

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(results)


def serve(path: Path, threads: int) -> None:
    """Print the figures of a model: in a row, after rests, and of two side by side."""
    calls = [open_model(path, threads) for _ in range(2)]
    for call in calls:
        time_calls(call, 0.05)
    alone = time_calls(calls[0])
    figures = [alone, time_after_rests(calls[0]), time_side_by_side(calls) / alone]
    print(json.dumps(figures))


def measure(path: Path, rounds: int) -> dict[str, float]:
    """Return the figures of a model, medians of processes of their own."""
    figures: dict[str, float] = {}
    for threads in (1, 2):
        command = [sys.executable, __file__, "--serve", str(path), str(threads)]
        turns = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(rounds)
        ]
        names = (f"T={threads}", f"T={threads} rest", f"2x{threads}")
        figures |= dict(zip(names, map(statistics.median, zip(*turns, strict=True)), strict=True))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="+", metavar="LIBRARY=MODEL.onnx")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pairs = [pair.partition("=")[::2] for pair in options.pairs]
    print(f"{'':32}" + "".join(f"{name:>10}" for name in COLUMNS))
    for library, model in pairs:
        for label, path in (("C library", library), ("ONNX Runtime", model)):
            figures = measure(Path(path), options.rounds)
            row = "".join(
                f"{figures[name]:>10.2f}" if "x" in name else f"{figures[name]:>10.1f}"
                for name in COLUMNS
            )
            print(f"{Path(model).stem:20}{label:12}{row}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
