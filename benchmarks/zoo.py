"""Latency of every ONNX model in a folder against other runtimes.

    python benchmarks/zoo.py FOLDER [--model NAME ...] [--minutes M] [--threads N ...] [--dim NAME=N ...]
                             [--rounds N] [--vm] [--json FILE] [--unrecorded]

Each model is built by `tvmflow run` untuned, and tuned for `--minutes` (0: untuned only), and then called interleaved
with all peers (with `--vm`, also on TVM's virtual machine), each runtime in a separate process, with one thread (CPU
time) and with one thread per core. The table shows latencies in ms, and tvmflow's relative to ONNX Runtime and to the
fastest peer (below 1: faster). Below the row of a model above 1.1 are its slowest kernels, and for a tuned model the
latency relative to untuned: as found by `tvmflow run`, and as measured here. The ratios are appended to the history
(`benchmarks/history.py`), unless `--unrecorded`.
Weights may be random, because their values affect neither shapes nor speed. Other peers run if they are installed and
support the model: OpenVINO, ncnn (`pip install ncnn pnnx`), LiteRT for a model with a `.tflite` file beside it, and
PyTorch Inductor for a model with an exported `.pt2`. A peer whose outputs differ by more than 1 % does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from _runtimes import PEERS, Failed, build, compare, draw_inputs, find_peers
from history import record

_SLOW: Final = 1.1
_WRONG: Final = 0.01
_SHOWN_KERNELS: Final = 6
_BUNDLES: Final = ("vm", "untuned", "tuned")
# The beginning of the line with the reason of a failure in the output of `tvmflow run`.
_FAILURE: Final = re.compile(r": failed: |^tvmflow: ")


def build_all(
    model: Path, folder: Path, minutes: float, inputs: Mapping[str, Any], *, on_vm: bool
) -> dict[str, str]:
    """Build a model untuned, if requested also for TVM's virtual machine and tuned; return the bundles.

    Raises:
        Failed: With the message of `tvmflow run`.
    """
    budgets = {"untuned": ("trials: 0", "auto")}
    if on_vm:
        budgets["vm"] = ("trials: 0", "vm")
    if minutes:
        budgets["tuned"] = (f"minutes: {minutes:g}", "auto")
    log = folder / "log"
    bundles = {}
    for label, (tune, runtime) in budgets.items():
        try:
            bundle, _ = build(model, folder, tune, log, inputs=inputs, runtime=runtime)
            bundles[label] = str(bundle)
        except subprocess.CalledProcessError as error:
            lines = [line for line in log.read_text().splitlines() if _FAILURE.search(line)]
            raise Failed(lines[-1].strip() if lines else "tvmflow run failed") from error
    return bundles


def measure(path: Path, args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Return the result of `compare` for each number of threads.

    Raises:
        Failed: If the model cannot be built, or ONNX Runtime cannot run it.
    """
    feed = draw_inputs(path, dict(args.dim))
    inputs = {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in feed.items()
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The link's name is valid for a recipe, which the model's file name may not be.
        link = folder / f"{re.sub('[^a-z0-9-]+', '-', path.stem.lower()).strip('-')}.onnx"
        link.symlink_to(path.resolve())
        bundles = build_all(link, folder, args.minutes, inputs, on_vm=args.vm)
        libraries = {label: (str(path), library) for label, library in bundles.items()}
        pairs = {**{peer: (str(path), peer) for peer in find_peers(path)}, **libraries}
        results = {
            threads: _drop_wrong(compare(pairs, feed, args.rounds, threads, _choose_profiled))
            for threads in args.threads
        }
        if "tuned" in bundles:
            found = _read_found(Path(bundles["tuned"]))
            for result in results.values():
                result["found"] = found
        return results


def _read_found(bundle: Path) -> float:
    """Return a tuned library's latency relative to untuned, by `verify`; 1 if tuning kept nothing."""
    measured = json.loads((bundle.parent / "measurements.json").read_text())
    return 1 / float(measured["speedup"]["median"]) if "speedup" in measured else 1.0


def _drop_wrong(result: dict[str, Any]) -> dict[str, Any]:
    """Move peers with wrong outputs to the failed ones."""
    for peer in [peer for peer in PEERS if result["error"].get(peer, 0.0) > _WRONG]:
        del result["ms"][peer]
        result["failed"][peer] = f"its outputs differ by {result['error'][peer]:.1%}"
    return result


def _choose_profiled(ms: Mapping[str, float]) -> str | None:
    """Return the label of the last bundle if it is slow, so that its kernels are shown."""
    label = [label for label in _BUNDLES if label in ms][-1:]
    return label[0] if label and _ratios(ms, label[0])[1] > _SLOW else None


def _ratios(ms: Mapping[str, float], label: str) -> tuple[float, float]:
    """Return a latency relative to ONNX Runtime's, and relative to the fastest peer's."""
    return ms[label] / ms["ort"], ms[label] / min(ms[peer] for peer in PEERS if peer in ms)


def show(name: str, threads: int, result: Mapping[str, Any]) -> None:
    """Print the row of a model, and the slowest kernels of its profile."""
    ms = result["ms"]
    missing = {peer: "fails" if peer in result["failed"] else "–" for peer in PEERS}
    cells = [f"{ms[peer]:>9.3f}" if peer in ms else f"{missing[peer]:>9}" for peer in PEERS]
    for label in _BUNDLES:
        if label in ms:
            against_ort, against_best = _ratios(ms, label)
            cells.append(f"{ms[label]:>9.3f} {against_ort:>6.2f} {against_best:>6.2f}")
    error = max(result["error"][label] for label in _BUNDLES if label in result["error"])
    print(f"{name:<24} {threads:>2} {' '.join(cells)}   {error:.1e}", flush=True)
    if "tuned" in ms and threads == (os.cpu_count() or 1):
        # `verify` measures with one thread per core.
        delivered = ms["tuned"] / ms["untuned"]
        print(f"    tuned / untuned: found {result['found']:.3f}, delivered {delivered:.3f}")
    for label, reason in result["failed"].items():
        print(f"    {PEERS.get(label, label)}: {reason[:120]}")
    total = sum(seconds for _, _, seconds in result["profile"])
    for kernel, calls, seconds in result["profile"][:_SHOWN_KERNELS]:
        print(f"    {seconds / total:>5.0%} {seconds * 1e3:>9.3f} ms {calls:>3}x  {kernel}")


def summarize(results: Mapping[str, Mapping[int, Mapping[str, Any]]], threads: int) -> None:
    """Print geometric means and the slowest models for a number of threads."""
    for label in _BUNDLES:
        ratios = {
            name: _ratios(by_threads[threads]["ms"], label)
            for name, by_threads in results.items()
            if label in by_threads[threads]["ms"]
        }
        if not ratios:
            continue
        means = [
            math.exp(statistics.fmean(math.log(pair[kind]) for pair in ratios.values()))
            for kind in (0, 1)
        ]
        worst = max(ratios, key=lambda name: ratios[name][1])
        slow = sum(pair[1] > _SLOW for pair in ratios.values())
        print(
            f"{label}, {threads} thread(s): geometric mean of {len(ratios)}: {means[0]:.2f} of ONNX "
            f"Runtime, {means[1]:.2f} of the fastest peer; {slow} above {_SLOW}; "
            f"worst {ratios[worst][1]:.2f} ({worst})"
        )


def _record(
    results: Mapping[str, Mapping[int, Mapping[str, Any]]], threads: int, label: str
) -> None:
    """Append the ratios of one kind of library to the history."""
    ms = {name: by_threads[threads]["ms"] for name, by_threads in results.items()}
    measured = {name: each for name, each in ms.items() if label in each}
    record(
        f"zoo, {label}, {threads} thread{'s' * (threads > 1)}",
        {name: _ratios(each, label)[1] for name, each in measured.items()},
        {
            name: PEERS[min((peer for peer in PEERS if peer in each), key=lambda peer: each[peer])]
            for name, each in measured.items()
        },
    )


def _parse_dim(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    return name, int(length)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder with the ONNX files, at any depth")
    parser.add_argument("--model", nargs="*", help="only these (names without .onnx)")
    parser.add_argument("--minutes", type=float, default=0.0, help="tune each model (default: 0)")
    parser.add_argument(
        "--threads", type=int, nargs="*", default=sorted({1, os.cpu_count() or 1}), metavar="N"
    )
    parser.add_argument(
        "--dim", type=_parse_dim, nargs="*", default=[], help="the length of a symbolic dimension"
    )
    parser.add_argument("--rounds", type=int, default=11, help="turns of each runtime")
    parser.add_argument("--vm", action="store_true", help="TVM's virtual machine, too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--unrecorded", action="store_true", help="append nothing to the history")
    return parser.parse_args()


def main() -> None:
    """Measure the models of a folder and print the table."""
    args = _parse_arguments()
    paths = sorted(args.folder.rglob("*.onnx"))
    if args.model:
        paths = [path for path in paths if path.stem in args.model]
    bundles = {"untuned", *(["vm"] if args.vm else []), *(["tuned"] if args.minutes else [])}
    labels = [label for label in _BUNDLES if label in bundles]
    columns = [f"{PEERS[peer][:9]:>9}" for peer in PEERS]
    columns += [f"{label:>9} {'/ ORT':>6} {'/ best':>6}" for label in labels]
    print(f"{'':<24} {'':>2} {' '.join(columns)}   error", flush=True)
    results: dict[str, dict[int, dict[str, Any]]] = {}
    failed = {}
    for path in paths:
        try:
            results[path.stem] = measure(path, args)
        except Failed as error:
            failed[path.stem] = str(error)
            print(f"{path.stem:<24} not measured: {error}", flush=True)
            continue
        for threads, result in results[path.stem].items():
            show(path.stem, threads, result)
    for threads in args.threads:
        summarize(results, threads)
        for label in () if args.unrecorded else labels:
            _record(results, threads, label)
    if failed:
        print(f"not measured: {', '.join(failed)}")
    if args.json:
        args.json.write_text(json.dumps({"measured": results, "failed": failed}, indent=1))


if __name__ == "__main__":
    main()
