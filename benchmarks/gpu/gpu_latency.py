"""Libraries for an NVIDIA GPU beside PyTorch on the same GPU: latency, errors and kernels.

    python benchmarks/gpu/gpu_latency.py [--net NAME ...] [--precision model|mixed] [--tune-minutes N] [--inductor]
                                         [--folder FOLDER] [--kernels N]

Runs where a GPU, `tvmflow[cuda]` and PyTorch are. Each network is built by `tvmflow run` for the GPU that is there,
verified against ONNX Runtime on the CPU, and called with its tensors on the GPU, interleaved with PyTorch, which runs the
same ONNX file operator by operator (cuDNN, cuBLAS; of float32 without TF32, of `mixed` with weights and data of
float16). Times are of the GPU, the fastest of `--rounds` of 20 calls each, in microseconds:

- `calls`: enqueued one by one, as a program's loop would do;
- `graph`: recorded by CUDA as a graph once, and replayed: what is left without the CPU's part;
- `kernels`: the sum of kernels measured in isolation, each between two events;
- `inductor`: `torch.compile`, whose kernels are recorded as a graph, too.

`ratio` is the library's graph against PyTorch's fastest graph.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _nets  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from history import record  # noqa: E402
from onnx import numpy_helper  # noqa: E402

import tvmflow  # noqa: E402

NETS: Final[Mapping[str, Callable[[], Any]]] = {
    **_nets.NETS,
    "resnet18": _nets.resnet18,
    "convnext": _nets.convnext,
    "efficient": _nets.efficient,
    "vit": _nets.vision_transformer,
}
_RECIPE: Final = """\
recipe: 1
name: net
model: {{onnx: net.onnx}}
targets: [cuda-{arch}]
outputs: [c-library, bundle]
kernels: {{precision: {precision}}}
tune: {{{tune}}}
verify: {{against: reference}}
"""
_CALLS: Final = 20


# ---------------------------------------------------------------- PyTorch


class TorchNet:
    """An ONNX graph on the GPU, each node by the function of PyTorch that computes the same."""

    def __init__(self, model: onnx.ModelProto, dtype: torch.dtype) -> None:
        self._nodes = list(model.graph.node)
        self._input, self._output = model.graph.input[0].name, model.graph.output[0].name
        arrays = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
        self._weights = {
            name: torch.from_numpy(array.copy()).to("cuda", dtype)
            for name, array in arrays.items()
            if array.dtype == np.float32
        }
        # lists: torch.compile cannot read arrays of numpy
        self._numbers = {
            name: array.tolist() for name, array in arrays.items() if name not in self._weights
        }

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output of a tensor."""
        values = {**self._weights, self._input: x}
        for node in self._nodes:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            tensors = [values[name] for name in node.input if name in values]
            numbers = [self._numbers[name] for name in node.input if name in self._numbers]
            values[node.output[0]] = _OPERATORS[node.op_type](attributes, numbers, *tensors)
        return values[self._output]


def _pool(function: Callable[..., Any]) -> Callable[..., Any]:
    def pool(a: Mapping[str, Any], _numbers: Any, x: Any) -> Any:
        return function(x, a["kernel_shape"], a["strides"], a["pads"][:2])

    return pool


def _reshape(_a: Any, numbers: Sequence[Any], x: Any) -> Any:
    shape = [size or x.shape[axis] for axis, size in enumerate(numbers[0])]
    return x.reshape(shape)


def _norm(a: Mapping[str, Any], _numbers: Any, x: Any, gain: Any, shift: Any) -> Any:
    return F.layer_norm(x, gain.shape, gain, shift, a.get("epsilon", 1e-5))


def _clip(_a: Any, _numbers: Any, x: Any, low: Any, high: Any) -> Any:
    return torch.minimum(torch.maximum(x, low), high)


_OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "Add": lambda _a, _n, x, y: x + y,
    "AveragePool": _pool(F.avg_pool2d),
    "BatchNormalization": lambda a, _n, x, g, b, m, v: F.batch_norm(
        x, m, v, g, b, eps=a.get("epsilon", 1e-5)
    ),
    "Clip": _clip,
    "Concat": lambda a, _n, *xs: torch.cat(xs, a["axis"]),
    "Conv": lambda a, _n, x, w, *b: F.conv2d(
        x, w, *b or (None,), a["strides"], a["pads"][:2], groups=a.get("group", 1)
    ),
    "Div": lambda _a, _n, x, y: x / y,
    "Erf": lambda _a, _n, x: torch.erf(x),
    "Flatten": lambda _a, _n, x: x.flatten(1),
    "GlobalAveragePool": lambda _a, _n, x: x.mean((2, 3), keepdim=True),
    "HardSigmoid": lambda _a, _n, x: F.hardsigmoid(x),
    "HardSwish": lambda _a, _n, x: F.hardswish(x),
    "LayerNormalization": _norm,
    "MatMul": lambda _a, _n, x, y: x @ y,
    "MaxPool": _pool(F.max_pool2d),
    "Mul": lambda _a, _n, x, y: x * y,
    "ReduceMean": lambda a, _n, x: x.mean(a["axes"], keepdim=bool(a.get("keepdims", 1))),
    "Relu": lambda _a, _n, x: F.relu(x),
    "Reshape": _reshape,
    "Softmax": lambda a, _n, x: F.softmax(x, a.get("axis", -1)),
    "Transpose": lambda a, _n, x: x.permute(a["perm"]),
}


