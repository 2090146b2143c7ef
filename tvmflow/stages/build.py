"""`build`: lowered kernels, the chosen schedules and the weights become object code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tvmflow.errors import StageError
from tvmflow.stages._base import StageContext

VERSION: Final = 1
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "import": ("model.json", "params.safetensors"),
    "extract_tasks": ("workloads.json",),
    "pick_best": ("chosen.json",),
}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """What the code is for; the number of cores changes only what tuning finds."""
    return {"target": target.codegen}


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Compile for the target; every chosen record must have been applied, or this fails."""
    import json
    import shutil

    from tvmflow.stages import _lowering
    from tvmflow.tuning import apply

    target = _lowering.make_target(settings["target"])
    mod = _lowering.load_ir(ctx.inputs["import/model.json"])
    lowered = _lowering.lower(mod, target)
    chosen = _read(ctx.inputs.get("pick_best/chosen.json"))
    tuned: list[str] = []
    if chosen:
        workloads = _read(ctx.inputs["extract_tasks/workloads.json"])
        lowered, tuned = apply.apply_chosen(lowered, chosen, workloads, target)
        if not tuned:
            raise StageError(
                f"none of the {len(chosen)} chosen schedules fits a kernel of this model",
                fix="this is a bug in tvmflow: the lowering of extract_tasks and build differ; please report it",
            )
    weights = _lowering.fold_weights(
        mod, _lowering.load_weights(ctx.inputs["import/params.safetensors"])
    )
    library = _lowering.compile_with_weights(lowered, weights, target)
    kernels = _lowering.kernel_names(lowered)

    def keep_objects(output: str, files: list[str], **_: Any) -> None:
        for file in sorted(files):
            shutil.copy(file, ctx.out)

    library.export_library(str(ctx.work / "unused.so"), fcompile=keep_objects)
    report = {"kernels": kernels, "tuned": sorted(tuned)}
    (ctx.out / "kernels.json").write_text(json.dumps(report, indent=1))
    return {"kernels": len(kernels), "tuned_kernels": len(tuned)}


def _read(path: Any) -> dict[str, Any]:
    import json

    return json.loads(path.read_text()) if path else {}
