"""CPU latency compared with ONNX Runtime: untuned, tuned, and compiled by TVM's own pipeline.

    python benchmarks/cpu.py [--model NAME ...] [--minutes M] [--rounds N] [--json FILE]
    python benchmarks/cpu.py --compile-time [--against CHECKOUT] [--model NAME ...] [--rounds N] [--json FILE]

Each model is built twice by `tvmflow run`: untuned, and tuned for `--minutes` (0: untuned only). All libraries are then
called interleaved, each in a separate process with one thread per core, and their medians are compared. TVM's zero
pipeline is called only a few times, because a call takes seconds; `--zero FILE` measures it alone, with any ONNX file.
Networks have seeded weights (see `_nets.py`); `ultraface` and `ultraface-raw` are real and need TVMFLOW_TEST_MODELS.

`--compile-time` measures `tvmflow run` itself, untuned, for a C library that `verify` compares with ONNX Runtime: in an
empty store (*cold*), once more (*warm*), and after a change of one weight (*changed*). CPU seconds include all
processes and hardly depend on other load; the wall-clock seconds of stages do. With `--against`, a checkout of an
earlier version runs interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from _runtimes import ROOT, build, compare, draw_inputs
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
    """Return the latency in milliseconds of a model compiled by TVM's zero pipeline."""
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
    """Return the result of `zero`, or the reason why it failed."""
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


# ---------------------------------------------------------------- the time of compilation

_COMPILED: Final = """\
recipe: 1
name: {name}
model: {{onnx: {name}.onnx}}
tune: {{trials: 0}}
outputs: [c-library]
"""


def change_weight(model: Path) -> None:
    """Change one value of the largest weight of a model."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    network = onnx.load(model)
    weight = max(network.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    array = np.array(numpy_helper.to_array(weight))
    array.reshape(-1)[0] += 0.5
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(network, model)


def run_once(checkout: Path, name: str, folder: Path) -> dict[str, Any]:
    """Return CPU and wall-clock seconds of a run, and the seconds of each stage that ran."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow", "run", f"{name}.yaml", "--json", "--store", "store"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        check=True,
    )
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    report = json.loads(done.stdout.splitlines()[-1])
    return {
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall": seconds,
        "stages": {
            stage["stage_id"].partition(":")[2].partition("/")[0]: stage["seconds"]
            for stage in report["stages"]
            if stage["outcome"] == "ran"
        },
    }


def measure_compilation(name: str, checkout: Path) -> dict[str, dict[str, Any]] | None:
    """Measure a cold run, a warm run, and a run after a change of one weight."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / f"{name}.onnx"
        if not write_model(name, model):
            return None
        (folder / f"{name}.yaml").write_text(_COMPILED.format(name=name))
        runs = {label: run_once(checkout, name, folder) for label in ("cold", "warm")}
        change_weight(model)
        return {**runs, "changed": run_once(checkout, name, folder)}


def compare_compilation(
    names: list[str], checkouts: dict[str, Path], rounds: int
) -> dict[str, Any]:
    """Print and return the minimum CPU seconds of each case, and the stages of that run."""
    results: dict[str, Any] = {}
    for name in names:
        best: dict[str, dict[str, Any]] = {}
        for _ in range(rounds):
            for version, checkout in checkouts.items():
                for case, row in (measure_compilation(name, checkout) or {}).items():
                    key = f"{case} {version}"
                    if key not in best or row["cpu"] < best[key]["cpu"]:
                        best[key] = row
        for key, row in sorted(best.items()):
            stages = "  ".join(f"{stage} {s:.1f}" for stage, s in row["stages"].items())
            line = f"{name:<14} {key:<14} {row['cpu']:>6.2f} {row['wall']:>6.1f}  {stages}"
            print(line, flush=True)
        results[name] = best
    return results


def main() -> None:
    from _nets import NETS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="*", default=[*NETS, *_REAL], metavar="NAME")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M")
    parser.add_argument("--rounds", type=int, default=31, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--compile-time", action="store_true")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    args = parser.parse_args()
    if args.compile_time:
        print("processor seconds, seconds, and those of each stage that ran")
        checkouts = {**({"before": args.against} if args.against else {}), "now": ROOT}
        times = compare_compilation(args.model, checkouts, args.rounds)
        if args.json:
            args.json.write_text(json.dumps(times, indent=1))
        return
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
