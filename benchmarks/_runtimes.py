"""Interleaved measurements of tvmflow and other runtimes, each in a separate process.

Threads spin after a call and are bound to cores, so that two runtimes in one process, or without a pause between
them, would disturb each other.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PEERS: Final = {
    "ort": "ONNX Runtime",
    "openvino": "OpenVINO",
    "ncnn": "ncnn",
    "litert": "LiteRT",
    "inductor": "Inductor",
}
"""Name of another runtime -> its name in tables."""

# Peer -> (required modules, suffix of the model's file in its own format beside the ONNX file).
_NEEDS: Final = {
    "ort": (("onnxruntime",), ""),
    "openvino": (("openvino",), ""),
    "ncnn": (("ncnn", "pnnx"), ""),
    "litert": (("ai_edge_litert",), ".tflite"),
    "inductor": (("torch",), ".pt2"),
}

OPEN_OPENVINO: Final = "openvino-open"
"""OpenVINO with dynamic shapes; `openvino` compiles for the shapes of the inputs."""

_RECIPE: Final = """\
recipe: 1
name: {name}
model: {{onnx: {file}}}
dimensions: {dimensions}
inputs: {inputs}
kernels: {{precision: {precision}}}
tune: {{{tune}}}
runtime: {runtime}
verify: {{against: none}}
"""
_WARM: Final = 2
# In one turn, calls are repeated for this time, and their median counts.
_TURN_S: Final = 0.02
_PNNX_TYPES: Final = {"float32": "f32", "float64": "f64", "int32": "i32", "int64": "i64"}
# TVM's threads spin for a fifth of a second after a call.
_REST_S: Final = 0.3

Feed = Mapping[str, Any]


class Opened(NamedTuple):
    """A loaded model.

    Attributes:
        inputs: Names of the inputs.
        call: Computes the outputs, in the model's order.
        profile: Returns (kernel, calls, seconds) of a call; None if the runtime has no profiler.
    """

    inputs: list[str]
    call: Callable[[Feed], list[Any]]
    profile: Callable[[Feed], list[Any]] | None = None


def find_peers(path: Path) -> list[str]:
    """Return the installed peers that have a file of the model in a format that they read."""
    return [
        peer
        for peer, (modules, suffix) in _NEEDS.items()
        if all(map(importlib.util.find_spec, modules))
        and (not suffix or path.resolve().with_suffix(suffix).exists())
    ]


def draw_inputs(path: Path, dims: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return random inputs: normally distributed, or 0 and 1 for integers (indices and masks).

    Args:
        path: The ONNX file.
        dims: The sizes of symbolic dimensions; other symbolic dimensions have size 1.
    """
    import numpy as np
    import onnx
    from onnx import helper

    model = onnx.load(path, load_external_data=False)
    random = np.random.default_rng(0)
    weights = {tensor.name for tensor in model.graph.initializer}
    feed = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        tensor = value.type.tensor_type
        shape = [
            dim.dim_value if dim.HasField("dim_value") else (dims or {}).get(dim.dim_param, 1)
            for dim in tensor.shape.dim
        ]
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        is_float = dtype.kind == "f"
        drawn = random.standard_normal(shape) if is_float else random.integers(0, 2, shape)
        feed[value.name] = np.asarray(drawn).astype(dtype)
    return feed


