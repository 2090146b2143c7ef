"""Weights of float16 and quantised models, against the same model in float32 and ONNX Runtime.

    python benchmarks/precision.py [--model NAME ...] [--rounds N] [--json FILE]

Each network is built untuned as it is (`model`), with `kernels.precision: mixed`, and quantised to int8 in
the format QDQ by `onnxruntime.quantization`, calibrated on random data. The three libraries and ONNX
Runtime with either model are called in turns, as in `cpu.py`. Sizes are those of the bundles. `wide` is a
small convolutional net before a large matrix product, whose weights come from memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cpu
import numpy as np
import onnx
from _nets import NETS, wide

_SHAPE: Final = (1, 3, 224, 224)
_CALIBRATION: Final = 2


MODELS: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "wide": wide,
    **{name: NETS[name] for name in ("squeezenet", "mobilenet", "resnet50")},
}


def quantise(source: Path, output: Path) -> None:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    # it warns of every bias
    logging.getLogger().setLevel(logging.ERROR)
    name = onnx.load(source).graph.input[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            random = np.random.default_rng(0)
            drawn = [random.standard_normal(_SHAPE).astype(np.float32) for _ in range(_CALIBRATION)]
            self._feeds = iter([{name: each} for each in drawn])

        def get_next(self) -> dict[str, Any] | None:
            return next(self._feeds, None)

    quantize_static(
        source,
        output,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
    )


def measure(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    plain, quantised = folder / f"{name}.onnx", folder / f"{name}-qdq.onnx"
    onnx.save(MODELS[name](), plain)
    quantise(plain, quantised)
    log = folder / "log"
    bundles = {
        "float32": (plain, cpu.build(plain.stem, folder, "trials: 0", log)[0]),
        "mixed": (plain, cpu.build(plain.stem, folder, "trials: 0", log, "mixed")[0]),
        "qdq": (quantised, cpu.build(quantised.stem, folder, "trials: 0", log)[0]),
    }
    libraries = {label: (str(model), str(path)) for label, (model, path) in bundles.items()}
    peers = {"ort": (str(plain), "ort"), "ort-qdq": (str(quantised), "ort")}
    found = cpu.compare({**peers, **libraries}, rounds)
    found["mb"] = {label: path.stat().st_size / 1e6 for label, (_, path) in bundles.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    print(
        "milliseconds of a call (times ONNX Runtime's with the same model), megabytes of the bundle"
    )
    figures = {}
    for name in args.model:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, Path(folder), args.rounds)
        ms = found["ms"]
        cells = [
            f"{label} {ms[label]:.2f} ({ms[label] / ms[peer]:.2f}×), {found['mb'][label]:.1f} MB"
            for label, peer in (("float32", "ort"), ("mixed", "ort"), ("qdq", "ort-qdq"))
        ]
        print(
            f"{name:<11} ONNX Runtime {ms['ort']:.2f}, qdq {ms['ort-qdq']:.2f}; {'; '.join(cells)}",
            flush=True,
        )
        figures[name] = found
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
