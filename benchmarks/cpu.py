"""Latency on this machine's CPU against ONNX Runtime: untuned, tuned, and compiled by TVM's own pipeline.

    python benchmarks/cpu.py [--model NAME ...] [--minutes M] [--rounds N] [--json FILE]

Each model is built twice by `tvmflow run`: untuned, and tuned for `--minutes` (0: untuned only).
All libraries are then called in turns, each in a process of its own with one thread a core, and
their medians are compared. TVM's zero pipeline is called only a few times, because a call takes
seconds; `--zero FILE` measures it alone, with any ONNX file. Networks have seeded weights (see `_nets.py`); `ultraface` and `ultraface-raw` are real
and need TVMFLOW_TEST_MODELS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from _runtimes import build, compare, draw_inputs
from history import record

_REAL: Final = {
    "ultraface": "ultraface/version-RFB-320.onnx",
    "ultraface-raw": "ultraface/version-RFB-320_without_postprocessing.onnx",
}
_ZERO_ROUNDS: Final = 3


def write_model(name: str, path: Path) -> bool:
    """Write a model's file; return False if the model is not available."""
    if name in _REAL:
        folder = os.environ.get("TVMFLOW_TEST_MODELS")
        if folder is None:
            return False
        path.write_bytes((Path(folder) / _REAL[name]).read_bytes())
        return True
    import onnx
    from _nets import NETS

    onnx.save(NETS[name](), path)
    return True


# ---------------------------------------------------------------- TVM's own pipeline


def zero(model: str) -> dict[str, Any]:
    """Return the latency in milliseconds of a model compiled by TVM's importer and zero pipeline."""
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    feed = draw_inputs(Path(model))
    shapes = {name: list(array.shape) for name, array in feed.items()}
    mod = from_onnx(onnx.load(model), shape_dict=shapes, keep_params_in_input=False)
    target = tvm.target.Target.from_device("cpu")
    with target:
        library = tvm.compile(relax.get_pipeline("zero")(mod), target)
    machine = relax.VirtualMachine(library, tvm.cpu())
    values = [tvm.runtime.tensor(array) for array in feed.values()]
    machine["main"](*values)
    seconds = []
    for _ in range(_ZERO_ROUNDS):
        started = time.perf_counter()
        machine["main"](*values)
        seconds.append(time.perf_counter() - started)
    return {"ms": statistics.median(seconds) * 1e3}


def zero_in_child(model: str) -> dict[str, Any]:
    """Return the result of `zero`, or why it failed."""
    done = subprocess.run(
        [sys.executable, __file__, "--zero", model],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TVM_NUM_THREADS": str(os.cpu_count() or 1)},
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---------------------------------------------------------------- the table


def measure(name: str, folder: Path, minutes: float, rounds: int) -> dict[str, Any] | None:
    model = folder / f"{name}.onnx"
    if not write_model(name, model):
        return None
    log = folder / "log"
    bundles, took = {}, {}
    budgets = {"untuned": "trials: 0", **({"tuned": f"minutes: {minutes:g}"} if minutes else {})}
    for label, tune in budgets.items():
        bundle, took[label] = build(model, folder, tune, log)
        bundles[label] = str(bundle)
    libraries = {"ort": "ort", **bundles}
    pairs = {label: (str(model), library) for label, library in libraries.items()}
    result = compare(pairs, draw_inputs(model), rounds)
    result["zero"] = zero_in_child(str(model)).get("ms")
    result["seconds"] = took
    return result


def show(name: str, result: dict[str, Any]) -> None:
    ms = result["ms"]
    line = f"{name:<14} {ms['ort']:>8.2f}"
    for label in ("untuned", "tuned"):
        if label in ms:
            line += f" {ms[label]:>8.2f} {ms[label] / ms['ort']:>6.2f}×"
        else:
            line += f" {'–':>8} {'–':>7}"
    zero_ms = result["zero"]
    line += f" {zero_ms:>9.1f} {zero_ms / ms['untuned']:>6.0f}×" if zero_ms else f" {'fails':>9}"
    print(f"{line}   {max(result['error'].values()):.1e}", flush=True)


def main() -> None:
    from _nets import NETS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="*", default=[*NETS, *_REAL], metavar="NAME")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M")
    parser.add_argument("--rounds", type=int, default=31, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print("latency in ms, and relative to ONNX Runtime (below 1: faster)")
    head = f"{'':<14} {'ORT':>8} {'untuned':>8} {'':>7} {'tuned':>8} {'':>7} {'TVM zero':>9} {'gain':>7}"
    print(f"{head}   error", flush=True)
    results = {}
    for name in args.model:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(name, Path(folder), args.minutes, args.rounds)
        if result is None:
            print(f"{name:<14} skipped: TVMFLOW_TEST_MODELS is not set")
            continue
        results[name] = result
        show(name, result)
    for label in ("untuned", "tuned"):
        ratios = {
            name: result["ms"][label] / result["ms"]["ort"]
            for name, result in results.items()
            if label in result["ms"]
        }
        record(f"cpu, {label}", ratios)
        if ratios:
            mean = statistics.geometric_mean(ratios.values())
            print(
                f"{label}: {mean:.2f} times ONNX Runtime's latency (geometric mean of {len(ratios)})"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--zero"]:
        print(json.dumps(zero(*sys.argv[2:])))
    else:
        main()
