"""The runtime of C libraries against the thread pool of TVM's runtime: what a kernel costs, idle time, crowded machines.

    python benchmarks/latency/c_runtime.py [--rounds N]

One program (`c_runtime/main.c`) calls kernels of a library without a model: an empty one, an empty
parallel loop, and ten parallel loops of 40 µs each. With the same loops, it calls
`TVMBackendParallelLaunch`. Printed are, for 1, 2 and 8 threads, alone and beside a busy process:

- `empty`, `loop`: nanoseconds of an empty kernel and of an empty parallel loop, called at once;
- `after rest`: µs of a call with one empty loop after 5 ms of rest;
- `idle`: µs of processor time that the process uses after a call, until 5 ms later;
- `median`, `99 %`, `99.9 %`, `max`: ten loops, relative to their time without threads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tvmflow.targets import c_runtime

SOURCES: Final = Path(__file__).resolve().parent / "c_runtime"
SIGNATURE: Final = {
    "inputs": [{"name": "calls", "dtype": "uint32", "shape": [16]}],
    "outputs": [],
}
COLUMNS: Final = {
    "empty": 7,
    "loop": 9,
    "after rest": 11,
    "idle": 8,
    "median": 7,
    "99 %": 7,
    "99.9 %": 8,
    "max": 8,
}


def compile_program(folder: Path) -> Path:
    """Return the program, compiled in a folder."""
    triple = f"{os.uname().machine}-linux-gnu"
    model = c_runtime.DescribedModel("bench", SIGNATURE, (), triple)
    c_runtime.write_sources(model, {c_runtime.PROGRAM: SOURCES / c_runtime.PROGRAM}, folder)
    for name in ("main.c", "kernels.c"):
        shutil.copyfile(SOURCES / name, folder / name)
    sources = ["main.c", "kernels.c", c_runtime.SOURCE]
    command = [sys.executable, "-m", "ziglang", "cc", "-std=gnu11", "-O2", "-fno-sanitize=all"]
    libraries = ["-lm", "-lpthread", "-ldl", "-o", "bench"]
    subprocess.run([*command, *sources, *libraries], cwd=folder, check=True)
    return folder / "bench"


def find_tvm_runtime() -> tuple[Path, str]:
    """Return the library with TVM's runtime, and the folders of the libraries that it needs."""
    folders = []
    for name in ("tvm", "tvm_ffi"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations
        folders.append(Path(spec.submodule_search_locations[0]) / "lib")
    return folders[0] / "libtvm_runtime.so", os.pathsep.join(map(str, folders))


@contextmanager
def busy_process(cpu: int | None) -> Iterator[None]:
    """Keep one CPU busy meanwhile."""
    if cpu is None:
        yield
        return
    code = f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(
    command: Sequence[str], threads: int, path: str, busy: int | None, cpus: set[int]
) -> Any:
    """Return what the program prints."""
    environment = {**os.environ, "TVM_NUM_THREADS": str(threads), "LD_LIBRARY_PATH": path}
    with busy_process(busy):
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
    return json.loads(done.stdout)


def describe(results: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the cells of a row: medians of the rounds, but the largest of all for the largest."""
    fields = {name: [result[name] for result in results] for name in results[0]}
    middle = {name: statistics.median(values) for name, values in fields.items()}
    return {
        "empty": f"{middle['empty']:.1f}",
        "loop": f"{middle['loop']:.0f}",
        "after rest": f"{middle['loop_after_rest'] / 1e3:.1f}",
        "idle": f"{middle['idle_us']:.0f}",
        "median": f"{middle['median']:.2f}",
        "99 %": f"{middle['p99']:.2f}",
        "99.9 %": f"{middle['p999']:.2f}",
        "max": f"{max(fields['max']):.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    cpus = os.sched_getaffinity(0)
    first = min(cpus)
    cases = [
        ("alone", 1, None, cpus),
        ("alone", 2, None, cpus),
        ("alone", 8, None, cpus),
        ("a busy CPU", 2, first, cpus),
        ("one CPU", 2, None, {first}),
        ("one busy CPU", 2, first, {first}),
    ]
    library, path = find_tvm_runtime()
    header = "".join(f"{name:>{width}}" for name, width in COLUMNS.items())
    print(f"{'':14}{'threads':>8}  {'':12}{header}")
    with tempfile.TemporaryDirectory() as name:
        program = compile_program(Path(name))
        for label, threads, busy, allowed in cases:
            command = [str(program), str(threads)]
            commands = {"C library": command, "TVM's pool": [*command, str(library)]}
            results: dict[str, list[Any]] = {owner: [] for owner in commands}
            for _ in range(rounds):
                for owner, command in commands.items():
                    results[owner].append(measure(command, threads, path, busy, allowed))
            for owner, measured in results.items():
                cells = describe(measured)
                row = "".join(f"{cells[key]:>{width}}" for key, width in COLUMNS.items())
                print(f"{label:14}{threads:>8}  {owner:12}{row}", flush=True)


if __name__ == "__main__":
    main()