def build(
    model: Path,
    folder: Path,
    tune: str,
    log: Path,
    precision: str = "model",
    inputs: Mapping[str, Any] | None = None,
    runtime: str = "auto",
    dimensions: Mapping[str, Any] | None = None,
) -> tuple[Path, float]:
    """Build a model with `tvmflow run`.

    Args:
        model: The ONNX file; its name without suffix must be a valid name of a recipe.
        folder: The folder for recipe, store and results.
        tune: The fields of the recipe's `tune`.
        log: The file to which the command's output is appended.
        precision: The recipe's `kernels.precision`.
        inputs: The recipe's `inputs`, for a model with dynamic shapes.
        runtime: The recipe's `runtime`.
        dimensions: The recipe's `dimensions`, to which `inputs` may refer.

    Returns:
        The bundle, and the command's duration in seconds.
    """
    recipe = folder / f"{model.stem}.yaml"
    recipe.write_text(
        _RECIPE.format(
            name=model.stem,
            file=json.dumps(str(model.resolve())),
            dimensions=json.dumps(dimensions or {}),
            inputs=json.dumps(inputs or {}),
            precision=precision,
            tune=tune,
            runtime=runtime,
        )
    )
    out = folder / tune.replace(": ", "-") / precision / runtime
    words = ["run", recipe.name, "--dist", str(out), "--store", str(folder / "store")]
    started = time.monotonic()
    with log.open("ab") as sink:
        subprocess.run(
            [sys.executable, "-m", "tvmflow", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=sink,
            stderr=sink,
            check=True,
        )
    (bundle,) = (out / model.stem).rglob("*.tvmflow")
    return bundle, time.monotonic() - started


# ---------------------------------------------------------------- in the child


def _open_ort(model: str, threads: int) -> Opened:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return Opened(names, lambda feed: list(session.run(None, dict(feed))))


def _open_openvino(model: str, threads: int, feed: Feed, *, keeps_sizes_open: bool) -> Opened:
    import openvino

    core = openvino.Core()
    network = core.read_model(model)
    if network.is_dynamic() and not keeps_sizes_open:
        network.reshape({name: list(array.shape) for name, array in feed.items()})
    # OpenVINO would use bfloat16 by default on CPUs with support.
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = core.compile_model(network, "CPU", options).create_infer_request()
    names = [value.get_any_name() for value in network.inputs]

    def call(feed: Feed) -> list[Any]:
        return list(request.infer(dict(feed), share_inputs=True).values())

    return Opened(names, call)


def _open_ncnn(model: str, threads: int, feed: Feed) -> Opened:
    """Convert a model with pnnx, as ncnn recommends, and open it in float32."""
    import ncnn
    import numpy as np
    import pnnx

    folder = Path(tempfile.mkdtemp(prefix="ncnn"))
    try:
        source = folder / "net.onnx"
        source.symlink_to(Path(model).resolve())
        shapes = ",".join(
            f"{list(array.shape)}{_PNNX_TYPES[array.dtype.name]}".replace(" ", "")
            for array in feed.values()
        )
        command = [pnnx.EXEC_PATH, "net.onnx", "fp16=0", f"inputshape={shapes}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        net = ncnn.Net()
        net.opt.num_threads = threads
        net.opt.use_vulkan_compute = net.opt.use_bf16_storage = False
        net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
        if net.load_param(str(folder / "net.ncnn.param")) or net.load_model(
            str(folder / "net.ncnn.bin")
        ):
            raise ValueError("ncnn cannot load what pnnx has made")
    finally:
        shutil.rmtree(folder)
    # `out0`, `out1`, … are the model's order; ncnn lists the names in the order of its layers.
    results = sorted(net.output_names(), key=lambda name: int(name.removeprefix("out")))

    def call(feed: Feed) -> list[Any]:
        extractor = net.create_extractor()
        for number, array in enumerate(feed.values()):
            # ncnn's tensors have no batch axis.
            extractor.input(f"in{number}", ncnn.Mat(np.ascontiguousarray(array[0])))
        found = [extractor.extract(name) for name in results]
        if any(status for status, _ in found):
            raise ValueError("ncnn cannot run the model")
        return [np.array(value)[None] for _, value in found]

    return Opened(list(feed), call)


def _open_litert(model: str, threads: int, feed: Feed) -> Opened:
    """Open the TFLite file beside a model; it must have the same inputs and outputs, possibly in NHWC."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(
        str(Path(model).resolve().with_suffix(".tflite")), num_threads=threads
    )
    interpreter.allocate_tensors()
    given = interpreter.get_input_details()
    results = [each["index"] for each in interpreter.get_output_details()]

    def call(feed: Feed) -> list[Any]:
        for each, array in zip(given, feed.values(), strict=True):
            fits = array.ndim != 4 or tuple(each["shape"]) == array.shape
            interpreter.set_tensor(each["index"], array if fits else np.moveaxis(array, 1, -1))
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in results]

    return Opened(list(feed), call)


def _open_inductor(model: str, threads: int, feed: Feed) -> Opened:
    """Compile the exported program beside a model with frozen weights; it must have the same inputs."""
    import torch

    torch.set_num_threads(threads)
    torch._inductor.config.freezing = True
    program = torch.export.load(Path(model).resolve().with_suffix(".pt2"))
    compiled = torch.compile(program.module())

    def call(feed: Feed) -> list[Any]:
        with torch.inference_mode():
            found = compiled(*map(torch.from_numpy, feed.values()))
        values = (found,) if isinstance(found, torch.Tensor) else found
        return [value.numpy() for value in values]

    return Opened(list(feed), call)


def _open_bundle(library: str) -> Opened:
    from tvmflow.runtime import loading

    module = loading.load(library)
    return Opened(
        [spec.name for spec in module.inputs],
        lambda feed: list(module.run(feed).values()),
        lambda feed: [list(operator) for operator in module.profile(feed)],
    )


_OPENERS: Final = {"ncnn": _open_ncnn, "litert": _open_litert, "inductor": _open_inductor}


def serve(model: str, library: str, threads: str, feed_file: str, results: str) -> None:
    """Load a library, write its results, and answer requests on stdin: seconds, profile or memory."""
    import numpy as np

    with np.load(feed_file) as arrays:
        feed = dict(arrays)
    if library == "ort":
        opened = _open_ort(model, int(threads))
    elif library in ("openvino", OPEN_OPENVINO):
        is_open = library == OPEN_OPENVINO
        opened = _open_openvino(model, int(threads), feed, keeps_sizes_open=is_open)
    elif library in _OPENERS:
        opened = _OPENERS[library](model, int(threads), feed)
    else:
        opened = _open_bundle(library)
    feed = {name: feed[name] for name in opened.inputs}
    np.savez(results, *opened.call(feed))
    print(flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(_peak_bytes(), flush=True)
            continue
        if line.strip() == "profile":
            print(json.dumps(opened.profile(feed) if opened.profile else []), flush=True)
            continue
        for _ in range(_WARM):
            opened.call(feed)
        # Other processes disturb the CPU time of a thread less than its wall-clock time.
        clock = time.process_time if threads == "1" else time.perf_counter
        seconds: list[float] = []
        while sum(seconds) < _TURN_S:
            started = clock()
            opened.call(feed)
            seconds.append(clock() - started)
        print(statistics.median(seconds), flush=True)


def _peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


# ---------------------------------------------------------------- in the parent


class Failed(Exception):
    """A runtime could not load or run a model."""


class Server:
    """A runtime with one model in a separate process.

    Args:
        model: The ONNX file.
        library: A bundle, or a name in `PEERS`.
        threads: The number of threads.
        feed: The file with the inputs.
        results: The file for the outputs.
    """

    def __init__(self, model: str, library: str, threads: int, feed: Path, results: Path) -> None:
        self._results = results
        words = [model, library, str(threads), str(feed), str(results)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TVM_NUM_THREADS": str(threads)},
        )

    def outputs(self) -> list[Any]:
        """Wait until the model has run, and return the outputs.

        Raises:
            Failed: If the process has ended.
        """
        import numpy as np

        self._answer()
        with np.load(self._results) as arrays:
            return list(arrays.values())

    def ask(self, question: str = "") -> Any:
        """Return the seconds of a call, or the answer to `profile` or `memory`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        answer = json.loads(self._answer())
        time.sleep(_REST_S)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            text = self._process.communicate()[1].strip().splitlines()
            raise Failed(text[-1] if text else f"exit status {self._process.returncode}")
        return line


def compare(
    libraries: Mapping[str, tuple[str, str]],
    feed: Feed,
    rounds: int,
    threads: int = os.cpu_count() or 1,
    profile: Callable[[Mapping[str, float]], str | None] = lambda ms: None,
    choose: Callable[[list[float]], float] = statistics.median,
) -> dict[str, Any]:
    """Call libraries interleaved.

    Args:
        libraries: Label -> the ONNX file, and a bundle or a name in `PEERS`. The first library is the reference.
        feed: The inputs.
        rounds: The number of turns.
        threads: The number of threads of each library.
        profile: Chooses the label of the library to profile, by all latencies in milliseconds.
        choose: Computes the latency of a library from the latencies of its turns.

    Returns:
        `ms`: the latency of each library; `bytes`: the peak memory of its process; `error`: the largest difference from
        the reference's outputs, relative to their largest value; `failed`: why other libraries could not run;
        `profile`: (kernel, calls, seconds) of the chosen library.
    """
    import numpy as np

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "feed.npz", **feed)
        servers = {
            label: Server(*pair, threads, folder / "feed.npz", folder / f"{label}.npz")
            for label, pair in libraries.items()
        }
        try:
            outputs, failed = {}, {}
            for label, server in list(servers.items()):
                try:
                    outputs[label] = server.outputs()
                except Failed as error:
                    failed[label] = str(error)
                    del servers[label]
            reference = outputs[next(iter(libraries))]
            error = {label: _largest_error(arrays, reference) for label, arrays in outputs.items()}
            ms = _time_interleaved(servers, rounds, choose)
            chosen = profile(ms)
            kernels = servers[chosen].ask("profile") if chosen else []
            memory = {label: server.ask("memory") for label, server in servers.items()}
        finally:
            for server in servers.values():
                server.close()
    return {"ms": ms, "bytes": memory, "error": error, "failed": failed, "profile": kernels}


def _time_interleaved(
    servers: Mapping[str, Server], rounds: int, choose: Callable[[list[float]], float]
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {label: [] for label in servers}
    for turn in range(rounds):
        for label in list(servers)[:: 1 if turn % 2 else -1]:
            seconds[label].append(servers[label].ask())
    return {label: choose(samples) * 1e3 for label, samples in seconds.items()}


def _largest_error(outputs: list[Any], reference: list[Any]) -> float:
    import numpy as np

    if [actual.shape for actual in outputs] != [expected.shape for expected in reference]:
        return math.inf
    differences = [0.0]
    for actual, expected in zip(outputs, reference, strict=True):
        if expected.size and expected.dtype.kind in "fiu":
            largest = float(np.abs(expected).max()) or 1.0
            difference = np.abs(actual.astype("float64") - expected.astype("float64"))
            differences.append(float(difference.max()) / largest)
    return max(differences)


if __name__ == "__main__":
    serve(*sys.argv[1:])
