"""`verify`: compare the library that users will load with the model's framework, on real inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, get_args

from tvmflow.core.fork_server import Emit
from tvmflow.core.generated_text import identifier
from tvmflow.core.types import Json, Precision, RunTraits
from tvmflow.exporters import EXPORTERS
from tvmflow.frontends.peers import PEERS
from tvmflow.recipe import Recipe
from tvmflow.recipe.sections import AUTO, FIXED
from tvmflow.stages import choose, export, join
from tvmflow.stages.base import (
    Files,
    StageContext,
    StageTraits,
    lowering_options,
    schedules_version,
)
from tvmflow.stages.lower import LOWERED
from tvmflow.stages.runtime_choice import run_location
from tvmflow.stages.verify import verdict_text
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.stages.verify_settings import (
    CHROMIUM,
    LOCAL,
    QEMU,
    RPC,
    CheckSettings,
    CompareSettings,
    InputSettings,
    IsaLevelSettings,
    MachineSettings,
    PartSettings,
    SpeedupSettings,
    VerifySettings,
)
from tvmflow.targets.emulation import UNEMULATED_FEATURES
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

NAME: Final = "verify"


def find_faults(payload: dict[str, Json], emit: Emit) -> list[Json]:
    """Return the faults of a rejected library as JSON; see `fault_localization`."""
    from tvmflow.stages.verify import fault_localization

    return fault_localization.find_faults(payload, emit)


TRAITS: Final = StageTraits(
    version=19,
    scope="target",
    needs={
        "import": ("model.json", "params.safetensors", "signature.json"),
        choose.NAME: (choose.CHOICES,),
        "lower": (LOWERED,),
        "extract_tasks": ("workloads.json",),
        "pick_best": ("chosen.json",),
        "build": ("kernels.json",),
        "export": ("module.tvmflow", "vm.tvmflow"),
        "emulation_program": ("program",),
    },
    optional_needs=(choose.NAME, "extract_tasks", "pick_best"),
    needs_of_parts=("emulation_program",),
    needs_all={"export": lambda recipe: run_location(recipe) in (LOCAL, CHROMIUM)},
    reads=("reference", "operators", "data"),
    tools=("apache-tvm", "apache-tvm-ffi", "numpy"),
    timeout_s=4 * 3600.0,
    compiles_kernels=True,
    find_faults=find_faults,
    run=RunTraits(
        measures=True, is_locked=False, is_gate=True, unlocked_settings=("target", "levels")
    ),
)

describe, explain = verdict_text.describe, verdict_text.explain

VERDICT: Final = "verdict.json"
"""The verdict without measured values: the same library and checks always give the same bytes."""
DELIVERED_VERDICT: Final = "verify.json"
"""The name of the verdict in `dist`."""
MEASUREMENTS: Final = "measurements.json"
"""All measurements: latencies, accuracy, errors, and the executor of the library."""


# ---------------------------------------------------------------- settings


def settings(recipe: Recipe, target: ResolvedTarget | PartitionedTarget) -> VerifySettings:
    """Return the checks, and where they run."""
    checks = recipe.verify
    min_speedup = recipe.tune.min_speedup
    levels = _isa_level_settings(recipe, target) if isinstance(target, ResolvedTarget) else {}
    run_on = run_location(recipe)
    if any(level.run_on == LOCAL and not level.not_verified for level in levels.values()):
        run_on = LOCAL
    is_partitioned = isinstance(target, PartitionedTarget)
    machine: MachineSettings | PartSettings
    if isinstance(target, PartitionedTarget):
        machine = PartSettings(parts={m.part: _machine_settings(m, run_on) for m in target.parts})
        recipes = [recipe.for_target(m.name) for m in target.parts]
    else:
        machine, recipes = _machine_settings(target, run_on), [recipe]
    return VerifySettings(
        verify=CheckSettings(**{**checks.model_dump(), "data": checks.data is not None}),
        inputs={
            name: InputSettings(range=spec.range, image=spec.image is not None)
            for name, spec in recipe.inputs.items()
            if spec.value is None
        },
        model={"kind": recipe.model.kind},
        target=machine,
        precision=max((r.kernels.precision for r in recipes), key=get_args(Precision).index),
        lowering=None
        if is_partitioned
        else replace(lowering_options(recipe), shares_weights=bool(levels)),
        schedules=None if is_partitioned else schedules_version(recipe),
        tune=None if min_speedup is None else SpeedupSettings(min_speedup=min_speedup),
        run_on=run_on,
        compare=compare_settings(recipe, target),
        tune_at={d.name: d.tune_at for d in recipe.list_dimensions() if d.tune_at} or None,
        levels=levels,
        prefix=identifier(recipe.name) if levels else "",
        quantized=recipe.quantize is not None,
        deliveries=_list_deliveries(recipe, target) if run_on == LOCAL else {},
    )


def _list_deliveries(
    recipe: Recipe, target: ResolvedTarget | PartitionedTarget
) -> dict[str, tuple[str, ...]]:
    if isinstance(target, PartitionedTarget):
        request, outputs = join.make_request(recipe, target), join.list_outputs(recipe)
    else:
        request, outputs = export.make_request(recipe, target), sorted(set(recipe.outputs))
    return {output: EXPORTERS[output].files(request) for output in outputs}


def _isa_level_settings(recipe: Recipe, target: ResolvedTarget) -> dict[str, IsaLevelSettings]:
    """Return for each ISA level where it runs: on this machine, in an emulator, or not at all."""
    may_emulate = run_location(recipe) == QEMU
    settings = {}
    for level in target.levels:
        reason, run_on = level.unrunnable_reason, LOCAL
        if reason and may_emulate:
            run_on = QEMU
            is_emulated = not UNEMULATED_FEATURES.intersection(level.features)
            reason = "" if is_emulated else f"{reason}, and qemu emulates no AVX-512"
        elif reason:
            reason += " (verify.run_on: qemu emulates other CPUs)"
        machine = MachineSettings.model_validate(level)
        settings[level.level] = IsaLevelSettings(
            machine=machine, run_on=run_on, not_verified=reason
        )
    return settings


def _machine_settings(target: ResolvedTarget, run_on: str) -> MachineSettings:
    reached_target = target if run_on == RPC else target._replace(remote=None)
    reached_target = reached_target.measured_isa_level
    return MachineSettings.model_validate(reached_target)


def deliveries(recipe: Recipe, target: ResolvedTarget | PartitionedTarget) -> Files:
    """Return the verdict and the measurements."""
    return ((VERDICT, DELIVERED_VERDICT), (MEASUREMENTS, MEASUREMENTS))


def compare_settings(
    recipe: Recipe, target: ResolvedTarget | PartitionedTarget
) -> CompareSettings | None:
    """Return the runtimes to compare the library with; None if the recipe asks for none."""
    requested, limited = recipe.verify.compare, tuple(recipe.verify.max_vs)
    if not requested and not limited:
        return None
    if requested != (AUTO,):
        runtimes = tuple(dict.fromkeys(n for n in (*requested, *limited) if n != FIXED))
        return CompareSettings(runtimes=runtimes, fixed=FIXED in requested)
    suitable = [
        name
        for name, peer in PEERS.items()
        if not peer.unsupported_reason(recipe.model.kind, device_of(target))
    ]
    runtimes = tuple(name for name in suitable if PEERS[name].is_installed())
    return CompareSettings(
        runtimes=runtimes, missing=tuple(name for name in suitable if name not in runtimes)
    )


def device_of(target: ResolvedTarget | PartitionedTarget) -> str:
    """Return the kind of device that calls the library: `cpu` for a partitioned target."""
    return "cpu" if isinstance(target, PartitionedTarget) else str(target.device["kind"])


def run(settings: VerifySettings, context: StageContext) -> Verdict:
    """Write the verdict and the measurements; VerifyFailed if the library is rejected."""
    from tvmflow.stages.verify.verification import verify

    return verify(settings, context)
