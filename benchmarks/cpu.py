"""Latency on this machine's CPU against ONNX Runtime: untuned, tuned, and compiled by TVM's own pipeline.

    python benchmarks/cpu.py [--model NAME ...] [--minutes M] [--rounds N] [--json FILE]

Each model is built twice by `tvmflow run`: untuned, and tuned for `--minutes` (0: untuned only).
All libraries are then called in turns, each in a process of its own with one thread a core, and
their medians are compared. TVM's zero pipeline is called only a few times, because a call takes
seconds. Networks have seeded weights (see `_nets.py`); `ultraface` and `ultraface-raw` are real
and need TVMFLOW_TEST_MODELS.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

_REAL: Final = {
    "ultraface": "ultraface/version-RFB-320.onnx",
    "ultraface-raw": "ultraface/version-RFB-320_without_postprocessing.onnx",
}
_RECIPE: Final = """\
recipe: 1
name: {name}
model: {{onnx: {name}.onnx}}
kernels: {{precision: {precision}}}
tune: {{{tune}}}
verify: {{against: none}}
"""
_ZERO_ROUNDS: Final = 3
_WARM: Final = 2
_REST_S: Final = 0.4


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


def build(
    name: str, folder: Path, tune: str, log: Path, precision: str = "model"
) -> tuple[Path, float]:
    """Build a model with `tvmflow run`; return its bundle and the seconds that it took."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(_RECIPE.format(name=name, tune=tune, precision=precision))
    out = folder / tune.replace(": ", "-") / precision
    words = ["run", recipe.name, "--dist", str(out), "--store", str(folder / "store")]
    started = time.monotonic()
    with log.open("ab") as sink:
        subprocess.run(
            [sys.executable, "-m", "tvmflow", *words],
            cwd=folder,
            stdout=sink,
            stderr=sink,
            check=True,
        )
    (bundle,) = (out / name).rglob("*.tvmflow")
    return bundle, time.monotonic() - started


# ---------------------------------------------------------------- one process for each runtime


def serve(model: str, library: str) -> None:
    """Load a library (a bundle, or `ort`), write its results, then time one call for each line of input.

    Each runtime has a process of its own: threads spin and are bound to cores, and two runtimes in one
    process would disturb each other.
    """
    import numpy as np

    if library == "ort":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = os.cpu_count() or 1
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        inputs = session.get_inputs()
    else:
        from tvmflow.runtime import loading

        module = loading.load(library)
        inputs = module.inputs
    random = np.random.default_rng(0)
    feed = {spec.name: random.standard_normal(spec.shape).astype(np.float32) for spec in inputs}

    def call() -> list[Any]:
        return session.run(None, feed) if library == "ort" else list(module.run(feed).values())

    np.savez(sys.stdin.readline().strip(), *call())
    print(flush=True)
    for _ in sys.stdin:
        for _ in range(_WARM):
            call()
        started = time.perf_counter()
        call()
        print(time.perf_counter() - started, flush=True)


def compare(libraries: dict[str, tuple[str, str]], rounds: int) -> dict[str, Any]:
    """Call each `(model, library)` in turns; return median latencies, and errors relative to `ort`."""
    import numpy as np

    servers = {
        label: subprocess.Popen(
            [sys.executable, __file__, "--child", "serve", model, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        for label, (model, library) in libraries.items()
    }

    def ask(label: str, line: str) -> str:
        server = servers[label]
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(f"{line}\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        # TVM's threads spin for a fifth of a second after a call and would disturb the next one.
        time.sleep(_REST_S)
        return answer

    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for label in servers:
            ask(label, f"{folder}/{label}.npz")
            with np.load(f"{folder}/{label}.npz") as arrays:
                results[label] = list(arrays.values())
    error = {
        label: max(
            float(np.abs(a - b).max() / (np.abs(b).max() or 1.0))
            for a, b in zip(arrays, results["ort"], strict=True)
        )
        for label, arrays in results.items()
    }
    seconds: dict[str, list[float]] = {label: [] for label in servers}
    for turn in range(rounds):
        for label in list(servers)[:: 1 if turn % 2 else -1]:
            seconds[label].append(float(ask(label, "")))
    for server in servers.values():
        server.communicate()
    return {
        "ms": {label: statistics.median(samples) * 1e3 for label, samples in seconds.items()},
        "error": error,
    }


def zero(model: str) -> dict[str, Any]:
    """Return the latency in milliseconds of a model compiled by TVM's importer and zero pipeline."""
    import numpy as np
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    mod = from_onnx(onnx.load(model), keep_params_in_input=False)
    target = tvm.target.Target.from_device("cpu")
    with target:
        library = tvm.compile(relax.get_pipeline("zero")(mod), target)
    machine = relax.VirtualMachine(library, tvm.cpu())
    random = np.random.default_rng(0)
    values = [
        tvm.runtime.tensor(
            random.standard_normal([int(n) for n in var.ty.shape]).astype(np.float32)
        )
        for var in mod["main"].params
    ]
    seconds = []
    for _ in range(_ZERO_ROUNDS):
        started = time.perf_counter()
        machine["main"](*values)
        seconds.append(time.perf_counter() - started)
    return {"ms": statistics.median(seconds) * 1e3}


def _environment() -> dict[str, str]:
    return {**os.environ, "TVM_NUM_THREADS": str(os.cpu_count() or 1)}


def in_child(step: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", step, *words],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(step: str, *words: str) -> None:
    if step == "zero":
        print(json.dumps(zero(*words)))
    else:
        serve(*words)


# ---------------------------------------------------------------- the table


def measure(name: str, folder: Path, minutes: float, rounds: int) -> dict[str, Any] | None:
    model = folder / f"{name}.onnx"
    if not write_model(name, model):
        return None
    log = folder / "log"
    bundles, took = {}, {}
    budgets = {"untuned": "trials: 0", **({"tuned": f"minutes: {minutes:g}"} if minutes else {})}
    for label, tune in budgets.items():
        bundle, took[label] = build(name, folder, tune, log)
        bundles[label] = str(bundle)
    libraries = {"ort": "ort", **bundles}
    pairs = {label: (str(model), library) for label, library in libraries.items()}
    result = compare(pairs, rounds)
    result["zero"] = in_child("zero", str(model)).get("ms")
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
        ratios = [
            result["ms"][label] / result["ms"]["ort"]
            for result in results.values()
            if label in result["ms"]
        ]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(
                f"{label}: {mean:.2f} times ONNX Runtime's latency (geometric mean of {len(ratios)})"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
