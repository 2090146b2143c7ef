"""Quantization to int8 beside onnxruntime.quantization and NNCF: accuracy, latency, size, time and memory.

    python benchmarks/quantization/quantize.py [--model NAME ...] [--drop POINTS] [--plain-nncf] [--limit SECONDS] [--rounds N] [--json FILE]
    python benchmarks/quantization/quantize.py --hidden N ... [--rounds N]

Networks are trained on the spot (see `_trained.py`, which needs scikit-learn and PyTorch, and for UltraFace scikit-image
and `TVMFLOW_TEST_MODELS`). Each is quantized with the same 128 samples by tvmflow (`quantize: {max_accuracy_drop: …}`), by
onnxruntime.quantization (static, QDQ, its defaults), and by NNCF for OpenVINO (`quantize_with_accuracy_control` with the
same limit; `--plain-nncf`, or where that takes longer than `--limit`: `quantize`), each in a process of its own. Of
UltraFace, accuracy is the average precision on composed images (`_faces.py`), which NNCF controls, while tvmflow's stage,
which counts classes, gets no limit. Measured are the time of quantizing on one core (of tvmflow that of the stage), and
CPU time and peak memory of the process: those of tvmflow include the whole run, which also compiles the library and
verifies it. Each int8 model is then run by its own runtime with one thread, on other samples,
interleaved; the fastest one of each counts. Peers that are not installed are skipped and named.

With `--hidden`, these are two LSTM layers with random weights and this many hidden units over 32 steps of one sequence,
float and of int8 in tvmflow and in ONNX Runtime, whose `quantize_dynamic` rounds LSTM.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _nets
import numpy as np
from _runtimes import ROOT, build, compare
from _trained import DETECTOR, NETS, Trained, accuracy_of, join, train
from history import record

_NAMES: Final = {"tvmflow": "tvmflow", "ort": "ONNX Runtime", "nncf": "NNCF + OpenVINO"}
_NEEDS: Final = {"tvmflow": (), "ort": ("onnxruntime",), "nncf": ("nncf", "openvino")}
_RECIPE: Final = """\
recipe: 1
name: net
model: {{onnx: {model}}}
quantize: {{data: {calibration}{limit}}}
tune: {{trials: 0}}
verify: {{data: {test}, rtol: 1, atol: 1}}
"""
# Attention is quantized in another way by NNCF.
_TRANSFORMERS: Final = ("vit", "bert")
_TIMEOUT_S: Final = 1800


class Quantized(NamedTuple):
    """An int8 model.

    Attributes:
        library: What its runtime loads: a bundle, an ONNX file or an IR of OpenVINO.
        bytes: The size of its weights' file, or of the library.
        seconds: How long quantizing took.
        cpu_s: The CPU time of the process that quantized and its children.
        peak_bytes: The peak memory of one of them.
        outputs: The outputs on all test samples, side by side.
        note: What the peer says of it.
    """

    library: str
    bytes: int
    seconds: float
    cpu_s: float
    peak_bytes: int
    outputs: Any
    note: str = ""


# ---------------------------------------------------------------- in the child


def _read(path: Path) -> Any:
    with np.load(path) as arrays:
        return arrays["x"]


def quantize_tvmflow(files: Trained, folder: Path, drop: float, name: str) -> dict[str, Any]:
    """Build with `tvmflow run`, and return the bundle and the time of the stage."""
    recipe = folder / "net.yaml"
    limit = "" if name == DETECTOR else f", max_accuracy_drop: {drop}"
    recipe.write_text(_RECIPE.format(**files._asdict(), limit=limit))
    words = ["run", recipe.name, "--store", str(folder / "store"), "--dist", str(folder / "dist")]
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow", *words, "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit((done.stdout + done.stderr)[-1500:])
    stages = json.loads(done.stdout.splitlines()[-1])["stages"]
    (stage,) = (entry for entry in stages if ":quantize/" in entry["stage_id"])
    (bundle,) = (folder / "dist").rglob("*.tvmflow")
    layers = stage["facts"]["layers"]
    kept = [layer["name"] for layer in layers if layer.get("reason")]
    note = f"{len(layers) - len(kept)} of {len(layers)} layers"
    return {"library": str(bundle), "seconds": stage["seconds"], "note": note}


def quantize_ort(files: Trained, folder: Path, drop: float, name: str) -> dict[str, Any]:
    """Quantize with ONNX Runtime's defaults."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._rows: Iterator[Any] = iter(_read(files.calibration))

        def get_next(self) -> Any:
            row = next(self._rows, None)
            return None if row is None else {"x": row[None]}

    out = folder / "ort.onnx"
    started = time.monotonic()
    quant_pre_process(str(files.model), str(folder / "pre.onnx"))
    quantize_static(str(folder / "pre.onnx"), str(out), Reader(), quant_format=QuantFormat.QDQ)
    return {"library": str(out), "seconds": time.monotonic() - started}


