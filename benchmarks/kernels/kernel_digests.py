"""Digests of the kernels of the benchmark networks, for each target: what a change of the compiler changes.

    python benchmarks/kernels/kernel_digests.py record FILE [--network NAME ...] [--target NAME ...]
    python benchmarks/kernels/kernel_digests.py compare BEFORE AFTER

`record` lowers and schedules each network, untuned, and writes a digest of each kernel as it is lowered and one as
it is scheduled. `compare` lists the kernels that differ; it ends with 1 if there are any. Record before and after a
change that should keep all kernels, or to see which kernels have to be timed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _nets  # noqa: E402

from tests.support import golden, onnx_models  # noqa: E402
from tvmflow.compiler.options import LoweringOptions  # noqa: E402
from tvmflow.targets.presets import PRESETS  # noqa: E402

TARGETS: Final = (
    "x86-64-v2",
    "x86-64-v3",
    "x86-64-v4",
    "cortex-a72",
    "neoverse-n1",
    "neoverse-v1",
    "riscv64-v",
)
NETWORKS: Final = {
    name: make
    for name, make in inspect.getmembers(_nets, inspect.isfunction)
    if make.__module__ == "_nets"
    and not name.startswith("_")
    # the others change a network that they are given
    and all(p.default is not p.empty for p in inspect.signature(make).parameters.values())
}

Digests = dict[str, dict[str, golden.Digests]]
"""Target -> network -> kernel -> digest as it is lowered, and as it is scheduled."""


def record(networks: list[str], targets: list[str]) -> Digests:
    """Return the digests of networks for targets."""
    digests: Digests = {name: {} for name in targets}
    for network in networks:
        with tempfile.TemporaryDirectory() as folder:
            mod = onnx_models.load(NETWORKS[network](), Path(folder)).mod
        for name in targets:
            target = dict(PRESETS[name].tvm or {})
            digests[name][network] = golden.digest_each(mod, target, LoweringOptions())
            print(f"{name:12} {network:20} {len(digests[name][network])} kernels", flush=True)
    return digests


def compare(before: Digests, after: Digests) -> list[str]:
    """Return a line for each kernel that is not the same."""
    lines = []
    for target, network in sorted(
        (t, n) for t in {*before, *after} for n in {*before.get(t, ()), *after.get(t, ())}
    ):
        old, new = (side.get(target, {}).get(network, {}) for side in (before, after))
        for kernel in sorted({*old, *new}):
            if old.get(kernel) != new.get(kernel):
                lowered = old.get(kernel, [""])[0] != new.get(kernel, [""])[0]
                what = (
                    "new"
                    if kernel not in old
                    else "gone"
                    if kernel not in new
                    else "lowered"
                    if lowered
                    else "scheduled"
                )
                lines.append(f"{target:12} {network:20} {what:10} {kernel}")
    return lines


def main() -> int:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--network", action="append", choices=NETWORKS)
    recording.add_argument("--target", action="append", choices=PRESETS)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        digests = record(args.network or list(NETWORKS), args.target or list(TARGETS))
        args.file.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
        return 0
    lines = compare(*(json.loads(path.read_text()) for path in (args.before, args.after)))
    print("\n".join(lines) or "all kernels are the same")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
