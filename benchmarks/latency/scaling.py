"""More cores: latency by threads, samples a second, and what 16 and 64 cores would give.

    python benchmarks/latency/scaling.py [--net NAME ...] [--cores N ...] [--barrier US] [--rounds N] [--json FILE]

Each network is built untuned for this machine, and then

- called with 1, 2, 4, … threads, as many as there are cores, interleaved with ONNX Runtime and OpenVINO;
- called by as many threads of the program as there are cores, each with a context of one thread: samples a second
  beside ONNX Runtime, called in the same way, and OpenVINO with its hint THROUGHPUT;
- run with the loops divided for `--cores` cores, one task after the other on one core (the library gives them to a
  `parallel_for` of the program), so that each task is timed: with this many cores a loop takes as long as its longest
  task, and a barrier. That knows nothing of memory that cores share, nor of cores that run slower when all are busy.
  The prediction for the cores of this machine stands beside what was measured.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _nets
import numpy as np
import onnx
from _runtimes import PEERS, Feed, build, compare, draw_inputs, find_peers
from history import record

from tvmflow.runtime import loading
from tvmflow.runtime.arrays import address_of
from tvmflow.runtime.c_loader import ABI, Buffer, NativeProgram, Options

NETS: Final = {
    name: getattr(_nets, name)
    for name in ("resnet18", "mobilenet", "squeezenet", "encoder", "vision_transformer", "lstm")
}
_PEERS: Final = ("ort", "openvino")
_CORES: Final = os.cpu_count() or 1
_TURN_S: Final = 1.0
_CALLS: Final = 9

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
_ParallelFor = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, _Body, ctypes.c_void_p)


# ---------------------------------------------------------------- simulated cores


class Simulated(NamedTuple):
    """A call on this many cores, in seconds.

    Attributes:
        alone_s: The time of one core.
        loops: How many parallel loops a call has.
        longest_s: The sum of the longest tasks of the loops.
        serial_s: The time outside of loops.
    """

    alone_s: float
    loops: int
    longest_s: float
    serial_s: float

    def latency_s(self, barrier_s: float) -> float:
        """Return the latency, with a barrier after each loop."""
        return self.serial_s + self.longest_s + self.loops * barrier_s


class _Loops:
    """A `parallel_for` that does the tasks of a loop one after the other, and times them."""

    def __init__(self) -> None:
        self.calls: list[list[list[float]]] = []
        self.gaps: list[list[float]] = []
        self._left = 0.0

    def begin(self) -> None:
        """Begin a call."""
        self.calls.append([])
        self.gaps.append([])
        self._left = time.perf_counter()

    def end(self) -> None:
        """End a call."""
        self.gaps[-1].append(time.perf_counter() - self._left)

    def run(self, _user: Any, tasks: int, body: Any, argument: Any) -> None:
        """Do the tasks of a loop."""
        self.gaps[-1].append(time.perf_counter() - self._left)
        seconds = []
        for task in range(tasks):
            started = time.perf_counter()
            body(argument, task)
            seconds.append(time.perf_counter() - started)
        self.calls[-1].append(seconds)
        self._left = time.perf_counter()


def simulate(bundle: str, feed: Feed, cores: int) -> Simulated:
    """Time the tasks of a library on one core, each at its shortest of some calls."""
    module = loading.load(bundle, threads=1)
    program = module.program
    assert isinstance(program, NativeProgram)
    functions, loops = program.loaded.functions, _Loops()
    parallel_for = _ParallelFor(loops.run)
    options = Options(abi=ABI, threads=cores)
    options.parallel_for = ctypes.cast(parallel_for, ctypes.c_void_p)
    handle = ctypes.c_void_p()
    assert not functions["create"](options, handle)
    arrays = [np.asarray(feed[spec.name], order="C") for spec in program.inputs]
    results = [np.empty(spec.shape, spec.dtype) for spec in program.outputs]
    inputs, outputs = (
        (Buffer * len(side))(*(Buffer(address_of(array), array.nbytes) for array in side))
        for side in (arrays, results)
    )
    for _ in range(_CALLS):
        loops.begin()
        assert not functions["run"](handle, inputs, len(inputs), outputs, len(outputs))
        loops.end()
    functions["destroy"](handle)
    tasks = [
        [min(times) for times in zip(*loop, strict=True)] for loop in zip(*loops.calls, strict=True)
    ]
    gaps = [min(times) for times in zip(*loops.gaps, strict=True)]
    # most loops follow each other at once: the shortest gap is that of this program
    serial_s = sum(gap - min(gaps) for gap in gaps)
    return Simulated(
        alone_s=serial_s + sum(map(sum, tasks)),
        loops=len(tasks),
        longest_s=sum(map(max, tasks)),
        serial_s=serial_s,
    )


# ---------------------------------------------------------------- samples a second


def count_samples(model: str, library: str, feed: Feed) -> float:
    """Return the samples a second of a runtime that has all cores."""
    if library == "openvino":
        return _count_openvino(model, feed)
    calls = [_open_call(model, library, feed) for _ in range(_CORES)]
    counts = [0] * _CORES
    end = time.perf_counter() + _TURN_S

    def work(number: int) -> None:
        while time.perf_counter() < end:
            calls[number]()
            counts[number] += 1

    for call in calls:
        call()
    started = time.perf_counter()
    end = started + _TURN_S
    workers = [threading.Thread(target=work, args=(number,)) for number in range(_CORES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - started)


def _open_call(model: str, library: str, feed: Feed) -> Any:
    if library == "ort":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, dict(feed))
    module = loading.load(library, threads=1)
    return lambda: module.run(dict(feed))


def _count_openvino(model: str, feed: Feed) -> float:
    import openvino

    core = openvino.Core()
    options = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "f32"}
    queue = openvino.AsyncInferQueue(core.compile_model(model, "CPU", options))
    for _ in range(2 * len(queue)):
        queue.start_async(dict(feed), share_inputs=True)
    queue.wait_all()
    started, count = time.perf_counter(), 0
    while time.perf_counter() < started + _TURN_S:
        queue.start_async(dict(feed), share_inputs=True)
        count += 1
    queue.wait_all()
    return count / (time.perf_counter() - started)


def _measure_throughput(
    model: Path, bundle: str, feed_file: Path, peers: list[str], rounds: int
) -> dict[str, float]:
    """Return the median of samples a second of each runtime, each turn in a process of its own."""
    samples = defaultdict(list)
    for _, label in itertools.product(range(rounds), ("tvmflow", *peers)):
        library = bundle if label == "tvmflow" else label
        command = [sys.executable, __file__, "--count", str(model), library, str(feed_file)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        samples[label].append(float(done.stdout))
    return {label: statistics.median(values) for label, values in samples.items()}


# ---------------------------------------------------------------- the tables


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of a network."""
    model = folder / f"{name.replace('_', '-')}.onnx"
    onnx.save(NETS[name](), model)
    feed = draw_inputs(model)
    np.savez(folder / "feed.npz", **feed)
    path, _ = build(model, folder, "trials: 0", folder / "log")
    bundle, peers = str(path), [peer for peer in find_peers(model) if peer in _PEERS]
    pairs = {
        **{peer: (str(model), peer) for peer in peers},
        "tvmflow": (str(model), bundle),
    }
    threads = [count for count in (1 << bit for bit in range(8)) if count < _CORES] + [_CORES]
    return {
        "ms": {count: compare(pairs, feed, args.rounds, count)["ms"] for count in threads},
        "samples_per_s": _measure_throughput(
            *(model, bundle, folder / "feed.npz", peers, args.rounds)
        ),
        "simulated": {
            cores: simulate(bundle, feed, cores)._asdict()
            for cores in sorted({*args.cores, _CORES} - {1})
        },
    }


