"""Latency and size with narrow numbers and of quantized models, against float32 and ONNX Runtime.

    python benchmarks/quantization/precision.py [--model NAME ...] [--rounds N] [--json FILE]

Each network is built untuned in float32, with `kernels.precision: mixed`, with `bfloat16` where this CPU
has an instruction for it, and quantized to int8 in the QDQ format by `onnxruntime.quantization`,
calibrated on random data. The libraries and ONNX
Runtime with either model are called interleaved, as in `cpu.py`. Sizes are those of the bundles. `wide` is a
small convolutional net followed by a large matmul, whose weights come from memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _nets
import onnx
from _nets import NETS, wide
from _runtimes import build, compare, draw_inputs

from tvmflow.targets.features import no_bfloat16_reason
from tvmflow.targets.host import read_host

# A library -> the model of ONNX Runtime that it is compared with.
_PEERS: Final = {"float32": "ort", "mixed": "ort", "bfloat16": "ort", "qdq": "ort-qdq"}


MODELS: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "wide": wide,
    **{name: NETS[name] for name in ("squeezenet", "mobilenet", "resnet50")},
}


def measure(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    plain, quantized = folder / f"{name}.onnx", folder / f"{name}-qdq.onnx"
    onnx.save(MODELS[name](), plain)
    _nets.quantize(plain, quantized)
    log = folder / "log"
    narrow = {}
    if not no_bfloat16_reason(read_host().arch, read_host().flags):
        narrow["bfloat16"] = (plain, build(plain, folder, "trials: 0", log, "bfloat16")[0])
    bundles = {
        "float32": (plain, build(plain, folder, "trials: 0", log)[0]),
        "mixed": (plain, build(plain, folder, "trials: 0", log, "mixed")[0]),
        **narrow,
        "qdq": (quantized, build(quantized, folder, "trials: 0", log)[0]),
    }
    libraries = {label: (str(model), str(path)) for label, (model, path) in bundles.items()}
    peers = {"ort": (str(plain), "ort"), "ort-qdq": (str(quantized), "ort")}
    result = compare({**peers, **libraries}, draw_inputs(plain), rounds)
    result["mb"] = {label: path.stat().st_size / 1e6 for label, (_, path) in bundles.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    print("latency in ms (relative to ONNX Runtime with the same model), size of the bundle in MB")
    figures = {}
    for name in args.model:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(name, Path(folder), args.rounds)
        ms = result["ms"]
        cells = [
            f"{label} {ms[label]:.2f} ({ms[label] / ms[peer]:.2f}×), {result['mb'][label]:.1f} MB"
            for label, peer in _PEERS.items()
            if label in ms
        ]
        print(
            f"{name:<11} ONNX Runtime {ms['ort']:.2f}, qdq {ms['ort-qdq']:.2f}; {'; '.join(cells)}",
            flush=True,
        )
        figures[name] = result
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
