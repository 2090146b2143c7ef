"""The settings of `verify`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import Field

from tvmflow.core.types import Dimension, Json, Precision
from tvmflow.stages.base import Lowering, Settings, StageSettings

LOCAL: Final = "local"
QEMU: Final = "qemu"
RPC: Final = "rpc"
CHROMIUM: Final = "chromium"
"""Where libraries run."""

UNTIMED_REASONS: Final[Mapping[str, str]] = {
    QEMU: "an emulated CPU says nothing about the speed of a real one",
    CHROMIUM: "a GPU that the CPU stands for says nothing about the speed of a real one",
    RPC: "each part runs in a session of its own",
}
"""Where a library runs -> why it cannot be timed there."""


class CheckSettings(Settings):
    """The checks of the recipe; see `recipe.Verify`. `data` says whether the recipe has samples."""

    against: str
    label: str
    rtol: float | None
    atol: float | None
    min_accuracy: float | None
    samples: int
    seed: int
    repeat: int
    data: bool
    max_latency: str | None = None
    max_memory: str | None = None
    max_size: str | None = None
    max_vs: dict[str, float] = Field(default={})

    @property
    def has_default_tolerance(self) -> bool:
        """True if the recipe sets neither `rtol` nor `atol`."""
        return self.rtol is None and self.atol is None


class InputSettings(Settings):
    """The range of an input's random values, whether they exclude 0, and whether it takes images."""

    range: tuple[float, float] | None = None
    nonzero: bool = False
    image: bool = False


class CompareSettings(Settings):
    """The runtimes to compare the library with, and suitable ones that are not installed.

    `fixed` requests a comparison with a fixed-shape library at each verified combination of sizes.
    """

    runtimes: tuple[str, ...]
    missing: tuple[str, ...] = ()
    fixed: bool = False


class SpeedupSettings(Settings):
    """The minimum end-to-end speedup by tuning."""

    min_speedup: float


class MachineSettings(Settings):
    """The machine that a library, or one part of it, is for.

    `remote` describes how to reach devices behind RPC.
    """

    tvm: dict[str, Json]
    threads: int
    device: dict[str, str]
    unrunnable_reason: str = ""
    remote: dict[str, Json] | None = None


class IsaLevelSettings(Settings):
    """The machine of an ISA level, and where it runs or why it is not verified."""

    machine: MachineSettings
    run_on: str = LOCAL
    not_verified: str = ""


class PartSettings(Settings):
    """The machines of a partitioned target, by part."""

    parts: dict[str, MachineSettings]


class VerifySettings(StageSettings):
    """The checks, the inputs, and the machine that the library is for.

    Attributes:
        precision: The lowest precision of any part.
        lowering: The lowering of the untuned variant; None for a partitioned target.
        schedules: The version of the untuned variant's schedule rules; None for a partitioned target.
        tune_at: The tuning sizes, by dimension.
        prefix: The prefix of the library's names, and of the environment variable that chooses an ISA level.
        quantized: Whether `quantize` made the model.
        deliveries: The files of each output to load as users do.
    """

    verify: CheckSettings
    inputs: dict[str, InputSettings]
    model: dict[str, Json]
    target: MachineSettings | PartSettings
    precision: Precision
    lowering: Lowering | None = None
    schedules: int | None = None
    tune: SpeedupSettings | None = None
    run_on: str = LOCAL
    compare: CompareSettings | None = None
    tune_at: dict[str, tuple[int, ...]] | None = None
    levels: dict[str, IsaLevelSettings] = Field(default={})
    prefix: str = ""
    quantized: bool = False
    deliveries: dict[str, tuple[str, ...]] = Field(default={})

    def add_tuning_sizes(self, dimensions: Iterable[Dimension]) -> tuple[Dimension, ...]:
        """Return dimensions with their `tune_at` sizes."""
        tune_at = self.tune_at or {}
        return tuple(d._replace(tune_at=tune_at.get(d.name, ())) for d in dimensions)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The ranges of random inputs."""
        return {name: spec.range for name, spec in self.inputs.items() if spec.range}

    @property
    def divisors(self) -> frozenset[str]:
        """The inputs whose random values exclude 0."""
        return frozenset(name for name, spec in self.inputs.items() if spec.nonzero)

    @property
    def machines(self) -> dict[str, MachineSettings]:
        """The machine of each part, by name; the name is empty if the model is not partitioned."""
        target = self.target
        return {"": target} if isinstance(target, MachineSettings) else target.parts

    @property
    def threads(self) -> int:
        """The thread count for other runtimes: the largest one of any part."""
        return max(machine.threads for machine in self.machines.values())

    @property
    def measured_devices(self) -> tuple[str, ...]:
        """The devices of this machine that the library runs on."""
        if self.run_on != LOCAL:
            return ()
        machines = self.machines.values()
        return tuple(sorted({m.device["kind"] for m in machines if not m.unrunnable_reason}))