# ---------------------------------------------------------------- the library


class _Device(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("context", "device", "queue")),
    )


@contextmanager
def opened(
    library: Path, tensors: Sequence[torch.Tensor], stream: int
) -> Iterator[Callable[[], None]]:
    """Open a context of a C library on a stream, with its tensors on the GPU; yields what starts a call."""
    loaded = ctypes.CDLL(str(library))
    loaded.net_device_error.restype = ctypes.c_char_p
    handle = ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            raise SystemExit(f"status {status}: {loaded.net_device_error().decode()}")

    device = _Device(0, None, None, stream)
    check(loaded.net_create_on(None, ctypes.byref(device), ctypes.byref(handle)))
    for number, tensor in enumerate(tensors):
        place = ctypes.c_void_p(tensor.data_ptr())
        check(loaded.net_use_device_memory(handle, ctypes.c_size_t(number), place))
    try:
        yield lambda: check(loaded.net_enqueue(handle))
    finally:
        check(loaded.net_destroy(handle))


class Built(NamedTuple):
    """What a run made: the C library, and the bundle, which has a profile."""

    library: Path
    bundle: Path


def build(model: onnx.ModelProto, folder: Path, arch: str, precision: str, minutes: float) -> Built:
    """Build a network for the GPU that is here, and verify it."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(folder / "net.onnx"))
    tune = f"minutes: {minutes:g}" if minutes else "trials: 0"
    (folder / "net.yaml").write_text(_RECIPE.format(arch=arch, precision=precision, tune=tune))
    command = [sys.executable, "-m", "tvmflow", "run", "net.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    place = folder / f"dist/net/cuda-{arch}"
    return Built(place / "net-c-library/libnet.so", place / "net.tvmflow")


# ---------------------------------------------------------------- times


def time_interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the microseconds of the GPU for one call of each, the least of rounds that take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            before.record()
            for _ in range(_CALLS):
                call()
            after.record()
            after.synchronize()
            best[name] = min(best[name], before.elapsed_time(after) * 1e3 / _CALLS)
    return best


def as_graph(call: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Record what a call does on a stream, which it has warmed up on; returns what replays it."""
    for _ in range(3):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def measure(name: str, arguments: argparse.Namespace, arch: str) -> float:
    """Print the row of a network, and return its ratio."""
    model = NETS[name]()
    dtype = torch.float32 if arguments.precision == "model" else torch.float16
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    feed = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (expected,) = session.run(None, {model.graph.input[0].name: feed})
    x = torch.from_numpy(feed).cuda()
    y = torch.empty(expected.shape, device="cuda")
    net, x_of_peer = TorchNet(model, dtype), x.to(dtype)
    with torch.inference_mode():
        folder = arguments.folder / f"{name}-{arguments.precision}"
        built = build(model, folder, arch, arguments.precision, arguments.tune_minutes)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), opened(built.library, [x, y], stream.cuda_stream) as call:
            calls: dict[str, Callable[[], object]] = {
                "calls": call,
                "graph": as_graph(call, stream),
                "eager": lambda: net(x_of_peer),
                "cudnn": as_graph(lambda: net(x_of_peer), stream),
            }
            if arguments.inductor:
                compiled = torch.compile(net.__call__)
                calls["inductor"] = as_graph(lambda: compiled(x_of_peer), stream)
            best = time_interleaved(calls, arguments.rounds)
            stream.synchronize()
            scale = float(np.abs(expected).max())
            error = float(np.abs(y.cpu().numpy() - expected).max()) / scale
            peer_error = (
                float(np.abs(net(x_of_peer).float().cpu().numpy() - expected).max()) / scale
            )
        profile = sorted(
            tvmflow.load(str(built.bundle)).profile({model.graph.input[0].name: feed}, repeat=20),
            key=lambda kernel: -kernel.seconds,
        )
    total = sum(kernel.seconds for kernel in profile) * 1e6
    peer = min(best[kind] for kind in ("cudnn", "inductor") if kind in best)
    cells = [f"{best[kind]:10.0f}" if kind in best else f"{'-':>10}" for kind in _COLUMNS]
    print(
        f"{name:12}{''.join(cells)}{total:10.0f}{best['graph'] / peer:8.2f}{error:10.1e}{peer_error:10.1e}",
        flush=True,
    )
    for kernel in profile[: arguments.kernels]:
        print(f"    {kernel.seconds * 1e6:9.1f}  {kernel.calls:3}  {kernel.name}", flush=True)
    return best["graph"] / peer


_COLUMNS: Final = ("calls", "graph", "eager", "cudnn", "inductor")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, action="append")
    parser.add_argument("--precision", choices=("model", "mixed"), default="model")
    parser.add_argument("--tune-minutes", type=float, default=0)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--folder", type=Path, help="of the builds, which are kept there")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=0, help="print this many kernels of each")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    major, minor = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {arguments.precision}")
    print(
        f"{'':12}{''.join(f'{kind:>10}' for kind in _COLUMNS)}{'kernels':>10}{'ratio':>8}{'error':>10}{'peer':>10}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        arguments.folder = arguments.folder or Path(scratch)
        ratios = {
            name: measure(name, arguments, f"sm{major}{minor}") for name in arguments.net or NETS
        }
    kind = f"cuda, {arguments.precision}{', tuned' if arguments.tune_minutes else ''}"
    record(kind, ratios, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