def quantize_nncf(files: Trained, folder: Path, drop: float, name: str) -> dict[str, Any]:
    """Quantize with NNCF's accuracy control, or without for a drop that may be infinite."""
    import nncf
    import openvino

    model = openvino.Core().read_model(str(files.model))
    evaluated = list(zip(*files.read_test(), strict=True))
    started = time.monotonic()

    def validate(compiled: Any, items: Any) -> float:
        # first for all items, then for each one
        chosen, truth = zip(*items, strict=True)
        request = compiled.create_infer_request()
        outputs = [join(request.infer({"x": row[None]}).values()) for row in chosen]
        return accuracy_of(np.array(outputs), np.array(truth)) / 100

    calibration = nncf.Dataset(list(_read(files.calibration)), lambda row: {"x": row[None]})
    options = {
        "model_type": nncf.ModelType.TRANSFORMER if name in _TRANSFORMERS else None,
        "subset_size": 128,
    }
    if math.isinf(drop):
        quantized = nncf.quantize(model, calibration, **options)
    else:
        quantized = nncf.quantize_with_accuracy_control(
            *(model, calibration, nncf.Dataset(evaluated, lambda item: {"x": item[0][None]})),
            validate,
            max_drop=drop / 100,
            **options,
        )
    seconds = time.monotonic() - started
    openvino.save_model(quantized, str(folder / "nncf.xml"), compress_to_fp16=False)
    return {"library": str(folder / "nncf.xml"), "seconds": seconds}


_QUANTIZERS: Final = {
    "tvmflow": quantize_tvmflow,
    "ort": quantize_ort,
    "nncf": quantize_nncf,
}


def run_child(tool: str, name: str, folder: str, drop: str) -> None:
    """Quantize on one core, and print what was made, the CPU time and the peak memory of this process and its children."""
    # threads of OpenVINO wait for each other: on a busy machine 900 calls of the smallest network take minutes
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result = _QUANTIZERS[tool](train(name), Path(folder), float(drop), name)
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    result["peak_bytes"] = max(usage.ru_maxrss for usage in used) << 10
    result["cpu_s"] = sum(usage.ru_utime + usage.ru_stime for usage in used)
    print(json.dumps(result))


# ---------------------------------------------------------------- in the parent


