"""The lowering pipeline: which passes run for a target, and the dump of what they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from pydantic import TypeAdapter

from tests.support.kernels import FAST, PLAIN, weights_of
from tests.support.tuning import conv, dense, model, relu, reshape
from tvmflow.compiler import lowering, pipeline
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.options import LoweringOptions
from tvmflow.graph.ir_dump import IRDump
from tvmflow.recipe import Kernels
from tvmflow.targets.tvm_target import make_target

CPU = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
GPU = {
    "kind": "cuda",
    "arch": "sm_90",
    "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
}


def small_model() -> tvm.IRModule:
    return model(conv(16), relu, reshape(1, 16 * 36), dense(8), shape=(1, 3, 6, 6))


def dumped_passes(folder: Path, target: dict[str, Any], options: LoweringOptions) -> list[str]:
    """Return the names of the passes that run, from the files of a dump."""
    lowering.lower(small_model(), make_target(target), options, IRDump(folder))
    return [path.stem.partition("-")[2] for path in sorted(folder.glob("*.py"))]


STEPS = [
    step
    for phases in (pipeline.GRAPH_PHASES, pipeline.KERNEL_PHASES)
    for steps in phases.values()
    for step in steps
]
# Those that look for an operator that the small model has.
FOUND = {"relax.matmul", "relax.nn.conv2d", "relax.nn.relu", "relax.reshape"}
ALL = [step.name for step in STEPS if not step.operators or step.operators & FOUND]
ONLY_CPU = {
    *("fold_weight_dequantize", "blocked_layout", "pack_matmuls", "fuse_requantize"),
    "vectorize_math",
}


def test_every_pass_but_those_of_gpus_runs_for_a_cpu(tmp_path: Path) -> None:
    """One needs a CPU that adds float16; those that look for operators run where the model has them."""
    others = (
        "mixed_precision",
        "cast_constants",
        "cast_data",
        "cast_integers",
        "channels_last_weights",
    )
    for_cpus = [name for name in ALL if name not in others]
    assert dumped_passes(tmp_path / "vnni", {**CPU, "mcpu": "cascadelake"}, FAST) == for_cpus
    assert dumped_passes(tmp_path / "avx2", CPU, FAST) == for_cpus


@pytest.mark.parametrize("step", [step for step in STEPS if step.operators], ids=lambda s: s.name)
def test_a_pass_leaves_models_without_its_operators_as_they_are(
    step: pipeline.LoweringPass,
) -> None:
    """It is not run for them, so that it must have nothing to do."""
    mod = model(relu, reshape(1, 3 * 36), shape=(1, 3, 6, 6))
    target = make_target({**CPU, "mcpu": "cascadelake"})
    cpu = CpuModel.from_target(target.export())
    transformed = step.transform(mod, LoweringContext(target, cpu, FAST))
    tvm.ir.assert_structural_equal(transformed, mod, map_free_vars=True)


def test_a_plain_recipe_runs_no_pass_that_changes_layouts_or_math(tmp_path: Path) -> None:
    passes = dumped_passes(tmp_path, CPU, PLAIN)
    skipped = {"blocked_layout", "pack_matmuls", "vectorize_math"}
    assert not skipped & set(passes)


@pytest.mark.parametrize("precision", ["model", "mixed"])
def test_passes_for_cpus_do_not_run_for_a_gpu(tmp_path: Path, precision: Any) -> None:
    """Mixed precision has a pass of its own there."""
    passes = dumped_passes(tmp_path, GPU, replace(FAST, precision=precision))
    assert not ONLY_CPU & set(passes)
    assert ("mixed_precision" in passes) == (precision == "mixed")
    assert "channels_last_weights" in passes


def test_the_number_of_cores_does_not_change_kernels() -> None:
    """A pass sees the target alone, not the machine that lowers."""
    one, two = (
        lowering.lower(small_model(), make_target({**CPU, "num-cores": cores}), FAST).mod
        for cores in (1, 64)
    )
    tvm.ir.assert_structural_equal(one, two)


def test_lowering_leaves_the_imported_module_as_it_was() -> None:
    mod = small_model()
    before = mod.script()
    lowering.lower(mod, make_target(CPU), FAST)
    assert mod.script() == before


def test_weights_come_in_the_order_of_mains_parameters() -> None:
    """Packed, and padded to whole vectors."""
    mod = small_model()
    lowered = lowering.lower(mod, make_target(CPU), FAST)
    assert lowered.weight_names == ("w0", "w1")
    main = lowered.mod["main"]
    shapes = [[int(n) for n in var.ty.shape] for var in main.params[1:]]
    weights = lowered.compute_weights(weights_of(mod))
    assert [list(weight.shape) for weight in weights] == shapes == [[2, 3, 3, 3, 8], [1, 576, 8]]
    original = weights_of(mod)["w0"].reshape(2, 8, 3, 3, 3).transpose(0, 2, 3, 4, 1)
    np.testing.assert_array_equal(weights[0], original)


def test_a_failing_pass_leaves_the_dump_up_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last file is the input of the pass that failed."""

    def fail(mod: tvm.IRModule) -> tvm.IRModule:
        raise ValueError("broken")

    broken = pipeline.LoweringPass("broken", lambda mod, _: fail(mod))
    phases = {**pipeline.GRAPH_PHASES, "layouts": (broken,)}
    monkeypatch.setattr(pipeline, "GRAPH_PHASES", phases)
    with pytest.raises(ValueError, match="broken"):
        dumped_passes(tmp_path, CPU, FAST)
    files = sorted(path.name for path in tmp_path.iterdir())
    before = [step for phase in ("operators", "inference form") for step in phases[phase]]
    names = [step.name for step in before if step.name in ALL]
    assert files == [*(f"{i:02d}-{name}.py" for i, name in enumerate(names)), "timings.txt"]


def test_a_dump_replaces_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    """Files that it did not write stay."""
    (tmp_path / "notes.txt").write_text("mine")
    before = dumped_passes(tmp_path, CPU, FAST)
    after = dumped_passes(tmp_path, CPU, PLAIN)
    assert len(after) < len(before)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    timings = (tmp_path / "timings.txt").read_text().splitlines()
    assert [line.split("-", 1)[1] for line in timings] == after


def test_options_of_a_recipe_are_its_kernels_without_schedules() -> None:
    """A new option of `kernels` must be part of the key."""
    settings = LoweringOptions().to_json()
    options = set(settings) - {"version"}
    assert options == set(Kernels.model_fields) - {"schedules"}
    assert TypeAdapter(LoweringOptions).validate_python(settings) == LoweringOptions()
