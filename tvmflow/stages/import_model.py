"""`import`: a framework's model becomes Relax with weights as arguments, the weights, and a signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tvmflow.frontends import FRONTENDS
from tvmflow.stages._base import StageContext
from tvmflow.values import TensorSpec

VERSION: Final = 2
SCOPE: Final[Literal["model", "target"]] = "model"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {}
READS: Final = ("model",)
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0

MODEL: Final = "model.json"
PARAMS: Final = "params.safetensors"
SIGNATURE: Final = "signature.json"


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The source's kind and options, and the input shapes; not its path."""
    kind = recipe.model.kind
    return {
        "model": {"kind": kind, **FRONTENDS[kind].settings(recipe.model)},
        "inputs": {
            name: {"shape": list(spec.shape), "dtype": spec.dtype}
            for name, spec in recipe.inputs.items()
        },
    }


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Import the model, and write it in three parts so that each stage below can need only its own."""
    import json

    import tvm
    from safetensors.numpy import save_file

    model = dict(settings["model"])
    frontend = FRONTENDS[model.pop("kind")]
    inputs = tuple(
        TensorSpec(name, tuple(spec["shape"]), spec["dtype"])
        for name, spec in sorted(settings["inputs"].items())
    )
    loaded = frontend.load(ctx.inputs, inputs, model)
    (ctx.out / MODEL).write_text(tvm.ir.save_json(loaded.mod))
    save_file(loaded.params, ctx.out / PARAMS)
    signature = {
        "inputs": [spec.to_json() for spec in loaded.inputs],
        "outputs": [spec.to_json() for spec in loaded.outputs],
    }
    (ctx.out / SIGNATURE).write_text(json.dumps(signature, indent=1, sort_keys=True))
    return {
        "weights": len(loaded.params),
        "weight_bytes": sum(array.nbytes for array in loaded.params.values()),
        **signature,
    }
