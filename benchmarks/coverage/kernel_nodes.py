"""Share of the kernels that know the nodes they came from, over the ONNX models in a folder.

    python benchmarks/coverage/kernel_nodes.py FOLDER [--model NAME ...] [--show N]

Each model is imported and lowered for a CPU with AVX-512; nothing is compiled or run. Counted are
kernels that do arithmetic, and their calls. `--show` prints the nodes of the largest kernels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.frontends import FRONTENDS
from tvmflow.stages.build import calls_text, find_kernel_nodes
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.workloads import extract_workloads

_TARGET: Final = {"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2}


def count(path: Path, shown: int) -> tuple[int, int]:
    """Print the figures of one model, and return its kernels with nodes, and all of them."""
    loaded = FRONTENDS["onnx"].load({"model": path}, ())
    lowered = lowering.lower(loaded.mod, make_target(_TARGET), LoweringOptions())
    kernels = find_kernel_nodes(lowered.kernel_nodes, loaded.nodes)
    workloads = [workload for workload in extract_workloads(lowered.mod) if workload.flops]
    names = [name for workload in workloads for name in workload.names]
    calls = [call for name in names for call in kernels[name]]
    known = sum(1 for name in names if any(call.nodes for call in kernels[name]))
    named = sum(1 for call in calls if call.nodes)
    print(f"{path.stem:24} kernels {known:4} of {len(names):4}, calls {named:4} of {len(calls):4}")
    for name in names[:shown]:
        print(f"    {name[:48]:48} {calls_text(kernels[name])}")
    return known, len(names)


def main() -> None:
    """Print a line for each model, and the share of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--show", type=int, default=0)
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.onnx"))
    if options.model:
        paths = [path for path in paths if path.stem in options.model]
    counts = [count(path, options.show) for path in paths]
    known, total = (sum(column) for column in zip(*counts, strict=True))
    print(f"{len(paths)} models: {known} of {total} kernels ({known / total:.1%})")


if __name__ == "__main__":
    main()
