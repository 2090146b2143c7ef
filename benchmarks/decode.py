"""Prefill and decode latency of language models, compared with ONNX Runtime, OpenVINO and llama.cpp.

    python benchmarks/decode.py FOLDER [--sizes 30,120] [--weights float32,int8,int4] [--threads 1]
                                [--lengths 16,512,2048,8192] [--peers ...] [--llama FOLDER]
                                [--caches float32,float16,int8]

Llamas with random weights are written to FOLDER (`_llama.py`) and built untuned. Each runtime decodes one token after a
cache of each length, prefills 512 tokens from an empty cache, and then truncates its cache; all runtimes are in one
process, interleaved. Figures are minima in ms: CPU time with one thread, else wall-clock time. The last column is
tvmflow, with the first of its caches, relative to the fastest peer (below 1: faster). `tvmflow f16` has a
float16 cache, `tvmflow i8` an int8 cache.

ONNX Runtime runs the model as exported by frameworks, with IO binding, and fused (`GroupQueryAttention`, which appends
to its cache in place). OpenVINO's model is stateful. llama.cpp needs `--llama`, the folder of its build (with
`include/` and `ggml/include/` beside it), and `gguf`; its cache is float32, and its default with `llama.cpp f16`.
The read bandwidth of memory is measured first: a step cannot be faster than reading all weights.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from _llama import SIZES, Llama, make_gguf, make_onnx, state_names

PREFILL: Final = 512
_LIMIT: Final = 8192 + PREFILL
_MOST_SECONDS: Final = 6.0
_MOST_ROUNDS: Final = 40
_HERE: Final = Path(__file__).parent

Step = Callable[[Any], Any]
"""Takes tokens and computes the logits after them."""


class Runtime:
    """A model in one runtime: `step` appends tokens to the cache, `truncate` shortens the cache."""

    def __init__(self, step: Step, truncate: Callable[[int], None]) -> None:
        self.step = step
        self.truncate = truncate


# ---------------------------------------------------------------- runtimes


def open_tvmflow(path: Path, model: Llama, threads: int, cache: str) -> Runtime:
    """Build the model untuned, with a cache of this dtype, and open a session."""
    import tvmflow

    os.environ["TVM_NUM_THREADS"] = str(threads)
    name = path.stem.replace("_", "-") + ("" if cache == "float32" else f"-{cache}")
    stored = "" if cache == "float32" else f", dtype: {cache}"
    shape = f"[1, {model.cached_heads}, past, {model.depth}]"
    states = "".join(f"\n  past_key_values.{n}: {{shape: {shape}}}" for n in state_names(model))
    recipe = path.with_name(f"{name}.yaml")
    recipe.write_text(
        f"""\
recipe: 1
name: {name}
model: {{onnx: {path.name}}}
dimensions:
  seq: {{max: {PREFILL}, tune_at: [1]}}
  past: {{min: 0, max: {_LIMIT - PREFILL}}}
inputs:
  input_ids: {{shape: [1, seq], range: [0, {model.words - 1}]}}
  position_ids: {{shape: [1, seq], range: [0, {_LIMIT - 1}]}}{states}
