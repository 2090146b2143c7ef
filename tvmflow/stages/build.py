"""`build`: lowered kernels, the chosen schedules and the weights become object code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from tvmflow.errors import StageError
from tvmflow.exporters import EXPORTERS, system_library
from tvmflow.stages import _kernels
from tvmflow.stages._base import StageContext
from tvmflow.targets import cuda_process
from tvmflow.targets.gpu import CUDA

VERSION: Final = 2
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "import": ("model.json", "params.safetensors"),
    "extract_tasks": ("workloads.json",),
    "pick_best": ("chosen.json",),
}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0

KERNELS: Final = "kernels.json"

TUNED: Final = "tuned"
"""In place of a road for a kernel whose schedule was found by a search."""


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """What the code is for, what shapes it besides tuning, and what else is compiled for the outputs."""
    forms = {EXPORTERS[output].FORM for output in recipe.outputs} - {""}
    return {
        "target": target.tvm,
        "lowering": _kernels.lowering(recipe),
        "schedules": _kernels.schedules(recipe),
        "forms": sorted(forms),
        **_prefix(recipe, forms),
    }


def _prefix(recipe: Any, forms: set[str]) -> dict[str, str]:
    """Code knows the recipe's name only where it bears it."""
    wanted = system_library.FORM in forms
    return {"prefix": system_library.prefix(recipe.name)} if wanted else {}


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Compile for the target; every chosen record must have been applied, or this fails.

    A kernel without a record gets the default schedule, where there is one for it.
    """
    if settings["target"]["kind"] == CUDA:
        paths = {name: str(path) for name, path in ctx.inputs.items()}
        found = cuda_process.in_its_process(
            f"{__name__}:{run_for_cuda.__name__}", dict(settings), paths, str(ctx.out)
        )
        return dict(found)
    return _compile(settings, ctx.inputs, ctx.out)


def run_for_cuda(
    settings: Mapping[str, Any], inputs: Mapping[str, str], out: str
) -> dict[str, Any]:
    """The same in a process that can compile for CUDA."""
    return _compile(settings, {name: Path(path) for name, path in inputs.items()}, Path(out))


def _compile(settings: Mapping[str, Any], inputs: Mapping[str, Path], out: Path) -> dict[str, Any]:
    import json

    from tvmflow import schedules
    from tvmflow.stages import _forms, _lowering
    from tvmflow.tuning import apply

    target = _lowering.make_target(settings["target"])
    mod = _lowering.load_ir(inputs["import/model.json"])
    lowered = _lowering.lower(mod, target, settings["lowering"])
    chosen = _read(inputs.get("pick_best/chosen.json"))
    tuned: list[str] = []
    if chosen:
        workloads = _read(inputs["extract_tasks/workloads.json"])
        lowered, tuned = apply.apply_chosen(lowered, chosen, workloads, target)
        if not tuned:
            raise StageError(
                f"none of the {len(chosen)} chosen schedules fits a kernel of this model",
                fix="this is a bug in tvmflow: the lowering of extract_tasks and build differ; please report it",
            )
    lowered, roads = schedules.by_rule(lowered, settings["target"], settings["schedules"])
    params = _lowering.load_weights(inputs["import/params.safetensors"])
    weights = _lowering.fold_weights(mod, params, target, settings["lowering"])
    _forms.keep_files(_lowering.compile_with_weights(lowered, weights, target), out)
    parts = _forms.Parts(lowered, weights, target, settings.get("prefix", ""))
    for form in settings["forms"]:
        (out / form).mkdir()
        _forms.FORMS[form](parts, out / form)
    kernels = _lowering.kernel_names(lowered)
    roads.update(dict.fromkeys(tuned, TUNED))
    (out / KERNELS).write_text(json.dumps(roads, indent=1, sort_keys=True))
    return {"kernels": len(kernels), "roads": _by_road(roads)}


def _by_road(roads: Mapping[str, str]) -> dict[str, list[str]]:
    """The kernels of each road, in alphabetical order."""
    found: dict[str, list[str]] = {}
    for name, road in sorted(roads.items()):
        found.setdefault(road, []).append(name)
    return dict(sorted(found.items()))


def _read(path: Any) -> dict[str, Any]:
    import json

    return json.loads(path.read_text()) if path else {}