def show(name: str, result: dict[str, Any], barrier_s: float) -> None:
    """Print the rows of a network."""
    alone = result["ms"][1]["tvmflow"]
    for count, ms in result["ms"].items():
        cells = ", ".join(f"{PEERS[peer]} {ms[peer]:.3f}" for peer in _PEERS if peer in ms)
        best = min(ms[peer] for peer in _PEERS if peer in ms)
        print(
            f"{name:<20}{count:>3} threads {ms['tvmflow']:>9.3f} ms, {alone / ms['tvmflow']:.2f} times one; "
            f"{ms['tvmflow'] / best:.2f} of the faster ({cells})"
        )
    counts = result["samples_per_s"]
    others = {PEERS[peer]: counts[peer] for peer in _PEERS if peer in counts}
    cells = ", ".join(f"{peer} {count:.1f}" for peer, count in others.items())
    print(
        f"{'':<20}{counts['tvmflow']:.1f} samples a second, "
        f"{counts['tvmflow'] / max(others.values()):.2f} times the best other ({cells})"
    )
    for cores, fields in result["simulated"].items():
        simulated = Simulated(**fields)
        speedup = simulated.alone_s / simulated.latency_s(barrier_s)
        measured = result["ms"].get(cores)
        beside = f", measured {alone / measured['tvmflow']:.2f}" if measured else ""
        print(
            f"{'':<20}{cores:>3} cores, simulated: {speedup:.1f} times one{beside}; {simulated.loops} loops, "
            f"outside of them {simulated.serial_s / simulated.alone_s:.1%}, without barriers "
            f"{simulated.alone_s / simulated.latency_s(0.0):.1f}",
            flush=True,
        )


def summarize(results: dict[str, Any], barrier_s: float) -> None:
    """Print geometric means, and append to the history."""
    most = max(_CORES, 1)
    latencies = {
        name: result["ms"][most]["tvmflow"]
        / min(ms for label, ms in result["ms"][most].items() if label != "tvmflow")
        for name, result in results.items()
    }
    throughputs = {
        name: max(count for label, count in result["samples_per_s"].items() if label != "tvmflow")
        / result["samples_per_s"]["tvmflow"]
        for name, result in results.items()
    }
    record(f"scaling, latency with {most} threads", latencies)
    record("scaling, time of a sample with all cores", throughputs)
    for text, ratios in (
        (f"latency with {most} threads", latencies),
        ("time of a sample", throughputs),
    ):
        mean = statistics.geometric_mean(ratios.values())
        print(f"{text}: {mean:.2f} of the faster peer, at most {max(ratios.values()):.2f}")
    for cores in next(iter(results.values()))["simulated"]:
        simulated = [Simulated(**result["simulated"][cores]) for result in results.values()]
        ratios = [one.alone_s / one.latency_s(barrier_s) for one in simulated]
        mean = statistics.geometric_mean(ratios)
        print(f"{cores} cores, simulated: {mean:.1f} times one, {mean / cores:.0%} of the cores")


def main() -> None:
    """Measure the networks and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--net", nargs="*", choices=list(NETS), default=list(NETS), metavar="NAME")
    parser.add_argument("--cores", nargs="*", type=int, default=[16, 64], metavar="N")
    parser.add_argument("--barrier", type=float, default=3.0, metavar="US")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = {}
    for name in args.net:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, Path(folder), args)
        show(name, results[name], args.barrier / 1e6)
    summarize(results, args.barrier / 1e6)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        model, library, feed_file = sys.argv[2:]
        with np.load(feed_file) as arrays:
            print(count_samples(model, library, dict(arrays)))
    else:
        main()