def quantize(
    tool: str, name: str, folder: Path, drop: float, timeout_s: float = _TIMEOUT_S
) -> Quantized | str:
    """Quantize in a child; return what was made, or why it failed."""
    words = [sys.executable, __file__, "--child", tool, name, str(folder), str(drop)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"did not finish within {timeout_s:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    result = json.loads(done.stdout.splitlines()[-1])
    library = Path(result["library"])
    weights = library.with_suffix(".bin")
    size = library.stat().st_size + (weights.stat().st_size if weights.exists() else 0)
    outputs = run_all(tool, str(library), _read(train(name).test))
    return Quantized(bytes=size, outputs=outputs, **result)


def quantize_within(control_s: float, name: str, folder: Path, drop: float) -> Quantized | str:
    """Quantize by NNCF with control of accuracy, or without where that takes too long."""
    why = "without accuracy control"
    if control_s:
        made = quantize("nncf", name, folder, drop, control_s)
        if isinstance(made, Quantized):
            return made
        why += f", which {made}"
    plain = quantize("nncf", name, folder, math.inf)
    return plain if isinstance(plain, str) else plain._replace(note=why)


def run_all(tool: str, library: str, rows: Any) -> Any:
    """Return the outputs of a library for each sample."""
    if tool == "tvmflow":
        from tvmflow.runtime import loading

        module = loading.load(library)
        return np.array([join(module.run({"x": row[None]}).values()) for row in rows])
    if tool == "ort":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(library, options, ["CPUExecutionProvider"])
        return np.array([join(session.run(None, {"x": row[None]})) for row in rows])
    import openvino

    compiled = openvino.Core().compile_model(library, "CPU", {"INFERENCE_NUM_THREADS": 1})
    request = compiled.create_infer_request()
    return np.array([join(request.infer({"x": row[None]}).values()) for row in rows])


def measure(
    name: str, tools: list[str], folder: Path, drop: float, rounds: int, control_s: float
) -> dict[str, Any]:
    """Return the figures of one network; NNCF controls accuracy for at most `control_s` seconds."""
    files = train(name)
    rows, labels = files.read_test()
    exact = run_all("ort", str(files.model), rows)
    result: dict[str, Any] = {"accuracy": accuracy_of(exact, labels), "tools": {}}
    result["bytes"] = files.model.stat().st_size
    pairs = {
        "float ort": (str(files.model), "ort"),
        "float openvino": (str(files.model), "openvino"),
    }
    for tool in tools:
        own = folder / tool
        own.mkdir()
        made = (
            quantize_within(control_s, name, own, drop)
            if tool == "nncf"
            else quantize(tool, name, own, drop)
        )
        if isinstance(made, str):
            result["tools"][tool] = {"failed": made}
            continue
        figures = made._asdict()
        outputs = figures.pop("outputs")
        figures["drop"] = result["accuracy"] - accuracy_of(outputs, labels)
        figures["error"] = float(np.sqrt(np.square(outputs - exact).sum() / np.square(exact).sum()))
        result["tools"][tool] = figures
        runtimes = {"tvmflow": (str(files.model), made.library), "ort": (made.library, "ort")}
        pairs[tool] = runtimes.get(tool, (made.library, "openvino"))
    if "nncf" not in tools:
        del pairs["float openvino"]
    compared = compare(pairs, {"x": rows[:1]}, rounds, threads=1, choose=min)
    result["ms"], result["failed"] = compared["ms"], compared["failed"]
    return result


_STEPS: Final = 32


def measure_lstm(hidden: int, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the latencies, errors and file sizes of an LSTM with this many units, in float32 and int8."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model, data, dynamic = folder / "lstm.onnx", folder / "data.npz", folder / "dynamic.onnx"
    onnx.save(_nets.lstm(hidden, hidden, _STEPS), str(model))
    rows = np.random.default_rng(0).normal(size=(16 * _STEPS, 1, hidden)).astype(np.float32)
    np.savez(data, x=rows)
    quantize_dynamic(str(model), str(dynamic))
    exact, _ = build(model, folder, "trials: 0", folder / "log")
    made = quantize_tvmflow(Trained(model, data, data), folder, math.inf, DETECTOR)
    pairs = {
        "float ort": (str(model), "ort"),
        "int8 ort": (str(dynamic), "ort"),
        "float": (str(model), str(exact)),
        "int8": (str(model), made["library"]),
    }
    result = compare(pairs, {"x": rows[:_STEPS]}, rounds, threads=1, choose=min)
    result["note"] = made["note"]
    files = (model, dynamic, exact, Path(made["library"]))
    result["mb"] = [path.stat().st_size / 1e6 for path in files]
    return result


def show_lstms(units: list[int], rounds: int) -> None:
    """Print a row for each number of hidden units."""
    labels = ("float ort", "int8 ort", "float", "int8")
    print("hidden units: ms, error, MB of " + ", ".join(labels))
    for hidden in units:
        with tempfile.TemporaryDirectory() as folder:
            found = measure_lstm(hidden, Path(folder), rounds)
        ms, error = found["ms"], found["error"]
        print(
            f"{hidden:>5}: " + ", ".join(f"{ms[label]:.3f}" for label in labels),
            "; " + ", ".join(f"{error[label]:.2%}" for label in labels),
            "; " + ", ".join(f"{size:.2f}" for size in found["mb"]),
            f"; int8 {ms['int8'] / ms['float']:.2f} of float, {ms['int8'] / ms['int8 ort']:.2f} of int8 ort",
            f"; {found['note']}",
            flush=True,
        )


def show(name: str, result: dict[str, Any]) -> None:
    """Print the rows of a network."""
    ms = result["ms"]
    floats = ", ".join(f"{ms[key]:.3f} ms {key}" for key in ms if key.startswith("float"))
    print(f"{name}: float {result['accuracy']:.2f} %, {result['bytes'] / 1e6:.2f} MB, {floats}")
    peers = [ms[tool] for tool in ("ort", "nncf") if tool in ms]
    for tool, figures in result["tools"].items():
        if "failed" in figures:
            print(f"    {_NAMES[tool]:<16} failed: {figures['failed']}")
            continue
        latency = f"{ms[tool]:8.3f} ms" if tool in ms else "   fails"
        against = ""
        if tool == "tvmflow" and peers and tool in ms:
            against = f"  {ms[tool] / min(peers):.2f} of the faster peer's"
        print(
            f"    {_NAMES[tool]:<16} drop {figures['drop']:6.2f}  error {figures['error']:6.1%}  {latency}"
            f"  {figures['bytes'] / 1e6:6.2f} MB  {figures['seconds']:6.1f} s  CPU {figures['cpu_s']:6.1f} s"
            f"  {figures['peak_bytes'] / 1e6:6.0f} MB{against}  {figures['note']}"
        )
    sys.stdout.flush()


def summarize(results: dict[str, dict[str, Any]]) -> None:
    """Print geometric means of what tvmflow takes relative to its peers."""

    def mean(ratios: list[float]) -> str:
        return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}" if ratios else "–"

    ratios: dict[str, list[float]] = {"latency": [], "time": [], "memory": []}
    latencies: dict[str, float] = {}
    fastest: dict[str, str] = {}
    for name, result in results.items():
        own, ms = result["tools"].get("tvmflow", {}), result["ms"]
        peers = [tool for tool in ("ort", "nncf") if tool in ms]
        if "tvmflow" in ms and peers:
            peer = min(peers, key=lambda tool: float(ms[tool]))
            fastest[name] = _NAMES[peer]
            ratios["latency"].append(ms["tvmflow"] / ms[peer])
            latencies[name] = ratios["latency"][-1]
        nncf = result["tools"].get("nncf", {})
        if "seconds" in own and "seconds" in nncf:
            ratios["time"].append(own["cpu_s"] / nncf["cpu_s"])
            ratios["memory"].append(own["peak_bytes"] / nncf["peak_bytes"])
    record("quantize", latencies, fastest)
    print(
        f"tvmflow's latency relative to the faster int8 peer: {mean(ratios['latency'])}; its CPU time and peak memory of "
        f"quantizing relative to NNCF: {mean(ratios['time'])} and {mean(ratios['memory'])} (geometric means)"
    )


def main() -> None:
    """Measure all networks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="*", default=[*NETS, DETECTOR], metavar="NAME")
    parser.add_argument("--drop", type=float, default=0.5, metavar="POINTS")
    parser.add_argument("--plain-nncf", action="store_true", help="nncf.quantize, without control")
    parser.add_argument("--limit", type=float, default=600, help="seconds of NNCF's control")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--hidden", type=int, nargs="+", metavar="N", help="measure LSTMs alone")
    args = parser.parse_args()
    if args.hidden:
        show_lstms(args.hidden, args.rounds)
        return
    tools = [tool for tool in _NEEDS if all(map(importlib.util.find_spec, _NEEDS[tool]))]
    for tool in _NEEDS.keys() - set(tools):
        print(f"{_NAMES[tool]}: not installed, skipped")
    results, control_s = {}, 0 if args.plain_nncf else args.limit
    for name in args.model:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(*(name, tools, Path(folder), args.drop, args.rounds, control_s))
        show(name, results[name])
    summarize(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(*sys.argv[2:])
    else:
        main()
