"""What schedules have to know of a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import tvm
from tvm.target import codegen

from tvmflow.values import Json

_CORES_UNKNOWN: Final = 4


class Machine(NamedTuple):
    """A CPU: float32 `lanes` of a vector, how many vector `registers`, the `l2` cache of a core in bytes, `cores` to use.

    `spreads` says whether a multiplication can take one number from memory for all lanes.
    """

    lanes: int
    registers: int
    l2: int
    cores: int
    spreads: bool = False

    @classmethod
    def of(cls, target: Mapping[str, Json]) -> Machine | None:
        """The machine behind a target; None where there is no road for it."""
        made = tvm.target.Target(dict(target))
        if made.kind.name != "llvm":
            return None
        arch = str(target.get("mtriple", "")).partition("-")[0]
        features = {str(name) for name in codegen.llvm_get_cpu_features(made)}
        cores = int(target.get("num-cores", _CORES_UNKNOWN))
        if "avx512f" in features:
            return cls(16, 32, 1 << 20, cores, spreads=True)
        if "avx2" in features or "avx" in features:
            return cls(8, 16, 1 << 19, cores)
        if arch in ("x86_64", "i686"):
            return cls(4, 16, 1 << 18, cores)
        if arch in ("aarch64", "arm64"):
            return cls(4, 32, 1 << 19, cores)
        if arch.startswith("arm") and "neon" in features:
            return cls(4, 16, 1 << 18, cores)
        # every machine with the vector extension has 128 bits at least (Zvl128b)
        if arch == "riscv64" and "v" in features:
            return cls(4, 32, 1 << 18, cores)
        return None


def machine_of(target: Mapping[str, Json], schedules: int) -> Machine | None:
    """The machine that kernels have schedules for before tuning; None where they have none (`schedules` is 0)."""
    return Machine.of(target) if schedules else None
