"""A C library with large weights: load time and memory, of one process and of a second one beside it.

    python benchmarks/latency/c_weights.py LIBRARY MODEL.onnx [--no-peer]

The library is a `lib<name>.so` of the output `c-library`; the peer is ONNX Runtime with the same model.
Each is in a process of its own, which waits while a second one does the same. Printed are:

- `load`: ms to load the library and make a context (with a mapped file that the system has cached);
- `first call`, `later call`: ms;
- `resident`: MB of the process after the calls, less what it had before; and relative to the weights;
- `dirty`: MB of it that are its own and no file's; `second process`: MB that a second process adds,
  which are private to it, while the first one lives.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from c_threads import open_model

_MB: Final = 1e6
_CHUNK: Final = 1 << 24


def read_memory() -> dict[str, float]:
    """Return the memory of this process in MB: `Rss`, `Pss` and its private part."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        fields[name.rstrip(":")] = int(value) * 1024 / _MB
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"resident": fields["Rss"], "private": private, "dirty": fields["Private_Dirty"]}


def serve(path: Path) -> None:
    """Load a model, call it, print what that took, and wait."""
    # What belongs to Python and to the packages is part of the process before the model.
    importlib.import_module("onnxruntime" if path.suffix == ".onnx" else "numpy")
    before = read_memory()
    started = time.perf_counter()
    call: Callable[[], Any] = open_model(path, 2)
    loaded = time.perf_counter()
    call()
    called = time.perf_counter()
    call()
    later = time.perf_counter() - called
    after = read_memory()
    used = {name: after[name] - before[name] for name in after}
    times = {
        "load": (loaded - started) * 1e3,
        "first_call": (called - loaded) * 1e3,
        "later_call": later * 1e3,
    }
    print(json.dumps({**times, **used}), flush=True)
    sys.stdin.read()


def measure(path: Path) -> list[dict[str, float]]:
    """Return the figures of a process, and of a second one while the first one lives."""
    with path.open("rb") as stream:
        while stream.read(_CHUNK):
            pass  # so that the system has it in memory
    command = [sys.executable, __file__, "--serve", str(path)]
    processes, figures = [], []
    for _ in range(2):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        figures.append(json.loads(process.stdout.readline()))
    for process in processes:
        process.communicate()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    weights = options.model.stat().st_size / _MB
    print(f"{weights:.0f} MB of weights")
    peers = {"C library": options.library, "ONNX Runtime": options.model}
    for label, path in list(peers.items())[: 1 if options.no_peer else 2]:
        first, second = measure(path)
        print(
            f"{label:12} load {first['load']:.1f} ms, first call {first['first_call']:.0f} ms, "
            f"later call {first['later_call']:.0f} ms, resident {first['resident']:.0f} MB "
            f"({first['resident'] / weights:.2f}), dirty {first['dirty']:.1f} MB; "
            f"second process: private {second['private']:.1f} MB, load {second['load']:.1f} ms"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        main()
