"""`import`: a framework's model becomes Relax with weights as arguments, the weights, and a signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from tvmflow.frontends import FRONTENDS
from tvmflow.stages._base import StageContext
from tvmflow.targets.resolve import JoinedTarget
from tvmflow.values import TensorSpec

VERSION: Final = 4
SCOPE: Final[Literal["model", "target"]] = "model"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {}
READS: Final = ("model",)
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0

MODEL: Final = "model.json"
PARAMS: Final = "params.safetensors"
SIGNATURE: Final = "signature.json"


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The source's kind and options, the input shapes, and where it is cut; not its path."""
    kind = recipe.model.kind
    tensors = target.tensors if isinstance(target, JoinedTarget) else ()
    return {
        "model": {"kind": kind, **FRONTENDS[kind].settings(recipe.model)},
        "inputs": {
            name: {"shape": list(spec.shape), "dtype": spec.dtype}
            for name, spec in recipe.inputs.items()
        },
        **({"tensors": list(tensors)} if tensors else {}),
    }


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Import the model, and write it in three parts so that each stage below can need only its own."""
    model = dict(settings["model"])
    frontend = FRONTENDS[model.pop("kind")]
    inputs = tuple(
        TensorSpec(name, tuple(spec["shape"]), spec["dtype"])
        for name, spec in sorted(settings["inputs"].items())
    )
    tensors = tuple(settings.get("tensors", ()))
    loaded = frontend.load(ctx.inputs, inputs, model, tensors)
    more = {"tensors": loaded.tensors} if tensors else {}
    described = {"inputs": loaded.inputs, "outputs": loaded.outputs, **more}
    return write(ctx.out, loaded.mod, loaded.params, **described)


def _operators(mod: Any) -> dict[str, int]:
    """How often each of TVM's operators is called."""
    from collections import Counter

    from tvm import relax

    found: Counter[str] = Counter()

    def count(expr: Any) -> None:
        if isinstance(expr, relax.Call) and hasattr(expr.op, "name"):
            found[str(expr.op.name).removeprefix("relax.")] += 1

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, count)
    return dict(sorted(found.items()))


def write(
    out: Path, mod: Any, params: Mapping[str, Any], **signature: Sequence[TensorSpec]
) -> dict[str, Any]:
    """A module, its weights by name, and what it takes and gives; the facts that reports show."""
    import json

    import tvm
    from safetensors.numpy import save_file

    described = {kind: [spec.to_json() for spec in specs] for kind, specs in signature.items()}
    (out / MODEL).write_text(tvm.ir.save_json(mod))
    save_file(dict(params), out / PARAMS)
    (out / SIGNATURE).write_text(json.dumps(described, indent=1, sort_keys=True))
    return {
        "weights": len(params),
        "weight_bytes": sum(array.nbytes for array in params.values()),
        "operators": _operators(mod),
        **described,
    }