state: {{past_key_values.*: {{output: present.*{stored}}}}}
targets: [host]
tune: {{trials: 0}}
verify: {{against: none}}
outputs: [bundle]
"""
    )
    command = [sys.executable, "-m", "tvmflow", "run", recipe.name, "--store", "store"]
    log = recipe.with_suffix(".log")
    with log.open("w") as file:
        done = subprocess.run(command, cwd=path.parent, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise RuntimeError(f"tvmflow run failed: see {log}")
    session = tvmflow.load(str(path.parent / f"dist/{name}/host/{name}.tvmflow")).session()

    def step(tokens: Any) -> Any:
        positions = np.arange(session.length, session.length + len(tokens))[None]
        return session.run({"input_ids": tokens[None], "position_ids": positions})["logits"]

    return Runtime(step, session.truncate)


def open_onnxruntime(path: Path, model: Llama, threads: int, *, fused: bool) -> Runtime:
    """Open ONNX Runtime with IO binding, so that a step's output cache is the next step's input.

    Without the fused operator, a step reads one of two buffers and writes the other.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    names = state_names(model)
    size = model.cached_heads * model.depth * _LIMIT
    caches = [[np.zeros(size, np.float32) for _ in names] for _ in range(1 if fused else 2)]
    length, turn = 0, 0
    logits = np.empty((1, 1, model.words), np.float32)

    def step(tokens: Any) -> Any:
        nonlocal length, turn
        total = length + len(tokens)
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", tokens[None])
        if fused:
            binding.bind_cpu_input("attention_mask", np.ones((1, total), np.int64))
        else:
            binding.bind_cpu_input("position_ids", np.arange(length, total)[None])
        ends = (_LIMIT, _LIMIT) if fused else (length, total)
        for place, name in enumerate(names):
            source, target = caches[turn][place], caches[turn - 1][place]
            shapes = [(1, model.cached_heads, end, model.depth) for end in ends]
            pointers = (source.ctypes.data, target.ctypes.data)
            binding.bind_input(
                f"past_key_values.{name}", "cpu", 0, np.float32, shapes[0], pointers[0]
            )
            binding.bind_output(f"present.{name}", "cpu", 0, np.float32, shapes[1], pointers[1])
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        session.run_with_iobinding(binding)
        length, turn = total, turn if fused else 1 - turn
        return logits

    def truncate(to: int) -> None:
        nonlocal length, turn
        if length > to and not fused:
            # The other buffer still has the cache before the last step.
            turn = 1 - turn
        length = to

    return Runtime(step, truncate)


