"""Vector widths: small convolutional nets of 8 to 64 channels, with the width that is chosen against fixed ones.

    python benchmarks/kernels/vectors.py [--rounds N]

Untuned kernels for this machine, on one thread, called interleaved in one process. `chosen` is what
tvmflow builds; 512 and 256 are `kernels.vector_bits`; `x86-64-v3` is that target. It prints the
median in µs, and the median of the ratios to `chosen` within each turn: what disturbs the machine
disturbs all of a turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.environ |= {"TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}

import numpy as np  # noqa: E402  TVM reads the environment when it is loaded
import tvm  # noqa: E402
from tvm import relax  # noqa: E402

from tests.support import tuning  # noqa: E402
from tvmflow.compiler import lowering  # noqa: E402
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions  # noqa: E402
from tvmflow.targets.host import read_host  # noqa: E402
from tvmflow.targets.llvm_query import query_target  # noqa: E402
from tvmflow.targets.resolve import resolve  # noqa: E402
from tvmflow.targets.tvm_target import make_target  # noqa: E402

_SIZE: Final = 96
_NETS: Final = {
    "8 channels": (8, 8, 8),
    "8 to 24": (8, 16, 24),
    "24 channels": (24, 24, 24),
    "16 and 32": (16, 32, 32),
    "64 channels": (64, 64, 64),
}
_SECONDS: Final = 0.01


def make_net(first: int, middle: int, last: int) -> Any:
    """Return five convolutions, of which two halve the image."""
    layers = [
        tuning.conv(first, 3, 2), tuning.relu, tuning.conv(middle), tuning.relu, tuning.conv(last, 3, 2),
        tuning.relu, tuning.conv(last), tuning.relu, tuning.conv(middle, 1),
    ]  # fmt: skip
    return tuning.model(*layers, shape=(1, 3, _SIZE, _SIZE))


def build(mod: Any, target: dict[str, Any], bits: Any) -> Any:
    """Return the function of a net that is compiled untuned."""
    random = np.random.default_rng(0)
    params = {
        str(var.name): random.normal(size=[int(n) for n in var.ty.shape]).astype("float32")
        for var in mod["main"].params[1:]
    }
    options = LoweringOptions(vector_bits=bits)
    library = (
        lowering.lower(mod, make_target(target), options)
        .schedule_untuned(params, target, SCHEDULES_VERSION)
        .compile()
    )
    return relax.VirtualMachine(library.jit(), tvm.cpu())["main"]


def time_turn(function: Any, data: Any) -> float:
    """Return the seconds of a call."""
    function(data)
    started, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - started < _SECONDS:
        function(data)
        calls += 1
    return (time.perf_counter() - started) / calls


def measure(channels: tuple[int, int, int], rounds: int) -> dict[str, tuple[float, float]]:
    """Return for each width the median in seconds, and the median ratio to the chosen one."""
    mod = make_net(*channels)
    host = resolve("host", None, None, read_host(), query_target(None)).tvm
    level = {"kind": "llvm", "mtriple": host["mtriple"], "mcpu": "x86-64-v3"}
    requests = {"chosen": (host, None), "512": (host, 512), "256": (host, 256), "x86-64-v3": (level, None)}  # fmt: skip
    functions = {name: build(mod, target, bits) for name, (target, bits) in requests.items()}
    data = tvm.runtime.tensor(np.random.default_rng(1).random((1, 3, _SIZE, _SIZE), np.float32))
    turns = []
    for number in range(rounds):
        # every second turn runs backwards, so that no library always follows the same one
        order = list(functions)[:: 1 if number % 2 else -1]
        turns.append({name: time_turn(functions[name], data) for name in order})
    return {
        name: (
            median(turn[name] for turn in turns),
            median(turn[name] / turn["chosen"] for turn in turns),
        )
        for name in functions
    }


def main() -> None:
    """Print a line for each net."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    for name, channels in _NETS.items():
        row = measure(channels, rounds)
        cells = [f"{label} {s * 1e6:.0f} µs ({ratio:.2f})" for label, (s, ratio) in row.items()]
        print(f"{name:<12} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
