"""`cut`: a part of an imported model, as a model of its own. Plans add it where a target is in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tvmflow.stages import import_model
from tvmflow.stages._base import StageContext
from tvmflow.values import TensorSpec

VERSION: Final = 1
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "import": (import_model.MODEL, import_model.PARAMS, import_model.SIGNATURE)
}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The tensors that parts before it have given, and those that it gives."""
    return {"given": list(target.given), "until": list(target.until)}


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Write the part as `import` writes a model: the stages after it see no difference."""
    import json

    from tvmflow.passes.cut import Signature, cut_out
    from tvmflow.stages import _lowering

    described = json.loads(ctx.inputs["import/signature.json"].read_text())
    signature = Signature(
        *(
            tuple(map(TensorSpec.from_json, described[kind]))
            for kind in ("inputs", "outputs", "tensors")
        )
    )
    mod = _lowering.load_ir(ctx.inputs["import/model.json"])
    part = cut_out(mod, signature, settings["given"], settings["until"])
    main = part.mod["main"]
    params = _lowering.load_weights(ctx.inputs["import/params.safetensors"])
    kept = {var.name: params[var.name] for var in main.params[len(part.inputs) :]}
    return import_model.write(ctx.out, part.mod, kept, inputs=part.inputs, outputs=part.outputs)