def open_openvino(path: Path, model: Llama, threads: int) -> Runtime:
    """Open OpenVINO with a stateful model; states are read through `beam_idx`, so that attention is fused."""
    import openvino
    from openvino import opset13 as op
    from openvino.passes import MakeStateful, Manager

    core = openvino.Core()
    network = core.read_model(path)
    parameters = {item.get_any_name(): item for item in network.inputs}
    beam = op.parameter([1], np.int32, name="beam_idx")
    beam.output(0).get_tensor().set_names({"beam_idx"})
    for product in network.get_ordered_ops():
        if product.get_type_name() != "MatMul":
            continue
        weights = product.input_value(0).get_node()
        if weights.get_type_name() != "Softmax":
            continue
        # as OpenVINO's own converter of language models writes attention, so that it is fused with its cache
        masked = weights.input_value(0).get_node()
        scores = masked.input_value(0).get_node().input_value(0).get_node()
        keys = scores.input_value(1).get_node().input_value(0)
        scale = op.constant(np.float32(model.depth**-0.5))
        operands = (scores.input_value(0), keys, product.input_value(1), masked.input_value(1))
        fused = op.scaled_dot_product_attention(*operands, scale)
        product.output(0).replace(fused.output(0))
    pairs = {f"past_key_values.{name}": f"present.{name}" for name in state_names(model)}
    for name in pairs:
        node = parameters[name].get_node()
        users = list(node.output(0).get_target_inputs())
        gathered = op.gather(node, beam, op.constant(0, dtype=np.int64))
        for user in users:
            user.replace_source_output(gathered.output(0))
    network.add_parameters([beam])
    network.validate_nodes_and_infer_types()
    manager = Manager()
    manager.register_pass(MakeStateful(pairs))
    manager.run_passes(network)
    empty = [1, model.cached_heads, 0, model.depth]
    for node in network.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = op.constant(np.array(empty, np.int64))
            node.set_arguments([op.broadcast(op.constant(0.0, dtype=np.float32), shape)])
    network.validate_nodes_and_infer_types()
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
    }
    compiled = core.compile_model(network, "CPU", settings)
    kinds = {
        node.get_rt_info()["layerType"].value for node in compiled.get_runtime_model().get_ops()
    }
    if not any("ScaledDot" in str(kind) for kind in kinds):
        print("OpenVINO does not fuse attention here")
    request = compiled.create_infer_request()
    length = 0

    def step(tokens: Any) -> Any:
        nonlocal length
        feed = {
            "input_ids": tokens[None],
            "position_ids": np.arange(length, length + len(tokens))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        length += len(tokens)
        return request.infer(feed, share_inputs=True, share_outputs=True)["logits"]

    def truncate(to: int) -> None:
        nonlocal length
        # Setting a state copies it, but is not timed.
        for state in request.query_state():
            if to == 0:
                state.reset()
            else:
                state.state = openvino.Tensor(np.array(state.state.data[:, :, :to]))
        length = to

    return Runtime(step, truncate)


def open_llama(path: Path, library: ctypes.CDLL, threads: int, *, is_float32: bool) -> Runtime:
    """Open llama.cpp through the functions of `latency/llama.c`."""
    context = library.bench_open(str(path).encode(), threads, _LIMIT, int(is_float32))
    if not context:
        raise RuntimeError(f"llama.cpp cannot read {path}")

    def step(tokens: Any) -> Any:
        given = np.ascontiguousarray(tokens, np.int32)
        result = library.bench_step(context, given.ctypes.data, len(given))
        if not result:
            raise RuntimeError("llama.cpp failed")
        return result

    return Runtime(step, lambda length: library.bench_truncate(context, length))


@functools.cache
def compile_llama(folder: Path, build: Path) -> ctypes.CDLL:
    """Compile and load `latency/llama.c` with the libllama in a build folder of llama.cpp."""
    target, source = folder / "llama.so", build.parent
    libraries = {path.name: path.parent for path in build.rglob("lib*.so")}
    flags = [f"-L{where}" for where in set(libraries.values())]
    flags += [f"-Wl,-rpath,{where}" for where in set(libraries.values())]
    includes = [f"-I{source / 'include'}", f"-I{source / 'ggml/include'}"]
    command = ["cc", "-O2", "-shared", "-fPIC", *includes, str(_HERE / "latency/llama.c")]
    subprocess.run(
        [*command, *flags, "-lllama", "-lggml", "-lggml-base", "-o", str(target)], check=True
    )
    library = ctypes.CDLL(str(target))
    library.bench_open.restype = library.bench_step.restype = ctypes.c_void_p
    library.bench_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.bench_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.bench_truncate.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library


# ---------------------------------------------------------------- measuring


def measure_bandwidth() -> float:
    """Return the memory bandwidth of one thread in bytes per second, for data larger than all caches."""
    data = np.ones(1 << 27, np.float32)
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        np.dot(data, data)
        best = min(best, time.perf_counter() - began)
    return data.nbytes / best


def open_all(folder: Path, size: int, weights: str, args: argparse.Namespace) -> dict[str, Runtime]:
    """Write the files of a model, and open it in each available runtime; print failures."""
    model = SIZES[size]
    plain, fused = (folder / f"llama-{size}-{weights}{end}.onnx" for end in ("", "-fused"))
    gguf = plain.with_suffix(".gguf")
    if not plain.exists():
        make_onnx(model, weights, plain)
    names = {"float32": "tvmflow", "float16": "tvmflow f16", "int8": "tvmflow i8"}
    runtimes = {
        names[cache]: open_tvmflow(plain, model, args.threads, cache)
        for cache in args.caches.split(",")
    }

    def open_fused() -> Runtime:
        if not fused.exists():
            make_onnx(model, weights, fused, fused=True)
        return open_onnxruntime(fused, model, args.threads, fused=True)

    def open_gguf(*, is_float32: bool) -> Runtime:
        if not gguf.exists():
            make_gguf(model, weights, gguf)
        library = compile_llama(folder, args.llama)
        return open_llama(gguf, library, args.threads, is_float32=is_float32)

    peers: Mapping[str, Callable[[], Runtime]] = {
        "ONNX Runtime": lambda: open_onnxruntime(plain, model, args.threads, fused=False),
        "fused": open_fused,
        "OpenVINO": lambda: open_openvino(plain, model, args.threads),
        "llama.cpp": lambda: open_gguf(is_float32=True),
        "llama.cpp f16": lambda: open_gguf(is_float32=False),
    }
    for name, opening in peers.items():
        if (args.peers and name not in args.peers) or ("llama" in name and not args.llama):
            continue
        try:
            runtimes[name] = opening()
        except Exception as error:
            print(f"{name}: {str(error).splitlines()[0][:150] if str(error) else error!r}")
    return runtimes


def time_steps(
    runtimes: Mapping[str, Runtime], length: int, count: int, words: int, threads: int
) -> dict[str, float]:
    """Return runtime -> minimum seconds of a step with `count` tokens after `length` cached tokens."""
    clock = time.process_time if threads == 1 else time.perf_counter
    random = np.random.default_rng(length)
    tokens = random.integers(0, words, length + count)
    for runtime in runtimes.values():
        runtime.truncate(0)
        for start in range(0, length, PREFILL):
            runtime.step(tokens[start : min(start + PREFILL, length)])
    best = dict.fromkeys(runtimes, float("inf"))
    began, rounds = time.monotonic(), 0
    limit = _MOST_SECONDS * len(runtimes)
    while rounds < 3 or (rounds < _MOST_ROUNDS and time.monotonic() - began < limit):
        for name, runtime in runtimes.items():
            start = clock()
            runtime.step(tokens[length:])
            best[name] = min(best[name], clock() - start)
            runtime.truncate(length)
        rounds += 1
    return best


def show_errors(runtimes: Mapping[str, Runtime], model: Llama) -> None:
    """Print the differences of other runtimes' logits from those of the first one after some steps."""
    tokens = np.random.default_rng(1).integers(0, model.words, 40)
    made: dict[str, Any] = {}
    for name, runtime in runtimes.items():
        runtime.truncate(0)
        runtime.step(tokens[:32])
        for place in range(32, 40):
            logits = runtime.step(tokens[place : place + 1])
        if isinstance(logits, int):
            pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
            logits = np.ctypeslib.as_array(pointer, (model.words,))
        made[name] = np.array(logits).ravel()
        runtime.truncate(0)
    ours = next(iter(made.values()))
    errors = {
        name: np.abs(logits - ours).max() / np.abs(ours).max() for name, logits in made.items()
    }
    print("differences: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", default="30,120")
    parser.add_argument("--weights", default="float32,int8,int4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", default="16,512,2048,8192")
    parser.add_argument("--caches", default="float32", help="dtypes of tvmflow's cache")
    parser.add_argument("--peers", nargs="*")
    parser.add_argument("--llama", type=Path, help="the build folder of llama.cpp")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    bandwidth = measure_bandwidth()
    print(f"one thread reads {bandwidth / 1e9:.1f} GB/s")
    for size in map(int, args.sizes.split(",")):
        for weights in args.weights.split(","):
            model = SIZES[size]
            runtimes = open_all(args.folder, size, weights, args)
            print(
                f"\n{model.parameters / 1e6:.0f} million weights, {weights}, {args.threads} thread(s)"
            )
            show_errors(runtimes, model)
            print(
                f"{'cache':>6} {'new':>4}"
                + "".join(f"{name:>14}" for name in runtimes)
                + "   ratio"
            )
            points = [(int(length), 1) for length in args.lengths.split(",")]
            for length, count in [*points, (0, PREFILL)]:
                times = time_steps(
                    runtimes, min(length, _LIMIT - PREFILL - 1), count, model.words, args.threads
                )
                peers = [seconds for name, seconds in times.items() if "tvmflow" not in name]
                ratio = next(iter(times.values())) / min(peers) if peers else float("nan")
                cells = "".join(f"{seconds * 1e3:14.3f}" for seconds in times.values())
                print(f"{length:6} {count:4}{cells} {ratio:7.3f}", flush=True)


if __name__ == "__main__":
    main()
